"""`trgp report`: tables, figures and a page of stored runs."""

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
    """Tables, figures and a page of what stored runs came to, without training anything."""

    runs: Annotated[tuple[str, ...], arg(metavar="[RUNS ...]"), Positional] = ("runs",)
    """The folders that were the runs' --out; several are put together."""
    out: Annotated[str, arg(metavar="DIR")] = "report"
    """A new folder, an empty one, or that of an earlier report, which is renewed."""


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
    from ..report.page import page  # its scripts are read with it, which no other command needs

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
            "Without matplotlib there are no files of figures; `pip install 'trgp[report]'` gets "
            "it, and the same command adds them."
        )


def _drawing() -> Draw | None:
    """What draws figures, if it is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    from ..report.drawing import all_drawn

    return all_drawn


def _bar() -> Progress:
    """How far the figures are, where somebody looks."""
    return Progress(
        TextColumn("figures"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
