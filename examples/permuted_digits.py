"""Ten permutations of the handwritten digits, learnt one after another by one network.

Every task shows the same 8x8 digits with the pixels in another order, and all tasks share one
classifier. Three ways to learn the sequence are compared: fine-tuning, GPM and TRGP. R[i, j] is
the accuracy on task j after task i was learnt; ACC is the mean of R's last row, and BWT the mean
change of a task's accuracy from the moment it was learnt to the end.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

import trgp
from trgp import GPM, TRGP

Batch = tuple[Tensor, Tensor]
BATCH_SIZE = 32


@dataclass(frozen=True)
class Settings:
    lr: float
    threshold: float = 0.0
    scale_lr: float | None = None


# Chosen by mean ACC with --validation over the seeds 100, 101 and 102, every method by itself: lr
# from 0.05 to 0.8 by doubling (fine-tuning also 0.025), threshold from 0.85, 0.9, 0.93, 0.95, 0.97
# and 0.99, scale_lr from 0.01, 0.02 and 0.04. GPM prefers a low threshold, since at 0.99 six tasks
# fill all 64 directions of the input. TRGP goes on learning there through Q, but too long a step on
# Q diverges: the best of its settings (at lr 0.4) does so at twice its scale_lr, so the best that
# does not was taken.
# The table in the README comes from records/demo/, ten seeds on the test set.
SETTINGS = {
    "fine-tuning": Settings(lr=0.1),
    "GPM": Settings(lr=0.4, threshold=0.9),
    "TRGP": Settings(lr=0.2, threshold=0.99, scale_lr=0.01),
}


@dataclass(frozen=True)
class Result:
    """R, the memory held at the end in copies of the model, and the time it took."""

    R: Tensor
    held: float
    seconds: float

    @property
    def acc(self) -> float:
        return self.R[-1].mean().item()

    @property
    def bwt(self) -> float:
        return (self.R[-1] - self.R.diagonal())[:-1].mean().item()


@dataclass(frozen=True)
class Task:
    x: Tensor
    y: Tensor
    held_out_x: Tensor
    held_out_y: Tensor

    def batches(self) -> list[Batch]:
        """The training set in a new random order."""
        return [(self.x[i], self.y[i]) for i in torch.randperm(len(self.y)).split(BATCH_SIZE)]


def make_tasks(count: int, seed: int, *, validation: bool) -> list[Task]:
    """Hold out a fifth of the digits, then give each task its own order of the pixels.

    The first fifth held out is the test set. For validation that one is set aside unseen, and a
    fifth of the remaining digits takes its place.
    """
    x, y = load_digits(return_X_y=True)
    for _ in range(2 if validation else 1):
        x, held_out_x, y, held_out_y = train_test_split(
            x, y, test_size=0.2, stratify=y, random_state=0
        )
    x, held_out_x = (torch.tensor(pixels / 16, dtype=torch.float32) for pixels in (x, held_out_x))
    y, held_out_y = torch.tensor(y), torch.tensor(held_out_y)
    generator = torch.Generator().manual_seed(seed)
    orders = (torch.randperm(64, generator=generator) for _ in range(count))
    return [Task(x[:, order], y, held_out_x[:, order], held_out_y) for order in orders]


def make_network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(64, 100, bias=False),
        nn.ReLU(),
        nn.Linear(100, 100, bias=False),
        nn.ReLU(),
        nn.Linear(100, 10, bias=False),
    )


def make_learner(method: str, model: nn.Module, settings: Settings) -> GPM | None:
    if method == "fine-tuning":
        return None
    # Nothing is excluded: the one classifier is protected like any other layer.
    return {"GPM": GPM, "TRGP": TRGP}[method](model, threshold=settings.threshold)


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def learn_sequence(
    method: str,
    settings: Settings,
    tasks: list[Task],
    epochs: int,
    seed: int,
    advance: Callable[[], object],
) -> Result:
    """Learn the tasks in turn; ``advance`` is called after every epoch."""
    start = time.perf_counter()
    torch.manual_seed(seed)
    model = make_network()
    learner = make_learner(method, model, settings)

    def model_of(task: int) -> AbstractContextManager[object]:
        return learner.task(task) if learner else nullcontext()

    R = torch.zeros(len(tasks), len(tasks))
    for i, task in enumerate(tasks):
        if learner:
            learner.begin_task(i, task.batches(), cross_entropy)
            groups = learner.param_groups(lr=settings.lr, scale_lr=settings.scale_lr)
            optimizer = learner.attach(torch.optim.SGD(groups))
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr)
        for _ in range(epochs):
            for batch in task.batches():
                optimizer.zero_grad()
                cross_entropy(model, batch).backward()
                optimizer.step()
            advance()
        if learner:
            learner.end_task(task.batches())
        for j, seen in enumerate(tasks[: i + 1]):
            with torch.no_grad(), model_of(j):
                correct = model(seen.held_out_x).argmax(dim=1) == seen.held_out_y
            R[i, j] = correct.float().mean()
    kept = learner.memory_bytes + sum(learner.task_bytes.values()) if learner else 0
    copy = sum(p.nbytes for p in model.parameters())
    return Result(R, kept / copy, time.perf_counter() - start)


def report(results: dict[str, Result]) -> Table:
    """Accuracy on every task after the last, and what sums it up, in percent."""
    table = Table("after the last task", *results)
    for column in table.columns[1:]:
        column.justify = "right"
    count = len(next(iter(results.values())).R)
    for j in range(count):
        cells = (f"{100 * r.R[-1, j].item():.1f}" for r in results.values())
        table.add_row(f"task {j + 1}", *cells, end_section=j == count - 1)
    table.add_row("ACC", *(f"{100 * r.acc:.1f}" for r in results.values()))
    table.add_row("BWT", *(f"{100 * r.bwt:+.1f}" for r in results.values()))
    table.add_row(
        "memory held, in copies of the model", *(f"{r.held:.1f}" for r in results.values())
    )
    table.add_row("seconds", *(f"{r.seconds:.1f}" for r in results.values()))
    return table


def record(results: dict[str, Result]) -> dict[str, Any]:
    """What the run was and what came out of it."""
    return {
        "command": " ".join(["examples/permuted_digits.py", *sys.argv[1:]]),
        "versions": {"trgp": trgp.__version__, "torch": torch.__version__},
        "methods": {
            method: asdict(SETTINGS[method])
            | {"R": r.R.tolist(), "acc": r.acc, "bwt": r.bwt, "held": r.held, "seconds": r.seconds}
            for method, r in results.items()
        },
    }


def whole_number(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {minimum} up.")
        return int(text)

    return parse


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Compare fine-tuning, GPM and TRGP on a sequence of permuted digits."
    )
    parser.add_argument("--tasks", type=whole_number(2), default=10, help="length of the sequence")
    parser.add_argument("--epochs", type=whole_number(1), default=10, help="epochs for each task")
    parser.add_argument("--seed", type=whole_number(0), default=0, help="permutations and weights")
    parser.add_argument(
        "--validation",
        action="store_true",
        help="score on a validation set, as when the settings were chosen, instead of the test set",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also store the results here")
    args = parser.parse_args()

    # The network is so small that handing its products to other threads costs more than it saves.
    torch.set_num_threads(1)
    tasks = make_tasks(args.tasks, args.seed, validation=args.validation)
    console = Console()
    results: dict[str, Result] = {}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for method, settings in SETTINGS.items():
            bar = progress.add_task(method, total=args.tasks * args.epochs)
            advance = partial(progress.advance, bar)
            results[method] = learn_sequence(
                method, settings, tasks, args.epochs, args.seed, advance
            )
    console.print(report(results))
    if args.json:
        args.json.write_text(json.dumps(record(results), indent=1) + "\n")


if __name__ == "__main__":
    main()
