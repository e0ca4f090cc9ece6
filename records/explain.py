"""Experiments that tell why a method's figure is far from the published one.

A few settings are varied over all tasks of a benchmark, in some experiments for few epochs, from a
seed that no record uses, and scored on validation data. What comes of it goes to a JSON file beside
this one. Started again with the same --runs it goes on where it was ended.
"""

import argparse
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from choose import Setting, learnt, settings
from grids import Grid, Search

from trgp.benchmarks import entry
from trgp.engine.sweep import Place
from trgp.files import write_text
from trgp.results.result import Result


def fixed_alpha(lr: tuple[float, ...], *values: float) -> list[Grid]:
    """OWM with the same alpha from a task's first batch to its last."""
    return [{"lr": lr, "alpha": (value,), "alpha_end": (value,)} for value in values]


RATES = (0.03, 0.1, 0.3)
SHARED_NORMS: Grid = {"lr": (0.01,), "alpha": (1.0,), "alpha_end": (0.001,), "norm": ("shared",)}
EXPERIMENTS = {
    "pmnist": Search(
        "pmnist",
        {
            "agem": {"lr": (0.01, 0.03, 0.1)},
            "owm": [
                *fixed_alpha(RATES, 10.0, 100.0, 1e3),
                {"lr": RATES, "alpha": (1.0,), "alpha_end": (0.1,)},
            ],
        },
        seeds=(100,),
        epochs=1,
    ),
    "split-cifar100": Search(
        "split-cifar100",
        {
            "owm": [
                SHARED_NORMS,
                {
                    **SHARED_NORMS,
                    "lr": (0.01, 0.05, 0.1, 0.2),
                    "alpha": (1e6,),
                    "alpha_end": (1e6,),
                },
            ],
            "ewc": [
                {"lr": (0.01, 0.03, 0.05), "strength": (5000.0,), "gradient_limit": (100.0,)},
                {"lr": (0.05,), "strength": (500.0,), "gradient_limit": (100.0,)},
            ],
        },
        seeds=(100,),
    ),
    "split-cifar100-short": Search(
        "split-cifar100",
        {
            "owm": [
                SHARED_NORMS,
                {**SHARED_NORMS, "model": ("running:alexnet",)},
                {**SHARED_NORMS, "alpha": (1e6,), "alpha_end": (1e6,)},
            ],
            "partly:LinearOWM": SHARED_NORMS,
        },
        seeds=(100,),
        epochs=20,
    ),
}


def figures(setting: Setting, run: Result | None) -> dict[str, Any]:
    """A setting and what came of it: nothing, where it diverged."""
    found = (None, None, None) if run is None else (run.acc, run.bwt, run.mean_diagonal)
    rounded = [None if value is None else round(value, 5) for value in found]
    names = ("acc", "bwt", "a_ii")
    return {
        "method": setting.method,
        **setting.values,
        **dict(zip(names, rounded, strict=True)),
    }


def as_text(search: Search, cells: list[dict[str, Any]], runs: Collection[Result]) -> str:
    """As JSON, one line a cell, the best of each method first; with what the runs ran on."""
    cells = sorted(cells, key=lambda cell: (cell["method"], -(cell["acc"] or 0)))
    head = {
        "benchmark": search.benchmark,
        "seeds": list(search.seeds),
        "tasks": entry(search.benchmark).tasks,
        "epochs": search.epochs,
        "score_on": "validation",
        "versions": [dict(each) for each in sorted({tuple(run.versions.items()) for run in runs})],
        "devices": sorted({run.device for run in runs}),
    }
    lines = ",\n".join(f"  {json.dumps(cell)}" for cell in cells)
    return f'{json.dumps(head, indent=1)[:-2]},\n "cells": [\n{lines}\n ]\n}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/explain"), help="folder of the runs"
    )
    parser.add_argument("--data-root", type=Path, help="folder of the image sets")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent, help="folder of the JSON"
    )
    args = parser.parse_args()
    search = EXPERIMENTS[args.experiment]
    # One cell a setting, by itself: another that is made of it is another.
    wanted = [(setting, setting.cells[0]) for setting in settings(search, search.grids)]
    place = Place(args.device, args.runs, args.data_root)
    results = learnt([cell for _, cell in wanted], place, args.jobs, "records/explain.py")
    cells = [figures(setting, results.get(cell)) for setting, cell in wanted]
    told = as_text(search, cells, results.values())
    write_text(args.out / f"explain-{args.experiment}.json", told)


if __name__ == "__main__":
    main()
