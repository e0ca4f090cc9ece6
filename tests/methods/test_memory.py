"""What protects old tasks: the memory, what lies in it, norm layers, and what is said about all."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import mlp
from small_runs import (
    CLASSES,
    Conv,
    Heads,
    Make,
    WatchedFinetune,
    WatchedGPM,
    WatchedSingle,
    WatchedTRGP,
    some_tasks,
    watched,
)
from torch import Tensor, nn

from trgp.benchmarks import from_tensors
from trgp.benchmarks.models import ResNet18
from trgp.draws import order
from trgp.methods import Method
from trgp.methods.protected import Directions
from trgp.tree import from_leaves, leaves


class WithHeads(ResNet18):
    """The papers' residual network, narrow, for images of 16 x 16."""

    def __init__(self) -> None:
        super().__init__(heads=3, classes=CLASSES, filters=2, image_size=16)


NETWORKS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "mlp": (lambda: mlp(8, 12, 10, CLASSES), (8,)),
    "no bias": (lambda: mlp(8, 12, 10, CLASSES, bias=False), (8,)),
    "heads": (Heads, (8,)),
    "running norms": (Conv, (4, 4, 4)),
    "norms of the batch": (lambda: Conv(track=False), (4, 4, 4)),
    "residual": (WithHeads, (3, 16, 16)),
    "one layer": (lambda: nn.Linear(8, CLASSES), (8,)),
}
METHODS: list[type[Method]] = [WatchedGPM, WatchedTRGP]


def tasks_for(name: str, **options: Any) -> Any:
    shape = NETWORKS[name][1]
    rank = {1: 5, 3: 2}[len(shape)]
    return some_tasks(3, *shape, rank=rank, samples=30, **options)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("kind", METHODS)
def test_the_memory_is_orthonormal_and_what_lies_in_it_stays(
    kind: type[Method], name: str, tmp_path: Path
) -> None:
    result, ends = watched(kind, tasks_for(name), tmp_path, NETWORKS[name][0], threshold=0.95)
    layers = ends[0].method.layers
    assert not any(layer.startswith("heads") for layer in layers)  # only one task uses each
    assert list(result.ranks) == list(layers)
    for layer, each in layers.items():
        held = [Directions.read(end.state, each.layer) for end in ends]
        assert [int(h.ranks.sum()) for h in held] == result.ranks[layer]
        for h in held:
            product = h.M.mT @ h.M
            used = torch.arange(h.M.shape[2]) < h.ranks[:, None]
            expected = torch.diag_embed(used.to(h.M.dtype))
            torch.testing.assert_close(product, expected, rtol=0, atol=1e-6)
        for before, (h, end) in enumerate(zip(held, ends, strict=True)):
            m = h.M.shape[2]
            W_M = each.pack(end.params) @ h.M
            for later, now in zip(held[before + 1 :], ends[before + 1 :], strict=True):
                used = torch.arange(m) < h.ranks[:, None]
                same = later.M[:, :, :m] * used[:, None]
                assert torch.equal(same, h.M), "an old column changed or moved"
                torch.testing.assert_close(
                    each.pack(now.params) @ h.M, W_M, rtol=0, atol=1e-5, msg=layer
                )
    assert any(ranks[0] < ranks[-1] for ranks in result.ranks.values())


@pytest.mark.parametrize("norm", ["freeze", "per_task"])
@pytest.mark.parametrize("name", ["mlp", "heads", "running norms", "residual"])
@pytest.mark.parametrize("kind", METHODS)
def test_with_all_energy_held_old_logits_stay_as_they_were(
    kind: type[Method], name: str, norm: str, tmp_path: Path
) -> None:
    """On the very samples that fed the memory, to rounding in float64."""
    if norm == "per_task" and name in ("mlp", "heads"):
        norm = "shared"  # there is none in it: all three must be alike
    make, _ = NETWORKS[name]
    tasks = tasks_for(name, dtype=torch.float64)
    _, ends = watched(
        kind,
        tasks,
        tmp_path,
        lambda: make().double(),
        threshold=1.0,
        samples=12,
        norm=norm,
        lr=0.05,
        **({"epsilon": 0.0} if kind is WatchedTRGP else {}),
    )
    train = [task.train for task in from_tensors(tasks, make, seed=0).tasks]
    fed = [part.batch(order(len(part), 0, "bases", t)[:12])[0] for t, part in enumerate(train)]
    for t, end in enumerate(ends):
        then = end.logits(fed[t], t)
        assert then.abs().max() > 1e-3
        for later in ends[t + 1 :]:
            torch.testing.assert_close(later.logits(fed[t], t), then, rtol=0, atol=1e-9)
    weights = [each.names[0] for each in ends[0].method.layers.values()]
    assert any(not torch.equal(ends[0].params[n], ends[2].params[n]) for n in weights)


# ---- norm layers -----------------------------------------------------------------------------


def norm_state(params: Any) -> dict[str, Tensor]:
    return {n: t for n, t in params.items() if n.startswith("norm")}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", METHODS)
