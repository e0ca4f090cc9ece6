"""Which form should optimizers other than SGD get? Runs the cells that results.jsonl lacks.

    python experiments/forms/run.py --data DIR [--device cuda] [--minutes 9]
    python experiments/forms/run.py --check

DIR holds mnist.npz and cifar100.npz as `trgp data prepare` writes them, or their first images.
"""

import argparse
import json
import logging
import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from forms import EffectiveTRGP
from settings import (
    BENCHMARKS,
    FORMS,
    SCALE_RATES,
    SEARCH_SEED,
    WEIGHT_DECAY,
    Cell,
    Setting,
    digits_tasks,
)
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from trgp.data import Tensors

from trgp import GPM, TRGP
from trgp.benchmarks.common import Task

HERE = Path(__file__).resolve().parent
# How a training that diverged ends, in words of the learner or of torch.
DIVERGED = ("diverged", "NaN or infinite", "failed to converge")


# ---- one run ----------------------------------------------------------------------------------


def learner_of(cell: Cell, model: nn.Module, options: Mapping[str, Any]) -> GPM:
    """The learner of a form."""
    if cell.form == "gpm":
        return GPM(model, **options)
    if cell.form == "q":
        return TRGP(model, **options)
    decay = cell.lr * WEIGHT_DECAY if cell.optimizer == "adamw" else 0.0
    own: dict[str, Any] = {"form": cell.form, "scale_rate": cell.scale_rate, "decay": decay}
    return EffectiveTRGP(model, **own, **options)


def optimizer_of(cell: Cell, learner: GPM) -> Optimizer:
    """A new optimizer for the task that has begun."""
    groups = learner.param_groups(lr=cell.lr, scale_lr=cell.lr * cell.scale_rate)
    if cell.optimizer == "adamw":
        return learner.attach(AdamW(groups, weight_decay=WEIGHT_DECAY))
    return learner.attach(SGD(groups, momentum=0.9))


class LateError(Exception):
    """The time limit came before the end of the run."""


def learn(
    cell: Cell,
    tasks: Sequence[Task],
    model: nn.Module,
    setting: Setting,
    *,
    deadline: float = float("inf"),
    steps: int | None = None,
) -> tuple[GPM, list[list[float]]]:
    """Learn the tasks: the learner, and the accuracies at each task's end and at the very end."""
    learner = learner_of(cell, model, setting.options)
    part = "valid" if cell.seed == SEARCH_SEED else "test"
    ends: list[float] = []
    for t, task in enumerate(tasks):
        head = t if setting.separate_heads else 0
        loader = [task.train.batch(slice(i, i + 128)) for i in range(0, len(task.train), 128)]

        def loss_fn(net: nn.Module, batch: tuple[Tensor, Tensor], head: int = head) -> Tensor:
            return F.cross_entropy(net(batch[0], head), batch[1])

        learner.begin_task(t, loader, loss_fn)
        optimizer = optimizer_of(cell, learner)
        order = torch.Generator().manual_seed(1000 * cell.seed + t)
        model.train()
        for _ in range(setting.epochs):
            if time.time() > deadline:
                raise LateError
            shuffled = torch.randperm(len(task.train), generator=order).to(task.train.y.device)
            for index in shuffled.split(setting.batch)[:steps]:
                optimizer.zero_grad()
                loss_fn(model, task.train.batch(index)).backward()
                optimizer.step()
        learner.end_task(loader)
        ends.append(accuracy(model, getattr(task, part), head))
    final = []
    for t, task in enumerate(tasks):
        with learner.task(t):
            head = t if setting.separate_heads else 0
            final.append(accuracy(model, getattr(task, part), head))
    return learner, [ends, final]


@torch.no_grad()
def accuracy(model: nn.Module, samples: Tensors, head: int) -> float:
    """In per cent; batches of 250, since AlexNet's norms use those of the batch at hand."""
    model.eval()
    hits = torch.zeros((), device=samples.y.device)
    for i in range(0, len(samples), 250):
        x, y = samples.batch(slice(i, i + 250))
        hits += (model(x, head).argmax(1) == y).sum()
    return 100 * float(hits) / len(samples)


def run_cell(
    cell: Cell, data: Path | None, device: str, deadline: float, steps: int | None
) -> dict[str, Any] | None:
    """The record of one run, or None where time ran out."""
    start, setting = time.time(), BENCHMARKS[cell.benchmark]
    torch.manual_seed(cell.seed)
    model = setting.network().to(device)
    record: dict[str, Any] = cell._asdict()
    try:
        tasks = setting.tasks(data, cell.seed, device)
        learner, (ends, final) = learn(cell, tasks, model, setting, deadline=deadline, steps=steps)
    except LateError:
        return None
    except (RuntimeError, ValueError) as error:
        if not any(words in str(error) for words in DIVERGED):
            raise
        record |= {"acc": None, "diverged": str(error)}
    else:
        moved = [last - first for first, last in zip(ends, final, strict=True)]
        record |= {
            "acc": round(sum(final) / len(final), 3),
            "learnt": round(sum(ends) / len(ends), 3),
            "bwt": round(sum(moved[:-1]) / len(moved[:-1]), 3),
            "kib": round(sum(learner.task_bytes.values()) / len(final) / 1024, 2),
            "ranks": [rank for rank, _ in learner.ranks.values()],
        }
    return record | {
        "seconds": round(time.time() - start, 2),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
    }


# ---- all runs ---------------------------------------------------------------------------------


