"""Children: networks that a method has trained on a task's samples beside the task's own epochs."""

from typing import NamedTuple

from ..tree import State
from .base import Method, Params


class Child(NamedTuple):
    """A network to train: where it starts, and the method whose loss and step train it.

    Its tensors may have other shapes than the benchmark's network, as long as they fit each other.
    """

    method: Method
    params: Params
    state: State


class TrainedChild(NamedTuple):
    """A child after its epochs, with its loss and accuracy on the task's validation samples."""

    params: Params
    state: State
    loss: float
    accuracy: float
