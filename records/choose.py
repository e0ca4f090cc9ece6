"""Chooses settings on validation data alone.

Every method has its own grid and is scored by mean ACC on the validation samples over seeds that
no record uses; a setting that diverges from any seed is out. On digits all tasks are learnt; on the
papers' benchmarks the first ones, for fewer epochs, by the methods whose settings no paper or code
at hand tells. All cells of a finished grid go to a JSON file beside this one, best first. The
presets in src/trgp/benchmarks hold what came out.

Started again with the same --runs it goes on where it was ended.
"""

import argparse
import itertools
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import trgp
from trgp.benchmarks import entry
from trgp.engine.config import configure
from trgp.engine.machine import resolve
from trgp.engine.pool import cores
from trgp.engine.sweep import Place, carry_out, plan
from trgp.files import write_text
from trgp.methods import find
from trgp.results.result import Result
from trgp.sweeps import Cell

Value = float | str | tuple[float, ...]
Grid = Mapping[str, tuple[Value, ...]]
Score = dict[str, Any]


@dataclass(frozen=True)
class Search:
    """What is tried on a benchmark."""

    benchmark: str
    grids: Mapping[str, Grid | Sequence[Grid]]
    """By method the values of its settings, each with each; or several such grids."""
    seeds: tuple[int, ...]
    tasks: int | None = None
    """Only so many, from the first on (None: all)."""
    epochs: int | None = None
    """At most so many a task (None: as the preset has it)."""
    preset: str = "paper"
    """That which holds what comes out; what is not searched is as in `paper`."""


@dataclass(frozen=True)
class Setting:
    """One setting of a method."""

    search: Search
    method: str
    values: Mapping[str, Value]

    @property
    def cells(self) -> list[Cell]:
        """A run from every seed."""
        search = self.search
        limits = {"tasks": search.tasks, "epochs": search.epochs}
        changes: dict[str, Any] = {**self.values, "score_on": "validation"}
        changes |= {key: value for key, value in limits.items() if value is not None}
        config = configure(search.benchmark, self.method, **changes)
        return [Cell(config, seed) for seed in search.seeds]


