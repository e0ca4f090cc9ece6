"""Size of everything that a method stores, in per cent of the benchmark's network.

Both rules count nonzero entries. The published rule, from the APD paper's code, counts one head and
one set of biases, those of the newest task; the other rule counts those of every task. Both are
divided by the weights of one network with a head per task.
"""

from collections.abc import Iterable, Mapping

from torch import Tensor

from ..tree import leaves, level
from ..types import State
from .base import Network

PUBLISHED, WHOLE = "capacity by the published rule, %", "capacity with all heads, %"


def capacity(network: Network, state: State) -> Mapping[str, float]:
    """Capacity by both rules; the level "own" of the state has each task's head, biases and norms.

    Everything else counts as shared, except integers, such as widths and memberships.
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
