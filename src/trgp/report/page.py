"""The report as one HTML page, which holds all it needs and asks nothing of any network."""

import hashlib
import html
import json
import math
import re
from base64 import b64encode
from dataclasses import fields, is_dataclass
from importlib.resources import files
from typing import Any

from .model import Report

SCRIPTS = ("elements", "choices", "dialog", "tables", "plots", "figures", "live", "page")
"""In the order in which they build on each other."""
LIBRARIES = ("d3.min.js", "plot.min.js")


def page(report: Report, *, live: bool = False) -> str:
    """The page of a report; a live one goes on asking the server that it came from."""
    data = _in_a_script(as_json(report))
    libraries = [_read("vendor", name) for name in LIBRARIES]
    own = "\n".join(_read("web", f"{name}.js") for name in SCRIPTS)
    parts = {
        "policy": policy([*libraries, own], live=live),
        "licences": _read("vendor", "LICENSES.txt"),
        "title": _escaped(report.title),
        "style": _read("web", "page.css"),
        "mode": "live" if live else "still",
        "data": data,
        "libraries": "\n".join(f"<script>{library}</script>" for library in libraries),
        "own": own,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _read("web", "page.html"))


def as_json(content: Any) -> str:
    """Reports, or what holds some, as the page's scripts read them."""
    return json.dumps(_plain(content), allow_nan=False, separators=(",", ":"))


def policy(scripts: list[str], *, live: bool) -> str:
    """What the browser lets the page do: run these scripts, and ask nobody but a live server."""
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    asks = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {asks}; base-uri 'none'; form-action 'none'"
    )


def _plain(value: Any) -> Any:
    """What JSON knows; what is empty is left out, and numbers keep the digits that can be seen."""
    if is_dataclass(value):
        named = ((field.name, getattr(value, field.name)) for field in fields(value))
        return {name: _plain(each) for name, each in named if each not in ("", (), None)}
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        short = float(f"{value:.6g}")
        return int(short) if short.is_integer() and abs(short) < 1e15 else short
    return value


def _in_a_script(text: str) -> str:
    """JSON in which no name ends the script that holds it."""
    return text.replace("<", "\\u003c")


def _escaped(text: str) -> str:
    return html.escape(text).encode("ascii", "xmlcharrefreplace").decode()


def _digest(script: str) -> str:
    return b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _read(folder: str, name: str) -> str:
    return (files(__package__) / folder / name).read_text(encoding="utf-8")
