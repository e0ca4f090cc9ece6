"""The public sources: URLs, checksums and expected contents of each file.

The checksums are the published ones: torchvision's for MNIST, Fashion-MNIST and SVHN, those of the
CIFAR page for its binary archives. notMNIST's author published none; several loaders agree on its
md5 and size. Plain http comes last, and only where a checksum is known.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from . import formats

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Remote:
    """One file to download; an unknown checksum or size is None and not checked."""

    file: str
    urls: tuple[str, ...]
    md5: str | None = None
    sha256: str | None = None
    size: int | None = None


@dataclass(frozen=True)
class Source:
    """A set's files, their conversion to arrays, and the expected number and shape of images."""

    files: tuple[Remote, ...]
    convert: Callable[[Mapping[str, Path]], Arrays]
    train: int
    test: int
    shape: tuple[int, int, int]
    needs: str | None = None  # a package that convert imports


def _idx(mirrors: tuple[str, ...], *md5: str) -> tuple[Remote, ...]:
    return tuple(
        Remote(file, tuple(mirror + file for mirror in mirrors), md5=sum_)
        for file, sum_ in zip(formats.IDX.values(), md5, strict=True)
    )


_KRIZ = "https://www.cs.toronto.edu/~kriz/"
_SVHN = ("https://ufldl.stanford.edu/housenumbers/", "http://ufldl.stanford.edu/housenumbers/")

SOURCES: Mapping[str, Source] = {
    "mnist": Source(
        _idx(
            (
                "https://ossci-datasets.s3.amazonaws.com/mnist/",
                "https://storage.googleapis.com/cvdf-datasets/mnist/",
            ),
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
        formats.idx_set,
        train=60_000,
        test=10_000,
        shape=(28, 28, 1),
    ),
    "fashion_mnist": Source(
        _idx(
            (
                "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            ),
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
        formats.idx_set,
        train=60_000,
        test=10_000,
        shape=(28, 28, 1),
    ),
    "cifar10": Source(
        (
            Remote(
                "cifar-10-binary.tar.gz",
                (_KRIZ + "cifar-10-binary.tar.gz",),
                md5="c32a1d4ab5d03f1284b67883e8d87530",
            ),
        ),
        partial(formats.cifar_set, coarse=False),
        train=50_000,
        test=10_000,
        shape=(32, 32, 3),
    ),
    "cifar100": Source(
        (
            Remote(
                "cifar-100-binary.tar.gz",
                (_KRIZ + "cifar-100-binary.tar.gz",),
                md5="03b5dce01913d631647c71ecec9e9cb8",
            ),
        ),
        partial(formats.cifar_set, coarse=True),
        train=50_000,
        test=10_000,
        shape=(32, 32, 3),
    ),
    "svhn": Source(
        (
            Remote(
                "train_32x32.mat",
                tuple(base + "train_32x32.mat" for base in _SVHN),
                md5="e26dedcc434d2e4c54c9b2d4a06d8373",
                sha256="435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
            ),
            Remote(
                "test_32x32.mat",
                tuple(base + "test_32x32.mat" for base in _SVHN),
                md5="eb5a983be6a315427106f1b164d9cef3",
                sha256="cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
            ),
        ),
        formats.svhn_set,
        train=73_257,
        test=26_032,
        shape=(32, 32, 3),
        needs="scipy",
    ),
    "notmnist": Source(
        (
            Remote(
                "notMNIST_small.tar.gz",
                (
                    "https://commondatastorage.googleapis.com/books1000/notMNIST_small.tar.gz",
                    "http://yaroslavvb.com/upload/notMNIST/notMNIST_small.tar.gz",
                ),
                md5="c9890a473a9769fda4bdf314aaf500dd",
                size=8_458_043,
            ),
        ),
        formats.notmnist_set,
        train=16_851,
        test=1_873,
        shape=(28, 28, 1),
        needs="PIL",
    ),
}
