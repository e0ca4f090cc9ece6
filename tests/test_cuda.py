"""On a GPU: the same properties, and no waiting for the device inside a step."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from companies import (
    STACKABLE,
    WAYS,
    all_of,
    asked_for,
    begun,
    eagerly,
    farthest,
    in_float64,
    network_for,
    one_head,
    replayed,
)
from helpers import ConvNet, Vit
from small_runs import some_tasks
from support import inside
from torch import Tensor, nn

import trgp
from trgp import GPM, TRGP
from trgp.benchmarks.models import AlexNet
from trgp.core.decompositions import cholesky, eigh, qr
from trgp.engine import captured
from trgp.engine.errors import Interrupted
from trgp.engine.evaluate import Evaluation
from trgp.engine.events import EpochFinished, Event, RunStarted
from trgp.engine.machine import repeatable
from trgp.methods import METHODS
from trgp.results.phases import PHASES
from trgp.results.result import Result

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

Batch = tuple[Tensor, Tensor]


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    x, y = (t.cuda() for t in batch)
    return F.cross_entropy(model(x), y)


def tasks(count: int, dtype: torch.dtype) -> list[list[Batch]]:
    y = torch.arange(4)
    return [[(torch.randn(4, 16, 4, 4, dtype=dtype), y)] for _ in range(count)]


def learn(learner: GPM, task: int, loader: list[Batch], *, adam: bool, steps: int = 30) -> None:
    learner.begin_task(task, loader, loss_fn)
    kind = torch.optim.AdamW if adam else torch.optim.SGD
    optimizer = learner.attach(kind(learner.parameters(), lr=1e-3))
    learner.model.train()
    batch = tuple(t.cuda() for t in loader[0])
    loss_fn(learner.model, batch).backward()  # libraries set themselves up on their first call
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(learner.model(batch[0]), batch[1]).backward()
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    learner.end_task(loader)


@pytest.mark.parametrize("kind", [ConvNet, Vit])
@pytest.mark.parametrize("method", [GPM, TRGP])
@pytest.mark.parametrize("adam", [False, True])
def test_nothing_is_forgotten_and_no_step_waits(
    kind: type[nn.Module], method: type[GPM], adam: bool
) -> None:
    model = kind().double().cuda()
    learner = method(model, threshold=1.0, per_task=["head"])
    loaders = tasks(3, torch.float64)
    logits = []
    for t, loader in enumerate(loaders):
        learn(learner, t, loader, adam=adam)
        model.eval()
        with torch.no_grad():
            logits.append(model(loader[0][0].cuda()))
    for t, loader in enumerate(loaders):
        with learner.task(t), torch.no_grad():
            assert (model(loader[0][0].cuda()) - logits[t]).abs().max() < 1e-7


def test_the_memory_follows_the_model_between_devices(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = ConvNet().cuda()
    learner = TRGP(model, threshold=0.95, per_task=["head"])
    loaders = tasks(3, torch.float32)
    for t in range(2):
        learn(learner, t, loaders[t], adam=False)
    model.eval()
    with torch.no_grad(), learner.task(0):
        on_device = model(loaders[0][0][0].cuda()).cpu()
    model.cpu()
    with torch.no_grad(), learner.task(0):
        torch.testing.assert_close(model(loaders[0][0][0]), on_device, rtol=1e-3, atol=1e-4)
    learner.save(tmp_path / "memory.safetensors", include_model=True)
    again = ConvNet().cuda()
    loaded = TRGP.load(tmp_path / "memory.safetensors", again)
    again.eval()
    with torch.no_grad(), loaded.task(0):
        found = again(loaders[0][0][0].cuda()).cpu()
    torch.testing.assert_close(found, on_device, rtol=1e-3, atol=1e-4)
    learn(loaded, 2, loaders[2], adam=True)


def test_half_precision_training_with_a_grad_scaler_protects_the_memory() -> None:
    model = ConvNet().cuda()
    learner = TRGP(model, threshold=0.95, per_task=["head"])
    loaders = tasks(2, torch.float32)
    learn(learner, 0, loaders[0], adam=False)
    learner.begin_task(1, loaders[1], loss_fn)
    optimizer = learner.attach(torch.optim.AdamW(learner.parameters(), lr=1e-3))
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)  # the first steps overflow
    x, y = (t.cuda() for t in loaders[1][0])
    scales = []
    for _ in range(40):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales[-1] < scales[0]  # steps were skipped
    for name, K in inside.present_coordinates(learner).items():
        found = inside.matrices(learner)[name] @ inside.bases(learner)[name].M
        torch.testing.assert_close(found, K, rtol=1e-4, atol=1e-5)
    learner.end_task(loaders[1])


@pytest.mark.parametrize("method", [m for m in METHODS if not METHODS[m].about.several_heads])
@pytest.mark.parametrize("preset", ["paper", "official"])
def test_captured_steps_end_with_the_bits_of_eager_ones(
    method: str, preset: str, tmp_path: Path
) -> None:
    """One head and no dropout here; the next test has heads, BatchNorm and dropout."""
    digests = {
        trgp.run(
            "permuted-digits", method, preset=preset, tasks=3, epochs=2, device="cuda",
            engine=engine, out=tmp_path / engine,
        )[0].digest
        for engine in ("eager", "captured")
    }  # fmt: skip
    assert len(digests) == 1


@pytest.mark.parametrize("method", METHODS)
def test_captured_steps_end_with_the_same_bits_also_with_dropout(
    method: str, tmp_path: Path
) -> None:
    draw = torch.Generator().manual_seed(0)
    sequence = [
        tuple((torch.randn(n, 3, 32, 32, generator=draw), torch.arange(n) % 4) for n in (150, 20))
        for _ in range(3)
    ]
    digests = {
        trgp.run(
            sequence, method, network=lambda: AlexNet(3, 4), batch=32, epochs=2, device="cuda",
            engine=engine, out=tmp_path / engine,
        )[0].digest
        for engine in ("eager", "captured")
    }  # fmt: skip
    assert len(digests) == 1


# ---- several runs at once --------------------------------------------------------------------

Results = dict[int, Result]  # by seed


def images(count: int = 3) -> list[tuple[Batch, Batch]]:
    draw = torch.Generator().manual_seed(0)
    return [
        tuple((torch.randn(n, 3, 32, 32, generator=draw), torch.arange(n) % 4) for n in (150, 20))
        for _ in range(count)
    ]  # type: ignore[misc]


def on_alexnet(method: str, out: Path, *, track: bool = False, **options: Any) -> Results:
    """Dropout and BatchNorm, with running averages or without, and a head for every task."""
    usual = {"batch": 32, "epochs": 2, "seeds": 3, "device": "cuda"}
    usual |= {"epsilon": 0.0} if method == "trgp" else {}
    network = lambda: AlexNet(3, 4, track_running_stats=track)  # noqa: E731
    results = trgp.run(images(), method, network=network, out=out, **(usual | options))
    return {result.seed: result for result in results}


def on_digits(method: str, out: Path, **options: Any) -> Results:
    """A small perceptron."""
    usual = {"tasks": 3, "epochs": 2, "lr": 0.02, "seeds": 3, "device": "cuda"}
    results = trgp.run("permuted-digits", method, out=out, **(usual | options))
    return {result.seed: result for result in results}


def bits(results: Results) -> dict[int, tuple[Any, ...]]:
    """All that is computed, on the device or from what it computed."""
    return {
        seed: (run.digest, run.accuracy_matrix, run.curves, run.selected, run.ranks)
        for seed, run in results.items()
    }


@pytest.mark.parametrize("size", [64, 125, 576])
def test_decompositions_come_to_the_same_bits_on_every_stream(size: int) -> None:
    """Which bases are made of; runs have streams of their own."""
    draw = torch.Generator("cuda").manual_seed(0)
    A = torch.randn(1, size, 2 * size, dtype=torch.float64, device="cuda", generator=draw)

    def found() -> list[Tensor]:
        return [*eigh(A @ A.mT), *qr(A.mT), cholesky(A @ A.mT)]

    expected = found()
    for _ in range(5):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            again = found()
        torch.cuda.synchronize()
        assert all(map(torch.equal, again, expected))


@pytest.mark.parametrize("track", [False, True])
@pytest.mark.parametrize("method", ["trgp", "hat"])
def test_runs_on_streams_end_with_the_bits_they_have_alone(
    method: str, track: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though they pause in the middle of their epochs, and draw for dropout in turns."""
    monkeypatch.setattr(captured, "CHUNK", 2)
    together = on_alexnet(method, tmp_path / "together", track=track)
    assert all("3 runs at once" in run.device for run in together.values())
    assert len({run.digest for run in together.values()}) == 3
    alone = on_alexnet(method, tmp_path / "alone", track=track, together=1)
    eager = on_alexnet(method, tmp_path / "eager", track=track, engine="eager")
    assert bits(together) == bits(alone) == bits(eager)


