"""Sets on disk: a good file loads as it was written, a bad one always gets a sentence."""

import io
import pickle
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trgp.benchmarks.data import store
from trgp.benchmarks.data.store import data_root, load, save

Arrays = dict[str, Any]


def valid(classes: int = 3, side: int = 4, channels: int = 1, coarse: bool = False) -> Arrays:
    arrays: Arrays = {}
    for split, count in (("train", 3 * classes), ("test", classes)):
        random = np.random.RandomState(count)
        arrays[f"{split}_images"] = random.randint(0, 256, (count, side, side, channels), np.uint8)
        arrays[f"{split}_labels"] = np.arange(count) % classes
        if coarse:
            arrays[f"{split}_coarse_labels"] = np.arange(count) % classes // 2
    return arrays


def written(arrays: Arrays) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def sentence(error: BaseException, *names: object) -> None:
    text = str(error)
    assert type(error) in (ValueError, FileNotFoundError)
    assert text.endswith((".", "?"))
    assert ";" in text or "miniImageNet" in text  # the fix comes after it
    assert "\n" not in text
    for name in names:
        assert str(name) in text


@pytest.mark.parametrize("coarse", [False, True])
def test_what_was_saved_is_loaded(tmp_path: Path, coarse: bool) -> None:
    arrays = valid(coarse=coarse, channels=3)
    save(tmp_path / "mine.npz", arrays)
    by_name, by_path = load("mine", tmp_path), load(tmp_path / "mine.npz")
    for loaded in (by_name, by_path):
        assert loaded.name == "mine"
        assert loaded.classes == 3
        for key, array in arrays.items():
            np.testing.assert_array_equal(getattr(loaded, key), array)
        assert loaded.train_labels.dtype == np.int64
        assert (loaded.train_coarse_labels is not None) == coarse
    assert [path.name for path in tmp_path.iterdir()] == ["mine.npz"]


@pytest.mark.parametrize("dtype", ["uint8", "int32", ">i2", "uint64"])
def test_labels_may_be_any_integers(tmp_path: Path, dtype: str) -> None:
    arrays = valid()
    arrays["train_labels"] = arrays["train_labels"].astype(dtype)
    (tmp_path / "mine.npz").write_bytes(written(arrays))
    assert load("mine", tmp_path).train_labels.dtype == np.int64


def test_other_arrays_in_the_file_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.npz").write_bytes(
        written(valid() | {"names": np.array([{"a": 1}], dtype=object)})
    )
    assert load("mine", tmp_path).classes == 3


def test_a_failed_save_leaves_the_old_file_and_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.npz"
    save(path, valid())
    before = path.read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space"):
        save(path, valid(classes=5))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_root_is_the_argument_then_the_variable_then_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRGP_DATA", str(tmp_path / "variable"))
    assert data_root(tmp_path) == tmp_path
    assert data_root() == tmp_path / "variable"
    monkeypatch.setenv("TRGP_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert data_root() == tmp_path / "trgp" / "data"


@pytest.mark.parametrize(
    ("platform", "environ", "expected"),
    [
        ("linux", {}, ".cache/trgp/data"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, ".cache/trgp/data"),
        ("darwin", {"XDG_CACHE_HOME": "/x"}, "Library/Caches/trgp/data"),
        ("win32", {}, "AppData/Local/trgp/data"),
    ],
)
def test_the_cache_directory_is_the_platforms(
    platform: str, environ: dict[str, str], expected: str
) -> None:
    assert store._cache_dir(platform, environ) == Path.home() / expected


@pytest.mark.parametrize("name", [name for name in store.SETS if name != "miniimagenet"])
def test_a_missing_known_set_names_the_command(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError, match=rf"`trgp data prepare {name}`") as caught:
        load(name, tmp_path)
    sentence(caught.value, tmp_path / f"{name}.npz")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("mnits", "did you mean 'mnist'"),
        ("zzz", "known are mnist"),
        ("miniimagenet", "--from PATH"),
        ("some/where.npz", "some/where.npz"),
        (Path("where"), "where"),
        ("x" * 5000, "known are"),
        ("a\0b", "known are"),
        ("~no-such-user/x.npz", "home"),
        ("", "empty"),
    ],
)
def test_what_is_not_there_gets_a_sentence(tmp_path: Path, asked: Any, says: str) -> None:
    with pytest.raises((FileNotFoundError, ValueError), match=says) as caught:
        load(asked, tmp_path)
    sentence(caught.value)