def cell_of(record: Mapping[str, Any]) -> Cell:
    """The cell that a record is of."""
    return Cell(*(record[key] for key in Cell._fields))


def search_cells(benchmark: str, optimizer: str, form: str) -> list[Cell]:
    """The rates to choose from."""
    rates = BENCHMARKS[benchmark].rates[optimizer]
    pairs = product(rates, SCALE_RATES.get(form, (1.0,)))
    return [Cell(benchmark, optimizer, form, *pair, SEARCH_SEED) for pair in pairs]


def chosen(records: Mapping[Cell, Mapping[str, Any]], search: Sequence[Cell]) -> Cell | None:
    """The best cell of a finished search; None where all have diverged."""
    ended = [cell for cell in search if records[cell]["acc"] is not None]
    return max(ended, key=lambda cell: float(records[cell]["acc"])) if ended else None


def wanted(records: Mapping[Cell, Mapping[str, Any]], names: Sequence[str]) -> Iterator[Cell]:
    """What can be run now, in order: by benchmark, searches before the seeds they lead to."""
    for name in names:
        pairs = [(o, form) for o, forms in FORMS.items() for form in forms]
        searches = [search_cells(name, *pair) for pair in pairs]
        yield from (cell for search in searches for cell in search if cell not in records)
        for search in searches:
            if all(cell in records for cell in search):
                best = chosen(records, search)
                seeds = (
                    [best._replace(seed=seed) for seed in range(BENCHMARKS[name].seeds)]
                    if best
                    else []
                )
                yield from (cell for cell in seeds if cell not in records)


def read(path: Path) -> dict[Cell, dict[str, Any]]:
    """The records of a file by their cells."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {cell_of(record): record for record in map(json.loads, lines)}


def _start() -> None:
    torch.set_num_threads(1)
    logging.getLogger("trgp").setLevel(logging.ERROR)


def run_all(args: argparse.Namespace) -> None:
    """Run what is missing, in processes that stay, until all is there or time is up."""
    deadline = time.time() + 60 * args.minutes
    records = read(args.out)
    kinds = {False: args.jobs} if args.device == "cpu" else {False: args.jobs - args.gpu_jobs}
    if args.device == "cuda":
        kinds[True] = args.gpu_jobs
    context = multiprocessing.get_context("spawn")
    pools = {k: ProcessPoolExecutor(n, context, initializer=_start) for k, n in kinds.items()}
    running: dict[Future[dict[str, Any] | None], Cell] = {}
    begun: set[Cell] = set()
    with args.out.open("a") as out:
        while True:
            for cell in wanted(records, args.only):
                on_gpu = BENCHMARKS[cell.benchmark].large and args.device == "cuda"
                busy = sum(c.benchmark in _names(on_gpu, args) for c in running.values())
                if cell not in begun and busy < kinds[on_gpu] and time.time() < deadline:
                    device = "cuda" if on_gpu else "cpu"
                    job = pools[on_gpu].submit(
                        run_cell, cell, args.data, device, deadline, args.steps
                    )
                    running[job] = cell
                    begun.add(cell)
            if not running:
                break
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for job in ended:
                cell, error = running.pop(job), job.exception()
                if error is not None:
                    print(f"{cell} failed: {error!r}", flush=True)
                elif (record := job.result()) is not None:
                    records[cell] = record
                    print(json.dumps(record), file=out, flush=True)
                    print(
                        f"{len(records)} done; {' '.join(map(str, cell))}: {record['acc']}",
                        flush=True,
                    )
    for pool in pools.values():
        pool.shutdown()
    left = sum(1 for _ in wanted(records, args.only))
    print(f"{len(records)} records; {left} cells can be run next.")


def _names(on_gpu: bool, args: argparse.Namespace) -> list[str]:
    return [n for n, s in BENCHMARKS.items() if (s.large and args.device == "cuda") == on_gpu]


def check_equality() -> None:
    """Print how far today's Q and the paper's form part under SGD, in float64."""
    torch.set_default_dtype(torch.float64)
    tasks = [
        Task(t.name, 10, *(Tensors(p.x.double(), p.y) for p in (t.train, t.valid, t.test)))
        for t in digits_tasks(None, 0, "cpu")
    ]
    for rate in (1.0, 0.1):
        weights, rest = [], []
        for form in ("q", "paper"):
            torch.manual_seed(0)
            setting = BENCHMARKS["digits"]
            model = setting.network()
            cell = Cell("digits", "sgd", form, 0.01, rate, 0)
            learner, accuracies = learn(cell, tasks, model, setting)
            rest.append((accuracies, learner.selected, learner.ranks))
            for t in range(len(tasks)):
                with learner.task(t):
                    weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        a, b = torch.stack(weights).chunk(2)
        largest, alike = float((a - b).abs().max()), rest[0] == rest[1]
        print(f"scale_rate {rate}: weights differ by {largest:.1e}; the rest is equal: {alike}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, default=None, help="folder of the npz files")
    parser.add_argument("--out", type=Path, default=HERE / "results.jsonl")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=2, help="processes in all")
    parser.add_argument("--gpu-jobs", type=int, default=8, help="how many of them use the GPU")
    parser.add_argument("--minutes", type=float, default=1e6, help="when to stop")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--steps", type=int, help="at most so many per epoch (to try it out)")
    parser.add_argument("--check", action="store_true", help="compare Q and paper under SGD")
    args = parser.parse_args()
    if args.check:
        check_equality()
    else:
        run_all(args)


if __name__ == "__main__":
    main()
