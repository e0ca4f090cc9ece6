"""Main results: ACC and BWT next to the paper's, and the paper's cells that were not run."""

from collections.abc import Iterator, Sequence

from ...benchmarks import PAPER
from ...benchmarks.common import Published
from ...methods import METHODS
from ...results.render import paper_of
from ...results.result import Results
from .. import cells
from ..groups import as_presets, data_of, place
from ..model import Cell, Row, Table
from ..paired_marks import Verdict, verdicts
from .notes import MARKS, SEEDS, joined, papers_data

COLUMNS = (
    "benchmark",
    "method",
    "preset",
    "seeds",
    "ACC %",
    "paper's ACC",
    "ACC - paper",
    "BWT %",
    "paper's BWT",
    "BWT - paper",
    "p against the best",
)


def main(found: Sequence[Results]) -> Table:
    """Build a table of all unmodified presets, the best ACC first.

    Benchmarks without any run come last.
    """
    groups: dict[str, list[Results]] = {}
    for results in as_presets(found):
        groups.setdefault(data_of(results[0]), []).append(results)
    rows: list[Row] = []
    for group in groups.values():
        judged = zip(group, verdicts(group, lambda run: run.acc), strict=True)
        rows += sorted((_row(*pair) for pair in judged), key=lambda row: -(row.cells[4].value or 0))
    ran = {row.benchmark for row in rows}
    rows += _not_run(found)
    rows.sort(key=lambda row: (row.benchmark not in ran, place(row.benchmark, "")[:2]))
    benchmarks = (row.benchmark for row in rows)
    note = joined(SEEDS, MARKS, papers_data(benchmarks))
    return Table("main", "Main results", COLUMNS, tuple(rows), note)


def papers_and_gaps(paper: Published | None, results: Results) -> tuple[Cell, Cell, Cell, Cell]:
    """Make cells of the paper's ACC, the difference to it, and both for BWT."""
    if paper is None:
        return (cells.EMPTY,) * 4
    own = cells.repeated_by(results)
    return (
        cells.percent(paper.acc, paper.std),
        own(cells.beside(results.acc.mean, paper.acc)),
        cells.rounded(paper.bwt),
        own(cells.beside(results.bwt.mean, paper.bwt)),
    )


def was_run(found: Sequence[Results], benchmark: str, method: str) -> bool:
    """Return whether a result is stored that compares with the paper's."""
    return any(
        (results[0].benchmark, results[0].method) == (benchmark, method)
        and paper_of(results[0]) is not None
        for results in found
    )


def _row(results: Results, verdict: Verdict) -> Row:
    run, own = results[0], cells.repeated_by(results)
    acc_of_paper, acc_gap, bwt_of_paper, bwt_gap = papers_and_gaps(paper_of(run), results)
    return cells.row(
        run,
        cells.text(run.benchmark),
        cells.text(run.method),
        cells.preset(run),
        own(cells.seeds(results)),
        own(cells.share(results.acc, verdict.mark, verdict.note)),
        acc_of_paper,
        acc_gap,
        own(cells.share(results.bwt)),
        bwt_of_paper,
        bwt_gap,
        cells.p_against_best(results, verdict),
    )


def _not_run(found: Sequence[Results]) -> Iterator[Row]:
    for benchmark, methods in PAPER.items():
        for method, paper in methods.items():
            if method in METHODS and not was_run(found, benchmark, method):
                made = (
                    cells.text(benchmark),
                    cells.text(method),
                    cells.text("paper"),
                    cells.EMPTY,
                    cells.not_run(benchmark, method),
                    cells.percent(paper.acc, paper.std),
                    cells.EMPTY,
                    cells.EMPTY,
                    cells.rounded(paper.bwt),
                    cells.EMPTY,
                    cells.EMPTY,
                )
                yield Row(made, benchmark, method, "paper", not_run=True)
