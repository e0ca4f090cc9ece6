"""Chooses settings on validation data alone.

Every method has its own grid and is scored by mean ACC on the validation samples over seeds that
no record uses; a setting that diverges from any seed is out. On digits all tasks are learnt; on the
papers' benchmarks the first ones, by the methods whose settings no paper or code at hand tells.
All cells of a finished grid go to a JSON file beside this one, best first. The presets in
src/trgp/benchmarks hold what came out.

Started again with the same --runs it goes on where it was ended.
"""

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import trgp
from trgp.benchmarks import entry
from trgp.engine.config import configure
from trgp.engine.divergence import DivergenceError, SeedsFailedError
from trgp.methods import METHODS

Grid = Mapping[str, tuple[float, ...]]
Score = dict[str, Any]


@dataclass(frozen=True)
class Search:
    """What is tried on a benchmark."""

    grids: Mapping[str, Grid]
    """By method the values of its settings, each with each."""
    seeds: tuple[int, ...]
    tasks: int | None = None
    """Only so many, from the first on (None: all)."""


@dataclass(frozen=True)
class Cell:
    """One setting of a method."""

    benchmark: str
    method: str
    settings: Mapping[str, float]

    @property
    def changes(self) -> dict[str, Any]:
        """All that it changes of the preset."""
        return {**self.settings, "tasks": SEARCHES[self.benchmark].tasks, "score_on": "validation"}

    @property
    def name(self) -> str:
        """Of its folder: another one when anything is that decides its score."""
        settings = configure(self.benchmark, self.method, **self.changes).settings
        whole = json.dumps([settings, SEARCHES[self.benchmark].seeds], sort_keys=True)
        return f"{self.benchmark}-{self.method}-{hashlib.sha256(whole.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class Place:
    """Where cells are learnt and kept."""

    device: str
    runs: Path
    data_root: Path | None


PLAIN = {"lr": (0.025, 0.05, 0.1, 0.2, 0.4, 0.8)}
DIGITS = Search(
    {
        "finetune": PLAIN,
        "single": PLAIN,
        "multitask": PLAIN,
        "owm": {"lr": (0.05, 0.1, 0.2, 0.4, 0.8), "alpha_end": (0.001, 0.01, 0.1, 1.0)},
        "ewc": {"lr": (0.05, 0.1, 0.2, 0.4), "strength": (10.0, 100.0, 1e3, 1e4, 1e5)},
        "hat": {"lr": (0.1, 0.2, 0.4), "s_max": (50.0, 400.0), "sparsity": (0.1, 0.75)},
        "agem": PLAIN,
        "er": PLAIN,
        "lwf": {"lr": (0.05, 0.1, 0.2), "strength": (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)},
        "gpm": {
            "lr": (0.05, 0.1, 0.2, 0.4, 0.8),
            "threshold": (0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.99),
        },
        "trgp": {
            "lr": (0.1, 0.2, 0.4, 0.8),
            "threshold": (0.95, 0.97, 0.99, 0.995),
            "scale_rate": (0.005, 0.01, 0.02, 0.05, 0.1),
        },
    },
    seeds=(100, 101, 102),
)
# From here on around what is remembered of the GPM paper.
PMNIST_PLAIN = {"lr": (0.01, 0.03, 0.1)}
PMNIST = Search(
    {
        "finetune": PMNIST_PLAIN,
        "single": PMNIST_PLAIN,
        "multitask": PMNIST_PLAIN,
        "owm": {"lr": (0.03, 0.1, 0.3), "alpha_end": (0.001, 0.01, 0.1)},
        "ewc": {"lr": (0.01, 0.03, 0.1), "strength": (100.0, 1e3, 1e4)},
        "agem": PMNIST_PLAIN,
        "er": PMNIST_PLAIN,
        "lwf": {"lr": (0.01, 0.03), "strength": (0.5, 2.0, 10.0)},
    },
    seeds=(100, 101),
    tasks=3,
)
CIFAR_PLAIN = {"lr": (0.01, 0.03, 0.05)}
CIFAR = Search(
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
    seeds=(100, 101),
    tasks=3,
)
FIVE_PLAIN = {"lr": (0.03, 0.1)}
FIVE = Search(
    {
        "multitask": FIVE_PLAIN,
        "ewc": {"lr": (0.03, 0.1), "strength": (500.0, 5e3, 5e4)},
        "hat": {"lr": (0.03, 0.1), "sparsity": (0.25, 0.75)},
        "agem": FIVE_PLAIN,
        "er": FIVE_PLAIN,
    },
    seeds=(100, 101),
    tasks=2,
)
SEARCHES = {
    "permuted-digits": DIGITS,
    "split-digits": DIGITS,
    "pmnist": PMNIST,
    "split-cifar100": CIFAR,
    "five-datasets": FIVE,
}


