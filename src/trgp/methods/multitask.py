"""Multitask learning: all tasks at once, the upper bound for continual learners."""

from dataclasses import dataclass
from typing import ClassVar

from .base import About, Method


@dataclass(frozen=True)
class Multitask(Method):
    """Plain SGD on all tasks together.

    With one shared head, a batch mixes tasks. With a head per task, a batch is from one task and is
    redrawn in every epoch, so that BatchNorm sees the same kind of batch as in evaluation.
    """

    about: ClassVar[About] = About(
        family="bound", stores="all data", paper="-", task_id_at_test=False, joint=True
    )
