"""The published files as arrays, without pickle: idx, CIFAR's records, MATLAB's, letters as png.

Each `*_set` takes the downloaded files by name. What does not decode raises ValueError or an
error of gzip, tarfile or zlib; the caller makes a sentence of it.
"""

import gzip
import importlib
import struct
import tarfile
import zlib
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
PNG = b"\x89PNG\r\n\x1a\n"


def idx_set(files: Mapping[str, Path]) -> Arrays:
    """MNIST and Fashion-MNIST: four gzipped idx files."""
    arrays = {key: idx(gzip.decompress(files[file].read_bytes())) for key, file in IDX.items()}
    return {key: a[..., None] if "images" in key else a for key, a in arrays.items()}


def idx(data: bytes) -> NDArray[np.uint8]:
    """An idx file of bytes: two zeros, the type (8), the number of axes, their lengths, pixels."""
    if len(data) < 4 or data[:3] != b"\0\0\x08" or len(data) < 4 + 4 * data[3]:
        raise ValueError("not an idx file of bytes")
    shape = struct.unpack_from(f">{data[3]}I", data, 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def cifar_set(files: Mapping[str, Path], *, coarse: bool) -> Arrays:
    """CIFAR's binary archives: records of one label (CIFAR-100: coarse, fine) and 3 planes."""
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
    """SVHN's cropped digits: MATLAB files with X (32, 32, 3, N) and y, where 10 stands for 0."""
    loadmat = importlib.import_module("scipy.io").loadmat
    arrays = {}
    for split in ("train", "test"):
        path = files[f"{split}_32x32.mat"]
        try:
            content = loadmat(path, variable_names=["X", "y"])
        except Exception as error:  # of many kinds, scipy's own among them
            raise ValueError(f"{path.name} is no MATLAB file that can be read, {error}") from error
        if not {"X", "y"} <= content.keys() or content["X"].ndim != 4:
            raise ValueError("no images X with labels y in the file")
        arrays[f"{split}_images"] = np.ascontiguousarray(content["X"].transpose(3, 0, 1, 2))
        arrays[f"{split}_labels"] = content["y"].reshape(-1).astype(np.int64) % 10
    return arrays


def notmnist_set(files: Mapping[str, Path]) -> Arrays:
    """notMNIST_small: a folder of png files for each letter, two of them known to be empty.

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
    """What a file in an archive holds; None of a link, which may lead anywhere or in a circle."""
    file = archive.extractfile(member) if member.isfile() else None
    return None if file is None else file.read()


def grey_png(data: bytes) -> NDArray[np.uint8] | None:
    """An 8-bit grey png, not interlaced; None where it is anything else or damaged.

    Small enough to stand here in place of an image library.
    """
    try:
        if data[:8] != PNG or data[12:16] != b"IHDR":
            return None
        width, height, depth, colour, _, _, interlace = struct.unpack_from(">IIBBBBB", data, 16)
        if (depth, colour, interlace) != (8, 0, 0) or not 0 < width * height <= 1 << 20:
            return None
        packed, at = b"", 8
        while at + 8 <= len(data):
            length, kind = struct.unpack_from(">I4s", data, at)
            if kind == b"IDAT":
                packed += data[at + 8 : at + 8 + length]
            at += 12 + length
        size = height * (width + 1)
        rows = zlib.decompressobj().decompress(packed, size)
    except (struct.error, zlib.error):
        return None
    if len(rows) != size:
        return None
    image = np.zeros((height, width), np.uint8)
    above = [0] * width
    for y in range(height):
        line = rows[y * (width + 1) : (y + 1) * (width + 1)]
        if line[0] > 4:
            return None
        above = _unfilter(line[0], line[1:], above)
        image[y] = above
    return image


def _unfilter(kind: int, line: bytes, above: list[int]) -> list[int]:
    """One row from its differences to a guess by the pixels left, above and at the corner."""
    if kind == 0:
        return list(line)
    if kind == 2:
        return [(value + up) & 255 for value, up in zip(line, above, strict=True)]
    row = []
    left = corner = 0
    for value, up in zip(line, above, strict=True):
        if kind == 1:
            guess = left
        elif kind == 3:
            guess = (left + up) // 2
        else:
            # Paeth: of the three, the nearest to left + up - corner; ties in this order.
            near = left + up - corner
            by_left, by_up, by_corner = abs(near - left), abs(near - up), abs(near - corner)
            if by_left <= by_up and by_left <= by_corner:
                guess = left
            else:
                guess = up if by_up <= by_corner else corner
        left, corner = (value + guess) & 255, up
        row.append(left)
    return row
