"""Runs that learn at the same time do not disturb each other, whatever becomes of one of them."""

from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from companies import (
    CPU,
    STACKABLE,
    WAYS,
    Tasks,
    asked_for,
    capture_as_on_a_gpu,
    company,
    digests,
    each_alone,
    ends,
    in_float64,
    one_head,
    with_heads,
)
from helpers import mlp
from small_runs import CLASSES, Conv, Make, result_files, some_tasks
from torch import Tensor, nn

import trgp
from trgp.benchmarks.data import Tensors
from trgp.draws import seed_of
from trgp.engine import captured, checkpoint, learning, replay, tape
from trgp.engine.context import Context
from trgp.engine.divergence import DivergenceError, SeedsFailedError
from trgp.engine.errors import RunError
from trgp.engine.events import EpochFinished, Event, RunFinished, RunStarted, TaskFinished
from trgp.engine.network import Network
from trgp.methods import METHODS, Params
from trgp.methods.finetune import Finetune
from trgp.results.result import Result, Results


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs share a CPU as they share a GPU."""
    monkeypatch.setattr("trgp.engine.run.company_of", lambda together, *_: together or 10)


# ---- taking turns ----------------------------------------------------------------------------


def images() -> Tasks:
    return some_tasks(2, 4, 4, 4)


def test_a_capture_reads_samples_of_its_own_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of tasks with other numbers of samples come mixed, and in any order."""
    tasks = [each for n in (40, 17, 64) for each in some_tasks(1, samples=n)]
    eager, captured_ones = (
        company(tasks, "multitask", tmp_path / str(captured), with_heads, [1], captured=captured)
        for captured in (False, True)
    )
    capture_as_on_a_gpu(monkeypatch)
    as_on_a_gpu = company(tasks, "multitask", tmp_path / "gpu", with_heads, [1])
    assert digests(eager) == digests(captured_ones) == digests(as_on_a_gpu)


