"""Where runs were run, whatever else went on there."""

import re

from ..results.result import Result


def device_of(run: Result) -> str:
    """The device alone: how many runs had it at once makes it no other."""
    return re.sub(r", \d+ runs at once$", "", run.device)