def cells(benchmark: str, methods: Iterable[str]) -> Iterator[Cell]:
    """Every setting of the methods, but of none that the benchmark's one head rules out."""
    for method in methods:
        if METHODS[method].about.several_heads and not entry(benchmark).separate_heads:
            continue
        grid = SEARCHES[benchmark].grids[method]
        for values in itertools.product(*grid.values()):
            yield Cell(benchmark, method, dict(zip(grid, values, strict=True)))


def score(place: Place, cell: Cell) -> Score:
    """Mean validation ACC and BWT of a setting, None where it diverged; kept once it is known."""
    kept = place.runs / cell.name / "score.json"
    if not kept.exists():
        found = {"method": cell.method, **cell.settings, **_learnt(place, cell)}
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(found))
    read: Score = json.loads(kept.read_text())
    return read


def _learnt(place: Place, cell: Cell) -> dict[str, float | None]:
    try:
        results = trgp.run(
            cell.benchmark,
            cell.method,
            seeds=SEARCHES[cell.benchmark].seeds,
            out=place.runs / cell.name,
            device=place.device,
            data_root=place.data_root,
            **cell.changes,
        )
    except (DivergenceError, SeedsFailedError):
        return {"acc": None, "bwt": None}
    bwts = [r.bwt for r in results if r.bwt is not None]
    return {
        "acc": round(statistics.fmean(r.acc for r in results), 5),
        "bwt": round(statistics.fmean(bwts), 5) if bwts else None,
    }


def write(path: Path, benchmark: str, scores: list[Score]) -> None:
    """The scores of the methods whose grids are finished; what other methods scored stays."""
    count = Counter(s["method"] for s in scores)
    whole = {method for method in count if count[method] == len([*cells(benchmark, [method])])}
    done = [s for s in scores if s["method"] in whole]
    if path.exists():
        old = json.loads(path.read_text())["cells"]
        done += [cell for cell in old if cell["method"] not in whole]
    done.sort(key=lambda s: (s["method"], -(s["acc"] or 0)))
    search = SEARCHES[benchmark]
    content = {
        "benchmark": benchmark,
        "seeds": search.seeds,
        "tasks": search.tasks or entry(benchmark).tasks,
        "versions": {"trgp": trgp.__version__, "torch": torch.__version__},
    }
    rows = ",\n".join("  " + json.dumps(s) for s in done)  # one line a cell
    path.write_text(json.dumps(content, indent=1)[:-2] + f',\n "cells": [\n{rows}\n ]\n}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("benchmark", choices=SEARCHES)
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="default: all of the grid")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, help="cells at a time; default: the cores, on a GPU 1")
    parser.add_argument("--runs", type=Path, default=Path("runs/choose"), help="folder of the runs")
    parser.add_argument("--data-root", type=Path, help="folder of the image sets")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent, help="folder of the JSON"
    )
    args = parser.parse_args()
    grids = SEARCHES[args.benchmark].grids
    methods = args.methods or list(grids)
    for method in methods:
        if method not in grids:
            parser.error(f"{args.benchmark} has no grid for {method}; take some of: {[*grids]}")
    todo = list(cells(args.benchmark, methods))
    cores = os.cpu_count() or 1
    jobs = args.jobs or (cores if args.device == "cpu" else 1)
    place = Place(args.device, args.runs, args.data_root)
    args.out.mkdir(parents=True, exist_ok=True)
    scores: list[Score] = []
    with ProcessPoolExecutor(
        jobs,
        multiprocessing.get_context("spawn"),  # a fork has no GPU
        torch.set_num_threads,
        (max(1, cores // jobs),),
    ) as pool:
        for found in pool.map(partial(score, place), todo):
            scores.append(found)
            print(f"{len(scores)}/{len(todo)}", found, flush=True)
            write(args.out / f"choose-{args.benchmark}.json", args.benchmark, scores)


if __name__ == "__main__":
    main()