PLAIN = {"lr": (0.025, 0.05, 0.1, 0.2, 0.4, 0.8)}
DIGITS: Mapping[str, Grid] = {
    "finetune": PLAIN,
    "single": PLAIN,
    "multitask": PLAIN,
    "owm": {"lr": (0.05, 0.1, 0.2, 0.4, 0.8), "alpha_end": (0.001, 0.01, 0.1, 1.0)},
    "ewc": {"lr": (0.05, 0.1, 0.2, 0.4), "strength": (10.0, 100.0, 1e3, 1e4, 1e5)},
    "hat": {"lr": (0.1, 0.2, 0.4), "s_max": (50.0, 400.0), "sparsity": (0.1, 0.75)},
    "agem": PLAIN,
    "er": PLAIN,
    "lwf": {"lr": (0.05, 0.1, 0.2), "strength": (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)},
    "pnn": {"lr": (0.001, 0.003, 0.01, 0.03), "width": (0.1, 0.17, 0.3)},
    "den": {
        "lr": (0.003, 0.01),
        "l1": (0.01, 0.03, 0.1),
        "sigma": (0.05, 0.5),
        "growth": (0.02, 0.05),
    },
    "rcl": {"lr": (0.001, 0.003, 0.01), "growth": (0.02, 0.05, 0.1)},
    "apd": {
        "lr": (0.001, 0.003, 0.01),
        "l1": (6e-4, 2e-3, 6e-3, 0.02),
        "consolidate_every": (2,),
    },
    "gpm": {
        "lr": (0.05, 0.1, 0.2, 0.4, 0.8),
        "threshold": (0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.99),
    },
    "trgp": {
        "lr": (0.1, 0.2, 0.4, 0.8),
        "threshold": (0.95, 0.97, 0.99, 0.995),
        "scale_rate": (0.005, 0.01, 0.02, 0.05, 0.1),
    },
}
# From here on around what is remembered of the GPM paper. On PMNIST over all tasks: what protects
# three tasks well may have nothing left to learn ten with, or forget the first seven.
PMNIST_PLAIN = {"lr": (0.003, 0.01, 0.03, 0.1)}
PMNIST = Search(
    "pmnist",
    {
        "finetune": PMNIST_PLAIN,
        "single": PMNIST_PLAIN,
        "multitask": PMNIST_PLAIN,
        "owm": {"lr": (0.01, 0.03, 0.1), "alpha": (100.0, 1e3), "alpha_end": (10.0, 100.0, 1e3)},
        "ewc": {"lr": (0.01, 0.03, 0.1), "strength": (100.0, 1e3, 1e4)},
        "agem": PMNIST_PLAIN,
        "er": PMNIST_PLAIN,
        "lwf": {"lr": (0.003, 0.01, 0.03), "strength": (0.1, 0.5, 2.0, 10.0)},
    },
    seeds=(100,),
    epochs=2,
)
CIFAR_PLAIN = {"lr": (0.01, 0.03, 0.05)}
CIFAR = Search(
    "split-cifar100",
    {
        "finetune": CIFAR_PLAIN,
        "single": CIFAR_PLAIN,
        "multitask": CIFAR_PLAIN,
        "owm": {"lr": (0.01, 0.03), "alpha_end": (0.001, 0.1)},
        "ewc": {"lr": (0.01, 0.03, 0.05), "strength": (500.0, 5e3, 5e4)},
        "hat": {"lr": (0.025, 0.05, 0.1), "sparsity": (0.25, 0.75)},
        "agem": CIFAR_PLAIN,
        "er": CIFAR_PLAIN,
        "lwf": {"lr": (0.01, 0.03), "strength": (0.5, 2.0, 10.0)},
    },
    seeds=(100,),
    tasks=2,
    epochs=40,
)
FIVE_PLAIN = {"lr": (0.03, 0.1)}
FIVE = Search(
    "five-datasets",
    {
        "multitask": FIVE_PLAIN,
        "ewc": [
            {"lr": (0.03, 0.1), "strength": (500.0, 5e3, 5e4)},
            {"lr": (0.01,), "strength": (50.0, 500.0, 5e3)},
            {"lr": (0.03,), "strength": (50.0,)},
        ],
        "hat": [
            {"lr": (0.03, 0.1), "sparsity": (0.25, 0.75)},
            {"lr": (0.01,), "sparsity": (0.25,)},
            {"lr": (0.01, 0.03), "sparsity": (0.1,)},
        ],
        "agem": FIVE_PLAIN,
        "er": FIVE_PLAIN,
    },
    seeds=(100,),
    tasks=2,
    epochs=2,
)
# For the preset `best`: rates that fall, and one scaling matrix over all that is protected beside
# those of the two most related tasks; then around what was best of these.
FALLING: Grid = {"lr": (0.03, 0.1), "lr_decay": (0.5,)}
WHOLE: Grid = {"scaling_over": ("union",), "epsilon": (0.0,), "top_k": (10,)}
MOST = (0.98, 0.995, 0.995)
AROUND: Sequence[Grid] = (
    {"lr": (0.01, 0.03, 0.05, 0.1), "lr_decay": (0.3, 0.5, 0.7)},
    {"lr": (0.02,), "lr_decay": (0.5, 0.7)},
)
# Each of the others has as many settings as TRGP, 18; the last four of each go beyond some edges of
# the first fourteen.
PMNIST_BEST = Search(
    "pmnist",
    {
        "finetune": [*AROUND, {"lr": (0.003, 0.005), "lr_decay": (0.2, 0.3)}],
        "single": [*AROUND, {"lr": (0.1, 0.2), "lr_decay": (0.8, 0.9)}],
        "multitask": [*AROUND, {"lr": (0.02, 0.03), "lr_decay": (0.8, 0.9)}],
        "agem": [*AROUND, {"lr": (0.003, 0.005), "lr_decay": (0.5, 0.7)}],
        "er": [*AROUND, {"lr": (0.03, 0.05), "lr_decay": (0.1, 0.2)}],
        "ewc": [
            {
                "lr": (0.01, 0.03),
                "lr_decay": (0.5,),
                "strength": (100.0, 300.0, 1e3, 3e3, 1e4),
            },
            {"lr": (0.03,), "lr_decay": (0.7,), "strength": (300.0, 1e3, 3e3)},
            {"lr": (0.1,), "lr_decay": (0.5,), "strength": (1e3,)},
            {"lr": (0.1, 0.2), "lr_decay": (0.3,), "strength": (1e3,)},
            {"lr": (0.1, 0.2), "lr_decay": (0.7,), "strength": (1e3,)},
        ],
        "lwf": [
            {
                "lr": (0.003, 0.01, 0.03),
                "lr_decay": (0.5,),
                "strength": (0.5, 2.0, 10.0, 30.0),
            },
            {"lr": (0.01,), "lr_decay": (0.7,), "strength": (2.0, 10.0)},
            {"lr": (0.001, 0.003), "lr_decay": (0.7,), "strength": (1.0, 2.0)},
        ],
        "gpm": [
            {
                "lr": (0.01, 0.03),
                "lr_decay": (0.5,),
                "threshold": ((0.95, 0.99, 0.99), (0.97, 0.99, 0.99), MOST),
                "samples": (300, 1000),
            },
            {
                "lr": (0.03,),
                "lr_decay": (0.7,),
                "threshold": ((0.95, 0.99, 0.99), MOST),
                "samples": (1000,),
            },
            {
                "lr": (0.05, 0.1),
                "lr_decay": (0.5,),
                "threshold": ((0.95, 0.99, 0.99),),
                "samples": (1000, 3000),
            },
        ],
        "owm": [
            {
                "lr": (0.01, 0.03, 0.1),
                "lr_decay": (0.5,),
                "alpha": (100.0, 1e3),
                "alpha_end": (10.0, 100.0),
            },
            {"lr": (0.03,), "lr_decay": (0.7,), "alpha": (1e3,), "alpha_end": (10.0, 100.0)},
            {"lr": (0.03, 0.05), "lr_decay": (0.8,), "alpha": (1e3,), "alpha_end": (1.0, 10.0)},
        ],
        "trgp": [
            FALLING,
            {**FALLING, **WHOLE, "threshold": ((0.95, 0.99, 0.99), MOST)},
            {"lr": (0.03,), "lr_decay": (0.7,), **WHOLE, "threshold": (MOST,)},
            {"lr": (0.05,), "lr_decay": (0.5,), **WHOLE, "threshold": (MOST,)},
            {
                "lr": (0.05, 0.1),
                "lr_decay": (0.5,),
                **WHOLE,
                "threshold": (MOST,),
                "scale_rate": (0.1, 0.3),
            },
            {
                "lr": (0.03,),
                "lr_decay": (0.5, 0.7),
                **WHOLE,
                "threshold": ((0.99, 0.998, 0.998),),
            },
            {
                "lr": (0.01, 0.02),
                "lr_decay": (0.5, 0.7),
                **WHOLE,
                "threshold": (MOST,),
            },
        ],
    },
    seeds=(100,),
    tasks=4,
    preset="best",
)
# For the preset `best` of CIFAR-100 Split, over all tasks, since a validation set is 250 samples:
# the rates that tasks are learnt best with when nothing is protected, norm layers of their own, and
# one scaling matrix over all that is protected.
OWN_NORM: Grid = {"norm": ("per_task",)}
CIFAR_BEST = Search(
    "split-cifar100",
    {
        "trgp": [
            {"lr": (0.05,), "norm": ("freeze", "per_task")},
            {"lr": (0.05,), **WHOLE},
            {"lr": (0.03, 0.05, 0.1), **WHOLE, **OWN_NORM},
            {"lr": (0.05,), **WHOLE, **OWN_NORM, "scale_rate": (2.0,)},
            {"lr": (0.05,), **WHOLE, **OWN_NORM, "threshold": (0.95,)},
        ],
    },
    seeds=(100,),
    preset="best",
)
# Growing networks on the first tasks of the superclasses. PNN's width is the preset's, which aims
# at the published capacity; that of DEN and RCL depends on what the runs choose.
SUPERCLASS_RATES = (3e-4, 1e-3, 3e-3)
SUPERCLASS = Search(
    "cifar100-superclass",
    {
        "pnn": {"lr": SUPERCLASS_RATES},
        "den": {"lr": (3e-4, 1e-3), "l1": (0.01, 0.03), "growth": (0.005, 0.01, 0.02)},
        "rcl": {"lr": (3e-4, 1e-3), "growth": (0.025, 0.0375, 0.05)},
        "apd": {"lr": SUPERCLASS_RATES},
    },
    seeds=(100,),
    tasks=5,
)
SEARCHES = {
    "permuted-digits": Search("permuted-digits", DIGITS, seeds=(100, 101, 102)),
    "split-digits": Search("split-digits", DIGITS, seeds=(100, 101, 102)),
    "pmnist": PMNIST,
    "pmnist-best": PMNIST_BEST,
    "split-cifar100": CIFAR,
    "split-cifar100-best": CIFAR_BEST,
    "five-datasets": FIVE,
    "cifar100-superclass": SUPERCLASS,
}


