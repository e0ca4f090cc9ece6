"""Multitask learning: all tasks at once, the bound that continual learners are held against."""

from dataclasses import dataclass
from typing import ClassVar

from .base import About, Method


@dataclass(frozen=True)
class Multitask(Method):
    """Plain SGD on all tasks together.

    Where all tasks share a head, a batch mixes them; where each has its own, a batch is of one
    task, drawn anew in every epoch, so that BatchNorm sees in training what it sees in the test.
    """

    about: ClassVar[About] = About(
        family="bound", stores="all data", paper="-", task_id_at_test=False, joint=True
    )
