"""Whether a figure is up to date, whatever drew it."""

import hashlib
import json
from dataclasses import asdict

from .model import Chart


def checksum(chart: Chart) -> str:
    """Of all that is drawn; the figure's SVG holds it."""
    return hashlib.sha256(json.dumps(asdict(chart), sort_keys=True).encode()).hexdigest()
