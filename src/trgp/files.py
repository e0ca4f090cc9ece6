"""Atomic writing of files: text, and tensors with metadata.

A file of tensors is a safetensors file with JSON metadata and a checksum of both, so that a damaged
one is rejected before it is used. A checksum is no signature: fields of JSON are still checked by
name and kind.
"""

import errno
import hashlib
import json
import os
import reprlib
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

LARGEST = 1e300  # larger floats overflow in sums, and larger integers do not convert to float


@contextmanager
def whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a draft path; on success, sync it to disk and move it to `path`."""
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {target.parent}; make it before saving there.")
    draft = target.with_name(f".{target.name}.{uuid4().hex}")
    try:
        yield draft
        with open(draft, "rb+") as written:
            os.fsync(written.fileno())
        os.replace(draft, target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write the text as UTF-8."""
    with whole(path) as draft:
        draft.write_bytes(text.encode())


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], meta: Mapping[str, Any]
) -> None:
    """Write the tensors with their metadata as JSON."""
    # Copied, because tied weights are one tensor under two names, which the format refuses.
    held = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    text = json.dumps(meta, allow_nan=False)
    with whole(path) as draft:
        try:
            save_file(held, draft, metadata={"trgp": text, "sha256": checksum(text, held)})
        except SafetensorError as error:  # for instance a full disk
            raise OSError(str(error)) from error


def read_tensors(
    path: str | os.PathLike[str], device: torch.device | str = "cpu", *, writer: str = "trgp"
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read metadata and tensors that `write_tensors` wrote, with the tensors on the device.

    Args:
        writer: the program named in the error about a file of another origin.
    """
    if not os.path.isfile(path):  # unlike Path.is_file, never raises for any name
        raise FileNotFoundError(f"There is no file {path}; give the path of a saved file.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{path} is truncated, damaged or no safetensors file ({error}); use another copy."
        ) from None
    if "trgp" not in metadata:
        raise ValueError(f"{path} was not written by {writer}; give a file that {writer} wrote.")
    # Before any copy is made: copying normalises bytes, such as a bool that is neither 0 nor 1,
    # and would hide damage.
    if metadata.get("sha256") != checksum(metadata["trgp"], tensors):
        raise ValueError(f"{path} is damaged: its checksum does not match; use another copy.")
    meta = _fields(metadata["trgp"], path)
    # Copied: products round differently if memory is not aligned like torch's own.
    return meta, {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}


def _fields(text: str, path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        meta = json.loads(text, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} has metadata that is no JSON ({error}); use another copy."
        ) from None
    if not isinstance(meta, dict):
        raise ValueError(f"{path} has metadata without names; use another copy.")
    return meta


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file to read; a pipe or a device may never begin or end, and is rejected."""
    # Non-blocking, since opening a pipe waits for a writer. Windows has neither flag nor pipe.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is a folder, a pipe or a device")
    return os.fdopen(descriptor, "rb")


class Kind(NamedTuple):
    """A requirement on a JSON field: a test and its description."""

    holds: Callable[[Any], bool]
    says: str


def check_fields(
    content: Mapping[str, Any], fields: Mapping[str, Kind], path: str | os.PathLike[str], fix: str
) -> None:
    """Raise an error if a field is missing from a file's content or has another kind of value."""
    for name, kind in fields.items():
        if name not in content:
            raise ValueError(f"{path} lacks the field '{name}'; {fix}.")
        if not kind.holds(content[name]):
            raise ValueError(
                f"{path} has {reprlib.repr(content[name])} as its {name}, which must be "
                f"{kind.says}; {fix}."
            )


def is_number(value: Any) -> bool:
    return type(value) in (float, int) and -LARGEST < value < LARGEST


def is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def or_none(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or holds(value)


def is_shallow(value: Any, levels: int = 20) -> bool:
    """Whether nesting of lists and dictionaries stays within Python's recursion limit."""
    if not isinstance(value, (list, dict)):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(is_shallow(each, levels - 1) for each in inner)


def list_of(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(holds, value))


def dict_of(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(holds, value.values()))


SETTINGS = Kind(dict_of(is_shallow), "settings by name")


def no_number(constant: str) -> NoReturn:
    """Reject NaN and infinities, which are no JSON; for `json.loads`."""
    raise ValueError(f"{constant} is no number")


def checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Compute the sha256 of the metadata's text and of the tensors, which must be on the CPU."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
