"""Commands that the tests give, and what comes back."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

SMALL = ("permuted-digits", "--tasks", "2", "--epochs", "1")
LONG = ("run", "permuted-digits", "--method", "finetune", "--tasks", "2", "--epochs", "40")


class Said(NamedTuple):
    """What a command came to."""

    code: int
    out: str
    err: str


Trgp = Callable[..., Said]


def start(*argv: str, **options: object) -> "subprocess.Popen[str]":
    """A command as a process of its own."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-m", "trgp", *argv]
    return subprocess.Popen(command, text=True, **{**pipes, **options})  # type: ignore[call-overload]


def wait_for(log: Path, event: str) -> None:
    """Until there is such an event in the log."""
    deadline = time.monotonic() + 60
    while not log.is_file() or event not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a folder."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = events.EventAccumulator(str(folder))
    found.Reload()
    tags = found.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in tags}
