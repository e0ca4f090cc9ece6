"""Fine-tuning: task after task by plain SGD, with nothing against forgetting."""

from dataclasses import dataclass
from typing import ClassVar

from .base import About, Method


@dataclass(frozen=True)
class Finetune(Method):
    """Plain SGD, task after task: the baseline of every method."""

    about: ClassVar[About] = About(
        family="baseline", stores="nothing", paper="-", task_id_at_test=False
    )
