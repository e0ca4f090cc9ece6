"""Checksums that show whether a drawn figure is up to date."""

import hashlib
import json
from dataclasses import asdict

from .model import Chart


def checksum(chart: Chart) -> str:
    """Return the checksum of a chart's data; the figure's SVG contains it."""
    return hashlib.sha256(json.dumps(asdict(chart), sort_keys=True).encode()).hexdigest()