def test_frozen_norms_stay_as_the_first_task_left_them(kind: type[Method], tmp_path: Path) -> None:
    _, ends = watched(kind, tasks_for("running norms"), tmp_path, Conv, norm="freeze")
    first = norm_state(ends[0].params)
    assert {"norm1.weight", "norm1.running_mean", "norm2.num_batches_tracked"} <= first.keys()
    assert first["norm1.num_batches_tracked"].item() > 0
    for end in ends[1:]:
        assert same(norm_state(end.params), first)
        assert all(same(norm_state(end.weights(t)), first) for t in range(3))


@pytest.mark.parametrize("kind", METHODS)
def test_shared_norms_go_on_for_all_tasks(kind: type[Method], tmp_path: Path) -> None:
    _, ends = watched(kind, tasks_for("running norms"), tmp_path, Conv, norm="shared")
    for before, after in itertools.pairwise(ends):
        for name, tensor in norm_state(after.params).items():
            assert not torch.equal(tensor, before.params[name]), name
        assert same(norm_state(after.weights(0)), norm_state(after.params))


@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("kind", METHODS)
def test_every_task_may_have_norms_of_its_own(
    kind: type[Method], track: bool, tmp_path: Path
) -> None:
    tasks = tasks_for("running norms")
    result, ends = watched(kind, tasks, tmp_path, lambda: Conv(track), norm="per_task")
    mine = [norm_state(end.params) for end in ends]
    assert len(mine[0]) == (10 if track else 4)
    for t, end in enumerate(ends):
        for old in range(t + 1):
            assert same(norm_state(end.weights(old)), mine[old])
    assert not any(torch.equal(mine[0][name], mine[2][name]) for name in mine[0])
    x, y = tasks[0][1]
    right = (ends[2].logits(x, 0).argmax(1) == y).double().mean()
    if track:  # else it depends on the order of the test samples
        assert result.accuracy_matrix[2][0] == pytest.approx(float(right))


class Loose(nn.Module):
    """A scale of its own kind, which no projection can protect, before two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.layers = mlp(8, 12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x * self.scale)


@pytest.mark.parametrize("kind", METHODS)
def test_what_cannot_be_protected_is_trained_once(kind: type[Method], tmp_path: Path) -> None:
    _, ends = watched(kind, some_tasks(3), tmp_path, Loose)
    assert not torch.equal(ends[0].params["scale"], torch.ones(8))
    assert torch.equal(ends[0].params["scale"], ends[2].params["scale"])
    assert not torch.equal(ends[0].params["layers.0.weight"], ends[2].params["layers.0.weight"])


def test_heads_of_old_tasks_do_not_move(tmp_path: Path) -> None:
    for kind in (WatchedFinetune, *METHODS):
        _, ends = watched(kind, some_tasks(3), tmp_path, Heads)
        for t, end in enumerate(ends):
            for later in ends[t + 1 :]:
                for part in ("weight", "bias"):
                    name = f"heads.{t}.{part}"
                    assert torch.equal(end.params[name], later.params[name])
                    unborn = f"heads.{t + 1}.{part}"
                    assert not torch.equal(end.params[unborn], later.params[unborn])


# ---- what is said about it -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (WatchedFinetune, {}),
        (WatchedSingle, {}),
        (WatchedGPM, {"norm": "per_task"}),
        (WatchedTRGP, {"epsilon": 0.0, "norm": "per_task"}),
        (WatchedTRGP, {"epsilon": 0.0, "strongest_unprotected": True}),
    ],
)
def test_a_state_goes_through_a_file_and_says_its_size(
    kind: type[Method], options: dict[str, Any], tmp_path: Path
) -> None:
    result, ends = watched(kind, tasks_for("running norms"), tmp_path, Conv, **options)
    state = ends[-1].state
    flat = dict(leaves(state))
    again = dict(leaves(from_leaves(flat)))
    assert again.keys() == flat.keys()
    assert all(again[path] is flat[path] for path in flat)
    assert result.state_bytes == sum(t.numel() * t.element_size() for t in flat.values())
    assert (result.state_bytes > 0) == (kind is not WatchedFinetune)
    assert result.network_bytes == 4 * sum(p.numel() for p in Conv().parameters())
    for t in range(3):  # read back, it means the same
        ours = ends[-1].weights(t)
        theirs = ends[-1]._replace(state=from_leaves(flat)).weights(t)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_trust_regions_reported_are_those_of_the_state(tmp_path: Path) -> None:
    result, ends = watched(WatchedTRGP, some_tasks(3), tmp_path, epsilon=0.3)
    assert result.selected[0] == {}
    for t in (1, 2):
        held = {n: j.tolist() for n, j in ends[-1].state["selected"][str(t)].items()}
        assert result.selected[t] == held
        assert held.keys() == ends[-1].state["changes"][str(t)].keys()
        for trusted in held.values():
            assert 0 < len(set(trusted)) == len(trusted) <= 2
            assert set(trusted) <= set(range(t))