@pytest.mark.parametrize("method", METHODS)
def test_captured_steps_end_with_the_bits_of_eager_ones(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At rates that no number in float32 is, nor their products with that of the scalings."""
    taken = []

    def taped(body: tape.Body) -> tape.Body:
        taken.append(tape.taped(body) != body)
        return tape.taped(body)

    monkeypatch.setattr(replay, "OFTEN", 1)
    monkeypatch.setattr(replay, "taped", taped)
    options = STACKABLE.get(method, {"memory_size": 20} if method == "agem" else {})
    found = [
        company(
            some_tasks(3), method, tmp_path / str(captured), with_heads, [4],
            captured=captured, **options,
        )[4]
        for captured in (True, False)
    ]  # fmt: skip
    assert taken
    assert all(taken)
    assert found[0].digest == found[1].digest
    assert found[0].curves == found[1].curves
    assert found[0].accuracy_matrix == found[1].accuracy_matrix
    if method == "trgp":
        assert any(found[0].selected)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 64])
@pytest.mark.parametrize("method", ["trgp", "agem"])
def test_runs_of_their_own_take_turns_and_end_with_the_bits_they_have_alone(
    method: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if they pause after every step; their running statistics are their own."""
    options = {"epsilon": 0.0} if method == "trgp" else {"memory_size": 20}
    alone = each_alone(images(), method, tmp_path / "alone", Conv, **options)
    monkeypatch.setattr(captured, "CHUNK", chunk)
    seen: list[Event] = []
    together = company(
        images(), method, tmp_path / "together", Conv, observer=seen.append, **options
    )
    assert digests(together) == digests(alone)
    epochs = [event for event in seen if isinstance(event, EpochFinished)]
    places = [(event.task, event.epoch) for event in epochs]
    assert places == sorted(places)
    assert [event.seed for event in epochs] == [0, 1, 2] * 4


def test_a_company_is_told_by_its_results(tmp_path: Path, sharing: None) -> None:
    def run(**options: Any) -> Results:
        return trgp.run(
            some_tasks(2), "gpm", network=one_head, epochs=1, device="cpu", out=tmp_path, **options
        )

    together = run(seeds=3, together=2)
    assert [result.seed for result in together] == [0, 1, 2]
    counted = [", 2 runs at once" in result.device for result in together]
    assert counted == [True, True, False]
    seen: list[Event] = []
    again = run(seeds=3, together=2, observer=seen.append)
    assert again == together
    assert seen == [RunFinished(r.seed, r.acc, r.bwt, stored=True) for r in together]
    (folder,) = {path.parents[1] for path in result_files(tmp_path)}
    fresh = run(seeds=3, together=3, fresh=True)
    assert all(", 3 runs at once" in result.device for result in fresh)
    for seed in range(3):
        left = {path.name for path in (folder / f"seed-{seed}").iterdir()}
        assert left == {"lock", "result.json", "result.previous.json"}


@pytest.mark.parametrize("method", ["gpm", "agem"])
def test_a_run_that_another_process_finished_meanwhile_is_not_repeated(
    method: str, tmp_path: Path
) -> None:
    """Between the look for a result and the lock lies the time that reading the data takes."""
    quicker: dict[int, Result] = {}
    asked = asked_for(some_tasks(1), method, tmp_path, one_head, [0, 1])
    slow = asked[1].load

    def load(seed: int, device: torch.device) -> Any:
        if not quicker:
            quicker.update(company(some_tasks(1), method, tmp_path, one_head, [1]))
        return slow(seed, device)

    late = learning.Asked(asked[1].config, 1, load, asked[1].folder, "a test")
    seen: list[Event] = []
    found = {run.seed: end for run, end in ends([asked[0], late], observer=seen.append)}
    assert found[1] == quicker[1]
    assert isinstance(found[0], Result)
    assert [event.seed for event in seen if isinstance(event, RunStarted)] == [0]


# ---- early stopping --------------------------------------------------------------------------

PATIENT = {"epochs": 12, "patience": 1, "lr": 0.2, "lr_min": 0.04}


def lengths(results: dict[int, Result]) -> dict[int, list[int]]:
    return {seed: [len(c["loss"]) for c in result.curves] for seed, result in results.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    ["finetune", "single", "gpm", "trgp", "trgp, literal", "trgp, all quirks", "ewc", "er", "lwf"],
)
def test_stacked_runs_that_end_a_task_early_wait_for_the_others(way: str, tmp_path: Path) -> None:
    """Everyone learns as long as alone, from its own samples and with its own memory."""
    method, options = WAYS[way]
    tasks = some_tasks(3, samples=60, dtype=torch.float64)
    settings = {**PATIENT, **options}
    make = in_float64(one_head)
    seen: list[Event] = []
    together = company(tasks, method, tmp_path / "together", make, observer=seen.append, **settings)
    alone = each_alone(tasks, method, tmp_path / "alone", make, **settings)
    assert lengths(together) == lengths(alone)
    assert any(len(set(each)) > 1 for each in zip(*lengths(alone).values(), strict=True))
    for seed, result in together.items():
        for found, expected in zip(result.curves, alone[seed].curves, strict=True):
            for key, values in expected.items():
                assert found[key] == pytest.approx(values, rel=1e-8)
        assert result.accuracy_matrix == alone[seed].accuracy_matrix
    places = [event.task for event in seen if isinstance(event, (EpochFinished, TaskFinished))]
    assert places == sorted(places)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["finetune", "trgp", "trgp, all quirks", "er"])
def test_the_bits_of_a_stack_do_not_depend_on_who_stops_when(way: str, tmp_path: Path) -> None:
    method, options = WAYS[way]
    tasks = some_tasks(3, samples=60)
    settings = {**PATIENT, **options}
    expected = company(tasks, method, tmp_path / "one", one_head, (0, 1, 2), **settings)
    for place, seeds in enumerate([(0, 6, 3), (7, 1, 5), (4, 8, 2)]):
        found = company(tasks, method, tmp_path / str(seeds), one_head, seeds, **settings)
        assert found[place].digest == expected[place].digest


