"""Write the report as one self-contained HTML page, which needs no network."""

import gzip
import hashlib
import html
import re
from base64 import b64encode
from importlib.resources import files

from .data import report_json
from .model import Report

SCRIPTS = ("elements", "choices", "dialog", "tables", "plots", "figures", "live", "page")
"""Ordered by dependency."""
LIBRARIES = ("d3.min.js", "plot.min.js")
LARGE = 1_000_000  # characters of data above which it is compressed


def page(report: Report, *, live: bool = False) -> str:
    """Return the page of a report; a live page keeps polling its server."""
    kind, data = _in_a_script(report_json(report))
    libraries = [_read("vendor", name) for name in LIBRARIES]
    own = "\n".join(_read("web", f"{name}.js") for name in SCRIPTS)
    parts = {
        "policy": policy([*libraries, own], live=live),
        "licences": _read("vendor", "LICENSES.txt"),
        "title": _escaped(report.title),
        "style": _read("web", "page.css"),
        "mode": "live" if live else "still",
        "kind": kind,
        "data": data,
        "libraries": "\n".join(f"<script>{library}</script>" for library in libraries),
        "own": own,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _read("web", "page.html"))


def policy(scripts: list[str], *, live: bool) -> str:
    """Return the content security policy: only these scripts, only a live page's server."""
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    asks = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {asks}; base-uri 'none'; form-action 'none'"
    )


def _in_a_script(text: str) -> tuple[str, str]:
    """Return type and text of a script element with JSON; no text in it can end the element."""
    if len(text) > LARGE:
        return "application/gzip", b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    return "application/json", text.replace("<", "\\u003c")


def _escaped(text: str) -> str:
    return html.escape(text).encode("ascii", "xmlcharrefreplace").decode()


def _digest(script: str) -> str:
    return b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _read(folder: str, name: str) -> str:
    return (files(__package__) / folder / name).read_text(encoding="utf-8")
