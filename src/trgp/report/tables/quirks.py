"""Effects of each quirk of the published code: alone, and of all others without it."""

from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import Any

from ...engine.config import configure
from ...engine.sweeps.lists import SPEED
from ...results.layout import shown
from ...results.render import SAME_FIGURES
from ...results.result import Result, Results
from .. import cells
from ..groups import by_benchmark
from ..model import Cell, Row, Table
from ..naming import clean
from .notes import SEEDS, joined

SIDES = ("paper", "official")
COLUMNS = (
    "benchmark",
    "method",
    "quirk",
    *(
        f"{side}: {figure}"
        for side in ("paper with it alone", "official without it")
        for figure in ("seeds", "ACC %", "BWT %", "change of ACC", "p")
    ),
)
NOTE = (
    "The changes are relative to the unmodified preset in the first row of a benchmark, with a "
    "paired two-sided t-test over common seeds. The command trgp sweep quirks runs those of TRGP."
)


def quirks(found: Sequence[Results], always: Collection[tuple[str, str]] = ()) -> Table:
    """Build a table for benchmarks and methods with both presets, or a changed quirk, stored.

    always: pairs that are shown in any case.
    """
    families: dict[tuple[str, str], dict[tuple[str, str | None], Results]] = {}
    for results in by_benchmark(found):
        run = results[0]
        changes = _changes(run)
        if run.preset in SIDES and (not changes or is_quirk(run)):
            key = run.preset, next(iter(changes), None)
            families.setdefault((run.benchmark, run.method), {})[key] = results
    kept = {names: family for names, family in families.items() if _tells(family)}
    kept |= {names: families.get(names, {}) for names in always}
    rows = [row for names, family in kept.items() for row in _rows(*names, family)]
    note = joined(NOTE, SEEDS)
    return Table("quirks", "Quirk by quirk", COLUMNS, tuple(rows), note)


def is_quirk(run: Result) -> bool:
    """Return whether the only change is one quirk, set to the other preset's value."""
    changes = _changes(run)
    other = [side for side in SIDES if side != run.preset]
    if len(changes) != 1 or len(other) != 1:
        return False
    ((name, value),) = changes.items()
    ways = _differing(run.benchmark, run.method).get(name)
    return ways is not None and ways[other[0]] == value


def _tells(family: dict[tuple[str, str | None], Results]) -> bool:
    """Return whether both presets or a changed quirk are stored."""
    return all((side, None) in family for side in SIDES) or any(name for _, name in family)


def _changes(run: Result) -> dict[str, Any]:
    return {key: value for key, value in run.changed.items() if key not in SAME_FIGURES}


@cache
def _differing(benchmark: str, method: str) -> dict[str, dict[str, Any]]:
    """Return the settings in which the presets differ, with both values as stored in results."""
    try:
        paper, official = (configure(benchmark, method, side).stored for side in SIDES)
    except (
        ValueError,
        ImportError,
    ):  # a benchmark or method of another version, or a user's that is not importable
        return {}
    return {
        name: {"paper": paper[name], "official": official[name]}
        for name in paper
        if paper[name] != official[name] and name not in SPEED
    }


def _rows(
    benchmark: str, method: str, family: dict[tuple[str, str | None], Results]
) -> Iterator[Row]:
    bases = [family.get((side, None)) for side in SIDES]
    differing = _differing(benchmark, method)
    if not differing:
        return
    for name in (None, *differing):
        label = "as they are" if name is None else f"{name} {shown(differing[name]['official'])}"
        made = [cells.text(benchmark), cells.text(method), cells.text(label)]
        for side, other, base in zip(SIDES, reversed(SIDES), bases, strict=True):
            results = family.get((side, name))
            if results is None:
                changes = {} if name is None else {name: differing[name][other]}
                missing = cells.not_run(benchmark, method, side, changes)
                made += [cells.EMPTY, missing, *[cells.EMPTY] * 3]
            else:
                made += _side(results, None if name is None else base)
        absent = not any((side, name) in family for side in SIDES)
        yield Row(tuple(made), clean(benchmark), clean(method), not_run=absent)


def _side(results: Results, base: Results | None) -> tuple[Cell, ...]:
    own = cells.repeated_by(results)
    return (
        own(cells.seeds(results)),
        own(cells.share(results.acc)),
        own(cells.share(results.bwt)),
        *cells.gap_and_p(base, results, lambda run: run.acc),
    )
