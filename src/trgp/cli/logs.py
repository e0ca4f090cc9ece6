"""Log events as lines of JSON, for programs to read."""

import json
import math
import os
import re
import sys
from contextlib import suppress
from typing import IO

from ..engine.errors import InputError, RunError
from ..engine.events import Event


class JsonLog:
    """Append events to a file, or write them to stdout for '-'."""

    def __init__(self, target: str) -> None:
        folder = os.path.dirname(target) or "."
        if os.path.isdir(target) or not os.path.isdir(folder):
            raise InputError(
                f"--log-json {target} is not a file in an existing folder; give the path of a file."
            )
        self._target = target
        self._file: IO[str] | None = sys.stdout if target == "-" else None

    def __call__(self, event: Event) -> None:
        if self._file is None:
            self._file = self._opened()
        try:
            print(line(event), file=self._file, flush=True)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise RunError(
                f"--log-json {self._target} could not be written: {error.strerror}; free some disk "
                "space, then repeat the command without --fresh."
            ) from error

    def close(self) -> None:
        if self._file is not None and self._target != "-":
            with suppress(OSError):  # a failed write has been reported
                self._file.close()

    def _opened(self) -> IO[str]:
        """Open the file at the first event, so that a refused run leaves no file behind."""
        try:
            return open(self._target, "a", encoding="utf-8")
        except OSError as error:
            raise RunError(
                f"--log-json {self._target} cannot be written: {error.strerror}; give another file."
            ) from error


def line(event: Event) -> str:
    """Return an event as JSON: `event` (its kind in snake_case) and its fields."""
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()
    # JSON cannot express an infinite or NaN loss.
    fields = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in vars(event).items()
    }
    return json.dumps({"event": name, **fields})
