"""Batches many at a time: the same ones, each computed as if it were alone."""

from typing import Any

import pytest
import torch
from helpers import assert_close
from method_parts import bound, context, one_head, some_samples
from torch import Tensor

from trgp.methods import stacks as module
from trgp.methods.finetune import Finetune
from trgp.methods.stacks import batch_count, each, stacks


@pytest.mark.parametrize("size", [1, 2, 5, 20])
@pytest.mark.parametrize("most", [None, 1, 3])
def test_the_batches_are_those_of_the_task_in_their_order(size: int, most: int | None) -> None:
    method, params = bound(Finetune(), one_head)
    for samples in range(1, 24):
        ctx = context(method, params, some_samples(samples, 8))
        alone = list(ctx.batches(size, "purpose"))
        found = list(stacks(ctx, size, "purpose", most))
        joined = size == 1  # a last batch by itself joins the others
        assert max(len(stack.y) for stack in found) <= (most or samples) + joined
        together = [pair for s in found for pair in zip(s.x, s.y, strict=True)]
        assert len(together) == len(alone) == batch_count(samples, size)
        for (x, y), batch in zip(together, alone, strict=True):
            assert torch.equal(x, batch.x)
            assert torch.equal(y, batch.y)


def test_no_more_samples_come_at_a_time_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLES", 12)
    method, params = bound(Finetune(), one_head)
    ctx = context(method, params, some_samples(100, 8))
    for size, most in ((5, 2), (4, 3), (20, 1)):
        assert max(len(stack.y) for stack in stacks(ctx, size, "purpose")) == most


def centred(x: Tensor) -> dict[str, Tensor]:
    return {"x": x - x.mean(0), "size": x.square().sum()}


def looking(x: Tensor) -> dict[str, Tensor]:
    return centred(x) if bool(x.sum() > -1e9) else {}


@pytest.mark.parametrize("f", [centred, looking])
def test_every_entry_is_computed_by_itself(f: Any) -> None:
    """Also by what cannot be vmapped."""
    x, _ = some_samples(6, 8)
    found = each(f, x.view(3, 2, 8))
    for k in range(3):
        expected = f(x[2 * k : 2 * k + 2])
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert_close(found[key][k], tensor)


def test_an_error_of_the_networks_own_is_the_one_that_is_seen() -> None:
    def wrong(x: Tensor) -> Tensor:
        raise RuntimeError("of its own")

    with pytest.raises(RuntimeError, match="of its own"):
        each(wrong, torch.ones(2, 3))
