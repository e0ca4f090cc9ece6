"""Write reports as compact JSON for the page's scripts."""

import json
import math
from dataclasses import fields, is_dataclass
from typing import Any

from .model import Chart, Report, Series
from .thin import thinned

EMPTY: tuple[object, ...] = ("", (), [], None)
DRAWN = 4  # significant digits of drawn values; others have six


def report_json(report: Report) -> str:
    """Return a report as JSON; commands that several numbers share are stored once."""
    made = _plain(thinned(report))
    commands: dict[str, int] = {}
    for table in made.get("tables", []):
        for cell in (cell for row in table.get("rows", []) for cell in row["cells"]):
            if "commands" in cell:
                cell["commands"] = [commands.setdefault(c, len(commands)) for c in cell["commands"]]
    return as_json(made | ({"commands": [*commands]} if commands else {}))


def as_json(content: Any) -> str:
    """Return other data for the page as JSON, charts included."""
    return json.dumps(_plain(content), allow_nan=False, separators=(",", ":"))


def _plain(value: Any, figures: int = 6) -> Any:
    """Convert to JSON types, without empty fields and with as many digits as can be seen."""
    if is_dataclass(value):
        named = {field.name: getattr(value, field.name) for field in fields(value)}
        if isinstance(value, Series):
            named |= {name: _plain(named[name], DRAWN) for name in ("y", "error")}
        made = {n: _plain(e) for n, e in named.items() if e is not False and e not in EMPTY}
        return _with_one_x(made) if isinstance(value, Chart) else made
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(each, figures) for each in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        short = float(f"{value:.{figures}g}")
        return int(short) if short.is_integer() and abs(short) < 1e15 else short
    return value


def _with_one_x(chart: dict[str, Any]) -> dict[str, Any]:
    """Store x once if all series share it."""
    series = chart.get("series", [])
    first = series[0].get("x") if len(series) > 1 else None
    if first is None or any(each.get("x") != first for each in series):
        return chart
    without = [{name: each[name] for name in each if name != "x"} for each in series]
    return chart | {"x": first, "series": without}