def test_small_runs_of_their_own_end_with_the_bits_they_have_alone(tmp_path: Path) -> None:
    """A-GEM, which cannot be stacked."""
    together = on_digits("agem", tmp_path / "together")
    alone = on_digits("agem", tmp_path / "alone", together=1)
    eager = on_digits("agem", tmp_path / "eager", engine="eager")
    assert bits(together) == bits(alone) == bits(eager)


def test_captured_steps_of_the_literal_form_are_the_eager_ones_to_the_bit(tmp_path: Path) -> None:
    options = {"preset": "official", "together": 1}
    alone = on_digits("trgp", tmp_path / "alone", **options)
    assert {run.form for run in alone.values()} == {"literal"}
    assert any(any(trusted.values()) for run in alone.values() for trusted in run.selected)
    eager = on_digits("trgp", tmp_path / "eager", engine="eager", **options)
    assert bits(alone) == bits(eager)


@pytest.mark.parametrize(
    ("method", "preset"), [*((method, "paper") for method in STACKABLE), ("trgp", "official")]
)
def test_stacked_runs_repeat_to_the_bit_and_agree_with_lone_ones(
    method: str, preset: str, tmp_path: Path
) -> None:
    """Whoever else is in the stack; the preset official has TRGP's literal form."""

    def go(out: str, **options: Any) -> Results:
        return on_digits(method, tmp_path / out, preset=preset, **options)

    first = go("first")
    assert bits(go("again")) == bits(first)
    assert bits(go("other", seeds=[5, 1, 4]))[1] == bits(first)[1]
    alone = go("alone", together=1)
    for seed, run in first.items():
        assert run.acc == pytest.approx(alone[seed].acc, abs=1e-4)
        for found, expected in zip(run.curves, alone[seed].curves, strict=True):
            assert found["loss"] == pytest.approx(expected["loss"], rel=1e-3)


