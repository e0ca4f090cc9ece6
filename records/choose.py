"""Chooses the settings of the embedded benchmarks, on validation data alone.

Every method has its own grid and is scored by mean ACC on the validation samples over seeds that
no record uses; a setting that diverges from any seed is out. All cells go to a JSON file beside
this one, best first. The presets in src/trgp/benchmarks/digits.py hold what came out.
"""

import argparse
import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

import trgp
from trgp.engine.errors import RunError
from trgp.methods import METHODS

SEEDS = (100, 101, 102)
PLAIN = {"lr": (0.025, 0.05, 0.1, 0.2, 0.4, 0.8)}
GPM = {"lr": (0.05, 0.1, 0.2, 0.4, 0.8), "threshold": (0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.99)}
TRGP = {
    "lr": (0.1, 0.2, 0.4, 0.8),
    "threshold": (0.95, 0.97, 0.99, 0.995),
    "scale_rate": (0.005, 0.01, 0.02, 0.05, 0.1),
}
OWM = {"lr": (0.05, 0.1, 0.2, 0.4, 0.8), "alpha_end": (0.001, 0.01, 0.1, 1.0)}
EWC = {"lr": (0.05, 0.1, 0.2, 0.4), "strength": (10.0, 100.0, 1e3, 1e4, 1e5)}
HAT = {"lr": (0.1, 0.2, 0.4), "s_max": (50.0, 400.0), "sparsity": (0.1, 0.75)}
LWF = {"lr": (0.05, 0.1, 0.2), "strength": (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)}
GRIDS: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "finetune": PLAIN,
    "single": PLAIN,
    "multitask": PLAIN,
    "owm": OWM,
    "ewc": EWC,
    "hat": HAT,
    "agem": PLAIN,
    "er": PLAIN,
    "lwf": LWF,
    "gpm": GPM,
    "trgp": TRGP,
}

Cell = tuple[str, str, dict[str, Any]]


def cells(benchmark: str, methods: Iterable[str]) -> Iterator[Cell]:
    """Every setting of the methods, but of none that the benchmark's one head rules out."""
    one_head = benchmark == "permuted-digits"
    for method in methods:
        if one_head and METHODS[method].about.several_heads:
            continue
        grid = GRIDS[method]
        for values in itertools.product(*grid.values()):
            yield benchmark, method, dict(zip(grid, values, strict=True))


def score(cell: Cell) -> dict[str, Any]:
    """Mean validation ACC and BWT of a setting, None where it diverged."""
    benchmark, method, settings = cell
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as out:
        try:
            results = trgp.run(
                benchmark,
                method,
                seeds=SEEDS,
                out=out,
                score_on="validation",
                device="cpu",
                **settings,
            )
        except RunError:
            return {"method": method, **settings, "acc": None, "bwt": None}
    bwts = [r.bwt for r in results if r.bwt is not None]
    return {
        "method": method,
        **settings,
        "acc": round(statistics.fmean(r.acc for r in results), 5),
        "bwt": round(statistics.fmean(bwts), 5) if bwts else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("benchmark", choices=["permuted-digits", "split-digits"])
    parser.add_argument("--methods", nargs="+", choices=GRIDS, default=list(GRIDS))
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent, help="folder of the JSON"
    )
    args = parser.parse_args()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        scores = list(pool.map(score, cells(args.benchmark, args.methods)))
    path = args.out / f"choose-{args.benchmark}.json"
    if path.exists():  # what other methods scored stays
        old = json.loads(path.read_text())["cells"]
        scores += [cell for cell in old if cell["method"] not in args.methods]
    scores.sort(key=lambda s: (s["method"], -(s["acc"] or 0)))
    content = {
        "benchmark": args.benchmark,
        "seeds": SEEDS,
        "versions": {"trgp": trgp.__version__, "torch": torch.__version__},
        "cells": scores,
    }
    rows = ",\n".join("  " + json.dumps(s) for s in content.pop("cells"))  # one line a cell
    path.write_text(json.dumps(content, indent=1)[:-2] + f',\n "cells": [\n{rows}\n ]\n}}\n')
    for method in args.methods:
        best = [s for s in scores if s["method"] == method][:4]
        print(*best, sep="\n")


if __name__ == "__main__":
    main()
