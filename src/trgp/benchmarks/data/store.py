"""The image sets on disk: one npz file each, read without pickle and checked before use.

`<root>/<name>.npz` holds train_images and test_images, uint8 (N, H, W, C), train_labels and
test_labels, integers 0 to K - 1, and optionally train_coarse_labels and test_coarse_labels.
"""

import os
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ...files import whole
from ...types import PathLike

SETS = ("mnist", "fashion_mnist", "cifar10", "cifar100", "svhn", "notmnist", "miniimagenet")
REQUIRED = ("train_images", "train_labels", "test_images", "test_labels")
COARSE = ("train_coarse_labels", "test_coarse_labels")
BY_HAND = (
    "miniImageNet cannot be downloaded automatically: its images are ImageNet's; make it from your "
    "copy with `trgp data prepare miniimagenet --from PATH`, where PATH holds a folder of 600 "
    "images for each of the 100 classes, or train.csv, val.csv and test.csv next to images/."
)

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ImageSet:
    """A stored set in memory, with labels as int64."""

    name: str
    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels
    train_coarse_labels: Labels | None = None
    test_coarse_labels: Labels | None = None

    @property
    def classes(self) -> int:
        """Number of classes; labels run from 0 to one less."""
        return int(self.train_labels.max()) + 1


def data_root(root: PathLike | None = None) -> Path:
    """The folder of the sets: `root`, else TRGP_DATA, else the user's cache directory."""
    chosen = os.fspath(root) if root is not None else os.environ.get("TRGP_DATA", "")
    return _expand(chosen) if chosen else _cache_dir(sys.platform, os.environ)


def load(name_or_path: PathLike, root: PathLike | None = None) -> ImageSet:
    """Load a set by its name under the root, or any npz file of that form by its path."""
    path = locate(name_or_path, root)
    if not os.path.isfile(path):  # unlike Path.is_file never an exception, whatever the name
        raise FileNotFoundError(_absent(name_or_path, path))
    return ImageSet(path.stem, **check(_read(path), path))


def locate(name_or_path: PathLike, root: PathLike | None = None) -> Path:
    """The file that `load` reads; text with a folder or ending in .npz is a path, else a name."""
    text = os.fspath(name_or_path)
    if not text:
        raise ValueError("The name of the data set is empty; give a name or the path of an npz.")
    if not isinstance(name_or_path, str) or text.endswith(".npz") or Path(text).name != text:
        return _expand(text)
    return data_root(root) / f"{text}.npz"


def save(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write a set whole or not at all, after the checks that `load` makes."""
    arrays = check(arrays, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # An open file, because numpy adds .npz to a name.
    with whole(path) as draft, open(draft, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # its stub reads ** as allow_pickle


def repair(path: Path) -> str:
    """The end of a sentence about a damaged file: how to get a good one."""
    if path.stem in SETS:
        own = " --from PATH" if path.stem == "miniimagenet" else ""
        return f"delete it and run `trgp data prepare {path.stem}{own}`"
    return "write it again with numpy.savez"


def check(arrays: Mapping[str, NDArray[Any]], path: Path) -> dict[str, NDArray[Any]]:
    """Check the arrays and return them with int64 labels, or raise at the first fault."""
    keys = _check_shapes(arrays, path)
    checked = {
        key: arrays[key].astype(np.int64) if key.endswith("labels") else arrays[key] for key in keys
    }
    for kind in ("labels", "coarse_labels"):
        if f"train_{kind}" in checked:
            _check_classes(checked, kind, path)
    return checked


def _check_shapes(arrays: Mapping[str, NDArray[Any]], path: Path) -> list[str]:
    """Check types and shapes only, and return the keys of the set's arrays."""
    missing = [key for key in REQUIRED if key not in arrays]
    coarse = [key for key in COARSE if key in arrays]
    if len(coarse) == 1:
        missing += [key for key in COARSE if key not in arrays]
    if missing:
        raise ValueError(f"{path} has no array {' or '.join(missing)}; {repair(path)}.")
    keys = [*REQUIRED, *coarse]
    for split in ("train", "test"):
        images = arrays[f"{split}_images"]
        _check_images(images, f"{split}_images", path)
        for key in keys:
            if key.startswith(split) and key.endswith("labels"):
                _check_labels(arrays[key], key, len(images), path)
    sizes = [arrays[f"{split}_images"].shape[1:] for split in ("train", "test")]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{path} has train images of shape {sizes[0]} but test images of shape {sizes[1]}; "
            "bring both to one size."
        )
    return keys


def _check_images(images: NDArray[Any], key: str, path: Path) -> None:
    if images.dtype != np.uint8:
        raise ValueError(
            f"{key} in {path} is of type {images.dtype}; store the pixels 0 to 255 as uint8."
        )
    if images.ndim != 4:
        raise ValueError(
            f"{key} in {path} has {images.ndim} axes; store it as (images, height, width, "
            "channels), grey images with one channel."
        )
    if not images.size:
        raise ValueError(f"{key} in {path} is empty, of shape {images.shape}; {repair(path)}.")
    if images.shape[3] > 4 >= images.shape[1]:
        raise ValueError(
            f"{key} in {path} has shape {images.shape}, which looks like channels first; store it "
            "as (images, height, width, channels)."
        )