@pytest.mark.parametrize("method", ["trgp", "er"])
def test_stacked_runs_that_stop_early_learn_as_long_as_alone(method: str, tmp_path: Path) -> None:
    """The graphs are made anew for those that are left."""
    tasks = some_tasks(3, samples=60, dtype=torch.float64)
    settings = {"epochs": 12, "patience": 1, "batch": 8, "lr": 0.2, "lr_min": 0.04}

    def go(out: str, **options: Any) -> Results:
        results = trgp.run(
            tasks, method, network=in_float64(one_head), seeds=3, device="cuda",
            out=tmp_path / out, **settings, **STACKABLE[method], **options,
        )  # fmt: skip
        return {result.seed: result for result in results}

    together, alone = go("together"), go("alone", together=1)
    lengths = {seed: [len(c["loss"]) for c in run.curves] for seed, run in alone.items()}
    assert any(len(set(each)) > 1 for each in zip(*lengths.values(), strict=True))
    for seed, run in together.items():
        assert [len(c["loss"]) for c in run.curves] == lengths[seed]
        for found, expected in zip(run.curves, alone[seed].curves, strict=True):
            assert found["valid_loss"] == pytest.approx(expected["valid_loss"], rel=1e-8)


@pytest.mark.parametrize(
    ("go", "method"),
    [(on_digits, "trgp"), (on_digits, "er"), (on_digits, "agem"), (on_alexnet, "trgp")],
    ids=["stacked trgp", "stacked er", "agem", "dropout"],
)
def test_an_interrupted_company_goes_on_to_the_same_bits(
    go: Any, method: str, tmp_path: Path
) -> None:
    """One run has an epoch more than the next, which was told of the interruption."""
    whole = go(method, tmp_path / "whole")
    stopped: list[tuple[int, int]] = []

    def stop(event: Event) -> None:
        if isinstance(event, EpochFinished) and event.seed == 1:
            place = event.task, event.epoch
            if place not in stopped and place in ((0, 1), (1, 2), (2, 1)):
                stopped.append(place)
                raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(Interrupted, match="every finished epoch is saved in"):
            go(method, tmp_path / "parts", observer=stop)
    seen: list[Event] = []
    assert bits(go(method, tmp_path / "parts", observer=seen.append)) == bits(whole)
    begun = {e.seed: (e.done_tasks, e.done_epochs) for e in seen if isinstance(e, RunStarted)}
    assert begun[1] == (2, 1)
    assert len(set(begun.values())) > 1


