"""Store results as `<out>/<benchmark>/<method>/<preset>[-<changes>]/seed-<n>/result.json`."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..files import no_number, open_regular, write_text
from .check import checked, checksum
from .result import Result, Results

RESULT = "result.json"
LARGEST = 1 << 26  # bytes of a result.json
Defaults = Callable[[str, str], Mapping[str, Any]]
"""Maps a benchmark and a method to their optional settings with default values."""
_PLAIN = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,58}[a-z0-9])?")
_HASHED = re.compile(r".*-[0-9a-f]{8}")
_SEED = re.compile(r"seed-\d+")


@dataclass(frozen=True)
class Found:
    """The results under a folder, by benchmark, method and preset, and the problems.

    A problem is a sentence about a result that cannot be used.
    """

    results: list[Results]
    problems: list[str]


def run_folder(
    out: str | os.PathLike[str],
    benchmark: str,
    method: str,
    preset: str,
    changed: Mapping[str, Any],
    seed: int,
) -> Path:
    """Return a run's folder; runs that differ in any argument never share one."""
    name = _name(preset)
    if changed:
        name += f"-{_short(json.dumps(changed, sort_keys=True, default=_plain))}"
    return Path(out) / _name(benchmark) / _name(method) / name / f"seed-{seed}"


def write_result(folder: str | os.PathLike[str], result: Result) -> Result:
    """Write `result.json` and return the result as it will be read: tuples become lists."""
    path = Path(folder) / RESULT
    held = {field.name: getattr(result, field.name) for field in fields(result)}
    try:
        content = json.loads(json.dumps(held, allow_nan=False, default=_plain))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path} cannot hold the result ({error}); give finite numbers, texts, lists and "
            "dictionaries."
        ) from None
    content["checksum"] = checksum(content)
    stored = checked(content, path)
    write_text(path, json.dumps(content, indent=1) + "\n")
    return stored


def read_result(path: str | os.PathLike[str]) -> Result:
    """Read the result in a file, or raise a sentence about the first thing wrong."""
    try:
        with open_regular(path) as file:
            content = file.read(LARGEST + 1)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"There is no file {path}; give the {RESULT} of a finished run."
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{path} cannot be read: {reason}; give a {RESULT} that you may read."
        ) from None
    if len(content) > LARGEST:
        raise ValueError(
            f"{path} has more than {LARGEST >> 20} MiB, which no result has; delete it and repeat "
            "the run."
        )
    try:
        parsed = json.loads(content, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not JSON or was cut short ({error}); delete it and repeat the run."
        ) from None
    result = checked(parsed, path)
    _check_place(result, path)
    return result


def _check_place(result: Result, path: str | os.PathLike[str]) -> None:
    """Refuse a result in another run's folder; places that are no run's folder are allowed."""
    *_, benchmark, method, _, seed, _ = ["", "", "", "", *os.path.abspath(path).split(os.sep)]
    if not _SEED.fullmatch(seed):
        return
    own = _name(result.benchmark), _name(result.method)
    elsewhere = benchmark != own[0] and method != own[1]
    right = (benchmark, method) if elsewhere else own
    if (benchmark, method, seed) != (*right, f"seed-{result.seed}"):
        raise ValueError(
            f"{path} contradicts its folder: it is of {result.method} on {result.benchmark}, seed "
            f"{result.seed}; move it to the folder of that run, or delete it and repeat the run."
        )


def read(path: str | os.PathLike[str], defaults: Defaults) -> Results:
    """Read all seeds in a configuration's folder, or one from a seed's folder or result.json.

    defaults: `trgp.engine.config.defaults`, to compare seeds stored before a setting existed.
    """
    if os.path.isfile(path):
        return Results((read_result(path),))
    if os.path.isfile(os.path.join(path, RESULT)):
        return Results((read_result(os.path.join(path, RESULT)),))
    problems: list[str] = []
    runs = list(_runs(path, problems)) if os.path.isdir(path) else []
    results = _together(runs, problems, defaults)
    if problems:
        raise ValueError(problems[0])
    if results is None:
        raise FileNotFoundError(
            f"There is no finished run in {path}; give the folder of a configuration (with "
            f"seed-0 and so on), the folder of a seed, or its {RESULT}."
        )
    return results


