"""What is shown of stored texts, and names of files that are safe everywhere."""

import hashlib
import re
from typing import Any

from ..results.layout import plain, settings
from ..results.result import Results

_SAFE = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,38}[a-z0-9])?")


def clean(text: object) -> str:
    """A text with its control characters spelt out."""
    return plain(text).plain


def slug(text: str) -> str:
    """A part of a file's name: the text itself where that is safe, else with a checksum."""
    if _SAFE.fullmatch(text):
        return text
    kept = re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip(".-")[:30].rstrip(".-")
    return f"{kept or 'unnamed'}-{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:8]}"


def file_name(kind: str, *parts: str) -> str:
    """The name of a table or figure, made of what it is of."""
    return "-".join([kind, *map(slug, filter(None, parts))])


def of_configuration(kind: str, results: Results) -> str:
    """The name of a figure of one configuration."""
    run = results[0]
    return file_name(kind, run.benchmark, run.method, run.preset, settings(run.changed))


def described(benchmark: str, preset: str, changes: dict[str, Any]) -> str:
    """What a figure over several methods is of, for its title."""
    changed = f", {settings(changes)}" if changes else ""
    return clean(f"{benchmark}, preset {preset}{changed}")