@pytest.mark.parametrize(("method", "make"), [("agem", one_head), ("gpm", Conv)])
def test_runs_of_their_own_do_not_wait(method: str, make: Make, tmp_path: Path) -> None:
    tasks = some_tasks(3, 4, 4, 4) if make is Conv else some_tasks(3, samples=60)
    seen: list[Event] = []
    together = company(tasks, method, tmp_path / "together", make, observer=seen.append, **PATIENT)
    alone = each_alone(tasks, method, tmp_path / "alone", make, **PATIENT)
    assert len({tuple(each) for each in lengths(alone).values()}) > 1
    assert digests(together) == digests(alone)
    places = [event.task for event in seen if isinstance(event, (EpochFinished, TaskFinished))]
    assert places != sorted(places)


# ---- one that fails --------------------------------------------------------------------------


def exploding(make: Make, seed: int, task: int) -> Make:
    """Networks of which one, as it is initialised for a seed and task, cannot be learnt from."""

    def made() -> nn.Module:
        network = make()
        if torch.initial_seed() == seed_of(seed, "init", task):
            for param in network.parameters():
                nn.init.constant_(param, 1e30)
        return network

    return made


@pytest.mark.parametrize(("make", "shape"), [(one_head, (8,)), (Conv, (4, 4, 4))])
def test_a_seed_that_diverges_leaves_the_others_as_they_are(
    make: Make, shape: tuple[int, ...], tmp_path: Path, sharing: None
) -> None:
    """Stacked and side by side; what it has finished before is kept."""
    tasks = some_tasks(3, *shape)
    settings: dict[str, Any] = {"epochs": 2, "batch": 8, "lr": 0.1, "patience": 0}
    expected = company(tasks, "single", tmp_path / "sound", make, **settings)

    def go(observer: Any) -> None:
        trgp.run(
            tasks, "single", network=exploding(make, 1, 1), seeds=3, device="cpu",
            out=tmp_path / "exploding", observer=observer, **settings,
        )  # fmt: skip

    for attempt in range(2):
        seen: list[Any] = []
        with pytest.raises(
            SeedsFailedError, match="Seed 1: The training diverged in task 2, e"
        ) as e:
            go(seen.append)
        assert [failure.task for failure in e.value.failures] == [1]
        finished = {result.seed: result.digest for result in e.value.finished}
        assert finished == {seed: expected[seed].digest for seed in (0, 2)}
        begun = next(event for event in seen if isinstance(event, RunStarted) and event.seed == 1)
        assert (begun.done_tasks, begun.done_epochs) == (attempt, 0)


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written while a run goes on, but where it begins."""
    monkeypatch.setattr(checkpoint, "SPARE", 1e9)


def test_a_run_of_a_stack_that_diverges_keeps_its_last_epoch(
    tmp_path: Path, unhurried: None
) -> None:
    """In the middle of a task, of which its last good epoch is not written yet."""
    tasks = some_tasks(2, samples=60)

    def go(out: str, *rates: float) -> tuple[dict[float, Any], list[Event]]:
        asked = [
            run
            for rate in rates
            for run in asked_for(
                tasks, "ewc", tmp_path / out, one_head, [1], lr=rate, epochs=6, strength=50.0
            )
        ]
        seen: list[Event] = []
        found = ends(asked, observer=seen.append)
        return {run.config.training.lr: end for run, end in found}, seen

    sound, _ = go("sound", 0.1, 0.2, 0.3)
    mixed, seen = go("mixed", 0.1, 2.0, 0.3)
    for rate in (0.1, 0.3):
        assert mixed[rate].digest == sound[rate].digest
    error = mixed[2.0]
    assert isinstance(error, DivergenceError)
    assert error.task == 1
    assert error.epoch >= 1
    again, seen = go("mixed", 0.1, 2.0, 0.3)
    assert str(again[2.0]) == str(error)
    begun = next(event for event in seen if isinstance(event, RunStarted))
    assert (begun.done_tasks, begun.done_epochs) == (error.task, error.epoch)


def test_a_failure_of_one_run_saves_the_others(tmp_path: Path, unhurried: None) -> None:
    """Whoever is told of it may give up on all; nobody loses an epoch that was not written yet."""
    tasks = some_tasks(2)
    whole = company(tasks, "gpm", tmp_path / "whole", epochs=3)

    def fail(event: Event) -> None:
        if not isinstance(event, EpochFinished):
            return
        if (event.task, event.epoch, event.seed) == (1, 2, 1):
            raise RunError("Something is wrong.")

    asked = asked_for(tasks, "gpm", tmp_path / "parts", one_head, [0, 1, 2], epochs=3)
    with closing(learning.learn(asked, CPU, True, fail)) as found:
        run, end = next(found)
    assert run.seed == 1
    assert str(end) == "Something is wrong."
    seen: list[Event] = []
    again = company(tasks, "gpm", tmp_path / "parts", observer=seen.append, epochs=3)
    assert digests(again) == digests(whole)
    begun = {e.seed: (e.done_tasks, e.done_epochs) for e in seen if isinstance(e, RunStarted)}
    assert begun == dict.fromkeys(range(3), (1, 2))


# ---- what cannot be stacked ------------------------------------------------------------------


class Looking(Finetune):
    """A step that looks at a value, which nothing stacked can do."""

    def step(self, params: Params, grads: Any, state: Any, batch: Any, lr: Any) -> Any:
        if float(batch.y.sum()) < 0:
            return params, {}
        return super().step(params, grads, state, batch, lr)


class Careful(Looking):
    """The same, which says so."""

    def stackable(self) -> bool:
        return False


class Wary(nn.Linear):
    """A network that looks at a value."""

    def __init__(self) -> None:
        super().__init__(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if bool(self.weight.abs().sum() >= 0) else x


def test_a_method_that_cannot_be_stacked_is_told_how_to_say_so(tmp_path: Path) -> None:
    tasks, name = some_tasks(2), __name__
    with pytest.raises(RunError, match=r"Looking cannot be .* stackable\(\) return False"):
        company(tasks, f"{name}:Looking", tmp_path / "a", one_head, [0, 1])
    found = company(tasks, f"{name}:Careful", tmp_path / "b", one_head, [0, 1])
    plain = company(tasks, "finetune", tmp_path / "c", one_head, [1], captured=False)
    assert found[1].digest == plain[1].digest


def test_a_network_that_cannot_be_stacked_learns_beside_others(tmp_path: Path) -> None:
    tasks = some_tasks(2)
    found = company(tasks, "finetune", tmp_path / "a", Wary, [0, 1])
    alone = company(tasks, "finetune", tmp_path / "b", Wary, [1], captured=False)
    assert found[1].digest == alone[1].digest


class Late(Finetune):
    """A step that makes what it names as moving, but nothing has put there."""

    moving = ("count",)

    def step(self, params: Params, grads: Any, state: Any, batch: Any, lr: Any) -> Any:
        new, _ = super().step(params, grads, state, batch, lr)
        return new, {"count": torch.ones(1)}


def test_what_a_step_changes_must_be_there_before(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"A step added count .* create it in begin_task"):
        company(some_tasks(2), f"{__name__}:Late", tmp_path, one_head, [0])


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_a_rounded_network_is_stacked_as_it_is_alone(precision: str, tmp_path: Path) -> None:
    """Its first layer's gradient whole, the next one's in factors, in a run that has a memory."""
    options = {"threshold": 0.9, "epsilon": 0.0, "precision": precision, "batch": 4, "lr": 0.01}
    make = partial(mlp, 4, 256, 64, CLASSES, bias=False)
    tasks = some_tasks(2, 4)
    found = company(tasks, "trgp", tmp_path / "a", make, [0, 1], **options)
    alone = company(tasks, "trgp", tmp_path / "b", make, [1], captured=False, **options)
    losses = [run.curves[1]["loss"] for run in (found[1], alone[1])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5 if precision != "bfloat16" else 0.02)


def test_the_gradient_that_selects_is_never_rounded(tmp_path: Path) -> None:
    trusted = []
    for precision in ("float32", "bfloat16"):
        network = Network(one_head, False, CPU, 0, precision)
        method = METHODS["trgp"]().bind(network)
        (x, y), _ = some_tasks(1)[0]
        ctx = Context(network, 0, 0, Tensors(x, y), network.initial_params(), {}, 8, 0, 1)
        trusted.append(ctx.gradients(method, ctx.samples(20, "selection")))
    assert all(trusted[0][name].equal(trusted[1][name]) for name in trusted[0])


# ---- more runs than there is room for --------------------------------------------------------


def test_a_run_begins_when_another_has_ended(tmp_path: Path) -> None:
    """At most two at a time, in their order, and each comes to the bits that it comes to alone."""
    some, seeds = images(), range(5)
    going: set[int] = set()
    most, begun = 0, []

    def watch(event: Event) -> None:
        nonlocal most
        if isinstance(event, RunStarted):
            going.add(event.seed)
            begun.append(event.seed)
            most = max(most, len(going))
        elif isinstance(event, RunFinished):
            going.remove(event.seed)

    asked = asked_for(some, "gpm", tmp_path / "queued", Conv, seeds)
    with closing(learning.learn(asked, CPU, True, watch, most=2)) as found:
        queued = {run.seed: end for run, end in found}
    assert begun == list(seeds)
    assert most == 2
    assert digests(queued) == digests(each_alone(some, "gpm", tmp_path / "alone", Conv, seeds))


def test_stacks_are_made_of_one_company_and_wait_for_room(tmp_path: Path) -> None:
    """As many runs as there may be, not as many stacks; each stack as if it were alone."""
    some = some_tasks(2)
    expected = {}
    queued = []
    for number, seeds in enumerate(((0, 1, 2), (3, 4), (5, 6))):
        asked = asked_for(some, "gpm", tmp_path / "queued", one_head, seeds)
        queued += [replace(run, company=number) for run in asked]
        expected |= company(some, "gpm", tmp_path / f"{number}", one_head, seeds)
    at_once = []

    def watch(event: Event) -> None:
        if isinstance(event, RunStarted):
            at_once.append(event.seed)
        elif isinstance(event, RunFinished):
            at_once.remove(event.seed)
        assert len(at_once) <= 4

    with closing(learning.learn(queued, CPU, True, watch, most=4)) as found:
        ended = {run.seed: end for run, end in found}
    assert digests(ended) == digests(expected)


def test_what_another_process_has_finished_meanwhile_is_read(tmp_path: Path) -> None:
    some = images()
    asked = asked_for(some, "finetune", tmp_path, Conv, (0, 1))

    def finish_the_other(event: Event) -> None:
        if isinstance(event, RunFinished) and event.seed == 0 and not event.stored:
            with closing(learning.learn(asked[1:], CPU, True, lambda _: None)) as found:
                assert all(isinstance(end, Result) for _, end in found)

    with closing(learning.learn(asked, CPU, True, finish_the_other, most=1)) as found:
        ended = {run.seed: end for run, end in found}
    assert digests(ended) == digests(each_alone(some, "finetune", tmp_path / "a", Conv, (0, 1)))


def test_a_run_that_cannot_begin_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is told of as soon as another ends, not after all."""
    sequencer = learning._sequencer

    def failing(bound: Any, *rest: Any) -> Any:
        if bound.run.seed == 0:
            raise PermissionError("no writing here")
        return sequencer(bound, *rest)

    monkeypatch.setattr(learning, "_sequencer", failing)
    asked = asked_for(images(), "finetune", tmp_path, Conv, range(3))
    with closing(learning.learn(asked, CPU, True, lambda _: None, forgiving=True, most=1)) as found:
        ended = [(run.seed, end) for run, end in found]
    assert [seed for seed, _ in ended] == [1, 0, 2]
    assert "no writing here" in str(ended[1][1])
    assert all(isinstance(end, Result) for seed, end in ended if seed)
    with (
        pytest.raises(PermissionError),
        closing(learning.learn(asked, CPU, True, lambda _: None)) as found,
    ):
        list(found)
