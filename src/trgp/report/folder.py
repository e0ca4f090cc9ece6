"""Write a report to disk: tables, figures and the page, in a folder of its own.

`contents.json` lists what was written, so that a later report can distinguish its own files from
others: it replaces those, deletes figures that are no longer made, and touches nothing else.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ..files import whole, write_text
from .csv import table_csv
from .html import table_file
from .latex import table_latex
from .markdown import table_markdown
from .model import Chart, Report, Table

CONTENTS = "contents.json"
PAGE = "index.html"
TABLES: Mapping[str, Callable[[Table], str]] = {
    "md": table_markdown,
    "csv": table_csv,
    "tex": table_latex,
    "html": table_file,
}
FIGURES = ("svg", "png")
_OWN = re.compile(rf"{PAGE}|(tables|figures)/[a-z0-9][a-z0-9._-]*")
Draw = Callable[[Sequence[Chart]], Iterable[Mapping[str, bytes]]]
"""Draws charts; yields each one's files by extension, in the order of the charts."""


def check(out: str | os.PathLike[str]) -> None:
    """Refuse a path that is a file, or a folder that holds files but no report."""
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{out} is a file; give another --out.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / CONTENTS).is_file():
        raise FileExistsError(
            f"{out} holds files but no report; give --out a new or an empty folder."
        )


def write(
    report: Report, page: str, out: str | os.PathLike[str], draw: Draw | None
) -> Iterator[Chart]:
    """Write the report and yield each chart once its figure is written; draw: None for none."""
    check(out)
    folder = Path(out)
    for part in ("tables", "figures"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    before = _contents(folder)
    now = [PAGE, *(f"tables/{table.name}.{end}" for table in report.tables for end in TABLES)]
    if draw is not None:
        now += [f"figures/{chart.name}.{end}" for chart in report.charts for end in FIGURES]
    # Listed first, so that an interrupted report is still recognised as a report.
    _write_contents(folder, {*before, *now})
    for table in report.tables:
        for end, written in TABLES.items():
            write_text(folder / "tables" / f"{table.name}.{end}", written(table))
    write_text(folder / PAGE, page)
    if draw is not None:
        for chart, files in zip(report.charts, draw(report.charts), strict=True):
            for end, content in files.items():
                with whole(folder / "figures" / f"{chart.name}.{end}") as draft:
                    draft.write_bytes(content)
            yield chart
    for path in {*before} - {*now}:
        (folder / path).unlink(missing_ok=True)
    _write_contents(folder, now)


def _write_contents(folder: Path, paths: "set[str] | list[str]") -> None:
    write_text(folder / CONTENTS, json.dumps({"trgp report": sorted(paths)}, indent=1) + "\n")


def _contents(folder: Path) -> list[str]:
    """Return the files of an earlier report; none if the list is damaged."""
    try:
        listed = json.loads((folder / CONTENTS).read_bytes())["trgp report"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    if not isinstance(listed, list):
        return []
    return [path for path in listed if isinstance(path, str) and _OWN.fullmatch(path)]
