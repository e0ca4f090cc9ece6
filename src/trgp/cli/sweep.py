"""`trgp sweep`: run many configurations and show one table of their results."""

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from tyro.conf import Positional, arg

from ..engine.errors import InputError, Interrupted, RunError
from ..engine.events import nobody
from ..engine.machine import resolve
from ..engine.pool import cores
from ..engine.run import MOST_TOGETHER, TOGETHER
from ..engine.sweep import Ended, Place, Plan, carry_out, plan, together
from ..engine.sweeps import SWEEPS, Cell, Grid, cells, read
from ..lookup import meant
from ..options import check_count
from ..results import render
from ..results.layout import NONE, plain, settings, shown, table
from .parsing import parse
from .run import Flag
from .screen import show, tell
from .seeds import chosen
from .sweep_progress import Bar, Lines, Tally


@dataclass(frozen=True)
class Sweep:
    """Run every unfinished cell of a sweep and show all results in one table."""

    sweep: Annotated[str, arg(metavar="NAME|FILE"), Positional]
    """embedded, paper, quirks or ablation, or the path of a TOML file."""
    jobs: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """Cells to run in parallel (default: a process per CPU core; on a GPU, ten in one process)."""
    seeds: Annotated[str | None, arg(metavar="SEEDS", help_behavior_hint="")] = None
    """Replace the sweep's seeds: a number, counted from 0, as in 5; or a list, as in 1,2,37."""
    device: Annotated[str, arg(metavar="DEVICE")] = "auto"
    """auto (the GPU where there is one), cpu, cuda or cuda:0."""
    out: Annotated[str, arg(metavar="DIR")] = "runs"
    """The folder for results and checkpoints."""
    data_root: Annotated[str | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """The folder of the image sets (default: TRGP_DATA, else the user's cache)."""
    dry_run: Annotated[Flag, arg(help_behavior_hint="")] = False
    """List the cells and which of them are finished, without running any."""
    quiet: Annotated[Flag, arg(help_behavior_hint="")] = False
    """Show no progress."""


def main(argv: Sequence[str]) -> None:
    asked = parse(Sweep, argv, "trgp sweep")
    place = Place(asked.device, asked.out, asked.data_root)
    try:
        jobs = _jobs(asked)
        grids = _grids(asked.sweep)
        seeds = None if asked.seeds is None else chosen(None, asked.seeds)
        planned = plan(cells(grids, seeds, asked.data_root), place)
    except (ValueError, TypeError, OSError) as error:
        raise InputError(str(error)) from error
    if not asked.quiet:
        for benchmark, method in dict.fromkeys(pair for grid in grids for pair in grid.left_out):
            tell(f"{method} is left out on {benchmark}: it needs a head per task.")
    for sentence in dict.fromkeys(planned.lacking.values()):
        tell(sentence)
    if asked.dry_run:
        return _list(planned)
    tally = Tally(planned)
    try:
        ended = _run(planned, place, jobs, tally, asked.quiet)
    except KeyboardInterrupt:
        raise Interrupted(
            f"Interrupted; {tally.finished} of {len(planned.cells)} cells are finished, and every "
            f"finished epoch of the others is saved in {asked.out}. Resume with: "
            f"{shlex.join(['trgp', 'sweep', *argv])}"
        ) from None
    _conclude(planned, ended, place)


def typed(cell: Cell, place: Place) -> str:
    """Return the command that runs a cell alone."""
    config = cell.config
    words = [config.benchmark, "--method", config.method_name, "--preset", config.preset]
    words += ["--seed", str(cell.seed)]
    for key, value in cell.changes.items():
        words += _option(key.replace("_", "-"), value)
    usual = Place()
    for key, value in vars(place).items():
        if value != getattr(usual, key):
            words += _option(key.replace("_", "-"), os.fspath(value))
    return shlex.join(["trgp", "run", *words])


def _option(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, (list, tuple)):
        return [f"--{name}", *([shown(value)] if value else [])]
    return [f"--{name}", str(value)]


def _jobs(asked: Sweep) -> int:
    on_cpu = resolve(asked.device).type == "cpu"
    if asked.jobs is None:
        return cores() if on_cpu else TOGETHER
    if not on_cpu and asked.jobs > MOST_TOGETHER:
        raise ValueError(f"--jobs must be at most {MOST_TOGETHER} on a GPU, not {asked.jobs}.")
    return check_count("--jobs", asked.jobs)


def _grids(name: str) -> list[Grid]:
    if name in SWEEPS:
        return SWEEPS[name]()
    if name.endswith(".toml") or os.path.exists(name):
        return read(name)
    raise InputError(
        f"There is no sweep '{name}'; {meant(name, SWEEPS)} One of your own is a TOML file."
    )


def _run(planned: Plan, place: Place, jobs: int, tally: Tally, quiet: bool) -> list[Ended]:
    """Run the cells, report each as it ends, and return how they ended."""
    ended = []
    with ExitStack() as stack:
        bar = not quiet and sys.stderr.isatty()
        progress = stack.enter_context(closing(Bar(tally) if bar else Lines(tally)))
        observer = nobody if quiet else progress.hear
        going = carry_out(planned, place, jobs, partial(typed, place=place), observer)
        for each in stack.enter_context(closing(going)):
            ended.append(each)
            tally.count(each)
            if not quiet:
                progress.tell(each)
    return ended


def _list(planned: Plan) -> None:
    made = table(["benchmark", "method", "preset", "settings", "seeds", "finished"], [])
    rows: dict[tuple[str, str, str, str], list[Cell]] = {}
    for cell in planned.cells:
        config = cell.config
        row = config.benchmark, config.method_name, config.preset, settings(cell.changes)
        rows.setdefault(row, []).append(cell)
    for row, members in rows.items():
        finished = [cell.seed for cell in members if cell in planned.finished]
        seeds = [cell.seed for cell in members]
        made.add_row(*map(plain, [*row, shown(seeds), shown(finished) or NONE]))
    show(made)
    without = f", {len(planned.lacking)} without data" if planned.lacking else ""
    print(
        f"{len(planned.cells)} cells: {len(planned.finished)} finished, "
        f"{len(planned.left)} left{without}"
    )


def _conclude(planned: Plan, ended: Sequence[Ended], place: Place) -> None:
    """Show the table of finished cells, then report those that failed or were not run, and why."""
    results = {**planned.finished, **{e.cell: e.result for e in ended if e.result is not None}}
    if results:
        # In the order of the cells, not in the order in which they ended.
        show(render.main_table(together((c, results[c]) for c in planned.cells if c in results)))
        print(f"Results: {place.out}", flush=True)
    failed = [each for each in ended if each.result is None]
    # On a GPU a checkpoint may be of vmapped runs, which a single run cannot resume.
    fresh = "" if resolve(place.device).type == "cpu" else " --fresh"
    for each in failed:
        again = typed(each.cell, place) + fresh
        tell(f"{each.cell} failed: {each.failure}\n      Repeat it with: {again}")
    for sentence in dict.fromkeys(planned.lacking.values()):
        without = [cell for cell, why in planned.lacking.items() if why == sentence]
        names = ", ".join(dict.fromkeys(cell.config.benchmark for cell in without))
        tell(f"{len(without)} cells of {names} were not run: {sentence}")
    if failed or planned.lacking:
        raise RunError(
            f"Of {len(planned.cells)} cells {len(failed)} failed and {len(planned.lacking)} were "
            "not run; repeat the command to try them again."
        )
