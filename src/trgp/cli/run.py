"""`trgp run`: learn a benchmark by a method, from some seeds."""

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
    """What is run, and who is told."""

    method: Annotated[str, arg(metavar="METHOD")] = "trgp"
    """Its name, or a class of your own as module:Class."""
    preset: Annotated[str, arg(metavar="PRESET")] = "paper"
    """Where all other settings come from: paper or official."""
    seed: Annotated[int | None, arg(metavar="SEED", help_behavior_hint="(default: 0)")] = None
    """The one seed to run with."""
    seeds: Annotated[str | None, arg(metavar="SEEDS", help_behavior_hint="")] = None
    """How many seeds, from 0 on, as in 5, or which, as in 1,2,37."""
    device: Annotated[str, arg(metavar="DEVICE")] = "auto"
    """auto (the GPU where there is one), cpu, cuda or cuda:0."""
    engine: Literal["auto", "eager", "captured", "compiled"] = "auto"
    """Steps one by one (eager) or captured and replayed (captured, which auto takes), on a GPU also
    of a network that is compiled before (compiled)."""
    jobs: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """How many processes learn seeds side by side on a CPU (without it: one a core, and one alone
    where a run uses several cores)."""
    together: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """How many seeds learn at the same time on a GPU (without it: ten)."""
    out: Annotated[str, arg(metavar="DIR")] = "runs"
    """The folder that results and checkpoints are kept in."""
    data_root: Annotated[str | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """The folder of the image sets, in place of TRGP_DATA or the user's cache."""
    fresh: Annotated[Flag, arg(help_behavior_hint="")] = False
    """Start over, also where there is a result or a checkpoint."""
    quiet: Annotated[Flag, arg(help_behavior_hint="")] = False
    """Show no progress."""
    log_json: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Append what happens to a file, a line of JSON each, or write it to stdout (-)."""
    tensorboard: Annotated[Flag, arg(help_behavior_hint="")] = False
    """Write curves for TensorBoard in the folder of each run."""


class Stored:
    """The seeds that had been run before."""

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
    """Run, and show what came out."""
    seeds = chosen(running.seed, running.seeds)
    stored = Stored()
    # With events on stdout, what people read goes beside it.
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
            raise Interrupted(f"{str(error) or 'Interrupted.'} Go on with: {again}") from None
    _conclude(results, running.out, stored.seeds, file)


def _tell(observers: Sequence[Observer], event: Event) -> None:
    for observer in observers:
        observer(event)


def _conclude(results: Results, out: str, stored: Sequence[int], file: IO[str]) -> None:
    first = results[0]
    show(render.summary(results, render.paper_of(first)), file)
    if stored:
        seeds = ", ".join(map(str, stored))
        print(f"Finished before, and not repeated without --fresh: seed {seeds}", file=file)
    folder = run_folder(out, first.benchmark, first.method, first.preset, first.changed, first.seed)
    print(f"Results: {folder.parent if len(results) > 1 else folder}", file=file)


def _command(argv: Sequence[str]) -> str:
    return shlex.join(["trgp", "run", *argv])
