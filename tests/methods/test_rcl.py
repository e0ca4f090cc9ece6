"""RCL: trials of every size in one shape, what may move, rewards, and the controller."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close
from method_parts import ConvHeads, bound, context, easy_tasks, mlp_heads, some_samples
from small_runs import Make, Watched, run, watched
from torch import Tensor

from trgp.engine.children import train_children
from trgp.engine.context import Context
from trgp.engine.train import train_step, trained_names
from trgp.methods import Batch
from trgp.methods.base import Child
from trgp.methods.capacity import PUBLISHED, WHOLE
from trgp.methods.controller import Controller
from trgp.methods.growing import FREE, widened
from trgp.methods.rcl import RCL

SHAPES: dict[Make, tuple[int, ...]] = {mlp_heads: (8,), ConvHeads: (3, 8, 8)}
QUICK: dict[str, Any] = {"trials": 4, "per_round": 2, "trial_epochs": 2, "growth": 0.4}


class WatchedRCL(Watched, RCL):
    pass


def second_task(make: Make, **options: Any) -> tuple[RCL, Any, dict[str, Tensor], Any]:
    """The method, the context of a second task, and the widest child with masks of what is new."""
    method, begun = bound(RCL(**QUICK | options), make, True)
    samples = some_samples(12, *SHAPES[make])
    params, state = method.begin_task(context(method, begun, samples, 0))
    params, state = method.end_task(context(method, params, samples, 0, state))
    ctx = context(method, params, some_samples(12, *SHAPES[make], seed=1), 1, state)
    start = {n: p for n, p in params.items() if "heads" not in n or "heads.1." in n}
    widest = [n + k for n, k in zip(method.widths(state), method.most, strict=True)]
    grown, fresh = widened(method.chain, start, widest, 0, "units", 1)
    return method, ctx, grown, fresh


# ---- children --------------------------------------------------------------------------------


@pytest.mark.parametrize("added", [(0, 0), (2, 0), (0, 3), (3, 1)])
def test_a_child_computes_and_learns_as_a_network_of_its_size(added: tuple[int, int]) -> None:
    """Though it has the shape of the widest: what it lacks is 0 and stays so."""
    method, ctx, grown, fresh = second_task(mlp_heads)
    child = method.child(ctx, grown, fresh, list(added))
    widths = [12 + added[0], 10 + added[1]]
    assert child.params["layers.1.weight"].shape == (14, 17)
    small = method.chain.part(child.params, widths)
    masks = method.chain.part(child.state[FREE], widths)  # type: ignore[arg-type]
    batch = Batch(ctx.train.x, ctx.train.y, 1, 1)
    params, state = child.params, child.state
    for _ in range(3):
        free = {n: small[n].clone().requires_grad_() for n in small if n in masks}
        logits = method.network(free, batch.x, 1)
        assert_close(method.network(params, batch.x, 1), logits.detach())
        loss = F.cross_entropy(logits, batch.y)
        found = torch.autograd.grad(loss, list(free.values()))
        names = trained_names(method, params, 1)
        params, state, value = train_step(method, params, state, batch, 0.01, names, [])
        assert_close(value, loss.detach())
        for (name, w), g in zip(free.items(), found, strict=True):
            inside = method.chain.part({name: params[name]}, widths)[name]
            assert int((params[name] != 0).sum()) <= w.numel()
            if float(state["adam"]["steps"]) == 1:  # type: ignore[index,arg-type]
                pull = (g + method.decay * w) * masks[name]
                assert_close(inside, w - 0.01 * pull / (pull.abs() + 1e-8), 1e-6)
            small[name] = inside
    for name in method.chain.weights:
        old = method.chain.part(ctx.params, (12, 10))[name]
        assert torch.equal(params[name][tuple(slice(0, n) for n in old.shape)], old)
    assert not torch.equal(small["heads.1.weight"], child.params["heads.1.weight"][:, : widths[1]])


@pytest.mark.parametrize("make", SHAPES)
def test_weights_from_new_units_into_old_ones_move_too(make: Make) -> None:
    method, ctx, grown, fresh = second_task(make)
    child = method.child(ctx, grown, fresh, method.most)
    (found,) = ctx.train_children([child], 3, "x")
    for name, old in zip(method.chain.weights[1:], method.widths(ctx.state)[1:], strict=True):
        before = method.chain.part(ctx.params, method.widths(ctx.state))[name]
        into = found.params[name][:old, before.shape[1] :]
        assert (into != child.params[name][:old, before.shape[1] :]).all()
        assert torch.equal(found.params[name][:old, : before.shape[1]], before)


def test_the_children_of_a_call_share_one_captured_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """And come to the bits of eager ones."""
    from dataclasses import replace

    from trgp.engine import children

    made = []
    whole = children.CapturedTask

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(args)
        return whole(*args, **kwargs)

    monkeypatch.setattr(children, "CapturedTask", counted)
    method, ctx, grown, fresh = second_task(mlp_heads)
    tried = [method.child(ctx, grown, fresh, added) for added in ([0, 1], [5, 0], [2, 2])]
    captured = replace(ctx, captured=True).train_children(tried, 15, "x")
    assert len(made) == 1
    for one, other in zip(captured, ctx.train_children(tried, 15, "x"), strict=True):
        assert (one.loss, one.accuracy) == (other.loss, other.accuracy)
        assert all(torch.equal(t, other.params[n]) for n, t in one.params.items())


# ---- trials ----------------------------------------------------------------------------------


def test_the_child_of_the_best_reward_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its validation accuracy less the price of its units; of equal ones the first."""
    seen: list[tuple[float, int, Child]] = []

    def spied(ctx: Context, tried: Any, epochs: int, purpose: str) -> Any:
        found = train_children(ctx, tried, epochs, purpose)
        assert epochs == 2
        for child, trained in zip(tried, found, strict=True):
            used = (child.state[FREE]["layers.0.weight"] != 0).any(1).sum()
            used = int(used) + int((child.state[FREE]["heads.1.weight"] != 0).any(0).sum() - 10)
            seen.append((trained.accuracy - 0.01 * used, used, trained))
        return found

    monkeypatch.setattr(Context, "train_children", spied)
    method, ctx, _, _ = second_task(mlp_heads, price=0.01, trials=7, per_round=3)
    params, state = method.begin_task(ctx)
    assert len(seen) == 7
    best = max(seen, key=lambda each: each[0])
    widths = [len(params[name]) for name in method.chain.weights]
    assert sum(widths) - 22 == best[1]
    expected = method.chain.part(best[2].params, widths)
    assert all(torch.equal(params[n], t) for n, t in expected.items())
    assert len({each[1] for each in seen}) > 1
    assert state[FREE].keys() == set(method.chain.weights)  # type: ignore[union-attr]


