"""Learn the seeds of a run in parallel processes when one process would leave cores idle."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from ..engine.divergence import DivergenceError, SeedsFailedError
from ..engine.errors import Interrupted, RunError
from ..engine.events import Event, Observer, RunFinished, RunStarted
from ..engine.learning import bad_input
from ..engine.machine import resolve
from ..engine.pool import cores, quickest_start, watched
from ..engine.run import run
from ..options import check_count
from ..results.result import Results
from ..results.store import RESULT


def run_seeds(
    seeds: Sequence[int], jobs: int | None, device: str, observer: Observer, **asked: Any
) -> Results:
    """Call `run` with these arguments, on a CPU in several processes.

    jobs: the largest number of processes; None: one per core if a run uses one thread, else one.
    """
    with bad_input():
        on_cpu = resolve(device).type == "cpu"
        if jobs is not None and check_count("--jobs", jobs) > 1 and not on_cpu:
            raise ValueError("--jobs works on a CPU only; on a GPU give --together.")
    if not on_cpu:
        return run(seeds=seeds, device=device, observer=observer, **asked)
    asked["device"] = "cpu"
    start = _Start(seeds, jobs, observer)
    try:
        return run(seeds=seeds, observer=start, **asked)
    except _Parting:
        asked["fresh"] = False  # stored results are set aside already
    if start.stored:
        run(seeds=start.stored, observer=observer, **asked)
    return _side_by_side(seeds, start, observer, asked)


class _Parting(BaseException):
    """The input is valid and the first seed is about to start; leave `run` to use processes."""


class _Start:
    """Observe the start of a run, which does not depend on the number of processes."""

    def __init__(self, seeds: Sequence[int], jobs: int | None, observer: Observer) -> None:
        self.left: Sequence[int] = seeds
        self.stored: list[int] = []
        self.processes = 0
        self.folder = Path()
        """The configuration's folder."""
        self._jobs, self._observer = jobs, observer

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted) and not self.processes:
            self.folder = Path(event.folder).parent
            self.stored = [s for s in self.left if (self.folder / f"seed-{s}" / RESULT).exists()]
            self.left = [s for s in self.left if s not in self.stored]
            self.processes = min(self._most(), len(self.left))
            if self.processes > 1:
                raise _Parting
        elif isinstance(event, RunFinished):
            self.left = [s for s in self.left if s != event.seed]
        self._observer(event)

    def _most(self) -> int:
        """Return the most processes; one if a run uses several threads.

        Such a run occupies the cores already, and with one thread its bits may differ.
        """
        if self._jobs is not None:
            return self._jobs
        return cores() if torch.get_num_threads() == 1 else 1


def _side_by_side(
    seeds: Sequence[int], start: _Start, observer: Observer, asked: dict[str, Any]
) -> Results:
    failures: dict[int, DivergenceError] = {}
    given = [{**asked, "seeds": [seed]} for seed in start.left]
    try:
        with closing(watched(given, start.processes, observer, quickest_start())) as ends:
            for place, error in ends:
                seed = start.left[place]
                if isinstance(error, DivergenceError):
                    error.add_seed(seed)
                    failures[seed] = error
                elif isinstance(error, RunError):
                    raise RunError(f"Seed {seed}: {error}") from error
                elif error is not None:
                    raise error
    except KeyboardInterrupt:
        raise Interrupted(
            f"Interrupted; every finished epoch is saved in {start.folder}."
        ) from None
    finished = [seed for seed in seeds if seed not in failures]
    results = run(seeds=finished, **asked) if finished else Results(())
    if failures:
        raise SeedsFailedError([failures[s] for s in seeds if s in failures], results)
    return results
