"""What every method holds beside the network, and the most that a run took."""

from collections.abc import Sequence

from ...results.result import Results
from .. import cells
from ..groups import as_presets, by_benchmark
from ..model import Row, Table

COLUMNS = (
    "benchmark",
    "method",
    "preset",
    "network",
    "held beside it",
    "in copies of the network",
    "peak",
    "device",
)
NOTE = (
    "Held are all tensors that a method keeps when the last task is learnt: bases, scalings, "
    "importances, stored samples, networks. The peak is what was allocated on a GPU at most, else "
    "the largest size of the process, Python and torch included; of runs at once it is that of all "
    "together. Means over seeds."
)


def memory(found: Sequence[Results]) -> Table:
    """Every configuration that is as its preset has it."""
    rows = tuple(_row(results) for results in by_benchmark(as_presets(found)))
    return Table("memory", "Memory", COLUMNS, rows, NOTE)


def _row(results: Results) -> Row:
    run, own = results[0], cells.repeated_by(results)
    copies = cells.mean(results, lambda run: run.state_bytes / run.network_bytes)
    return cells.row(
        run,
        cells.text(run.benchmark),
        cells.text(run.method),
        cells.preset(run),
        own(cells.held(cells.mean(results, lambda run: run.network_bytes))),
        own(cells.held(cells.mean(results, lambda run: run.state_bytes))),
        own(cells.number(copies, f"{copies:.2f}")),
        own(cells.held(cells.mean(results, lambda run: run.peak_memory_bytes))),
        cells.text(run.device),
    )
