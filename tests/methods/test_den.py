"""DEN: its steps by hand, what it selects, what expansion leaves, and how units are split."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close
from method_parts import (
    ConvHeads,
    bound,
    context,
    eager,
    easy_tasks,
    gradients,
    mlp_heads,
    some_samples,
)
from small_runs import Make, Watched, run, watched
from torch import Tensor

from trgp.engine.train import train_step, trained_names
from trgp.methods import Batch
from trgp.methods.capacity import PUBLISHED, WHOLE
from trgp.methods.den import ANCHOR, DEN, GROUPED
from trgp.methods.growing import FREE, widened, with_copies

SHAPES: dict[Make, tuple[int, ...]] = {mlp_heads: (8,), ConvHeads: (3, 8, 8)}
QUICK: dict[str, Any] = {"phase_epochs": 2}


class WatchedDEN(Watched, DEN):
    pass


class Bare(DEN):
    """Without its phases, so that a test can call them one by one."""

    def begin_task(self, ctx: Any) -> Any:
        return ctx.params, self.phase(ctx.params, ctx.state, ctx.task, {})

    def end_task(self, ctx: Any) -> Any:
        return self.recorded(ctx, ctx.params, self.widths(ctx.state))


def moved(params: Any, names: Any, seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    new = dict(params)
    for name in sorted(names):
        noise = torch.randn(params[name].shape, generator=draw, dtype=torch.float64)
        new[name] = params[name] + 0.3 * noise
    return new


def in_second_task(make: Make, kind: type[DEN] = Bare, **options: Any) -> tuple[DEN, Any]:
    """The method and the context of a second task whose weights have moved since the first."""
    method, begun = bound(kind(**options), make, True)
    samples = some_samples(12, *SHAPES[make])
    first = context(method, begun, samples, 0)
    params, state = method.begin_task(first)
    params = moved(params, trained_names(method, params, 0), 0)
    params, state = method.end_task(context(method, params, samples, 0, state))
    second = some_samples(12, *SHAPES[make], seed=1)
    params, state = method.begin_task(context(method, params, second, 1, state))
    params = {n: p for n, p in params.items() if "heads" not in n or "heads.1." in n}
    params = moved(params, set(params) & set(trained_names(method, params, 1)), 1)
    return method, context(method, params, second, 1, state)


# ---- single steps ----------------------------------------------------------------------------


@pytest.mark.parametrize("make", SHAPES)
def test_the_first_tasks_first_step_is_adam_and_a_soft_threshold(make: Make) -> None:
    method, params = bound(DEN(l1=2.0, decay=0.1), make, True)
    samples = some_samples(12, *SHAPES[make])
    params, state = method.begin_task(context(method, params, samples))
    batch = Batch(*samples, 0, 0)
    method.train_mode(0)
    module = eager(method, params)
    names = trained_names(method, params, 0)
    grads = gradients(F.cross_entropy(module(batch.x, 0), batch.y), module)
    after, _, _ = train_step(method, params, state, batch, 0.01, names, [])
    for name in names:
        g, w = grads[name], params[name]
        if "heads" in name and "heads.0" not in name:
            assert torch.equal(after[name], w)
            continue
        if w.dim() > 1:
            g = g + 0.1 * w
        w = w - 0.01 * g / (g.abs() + 1e-8)
        if w.dim() > 1:
            w = torch.where(w > 0.02, w - 0.02, torch.where(w < -0.02, w + 0.02, 0 * w))
            assert 0 < int((w == 0).sum()) < w.numel()
        assert_close(after[name], w, 1e-6)


def test_the_group_lasso_shrinks_new_rows_by_their_length() -> None:
    method, ctx = in_second_task(mlp_heads, group=3.0, decay=0.0)
    rows = torch.tensor([0.0] * 8 + [1.0] * 4, dtype=torch.float64)
    tiny = dict(ctx.params)
    tiny["layers.0.weight"] = ctx.params["layers.0.weight"].clone()
    tiny["layers.0.weight"][11] *= 1e-4
    free = {n: torch.zeros_like(p) for n, p in tiny.items()}
    state = method.phase(tiny, ctx.state, 1, free, **{GROUPED: {"layers.0.weight": rows}})
    batch = Batch(ctx.train.x, ctx.train.y, 1, 1)
    after, _, _ = train_step(method, tiny, state, batch, 0.1, trained_names(method, tiny, 1), [])
    for i in range(12):
        w = tiny["layers.0.weight"][i]
        length = float((w**2).sum() ** 0.5)
        expected = w if i < 8 else w * max(0.0, 1 - 0.1 * 3.0 / length)
        assert_close(after["layers.0.weight"][i], expected)
    assert not after["layers.0.weight"][11].any()


def test_after_a_split_the_loss_holds_the_old_block() -> None:
    method, ctx = in_second_task(mlp_heads, drift=3.0, decay=0.0)
    old = {"layers.0.weight": ctx.params["layers.0.weight"][:5] + 0.5}
    state = method.phase(ctx.params, ctx.state, 1, {}, **{ANCHOR: old})
    batch = Batch(ctx.train.x, ctx.train.y, 1, 1)
    fit = method.loss(ctx.params, ctx.state, batch)
    assert_close(method.loss(ctx.params, state, batch), fit + 1.5 * 5 * 8 * 0.25)


# ---- selection -------------------------------------------------------------------------------


def test_units_are_selected_along_weights_that_are_not_zero() -> None:
    """From the head downwards."""
    method, ctx = in_second_task(mlp_heads)
    params = dict(ctx.params)
    head = torch.zeros_like(params["heads.1.weight"])  # 3 x 10
    head[0, 2] = head[2, 7] = 1.0
    hidden = torch.zeros_like(params["layers.1.weight"])  # 10 x 12
    hidden[2, [0, 5]] = 1.0
    hidden[7, 5] = -1.0
    hidden[3, 9] = 1.0  # of a unit that the head does not see
    params |= {"heads.1.weight": head, "layers.1.weight": hidden}
    masks = method.selected(params, ctx)
    assert set(masks) == {"layers.0.weight", "layers.1.weight"}
    assert masks["layers.1.weight"].nonzero().tolist() == [[2, 0], [2, 5], [7, 0], [7, 5]]
    rows = masks["layers.0.weight"]
    assert rows.sum(1).nonzero().flatten().tolist() == [0, 5]
    assert (rows[[0, 5]] == 1).all()


def test_maps_are_selected_whole() -> None:
    """A flattened map is one unit with several inputs in the layer after it."""
    method, ctx = in_second_task(ConvHeads)
    params = dict(ctx.params)
    fc1 = torch.zeros_like(params["fc1.weight"])  # 10 x (8 maps of 2 x 2)
    fc1[:, 4 * 3 + 2] = 1.0
    masks = method.selected({**params, "fc1.weight": fc1}, ctx)
    assert masks["conv2.weight"].flatten(1).sum(1).nonzero().flatten().tolist() == [3]
    assert masks["fc1.weight"].any(0).nonzero().flatten().tolist() == [12, 13, 14, 15]


@pytest.mark.parametrize("make", SHAPES)
def test_in_a_tasks_own_epochs_only_the_selected_part_moves(make: Make) -> None:
    method, ctx = in_second_task(make)
    draw = torch.Generator().manual_seed(3)
    mask = {
        name: (torch.rand(ctx.params[name].shape, generator=draw) < 0.5).double()
        for name in method.chain.weights
    }
    state = method.phase(ctx.params, ctx.state, 1, mask)
    batch = Batch(ctx.train.x, ctx.train.y, 1, 1)
    params: Any = ctx.params
    for _ in range(3):
        names = trained_names(method, params, 1)
        params, state, _ = train_step(method, params, state, batch, 0.01, names, [])
    for name, free in mask.items():
        same = params[name] == ctx.params[name]
        assert bool(same[free == 0].all())
        assert float(same[free == 1].double().mean()) < 0.5


# ---- expansion -------------------------------------------------------------------------------


@pytest.mark.parametrize("make", SHAPES)
def test_an_expansion_trains_new_weights_alone_and_drops_dead_units(make: Make) -> None:
    method, ctx = in_second_task(make, growth=0.3, group=0.0, phase_epochs=2)
    widths = method.widths(ctx.state)
    params, wider = method.expanded(ctx, dict(ctx.params), widths)
    assert wider == [n + max(1, round(0.3 * n)) for n in widths]
    for name, old in ctx.params.items():
        if "running" in name or "batches" in name:
            continue
        inside = params[name][tuple(slice(0, n) for n in old.shape)]
        assert torch.equal(inside, old) == ("heads" not in name)
    ctx.network.module.eval()
    assert ctx.network(params, ctx.train.x, 1).shape == (12, 3)
    dead = type(method)(growth=0.3, group=1e4, phase_epochs=1).bind(method.network)
    params, left = dead.expanded(ctx, dict(ctx.params), widths)
    assert left == widths
    assert {n: t.shape for n, t in params.items()} == {n: t.shape for n, t in ctx.params.items()}


@pytest.mark.parametrize("make", SHAPES)
def test_chosen_units_keep_what_a_network_computes(make: Make) -> None:
    """In another order, the logits are the same; so are they without units that see nothing."""
    method, ctx = in_second_task(make)
    chain, widths = method.chain, method.widths(ctx.state)
    x = ctx.train.x
    ctx.network.module.eval()
    expected = ctx.network(ctx.params, x, 1)
    order = [torch.randperm(n, generator=torch.Generator().manual_seed(n)) for n in widths]
    mixed = chain.chosen(ctx.params, widths, [each.tolist() for each in order])
    assert_close(ctx.network(mixed, x, 1), expected)
    assert not torch.equal(mixed[chain.weights[0]], ctx.params[chain.weights[0]])
    wider = [n + 2 for n in widths]
    grown, fresh = widened(chain, ctx.params, wider, 1)
    assert all(int((fresh[n] == 0).sum()) == t.numel() for n, t in ctx.params.items())
    back = chain.chosen(grown, wider, [range(n) for n in widths])
    assert all(torch.equal(back[n], t) for n, t in ctx.params.items())


# ---- splitting -------------------------------------------------------------------------------


@pytest.mark.parametrize("make", SHAPES)
def test_split_units_are_as_before_and_their_copies_as_they_became(make: Make) -> None:
    method, ctx = in_second_task(make, growth=0.2, sigma=1e-6, phase_epochs=1)
    before = ctx.state["network"]
    widths = method.widths(ctx.state)
    units = [
        method.drifted(n, ctx.params, before, ctx, k) for k, n in enumerate(method.chain.weights)
    ]
    for k, name in enumerate(method.chain.weights):
        far = [
            float(((ctx.params[name][i] - before[name][i]) ** 2).sum()) for i in range(widths[k])
        ]
        most = sorted(range(widths[k]), key=lambda i: -far[i])[: method.more[k]]
        assert units[k] == sorted(most)
    grown = with_copies(method.chain, ctx.params, before, units, method.weights(1))
    wider = [n + len(own) for n, own in zip(widths, units, strict=True)]
    opened = {n: method.chain.opened(n, grown[n], wider) for n in method.weights(1)}
    now = {n: method.chain.opened(n, ctx.params[n], widths) for n in method.weights(1)}
    for k, name in enumerate(method.chain.weights):
        W, old = opened[name], method.chain.opened(name, before[name], widths)
        below = units[k - 1] if k else []
        kept = [j for j in range(old.shape[1]) if j not in below]
        for c, i in enumerate(units[k]):
            assert torch.equal(W[i, : old.shape[1]], old[i])
            assert not W[i, old.shape[1] :].any()
            copy = W[widths[k] + c]
            assert torch.equal(copy[kept], now[name][i][kept])
            for d, j in enumerate(below):  # a copy sees the copies
                assert not copy[j].any()
                assert torch.equal(copy[old.shape[1] + d], now[name][i, j])
        for i in set(range(widths[k])) - set(units[k]):
            assert torch.equal(W[i, : old.shape[1]], now[name][i])
            assert not W[i, old.shape[1] :].any()
    head, n = opened["heads.1.weight"], widths[-1]
    for c, i in enumerate(units[-1]):
        assert not head[:, i].any()
        assert torch.equal(head[:, n + c], now["heads.1.weight"][:, i])


def test_a_split_of_the_last_layer_changes_no_logit_of_its_task() -> None:
    """Its copies alone are seen by the head."""
    method, ctx = in_second_task(mlp_heads, growth=0.3, sigma=0.1)
    expected = ctx.network(ctx.params, ctx.train.x, 1)
    before, units = ctx.state["network"], [[], [1, 4, 8]]
    grown = with_copies(method.chain, ctx.params, before, units, method.weights(1))
    assert grown["layers.1.weight"].shape == (13, 12)
    assert_close(ctx.network(grown, ctx.train.x, 1), expected)


def test_restored_units_stay_restored_in_the_retraining() -> None:
    method, ctx = in_second_task(mlp_heads, growth=0.2, sigma=1e-6, phase_epochs=2)
    before, widths = ctx.state["network"], method.widths(ctx.state)
    units = method.drifted("layers.0.weight", ctx.params, before, ctx, 0)
    ctx.state[FREE].update({n: torch.ones_like(t) for n, t in before.items()})  # type: ignore[attr-defined]
    params, wider = method.split(ctx, dict(ctx.params), widths)
    assert wider[0] == widths[0] + len(units)
    assert torch.equal(params["layers.0.weight"][units], before["layers.0.weight"][units])
    still = with_copies(method.chain, ctx.params, before, [units, []], method.weights(1))
    assert not torch.equal(params["layers.0.weight"][12:], still["layers.0.weight"][12:])


# ---- whole runs ------------------------------------------------------------------------------


@pytest.mark.parametrize("make", SHAPES)
def test_a_task_uses_units_that_were_born_by_its_end(make: Make, tmp_path: Path) -> None:
    """And biases, norm layers and a head of its own."""
    options = {"lr": 0.02, "epochs": 3, "growth": 0.2, "group": 0.0, "sigma": 0.05, **QUICK}
    tasks = easy_tasks(3, *SHAPES[make])
    result, ends = watched(WatchedDEN, tasks, tmp_path, make, **options)
    method: Any = ends[0].method
    widths = [method.widths(end.state) for end in ends]
    assert widths[0] == list(method.chain.units)
    assert all(a < b for a, b in zip(widths[0], widths[1], strict=True))
    assert all(a < b for a, b in zip(widths[1], widths[2], strict=True))
    for j in range(3):
        weights = ends[2].weights(j)
        for k, name in enumerate(method.chain.weights):
            assert len(weights[name]) == widths[j][k]
        own = set(weights) - set(method.chain.weights)
        assert all(torch.equal(weights[n], ends[j].weights(j)[n]) for n in own)
    assert result.figures[f"units of {method.chain.layers[0]}"] == widths[2][0]
    assert result.acc > 0.5


def test_without_a_reason_the_network_stays_as_it_is(tmp_path: Path) -> None:
    """A loss below tau, and drifts below sigma."""
    options = {"lr": 0.02, "epochs": 3, "tau": 1e6, "sigma": 1e6, **QUICK}
    result = run(easy_tasks(2, 8), "den", tmp_path, mlp_heads, **options)
    assert result.figures["units of layers.0"] == 12


def test_capacity_counts_what_is_not_zero(tmp_path: Path) -> None:
    options = {"lr": 0.02, "l1": 3.0, "epochs": 3, "growth": 0.2, **QUICK}
    result, ends = watched(WatchedDEN, easy_tasks(3, 8), tmp_path, mlp_heads, **options)
    state = ends[-1].state
    shared = sum(int((t != 0).sum()) for t in state["network"].values())
    assert shared < sum(t.numel() for t in state["network"].values())
    heads = [int((state["own"][str(t)][f"heads.{t}.weight"] != 0).sum()) for t in range(3)]
    network = 96 + 120 + 90
    assert result.figures[PUBLISHED] == pytest.approx(100 * (shared + heads[-1]) / network)
    assert result.figures[WHOLE] == pytest.approx(100 * (shared + sum(heads)) / network)


@pytest.mark.parametrize(
    ("option", "value"),
    [("l1", -1.0), ("growth", 0.0), ("phase_epochs", 0), ("tau", "x"), ("decay", -1.0)],
)
def test_wrong_options_are_sentences(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option} must be"):
        DEN(**{option: value})