@pytest.mark.parametrize(
    ("go", "at_a_time"), [(on_digits, 1), (on_alexnet, 3)], ids=["stacked", "side by side"]
)
def test_validation_is_timed_where_it_is_queued(
    go: Any, at_a_time: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nobody waits for it: the device is kept busy whenever one of three runs validates."""
    cycles, evaluated = 100_000_000, Evaluation.__call__
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize()

    def slowly(self: Evaluation, *given: Any) -> Tensor:
        if "valid" in given:
            torch.cuda._sleep(cycles)
        return evaluated(self, *given)

    monkeypatch.setattr(Evaluation, "__call__", slowly)
    start = time.perf_counter()
    seconds = [run.seconds for run in go("finetune", tmp_path).values()]
    passed = time.perf_counter() - start
    every = [task for tasks in seconds for task in tasks]
    assert {frozenset(task) for task in every} == {frozenset(PHASES)}
    assert all(spent >= 0 for task in every for spent in task.values())
    assert sum(sum(task.values()) for task in every) <= passed
    # Two epochs a task; half, as it may go on while another run has the thread for itself.
    busy = len(every) * 2 * begin.elapsed_time(end) / 1000 / at_a_time
    assert sum(task["validation"] for task in every) > busy / 2


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("way", WAYS)
def test_a_hundred_captured_steps_are_the_eager_ones(
    way: str, dtype: torch.dtype, close: float, tmp_path: Path
) -> None:
    """One run's, and several stacked on each other; every parameter and all that moves."""
    device = torch.device("cuda")
    method, options = WAYS[way]
    make = network_for(method) if dtype == torch.float32 else in_float64(network_for(method))
    asked = asked_for(
        some_tasks(3, samples=60, dtype=dtype), method, tmp_path, make, range(3),
        lr=0.05, **options,
    )  # fmt: skip
    with repeatable(device):
        runs = [begun(run, 0 if method == "multitask" else 2, device) for run in asked]
        expected = [all_of(run.method, eagerly(run, 15)) for run in runs]
        assert all(run.work.epoch.steps * 15 > 100 for run in runs)
        stacked = replayed(runs, 15, stacked=True, device=device)
        for k, run in enumerate(runs):
            (alone,) = replayed([run], 15, stacked=False, device=device)
            assert farthest(all_of(run.method, alone), expected[k]) < close
            assert farthest(all_of(run.method, stacked[k]), expected[k]) < close
            before = dict(run.work.params)
            assert farthest({name: expected[k][name] for name in before}, before) > 1e-2


@pytest.mark.parametrize("method", ["finetune", "gpm", "trgp"])
def test_compiled_steps_are_the_captured_ones_but_for_rounding(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout draws the same; all tasks and runs share two graphs, and repeat to the bit.

    With convolutions in full precision: inputs whose last digit differs may be rounded to other
    numbers of TF32, 1e-3 apart, which within 30 steps moves the loss as far.
    """
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    found = {
        (engine, name): on_alexnet(method, tmp_path / engine / name, engine=engine, seeds=2)
        for engine, name in (("captured", "a"), ("compiled", "a"), ("compiled", "b"))
    }
    assert bits(found["compiled", "a"]) == bits(found["compiled", "b"])
    plain, compiled = found["captured", "a"], found["compiled", "a"]
    for seed, run in plain.items():
        for curves, others in zip(run.curves, compiled[seed].curves, strict=True):
            assert curves["loss"] == pytest.approx(others["loss"], rel=1e-3)
