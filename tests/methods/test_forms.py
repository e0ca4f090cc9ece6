"""One algorithm three times: native, literal, and as the learner that a user's loop drives."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import mlp
from small_runs import (
    CLASSES,
    Conv,
    End,
    Heads,
    Make,
    WatchedGPM,
    WatchedTRGP,
    some_tasks,
    watched,
)
from torch import Tensor, nn

from trgp import GPM, TRGP, core
from trgp.benchmarks import Benchmark, from_tensors
from trgp.draws import order
from trgp.engine.batches import Part, epoch_batches
from trgp.engine.network import Network

NETWORKS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "mlp": (lambda: mlp(8, 12, 10, CLASSES), (8,)),
    "no bias": (lambda: mlp(8, 12, 10, CLASSES, bias=False), (8,)),
    "heads": (Heads, (8,)),
    "running norms": (Conv, (4, 4, 4)),
    "norms of the batch": (lambda: Conv(track=False), (4, 4, 4)),
}
RATE = 0.1
SAMPLES = 30


@pytest.fixture(params=[10**12, -(10**12)], ids=["whole", "low rank"], autouse=True)
def spared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer by whole matrices, and none."""
    monkeypatch.setattr(core.native, "SPARED", dict.fromkeys(core.native.SPARED, request.param))


def as_dtype(make: Make, dtype: torch.dtype) -> Make:
    return lambda: make().to(dtype)


def as_double(make: Make) -> Make:
    return as_dtype(make, torch.float64)


def scaled(end: End, task: int) -> int:
    """In how many layers a task's weights differ from the shared ones."""
    weights = end.weights(task)
    return sum(not torch.equal(weights[n], end.params[n]) for n in weights if n.endswith("weight"))


