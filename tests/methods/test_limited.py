"""The limit on a step's gradient: at what length it acts, and what it makes of a run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_close
from method_parts import bound, mlp_heads, moved_at_random, some_samples
from small_runs import run, some_tasks

from trgp.engine.errors import InputError, RunError
from trgp.engine.train import train_step
from trgp.methods import Batch
from trgp.methods.ewc import EWC
from trgp.methods.limited import shortened
from trgp.methods.lwf import LwF


def test_a_gradient_is_shortened_as_a_whole_to_the_limit() -> None:
    grads = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    for limit, factor in ((10.0, 1.0), (5.0, 1.0), (1.0, 0.2)):
        for name, g in shortened(grads, limit).items():
            assert_close(g, factor * grads[name])
    nothing = {"a": torch.zeros(2)}
    assert torch.equal(shortened(nothing, 1.0)["a"], nothing["a"])


@pytest.mark.parametrize("kind", [EWC, LwF])
def test_a_step_is_as_long_as_the_rate_times_the_limit(kind: Any) -> None:
    """In the direction that it has without one."""
    batch = Batch(*some_samples(8, 8), 2, 2)
    steps = []
    for limit in (0.0, 1e9, 1e-3):
        method, params = bound(kind(gradient_limit=limit), mlp_heads, True)
        after, _, _ = train_step(method, params, {}, batch, 0.5, sorted(params), [])
        steps.append(torch.cat([(after[n] - params[n]).flatten() for n in sorted(params)]))
    free, wide, narrow = steps
    assert torch.equal(free, wide)
    assert float(narrow.norm()) == pytest.approx(0.5e-3, rel=1e-9)
    assert_close(narrow / narrow.norm(), free / free.norm())


def test_the_limit_is_on_the_penalty_too() -> None:
    method, params = bound(EWC(strength=1e6, gradient_limit=0.1), mlp_heads, True)
    old = moved_at_random(params)
    state: Any = {"fisher": {n: torch.ones_like(p) for n, p in params.items()}, "old": old}
    batch = Batch(*some_samples(8, 8), 1, 1)
    after, _, _ = train_step(method, params, state, batch, 1.0, sorted(params), [])
    moved = torch.cat([(after[n] - params[n]).flatten() for n in sorted(params)])
    assert float(moved.norm()) == pytest.approx(0.1)


def test_springs_that_diverge_hold_with_a_limit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"strength": 1e6, "epochs": 4, "lr": 0.1}
    with pytest.raises(RunError, match="task"):
        run(some_tasks(2), "ewc", tmp_path, **options)
    result = run(some_tasks(2), "ewc", tmp_path, gradient_limit=0.5, **options)
    assert result.acc > 0.3


@pytest.mark.parametrize("method", ["ewc", "lwf"])
def test_a_negative_limit_is_refused(method: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^gradient_limit must be"):
        run(some_tasks(1), method, tmp_path, gradient_limit=-1.0)
