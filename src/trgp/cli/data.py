"""`trgp data`: list the image sets and prepare missing ones."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Annotated

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from tyro.conf import Positional, arg

from ..benchmarks.data import BENCHMARKS, SETS, SOURCES, Catalogue, prepare, present
from ..engine.errors import InputError, Interrupted, RunError
from ..lookup import meant
from ..results.layout import NONE, plain, stacked, table
from .parsing import parse
from .screen import show

HELP = """usage: trgp data list [--data-root DIR]
       trgp data prepare NAME ... [--data-root DIR]
       trgp data prepare miniimagenet --from PATH [--data-root DIR]

  list      show which image sets are present and which benchmarks need them
  prepare   download sets, check them and write them as npz files; miniimagenet is built
            from your own copy of the images
"""
Root = Annotated[str | None, arg(metavar="DIR")]


@dataclass(frozen=True)
class List:
    """Show which image sets are present and which benchmarks need them."""

    data_root: Root = None
    """The folder of the sets (without it: TRGP_DATA, else the user's cache)."""


@dataclass(frozen=True)
class Prepare:
    """Download image sets, check them and write them as npz files; skip those already present."""

    name: Annotated[tuple[str, ...], arg(metavar="NAME [NAME ...]"), Positional]
    """Names of sets, as `trgp data list` shows them."""
    from_: Annotated[str | None, arg(name="from", metavar="PATH")] = None
    """Only for miniimagenet, which cannot be downloaded. One of: a folder with a folder of 600
    images per class, all together or split into train/, val/ and test/; a folder with train.csv,
    val.csv, test.csv and images/; an npz file."""
    data_root: Root = None
    """The folder of the sets (without it: TRGP_DATA, else the user's cache)."""


def main(argv: Sequence[str]) -> None:
    commands = {"list": _list, "prepare": _prepare}
    match argv:
        case ["-h" | "--help", *_]:
            print(HELP, end="")
        case [name, *rest] if name in commands:
            commands[name](rest)
        case [name, *_]:
            raise InputError(f"There is no command `trgp data {name}`; {meant(name, commands)}")
        case _:
            raise InputError("trgp data needs a command: list or prepare.")


def catalogue(root: str | None = None) -> Catalogue:
    """Return the image sets under the root, or raise a sentence on why it cannot be read."""
    try:
        return present(root)
    except (ValueError, OSError) as error:
        raise InputError(str(error)) from error


def _list(argv: Sequence[str]) -> None:
    found = catalogue(parse(List, argv, "trgp data list").data_root)
    made = table(["set", "state", "needed by"], [], title=f"Image sets in {found.root}")
    for name in SETS:
        users = ", ".join(user for user, needed in BENCHMARKS.items() if name in needed)
        command = f"trgp data prepare {name}" + ("" if name in SOURCES else " --from PATH")
        state = "present" if name in found.present else f"missing: {command}"
        if name in found.damaged:
            state = f"damaged: {command}"
        made.add_row(name, state, users)
    for name in found.others:
        made.add_row(plain(name), "your own", NONE)
    lacks = table(["benchmark", "lacks"], [])
    for benchmark, missing in found.missing.items():
        lacks.add_row(benchmark, ", ".join(missing) or "nothing")
    show(stacked([made, lacks]))


def _prepare(argv: Sequence[str]) -> None:
    asked = parse(Prepare, argv, "trgp data prepare")
    for name in asked.name:
        if name in BENCHMARKS:
            needed = " ".join(BENCHMARKS[name]) or "no download"
            raise InputError(f"{name} is a benchmark, not an image set; it needs {needed}.")
        if name not in SETS:
            raise InputError(f"There is no image set '{name}'; {meant(name, SETS)}")
        if asked.from_ is not None and name in SOURCES:
            raise InputError(f"{name} is downloaded; leave --from out, or prepare it alone.")
    with ExitStack() as stack:
        told = [MofNCompleteColumn()] if asked.from_ else [DownloadColumn(), TransferSpeedColumn()]
        bars = stack.enter_context(closing(Bars(*told))) if sys.stderr.isatty() else None
        for name in asked.name:
            try:
                path = prepare(name, asked.data_root, bars, given=asked.from_)
            except KeyboardInterrupt:
                kept = "what has arrived is kept; the same command resumes the download."
                raise Interrupted(
                    f"Interrupted; {'nothing is written.' if asked.from_ else kept}"
                ) from None
            except (ValueError, OSError, ImportError) as error:
                # A set built from the user's images fails by its input, not by a download.
                kind = RunError if name in SOURCES else InputError
                raise kind(str(error)) from error
            print(f"{name}: {path}", flush=True)


class Bars:
    """Progress bars: one per downloaded file, or one for images that are read."""

    def __init__(self, *amounts: ProgressColumn) -> None:
        self._bars: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            *amounts,
            TimeRemainingColumn(),
            console=Console(stderr=True),
            redirect_stdout=sys.stdout.isatty(),  # else piped output would go to stderr
        )
        self._progress.start()

    def close(self) -> None:
        self._progress.stop()

    def __call__(self, file: str, have: int, total: int | None) -> None:
        if file not in self._bars:
            self._bars[file] = self._progress.add_task(file)
        self._progress.update(self._bars[file], completed=have, total=total)