def test_a_folder_is_not_a_set(tmp_path: Path) -> None:
    (tmp_path / "mine.npz").mkdir()
    with pytest.raises(FileNotFoundError, match="is a folder"):
        load("mine", tmp_path)


Mangle = Callable[[Arrays], Any]
MANGLED: dict[str, tuple[Mangle, str]] = {
    "no train_images": (lambda a: a.pop("train_images"), "no array train_images"),
    "no test_labels": (lambda a: a.pop("test_labels"), "no array test_labels"),
    "one coarse array": (
        lambda a: a.update(train_coarse_labels=a["train_labels"]),
        "no array test_coarse_labels",
    ),
    "float images": (
        lambda a: a.update(train_images=a["train_images"] / 255.0),
        "is of type float64",
    ),
    "signed images": (lambda a: a.update(test_images=a["test_images"].astype("i1")), "type int8"),
    "float labels": (lambda a: a.update(test_labels=a["test_labels"] * 1.0), "type float64"),
    "time labels": (lambda a: a.update(test_labels=a["test_labels"].astype("m8[s]")), "type time"),
    "no channel axis": (lambda a: a.update(test_images=a["test_images"][..., 0]), "has 3 axes"),
    "channels first": (
        lambda a: a.update(train_images=np.zeros((9, 3, 8, 8), np.uint8)),
        "channels first",
    ),
    "one-hot labels": (
        lambda a: a.update(train_labels=np.eye(9, dtype=int)),
        "one label per image",
    ),
    "scalar labels": (lambda a: a.update(train_labels=np.array(3)), "one label per image"),
    "short labels": (
        lambda a: a.update(train_labels=a["train_labels"][1:]),
        "one label per image",
    ),
    "empty train": (
        lambda a: a.update(train_images=a["train_images"][:0], train_labels=a["train_labels"][:0]),
        "train_images .* is empty",
    ),
    "empty test": (
        lambda a: a.update(test_images=a["test_images"][:0], test_labels=a["test_labels"][:0]),
        "test_images .* is empty",
    ),
    "no pixels": (lambda a: a.update(test_images=a["test_images"][:, :0]), "is empty"),
    "two sizes": (lambda a: a.update(test_images=a["test_images"][:, 1:]), "bring both to one"),
    "gap": (lambda a: a.update(train_labels=a["train_labels"] * 2), "has 2 where 1 should"),
    "from one": (lambda a: a.update(train_labels=a["train_labels"] + 1), "has 1 where 0 should"),
    "negative": (lambda a: a.update(train_labels=a["train_labels"] - 1), "has -1 where 0 should"),
    "beyond int64": (
        lambda a: a.update(train_labels=a["train_labels"].astype("u8") + (1 << 63)),
        "should come next",
    ),
    "unknown test label": (lambda a: a["test_labels"].__setitem__(0, 7), "the label 7, which no"),
    "negative test label": (lambda a: a["test_labels"].__setitem__(0, -7), "the label -7"),
    "one class": (
        lambda a: a.update(train_labels=a["train_labels"] * 0, test_labels=a["test_labels"] * 0),
        "one class only",
    ),
    "objects": (
        lambda a: a.update(train_labels=np.array([{}] * 9, dtype=object)),
        "train_labels .* holds Python objects",
    ),
}


@pytest.mark.parametrize("name", ["mine", "mnist"])
@pytest.mark.parametrize("kind", MANGLED)
def test_a_mangled_set_gets_a_sentence(tmp_path: Path, kind: str, name: str) -> None:
    mangle, says = MANGLED[kind]
    arrays = valid()
    mangle(arrays)
    path = tmp_path / f"{name}.npz"
    path.write_bytes(written(arrays))
    with pytest.raises(ValueError, match=says) as caught:
        load(name, tmp_path)
    sentence(caught.value, path)


