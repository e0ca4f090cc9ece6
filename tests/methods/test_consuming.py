"""Steps change nothing that they are given, unless it is given away and they can do without it."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from trgp.core.donation import donated, fused_sgd
from trgp.methods import METHODS
from trgp.methods.base import Batch, Grads, sgd
from trgp.methods.finetune import Finetune
from trgp.types import Params, Rate, State

PARAMS = {"w": torch.arange(4.0), "b": torch.ones(2, dtype=torch.float64)}
GRADS = {"w": torch.ones(4), "b": torch.full((2,), 2.0, dtype=torch.float64)}


def test_sgd_writes_into_what_is_given_away_alone() -> None:
    given: dict[str, Tensor] = {name: tensor.clone() for name, tensor in PARAMS.items()}
    new = sgd(given, GRADS, 0.5)
    assert all(torch.equal(given[name], PARAMS[name]) for name in given)
    with donated():
        again = sgd(given, GRADS, 0.5)
    for name, tensor in given.items():
        assert again[name] is tensor
        assert torch.equal(tensor, new[name])
        assert torch.equal(tensor, PARAMS[name] - 0.5 * GRADS[name])


@pytest.mark.parametrize(
    "lr", [0.1, torch.tensor(0.1, dtype=torch.float64)], ids=["number", "lies"]
)
def test_in_one_pass_it_is_the_same(lr: float | Tensor) -> None:
    """Also along a gradient that lies otherwise than its parameter."""
    draw = torch.Generator().manual_seed(0)
    params, grads = ([torch.randn(5, 7, generator=draw) for _ in range(2)] for _ in range(2))
    grads[1] = grads[1].t().contiguous().t()
    wanted = [p - 0.1 * g for p, g in zip(params, grads, strict=True)]
    fused_sgd(params, grads, lr)
    torch.testing.assert_close(params, wanted)


def test_all_methods_can_do_without() -> None:
    assert all(kind().may_consume() for kind in METHODS.values())


@dataclass(frozen=True)
class Path(Finetune):
    """Reads the old parameters after the step."""

    def step(
        self, params: Params, grads: Grads, state: State, batch: Batch, lr: Rate
    ) -> tuple[dict[str, Tensor], State]:
        new, _ = super().step(params, grads, state, batch, lr)
        return new, {"path": new["w"] - params["w"]}


def test_a_step_of_ones_own_is_not_given_anything_away() -> None:
    """It inherits what its parent says, which was said of another step."""
    assert Path.consumes
    assert not Path().may_consume()
