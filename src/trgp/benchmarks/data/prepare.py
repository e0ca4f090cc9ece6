"""Prepare sets from the public sources as `<root>/<name>.npz`."""

import gzip
import importlib.util
import shutil
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path

from ...lookup import meant
from ...types import PathLike
from . import store
from .download import Progress, fetch
from .folders import images_in
from .sources import SOURCES, Arrays, Source

GIVEN = "miniimagenet"  # the set that is made from the user's own files
DAMAGE = (ValueError, EOFError, tarfile.TarError, zlib.error, gzip.BadGzipFile)


def prepare(
    name: str,
    root: PathLike | None = None,
    progress: Progress | None = None,
    *,
    given: PathLike | None = None,
    sources: Mapping[str, Source] = SOURCES,
) -> Path:
    """Download a set, verify it and write its npz file, unless a valid one exists.

    Downloads are kept next to it until the npz is written, so that a second call resumes an
    interrupted one.

    Args:
        given: for miniimagenet, which cannot be downloaded: the folder of its images, or an npz
            file.
    """
    folder = store.data_root(root)
    target = folder / f"{name}.npz"
    if given is not None:
        return _prepare_given(name, target, given, progress)
    source = _source(name, sources)
    if _good(target):
        return target
    _require(source.needs, name)
    downloads = folder / "downloads" / name
    try:
        downloads.mkdir(parents=True, exist_ok=True)
        files = {remote.file: fetch(remote, downloads, progress) for remote in source.files}
        arrays = _convert(name, source, files)
        store.save(target, arrays)
        _remove(downloads)
    except ConnectionError as error:
        raise ConnectionError(
            f"{name}: {error}; check the connection and run `trgp data prepare {name}` again, "
            "which resumes the download."
        ) from None
    except OSError as error:
        raise _unwritten(name, folder, error) from error
    return target


def _prepare_given(name: str, target: Path, given: PathLike, progress: Progress | None) -> Path:
    if name != GIVEN:
        raise ValueError(f"{name} is downloaded; use --from for {GIVEN} only.")
    if _good(target):
        return target
    _require("PIL", name)
    arrays = images_in(given, progress)
    try:
        store.save(target, arrays)
    except OSError as error:
        raise _unwritten(name, target.parent, error) from error
    return target


def _require(package: str | None, name: str) -> None:
    if package is not None and importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(
            f"Reading {name}'s files needs the package {package}; install it with "
            f"`pip install 'trgp[data]'` and run `trgp data prepare {name}` again."
        )


def _unwritten(name: str, folder: Path, error: OSError) -> OSError:
    return OSError(
        f"{name} could not be written under {folder}: {error.strerror or error}; make room or "
        "allow writing there, or choose another folder with --data-root or TRGP_DATA."
    )


def _source(name: str, sources: Mapping[str, Source]) -> Source:
    if name in sources:
        return sources[name]
    if name == GIVEN:
        raise ValueError(store.BY_HAND)
    raise ValueError(f"There is no source for a data set '{name}'; {meant(name, sources)}")


def _good(target: Path) -> bool:
    """Whether `load` accepts the file; a damaged one is made again."""
    try:
        store.load(target)
    except (FileNotFoundError, ValueError):
        return False
    return True


def _convert(name: str, source: Source, files: Mapping[str, Path]) -> Arrays:
    try:
        arrays = source.convert(files)
        for split, count in (("train", source.train), ("test", source.test)):
            shape, expected = arrays[f"{split}_images"].shape, (count, *source.shape)
            if shape != expected:
                raise ValueError(f"{split} images of shape {shape} in place of {expected}")
        return store.check(arrays, Path(f"{name}.npz"))
    except DAMAGE as error:
        # If kept, the complete files would fail in the same way again.
        for path in files.values():
            path.unlink(missing_ok=True)
        raise ValueError(
            f"The files downloaded for {name} are not as published: {error}; they were deleted, "
            f"run `trgp data prepare {name}` again."
        ) from error


def _remove(downloads: Path) -> None:
    """Delete the set's downloads, and the folder of all downloads if it is empty."""
    shutil.rmtree(downloads, ignore_errors=True)
    if downloads.parent.is_dir() and not any(downloads.parent.iterdir()):
        downloads.parent.rmdir()
