"""`trgp report`: write tables, figures and a page from stored runs."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tyro.conf import Positional, arg

from ..engine.config import defaults
from ..engine.errors import InputError, RunError
from ..report.build import build
from ..report.folder import PAGE, Draw, check, write
from ..results.several import find_in
from .parsing import parse
from .screen import tell


@dataclass(frozen=True)
class Report:
    """Write tables, figures and a page from stored runs, without training."""

    runs: Annotated[tuple[str, ...], arg(metavar="[RUNS ...]"), Positional] = ("runs",)
    """The --out folders of the runs; several are merged into one report."""
    out: Annotated[str, arg(metavar="DIR")] = "report"
    """The report's folder: new, empty, or that of an earlier report, which is updated."""


def main(argv: Sequence[str]) -> None:
    asked = parse(Report, argv, "trgp report")
    try:
        check(asked.out)
    except OSError as error:
        raise InputError(str(error)) from error
    found = find_in(asked.runs, defaults)
    if not found.results:
        folders = ", ".join(asked.runs)
        none = f"There is no finished run in {folders}; begin with `trgp run permuted-digits`."
        raise InputError("\ntrgp: ".join(found.problems or [none]))
    for problem in found.problems:
        tell(problem)
    from ..report.page import page  # imported here, because only this command needs the page

    report = build(found)
    draw = _drawing()
    total = len(report.charts) if draw else 0
    try:
        with _bar() as bar:
            figures = bar.add_task("", total=total, visible=total > 0)
            for _ in write(report, page(report), asked.out, draw):
                bar.advance(figures)
    except OSError as error:
        reason = error.strerror or error
        raise RunError(
            f"{asked.out} cannot be written to: {reason}; give another --out."
        ) from error
    print(f"Report: {os.path.join(asked.out, PAGE)} ({len(report.tables)} tables, {total} figures)")
    if draw is None:
        tell(
            "No figure files were written, because matplotlib is missing; install it with "
            "`pip install 'trgp[report]'` and repeat the command."
        )


def _drawing() -> Draw | None:
    """Return the function that draws figures; None without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    from ..report.drawing import all_drawn

    return all_drawn


def _bar() -> Progress:
    """Return a progress bar over the figures, hidden unless stderr is a terminal."""
    return Progress(
        TextColumn("figures"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