def _check_labels(labels: NDArray[Any], key: str, length: int, path: Path) -> None:
    if labels.dtype.kind not in "iu":
        raise ValueError(f"{key} in {path} is of type {labels.dtype}; store integers from 0 on.")
    if labels.ndim != 1 or len(labels) != length:
        raise ValueError(
            f"{key} in {path} has shape {labels.shape} for {length} images; store one label per "
            "image, in one axis."
        )


def _check_classes(arrays: Mapping[str, NDArray[Any]], kind: str, path: Path) -> None:
    """Check that train labels are 0 to K - 1, K at least 2, and include the test labels."""
    train, test = (np.unique(arrays[f"{split}_{kind}"]) for split in ("train", "test"))
    gaps = np.flatnonzero(train != np.arange(len(train)))
    if len(gaps):
        raise ValueError(
            f"train_{kind} in {path} has {train[gaps[0]]} where {gaps[0]} should come next; number "
            "the classes 0, 1, 2, ... without a gap."
        )
    if len(train) == 1 and kind == "labels":
        raise ValueError(f"{path} holds one class only; store at least two.")
    if test[0] < 0 or test[-1] >= len(train):
        odd = test[0] if test[0] < 0 else test[-1]
        raise ValueError(
            f"test_{kind} in {path} has the label {odd}, which no train image has; leave its "
            "images out, or add some to train."
        )


def _read(path: Path) -> dict[str, NDArray[Any]]:
    """Read the arrays of a set; other arrays in the file are ignored."""
    try:
        # Opened here, because numpy leaves a damaged file open.
        with open(path, "rb") as file:
            archive = file.read(2) == b"PK" and zipfile.is_zipfile(file)
            file.seek(0)
            if archive:
                return _arrays(file, path)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror}; change its permissions or copy it elsewhere."
        ) from error
    raise ValueError(f"{path} is no npz file, or a truncated one; {repair(path)}.")


def _arrays(file: BinaryIO, path: Path) -> dict[str, NDArray[Any]]:
    """Read the arrays after checking their headers: a small file can hold a huge array."""
    load = partial(np.load, file, allow_pickle=False)
    with _undamaged(path, "its list of arrays", load) as content:
        keys = [key for key in (*REQUIRED, *COARSE) if key in content.files]
        declared = {key: _undamaged(path, key, partial(_declared, content, key)) for key in keys}
        for key, array in declared.items():
            if array.dtype.hasobject:
                raise ValueError(
                    f"{key} in {path} holds Python objects, which are not read because unpickling "
                    "them could run any code; store plain uint8 or integer arrays."
                )
        _check_shapes(declared, path)
        return {key: _undamaged(path, key, partial(content.__getitem__, key)) for key in keys}


def _declared(content: Any, key: str) -> NDArray[Any]:
    """An array of the type and shape in a member's header, which takes no memory."""
    formats = np.lib.format
    with content.zip.open(f"{key}.npy") as member:
        newer = formats.read_magic(member) > (1, 0)
        read = formats.read_array_header_2_0 if newer else formats.read_array_header_1_0
        shape, _, dtype = read(member)
    return np.broadcast_to(np.empty((), dtype), shape)


def _undamaged(path: Path, part: str, read: Callable[[], Any]) -> Any:
    """Read a part of a file, or raise an error that names the damage."""
    # Damage can surface as nearly any exception: from zipfile, zlib, numpy's header parser, or
    # as a shape too large for memory. All of them mean the same to the user.
    try:
        return read()
    except Exception as error:
        raise ValueError(f"{path} is damaged, at {part}; {repair(path)}.") from error


def _absent(asked: PathLike, path: Path) -> str:
    if os.path.isdir(path):
        return f"{path} is a folder; give the npz file in it."
    if asked == "miniimagenet":
        return f"There is no file {path}. " + BY_HAND
    if asked in SETS:
        return f"There is no file {path}; get it with `trgp data prepare {asked}`."
    if not isinstance(asked, str) or path.stem != asked:
        return f"There is no file {path}; give the path of an npz file of images."
    near = get_close_matches(asked, SETS, 1)
    meant = f"did you mean '{near[0]}'?" if near else f"known are {', '.join(SETS)}."
    return f"There is no data set '{asked}' in {path.parent}; {meant}"


def _expand(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"{text} begins with an unknown home; write the path in full.") from None


def _cache_dir(platform: str, environ: Mapping[str, str]) -> Path:
    if platform == "win32":
        local = environ.get("LOCALAPPDATA", "")
        return (Path(local) if local else _expand("~") / "AppData" / "Local") / "trgp" / "data"
    if platform == "darwin":
        return _expand("~") / "Library" / "Caches" / "trgp" / "data"
    cache = Path(environ.get("XDG_CACHE_HOME", ""))  # ignored where relative, as its standard says
    return (cache if cache.is_absolute() else _expand("~") / ".cache") / "trgp" / "data"
