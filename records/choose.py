"""Chooses settings on validation data alone.

Every method has its own grid and is scored by mean ACC on the validation samples over seeds that
no record uses; a setting that diverges from any seed is out. On the papers' benchmarks it tries the
methods whose settings no paper or code at hand tells. All cells of a finished grid go to a JSON
file beside this one, best first. The presets in src/trgp/benchmarks hold what came out.

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
from grids import SEARCHES, Search, Value

import trgp
from trgp.benchmarks import entry
from trgp.engine.config import configure
from trgp.engine.machine import resolve
from trgp.engine.pool import cores
from trgp.engine.sweep import Place, carry_out, plan
from trgp.engine.sweeps import Cell
from trgp.files import write_text
from trgp.methods import find
from trgp.results.result import Result

Score = dict[str, Any]


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
