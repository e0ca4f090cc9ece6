"""The size of all that a method keeps, in per cent of the benchmark's network.

Counted are numbers that are not 0. The published rule, of the APD paper's code, counts one head and
one set of biases, the newest task's; the other counts every task's. Both are held against the
weights of one network with a head for every task.
"""

from collections.abc import Iterable, Mapping

from torch import Tensor

from ..tree import leaves, level
from ..types import State
from .base import Network

PUBLISHED, WHOLE = "capacity by the published rule, %", "capacity with all heads, %"


def capacity(network: Network, state: State) -> Mapping[str, float]:
    """By both rules, of a state whose level "own" holds each task's head, biases and norm layers.

    All the rest counts as shared, but for whole numbers, such as widths and memberships.
    """
    own = level(state, "own")
    if not own:
        return {}
    shared = _nonzero(t for path, t in leaves(state) if not path.startswith("own/"))
    each = [
        _nonzero(t for name, t in leaves(level(own, str(task))) if name not in network.buffers)
        for task in range(len(own))
    ]
    return {
        PUBLISHED: 100 * (shared + each[-1]) / network.weights,
        WHOLE: 100 * (shared + sum(each)) / network.weights,
    }


def _nonzero(tensors: Iterable[Tensor]) -> int:
    return sum(int(t.count_nonzero()) for t in tensors if t.is_floating_point())
