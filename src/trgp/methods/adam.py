"""Adam (Kingma and Ba, ICLR 2015) as a pure function, for methods published with it."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..tree import level, tensors
from ..types import Params, Rate, State
from .base import Grads

ADAM = "adam"
"""The key of the moments in a method's state; the method lists it in `moving`."""
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


def moments(params: Params, names: Iterable[str]) -> State:
    """Initial moments (0) for the named parameters, and a step count."""
    own = sorted(names)
    zeros = {name: torch.zeros_like(params[name]) for name in own}
    return {
        "mean": zeros,
        "square": dict(zeros),
        "steps": torch.zeros((), dtype=torch.float64, device=params[own[0]].device),
    }


def adam(
    params: Params, grads: Grads, state: State, lr: Rate
) -> tuple[dict[str, Tensor], dict[str, State]]:
    """Return the parameters after a step, and the new moments under their key of the state.

    A gradient that was always 0 moves nothing, so masked weights keep their exact bits.
    """
    before = level(state, ADAM)
    mean, square = tensors(level(before, "mean")), tensors(level(before, "square"))
    steps = tensors(before)["steps"] + 1
    bias1, bias2 = 1 - BETA1**steps, 1 - BETA2**steps
    new = dict(params)
    for name, g in grads.items():
        if not isinstance(g, Tensor):
            raise TypeError(f"The gradient of {name} comes as factors; Adam needs the whole.")
        mean[name] = BETA1 * mean[name] + (1 - BETA1) * g
        square[name] = BETA2 * square[name] + (1 - BETA2) * g.square()
        size = (square[name] / bias2).sqrt() + EPSILON
        new[name] = (params[name] - lr * (mean[name] / bias1) / size).to(params[name].dtype)
    return new, {ADAM: {"mean": mean, "square": square, "steps": steps}}
