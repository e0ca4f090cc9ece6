"""Write curves for TensorBoard into the folder of each run; tasks are counted from 1."""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from ..engine.errors import InputError
from ..engine.events import EpochFinished, Event, RunFinished, RunStarted, TaskFinished


class TensorBoard:
    """Write losses and accuracies during a run, ACC and BWT at its end."""

    def __init__(self) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise InputError(
                "--tensorboard needs a package; install it with `pip install 'trgp[tensorboard]'`."
            )
        self._writers: dict[int, Any] = {}  # by seed: several may be in progress

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._open(Path(event.folder) / "tensorboard", event)
            case EpochFinished():
                for name in ("loss", "valid_loss", "valid_accuracy"):
                    value = getattr(event, name)
                    self._add(event.seed, f"{name}/task {event.task + 1}", value, event.epoch)
            case TaskFinished():
                for j, accuracy in enumerate(event.accuracies):
                    if accuracy is not None:
                        self._add(event.seed, f"accuracy/task {j + 1}", accuracy, event.task + 1)
            case RunFinished(stored=False):
                self._add(event.seed, "acc", event.acc, 1)
                if event.bwt is not None:
                    self._add(event.seed, "bwt", event.bwt, 1)
                self._writers.pop(event.seed).close()

    def _open(self, folder: Path, run: RunStarted) -> None:
        if not run.done_tasks and not run.done_epochs:
            for old in folder.glob("events.out.tfevents.*"):
                old.unlink()  # curves of an earlier run would mix with these
        made = importlib.import_module("torch.utils.tensorboard").SummaryWriter(folder)
        self._writers[run.seed] = made

    def _add(self, seed: int, name: str, value: float, step: int) -> None:
        self._writers[seed].add_scalar(name, value, step)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
