"""Stacked on each other, runs take the steps that each takes alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from companies import (
    LITERAL,
    STACKABLE,
    WAYS,
    Begun,
    all_of,
    asked_for,
    begun,
    company,
    digests,
    eagerly,
    farthest,
    in_float64,
    network_for,
    one_head,
    replayed,
    with_heads,
)
from helpers import mlp
from small_runs import CLASSES, Make, some_tasks
from torch import Tensor, nn

from trgp.benchmarks.data import Tensors
from trgp.core import native
from trgp.core.branches import side_by_side
from trgp.core.literal import effective_weight
from trgp.engine import captured, learning
from trgp.engine.batches import Part
from trgp.engine.company import Stack, stacks_well
from trgp.engine.evaluate import Evaluation
from trgp.engine.network import Network
from trgp.engine.train import Work
from trgp.methods import METHODS
from trgp.methods.base import BENT, GATE, Grads
from trgp.methods.layerwise import Along
from trgp.methods.loss import cross_entropy
from trgp.methods.scaling_forms import numbered
from trgp.methods.trgp import OWN, TRGPMethod
from trgp.results.result import Result
from trgp.tree import leaves, level, tensors

# Of every tensor's largest entry, after a hundred steps.
CLOSE = {torch.float32: 1e-5, torch.float64: 1e-11}


def runs_at(
    task: int,
    way: str,
    make: Make,
    out: Path,
    dtype: torch.dtype,
    seeds: int = 3,
    rank: int = 5,
    **settings: Any,
) -> list[Begun]:
    """Runs of a way that begin a task, each with a rate of its own."""
    method, options = WAYS[way]
    make = in_float64(make) if dtype == torch.float64 else make
    tasks = [
        tuple((x.to(dtype), y) for x, y in task)
        for task in some_tasks(max(3, task + 1), samples=60, rank=rank, dtype=torch.float64)
    ]
    options = {"lr": 0.05} | options | settings
    asked = asked_for(tasks, method, out, make, range(seeds), **options)
    return [begun(run, task).changed(lr=0.05 / (1 + k)) for k, run in enumerate(asked)]


def agree(runs: list[Begun], epochs: int, tolerance: float) -> None:
    """Stacked, step by step and captured alone they come to the same, and somewhere else."""
    together = replayed(runs, epochs, stacked=True)
    (captured_alone,) = replayed(runs[1:2], epochs, stacked=False)
    alone = {0: eagerly(runs[0], epochs), 1: captured_alone, -1: eagerly(runs[-1], epochs)}
    for k, expected in alone.items():
        run, found = runs[k], all_of(runs[k].method, together[k])
        assert farthest(found, all_of(run.method, expected)) < tolerance
        before = dict(run.work.params)
        assert farthest({name: found[name] for name in before}, before) > 1e-2


# Every way on both networks, if it fits them, on one in float32 and on the other in float64.
PAIRS = [
    (way, make, dtype)
    for k, (way, (method, _)) in enumerate(WAYS.items())
    for make, dtype in zip((one_head, with_heads), [*CLOSE][:: (-1) ** k], strict=True)
    if (method == "hat") <= (make is with_heads)
    and METHODS[method].about.joint <= (make is one_head)
] + [("hat", with_heads, torch.float32), ("multitask", one_head, torch.float64)]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "make", "dtype"), PAIRS)
def test_a_hundred_steps_are_those_taken_alone(
    way: str, make: Make, dtype: torch.dtype, tmp_path: Path
) -> None:
    """In the third task, which has something to keep, and some in the first."""
    for task, epochs in [(0, 15)] if way == "multitask" else [(0, 3), (2, 15)]:
        runs = runs_at(task, way, make, tmp_path / str(task), dtype)
        assert runs[0].work.epoch.steps >= 7
        agree(runs, epochs, CLOSE[dtype])


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("batch", [2, 20])
@pytest.mark.parametrize("method", ["gpm", "trgp", "trgp, low rank alone"])
def test_memories_and_trust_regions_of_other_sizes_stack(
    method: str, batch: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a layer of one run trusts nobody and that of another two; in small batches steps
    are made from factors, in larger ones from gradients."""
    method, _, large = method.partition(", ")
    if large:  # alone these layers would be too small for it
        monkeypatch.setattr(native, "SPARED", dict.fromkeys(native.SPARED, -(10**12)))
    options: dict[str, Any] = {"threshold": 0.9}
    if method == "trgp":
        options |= {"epsilon": 0.7, "top_k": 2}
    # Learnt in the same batches up to here, so that the choices are the same ones.
    runs = runs_at(2, method, one_head, tmp_path, dtype, 4, 3, **options)
    runs = [run.changed(batch_size=batch) for run in runs]
    states = [run.work.state for run in runs]
    widths = {
        name: [dict(leaves(state))[f"memory/{name}/M"].shape[2] for state in states]
        for name in ("0", "2", "4")
    }
    assert any(len(set(each)) > 1 for each in widths.values())
    if method == "trgp":
        trusted = {
            name: [len(level(state, "selected", "2").get(name, ())) for state in states]
            for name in widths
        }
        assert {0, 2} <= set(trusted["0"])
        assert {0, 2} <= set(trusted["4"])
    padded = runs[0].method.padded(states[0])
    assert bool(runs[0].method.factored(padded, batch)) == (batch == 2)
    agree(runs, 4 if batch == 2 else 15, CLOSE[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("way", LITERAL)
def test_literal_scalings_of_other_sizes_stack(
    way: str, bias: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Of more and fewer trusted tasks, in bases of other ranks; with biases it is weights that are
    scaled, without them inputs."""
    options = {"threshold": 0.9, "epsilon": 0.72, "top_k": 2}
    runs = runs_at(3, f"trgp, {way}", layers(bias), tmp_path, dtype, 4, 3, **options)
    scalings = [scaling_sizes(run) for run in runs]
    assert len({tuple(each) for each in scalings}) > 1
    names = {name for each in scalings for name in each}
    assert any(len({each[name] for each in scalings if name in each}) > 1 for name in names)
    agree(runs, 15, CLOSE[dtype])


def layers(bias: bool) -> Make:
    return lambda: mlp(8, 12, 10, CLASSES, bias=bias)


def scaling_sizes(run: Begun) -> dict[str, int]:
    """By layer and number the widths of a run's S_j."""
    found = {}
    for name, S in run.work.params.items():
        if name.startswith(OWN):
            layer = name.removeprefix(OWN)
            held = tensors(level(run.work.state, "task", layer))
            widths = [len(one) for one in numbered(held, "ones")]
            assert sum(widths) == S.shape[1] == S.shape[2]
            found |= {f"{layer} {k}": width for k, width in enumerate(widths)}
    return found


def test_a_basis_of_all_directions_and_a_loose_one_stacks(tmp_path: Path) -> None:
    """The loose one is then zero, and its S is as wide as a layer's inputs and one more."""
    options = {"threshold": 1.0, "epsilon": 0.5}
    way = "trgp, a loose direction"
    runs = runs_at(2, way, layers(False), tmp_path, torch.float64, rank=8, **options)
    assert scaling_sizes(runs[0])["2 1"] == 12 + 1
    agree(runs, 15, CLOSE[torch.float64])


@pytest.mark.parametrize("way", ["gpm", "trgp", "trgp, literal", "trgp, all quirks"])
def test_a_run_without_any_memory_stacks_with_others(way: str, tmp_path: Path) -> None:
    """Also as the first, whose tensors say which there are."""
    options = {"threshold": 0.9, "first_task_short": True}
    runs = runs_at(1, way, layers(False), tmp_path, torch.float64, 4, 1, **options)
    runs = runs[2:] + runs[:2]
    remembers = [bool(level(run.work.state, "task")) for run in runs]
    assert remembers == [False, True, True, True]
    agree(runs, 15, CLOSE[torch.float64])


@pytest.mark.slow
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("way", LITERAL)
def test_a_literal_run_in_a_stack_and_back_is_what_it_was(
    way: str, bias: bool, tmp_path: Path
) -> None:
    """After some steps, too, which it could also take alone; its shapes are the network's."""
    options = {"threshold": 0.9, "epsilon": 0.72, "top_k": 2}
    runs = runs_at(3, f"trgp, {way}", layers(bias), tmp_path, torch.float64, 4, 3, **options)
    assert len({tuple(scaling_sizes(run)) for run in runs}) > 1
    shapes = set()
    for run in runs:
        method, (params, state, epoch) = run
        inside, wide = method.to_stack(params, state), {**state, **method.padded(state)}
        given = [*inside.items(), *leaves(method.padded(state))]
        shapes.add(tuple((name, tensor.shape) for name, tensor in given))
        back = method.from_stack(inside, params, state)
        assert farthest(dict(back), dict(params)) < 1e-13
        trained = [name for name in epoch.trained if name in inside]
        moved = eagerly(Begun(method, Work(inside, wide, epoch)).changed(trained=trained), 1)
        found = method.from_stack(moved.params, params, state)
        assert farthest(dict(found), dict(eagerly(run, 1).params)) < 1e-12
    assert len(shapes) == 1


@pytest.mark.parametrize("way", ["gpm", "trgp", "trgp, a loose direction", "owm"])
def test_inputs_are_projected_while_the_pass_goes_on(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every layer once, before there is a gradient, and none afterwards."""
    runs = runs_at(2, way, one_head, tmp_path, torch.float32)
    runs = [run.changed(batch_size=2) for run in runs]
    order: list[str] = []
    project, differentiate = native.projected, torch.autograd.grad
    monkeypatch.setattr(native, "projected", lambda *given: order.append("x") or project(*given))
    monkeypatch.setattr(
        torch.autograd,
        "grad",
        lambda *given, **how: order.append("G") or differentiate(*given, **how),
    )
    steps = captured.CapturedTask(runs[0].method, [run.work for run in runs], stacked=True)
    steps._body(runs[0].work, runs[0].work.epoch.rows()[0][0], first=False)
    assert order == ["x"] * 3 + ["G"]


def test_a_layer_that_is_called_twice_projects_all_of_its_inputs(tmp_path: Path) -> None:
    runs = runs_at(2, "trgp", lambda: Twice().double(), tmp_path, torch.float64)
    runs = [run.changed(batch_size=2) for run in runs]
    padded = runs[0].method.padded(runs[0].work.state)
    assert "again.weight" in runs[0].method.factored(padded, 2)
    agree(runs, 4, CLOSE[torch.float64])


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 10)
        self.again = nn.Linear(10, 10)
        self.last = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.again(self.first(x).relu()).relu()
        last: Tensor = self.last(self.again(inner).relu())
        return last


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_projections_beside_a_rounded_pass_are_not_rounded(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    project = native.projected

    def spied(P: Tensor, x: Tensor) -> Tensor:
        found = project(P, x)
        seen.add((found.dtype, torch.get_float32_matmul_precision()))
        return found

    monkeypatch.setattr(native, "projected", spied)
    settings = {"batch": 2, "epochs": 1, "threshold": 0.9, "precision": precision}
    company(some_tasks(2, samples=50), "trgp", tmp_path, **settings)
    assert seen == {(torch.float32, "highest")}


class Unprojected(TRGPMethod):
    """Takes plain steps, inside span(M) as well."""

    def along(self, name: str, grads: Grads, state: Any) -> Along:
        return Along()


def test_a_subclass_that_moves_otherwise_computes_with_the_weights_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No coordinate of its weights is a constant, and it is not stacked."""
    monkeypatch.setitem(METHODS, "unprojected", Unprojected)
    settings = {"form": "literal", "threshold": 0.9, "epsilon": 0.3}
    (asked,) = asked_for(some_tasks(3), "unprojected", tmp_path, one_head, [0], **settings)
    run = begun(asked, 2)
    assert not run.method.stackable()
    params, state, _ = eagerly(run, 3)
    weights = run.method.weights_for(params, state, 2)
    scaled = [name for name in run.method.layers if OWN + name in params]
    assert scaled
    for name in scaled:
        each = run.method.layers[name]
        held = tensors(level(state, "task", name))
        W = each.pack(params)
        assert (W @ held["M"] - held["C"]).abs().max() > 1e-3
        expected = effective_weight(W, [held["B"]], [params[OWN + name]])
        torch.testing.assert_close(each.pack(weights), expected)


def test_literal_runs_of_few_digits_are_not_stacked(tmp_path: Path) -> None:
    """What moves beside their effective weights has more of them."""
    for form, stacked in (("auto", True), ("literal", False)):
        make = lambda: one_head().bfloat16()  # noqa: E731
        (asked,) = asked_for(some_tasks(2), "trgp", tmp_path, make, [0], form=form)
        network = Network(make, False, torch.device("cpu"), 0)
        assert asked.config.method.bind(network).stackable() == stacked


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_whole_runs_end_as_they_end_alone(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the same first weights, by the same batches and draws: in float64 nothing else can
    bring every loss so close."""
    widths = spied_on(monkeypatch)
    method, options = WAYS[way]
    tasks = some_tasks(3, samples=60, dtype=torch.float64)
    make = in_float64(network_for(method))
    settings = {"lr": 0.05, "epochs": 4, "evaluate_unseen": True} | options
    together = company(tasks, method, tmp_path / "together", make, **settings)
    assert widths == [3]
    for seed, result in together.items():
        engine = {"captured": seed == 1}
        alone = company(tasks, method, tmp_path / "alone", make, [seed], **engine, **settings)[seed]
        for found, expected in zip(result.curves, alone.curves, strict=True):
            assert found.keys() == expected.keys()
            for key, values in expected.items():
                assert found[key] == pytest.approx(values, rel=1e-10)
        assert result.accuracy_matrix == alone.accuracy_matrix
        assert result.untrained == alone.untrained
        assert (result.selected, result.ranks) == (alone.selected, alone.ranks)
        assert result.figures == pytest.approx(alone.figures, abs=1e-9)
    assert widths == [3]
    assert len({result.digest for result in together.values()}) == 3


def spied_on(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The widths of all stacks that are made from now on."""
    widths: list[int] = []

    class Spied(Stack):
        def __init__(self, sequencers: Any, width: int, stream: Any) -> None:
            widths.append(width)
            super().__init__(sequencers, width, stream)

    monkeypatch.setattr(learning, "Stack", Spied)
    return widths


# ---- bits ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_bits_depend_on_the_width_alone(way: str, tmp_path: Path) -> None:
    """Not on who else is in the stack, nor on who has ended before."""
    method, options = WAYS[way]
    tasks = some_tasks(3, samples=50)
    settings = {"epochs": 2} | options

    def go(out: str, *seeds: int) -> dict[int, str]:
        return digests(
            company(tasks, method, tmp_path / out, network_for(method), seeds, **settings)
        )

    expected = go("one", 0, 1, 2)
    assert go("again", 0, 1, 2) == expected
    assert go("other", 7, 1, 5)[1] == expected[1]
    for kept in ([0], [2, 1]):
        (path,) = (tmp_path / "one").glob("**/seed-0")
        gone = [path.with_name(f"seed-{seed}") / "result.json" for seed in range(3)]
        for seed, result in enumerate(gone):
            if seed not in kept:
                result.unlink()
        assert go("one", 0, 1, 2) == expected


def test_a_run_is_not_disturbed_by_others_at_other_rates(tmp_path: Path) -> None:
    """Runs of a sweep, which share seeds and differ in their rates alone."""
    tasks = some_tasks(2, samples=50)

    def go(*rates: float) -> dict[float, str]:
        asked = [
            run
            for rate in rates
            for run in asked_for(tasks, "gpm", tmp_path / str(rates), one_head, [3], lr=rate)
        ]
        found = {}
        for run, end in learning.learn(asked, torch.device("cpu"), True, lambda event: None):
            assert not isinstance(end, Exception)
            found[run.config.training.lr] = end.digest
        return found

    first = go(0.1, 0.05, 0.2)
    assert len(set(first.values())) == 3
    assert go(0.1, 0.01, 0.3)[0.1] == first[0.1]


VARIED: tuple[dict[str, Any], ...] = (
    {"threshold": 0.8, "samples": 20, "first_task_short": True},
    {"threshold_growth": 0.01, "epsilon": 0.0, "unscaled_inputs": True},
    {"epsilon": 0.9, "scope": "task", "third_task_trusts_second": True},
    {"selection_samples": 9, "first_layer_gate": True},
)


@pytest.mark.parametrize("form", ["auto", "literal"])
def test_runs_that_differ_between_tasks_alone_share_their_steps(form: str, tmp_path: Path) -> None:
    """Other settings, and so other memories and trust regions, in one stack: each as alone."""
    tasks = some_tasks(3, samples=50)
    learnt = []
    for k, options in enumerate(VARIED):
        out = tmp_path / str(k)
        learnt += asked_for(tasks, "trgp", out, one_head, [3], form=form, **options)
    assert len({run.family for run in learnt}) == 1
    alone = {}
    for run in learnt:
        apart = replace(run, folder=run.folder / "alone")
        ((_, end),) = learning.learn([apart], torch.device("cpu"), True, lambda event: None)
        alone[run] = end
    selected = []
    for run, end in learning.learn(learnt, torch.device("cpu"), True, lambda event: None):
        lone = alone[run]
        assert isinstance(end, Result)
        assert isinstance(lone, Result)
        assert end.device.endswith("4 runs at once")
        assert (end.selected, end.ranks) == (lone.selected, lone.ranks)
        for curves, others in zip(end.curves, lone.curves, strict=True):
            assert curves["loss"] == pytest.approx(others["loss"], rel=1e-5)
        selected.append(end.selected)
    assert len({str(trusted) for trusted in selected}) > 1


def test_what_steps_read_keeps_runs_apart(tmp_path: Path) -> None:
    tasks = some_tasks(2, samples=50)
    others: list[dict[str, Any]] = [
        {},
        {"top_k": 1},
        {"scale_rate": 0.5},
        {"form": "literal"},
        {"batch": 9},
    ]
    asked = [run for o in others for run in asked_for(tasks, "trgp", tmp_path, one_head, [3], **o)]
    assert len({run.family for run in asked}) == len(others)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("method", ["trgp", "er"])
def test_pauses_between_steps_change_no_bit(
    method: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def go(out: str) -> dict[int, str]:
        options = STACKABLE[method]
        return digests(company(some_tasks(2), method, tmp_path / out, one_head, **options))

    expected = go("whole")
    monkeypatch.setattr(captured, "CHUNK", chunk)
    assert go("in pieces") == expected


# ---- what cannot be stacked ------------------------------------------------------------------


class DroppingInside(nn.Module):
    """Dropout that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.body(x).relu(), 0.3, self.training))


def between_layers(*inside: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), *inside, nn.ReLU(), nn.Linear(12, CLASSES))


def convolving() -> nn.Module:
    row = nn.Unflatten(1, (1, 8))
    return nn.Sequential(row, nn.Conv1d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(18, CLASSES))


ALONE: dict[str, tuple[str, Make, dict[str, Any]]] = {
    "dropout": ("trgp", lambda: between_layers(nn.Dropout(0.3)), {"epsilon": 0.0}),
    "dropout inside": ("finetune", DroppingInside, {}),
    "convolutions": ("trgp", convolving, {"epsilon": 0.0}),
    "running statistics": ("gpm", lambda: between_layers(nn.BatchNorm1d(12)), {}),
    "a gradient inside": ("agem", one_head, {"memory_size": 20}),
    "batches of several heads": ("multitask", with_heads, {}),
}


@pytest.mark.parametrize("case", ALONE)
def test_what_cannot_be_stacked_has_its_steps_for_itself(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And comes to the very bits that it comes to alone."""
    widths = spied_on(monkeypatch)
    method, make, options = ALONE[case]
    tasks = some_tasks(3)
    together = company(tasks, method, tmp_path / "together", make, **options)
    assert widths == []
    for seed, result in together.items():
        alone = company(tasks, method, tmp_path / "alone", make, [seed], **options)
        assert alone[seed].digest == result.digest
        assert alone[seed].curves == result.curves
    assert len({result.digest for result in together.values()}) == 3


class Tracking(nn.Module):
    """A buffer that no step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(8, 12, CLASSES)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x * self.scale)


NORMS: dict[str, Make] = {
    "layer": lambda: between_layers(nn.LayerNorm(12)),
    "batch": lambda: between_layers(nn.BatchNorm1d(12, track_running_stats=False)),
}
WELL: dict[str, Make] = {
    "plain": one_head,
    "layer norm": NORMS["layer"],
    "norm of the batch": NORMS["batch"],
    "dropout of nothing": lambda: between_layers(nn.Dropout(0.0)),
}
NOT_WELL: dict[str, Make] = {
    "dropout": lambda: between_layers(nn.Dropout(0.1)),
    "running averages": lambda: between_layers(nn.BatchNorm1d(12)),
    "dropout inside": DroppingInside,
    "buffer": Tracking,
    "convolution": convolving,
}


@pytest.mark.parametrize("name", [*WELL, *NOT_WELL])
def test_which_networks_stack_well(name: str) -> None:
    make = (WELL | NOT_WELL)[name]
    network = Network(make, False, torch.device("cpu"), 0)
    x = torch.randn(2, 8)
    for method in (METHODS["finetune"](), METHODS["trgp"](), METHODS["trgp"](form="literal")):
        assert stacks_well(method.bind(network), x) == (name in WELL)
    assert not stacks_well(METHODS["agem"]().bind(network), x)


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("way", ["gpm", "trgp", "trgp, literal", "ewc", "lwf"])
def test_norm_layers_without_averages_stack(way: str, norm: str, tmp_path: Path) -> None:
    options = {"norm": "shared"} if WAYS[way][0] in ("gpm", "trgp") else {}
    runs = runs_at(1, way, NORMS[norm], tmp_path, torch.float64, **options)
    agree(runs, 15, CLOSE[torch.float64])


# ---- what steps are made of ------------------------------------------------------------------


@pytest.mark.parametrize("dims", [(0, 0), (1, 0), (2, 1), (0, None)])
def test_cross_entropy_of_a_stack_is_that_of_each(dims: tuple[int, int | None]) -> None:
    """Value and gradient, whichever axis the runs lie on."""
    runs, samples = 3, 5
    logits = torch.randn(runs, samples, CLASSES, dtype=torch.float64)
    y = torch.randint(CLASSES, (runs, samples) if dims[1] is not None else (samples,))
    labels = y if dims[1] is not None else y.expand(runs, -1)
    weights = torch.rand(runs, dtype=torch.float64)

    given = logits.movedim(0, dims[0]).contiguous().requires_grad_()
    own_y = y if dims[1] is None else y.movedim(0, dims[1])
    found = torch.vmap(cross_entropy, in_dims=dims)(given, own_y)
    (gradient,) = torch.autograd.grad(weights @ found, given)

    plain = logits.clone().requires_grad_()
    expected = torch.stack([F.cross_entropy(plain[k], labels[k]) for k in range(runs)])
    (expected_gradient,) = torch.autograd.grad(weights @ expected, plain)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(gradient.movedim(dims[0], 0), expected_gradient, rtol=0, atol=1e-14)


def test_cross_entropy_finds_its_way_through_a_stacked_network() -> None:
    weight = torch.randn(3, CLASSES, 8, dtype=torch.float64)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    y = torch.randint(CLASSES, (3, 5))

    def loss(weight: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(x @ weight.mT, y)

    free = weight.clone().requires_grad_()
    (found,) = torch.autograd.grad(torch.vmap(loss)(free, x, y).sum(), free)
    for k in range(3):
        own = weight[k].clone().requires_grad_()
        (expected,) = torch.autograd.grad(F.cross_entropy(x[k] @ own.mT, y[k]), own)
        torch.testing.assert_close(found[k], expected, rtol=0, atol=1e-14)


def test_side_by_side_gives_all_in_order() -> None:
    assert list(side_by_side(iter("abcdefghij"))) == list("abcdefghij")
    assert list(side_by_side([])) == []


# ---- evaluation ------------------------------------------------------------------------------


def scores(network: Network, weights: list[dict[str, Tensor]], captured: bool) -> list[Tensor]:
    """Of tasks of other sizes, each by some weights."""
    evaluation = Evaluation(network, captured)
    draw = torch.Generator().manual_seed(1)
    found = []
    for t, each in enumerate(weights):
        count = 11 + 5 * (t % 3)
        x = torch.randn(count, 8, generator=draw, dtype=torch.float64)
        y = torch.randint(CLASSES, (count,), generator=draw)
        part = Part(t, t % network.heads, Tensors(x, y))
        found.append(evaluation(each, part, 4, 1 + t % 2, 0, "test"))
    return found


def test_captured_evaluation_is_the_plain_one() -> None:
    """Whichever weights come: others in the same places, gates that come and go, scalings of
    other widths under the same names."""
    network = Network(lambda: with_heads().double(), True, torch.device("cpu"), 0)
    first, second = network.initial_params(0), network.initial_params(1)
    gates = {f"{GATE}layers.1": torch.rand(32, dtype=torch.float64)}

    def bent(rank: int) -> dict[str, Tensor]:
        return {
            f"{BENT}layers.0/{name}": torch.randn(
                8 if name == "B" else rank, rank, dtype=torch.float64
            )
            for name in "BS"
        }

    weights = [
        first,
        second,
        {**first, **gates},
        {**first, **bent(2)},
        {**second, **bent(3)},
        first,
        {**first, **bent(1)},
        {**first, **bent(5)},
        {**second, **gates, **bent(2)},
        second,
    ]
    found, expected = (scores(network, weights, captured) for captured in (True, False))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert len({tuple(score.tolist()) for score in expected}) == len(weights)


def test_what_evaluation_gives_is_not_changed_by_the_next() -> None:
    network = Network(lambda: one_head().double(), False, torch.device("cpu"), 0)
    weights = [network.initial_params(k) for k in range(3)]
    kept = scores(network, weights, True)
    assert [tuple(score.tolist()) for score in kept] == [
        tuple(score.tolist()) for score in scores(network, weights, False)
    ]


def test_whole_projectors_are_made_once_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    whole = native.outside
    monkeypatch.setattr(native, "outside", lambda M: made.append(1) or whole(M))
    runs = runs_at(2, "trgp", one_head, tmp_path, torch.float32)
    made.clear()
    replayed(runs, 1, stacked=True)
    once = len(made)
    replayed(runs, 4, stacked=True)
    assert len(made) == 2 * once > 0
