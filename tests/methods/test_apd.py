"""APD: its weights, loss and first step by hand, what is kept, and how tasks are consolidated."""

import math
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
    mlp_heads,
    residual,
    some_samples,
)
from small_runs import ENDS, Make, Watched, run, watched
from torch import Tensor

from trgp.engine.train import train_step, trained_names
from trgp.methods import Batch
from trgp.methods.adam import ADAM, adam, moments
from trgp.methods.apd import ADAPTIVE, APD, MASK, large
from trgp.methods.capacity import PUBLISHED, WHOLE
from trgp.methods.consolidation import clusters, shared_part
from trgp.tree import leaves

NETWORKS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "perceptron": (mlp_heads, (8,)),
    "convolutions": (ConvHeads, (3, 8, 8)),
    "residual": (residual, (3, 16, 16)),
}


class WatchedAPD(Watched, APD):
    pass


def at_task(
    name: str, task: int, size: float = 0.3, **options: Any
) -> tuple[APD, dict[str, Tensor], Any, Batch]:
    """The method in a task, after tasks whose weights moved at random."""
    make, shape = NETWORKS[name]
    method, begun = bound(APD(**options), make, True)
    params: Any = begun
    state: Any = {}
    for t in range(task + 1):
        samples = some_samples(12, *shape, seed=t)
        params, state = method.begin_task(context(method, params, samples, t, state))
        draw = torch.Generator().manual_seed(t)
        params = {
            n: p + size * torch.randn(p.shape, generator=draw, dtype=p.dtype)
            if n in trained_names(method, params, t) and p.dtype == torch.float64
            else p
            for n, p in params.items()
        }
        if t < task:
            params, state = method.end_task(context(method, params, samples, t, state))
    method.train_mode(task)
    return method, params, state, Batch(*samples, task, task)


