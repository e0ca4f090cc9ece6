"""From the public sources to `<root>/<name>.npz`."""

import gzip
import importlib.util
import shutil
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path

from ..lookup import meant
from ..types import PathLike
from . import store
from .download import Progress, fetch
from .sources import SOURCES, Arrays, Source

DAMAGE = (ValueError, EOFError, tarfile.TarError, zlib.error, gzip.BadGzipFile)


def prepare(
    name: str,
    root: PathLike | None = None,
    progress: Progress | None = None,
    *,
    sources: Mapping[str, Source] = SOURCES,
) -> Path:
    """Download a set, verify it, and write its npz file; nothing to do if a good one is there.

    What was downloaded is kept beside it until the npz is written, so that a second call goes on
    where the first one broke off.
    """
    source = _source(name, root, sources)
    folder = store.data_root(root)
    target = folder / f"{name}.npz"
    if _good(target):
        return target
    if source.needs is not None and importlib.util.find_spec(source.needs) is None:
        raise ModuleNotFoundError(
            f"Reading {name}'s files needs {source.needs}; install it with "
            f"`pip install {source.needs}` and run `trgp data prepare {name}` again."
        )
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
            "which goes on with what has arrived."
        ) from None
    except OSError as error:
        raise OSError(
            f"{name} could not be written under {folder}: {error.strerror or error}; make room or "
            "allow writing there, or choose another folder with --data-root or TRGP_DATA."
        ) from error
    return target


def _source(name: str, root: PathLike | None, sources: Mapping[str, Source]) -> Source:
    if name in sources:
        return sources[name]
    if name == "miniimagenet":
        path = store.data_root(root) / "miniimagenet.npz"
        raise ValueError(store.BY_HAND.format(path=path))
    raise ValueError(f"There is no source for a data set '{name}'; {meant(name, sources)}")


def _good(target: Path) -> bool:
    """Whether a file is there that `load` accepts; a damaged one is made again."""
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
        # Kept, they would be found complete and fail the same way again.
        for path in files.values():
            path.unlink(missing_ok=True)
        raise ValueError(
            f"The files downloaded for {name} do not hold what they should: {error}; they were "
            f"deleted, run `trgp data prepare {name}` again."
        ) from error


def _remove(downloads: Path) -> None:
    """The set's own downloads, and the folder for all of them when it was the last."""
    shutil.rmtree(downloads, ignore_errors=True)
    if downloads.parent.is_dir() and not any(downloads.parent.iterdir()):
        downloads.parent.rmdir()
