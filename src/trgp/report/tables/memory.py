"""Memory of every method next to the network, and the peak of its runs."""

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
    "The memory counts all tensors that a method stores after the last task: bases, scalings, "
    "importances, samples, networks. The peak is the largest allocation on a GPU, or on a CPU the "
    "largest size of the process, Python and torch included. Concurrent runs share one peak, "
    "measured for all of them together. Figures are means over seeds."
)


def memory(found: Sequence[Results]) -> Table:
    """Build a table of all unmodified presets."""
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
