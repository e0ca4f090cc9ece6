"""Ablations: other thresholds of the trust region, task-wise regions, more or fewer old tasks."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ...results.render import SAME_FIGURES
from ...results.result import Result, Results
from .. import cells
from ..groups import by_benchmark, data_of, varied
from ..model import Row, Table
from ..published import ABLATION
from .notes import SEEDS, joined, papers_data

COLUMNS = (
    "benchmark",
    "preset",
    "trust region",
    "seeds",
    "ACC %",
    "paper's ACC",
    "ACC - paper",
    "BWT %",
    "change of ACC",
    "p",
)
NOTE = (
    "One setting is changed at a time. The change is relative to the unmodified preset, with a "
    "paired two-sided t-test over common seeds. The command trgp sweep ablation runs the paper's "
    "ablations."
)
KEYS = ("epsilon", "scope", "top_k")
Changed = tuple[str, Any]
Printed = Mapping[Changed | None, float | None]
"""The paper's ACC by changed setting; None if it prints none."""


def ablation(
    found: Sequence[Results], wanted: Mapping[str, Collection[Changed]] = MappingProxyType({})
) -> Table:
    """Build a table of configurations with one of `KEYS` changed, below their baseline.

    wanted: by benchmark of the paper, changes to list as not run even if the paper has no figure.
    """
    printed: dict[str, Printed] = {
        benchmark: {**accs, **{key: accs.get(key) for key in wanted.get(benchmark, ())}}
        for benchmark, accs in ABLATION.items()
    }
    families: dict[tuple[str, str], dict[Changed | None, Results]] = {}
    for results in by_benchmark(found):
        run = results[0]
        if run.method == "trgp" and (varied(run) == {} or is_ablation(run)):
            family = families.setdefault((data_of(run), run.preset), {})
            family[next(iter(varied(run).items()), None)] = results
    rows: list[Row] = []
    for family in families.values():
        if len(family) > 1 or next(iter(family.values()))[0].benchmark in ABLATION:
            rows += _rows(family, printed)
    shown = {row.benchmark for row in rows}
    for benchmark in ABLATION:
        if benchmark not in shown:
            rows += _not_run(benchmark, "paper", printed[benchmark])
    note = joined(SEEDS, NOTE, papers_data(row.benchmark for row in rows))
    return Table("ablation", "Ablations of the trust region", COLUMNS, tuple(rows), note)


def is_ablation(run: Result) -> bool:
    """Return whether one of `KEYS` is the only change apart from data."""
    changes = varied(run)
    return len(changes) == 1 and next(iter(changes)) in KEYS


def _rows(family: dict[Changed | None, Results], printed: Mapping[str, Printed]) -> Iterator[Row]:
    first = next(iter(family.values()))[0]
    plain = not first.changed.keys() - SAME_FIGURES - set(KEYS)
    published = printed.get(first.benchmark, {}) if plain else {}
    missing = {
        key: acc
        for key, acc in published.items()
        if key not in family and not (key is not None and first.config.get(key[0]) == key[1])
    }
    base = family.get(None)
    for key in sorted(family, key=_place):
        results = family[key]
        run, own = results[0], cells.repeated_by(results)
        paper = published.get(key)
        yield cells.row(
            run,
            cells.text(run.benchmark),
            cells.preset(run),
            cells.text(_label(key, run)),
            own(cells.seeds(results)),
            own(cells.share(results.acc)),
            cells.percent(paper),
            own(cells.beside(results.acc.mean, paper)),
            own(cells.share(results.bwt)),
            *cells.gap_and_p(None if key is None else base, results, lambda run: run.acc),
        )
    yield from _not_run(first.benchmark, first.preset, missing)


def _not_run(benchmark: str, preset: str, published: Printed) -> Iterator[Row]:
    for key, acc in published.items():
        made = (
            cells.text(benchmark),
            cells.text(preset),
            cells.text("as the preset" if key is None else _says(*key)),
            cells.EMPTY,
            cells.not_run(benchmark, "trgp", preset, {} if key is None else dict([key])),
            cells.percent(acc),
            *(cells.EMPTY,) * 4,
        )
        yield Row(made, benchmark, "trgp", preset, not_run=True)


def _label(key: Changed | None, run: Result) -> str:
    if key is not None:
        return _says(*key)
    settings = ", ".join(_says(name, run.config[name]) for name in KEYS if name in run.config)
    return f"as the preset: {settings}"


def _says(name: str, value: Any) -> str:
    if name == "scope":
        return f"{value}-wise"
    return f"top {value}" if name == "top_k" else f"{name} {value}"


def _place(key: Changed | None) -> tuple[int, str]:
    return (-1, "") if key is None else (KEYS.index(key[0]), str(key[1]))