def assert_same_weights(a: End, b: End, tasks: int, tolerance: float) -> None:
    for task in range(tasks):
        ours, theirs = a.weights(task), b.weights(task)
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            torch.testing.assert_close(
                tensor, theirs[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("way", [{"scope": "layer"}, {"scope": "task"}, {"scaling_over": "union"}])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_native_form_is_the_literal_one(name: str, way: Any, tmp_path: Path) -> None:
    make, shape = NETWORKS[name]
    tasks = some_tasks(3, *shape, dtype=torch.float64, rank=3 if len(shape) > 1 else 5)
    options = {
        **way,
        "epsilon": 0.0,
        "threshold": 0.9,
        "scale_rate": 0.5,
        "epochs": 3,
        "samples": SAMPLES,
        "patience": 2,
    }
    (one, native), (two, literal) = (
        watched(WatchedTRGP, tasks, tmp_path, as_double(make), form=form, **options)
        for form in ("auto", "literal")
    )
    assert (one.form, two.form) == ("native", "literal")
    assert one.selected == two.selected
    assert one.ranks == two.ranks
    assert any(len(trusted) == 2 for trusted in one.selected[2].values())
    assert scaled(native[2], 1) > 0
    assert scaled(native[2], 2) > 1
    for count, (a, b) in enumerate(zip(native, literal, strict=True), 1):
        assert_same_weights(a, b, count, 1e-9)
    for curve, other in zip(one.curves, two.curves, strict=True):
        for key, values in curve.items():
            assert values == pytest.approx(other[key], abs=1e-9)


@pytest.mark.parametrize("name", ["no bias", "norms of the batch"])
@pytest.mark.parametrize("form", ["gpm", "auto", "literal"])
def test_columns_of_zeros_as_a_gpu_has_them_change_nothing(
    form: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, shape = NETWORKS[name]
    tasks = some_tasks(3, *shape, dtype=torch.float64, rank=3 if len(shape) > 1 else 5)
    options: dict[str, Any] = {"threshold": 0.9, "epochs": 3, "samples": SAMPLES}
    method = WatchedGPM if form == "gpm" else WatchedTRGP
    options |= {} if form == "gpm" else {"form": form, "epsilon": 0.0}
    one, plain = watched(method, tasks, tmp_path / "a", as_double(make), **options)
    monkeypatch.setattr(core.native, "aligned", lambda M: F.pad(M, (0, 3)))
    two, wide = watched(method, tasks, tmp_path / "b", as_double(make), **options)
    assert (one.selected, one.ranks) == (two.selected, two.ranks)
    for count, (a, b) in enumerate(zip(plain, wide, strict=True), 1):
        assert_same_weights(a, b, count, 1e-9)


def test_a_union_is_all_of_the_trusted_directions_under_one_matrix(tmp_path: Path) -> None:
    """What it learns of W lies in them all, and reaches where a matrix for each basis cannot."""
    tasks = some_tasks(3, dtype=torch.float64)

    def make() -> nn.Module:
        return mlp(8, 12, CLASSES, bias=False).double()

    options = {"epsilon": 0.0, "threshold": 0.9, "form": "literal"}
    (one, apart), (both, joined) = (
        watched(WatchedTRGP, tasks, tmp_path, make, scaling_over=over, **options)
        for over in ("bases", "union")
    )
    assert one.selected == both.selected
    for a, b in zip(apart[1].weights(1).values(), joined[1].weights(1).values(), strict=True):
        assert torch.equal(a, b)  # one old task is its own union
    for name, trusted in one.selected[2].items():
        assert len(trusted) == 2
        memory = joined[1].state["memory"][name]
        masks = [F.pad(memory["masks"][str(t)], (0, 99))[:, : memory["M"].shape[2]] for t in (0, 1)]
        assert (masks[0] != masks[1]).any()
        (each, union) = (end[2].state["changes"]["2"][name] for end in (apart, joined))
        count = int((masks[0] | masks[1]).sum())
        assert [tuple(S.shape) for S in union.values()] == [(1, count, count)]
        sizes = sorted(S.shape[1] for S in each.values())
        assert sizes == sorted(int(mask.sum()) for mask in masks)
        changed = joined[2].weights(2)[f"{name}.weight"] - joined[2].params[f"{name}.weight"]
        B = memory["M"][0][:, (masks[0] | masks[1])[0]]
        torch.testing.assert_close(changed @ B @ B.T, changed, rtol=0, atol=1e-9)
        C = joined[2].params[f"{name}.weight"] @ B
        torch.testing.assert_close(changed @ B, C @ union["S0"][0], rtol=0, atol=1e-9)


def test_both_ways_to_keep_a_scaling_are_the_literal_one(tmp_path: Path) -> None:
    """A wide layer keeps its scalings, a narrow one what they do to the weight."""
    tasks = some_tasks(3, dtype=torch.float64)

    def make() -> nn.Module:
        return mlp(8, 40, CLASSES).double()

    options = {"epsilon": 0.0, "threshold": 0.95}
    (_, native), (_, literal) = (
        watched(WatchedTRGP, tasks, tmp_path, make, form=form, **options)
        for form in ("auto", "literal")
    )
    kinds = {
        name: {key[0] for key in kept} for name, kept in native[2].state["changes"]["2"].items()
    }
    assert kinds == {"0": {"S"}, "2": {"D"}}
    for count, (a, b) in enumerate(zip(native, literal, strict=True), 1):
        assert_same_weights(a, b, count, 1e-9)


# ---- the learner in a plain loop -------------------------------------------------------------


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor, int | None]) -> Tensor:
    x, y, head = batch
    return F.cross_entropy(model(x) if head is None else model(x, head), y)


class Loop:
    """A user's own loop around a learner, over the batches that a run takes."""

    def __init__(self, benchmark: Benchmark, seed: int, **settings: Any) -> None:
        self.benchmark = benchmark
        self.seed = seed
        self.settings = settings
        self.network = Network(
            benchmark.make_network, benchmark.separate_heads, torch.device("cpu"), seed
        )

    def model(self) -> nn.Module:
        model = self.benchmark.make_network()
        model.load_state_dict(self.network.initial_params())
        return model

    def learn(self, learner: GPM, task: int) -> None:
        train = self.benchmark.tasks[task].train
        head = task if self.benchmark.separate_heads else None

        def some(purpose: str) -> list[tuple[Tensor, Tensor, int | None]]:
            index = order(len(train), self.seed, purpose, task)[:SAMPLES]
            return [(*train.batch(index), head)]

        learner.begin_task(task, some("selection"), loss_fn)
        optimizer = learner.attach(torch.optim.SGD(learner.parameters(), lr=RATE))
        for epoch in range(self.settings["epochs"]):
            learner.model.train()
            part = Part(task, head or 0, train)
            key = (self.seed, "order", task, epoch)
            for x, y, *_ in epoch_batches([part], self.settings["batch"], *key):
                optimizer.zero_grad()
                loss_fn(learner.model, (x, y, head)).backward()
                optimizer.step()
        learner.end_task(some("bases"))


def assert_learner_agrees(learner: GPM, ends: Sequence[End], loop: Loop, tolerance: float) -> None:
    for task, end in enumerate(ends):
        loop.learn(learner, task)
        for old in range(task + 1):
            with learner.task(old):
                ours = {n: t.clone() for n, t in learner.model.state_dict().items()}
            theirs = end.weights(old)
            assert ours.keys() == theirs.keys()
            for name, tensor in theirs.items():
                torch.testing.assert_close(ours[name], tensor, rtol=0, atol=tolerance, msg=name)


CASES = [
    *((name, "freeze", torch.float64) for name in NETWORKS),
    *((name, "freeze", torch.float32) for name in ("mlp", "running norms")),
    *((name, "shared", torch.float64) for name in NETWORKS if "norms" in name),
    *((name, "per_task", torch.float64) for name in NETWORKS if "norms" in name),
]


@pytest.mark.parametrize(("name", "norm", "dtype"), CASES)
@pytest.mark.parametrize("kind", [GPM, TRGP])
def test_a_run_is_the_learner_in_a_plain_loop(
    kind: type[GPM], name: str, norm: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    make, shape = NETWORKS[name]

    def build() -> nn.Module:
        return make().to(dtype)

    tasks = some_tasks(3, *shape, dtype=dtype, rank=3 if len(shape) > 1 else 5)
    training = {"epochs": 2, "batch": 8}
    options: dict[str, Any] = {"threshold": 0.95, "norm": norm}
    trust = {"epsilon": 0.3, "top_k": 2, "selection_samples": SAMPLES, "scale_rate": 0.5}
    only_trgp = trust if kind is TRGP else {}
    result, ends = watched(
        WatchedTRGP if kind is TRGP else WatchedGPM,
        tasks,
        tmp_path,
        build,
        seeds=[3],
        lr=RATE,
        samples=SAMPLES,
        **training,
        **options,
        **only_trgp,
    )
    loop = Loop(from_tensors(tasks, build, seed=3), 3, **training)
    exclude = ["heads"] if name == "heads" else []
    learner = kind(loop.model(), exclude=exclude, **options, **only_trgp)
    assert_learner_agrees(learner, ends, loop, 1e-9 if dtype == torch.float64 else 2e-6)
    for task, chosen in learner.selected.items():
        assert result.selected[task] == {name: j for name, j in chosen.items() if j}
    assert {n: ranks[-1] for n, ranks in result.ranks.items()} == {
        n: used for n, (used, _) in learner.ranks.items()
    }
    if kind is TRGP:
        assert any(result.selected[2].values())


@pytest.mark.parametrize("batch", [4, 16])
@pytest.mark.parametrize("method", [WatchedGPM, WatchedTRGP])
def test_a_network_of_few_digits_learns_as_one_of_many(
    method: Any, batch: int, tmp_path: Path
) -> None:
    """Its weights are bfloat16, what protects them is not."""
    trust = {"epsilon": 0.0, "scale_rate": 0.1} if method is WatchedTRGP else {}
    learnt = {}
    for dtype in (torch.bfloat16, torch.float32):
        tasks = [
            tuple((x.to(dtype), y) for x, y in task)
            for task in some_tasks(3, 8, dtype=torch.float64)
        ]
        options = {"threshold": 0.9, "batch": batch, "epochs": 3, **trust}
        network = as_dtype(lambda: mlp(8, 12, 10, CLASSES), dtype)
        _, ends = watched(method, tasks, tmp_path / str(dtype), network, **options)
        learnt[dtype] = ends[-1].weights(2)
    for name, few in learnt[torch.bfloat16].items():
        many = learnt[torch.float32][name]
        assert few.dtype == torch.bfloat16
        assert (few - many).norm() < 0.1 * many.norm()
