"""`trgp run`: learn a benchmark with a method, for one or more seeds."""

import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import IO, Annotated, Any, Literal

import tyro
from tyro.conf import arg

from ..engine.divergence import SeedsFailedError
from ..engine.errors import Interrupted
from ..engine.events import Event, Observer, RunFinished
from ..results import render
from ..results.result import Results
from ..results.store import run_folder
from .choice import missing, overview, preset
from .fields import parser_of, settings
from .logs import JsonLog
from .parallel import run_seeds
from .parsing import parse
from .progress import Bar
from .screen import show
from .seeds import chosen
from .tensorboard import TensorBoard

Flag = tyro.conf.FlagCreatePairsOff[bool]


@dataclass(frozen=True)
class Running:
    """Choose the method, the seeds, the device and the output of a run."""

    method: Annotated[str, arg(metavar="METHOD")] = "trgp"
    """The method's name, or a class of your own as module:Class."""
    preset: Annotated[str, arg(metavar="PRESET")] = "paper"
    """The source of all other settings: paper, official or best (where there is one)."""
    seed: Annotated[int | None, arg(metavar="SEED", help_behavior_hint="(default: 0)")] = None
    """The seed of a single run."""
    seeds: Annotated[str | None, arg(metavar="SEEDS", help_behavior_hint="")] = None
    """The number of seeds, counted from 0, as in 5; or a list of seeds, as in 1,2,37."""
    device: Annotated[str, arg(metavar="DEVICE")] = "auto"
    """auto (the GPU where there is one), cpu, cuda or cuda:0."""
    engine: Literal["auto", "eager", "captured", "compiled"] = "auto"
    """eager: one step after the other. captured: record a step, then replay it (auto chooses this).
    compiled (GPU only): run torch.compile on the network first, then capture."""
    jobs: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """Processes that learn seeds in parallel on a CPU (default: one per core, or one in total if a
    run already uses several cores)."""
    together: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """Seeds that learn at the same time on a GPU (default: 10)."""
    out: Annotated[str, arg(metavar="DIR")] = "runs"
    """The folder for results and checkpoints."""
    data_root: Annotated[str | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """The folder of the image sets (default: TRGP_DATA, else the user's cache)."""
    fresh: Annotated[Flag, arg(help_behavior_hint="")] = False
    """Start over, even if a result or a checkpoint is stored."""
    quiet: Annotated[Flag, arg(help_behavior_hint="")] = False
    """Show no progress."""
    log_json: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Append every event as a line of JSON to a file, or write them to stdout (-)."""
    tensorboard: Annotated[Flag, arg(help_behavior_hint="")] = False
    """Write curves for TensorBoard into the folder of each run."""


class Stored:
    """Collect the seeds that were finished before."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunFinished) and event.stored:
            self.seeds.append(event.seed)


def main(argv: Sequence[str]) -> None:
    config = preset(argv, Running)
    if config is None:
        return overview(Running)
    prog = f"trgp run {config.benchmark}"
    asked: Any = parse(parser_of(config, Running), argv, prog, partial(missing, config))
    default = settings(config)
    changes = {name: value for name, value in settings(asked).items() if value != default[name]}
    learn(asked.benchmark, asked.running, changes, argv)


def learn(benchmark: str, running: Running, changes: dict[str, Any], argv: Sequence[str]) -> None:
    """Run and show the results."""
    seeds = chosen(running.seed, running.seeds)
    stored = Stored()
    # With events on stdout, the text for people goes to stderr.
    file = sys.stderr if running.log_json == "-" else sys.stdout
    with ExitStack() as stack:
        observers: list[Observer] = [stored]
        if running.log_json is not None:
            observers.append(stack.enter_context(closing(JsonLog(running.log_json))))
        if running.tensorboard:
            observers.append(stack.enter_context(closing(TensorBoard())))
        if not running.quiet and sys.stderr.isatty():
            observers.append(stack.enter_context(closing(Bar(len(seeds)))))
        try:
            results = run_seeds(
                seeds,
                running.jobs,
                running.device,
                partial(_tell, observers),
                benchmark=benchmark,
                method=running.method,
                preset=running.preset,
                engine=running.engine,
                together=running.together,
                out=running.out,
                data_root=running.data_root,
                fresh=running.fresh,
                command=_command(argv),
                **changes,
            )
        except SeedsFailedError as error:
            if error.finished:
                _conclude(error.finished, running.out, stored.seeds, file)
            raise
        except KeyboardInterrupt as error:
            again = _command([arg for arg in argv if arg != "--fresh"])
            raise Interrupted(f"{str(error) or 'Interrupted.'} Resume with: {again}") from None
    _conclude(results, running.out, stored.seeds, file)


def _tell(observers: Sequence[Observer], event: Event) -> None:
    for observer in observers:
        observer(event)


def _conclude(results: Results, out: str, stored: Sequence[int], file: IO[str]) -> None:
    first = results[0]
    show(render.summary(results, render.paper_of(first)), file)
    if stored:
        seeds = ", ".join(map(str, stored))
        print(f"Already finished, and not repeated without --fresh: seed {seeds}", file=file)
    folder = run_folder(out, first.benchmark, first.method, first.preset, first.changed, first.seed)
    print(f"Results: {folder.parent if len(results) > 1 else folder}", file=file)


def _command(argv: Sequence[str]) -> str:
    return shlex.join(["trgp", "run", *argv])
