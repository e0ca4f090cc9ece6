"""Results on disk: `<out>/<benchmark>/<method>/<preset>[-<changes>]/seed-<n>/result.json`."""

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
LARGEST = 1 << 26  # bytes, of a result.json
Defaults = Callable[[str, str], Mapping[str, Any]]
"""By benchmark and method the settings that need not be given, and their values."""
_PLAIN = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,58}[a-z0-9])?")
_HASHED = re.compile(r".*-[0-9a-f]{8}")
_SEED = re.compile(r"seed-\d+")


@dataclass(frozen=True)
class Found:
    """The results under a folder, by benchmark, method and preset, and what is wrong with others.

    A problem is a sentence.
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
    """Where a run is kept; two runs that differ in anything given here never share it."""
    name = _name(preset)
    if changed:
        name += f"-{_short(json.dumps(changed, sort_keys=True, default=_plain))}"
    return Path(out) / _name(benchmark) / _name(method) / name / f"seed-{seed}"


def write_result(folder: str | os.PathLike[str], result: Result) -> Result:
    """Write `result.json` and give the result back as it will be read, tuples as lists."""
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
    """The result in a file, or a sentence about the first thing wrong with it."""
    try:
        with open_regular(path) as file:
            content = file.read(LARGEST + 1)
    except FileNotFoundError:
        raise FileNotFoundError(f"There is no file {path}; give that of a finished run.") from None
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
            f"{path} is no JSON or was cut short ({error}); delete it and repeat the run."
        ) from None
    result = checked(parsed, path)
    _check_place(result, path)
    return result


def _check_place(result: Result, path: str | os.PathLike[str]) -> None:
    """Refuse a result in the folder of another run; other places than `run_folder` says nothing."""
    *_, benchmark, method, _, seed, _ = ["", "", "", "", *os.path.abspath(path).split(os.sep)]
    if not _SEED.fullmatch(seed):
        return
    own = _name(result.benchmark), _name(result.method)
    elsewhere = benchmark != own[0] and method != own[1]
    right = (benchmark, method) if elsewhere else own
    if (benchmark, method, seed) != (*right, f"seed-{result.seed}"):
        raise ValueError(
            f"{path} contradicts its folder: it is of {result.method} on {result.benchmark}, seed "
            f"{result.seed}; move it to where that belongs, or delete it and repeat the run."
        )


def read(path: str | os.PathLike[str], defaults: Defaults) -> Results:
    """All seeds of a configuration's folder, or the one of a seed's folder or its result.json.

    defaults: `trgp.engine.config.defaults`, for seeds of which one is older than a setting.
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
            f"There is no finished run in {path}; give the folder of a configuration, which holds "
            f"seed-0 and so on, the folder of a seed, or its {RESULT}."
        )
    return results


def find(out: str | os.PathLike[str], defaults: Defaults) -> Found:
    """Every finished run under a folder, the seeds of a configuration together.

    defaults: as for `read`.
    """
    problems: list[str] = []
    if not os.path.isdir(out):
        return Found([], [f"There is no folder {out}; give the --out that the runs were given."])
    found = []
    for configuration in _configurations(out, problems):
        results = _together(_runs(configuration, problems), problems, defaults)
        if results is not None:
            found.append((configuration, results))
    found.sort(key=lambda pair: (*_kind(pair[1].runs[0])[:3], pair[0]))
    return Found([results for _, results in found], problems)


def alike(one: Result, other: Result, defaults: Defaults) -> bool:
    """Whether two results are of one configuration, whatever their seeds.

    One may be too old to name a setting of the other, which is then at its default.
    """
    if _kind(one) != _kind(other):
        return False
    plain = defaults(one.benchmark, one.method)
    return {**plain, **one.config} == {**plain, **other.config}


def _kind(run: Result) -> tuple[Any, ...]:
    undefined = [figure is None for figure in (run.bwt, run.mean_diagonal, run.fwt)]
    return run.benchmark, run.method, run.preset, run.changed, len(run.accuracy_matrix), undefined


def unfinished(out: str | os.PathLike[str]) -> list[str]:
    """The folders of runs that have no result, because they go on or were stopped."""
    ignored: list[str] = []  # `find` tells what cannot be read
    return [
        folder
        for configuration in _configurations(out, ignored)
        for folder in _folders(configuration, ignored)
        if _SEED.fullmatch(os.path.basename(folder))
        and not os.path.lexists(os.path.join(folder, RESULT))
    ]


@contextmanager
def locked(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Only this process works in the folder, which is made; the kernel frees it if that is killed.

    Where the system has no such locks, as on Windows, nothing is locked.
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
        pass  # some clusters' file systems have no locks, and must not be useless for that


def _configurations(out: str | os.PathLike[str], problems: list[str]) -> Iterator[str]:
    """The folders of all configurations."""
    for benchmark in _folders(out, problems):
        for method in _folders(benchmark, problems):
            yield from _folders(method, problems)


def _runs(
    configuration: str | os.PathLike[str], problems: list[str]
) -> Iterator[tuple[str, Result]]:
    """The finished runs in a configuration's folder."""
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
    """The seeds of one configuration in order, without those that no mean with the others has."""
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
    """The folders in a folder by name, hidden ones left out."""
    try:
        with os.scandir(folder) as entries:
            return sorted(e.path for e in entries if e.is_dir() and not e.name.startswith("."))
    except OSError as error:
        problems.append(
            f"{os.fspath(folder)} cannot be read: {error.strerror}; change its permissions."
        )
        return []


def _name(text: str) -> str:
    """One folder's name, the text itself where that is safe everywhere, else with a checksum.

    Capitals count as unsafe, since some file systems take them for small letters, and so does what
    looks like a checksum already.
    """
    if _PLAIN.fullmatch(text) and not _HASHED.fullmatch(text):
        return text
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip(".-")[:50].rstrip(".-")
    return f"{cleaned or 'unnamed'}-{_short(text)}"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]


def _plain(value: Any) -> dict[Any, Any]:
    """Any mapping as the dictionary that JSON knows."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r} is a {type(value).__name__}")