def by_hand(method: APD, params: Any, state: Any, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The published loss, summed task by task and layer by layer, and its gradients."""
    free = {n: params[n].clone().requires_grad_() for n in trained_names(method, params, 0)}
    held = {**params, **free}
    module = eager(method, params)
    own = {n: held[n] for n, _ in module.named_parameters()}
    total = torch.zeros((), dtype=torch.float64)
    for name in method.layers:
        S, v, T = held[name], held[MASK + name], held[ADAPTIVE + name]
        shape = (-1, *[1] * (S.dim() - 1))
        own[name] = S * torch.sigmoid(v).view(shape) + T[-1]
        for j in range(len(T)):
            total = total + method.l1 * T[j].abs().sum()
            if j < len(T) - 1:
                now = S * torch.sigmoid(state["masks"][name][j]).view(shape) + T[j]
                there = state["targets"][name][j]
                total = total + method.drift / 2 * ((now - there) ** 2).sum()
        total = total + method.decay / 2 * ((T[-1] ** 2).sum() + (v**2).sum())
        if len(T) == 1:
            total = total + method.decay / 2 * (S**2).sum()
    logits = torch.func.functional_call(module, own, (batch.x, batch.head))
    total = total + F.cross_entropy(logits, batch.y)
    found = torch.autograd.grad(total, list(free.values()), allow_unused=True)
    return total.detach(), {n: g for n, g in zip(free, found, strict=True) if g is not None}


@pytest.mark.parametrize("task", [0, 2])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_first_step_is_adam_on_the_published_loss(name: str, task: int) -> None:
    method, params, state, batch = at_task(name, task, l1=0.01, decay=0.1, drift=3.0)
    expected, grads = by_hand(method, params, state, batch)
    names = trained_names(method, params, task)
    after, changes, loss = train_step(method, params, state, batch, 0.01, names, [])
    assert_close(loss, expected, 1e-9)
    assert {n for n in grads if n.startswith(ADAPTIVE)} == {ADAPTIVE + n for n in method.layers}
    for key, g in grads.items():
        assert_close(after[key], params[key] - 0.01 * g / (g.abs() + 1e-8), 1e-7)
    assert all(key in grads or torch.equal(after[key], params[key]) for key in names)
    assert float(changes[ADAM]["steps"]) == 1  # type: ignore[index,arg-type]


def test_the_own_weights_begin_as_a_copy_of_the_shared_ones() -> None:
    method, params, _, _ = at_task("perceptron", 2, size=0.0)
    again, others, _, _ = at_task("perceptron", 2, size=0.0)
    for name in method.layers:
        assert torch.equal(params[ADAPTIVE + name][-1], params[name])
        v = params[MASK + name]
        assert float(v.abs().max()) <= 2 / math.sqrt(len(v))
        assert float(v.std()) > 0.3 / math.sqrt(len(v))
        assert torch.equal(v, others[MASK + name])
    assert again is not method


def test_small_entries_of_own_weights_are_neither_kept_nor_evaluated() -> None:
    """The loss sees them, for they go on training."""
    method, params, state, batch = at_task("perceptron", 0, cut=0.2)
    cut = method.weights_for(params, state, 0)
    whole = method.composed(params, 0.0)
    ended, kept = method.end_task(context(method, params, (batch.x, batch.y), 0, state))
    later = method.weights_for(ended, kept, 0)
    assert ended.keys() == method.network.names
    for name in method.layers:
        T, S = params[ADAPTIVE + name][0], params[name]
        gate = torch.sigmoid(params[MASK + name])[:, None]
        assert 0 < int((T.abs() > 0.2).sum()) < T.numel()
        assert_close(cut[name], S * gate + T * (T.abs() > 0.2))
        assert_close(whole[name], S * gate + T)
        assert_close(later[name], cut[name])
        assert torch.equal(kept["adaptive"][name], large(params[ADAPTIVE + name], 0.2))
    assert set(kept) == {"shared", "masks", "adaptive", "own"}


def test_old_tasks_are_held_while_the_shared_weights_move(tmp_path: Path) -> None:
    """With a strong drift penalty their weights stay, with none they follow S."""
    moved = {}
    for drift in (0.0, 1e4):
        options: dict[str, Any] = {"drift": drift, "lr": 0.01, "epochs": 10}
        _, ends = watched(WatchedAPD, easy_tasks(3, 8), tmp_path, mlp_heads, **options)
        first, last = (ends[k].weights(0) for k in (0, 2))
        assert not torch.equal(ends[0].params["layers.0.weight"], ends[2].params["layers.0.weight"])
        assert torch.equal(first["heads.0.weight"], last["heads.0.weight"])
        moved[drift] = max(float((first[n] - last[n]).abs().max()) for n in first)
    assert moved[1e4] < 0.1 * moved[0.0]


def test_norm_layers_and_heads_are_a_tasks_own(tmp_path: Path) -> None:
    tasks = easy_tasks(3, 3, 8, 8)
    _, ends = watched(WatchedAPD, tasks, tmp_path, ConvHeads, lr=0.02, epochs=4)
    for j in range(3):
        own = {n: t for n, t in ends[j].weights(j).items() if n not in ends[j].method.layers}  # type: ignore[attr-defined]
        assert {"bn1.weight", "bn1.running_mean", "conv1.bias", f"heads.{j}.bias"} <= own.keys()
        assert all(torch.equal(tensor, ends[2].weights(j)[n]) for n, tensor in own.items())


# ---- consolidation ---------------------------------------------------------------------------


def test_clusters_are_those_of_lloyds_steps() -> None:
    """Against the steps on the points themselves."""
    draw = torch.Generator().manual_seed(3)
    points = torch.randn(12, 4, 5, generator=draw, dtype=torch.float64)
    starts = [[0, 1], [5], [7, 8, 9]]
    flat = points.flatten(1)
    centres = torch.stack([flat[group].mean(0) for group in starts])
    nearest = torch.zeros(12, dtype=torch.long)
    for _ in range(50):
        nearest = ((flat[:, None] - centres[None]) ** 2).sum(2).argmin(1)
        for k in range(3):
            if (nearest == k).any():
                centres[k] = flat[nearest == k].mean(0)
    assert clusters(points, starts) == nearest.tolist()


def test_what_a_cluster_has_in_common_is_kept_once() -> None:
    members = torch.tensor([[1.0, 5.0, 0.0, 2.0], [1.008, 5.02, 0.0, 1.99]])
    common, left = shared_part(members, 0.01 + 1e-6)
    assert_close(common, torch.tensor([1.004, 0.0, 0.0, 1.995]), 1e-6)
    assert_close(left, torch.tensor([[0.0, 5.0, 0.0, 0.0], [0.0, 5.02, 0.0, 0.0]]), 1e-6)


def test_consolidation_moves_no_weight_by_more_than_half_the_spread(tmp_path: Path) -> None:
    """At every second task, twice; what tasks share is kept once, and found again by the next."""
    options: dict[str, Any] = {
        **{"consolidate_every": 2, "clusters": 1, "spread": 0.2, "cut": 0.0},
        **{"lr": 0.003, "epochs": 3},
    }
    tasks = easy_tasks(4, 8)
    make = lambda: mlp_heads(4)  # noqa: E731
    _, ends = watched(WatchedAPD, tasks, tmp_path, make, **options)
    _, free = watched(WatchedAPD, tasks, tmp_path, make, **options | {"consolidate_every": 9})
    assert len(ENDS) == 4
    assert "local" not in ends[0].state
    for j in range(2):  # until the first consolidation both runs are the same
        for name, tensor in free[1].weights(j).items():
            assert_close(ends[1].weights(j)[name], tensor, 0.1 + 1e-5)
    assert any(float(t.abs().max()) > 0 for t in ends[1].state["local"].values())
    for end, count in ((ends[1], 2), (ends[3], 4)):
        for name, member in end.state["member"].items():
            assert len(member) == count
            local, T = end.state["local"][name], end.state["adaptive"][name]
            for c in range(len(local)):
                own = T[member == c]
                assert len(own) > 1
                assert not (local[c].bool() & own.bool().any(0)).any()
    nonzero = [sum(int(t.count_nonzero()) for _, t in leaves(e[1].state)) for e in (ends, free)]
    assert nonzero[0] < nonzero[1]


# ---- what is counted -------------------------------------------------------------------------


def test_capacity_counts_what_is_not_zero_by_both_rules(tmp_path: Path) -> None:
    options: dict[str, Any] = {"cut": 0.1, "consolidate_every": 2, "lr": 0.01}
    result, ends = watched(WatchedAPD, easy_tasks(3, 8), tmp_path, mlp_heads, **options)
    state = ends[-1].state
    sizes = {"layers.0.weight": 96, "layers.1.weight": 120}
    head, network = 30, 96 + 120 + 3 * 30
    shared = 0
    for name, size in sizes.items():
        assert state["shared"][name].numel() == size
        for level in ("shared", "masks", "adaptive", "local"):
            shared += int((state[level][name] != 0).sum())
    assert result.figures[PUBLISHED] == pytest.approx(100 * (shared + head) / network)
    assert result.figures[WHOLE] == pytest.approx(100 * (shared + 3 * head) / network)
    dense = run(easy_tasks(3, 8), "apd", tmp_path, mlp_heads, cut=0.0, l1=0.0, lr=0.01)
    assert dense.figures[PUBLISHED] > result.figures[PUBLISHED]


# ---- Adam ------------------------------------------------------------------------------------


def test_adam_is_that_of_torch_and_leaves_masked_weights_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    params = {
        "a": torch.randn(3, 4, generator=draw).double(),
        "b": torch.randn(5, generator=draw).double(),
    }
    mask = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    theirs = {name: p.clone().requires_grad_() for name, p in params.items()}
    optimizer = torch.optim.Adam(theirs.values(), lr=0.01)
    ours: Any = params
    state: Any = {ADAM: moments(params, params)}
    for _ in range(5):
        grads = {n: torch.randn(p.shape, generator=draw).double() for n, p in params.items()}
        grads["b"] = grads["b"] * mask
        for name, p in theirs.items():
            p.grad = grads[name]
        optimizer.step()
        ours, state = adam(ours, grads, state, 0.01)
    for name, p in theirs.items():
        assert_close(ours[name], p.detach(), 1e-12)
    assert torch.equal(ours["b"][mask == 0], params["b"][mask == 0])


@pytest.mark.parametrize(
    ("option", "value"),
    [("l1", -1.0), ("cut", math.inf), ("drift", "x"), ("consolidate_every", 0), ("clusters", 1.5)],
)
def test_wrong_options_are_sentences(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option} must be"):
        APD(**{option: value})