def settings(search: Search, methods: Iterable[str]) -> Iterator[Setting]:
    """Every setting of the methods, but of none that the benchmark's one head rules out."""
    for method in methods:
        if find(method).about.several_heads and not entry(search.benchmark).separate_heads:
            continue
        grids = search.grids[method]
        for grid in [grids] if isinstance(grids, Mapping) else grids:
            for values in itertools.product(*grid.values()):
                yield Setting(search, method, dict(zip(grid, values, strict=True)))


def scored(
    wanted: Iterable[Setting], before: Mapping[str, Score], place: Place, jobs: int
) -> list[Score]:
    """Mean validation ACC and BWT of every setting, None where a seed diverged.

    before: by setting, as `known` gives them, those that need not be learnt again.
    """
    runs = [(setting, setting.cells) for setting in wanted]
    every = [cell for s, cells in runs if _written(s.values) not in before for cell in cells]
    results = learnt(every, place, jobs, "records/choose.py")
    return [
        {
            "method": s.method,
            **s.values,
            **before.get(_written(s.values), _means([results.get(cell) for cell in cells])),
        }
        for s, cells in runs
    ]


def learnt(cells: Sequence[Cell], place: Place, jobs: int, command: str) -> dict[Cell, Result]:
    """The results of those that do not diverge, whatever else goes wrong being the end of it."""
    planned = plan(cells, place)
    for sentence in dict.fromkeys(planned.lacking.values()):
        raise SystemExit(sentence)
    results = dict(planned.finished)
    left = len(planned.left)
    for k, ended in enumerate(carry_out(planned, place, jobs, lambda cell: command), 1):
        if ended.result is not None:
            results[ended.cell] = ended.result
        elif "diverged" not in ended.failure:
            raise SystemExit(f"{ended.cell} failed: {ended.failure}")
        told = ended.result.acc if ended.result else "diverged"
        print(f"{k}/{left}", ended.cell, told, flush=True)
    return results


