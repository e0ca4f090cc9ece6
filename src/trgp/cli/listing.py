"""`trgp list`: the benchmarks, methods and presets."""

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from rich.console import RenderableType
from rich.table import Table
from tyro.conf import Positional, arg

from .. import benchmarks
from ..benchmarks import Published
from ..benchmarks.data import BENCHMARKS
from ..engine.config import Training, configure
from ..engine.errors import InputError
from ..lookup import meant
from ..methods import METHODS, About
from ..results.layout import NONE, pairs, plain, shown, stacked, table
from .data import catalogue
from .fields import docs
from .parsing import parse
from .screen import show

PAPER = "paper"


@dataclass(frozen=True)
class Listing:
    """List benchmarks, methods or presets."""

    what: Annotated[str, arg(metavar="benchmarks|methods|presets"), Positional]
    """benchmarks (with the state of their data), methods (with what they need) or presets (with
    what they change relative to `paper`: `official` repeats the published code, `best` has the
    settings that scored highest)."""


def main(argv: Sequence[str]) -> None:
    tables = {"benchmarks": _benchmarks, "methods": _methods, "presets": _presets}
    what = parse(Listing, argv, "trgp list").what
    if what not in tables:
        raise InputError(f"There is no list of {what}; {meant(what, tables)}")
    show(tables[what]())


def _benchmarks() -> Table:
    missing = catalogue().missing
    made = table(["benchmark", "tasks", "data", "TRGP in the paper", "what it is"], [])
    for name in benchmarks.NAMES:
        entry = benchmarks.entry(name)
        paper = _published(entry.paper.get("trgp"))
        made.add_row(name, str(entry.tasks), plain(_state(missing[name], name)), paper, entry.says)
    return made


def _state(missing: Sequence[str], name: str) -> str:
    """Return whether a benchmark's data is present, and if not the command that gets it."""
    if missing:
        return f"missing: trgp data prepare {' '.join(missing)}"
    if not BENCHMARKS[name] and importlib.util.find_spec("sklearn") is None:
        return "missing: pip install 'trgp[digits]'"
    return "present"


def _published(paper: Published | None) -> str:
    if paper is None:
        return NONE
    return f"{paper.acc:.2f}" + ("" if paper.std is None else f" ± {paper.std:.2f}")


def _methods() -> Table:
    made = table(["method", "family", "stores", "needs", "paper", "what it does"], [])
    for name, method in METHODS.items():
        about, says = method.about, (method.__doc__ or "").partition("\n")[0]
        made.add_row(name, about.family, about.stores, _needs(about), about.paper, says)
    return made


def _needs(about: About) -> str:
    needs = {
        "the task's name at test time": about.task_id_at_test,
        "a head for every task": about.several_heads,
        "all tasks at once": about.joint,
    }
    return ", ".join(need for need, needed in needs.items() if needed) or NONE


def _presets() -> RenderableType:
    changes = table(["benchmark", "preset", "field", "methods", "paper", "there"], [])
    fields: dict[str, str] = {}
    for name in benchmarks.NAMES:
        entry = benchmarks.entry(name)
        kinds: list[type] = [Training, entry.options, *METHODS.values()]
        said = {field: text for kind in kinds for field, text in docs(kind).items()}
        for preset in (each for each in entry.presets if each != PAPER):
            for i, row in enumerate(_differences(name, preset)):
                changes.add_row(*((name, preset) if i == 0 else ("", "")), *map(plain, row))
                fields[row[0]] = said[row[0]]
    return stacked([changes, pairs(fields)])


def _differences(name: str, preset: str) -> Iterator[tuple[str, ...]]:
    """Yield what a preset changes, methods with the same change in one row."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for method in METHODS:
        paper, other = (configure(name, method, each).settings for each in (PAPER, preset))
        for field, value in other.items():
            if value != paper[field]:
                change = field, shown(paper[field]) or NONE, shown(value)
                found.setdefault(change, []).append(method)
    for (field, before, after), methods in found.items():
        who = "all" if len(methods) == len(METHODS) else ", ".join(methods)
        yield field, who, before, after
