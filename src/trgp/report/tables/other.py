"""Configurations with changed settings that no other table shows."""

from collections.abc import Sequence

from ...results.result import Results
from .. import cells
from ..groups import as_presets, by_benchmark, data_of, varied
from ..model import Row, Table
from .ablation import is_ablation
from .notes import SEEDS, joined
from .quirks import is_quirk

COLUMNS = ("benchmark", "method", "preset", "seeds", "ACC %", "BWT %", "change of ACC", "p")
NOTE = (
    "The change is relative to the unmodified preset on the same data, if that is stored, with a "
    "paired two-sided t-test over common seeds."
)


def other(found: Sequence[Results]) -> Table:
    """Build a table of changes other than data, a quirk or the trust region."""
    bases = {_key(results): results for results in as_presets(found)}
    rows = tuple(
        _row(results, bases.get(_key(results)))
        for results in by_benchmark(found)
        if varied(run := results[0])
        and not is_quirk(run)
        and not (is_ablation(run) and run.method == "trgp")
    )
    return Table("other", "Other settings", COLUMNS, rows, joined(NOTE, SEEDS))


def _key(results: Results) -> tuple[str, str, str]:
    run = results[0]
    return data_of(run), run.method, run.preset


def _row(results: Results, base: Results | None) -> Row:
    run, own = results[0], cells.repeated_by(results)
    return cells.row(
        run,
        cells.text(run.benchmark),
        cells.text(run.method),
        cells.preset(run),
        own(cells.seeds(results)),
        own(cells.share(results.acc)),
        own(cells.share(results.bwt)),
        *cells.gap_and_p(base, results, lambda run: run.acc),
    )
