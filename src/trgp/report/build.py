"""Build a report from stored results: its tables and figures as plain data."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..results.store import Found
from ..types import VERSION
from .charts import charts
from .devices import device_of
from .groups import by_benchmark
from .model import Chart, Report
from .naming import clean
from .tables import tables

TITLE = "Continual learning by gradient projection"


def build(found: Found) -> Report:
    """Build the report of the results, with the problems of those that could not be read."""
    results = by_benchmark(found.results)
    return Report(
        TITLE,
        tuple(_summary(found)),
        tables(results),
        tuple(_named_apart(charts(results))),
        tuple(map(clean, found.problems)),
    )


def _summary(found: Found) -> Iterator[str]:
    runs = [run for results in found.results for run in results]
    benchmarks = dict.fromkeys(run.benchmark for run in runs)
    methods = dict.fromkeys(run.method for run in runs)
    yield (
        f"{_count(len(runs), 'run')} of {_count(len(found.results), 'configuration')}: "
        f"{_count(len(methods), 'method')} on {_count(len(benchmarks), 'benchmark')}"
        + (f" ({clean(', '.join(benchmarks))})." if benchmarks else ".")
    )
    torch = sorted({run.versions.get("torch", "unknown") for run in runs})
    devices = sorted({device_of(run) for run in runs})
    if runs:
        yield clean(f"Run with torch {', '.join(torch)} on {'; '.join(devices)}.")
    if unsealed := sum(run.checksum is None for run in runs):
        yield (
            f"{_count(unsealed, 'result')} from trgp 0.1 without a checksum; damage there may go "
            "unnoticed."
        )
    yield f"Made by trgp {VERSION} from stored results alone; nothing was trained for it."


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _named_apart(made: Iterable[Chart]) -> Iterator[Chart]:
    """Make names unique: results of different versions may have the same changed settings."""
    seen: Counter[str] = Counter()
    for chart in made:
        seen[chart.name] += 1
        again = seen[chart.name]
        yield chart if again == 1 else replace(chart, name=f"{chart.name}-again-{again}")
