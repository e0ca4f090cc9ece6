"""Training time, absolute and in multiples of GPM's."""

from collections.abc import Sequence

from ...results.result import Result, Results
from .. import cells
from ..devices import device_of
from ..groups import as_presets, by_benchmark, data_of
from ..model import Row, Table
from ..published import TIME

COLUMNS = (
    "benchmark",
    "method",
    "preset",
    "seeds",
    "training",
    "in multiples of GPM's",
    "paper's",
    "evaluation",
    "device",
)
APART = ("evaluation", "checkpoints")
NOTE = (
    "Training is all that learning takes: steps, validation, bases and selection. It excludes "
    "the evaluation of old tasks, and checkpoints, which older results do not count. Times are "
    "means over seeds. Multiples are relative to GPM with the same data and preset on the same "
    "device; they are reliable only if each run had the device to itself. The time of concurrent "
    "runs is each run's share of the device time."
)


def training_time(found: Sequence[Results]) -> Table:
    """Build a table of all unmodified presets."""
    chosen = by_benchmark(as_presets(found))
    gpm = {_key(results): results for results in chosen if results[0].method == "gpm"}
    rows = tuple(_row(results, gpm.get(_key(results))) for results in chosen)
    return Table("time", "Training time", COLUMNS, rows, NOTE)


def _key(results: Results) -> tuple[str, str, str]:
    devices = "; ".join(sorted({device_of(run) for run in results}))
    return data_of(results[0]), results[0].preset, devices


def _training(run: Result) -> float:
    return sum(spent for task in run.seconds for phase, spent in task.items() if phase not in APART)


def _evaluation(run: Result) -> float:
    return sum(task.get("evaluation", 0.0) for task in run.seconds)


def _row(results: Results, gpm: Results | None) -> Row:
    run, own = results[0], cells.repeated_by(results)
    here = cells.mean(results, _training)
    relative = cells.EMPTY
    if gpm is not None and (whole := cells.mean(gpm, _training)):
        share = cells.number(here / whole, f"{here / whole:.2f}")
        relative = cells.repeated_by(gpm, results)(share)
    paper = TIME.get(run.benchmark, {}).get(run.method)
    return cells.row(
        run,
        cells.text(run.benchmark),
        cells.text(run.method),
        cells.preset(run),
        own(cells.seeds(results)),
        own(cells.lasting(here)),
        relative,
        cells.EMPTY if paper is None else cells.number(paper, f"{paper:.2f}"),
        own(cells.lasting(cells.mean(results, _evaluation))),
        cells.text("; ".join(sorted({run.device for run in results}))),
    )
