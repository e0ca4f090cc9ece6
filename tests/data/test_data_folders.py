"""miniImageNet from folders of images, from lists of them and from an npz file."""

import csv
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from trgp.benchmarks.data import load, prepare, save
from trgp.benchmarks.data.folders import TEST, VAL, Size, images_in

SMALL = Size(classes=4, each=12, side=8)
# By name out of the lists' order: one of train, one of val, two of test.
NAMES = ("n01532829", "n01855672", "n01930112", "n01981276")
OTHERS = ("n01930112", "n01532829", "n01981276", "n01855672")


def pixels(label: int, number: int, side: int = 8) -> np.ndarray:
    """An image that is told from all others, also where it was coded with loss."""
    image = np.full((side, side, 3), 20 * number, np.uint8)
    image[..., label % 3] = 255 - 60 * (label // 3)
    return image


def written(folder: Path, label: int, numbers: Sequence[int], kind: str = "png") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for k in numbers:
        Image.fromarray(pixels(label, k)).save(folder / f"{NAMES[label]}{k:08}.{kind}")


def one_folder(root: Path) -> None:
    for label, name in enumerate(NAMES):
        written(root / name, label, range(12))
    (root / "read me.txt").write_text("not an image")


def parts_of_classes(root: Path) -> None:
    for label, name in enumerate(NAMES):
        part = "val" if name in VAL else "test" if name in TEST else "train"
        written(root / part / name, label, range(12))


def parts_of_images(root: Path) -> None:
    """As they are for plain classification: every class in two parts."""
    for label, name in enumerate(NAMES):
        written(root / "train" / name, label, range(10))
        written(root / "val" / name, label, range(10, 12))


def lists(root: Path, images: str = "images") -> None:
    rows: dict[str, list[tuple[str, str]]] = {"train": [], "val": [], "test": []}
    for label, name in enumerate(NAMES):
        written(root / images, label, range(12))
        part = "val" if name in VAL else "test" if name in TEST else "train"
        rows[part] += [(f"{name}{k:08}.png", name) for k in range(12)]
    for part, listed in rows.items():
        with open(root / f"{part}.csv", "w", newline="") as file:
            csv.writer(file).writerows([("filename", "label"), *listed[::-1]])


def beside(root: Path) -> None:
    lists(root, ".")


LAYOUTS: list[Callable[[Path], None]] = [
    one_folder,
    parts_of_classes,
    parts_of_images,
    lists,
    beside,
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_comes_to_the_same_arrays(
    layout: Callable[[Path], None], tmp_path: Path
) -> None:
    """Ten of twelve images for train, drawn class by class as the published code draws them."""
    layout(tmp_path)
    seen: list[tuple[str, int, int | None]] = []
    found = images_in(tmp_path, lambda *args: seen.append(args), SMALL)
    random = np.random.RandomState(1234)
    train, test = [], []
    for label in range(4):
        order = np.arange(12)
        random.shuffle(order)
        train += [pixels(label, k) for k in order[:10]]
        test += [pixels(label, k) for k in order[10:]]
    np.testing.assert_array_equal(found["train_images"], train)
    np.testing.assert_array_equal(found["test_images"], test)
    assert found["train_labels"].tolist() == [c for c in range(4) for _ in range(10)]
    assert found["test_labels"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert seen == [("images", k, 48) for k in range(1, 49)]


def test_classes_are_numbered_by_the_lists_they_are_in(tmp_path: Path) -> None:
    """A name that sorts last but is in the train list comes before those of val and test."""
    for label, name in enumerate(("n13133613", *NAMES[1:])):
        folder = tmp_path / name
        folder.mkdir()
        for k in range(12):
            Image.fromarray(pixels(label, k)).save(folder / f"{k}.png")
    found = images_in(tmp_path, size=SMALL)
    for label in range(4):
        mine = found["train_images"][found["train_labels"] == label]
        assert (mine[..., label % 3] == 255 - 60 * (label // 3)).all()
    assert (len(VAL), len(TEST), len(VAL & TEST)) == (16, 20, 0)


def test_images_of_any_kind_and_size_become_square_and_coloured(tmp_path: Path) -> None:
    kinds = (("jpg", "RGB", (40, 20)), ("JPEG", "L", (8, 8)), ("png", "RGBA", (9, 30)))
    for kind, mode, size in kinds:
        (tmp_path / kind).mkdir()
        for k in range(12):
            Image.new(mode, size, "white").save(tmp_path / kind / f"{k}.{kind}")
    (tmp_path / "png" / "nested").mkdir()
    (tmp_path / "png" / "0.png").rename(tmp_path / "png" / "nested" / "0.png")
    found = images_in(tmp_path, size=Size(3, 12, 8))
    assert found["train_images"].shape == (30, 8, 8, 3)
    assert found["test_images"].dtype == np.uint8
    assert found["train_images"].min() >= 250


def test_an_npz_file_is_taken_as_it_is(tmp_path: Path) -> None:
    """Also one that says more, such as what its classes are called."""
    one_folder(tmp_path / "images")
    arrays = images_in(tmp_path / "images", size=SMALL)
    np.savez(tmp_path / "mini.npz", **arrays, class_names=np.array(NAMES))  # type: ignore[arg-type]
    again = images_in(tmp_path / "mini.npz", size=SMALL)
    assert again.keys() == arrays.keys()
    for key, array in arrays.items():
        np.testing.assert_array_equal(again[key], array)
    with pytest.raises(ValueError, match="4 classes of 8 x 8 x 3 images in place of 4 of 84 x 84"):
        images_in(tmp_path / "mini.npz", size=Size(4, 12, 84))


def test_a_set_of_ones_own_is_prepared_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images_in, "__defaults__", (None, SMALL))
    one_folder(tmp_path / "images")
    path = prepare("miniimagenet", tmp_path / "root", given=tmp_path / "images")
    assert path == tmp_path / "root" / "miniimagenet.npz"
    assert load("miniimagenet", tmp_path / "root").classes == 4
    before = path.stat().st_mtime_ns
    prepare("miniimagenet", tmp_path / "root", given=tmp_path / "gone")
    assert path.stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="mnist is downloaded; use --from for"):
        prepare("mnist", tmp_path, given=tmp_path / "images")


# ---- refusals --------------------------------------------------------------------------------


def test_a_pickle_is_refused_with_a_way_to_convert_it_that_works(tmp_path: Path) -> None:
    for split, count in (("train", 40), ("test", 8)):
        images = np.zeros((count, 8, 8, 3), np.uint8)
        content = {"images": images, "labels": np.arange(count) % 4}
        (tmp_path / f"{split}.pkl").write_bytes(pickle.dumps(content))
    for given in (tmp_path, tmp_path / "train.pkl"):
        with pytest.raises(ValueError, match="is a pickle, which is not read because") as caught:
            images_in(given, size=SMALL)
        told = str(caught.value)
    command = told.partition("python ")[2]
    assert command.startswith("-c ")
    subprocess.run(f"{sys.executable} {command}", shell=True, cwd=tmp_path, check=True)
    assert images_in(tmp_path / "miniimagenet.npz", size=SMALL)["test_images"].shape == (8, 8, 8, 3)


def test_what_is_missing_or_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"There is no folder .*gone; give the folder of"):
        images_in(tmp_path / "gone", size=SMALL)
    with pytest.raises(ValueError, match="holds images of 0 classes, but miniImageNet has 4"):
        images_in(tmp_path, size=SMALL)
    one_folder(tmp_path)
    (file, *_) = sorted((tmp_path / NAMES[2]).iterdir())
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=f"{file.name} cannot be read as an image"):
        images_in(tmp_path, size=SMALL)
    os.remove(file)
    with pytest.raises(ValueError, match=rf"holds 11 images of class {NAMES[2]} in place of 12"):
        images_in(tmp_path, size=SMALL)


def test_lists_that_do_not_fit_are_named(tmp_path: Path) -> None:
    lists(tmp_path)
    (tmp_path / "images" / f"{NAMES[0]}00000003.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"There is no image .*00000003\.png, which a list"):
        images_in(tmp_path, size=SMALL)
    (tmp_path / "val.csv").write_text("file,class\n")
    with pytest.raises(ValueError, match=r"val\.csv has no columns filename and label"):
        images_in(tmp_path, size=SMALL)
    (tmp_path / "val.csv").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no val\.csv; put all three lists there"):
        images_in(tmp_path, size=SMALL)


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    images = np.zeros((100, 84, 84, 3), np.uint8)
    arrays = {f"{s}_images": images for s in ("train", "test")}
    arrays |= {f"{s}_labels": np.arange(100) for s in ("train", "test")}
    save(tmp_path / "mine.npz", arrays)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="miniimagenet could not be written under"):
        prepare("miniimagenet", tmp_path / "file", given=tmp_path / "mine.npz")
