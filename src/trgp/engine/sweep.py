"""Sweeps: many cells run together; finished cells are left alone."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ..results.result import Result, Results
from ..results.store import RESULT, Found, read_result
from ..types import PathLike
from .errors import InputError, RunError
from .events import Observer, nobody
from .given import named
from .learning import Asked, learn
from .machine import resolve
from .network import Network
from .pool import Job, forget_peak, in_processes
from .sweep_grid import ONE_HEAD_ONLY, Cell, described

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Place:
    """The device of the cells, and the folders of results and data."""

    device: str = "auto"
    out: PathLike = "runs"
    data_root: PathLike | None = None


@dataclass(frozen=True)
class Plan:
    """The cells of a sweep: finished, without data, and left to run."""

    cells: Sequence[Cell]
    finished: dict[Cell, Result]
    lacking: dict[Cell, str]
    """Cells whose data is missing, with the way to get it."""

    @property
    def left(self) -> list[Cell]:
        """The cells that can run now."""
        done = self.finished.keys() | self.lacking.keys()
        return [cell for cell in self.cells if cell not in done]


@dataclass(frozen=True)
class Ended:
    """A cell that ended, with its result or its error."""

    cell: Cell
    result: Result | None
    failure: str = ""


def plan(cells: Sequence[Cell], place: Place) -> Plan:
    """Find finished cells and cells without data; raise if a cell could never run."""
    finished = {cell: found for cell in cells if (found := _finished(cell, place))}
    lacking = _lacking([cell for cell in cells if cell not in finished], place.data_root)
    forget_peak()  # every process started from here would count it
    return Plan(cells, finished, lacking)


def carry_out(
    plan: Plan,
    place: Place,
    jobs: int,
    command: Callable[[Cell], str],
    observer: Observer = nobody,
) -> Generator[Ended]:
    """Run the cells that are left, up to `jobs` at a time.

    On a GPU they run together in this process, one benchmark after another, because the choice of
    libraries depends on the network's size; else each cell has its own process.

    Args:
        command: returns the command to store with a cell.
        observer: gets the events of runs in this process.
    """
    device = resolve(place.device)
    if device.type == "cuda":
        yield from _in_company(plan, place, jobs, command, device, observer)
        return
    left = plan.left
    given = [_job(cell, place, command(cell)) for cell in left]
    with closing(in_processes(given, jobs)) as ends:
        for i, failure in ends:
            yield Ended(left[i], None, failure) if failure else _read(left[i], place)


def companies(cells: Sequence[Cell], width: int) -> list[list[Cell]]:
    """Group cells that may be vmapped together: all seeds of a configuration, if they fit.

    A group has a single benchmark. Finished cells are grouped too: runs that were vmapped together
    must be so again when they resume.
    """
    same: dict[Path, list[Cell]] = {}
    for cell in cells:
        same.setdefault(_configuration(cell), []).append(cell)
    found: list[list[Cell]] = [[]]
    for group in same.values():
        for k in range(0, len(group), width):
            part = group[k : k + width]
            other = found[-1] and found[-1][0].config.benchmark != part[0].config.benchmark
            if other or len(found[-1]) + len(part) > width:
                found.append([])
            found[-1] += part
    return [company for company in found if company]


def _in_company(
    plan: Plan,
    place: Place,
    width: int,
    command: Callable[[Cell], str],
    device: torch.device,
    observer: Observer,
) -> Generator[Ended]:
    left = set(plan.left)
    runnable = [cell for cell in plan.cells if cell not in plan.lacking]
    numbered = list(enumerate(companies(runnable, width)))
    for benchmark in dict.fromkeys(cell.config.benchmark for cell in plan.left):
        asked, waiting = [], {}
        for number, company in numbered:
            if company[0].config.benchmark == benchmark and not left.isdisjoint(company):
                for cell in company:
                    config, load = named(cell.config, place.data_root)
                    folder = cell.folder(place.out)
                    asked.append(Asked(config, cell.seed, load, folder, command(cell), number))
                    if cell in left:
                        waiting[folder] = cell
        try:
            learning = learn(
                asked, device, captured=True, observer=observer, forgiving=True, most=width
            )
            with closing(learning) as ends:
                for run, end in ends:
                    if run.folder in waiting:
                        cell = waiting.pop(run.folder)
                        if isinstance(end, RunError):
                            yield Ended(cell, None, str(end))
                        else:
                            yield Ended(cell, end)
        except Exception as error:  # on any error, the next benchmark may still work
            for cell in waiting.values():
                yield Ended(cell, None, f"{type(error).__name__}: {error}")


def together(runs: Iterable[tuple[Cell, Result]]) -> Found:
    """Group results for a table, with the seeds of each configuration in order."""
    found: dict[Path, list[Result]] = {}
    for cell, result in runs:
        found.setdefault(_configuration(cell), []).append(result)
    ordered = (sorted(group, key=lambda run: run.seed) for group in found.values())
    return Found([Results(tuple(group)) for group in ordered], [])


def _job(cell: Cell, place: Place, command: str) -> Job:
    config = cell.config
    return {
        **cell.changes,
        "benchmark": config.benchmark,
        "method": config.method_name,
        "preset": config.preset,
        "seeds": [cell.seed],
        "command": command,
        **vars(place),
    }


def _finished(cell: Cell, place: Place) -> Result | None:
    """Return a complete result with these settings; else running the cell reports the error."""
    result = _read(cell, place).result
    return result if result is not None and cell.config.is_of(result.config) else None


def _read(cell: Cell, place: Place) -> Ended:
    """Read the result of a finished cell, or the reason why it cannot be read."""
    try:
        return Ended(cell, read_result(cell.folder(place.out) / RESULT))
    except (ValueError, OSError) as error:
        return Ended(cell, None, str(error))


def _lacking(cells: Iterable[Cell], data_root: PathLike | None) -> dict[Cell, str]:
    """Find cells whose data is missing; try every method of the others on its network."""
    same_data: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        same_data.setdefault((cell.config.benchmark, repr(cell.config.data)), []).append(cell)
    lacking: dict[Cell, str] = {}
    for group in same_data.values():
        with _refusing(group[0]):
            _, load = named(group[0].config, data_root)
            try:
                benchmark = load(group[0].seed, CPU)
            except (FileNotFoundError, ImportError) as error:
                lacking |= dict.fromkeys(group, str(error))
                continue
            network = Network(benchmark.make_network, benchmark.separate_heads, CPU, group[0].seed)
            network.check(benchmark.tasks)
        for cell in {_configuration(cell): cell for cell in group}.values():
            with _refusing(cell):
                if cell.config.method.about.several_heads and not network.separate_heads:
                    raise ValueError(ONE_HEAD_ONLY)
                cell.config.method.bind(network).check()
    return lacking


@contextmanager
def _refusing(cell: Cell) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        raise InputError(f"{described(cell.config)}: {error}") from error


def _configuration(cell: Cell) -> Path:
    """Return the folder of a configuration, which its seeds share."""
    return cell.folder("").parent
