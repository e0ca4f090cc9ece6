"""An npz file as a benchmark: learnt if it is whole, refused in a sentence if not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_calls import Trgp

Arrays = dict[str, Any]


def without(arrays: Arrays, key: str) -> Arrays:
    return {name: array for name, array in arrays.items() if name != key}


MANGLED: dict[str, tuple[Callable[[Arrays], Arrays], str]] = {
    "wrong dtype": (lambda a: {**a, "train_images": a["train_images"] / 255}, "as uint8"),
    "labels as text": (lambda a: {**a, "test_labels": a["test_labels"].astype(str)}, "integers"),
    "no channels": (lambda a: {**a, "test_images": a["test_images"][..., 0]}, "has 3 axes"),
    "two sizes": (lambda a: {**a, "test_images": a["test_images"][:, :4]}, "one size"),
    "channels first": (
        lambda a: {**a, "train_images": a["train_images"].transpose(0, 3, 1, 2)},
        "channels first",
    ),
    "fewer labels": (lambda a: {**a, "train_labels": a["train_labels"][1:]}, "one label per image"),
    "label gap": (lambda a: {**a, "train_labels": a["train_labels"] * 2}, "without a gap"),
    "empty split": (
        lambda a: {**a, "test_images": a["test_images"][:0], "test_labels": a["test_labels"][:0]},
        "is empty",
    ),
    "one class": (
        lambda a: {**a, "train_labels": a["train_labels"] * 0, "test_labels": a["test_labels"] * 0},
        "one class only",
    ),
    "unknown class": (lambda a: {**a, "test_labels": a["test_labels"] + 9}, "no train image has"),
    "no test images": (lambda a: without(a, "test_images"), "has no array test_images"),
    "objects": (
        lambda a: {**a, "train_labels": a["train_labels"].astype(object)},
        "holds Python objects",
    ),
}


def test_a_whole_file(trgp: Trgp, own: Path) -> None:
    code, out, _ = trgp("run", str(own), "--tasks", "2", "--epochs", "1", "--method", "gpm")
    assert code == 0
    assert "gpm on" in out


def test_a_network_of_ones_own(trgp: Trgp, own: Path, here: Path) -> None:
    (here / "small_nets.py").write_text(
        "from trgp.benchmarks.models import MLP\n\n\n"
        "def net(inputs, classes, heads):\n"
        "    return MLP(inputs[0] * inputs[1] * inputs[2], (9,), classes, heads=heads)\n"
    )
    code, out, _ = trgp(
        *("run", str(own), "--tasks", "2", "--epochs", "1", "--model", "small_nets:net")
    )
    assert code == 0
    assert "model=small_nets:net" in out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("", "give --tasks"),
        ("--tasks 3", "cannot share equally"),
        ("--tasks 4", "nothing to distinguish"),
        ("--tasks 0", "tasks must be a whole number of at least 1"),
        ("--tasks 2 --preset official", "has no preset 'official'"),
    ],
)
def test_tasks_that_do_not_fit(trgp: Trgp, own: Path, here: Path, options: str, says: str) -> None:
    refused(trgp, here, (str(own), *options.split()), says)


@pytest.mark.parametrize("name", MANGLED)
def test_mangled_arrays(trgp: Trgp, here: Path, tmp_path: Path, whole: Arrays, name: str) -> None:
    mangle, says = MANGLED[name]
    np.savez(tmp_path / "mangled.npz", **mangle(whole))
    refused(trgp, here, (str(tmp_path / "mangled.npz"), "--tasks", "2"), says)


def test_mangled_files(trgp: Trgp, own: Path, here: Path, tmp_path: Path) -> None:
    content = own.read_bytes()
    for broken in (content[:-30], content[: len(content) // 2], b"", b"PK", b"no archive at all"):
        (tmp_path / "broken.npz").write_bytes(broken)
        refused(trgp, here, (str(tmp_path / "broken.npz"), "--tasks", "2"), "broken.npz is")
    (tmp_path / "folder.npz").mkdir()
    refused(trgp, here, (str(tmp_path / "folder.npz"), "--tasks", "2"), "is a folder")
    refused(trgp, here, (f"{'x' * 300}.npz", "--tasks", "2"), "")


def refused(trgp: Trgp, here: Path, argv: tuple[str, ...], says: str) -> None:
    code, out, err = trgp("run", *argv)
    assert (code, out) == (2, "")
    assert err.startswith("trgp: ")
    assert err.count("\n") == 1
    assert says in err
    assert not list(here.iterdir())
