"""`trgp table`, `trgp show` and `trgp compare`: results of stored runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from ..engine.config import defaults
from ..engine.errors import InputError
from ..results import render, store
from ..results.result import Results
from .parsing import parse
from .screen import show, tell


@dataclass(frozen=True)
class Table:
    """Show the results of all stored runs, one row per configuration over its seeds."""

    folder: Annotated[str, arg(metavar="DIR"), Positional] = "runs"
    """The --out folder of the runs."""


@dataclass(frozen=True)
class Show:
    """Show everything stored about a run."""

    run: Annotated[str, arg(metavar="RUN"), Positional]
    """The run's folder or its result.json; for a configuration's folder, every seed is shown."""


@dataclass(frozen=True)
class Compare:
    """Compare two configurations."""

    a: Annotated[str, arg(metavar="A"), Positional]
    """The baseline: the folder of a configuration or of one seed, or a result.json."""
    b: Annotated[str, arg(metavar="B"), Positional]
    """The configuration to compare with A."""


def table(argv: Sequence[str]) -> None:
    folder = parse(Table, argv, "trgp table").folder
    found = store.find(folder, defaults)
    if not found.results:
        none = f"There is no finished run in {folder}; begin with `trgp run permuted-digits`."
        raise InputError("\ntrgp: ".join(found.problems or [none]))
    for problem in found.problems:
        tell(problem)
    show(render.main_table(found))


def show_run(argv: Sequence[str]) -> None:
    for result in _read(parse(Show, argv, "trgp show").run):
        show(render.details(result))


def compare(argv: Sequence[str]) -> None:
    asked = parse(Compare, argv, "trgp compare")
    show(render.comparison(_read(asked.a), _read(asked.b)))


def _read(path: str) -> Results:
    try:
        return store.read(path, defaults)
    except (ValueError, OSError) as error:
        raise InputError(str(error)) from error
