"""Decode the published files without pickle: idx, CIFAR's records, MATLAB files, png letters.

Each `*_set` takes the downloaded files by name. A file that does not decode raises ValueError or an
error of gzip, tarfile or zlib; the caller turns it into a sentence.
"""

import gzip
import importlib
import io
import struct
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]

IDX = {
    "train_images": "train-images-idx3-ubyte.gz",
    "train_labels": "train-labels-idx1-ubyte.gz",
    "test_images": "t10k-images-idx3-ubyte.gz",
    "test_labels": "t10k-labels-idx1-ubyte.gz",
}
CIFAR10 = {
    "train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
    "test": ("test_batch.bin",),
}
CIFAR100 = {"train": ("train.bin",), "test": ("test.bin",)}
LETTERS = "ABCDEFGHIJ"


def idx_set(files: Mapping[str, Path]) -> Arrays:
    """Decode MNIST and Fashion-MNIST: four gzipped idx files."""
    arrays = {key: idx(gzip.decompress(files[file].read_bytes())) for key, file in IDX.items()}
    return {key: a[..., None] if "images" in key else a for key, a in arrays.items()}


def idx(data: bytes) -> NDArray[np.uint8]:
    """Decode an idx file of bytes: two zeros, type (8), number of axes, their lengths, pixels."""
    if len(data) < 4 or data[:3] != b"\0\0\x08" or len(data) < 4 + 4 * data[3]:
        raise ValueError("not an idx file of bytes")
    shape = struct.unpack_from(f">{data[3]}I", data, 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def cifar_set(files: Mapping[str, Path], *, coarse: bool) -> Arrays:
    """Decode CIFAR's binary archives: records of labels (CIFAR-100: coarse, fine) and 3 planes."""
    (path,) = files.values()
    splits, labels = (CIFAR100, 2) if coarse else (CIFAR10, 1)
    wanted = {file for names in splits.values() for file in names}
    found = {}
    with tarfile.open(path, "r:gz") as archive:
        for member in archive:
            name = member.name.rpartition("/")[2]
            if name in wanted and (content := _content(archive, member)) is not None:
                found[name] = np.frombuffer(content, np.uint8)
    if missing := sorted(wanted - found.keys()):
        raise ValueError(f"no {missing[0]} in the archive")
    arrays = {}
    for split, names in splits.items():
        rows = np.concatenate([found[name].reshape(-1, labels + 3 * 32 * 32) for name in names])
        planes = rows[:, labels:].reshape(-1, 3, 32, 32)
        arrays[f"{split}_images"] = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
        arrays[f"{split}_labels"] = rows[:, labels - 1]
        if coarse:
            arrays[f"{split}_coarse_labels"] = rows[:, 0]
    return arrays


def svhn_set(files: Mapping[str, Path]) -> Arrays:
    """Decode SVHN's cropped digits: MATLAB files with X (32, 32, 3, N) and y, where 10 means 0."""
    loadmat = importlib.import_module("scipy.io").loadmat
    arrays = {}
    for split in ("train", "test"):
        path = files[f"{split}_32x32.mat"]
        try:
            content = loadmat(path, variable_names=["X", "y"])
        except Exception as error:  # any type, including scipy's own
            raise ValueError(f"{path.name} is no MATLAB file that can be read, {error}") from error
        if not {"X", "y"} <= content.keys() or content["X"].ndim != 4:
            raise ValueError("no images X with labels y in the file")
        arrays[f"{split}_images"] = np.ascontiguousarray(content["X"].transpose(3, 0, 1, 2))
        arrays[f"{split}_labels"] = content["y"].reshape(-1).astype(np.int64) % 10
    return arrays


def notmnist_set(files: Mapping[str, Path]) -> Arrays:
    """Decode notMNIST_small: a folder of png files per letter, with two files known to be empty.

    There is no official split; the last tenth of a fixed permutation is the test set.
    """
    (path,) = files.values()
    found: dict[tuple[str, str], NDArray[np.uint8]] = {}
    with tarfile.open(path, "r:gz") as archive:
        for member in archive:
            *_, letter, name = "", *member.name.split("/")
            if letter not in LETTERS or not name.endswith(".png") or name.startswith("."):
                continue
            content = _content(archive, member)
            image = grey_png(content) if content is not None else None
            if image is not None and image.shape == (28, 28):
                found[letter, name] = image
    if not found:
        raise ValueError("no png of a letter in the archive")
    keys = sorted(found)
    images = np.stack([found[key] for key in keys])[..., None]
    labels = np.array([LETTERS.index(letter) for letter, _ in keys])
    order = np.random.RandomState(42).permutation(len(keys))
    train, test = np.split(order, [len(keys) * 9 // 10])
    return {
        "train_images": images[train],
        "train_labels": labels[train],
        "test_images": images[test],
        "test_labels": labels[test],
    }


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes | None:
    """Read a file of an archive; None for a link, which may lead anywhere or in a circle."""
    file = archive.extractfile(member) if member.isfile() else None
    return None if file is None else file.read()


def grey_png(data: bytes) -> NDArray[np.uint8] | None:
    """Decode a grey png of 8 bits; None if it is anything else or damaged."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            return np.asarray(image) if image.mode == "L" else None
    except (OSError, SyntaxError, ValueError):
        return None
