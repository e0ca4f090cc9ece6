"""What a finished task keeps: its trust region, its scalings, its own copies."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .core.precision import full_precision
from .core.subspace import Memory, columns_of, put_columns
from .types import TaskId


@dataclass
class Change:
    """How a task's effective weight in one layer differs from the shared one, inside span(M).

    Either its scalings S_j = Q_j - I (g, r_j, r_j), one a trusted task, or, where that is smaller,
    D = (W_eff - W) M (g, o, u) at the u columns that the trusted tasks' bases use together.
    """

    trusted: list[TaskId]
    scalings: list[Tensor]
    shift: Tensor | None = None

    @classmethod
    def of(cls, trusted: list[TaskId], scalings: Sequence[Tensor], memory: Memory) -> "Change":
        full = cls(trusted, [S.detach().to(memory.C, copy=True) for S in scalings])
        return cls.of_shift(trusted, full.coordinates(memory), memory) or full

    @classmethod
    def of_shift(cls, trusted: list[TaskId], D: Tensor, memory: Memory) -> "Change | None":
        """By D (g, o, m), or None if the scalings would be smaller."""
        columns = columns_of(D, cls(trusted, [])._union(memory))
        ranks = [int(memory.masks[j].sum(1).max()) for j in trusted]
        if columns.numel() < len(D) * sum(r * r for r in ranks):
            return cls(trusted, [], columns)
        return None

    @full_precision
    def coordinates(self, memory: Memory) -> Tensor:
        """(W_eff - W) M, of shape (g, o, m)."""
        m = memory.M.shape[2]
        if self.shift is not None:
            return put_columns(self.shift, self._union(memory), m)
        total = torch.zeros_like(memory.C)
        for j, S in zip(self.trusted, self.scalings, strict=True):
            mask = memory.masks[j]
            total += put_columns(columns_of(memory.C, mask) @ S, mask, m)
        return total

    def _union(self, memory: Memory) -> Tensor:
        masks = [memory.masks[j] for j in self.trusted]
        width = max(mask.shape[1] for mask in masks)
        return torch.stack([F.pad(mask, (0, width - mask.shape[1])) for mask in masks]).any(0)

    @property
    def tensors(self) -> list[Tensor]:
        return self.scalings if self.shift is None else [self.shift]

    def to(self, like: Tensor) -> "Change":
        shift = self.shift.to(like) if self.shift is not None else None
        return Change(self.trusted, [S.to(like) for S in self.scalings], shift)


@dataclass
class TaskRecord:
    """One learnt task."""

    selected: dict[str, list[TaskId]]  # per layer, strongest first
    changes: dict[str, Change]  # per layer with a trust region
    copies: dict[str, Tensor]  # per-task parameters and buffers, by name

    @property
    def nbytes(self) -> int:
        kept = [t for change in self.changes.values() for t in change.tensors]
        return sum(t.nbytes for t in [*kept, *self.copies.values()])
