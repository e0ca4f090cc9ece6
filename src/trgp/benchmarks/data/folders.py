"""miniImageNet from the user's files: folders of images, lists of them, or an npz file.

There is no official train and test set for this use: the set was made for few-shot learning, where
whole classes are held out. Train and test images are drawn here as in the published code.
"""

import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...types import PathLike
from . import store
from .download import Progress

PARTS = ("train", "val", "test")
IMAGES = (".jpg", ".jpeg", ".png")
PICKLES = (".pkl", ".pickle", ".p")
SEED = 1234  # of the published code, which shuffles a class's images and takes the first for train
# The classes of Ravi and Larochelle's lists val and test; all others of the 100 are train.
LISTS = (
    "n01855672 n02091244 n02114548 n02138441 n02174001 n02950826 n02971356 n02981792 n03075370 "
    "n03417042 n03535780 n03584254 n03770439 n03773504 n03980874 n09256479",
    "n01930112 n01981276 n02099601 n02110063 n02110341 n02116738 n02129165 n02219486 n02443484 "
    "n02871525 n03127925 n03146219 n03272010 n03544143 n03775546 n04146614 n04149813 n04418357 "
    "n04522168 n07613480",
)
VAL, TEST = (frozenset(names.split()) for names in LISTS)
CONVERT = (
    "python -c \"import pickle, numpy as np; a, b = (pickle.load(open(f, 'rb')) for f in "
    "('train.pkl', 'test.pkl')); np.savez('miniimagenet.npz', train_images=a['images'], "
    "train_labels=a['labels'], test_images=b['images'], test_labels=b['labels'])\""
)
Files = dict[str, list[Path]]  # the image files of every class


class Size(NamedTuple):
    """The required numbers of classes and images, and the image size."""

    classes: int = 100
    each: int = 600  # images per class, a sixth of them for test
    side: int = 84  # pixels


FULL = Size()


def images_in(
    path: PathLike, progress: Progress | None = None, size: Size = FULL
) -> Mapping[str, NDArray[Any]]:
    """Read the arrays of the set from a folder, or from an npz file that holds them already.

    Classes are numbered in the order of Ravi and Larochelle's lists: train, val, test, sorted by
    name within each.
    """
    path = Path(path)
    if path.suffix == ".npz":
        return _stored(path, size)
    _refuse_pickles(path)
    if not path.is_dir():
        raise FileNotFoundError(
            f"There is no folder {path}; give the folder of the images, or of train.csv, val.csv "
            "and test.csv, or an npz file."
        )
    lists = [path / f"{part}.csv" for part in PARTS]
    found = _listed(path, lists) if any(each.is_file() for each in lists) else _in_folders(path)
    _check(found, path, size)
    names = sorted(found, key=lambda name: (name in TEST, name in VAL, name))
    classes = [sorted(found[name], key=lambda file: (file.name, file)) for name in names]
    return _split(classes, size, progress)


def _stored(path: Path, size: Size) -> Mapping[str, NDArray[Any]]:
    images = store.load(path)
    shape = images.train_images.shape[1:]
    if images.classes != size.classes or shape != (size.side, size.side, 3):
        raise ValueError(
            f"{path} holds {images.classes} classes of {' x '.join(map(str, shape))} images in "
            f"place of {size.classes} of {size.side} x {size.side} x 3; give another file."
        )
    return {key: array for key, array in vars(images).items() if isinstance(array, np.ndarray)}


def _refuse_pickles(path: Path) -> None:
    pickled = [path] if path.suffix in PICKLES else []
    if path.is_dir():
        pickled = [file for file in sorted(path.iterdir()) if file.suffix in PICKLES]
    if pickled:
        raise ValueError(
            f"{pickled[0]} is a pickle, which is not read because unpickling it could run any "
            f"code; where you trust it, write an npz file yourself and give that: {CONVERT}"
        )


def _listed(path: Path, lists: Sequence[Path]) -> Files:
    """Read filenames and labels from the lists; the files lie in images/ or next to the lists."""
    missing = [each.name for each in lists if not each.is_file()]
    if missing:
        raise FileNotFoundError(f"{path} has no {missing[0]}; put all three lists there.")
    folder = path / "images" if (path / "images").is_dir() else path
    found: Files = {}
    for each in lists:
        with open(each, newline="") as file:
            rows = csv.DictReader(file)
            if not {"filename", "label"} <= set(rows.fieldnames or ()):
                raise ValueError(f"{each} has no columns filename and label; add a header row.")
            for row in rows:
                found.setdefault(row["label"], []).append(folder / row["filename"])
    return found


def _in_folders(path: Path) -> Files:
    """Find one folder per class, all in one folder or in train/, val/ and test/, merged."""
    parts = [path / part for part in PARTS if (path / part).is_dir()]
    found: Files = {}
    for folder in parts or [path]:
        for name in sorted(each for each in folder.iterdir() if each.is_dir()):
            files = [file for file in name.rglob("*") if file.suffix.lower() in IMAGES]
            if files:
                found.setdefault(name.name, []).extend(files)
    return found


def _check(found: Files, path: Path, size: Size) -> None:
    if len(found) != size.classes:
        raise ValueError(
            f"{path} holds images of {len(found)} classes, but miniImageNet has {size.classes}; "
            "give the folder that holds a folder of images for each, or the three lists."
        )
    for name, files in found.items():
        if len(files) != size.each:
            raise ValueError(
                f"{path} holds {len(files)} images of class {name} in place of {size.each}; add "
                "the missing images, or remove the surplus."
            )


def _split(
    classes: Sequence[Sequence[Path]], size: Size, progress: Progress | None
) -> dict[str, NDArray[Any]]:
    """Split every class: five sixths for train, the rest for test, in the order of classes."""
    random = np.random.RandomState(SEED)
    cut = size.each * 5 // 6
    orders = [random.permutation(size.each) for _ in classes]
    arrays: dict[str, NDArray[Any]] = {}
    done = 0
    for split, share in (("train", slice(None, cut)), ("test", slice(cut, None))):
        files = [c[i] for c, order in zip(classes, orders, strict=True) for i in order[share]]
        each = len(files) // len(classes)
        images = np.empty((len(files), size.side, size.side, 3), np.uint8)
        for k, image in enumerate(_decoded(files, size.side)):
            images[k] = image
            done += 1
            if progress is not None:
                progress("images", done, size.each * len(classes))
        arrays[f"{split}_images"] = images
        arrays[f"{split}_labels"] = np.repeat(np.arange(len(classes)), each)
    return arrays


def _decoded(files: Sequence[Path], side: int) -> Iterator[NDArray[np.uint8]]:
    """Decode the files in order, several at a time: the decoder releases Python's lock."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(files), 1000):  # all at once would lie decoded in memory twice
            yield from pool.map(lambda file: _image(file, side), files[start : start + 1000])


def _image(file: Path, side: int) -> NDArray[np.uint8]:
    from PIL import Image

    try:
        with Image.open(file) as opened:
            image = opened.convert("RGB")
    except FileNotFoundError:
        raise FileNotFoundError(
            f"There is no image {file}, which a list names; put it there, or give the folder with "
            "the lists and images/."
        ) from None
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(
            f"{file} cannot be read as an image: {error}; replace the file."
        ) from error
    if image.size != (side, side):
        image = image.resize((side, side), Image.Resampling.LANCZOS)
    return np.asarray(image)
