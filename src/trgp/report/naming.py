"""Clean stored texts for display, and make file names that are safe on every system."""

import hashlib
import re
from typing import Any

from ..results.layout import plain, settings
from ..results.result import Results

_SAFE = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,38}[a-z0-9])?")


def clean(text: object) -> str:
    """Return a text with its control characters spelt out."""
    return plain(text).plain


def slug(text: str) -> str:
    """Return a part of a file's name: the text itself if safe, else with a checksum."""
    if _SAFE.fullmatch(text):
        return text
    kept = re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip(".-")[:30].rstrip(".-")
    return f"{kept or 'unnamed'}-{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:8]}"


def file_name(kind: str, *parts: str) -> str:
    """Return the file name of a table or figure from its kind and parts."""
    return "-".join([kind, *map(slug, filter(None, parts))])


def of_configuration(kind: str, results: Results) -> str:
    """Return the file name of a figure of one configuration."""
    run = results[0]
    return file_name(kind, run.benchmark, run.method, run.preset, settings(run.changed))


def described(benchmark: str, preset: str, changes: dict[str, Any]) -> str:
    """Describe the subject of a figure over several methods, for its title."""
    changed = f", {settings(changes)}" if changes else ""
    return clean(f"{benchmark}, preset {preset}{changed}")