def find(out: str | os.PathLike[str], defaults: Defaults) -> Found:
    """Find every finished run under a folder, the seeds of a configuration together.

    defaults: as for `read`.
    """
    problems: list[str] = []
    if not os.path.isdir(out):
        return Found([], [f"There is no folder {out}; give the --out folder of the runs."])
    found = []
    for configuration in _configurations(out, problems):
        results = _together(_runs(configuration, problems), problems, defaults)
        if results is not None:
            found.append((configuration, results))
    found.sort(key=lambda pair: (*_kind(pair[1].runs[0])[:3], pair[0]))
    return Found([results for _, results in found], problems)


def alike(one: Result, other: Result, defaults: Defaults) -> bool:
    """Return whether two results are of one configuration, whatever their seeds.

    An older result may lack a setting; it counts as the default.
    """
    if _kind(one) != _kind(other):
        return False
    plain = defaults(one.benchmark, one.method)
    return {**plain, **one.config} == {**plain, **other.config}


def _kind(run: Result) -> tuple[Any, ...]:
    undefined = [figure is None for figure in (run.bwt, run.mean_diagonal, run.fwt)]
    return run.benchmark, run.method, run.preset, run.changed, len(run.accuracy_matrix), undefined


def unfinished(out: str | os.PathLike[str]) -> list[str]:
    """Return the folders of runs without a result: runs in progress or stopped."""
    ignored: list[str] = []  # `find` reports them
    return [
        folder
        for configuration in _configurations(out, ignored)
        for folder in _folders(configuration, ignored)
        if _SEED.fullmatch(os.path.basename(folder))
        and not os.path.lexists(os.path.join(folder, RESULT))
    ]


@contextmanager
def locked(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Make the folder and lock it for this process; the kernel frees the lock if it is killed.

    Systems without such locks, like Windows, lock nothing.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        descriptor = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise OSError(
            f"{folder} cannot be written to: {error.strerror}; give another --out."
        ) from error
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: str | os.PathLike[str]) -> None:
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(
            f"Another process is working in {folder}; wait for it, or give another --out."
        ) from None
    except OSError:
        pass  # some clusters' file systems have no locks; runs must still work there


def _configurations(out: str | os.PathLike[str], problems: list[str]) -> Iterator[str]:
    """Yield the folders of all configurations."""
    for benchmark in _folders(out, problems):
        for method in _folders(benchmark, problems):
            yield from _folders(method, problems)


def _runs(
    configuration: str | os.PathLike[str], problems: list[str]
) -> Iterator[tuple[str, Result]]:
    """Yield the finished runs in a configuration's folder."""
    for folder in _folders(configuration, problems):
        if _SEED.fullmatch(os.path.basename(folder)):
            path = os.path.join(folder, RESULT)
            try:
                yield path, read_result(path)
            except FileNotFoundError:
                continue  # not finished
            except ValueError as error:
                problems.append(str(error))


def _together(
    runs: Iterable[tuple[str, Result]], problems: list[str], defaults: Defaults
) -> Results | None:
    """Return a configuration's seeds in order, without runs of another configuration."""
    kept: list[tuple[str, Result]] = []
    for path, run in sorted(runs, key=lambda pair: pair[1].seed):
        first_path, first = next(iter(kept), (path, run))
        if alike(run, first, defaults):
            kept.append((path, run))
        else:
            problems.append(
                f"{path} is of another configuration than {first_path}; move one of them elsewhere."
            )
    return Results(tuple(run for _, run in kept)) if kept else None


def _folders(folder: str | os.PathLike[str], problems: list[str]) -> list[str]:
    """Return the folders in a folder by name, hidden ones left out."""
    try:
        with os.scandir(folder) as entries:
            return sorted(e.path for e in entries if e.is_dir() and not e.name.startswith("."))
    except OSError as error:
        problems.append(
            f"{os.fspath(folder)} cannot be read: {error.strerror}; change its permissions."
        )
        return []


def _name(text: str) -> str:
    """Return a folder's name: the text itself if safe on every system, else with a checksum.

    Capitals count as unsafe, because some file systems ignore case, and so do names that already
    end in a checksum.
    """
    if _PLAIN.fullmatch(text) and not _HASHED.fullmatch(text):
        return text
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip(".-")[:50].rstrip(".-")
    return f"{cleaned or 'unnamed'}-{_short(text)}"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]


def _plain(value: Any) -> dict[Any, Any]:
    """Turn any mapping into a dictionary, which JSON can write."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r} is a {type(value).__name__}")