def test_choices_are_shares_of_the_most_units() -> None:
    method, _ = bound(RCL(growth=0.5, choices=4), mlp_heads, True)
    assert method.most == [6, 5]
    assert [method.units([k, k]) for k in range(4)] == [[0, 0], [2, 2], [4, 3], [6, 5]]


@pytest.mark.parametrize("make", SHAPES)
def test_old_tasks_stay_to_the_bit(make: Make, tmp_path: Path) -> None:
    tasks = easy_tasks(3, *SHAPES[make])
    options = {"lr": 0.02, "epochs": 3, **QUICK}
    result, ends = watched(WatchedRCL, tasks, tmp_path, make, **options)
    assert result.bwt == 0
    for j, (_, (x, _)) in enumerate(tasks):
        assert all(torch.equal(end.logits(x, j), ends[j].logits(x, j)) for end in ends[j:])
    method: Any = ends[0].method
    assert method.widths(ends[2].state) != list(method.chain.units)


def test_with_a_high_price_nothing_grows(tmp_path: Path) -> None:
    """Unless no trial chose it."""
    options = {"lr": 0.02, "choices": 2, "price": 10.0, **QUICK, "trials": 30}
    result = run(easy_tasks(3, 8), "rcl", tmp_path, mlp_heads, **options)
    assert result.figures["units of layers.0"] == 12
    assert result.figures["units of layers.1"] == 10
    network = 96 + 120 + 90
    assert result.figures[PUBLISHED] == pytest.approx(100 * (96 + 120 + 30) / network)
    assert result.figures[WHOLE] == pytest.approx(100)


# ---- the controller --------------------------------------------------------------------------


def test_the_controller_learns_what_is_rewarded() -> None:
    """Two layers: the second is to take twice what the first takes."""
    controller = Controller(2, 5, 0)
    before = controller._logits().softmax(1).detach()
    assert float((before - 0.2).abs().max()) < 0.1
    for _ in range(300):
        actions = controller.sample(20)
        controller.learn(actions, [float(a == [2, 4]) for a in actions])
    found = controller.sample(50)
    assert found.count([2, 4]) > 40


def test_one_step_of_the_controller_by_hand() -> None:
    """The policy's gradient is that of minus the mean of advantage times log-probability."""
    controller, copied = Controller(3, 4, 7), Controller(3, 4, 7)
    actions, rewards = [[0, 1, 3], [2, 2, 0]], [0.25, 0.75]
    value = float(copied._value(copied._start.flatten()).detach())
    logs = copied._logits().log_softmax(1)
    total = torch.zeros(())
    for action, reward in zip(actions, rewards, strict=True):
        total = total - (reward - value) * sum(logs[k, a] for k, a in enumerate(action)) / 2
    grads = torch.autograd.grad(total, list(copied._lstm.parameters()))
    controller.learn(actions, rewards)
    pairs = zip(controller._lstm.parameters(), copied._lstm.parameters(), grads, strict=True)
    for new, old, g in pairs:
        assert_close(new.detach(), (old - 1e-3 * g / (g.abs() + 1e-8)).detach(), 1e-6)
    assert float(controller._value(controller._start.flatten()).detach()) != value


def test_its_actions_depend_on_its_seed_alone() -> None:
    torch.manual_seed(1)
    first = Controller(2, 30, 5).sample(10)
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), drawn)  # torch's own generator is as it was
    torch.manual_seed(2)
    assert Controller(2, 30, 5).sample(10) == first
    assert Controller(2, 30, 6).sample(10) != first
    assert all(0 <= k < 30 for action in first for k in action)


@pytest.mark.parametrize(
    ("option", "value"),
    [("trials", 0), ("per_round", 1.5), ("growth", -1.0), ("price", -1.0), ("choices", 0)],
)
def test_wrong_options_are_sentences(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option} must be"):
        RCL(**{option: value})
