"""Runs of a configuration from several seeds, stored to be resumed and quoted."""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from numbers import Integral
from typing import Any, Literal

import torch
from torch import nn

from ..options import check_count
from ..results.result import Result, Results
from ..results.store import run_folder
from ..types import PathLike
from .config import Config, configure
from .divergence import DivergenceError, SeedsFailedError
from .events import Observer, nobody
from .given import TENSORS, Tasks, named, tensors
from .learning import Asked, bad_input, learn
from .machine import is_captured, resolve

MOST = 10_000  # seeds per call; more are a typing error
TOGETHER = 10  # concurrent runs on a GPU by default; fewer already keep it busy
MOST_TOGETHER = 31  # every run has a stream, and torch has 32 per device


def run(
    benchmark: PathLike | Tasks,
    method: str = "trgp",
    *,
    preset: str = "paper",
    seeds: int | Iterable[int] = 1,
    device: str | torch.device = "auto",
    engine: Literal["auto", "eager", "captured", "compiled"] = "auto",
    together: int | None = None,
    out: PathLike = "runs",
    data_root: PathLike | None = None,
    fresh: bool = False,
    observer: Observer = nobody,
    command: str | None = None,
    network: Callable[[], nn.Module] | None = None,
    **changes: Any,
) -> Results:
    """Train a method on a benchmark from every seed, or read the stored results.

    Args:
        benchmark: a name, the path of an npz file, or tasks as ((x, y), (x, y)), train and test,
            which need a `network` (a class or function that makes one).
        preset: `paper`, `official` or `best`, if the benchmark has it.
        seeds: a count, from seed 0 on, or the seeds.
        engine: eager runs steps one by one; captured (the choice of auto) captures them once and
            replays them; compiled (GPU only) runs torch.compile first, then captures.
        together: number of concurrent runs on a GPU (None: ten); a CPU trains seeds in turn.
        out: the folder of results and checkpoints.
        fresh: start over even if there is a result or a checkpoint; an old result is kept as
            result.previous.json.
        observer: called with every event; see `trgp.engine.events`.
        command: the command to store as the way to repeat this; None: this call.
        changes: settings by name, in place of the preset's.
    """
    with bad_input():
        wanted = check_seeds(seeds)
        place = resolve(device)
        captured = is_captured(engine, place)
        width = company_of(together, captured, place)
        if isinstance(benchmark, os.PathLike):
            benchmark = os.fspath(benchmark)
        if isinstance(benchmark, str):
            if network is not None:
                raise ValueError("Give a benchmark another network as model='module:Class'.")
            config, load = named(configure(benchmark, method, preset, **changes), data_root)
        else:
            if network is None:
                raise ValueError("Tasks given as tensors need a network; give network=...")
            config = configure(TENSORS, method, preset, **changes)
            config, load = tensors(config, benchmark, network)
        folders = [
            run_folder(out, config.benchmark, method, preset, config.changed, seed)
            for seed in wanted
        ]
    command = command or _as_call(config, wanted)
    asked = [Asked(config, s, load, f, command) for s, f in zip(wanted, folders, strict=True)]
    runs: dict[int, Result] = {}
    failures: list[DivergenceError] = []
    # All together, so that resuming later without `fresh` mixes in no old seed.
    aside = folders if fresh else []
    for k in range(0, len(asked), width):
        some, compiled = asked[k : k + width], engine == "compiled"
        with closing(learn(some, place, captured, observer, aside, compiled=compiled)) as ends:
            for run, end in ends:
                if isinstance(end, Result):
                    runs[run.seed] = end
                elif isinstance(end, DivergenceError) and len(asked) > 1:
                    failures.append(end)
                    end.add_seed(run.seed)
                else:
                    raise end
        aside = []
    results = Results(tuple(runs[seed] for seed in wanted if seed in runs))
    if failures:
        raise SeedsFailedError(failures, results)
    return results


def company_of(together: int | None, captured: bool, device: torch.device) -> int:
    """Return the number of concurrent runs in this process."""
    shared = captured and device.type == "cuda"
    if together is not None:
        check_count("together", together)
        if together > MOST_TOGETHER:
            raise ValueError(f"together must be at most {MOST_TOGETHER}, not {together}.")
        if together > 1 and not shared:
            raise ValueError(
                "Concurrent runs in one process need a GPU and captured steps; leave `together` "
                "out."
            )
    return (together or TOGETHER) if shared else 1


def check_seeds(seeds: int | Iterable[int]) -> list[int]:
    """Return the seeds of a count or a list."""
    if isinstance(seeds, Integral):
        count = 0 if isinstance(seeds, bool) else int(seeds)
        if not 1 <= count <= MOST:
            raise ValueError(f"seeds must be from 1 to {MOST}, or a list of seeds, not {seeds!r}.")
        listed = list(range(count))
    elif isinstance(seeds, Iterable):
        listed = list(seeds)
    else:
        raise TypeError(f"seeds must be a count or a list of seeds, not {seeds!r}.")
    for seed in listed:
        whole = isinstance(seed, Integral) and not isinstance(seed, bool)
        if not whole or not 0 <= seed < 2**32:
            raise ValueError(f"A seed must be a whole number from 0 to 2**32 - 1, not {seed!r}.")
    if not listed:
        raise ValueError("There is no seed to run; give at least one.")
    if len(set(listed)) < len(listed):
        raise ValueError("A seed is given twice; give each once.")
    return [int(seed) for seed in listed]


def _as_call(config: Config, seeds: Sequence[int]) -> str:
    """Return the Python call that repeats the run."""
    changed = {k: v for k, v in config.changed.items() if not k.endswith("_source")}
    options = "".join(f", {key}={value!r}" for key, value in changed.items())
    what = "tasks" if config.benchmark == TENSORS else repr(config.benchmark)
    return (
        f"trgp.run({what}, {config.method_name!r}, preset={config.preset!r}, "
        f"seeds={list(seeds)}{options})"
    )