def known(path: Path, search: Search, method: str) -> dict[str, Score]:
    """By setting the scores that a search like this one, of this version, has written down.

    What an unreleased change of the engine or of `paper` does to them it does not know.
    """
    grids = json.loads(path.read_text())["grids"] if path.exists() else {}
    grid = grids.get(method, {})
    if any(grid.get(key) != value for key, value in _how(search).items()):
        return {}
    scores = [{key: cell.pop(key) for key in ("acc", "bwt")} for cell in grid["cells"]]
    return dict(zip(map(_written, grid["cells"]), scores, strict=True))


def _written(values: Mapping[str, Any]) -> str:
    """A setting's values, by which it is found again."""
    return json.dumps(values, sort_keys=True)


def _how(search: Search) -> dict[str, Any]:
    """What a method's scores say of their search, as JSON has it."""
    return {
        "seeds": list(search.seeds),
        "tasks": search.tasks or entry(search.benchmark).tasks,
        "epochs": search.epochs,
        "versions": {"trgp": trgp.__version__, "torch": torch.__version__},
    }


def _means(runs: list[Result | None]) -> dict[str, float | None]:
    whole = [run for run in runs if run is not None]
    if len(whole) < len(runs):
        return {"acc": None, "bwt": None}
    bwts = [run.bwt for run in whole if run.bwt is not None]
    return {
        "acc": round(statistics.fmean(run.acc for run in whole), 5),
        "bwt": round(statistics.fmean(bwts), 5) if bwts else None,
    }


def write(path: Path, search: Search, scores: list[Score]) -> None:
    """The scores of the methods whose grids are finished; what others scored before stays.

    Each method says how it was searched: a search may have changed since another's.
    """
    grids = json.loads(path.read_text())["grids"] if path.exists() else {}
    for method, wanted in Counter(s.method for s in settings(search, search.grids)).items():
        done = [score for score in scores if score["method"] == method]
        if len(done) == wanted:
            done.sort(key=lambda score: -(score["acc"] or 0))
            grids[method] = {
                **_how(search),
                "cells": [{k: v for k, v in score.items() if k != "method"} for score in done],
            }
    write_text(path, as_text(search.benchmark, search.preset, grids))


def as_text(benchmark: str, preset: str, grids: Mapping[str, Any]) -> str:
    """As JSON, one line a cell."""
    parts = []
    for method, grid in sorted(grids.items()):
        head = [f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in grid.items() if k != "cells"]
        cells = ",\n".join(f"    {json.dumps(cell)}" for cell in grid["cells"])
        lines = ",\n".join([*head, f'   "cells": [\n{cells}\n   ]'])
        parts.append(f"  {json.dumps(method)}: {{\n{lines}\n  }}")
    joined = ",\n".join(parts)
    names = f' "benchmark": {json.dumps(benchmark)},\n "preset": {json.dumps(preset)},\n'
    return f'{{\n{names} "grids": {{\n{joined}\n }}\n}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("search", choices=SEARCHES)
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="default: all of the grid")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, help="runs at a time; default: the cores, on a GPU 30")
    parser.add_argument("--runs", type=Path, default=Path("runs/choose"), help="folder of the runs")
    parser.add_argument("--data-root", type=Path, help="folder of the image sets")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent, help="folder of the JSON"
    )
    args = parser.parse_args()
    search = SEARCHES[args.search]
    grids = search.grids
    methods = args.methods or list(grids)
    for method in methods:
        if method not in grids:
            parser.error(f"{args.search} has no grid for {method}; take some of: {[*grids]}")
    jobs = args.jobs or (cores() if resolve(args.device).type == "cpu" else 30)
    place = Place(args.device, args.runs, args.data_root)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"choose-{args.search}.json"
    for method in methods:  # one by one, so that finished grids are kept
        before = known(path, search, method)
        write(path, search, scored(settings(search, [method]), before, place, jobs))


if __name__ == "__main__":
    main()
