"""The devices of runs, without the number of concurrent runs."""

import re

from ..results.result import Result


def device_of(run: Result) -> str:
    """Return the device without the number of concurrent runs, which does not change it."""
    return re.sub(r", \d+ runs at once$", "", run.device)
