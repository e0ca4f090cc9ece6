"""What trust regions are chosen from: old tasks' bases, by size, by overlap, by what they hold.

A few runs of TRGP by `watched.py`, on split CIFAR-100 of 20 epochs a task at most, from a seed that
no record uses. What they tell goes to a JSON file beside this one. Started again with the same
--runs it goes on where it was ended.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from choose import learnt
from table_parts import texts
from torch import nn
from trust_regions import NETWORKS

from trgp.engine.config import configure
from trgp.engine.sweep import Place
from trgp.engine.sweeps import Cell
from trgp.files import write_text
from trgp.methods.trgp import TRGPMethod
from trgp.results.layout import NONE
from trgp.results.result import Result

RECORD = Path(__file__).with_name("overlaps.json")
SEED = 100
RUNS: list[tuple[str, dict[str, Any]]] = [
    ("pmnist", {}),
    ("split-cifar100", {"epochs": 20}),
    ("split-cifar100", {"epochs": 20, "threshold_growth": 0.0}),
]
"""Benchmarks, and what is changed of the preset `paper`."""


class Choice(NamedTuple):
    """A layer's, of a task with more old tasks than it may trust; it trusts as many as it may."""

    trusted: list[int]
    sizes: list[float]
    """By old task the share of all directions that its basis has."""
    shares: list[float]
    """And of the first gradient's energy that it holds. By chance it would be the same."""

    def lead(self, values: Sequence[float]) -> float:
        """By how much the least value of a trusted task is above the greatest of another."""
        others = [value for task, value in enumerate(values) if task not in self.trusted]
        return min(values[task] for task in self.trusted) - max(others)

    def above_chance(self, *, trusted: bool) -> list[float]:
        """Of the energy that chance would leave, what these tasks' bases hold: 0 is chance, 1 all.

        A basis of all directions leaves none.
        """
        return [
            (share - size) / (1 - size)
            for task, (share, size) in enumerate(zip(self.shares, self.sizes, strict=True))
            if (task in self.trusted) == trusted and size < 1
        ]


def cell(benchmark: str, changes: Mapping[str, Any]) -> Cell:
    """TRGP's own settings are said one by one: presets do not know a method that is made of it."""
    paper = configure(benchmark, "trgp").settings
    own = {field.name: paper[field.name] for field in fields(TRGPMethod) if field.name in paper}
    settings = {"lr": paper["lr"], **own, **changes, "score_on": "validation"}
    return Cell(configure(benchmark, "watched:Watched", **settings), SEED)


def told(run: Result, network: nn.Module, changes: Mapping[str, Any]) -> dict[str, Any]:
    """By layer the width of its inputs, and task by task: the directions in memory; those that its
    basis has in common with every one up to itself; from the second on what each old one holds,
    and whom it trusts."""
    found, tasks, weights = run.figures, len(run.accuracy_matrix), dict(network.named_parameters())
    layers = {
        name: {
            "width": weights[f"{name}.weight"][0].numel(),
            "memory": memory,
            "common": [
                [round(found[f"{name}: {j} in {i}"]) for j in range(i + 1)] for i in range(tasks)
            ],
            "shares": [
                [round(found[f"{name}: {j} of {i}"], 5) for j in range(i)] for i in range(1, tasks)
            ],
            "trusted": [layer.get(name, []) for layer in (run.selected or [])[1:]],
        }
        for name, memory in (run.ranks or {}).items()
    }
    return {
        "benchmark": run.benchmark,
        **changes,
        "versions": dict(run.versions),
        "device": run.device,
        "layers": layers,
    }


def choices(layer: Mapping[str, Any], top_k: int) -> Iterator[Choice]:
    sizes = [row[-1] / layer["width"] for row in layer["common"]]
    for trusted, shares in zip(layer["trusted"], layer["shares"], strict=True):
        if len(shares) > top_k and len(trusted) == top_k:
            yield Choice(trusted, sizes[: len(shares)], shares)


def nested(layer: Mapping[str, Any]) -> list[float]:
    """Of each basis's directions the share that the next one has too."""
    return [row[-2] / before[-1] for before, row in itertools.pairwise(layer["common"])]


def nested_by_chance(layer: Mapping[str, Any]) -> list[float]:
    """The same if the next one took as many at random of those that were in memory before."""
    sizes = [row[-1] for row in layer["common"]]
    return [
        (size - (after - before)) / before
        for size, (before, after) in zip(
            sizes[1:], itertools.pairwise(layer["memory"]), strict=True
        )
    ]


def overlaps() -> str:
    """Layer by layer, how bases grow and overlap, and what is chosen of them."""
    rows = []
    for run in json.loads(RECORD.read_text())["runs"]:
        top_k = configure(run["benchmark"], "trgp").settings["top_k"]
        growth = run.get("threshold_growth")
        named = run["benchmark"], "as the preset" if growth is None else f"{growth:g}"
        rows += [(*named, name, *_row(layer, top_k)) for name, layer in run["layers"].items()]
    header = (
        *("benchmark", "threshold's growth", "layer", "directions, first and last basis"),
        *("of a basis, also in the next: mean (least)", "by chance"),
        *("choices of K", "the K latest", "the K largest", "as large as others"),
        *("above chance: trusted", "left out"),
    )
    return texts(header, rows)


def _row(layer: Mapping[str, Any], top_k: int) -> Iterator[str]:
    sizes = [row[-1] for row in layer["common"]]
    yield f"{sizes[0]} to {sizes[-1]} of {layer['width']}"
    inside = nested(layer)
    yield f"{_percent(inside)} ({_percent([min(inside)])})"
    yield _percent(nested_by_chance(layer))
    made = [*choices(layer, top_k)]
    latest = [each.lead(range(len(each.sizes))) > 0 for each in made]
    leads = [each.lead(each.sizes) for each in made]
    largest, ties = [lead > 0 for lead in leads], [lead == 0 for lead in leads]
    yield str(len(made))
    yield from (str(sum(counted)) for counted in (latest, largest, ties))
    for trusted in (True, False):
        yield _percent([v for each in made for v in each.above_chance(trusted=trusted)])


def _percent(values: Sequence[float]) -> str:
    return f"{100 * statistics.fmean(values):.0f} %" if values else NONE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/overlaps"), help="folder of the runs"
    )
    parser.add_argument("--data-root", type=Path, help="folder of the image sets")
    args = parser.parse_args()
    cells = [cell(*each) for each in RUNS]
    place = Place(args.device, args.runs, args.data_root)
    results = learnt(cells, place, args.jobs, "records/overlaps.py")
    runs = [
        told(results[each], NETWORKS[benchmark](), changes)
        for each, (benchmark, changes) in zip(cells, RUNS, strict=True)
    ]
    lines = ",\n".join(f"  {json.dumps(run)}" for run in runs)
    write_text(RECORD, f'{{\n "seed": {SEED},\n "runs": [\n{lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
