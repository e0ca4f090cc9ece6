"""Files are written whole or not at all, and damage to one is always noticed."""

import errno
import json
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from trgp.files import (
    SETTINGS,
    Kind,
    check_fields,
    checksum,
    is_whole,
    read_tensors,
    write_tensors,
    write_text,
)


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def sentence(error: BaseException, path: object) -> None:
    assert type(error) is ValueError
    assert str(error).endswith(".")
    assert str(path) in str(error)
    assert "\n" not in str(error)


def some_tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "a/weight": torch.randn(3, 4),
        "half": torch.randn(5).bfloat16(),
        "mask": torch.tensor([True, False, True]),
        "count": torch.tensor(7),
        "none": torch.zeros(0, 3),
    }


META = {"epoch": 3, "names": ["ä", None], "rate": 0.1}


# ---- text -----------------------------------------------------------------------------------


@given(first=st.text(), second=st.text())
def test_the_last_text_written_is_there(first: str, second: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.json")
        for text in (first, second):
            write_text(path, text)
            assert path.read_bytes().decode() == text
        assert os.listdir(folder) == ["a.json"]


@pytest.mark.parametrize("fails", ["os.fsync", "os.replace", "pathlib.Path.write_bytes"])
@pytest.mark.parametrize("old", [b"old", None])
def test_text_on_a_full_disk_leaves_what_was_there(
    fails: str, old: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    if old is not None:
        path.write_bytes(old)
    monkeypatch.setattr(fails, full)
    with pytest.raises(OSError, match="No space"):
        write_text(path, "new")
    assert [p.read_bytes() for p in tmp_path.iterdir()] == ([] if old is None else [old])


def test_text_that_has_no_bytes_leaves_what_was_there(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "old")
    with pytest.raises(ValueError, match="surrogates"):
        write_text(tmp_path / "a", "new \ud800")
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no folder .*missing; make it") as caught:
        write_text(tmp_path / "missing" / "a", "text")
    assert str(caught.value).endswith(".")


# ---- tensors --------------------------------------------------------------------------------


def test_tensors_come_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = some_tensors()
    write_tensors(tmp_path / "a", tensors, META)
    meta, read = read_tensors(tmp_path / "a")
    assert meta == META
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name


def test_tied_strided_and_trained_tensors_are_written_as_they_look(tmp_path: Path) -> None:
    weight = torch.arange(12.0).reshape(3, 4).requires_grad_()
    tensors = {"a": weight, "b": weight, "turned": weight.T, "part": weight[1:, ::2]}
    write_tensors(tmp_path / "a", tensors, {})
    _, read = read_tensors(tmp_path / "a")
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor)
        assert not read[name].requires_grad


def test_what_is_read_is_the_readers_own(tmp_path: Path) -> None:
    """Aligned as torch's own memory is, and apart from the file."""
    write_tensors(tmp_path / "a", {"x": torch.zeros(3), "y": torch.zeros(5)}, {})
    _, first = read_tensors(tmp_path / "a")
    assert all(tensor.data_ptr() % 64 == 0 for tensor in first.values())
    first["y"].add_(1)
    assert torch.equal(read_tensors(tmp_path / "a")[1]["y"], torch.zeros(5))


def test_tensors_go_to_the_device(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", some_tensors(), META)
    _, read = read_tensors(tmp_path / "a", "meta")
    assert {tensor.device.type for tensor in read.values()} == {"meta"}


@pytest.mark.parametrize("fails", ["os.fsync", "os.replace", "trgp.files.save_file"])
def test_tensors_on_a_full_disk_leave_the_old_file(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tensors(tmp_path / "a", some_tensors(), META)
    before = (tmp_path / "a").read_bytes()
    monkeypatch.setattr(fails, full)
    with pytest.raises(OSError, match="No space"):
        write_tensors(tmp_path / "a", {"x": torch.ones(9)}, {})
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [before]


def test_other_safetensors_files_are_refused(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "a", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="was not written by trgp") as caught:
        read_tensors(tmp_path / "a")
    sentence(caught.value, tmp_path / "a")
    save_file({"x": torch.ones(2)}, tmp_path / "a", metadata={"trgp": json.dumps(META)})
    with pytest.raises(ValueError, match="checksum") as caught:
        read_tensors(tmp_path / "a")
    sentence(caught.value, tmp_path / "a")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": NaN}', '{"a": -Infinity}', "[" * 100_000])
def test_metadata_that_is_no_json_is_refused(text: str, tmp_path: Path) -> None:
    """Also with a checksum that is right."""
    held = some_tensors()
    save_file(held, tmp_path / "a", metadata={"trgp": text, "sha256": checksum(text, held)})
    with pytest.raises(ValueError, match="has metadata") as caught:
        read_tensors(tmp_path / "a")
    sentence(caught.value, tmp_path / "a")


def test_metadata_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_tensors(tmp_path / "a", {}, {"rate": float("nan")})
    assert os.listdir(tmp_path) == []


def test_fields_of_another_kind_are_named() -> None:
    fields = {"count": Kind(is_whole, "a whole number"), "more": SETTINGS}
    good = {"count": 3, "more": {"a": [1, {"b": None}]}, "unknown": 1}
    check_fields(good, fields, "a.json", "repeat it")
    for name, value in (("count", -1), ("count", True), ("count", 3.0), ("more", []), ("more", 1)):
        with pytest.raises(ValueError, match=f"a.json has .* as its {name}, .*; repeat it.$"):
            check_fields(good | {name: value}, fields, "a.json", "repeat it")
    with pytest.raises(ValueError, match=r"^a.json lacks the field 'more'; repeat it.$"):
        check_fields({"count": 3}, fields, "a.json", "repeat it")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="There is no file"):
        read_tensors("a" * 5000)
    for path in (tmp_path, tmp_path / "a"):
        with pytest.raises(FileNotFoundError, match=str(path)):
            read_tensors(path)


# ---- damage ---------------------------------------------------------------------------------


@cache
def a_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write_tensors(f"{folder}/a", some_tensors(), META)
        return Path(folder, "a").read_bytes()


def refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a")
        path.write_bytes(content)
        with pytest.raises(ValueError, match=str(path)) as caught:
            read_tensors(path)
        sentence(caught.value, path)


@settings(max_examples=100)
@given(st.integers(0, len(a_file()) - 1))
def test_a_truncated_file_is_refused(length: int) -> None:
    refused(a_file()[:length])


@settings(max_examples=50)
@given(st.binary(max_size=200))
def test_any_other_bytes_are_refused(content: bytes) -> None:
    refused(content)


def test_a_bool_that_is_neither_0_nor_1_is_refused() -> None:
    """Torch makes it 1 as soon as it is copied."""
    content = bytearray(a_file())
    assert content[-3:] == b"\1\0\1"  # the mask
    content[-3] = 3
    refused(bytes(content))


@settings(max_examples=300)
@given(data=st.data())
def test_a_file_with_a_changed_byte_is_refused(data: st.DataObject) -> None:
    content = bytearray(a_file())
    header = 8 + int.from_bytes(content[:8], "little")
    last = data.draw(st.sampled_from([7, header - 1, len(content) - 1]))
    place = data.draw(st.integers(0, last))
    old = content[place]
    content[place] = data.draw(st.integers(0, 255).filter(lambda byte: byte != old))
    if old == ord(" ") and chr(content[place]) in "\t\n\r":
        return  # the header's padding, in which these mean the same
    refused(bytes(content))
