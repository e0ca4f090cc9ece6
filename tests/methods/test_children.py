"""Children: networks of any fitting shape, trained on a task's samples through the engine."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from helpers import assert_close
from method_parts import ConvHeads, bound, context, easy_tasks, mlp_heads
from small_runs import Make

from trgp.benchmarks.data import Tensors
from trgp.draws import seed_of
from trgp.engine.batches import Part
from trgp.engine.config import Training
from trgp.engine.divergence import DivergenceError
from trgp.engine.train import Epoch, Work, train_epoch
from trgp.methods import About, Batch, Method
from trgp.methods.base import Child, TrainedChild
from trgp.methods.finetune import Finetune


@dataclass(frozen=True)
class Masked(Method):
    """Weights move where a mask of the state lets them, and steps are counted."""

    about: ClassVar[About] = About("test", "masks", "-", task_id_at_test=False)
    moving: ClassVar[tuple[str, ...]] = ("count",)

    def step(self, params: Any, grads: Any, state: Any, batch: Batch, lr: Any) -> Any:
        held = {n: g * state["free"][n] if n in state["free"] else g for n, g in grads.items()}
        new, _ = super().step(params, held, state, batch, lr)
        return new, {"count": state["count"] + 1}


def a_context(
    method: Method, params: Any, shape: tuple[int, ...], captured: bool = False, **training: Any
) -> Any:
    (x, y), (vx, vy) = easy_tasks(1, *shape)[0]
    ctx = context(method, params, (x.double(), y), batch_size=8)
    usual = {"batch": 8, "lr": 0.1, "test_batch": 20} | training
    valid = Tensors(vx.double(), vy)
    return replace(ctx, captured=captured, training=Training(**usual), valid=valid)


def narrow(params: Any) -> Any:
    """The perceptron for 8 features with 5 and 4 hidden units in place of 12 and 10."""
    return {
        "layers.0.weight": params["layers.0.weight"][:5].clone(),
        "layers.1.weight": params["layers.1.weight"][:4, :5].clone(),
        **{f"heads.{t}.weight": params[f"heads.{t}.weight"][:, :4].clone() for t in range(3)},
    }


def equal(one: TrainedChild, other: TrainedChild) -> bool:
    return (one.loss, one.accuracy) == (other.loss, other.accuracy) and all(
        torch.equal(t, other.params[n]) for n, t in one.params.items()
    )


@pytest.mark.parametrize("make", [mlp_heads, lambda: ConvHeads(dropout=0.2)])
def test_a_child_is_trained_as_a_task_is(make: Make) -> None:
    """By the same epochs, at the run's rate, with figures of the validation samples."""
    shape = (8,) if make is mlp_heads else (3, 8, 8)
    method, params = bound(Finetune(), make, True)
    before = {name: tensor.clone() for name, tensor in params.items()}
    ctx = a_context(method, params, shape, lr_decay=0.5)
    (found,) = ctx.train_children([Child(method, params, {})], 3, "trial")
    assert all(torch.equal(t, params[n]) for n, t in before.items())
    expected = {name: tensor.clone() for name, tensor in params.items()}
    names = sorted(method.network.trainable)
    for k in range(3):
        part = Part(0, 0, ctx.train)
        epoch = Epoch(seed_of(0, "children", "trial"), 0, k, [part], 8, 0.1 / 2**k, names)
        expected = dict(train_epoch(method, Work(expected, {}, epoch)).params)
    for name, tensor in expected.items():
        assert_close(found.params[name], tensor, 1e-12)
    method.network.module.eval()
    logits = method.network(found.params, ctx.valid.x, 0)
    assert found.accuracy == float((logits.argmax(1) == ctx.valid.y).double().mean())
    loss = torch.nn.functional.cross_entropy(logits, ctx.valid.y)
    assert found.loss == pytest.approx(float(loss))
    other = ctx.train_children([Child(method, params, {})], 3, "another purpose")
    assert not equal(found, other[0])


@pytest.mark.parametrize("captured", [False, True])
def test_children_have_shapes_and_masks_of_their_own(captured: bool) -> None:
    """Together they come to the bits that each comes to alone, and captured to the eager ones."""
    method, params = bound(Masked(), mlp_heads, True)
    names = narrow(params)
    count = torch.zeros((), dtype=torch.float64)
    children = [
        Child(method, each, {"free": {"layers.1.weight": mask}, "count": count})
        for each in (params, narrow(params))
        for mask in (
            torch.zeros_like(each["layers.1.weight"]),
            torch.ones_like(each["layers.1.weight"]),
        )
    ]
    # The last shares the steps of the one before: the same mask, from other weights.
    children.append(
        children[-1]._replace(params={name: 2 * tensor for name, tensor in names.items()})
    )
    ctx = a_context(method, params, (8,), captured)
    found = ctx.train_children(children, 10, "trial")
    alone = [
        a_context(method, params, (8,)).train_children([child], 10, "trial")[0]
        for child in children
    ]
    assert all(map(equal, found, alone))
    for child, trained in zip(children, found, strict=True):
        moved = trained.params["layers.1.weight"] - child.params["layers.1.weight"]
        assert bool(moved.any()) == bool(child.state["free"]["layers.1.weight"].any())
        assert float(trained.state["count"]) == 30  # ten epochs of 20 samples in batches of 8
        assert float(child.state["count"]) == 0
    assert found[4].params["layers.0.weight"].shape == (5, 8)


def test_with_a_patience_the_best_weights_come_back() -> None:
    """Those of the epoch with the lowest validation loss, and its figures."""
    method, params = bound(Finetune(), mlp_heads, True)
    ctx = a_context(method, params, (8,), patience=30, lr=2.0)
    child = Child(method, params, {})
    each = [
        replace(ctx, training=replace(ctx.training, patience=0)).train_children([child], k, "x")[0]
        for k in range(1, 9)
    ]
    (best,) = ctx.train_children([child], 8, "x")
    lowest = min(each, key=lambda trained: trained.loss)
    assert lowest is not each[-1]
    assert equal(best, lowest)


def test_without_validation_samples_the_train_samples_measure() -> None:
    method, params = bound(Finetune(), mlp_heads, True)
    ctx = replace(a_context(method, params, (8,)), valid=None)
    (found,) = ctx.train_children([Child(method, params, {})], 1, "x")
    logits = method.network(found.params, ctx.train.x, 0)
    assert found.accuracy == float((logits.argmax(1) == ctx.train.y).double().mean())


@pytest.mark.parametrize("captured", [False, True])
def test_a_child_that_diverges_says_where(captured: bool) -> None:
    method, params = bound(Finetune(), mlp_heads, True)
    ctx = a_context(method, params, (8,), captured, lr=1e200)
    with pytest.raises(DivergenceError, match="task 1, epoch 1"):
        ctx.train_children([Child(method, params, {})], 2, "x")
