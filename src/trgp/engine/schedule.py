"""Cuts of the learning rate, and the end of a task."""

import math
from dataclasses import dataclass

from .config import Training


@dataclass
class Schedule:
    """The learning rate of the next epoch, from the validation losses so far."""

    lr: float
    epoch: int = 0  # finished epochs
    best: float = math.inf
    waited: int = 0
    over: bool = False

    def after_epoch(self, valid_loss: float, training: Training) -> bool:
        """Count an epoch; return whether its weights are the best so far and must be kept."""
        self.epoch += 1
        self.over = self.epoch >= training.epochs
        self.lr *= training.lr_decay
        if not training.patience:
            return False
        if valid_loss < self.best:
            self.best = valid_loss
            self.waited = 0
            return True
        self.waited += 1
        if self.waited >= training.patience:
            self.lr /= training.lr_factor
            self.waited = 0
            self.over = self.over or self.lr < training.lr_min
        return False
