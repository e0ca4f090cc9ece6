"""Data of a live page: the report of a folder and the runs in progress."""

import hashlib
import os
import time
from threading import Lock

from ..engine.config import defaults
from ..results import layout, store
from .build import build
from .data import as_json, report_json
from .model import Report
from .page import page
from .progress import Progress, Reader, curves, run_folders, stamp

PATIENCE = 5  # epochs without a save, after which a run counts as waiting
NOW = 5  # seconds that still count as just now
LEAST = 300  # seconds before a run may count as waiting


class Folder:
    """A folder of runs, read again only where it changed; threads may share it."""

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self._out = out
        self._reader = Reader()
        self._reading, self._building = Lock(), Lock()
        self._built = ("", "")
        self.page = page(Report(f"trgp: {os.fspath(out)}", ("Reading the results.",)), live=True)

    def report(self) -> str:
        """Return the report as JSON, rebuilt if a result was added, removed or changed."""
        with self._building:
            # Before the results are read, so that one that arrives meanwhile changes the version.
            version = _version(run_folders(self._out))
            if version != self._built[0]:
                self._built = version, report_json(build(store.find(self._out, defaults)))
            return self._built[1]

    def progress(self) -> str:
        """Return the runs in progress as JSON, with the version of the report."""
        folders = run_folders(self._out)
        with self._reading:
            runs, problems = self._reader.read(folders)
        return as_json(
            {
                "report": _version(folders),
                "runs": [_told(run, time.time(), len(runs)) for run in runs],
                "charts": curves(runs),
                "problems": problems,
            }
        )


def _version(folders: list[str]) -> str:
    """Return a hash that changes whenever a result does."""
    files = (os.path.join(folder, store.RESULT) for folder in folders)
    stamped = [(file, at) for file in files if (at := stamp(file)) is not None]
    return hashlib.sha256(repr(stamped).encode(errors="surrogatepass")).hexdigest()


def _told(run: Progress, now: float, company: int) -> dict[str, object]:
    """Return the row of a run; company: the number of runs in progress."""
    age = max(0.0, now - run.saved)
    return {
        "benchmark": run.benchmark,
        "method": run.method,
        "preset": run.preset,
        "configuration": run.configuration,
        "seed": run.seed,
        "task": run.task,
        "tasks": run.tasks,
        "epoch": run.epoch,
        "epochs": run.epochs,
        "time": layout.duration(run.seconds),
        "saved": f"{layout.duration(age)} ago" if age >= NOW else "just now",
        # Each of several concurrent runs counts only its share of the time.
        "waiting": age > max(LEAST, PATIENCE * run.epoch_seconds * company),
    }
