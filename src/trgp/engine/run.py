"""Runs: a configuration from some seeds, stored so that it can be resumed and quoted."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from .. import __version__
from ..benchmarks import Benchmark
from ..data.store import PathLike
from ..methods.base import Method
from ..results.result import Result, Results
from ..results.store import RESULT, locked, read_result, run_folder, write_result
from .checkpoint import Checkpoints, clear
from .config import Config, configure
from .divergence import DivergenceError, SeedsFailedError
from .errors import InputError, Interrupted, RunError
from .events import Observer, RunFinished, nobody
from .given import TENSORS, Load, Tasks, fingerprint, named, tensors
from .machine import is_captured, repeatable, resolve, settle_threads
from .network import Network
from .outcome import outcome
from .sequence import Sequencer

MOST = 10_000  # seeds at once; more are a slip of the pen


def run(
    benchmark: PathLike | Tasks,
    method: str = "trgp",
    *,
    preset: str = "paper",
    seeds: int | Iterable[int] = 1,
    device: str | torch.device = "auto",
    engine: Literal["auto", "eager", "captured"] = "auto",
    out: PathLike = "runs",
    data_root: PathLike | None = None,
    fresh: bool = False,
    observer: Observer = nobody,
    command: str | None = None,
    network: Callable[[], nn.Module] | None = None,
    **changes: Any,
) -> Results:
    """Learn a benchmark by a method from every seed, or read what was learnt before.

    benchmark: a name, the path of an npz file, or tasks as ((x, y), (x, y)), train and test, which
        need a `network` (a class or function that makes one).
    seeds: how many, from 0 on, or which.
    engine: whether steps run one by one (eager) or as replayed CUDA graphs (captured); auto takes
        the second on a GPU.
    out: the folder that results and checkpoints are stored in.
    fresh: start over, also where there is a result or a checkpoint; an old result is kept as
        result.previous.json.
    observer: called with what happens; see `trgp.engine.events`.
    command: what to write down as the way to repeat this; None: this call.
    changes: settings by their names, in place of the preset's.
    """
    with _bad_input():
        wanted = check_seeds(seeds)
        place = resolve(device)
        captured = is_captured(engine, place)
        if isinstance(benchmark, os.PathLike):
            benchmark = os.fspath(benchmark)
        if isinstance(benchmark, str):
            if network is not None:
                raise ValueError("Give another network to a benchmark as model='module:Class'.")
            config, load = named(configure(benchmark, method, preset, **changes), data_root)
        else:
            if network is None:
                raise ValueError("Tasks given as tensors need a network; give network=...")
            config = configure(TENSORS, method, preset, **changes)
            config, load = tensors(config, benchmark, network)
        folders = {
            seed: run_folder(out, config.benchmark, method, preset, config.changed, seed)
            for seed in wanted
        }
    command = command or _as_call(config, wanted)
    runs: list[Result] = []
    failures: list[DivergenceError] = []
    # All at once, so that a command that goes on later without `fresh` mixes no old seed in.
    aside = list(folders.values()) if fresh else []
    for seed, folder in folders.items():
        try:
            runs.append(
                _run_seed(config, seed, load, folder, place, captured, aside, observer, command)
            )
        except DivergenceError as error:
            if len(folders) == 1:
                raise
            failures.append(error)
            error.add_seed(seed)
        aside = []
    if failures:
        raise SeedsFailedError(failures, Results(tuple(runs)))
    return Results(tuple(runs))


def check_seeds(seeds: int | Iterable[int]) -> list[int]:
    """The seeds meant by a count or a list."""
    if isinstance(seeds, Integral):
        count = 0 if isinstance(seeds, bool) else int(seeds)
        if not 1 <= count <= MOST:
            raise ValueError(f"seeds must be from 1 to {MOST}, or a list of seeds, not {seeds!r}.")
        listed = list(range(count))
    elif isinstance(seeds, Iterable):
        listed = list(seeds)
    else:
        raise TypeError(f"seeds must be how many or a list of seeds, not {seeds!r}.")
    for seed in listed:
        whole = isinstance(seed, Integral) and not isinstance(seed, bool)
        if not whole or not 0 <= seed < 2**32:
            raise ValueError(f"A seed must be a whole number from 0 to 2**32 - 1, not {seed!r}.")
    if not listed:
        raise ValueError("There is no seed to run; give at least one.")
    if len(set(listed)) < len(listed):
        raise ValueError("A seed is given twice; give each once.")
    return [int(seed) for seed in listed]


def _run_seed(
    config: Config,
    seed: int,
    load: Load,
    folder: Path,
    device: torch.device,
    captured: bool,
    aside: Sequence[Path],
    observer: Observer,
    command: str,
) -> Result:
    """One seed, from the last checkpoint on, or from its result if it has one.

    What lies in the folders `aside` is put there once nothing is wrong with the input.
    """
    finished = folder / RESULT
    if finished.exists() and not aside:
        return _stored(finished, config, seed, observer)
    with repeatable(device):
        with _bad_input():
            benchmark = load(seed, device)
            method = _bound(config, benchmark, seed, device)
        for other in aside:
            _set_aside(other)
        settle_threads(sum(p.numel() for p in method.network.module.parameters()))
        with _alone(folder):
            identity = _identity(config, seed, device, captured, fingerprint(benchmark))
            checkpoints = Checkpoints(folder, identity, device)
            if finished.exists():  # by now, by another process
                return _stored(finished, config, seed, observer)
            sequencer = Sequencer(config, benchmark, method, seed, checkpoints, observer, captured)
            try:
                end = sequencer.learn()
            except KeyboardInterrupt:
                raise Interrupted(
                    f"Interrupted; every finished epoch is saved in {folder}."
                ) from None
            try:
                result = write_result(folder, outcome(config, seed, method, end, command))
            except OSError as error:
                raise RunError(
                    f"The result could not be written in {folder}: {error.strerror or error}; make "
                    "room or allow writing there, and give the command again, without --fresh."
                ) from error
            clear(folder)
    observer(RunFinished(seed, result.acc, result.bwt))
    return result


def _stored(path: Path, config: Config, seed: int, observer: Observer) -> Result:
    """What a finished run left, shown in place of another one."""
    try:
        result = read_result(path)
    except ValueError as error:
        raise RunError(f"{error} Give --fresh to start it over.") from error
    if result.config != _as_json(config.settings):
        raise RunError(
            f"{path} is of other settings than the preset has now; give --fresh to start it over, "
            "or another --out."
        )
    with suppress(RunError), _alone(path.parent):  # unless somebody else is at work there
        clear(path.parent)
    observer(RunFinished(seed, result.acc, result.bwt, stored=True))
    return result


def _set_aside(folder: Path) -> None:
    """Forget a checkpoint, and keep an old result under another name."""
    if folder.exists():
        with _alone(folder):
            clear(folder)
            old = folder / RESULT
            if old.exists():
                old.replace(old.with_suffix(".previous.json"))


def _bound(config: Config, benchmark: Benchmark, seed: int, device: torch.device) -> Method:
    """The method on its network, after all that can be checked before anything is written."""
    if config.method.about.several_heads and not benchmark.separate_heads:
        raise ValueError(
            f"{config.method_name} needs a head for every task, but all tasks of "
            f"{config.benchmark} share one; take a benchmark with several heads."
        )
    network = Network(benchmark.make_network, benchmark.separate_heads, device, seed)
    network.check(benchmark.tasks)
    method = config.method.bind(network)
    method.check()
    return method


@contextmanager
def _bad_input() -> Iterator[None]:
    """What goes wrong in here is the user's to mend, and nothing has been written."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise InputError(str(error)) from error


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """The folder is this run's alone; what keeps it from being so is said as a failure."""
    lock = locked(folder)
    try:
        lock.__enter__()
    except OSError as error:
        raise RunError(str(error)) from error
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


def _as_json(settings: dict[str, Any]) -> dict[str, Any]:
    """As they are when they have been written and read."""
    read: dict[str, Any] = json.loads(json.dumps(settings))
    return read


def _identity(
    config: Config, seed: int, device: torch.device, captured: bool, data: str
) -> dict[str, Any]:
    """What a checkpoint must agree in with the run that goes on from it."""
    return {
        "settings": _as_json(config.settings),
        "data": data,
        "benchmark": config.benchmark,
        "method": config.method_name,
        "preset": config.preset,
        "seed": seed,
        "device": device.type,
        "engine": "captured" if captured else "eager",
        "trgp": __version__,
        "torch": torch.__version__,
    }


def _as_call(config: Config, seeds: Sequence[int]) -> str:
    """The call in Python that does the same."""
    changed = {k: v for k, v in config.changed.items() if not k.endswith("_source")}
    options = "".join(f", {key}={value!r}" for key, value in changed.items())
    what = "tasks" if config.benchmark == TENSORS else repr(config.benchmark)
    return (
        f"trgp.run({what}, {config.method_name!r}, preset={config.preset!r}, "
        f"seeds={list(seeds)}{options})"
    )
