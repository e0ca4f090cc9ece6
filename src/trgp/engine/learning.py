"""Training of runs, from their folders to their results; stored results are read."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path

import torch

from ..benchmarks import Benchmark
from ..methods.base import Method
from ..results.result import Result
from ..results.store import RESULT, locked, read_result, write_result
from ..types import VERSION
from .checkpoint import Checkpoints, clear
from .clock import Clock
from .company import Member, Stack, Waiting, stacks_well, together
from .config import Config
from .errors import InputError, Interrupted, RunError
from .events import Observer, RunFinished
from .given import Load, fingerprint
from .machine import finish_all, repeatable, settle_libraries
from .network import Network
from .outcome import outcome
from .sequence import Sequencer
from .stream import Stream


@dataclass(frozen=True)
class Asked:
    """A requested run."""

    config: Config
    seed: int
    load: Load
    folder: Path
    command: str
    company: int = 0
    """Only runs with the same number are vmapped together."""

    @cached_property
    def family(self) -> tuple[object, ...]:
        """Key of the runs that can share their steps.

        It leaves out the seed, the learning rate and the options that a method reads only between
        tasks.
        """
        config = self.config
        training = replace(config.training, lr=1.0)
        between = config.method.between_tasks
        unread = {f.name: f.default for f in fields(config.method) if f.name in between}
        method = replace(config.method, **unread)
        # As text, because a user's method may have fields that cannot be hashed.
        return (
            config.benchmark,
            config.data_source,
            *map(repr, (method, training, config.data)),
        )

    @property
    def tasks(self) -> tuple[object, ...]:
        """Key of the samples that it trains on."""
        config = self.config
        return config.benchmark, config.data_source, repr(config.data), self.seed


@dataclass(frozen=True)
class _Bound:
    """A run with its tasks and its network, ready to begin."""

    run: Asked
    benchmark: Benchmark
    method: Method
    width: int
    """Width of its vmapped group; 1 if it has its own steps."""
    place: int
    """Its place in the group, counted before any run was finished."""


def learn(
    asked: Sequence[Asked],
    device: torch.device,
    captured: bool,
    observer: Observer,
    aside: Sequence[Path] = (),
    forgiving: bool = False,
    compiled: bool = False,
    most: int | None = None,
) -> Generator[tuple[Asked, Result | RunError]]:
    """Train all runs, each from its last checkpoint, and yield the results; read stored ones.

    Args:
        aside: folders whose checkpoints and results are set aside once the input is checked.
        forgiving: see `together`.
        compiled: whether networks are compiled; such runs are not vmapped.
        most: upper bound on concurrent runs; the others wait for runs that end.
    """
    new = [run for run in asked if aside or not (run.folder / RESULT).exists()]
    for run in asked:
        if run not in new:
            yield run, _stored_or_error(run, observer)
    if not new:
        return
    with repeatable(device), ExitStack() as locks:
        with bad_input():
            tasks: dict[object, Benchmark] = {}  # shared by runs with the same seed
            bound = []
            for run in new:
                if run.tasks not in tasks:
                    tasks[run.tasks] = run.load(run.seed, device)
                stacking = captured and not compiled
                alike = [other for other in asked if stacking and _stack_up(run, other)]
                bound.append(_bound(run, tasks[run.tasks], device, alike))
        for folder in aside:
            _set_aside(folder)
        settle_libraries(max(each.method.network.weights for each in bound), device)
        engine = ("compiled" if compiled else "captured") if captured else "eager"
        noted: list[tuple[Asked, Result | RunError]] = []  # runs that need not begin
        runs: dict[Sequencer, Asked] = {}
        clock = Clock(device)

        def begin(group: Sequence[_Bound], stream: Stream) -> Member | Stack | None:
            try:
                return begun(group, stream)
            except Exception as error:
                if not (forgiving or isinstance(error, RunError)):
                    raise
                told = f"{type(error).__name__}: {error}"
                noted.extend((each.run, RunError(told)) for each in group)
                return None

        def begun(group: Sequence[_Bound], stream: Stream) -> Member | Stack | None:
            own = [each for each in group if _taken(each.run, locks, not aside, noted, observer)]
            # The stream has waited for all data loaded before it was made, but not for data made
            # now, such as the merged samples of all tasks.
            with stream.turn():
                sequencers = [_sequencer(each, engine, observer, clock) for each in own]
            runs.update((s, each.run) for s, each in zip(sequencers, own, strict=True))
            if group[0].width == 1 or not own:
                return Member(sequencers[0], captured, stream, compiled) if own else None
            places = {each.place: s for each, s in zip(own, sequencers, strict=True)}
            return Stack(places, group[0].width, stream)

        groups: dict[object, list[_Bound]] = {}
        for each in bound:
            key = (each.run.company, each.run.family) if each.width > 1 else each.run.folder
            groups.setdefault(key, []).append(each)
        waiting = [Waiting(len(group), partial(begin, group)) for group in groups.values()]
        at_once = min(most or len(bound), len(bound))
        streams = [Stream(device, min(at_once, len(waiting))) for _ in waiting[:at_once]]
        try:
            for member in together(waiting, streams, at_once, forgiving):
                run = runs[member.sequencer]
                with member.turn():
                    end = member.error or _written(run, member.sequencer, at_once, observer)
                del runs[member.sequencer]
                yield run, end
                while noted:
                    yield noted.pop(0)
            yield from noted
        except BaseException as error:
            finish_all(device)  # the data to save was computed on other streams
            unsaved: list[Exception] = []
            for sequencer in runs:
                try:
                    sequencer.save()
                except Exception as failure:  # e.g. a full disk; still save the others
                    unsaved.append(failure)
            if not isinstance(error, KeyboardInterrupt):
                raise
            if unsaved:
                raise Interrupted(f"Interrupted; not all is saved. {unsaved[0]}") from None
            folders = [run.folder for run in runs.values()] or [asked[-1].folder]
            where = folders[0] if len(folders) == 1 else folders[0].parent
            raise Interrupted(f"Interrupted; every finished epoch is saved in {where}.") from None


def _stack_up(one: Asked, other: Asked) -> bool:
    return (one.company, one.family) == (other.company, other.family)


def _taken(
    run: Asked,
    locks: ExitStack,
    stored: bool,
    noted: list[tuple[Asked, Result | RunError]],
    observer: Observer,
) -> bool:
    """Lock a run's folder; return whether the run needs training in this process.

    Otherwise its error or its result is added to `noted`.

    Args:
        stored: whether to read a result that another process has written in the meantime.
    """
    try:
        locks.enter_context(_alone(run.folder))
    except RunError as error:
        noted.append((run, error))
        return False
    if stored and (run.folder / RESULT).exists():
        noted.append((run, _stored_or_error(run, observer)))
        return False
    return True


def _bound(
    run: Asked, benchmark: Benchmark, device: torch.device, alike: Sequence[Asked]
) -> _Bound:
    """Bind the method to its network, after all checks that are possible before any write.

    Args:
        alike: the runs it can be vmapped with, including itself and finished runs, so that the
            group stays as wide as it began.
    """
    config = run.config
    if config.method.about.several_heads and not benchmark.separate_heads:
        raise ValueError(
            f"{config.method_name} needs a head for every task, but all tasks of "
            f"{config.benchmark} share one; use a benchmark with several heads."
        )
    network = Network(
        benchmark.make_network,
        benchmark.separate_heads,
        device,
        run.seed,
        config.training.precision,
    )
    network.check(benchmark.tasks)
    method = config.method.bind(network)
    method.check()
    some, _ = benchmark.tasks[0].train.batch(slice(0, 2))
    # The order of batches of several heads differs from seed to seed.
    mixed = method.about.joint and benchmark.separate_heads
    if len(alike) > 1 and not mixed and stacks_well(method, some):
        return _Bound(run, benchmark, method, len(alike), alike.index(run))
    return _Bound(run, benchmark, method, 1, 0)


def _sequencer(bound: _Bound, engine: str, observer: Observer, clock: Clock) -> Sequencer:
    run, method = bound.run, bound.method
    device = method.network.device
    captured = engine != "eager"
    if bound.width > 1:
        engine = f"stacked, {bound.place + 1} of {bound.width}"
    identity = {
        "settings": run.config.stored,
        "data": fingerprint(bound.benchmark),
        "benchmark": run.config.benchmark,
        "method": run.config.method_name,
        "preset": run.config.preset,
        "seed": run.seed,
        "device": device.type,
        "engine": engine,
        "trgp": VERSION,
        "torch": torch.__version__,
    }
    checkpoints = Checkpoints(run.folder, identity, device)
    return Sequencer(
        run.config, bound.benchmark, method, run.seed, checkpoints, observer, clock, captured
    )


def _written(run: Asked, sequencer: Sequencer, company: int, observer: Observer) -> Result:
    """Store and return the result of a run that has ended."""
    end = sequencer.position
    assert end is not None
    found = outcome(run.config, run.seed, sequencer.method, end, run.command)
    if company > 1:
        found = replace(found, device=f"{found.device}, {company} runs at once")
    try:
        result = write_result(run.folder, found)
    except OSError as error:
        raise RunError(
            f"The result could not be written in {run.folder}: {error.strerror or error}; free "
            "space or allow writing there, and repeat the command without --fresh."
        ) from error
    clear(run.folder)
    observer(RunFinished(run.seed, result.acc, result.bwt))
    return result


def _stored_or_error(run: Asked, observer: Observer) -> Result | RunError:
    try:
        return _stored(run, observer)
    except RunError as error:
        return error


def _stored(run: Asked, observer: Observer) -> Result:
    """Read and report the result of a finished run, in place of training it again."""
    path = run.folder / RESULT
    try:
        result = read_result(path)
    except ValueError as error:
        raise RunError(f"{error} Give --fresh to start it over.") from error
    if not run.config.is_of(result.config):
        raise RunError(
            f"{path} has other settings than the preset has now; give --fresh to start it over, or "
            "another --out."
        )
    with suppress(RunError), _alone(path.parent):  # unless another process uses the folder
        clear(path.parent)
    observer(RunFinished(run.seed, result.acc, result.bwt, stored=True))
    return result


def _set_aside(folder: Path) -> None:
    """Delete a checkpoint, and keep an old result under another name."""
    if folder.exists():
        with _alone(folder):
            clear(folder)
            old = folder / RESULT
            if old.exists():
                old.replace(old.with_suffix(".previous.json"))


@contextmanager
def bad_input() -> Iterator[None]:
    """Raise errors as `InputError`: the user can fix them, and nothing has been written."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise InputError(str(error)) from error


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the folder for this run while open; a failure to lock it is a `RunError`."""
    lock = locked(folder)
    try:
        lock.__enter__()
    except OSError as error:
        raise RunError(str(error)) from error
    try:
        yield
    finally:
        lock.__exit__(None, None, None)