@pytest.mark.parametrize(
    "content",
    [b"", b"PK", b"no zip at all" * 99, pickle.dumps([1, 2, 3]), b"\x93NUMPY\x01\x00"],
    ids=["empty", "two bytes", "text", "pickle", "npy"],
)
def test_a_file_that_is_no_npz_gets_a_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cifar10.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"`trgp data prepare cifar10`") as caught:
        load("cifar10", tmp_path)
    sentence(caught.value, path)


def test_a_member_that_is_no_array_gets_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for key in store.REQUIRED:
            archive.writestr(f"{key}.npy", b"not an array")
    with pytest.raises(ValueError, match="train_images") as caught:
        load(path)
    sentence(caught.value, path)


def test_shapes_are_looked_at_before_anything_is_unpacked(tmp_path: Path) -> None:
    """So that a small file does not fill the memory before it is refused."""
    path = tmp_path / "mine.npz"
    np.savez_compressed(path, **valid() | {"test_labels": np.zeros(1 << 26, np.uint8)})
    assert path.stat().st_size < 1 << 18
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="one label per image") as caught:
            load(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()
    sentence(caught.value, path)


GOOD = written(valid(coarse=True))


@settings(max_examples=150)
@given(st.integers(0, len(GOOD) - 1))
def test_a_truncated_file_gets_a_sentence(tmp_path_factory: Any, length: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "mine.npz"
    path.write_bytes(GOOD[:length])
    with pytest.raises(ValueError, match=r"mine\.npz") as caught:
        load(path)
    sentence(caught.value, path)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.binary(min_size=1)), min_size=1))
def test_any_bytes_in_any_place_load_or_get_a_sentence(
    tmp_path_factory: Any, changes: list[tuple[int, bytes]]
) -> None:
    content = bytearray(GOOD)
    for at, new in changes:
        content[at : at + len(new)] = new
    path = tmp_path_factory.mktemp("bytes") / "mine.npz"
    path.write_bytes(content)
    try:
        load(path)
    except (ValueError, FileNotFoundError) as error:
        sentence(error, path)


DTYPES = st.sampled_from(["u1", "i8", "f4", "?", "c8", "U3", "S2", "M8[s]", "u1,i2", "O"])
SHAPES = st.lists(st.integers(0, 4), max_size=5).map(tuple)


@settings(max_examples=200)
@given(
    st.dictionaries(
        st.sampled_from([*store.REQUIRED, *store.COARSE]),
        st.none() | st.tuples(DTYPES, SHAPES),
        min_size=1,
    ),
    st.booleans(),
)
def test_any_arrays_load_or_get_a_sentence(
    tmp_path_factory: Any, changes: dict[str, tuple[str, tuple[int, ...]] | None], coarse: bool
) -> None:
    arrays = valid(coarse=coarse)
    for key, change in changes.items():
        arrays.pop(key, None)
        if change is not None:
            arrays[key] = np.zeros(change[1], np.dtype(change[0]))
    path = tmp_path_factory.mktemp("arrays") / "mine.npz"
    path.write_bytes(written(arrays))
    try:
        load(path)
    except (ValueError, FileNotFoundError) as error:
        sentence(error, path)


@settings(max_examples=100)
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 3), min_size=4, max_size=9),
    st.lists(st.integers(-1, 4), min_size=1, max_size=4),
)
def test_any_labels_load_or_get_a_sentence(
    tmp_path_factory: Any, train: list[int], test: list[int]
) -> None:
    path = tmp_path_factory.mktemp("labels") / "mine.npz"
    arrays = {
        "train_images": np.zeros((len(train), 2, 2, 1), np.uint8),
        "train_labels": np.array(train),
        "test_images": np.zeros((len(test), 2, 2, 1), np.uint8),
        "test_labels": np.array(test),
    }
    path.write_bytes(written(arrays))
    right = set(train) == set(range(len(set(train)))) and len(set(train)) > 1
    right = right and set(test) <= set(train)
    if right:
        assert load(path).classes == len(set(train))
    else:
        with pytest.raises(ValueError, match=r"mine\.npz") as caught:
            load(path)
        sentence(caught.value, path)
