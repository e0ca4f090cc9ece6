"""Forward transfer: accuracy on each task right after it is learnt, and the gain over GPM."""

import statistics
from collections.abc import Iterator, Sequence

from ...benchmarks import NAMES, entry
from ...results.layout import points
from ...results.render import paper_of
from ...results.result import Results
from .. import cells
from ..groups import as_presets, by_benchmark, data_of
from ..model import Row, Table
from ..naming import clean, file_name
from ..paired_marks import Verdict, verdicts
from ..published import DIAGONAL
from .notes import MARKS, SEEDS, joined, papers_data

NOTE = (
    "A_ii is the accuracy on task i right after it is learnt. The gain is the difference of the "
    "average to GPM's with the same preset and data, with a paired two-sided t-test over common "
    "seeds."
)


def transfer(found: Sequence[Results]) -> Iterator[Table]:
    """Yield a table per benchmark and number of tasks."""
    families: dict[tuple[str, int], list[Results]] = {}
    for results in by_benchmark(as_presets(found)):
        run = results[0]
        if run.mean_diagonal is not None:
            key = run.benchmark, len(run.accuracy_matrix)
            families.setdefault(key, []).append(results)
    for (benchmark, T), members in families.items():
        known = entry(benchmark).tasks if benchmark in NAMES else 0
        name = file_name("transfer", benchmark, "" if known == T else f"{T}-tasks")
        tasks = (f"task {t + 1}" for t in range(T))
        columns = ("method", "preset", "seeds", *tasks, "average A_ii %", "gain over GPM", "p")
        note = joined(NOTE, SEEDS, MARKS, papers_data([benchmark]))
        rows = (*_rows(members), *_papers(members))
        yield Table(name, f"A_ii on {clean(benchmark)}", columns, rows, note)


def _rows(members: Sequence[Results]) -> Iterator[Row]:
    by_data: dict[str, list[Results]] = {}
    for results in members:
        by_data.setdefault(data_of(results[0]), []).append(results)
    for group in by_data.values():
        gpm = {results[0].preset: results for results in group if results[0].method == "gpm"}
        for results, verdict in zip(
            group, verdicts(group, lambda run: run.mean_diagonal), strict=True
        ):
            yield _row(results, verdict, gpm.get(results[0].preset))


def _row(results: Results, verdict: Verdict, gpm: Results | None) -> Row:
    run, own = results[0], cells.repeated_by(results)
    diagonals = [
        [accuracy for i, row in enumerate(run.accuracy_matrix) if (accuracy := row[i]) is not None]
        for run in results
    ]
    means = [statistics.fmean(column) for column in zip(*diagonals, strict=True)]
    average = cells.share(results.mean_diagonal, verdict.mark, verdict.note)
    return cells.row(
        run,
        cells.text(run.method),
        cells.preset(run),
        own(cells.seeds(results)),
        *(own(cells.number(100 * value, points(value))) for value in means),
        own(average),
        *cells.gap_and_p(
            None if run.method == "gpm" else gpm, results, lambda run: run.mean_diagonal
        ),
    )


def _papers(members: Sequence[Results]) -> Iterator[Row]:
    """Yield the paper's rows if a result is stored that compares with them."""
    run = members[0][0]
    paper = {
        method: values
        for method, values in DIAGONAL.get(run.benchmark, {}).items()
        if len(values) == len(run.accuracy_matrix)
    }
    if not any(paper_of(results[0]) is not None for results in members):
        return
    average = {method: statistics.fmean(values) for method, values in paper.items()}
    for method, values in paper.items():
        gain = average[method] - average["gpm"]
        made = (
            cells.text(f"{method}, in the paper"),
            cells.EMPTY,
            cells.EMPTY,
            *(cells.percent(value) for value in values),
            cells.percent(average[method]),
            cells.EMPTY if method == "gpm" else cells.number(gain, f"{gain:+.2f}"),
            cells.EMPTY,
        )
        yield Row(made, run.benchmark, method, "")
