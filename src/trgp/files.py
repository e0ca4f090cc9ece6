"""Files that are written whole or not at all: text, and tensors with what is said about them.

A file of tensors is a safetensors file with JSON metadata and a checksum of both, so that a damaged
one is refused before anything is used. A checksum is no signature: fields of JSON are checked by
name and kind all the same.
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

LARGEST = 1e300  # numbers beyond it overflow in sums, and whole ones do not become floats at all


@contextmanager
def whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A draft to write, which takes the path's place once it is on the disk in full."""
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
    """Write the tensors, and what is said about them as JSON."""
    # Copied, because tied weights are one tensor under two names, which the format refuses.
    held = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    text = json.dumps(meta, allow_nan=False)
    with whole(path) as draft:
        try:
            save_file(held, draft, metadata={"trgp": text, "sha256": checksum(text, held)})
        except SafetensorError as error:  # a full disk, say
            raise OSError(str(error)) from error


def read_tensors(
    path: str | os.PathLike[str], device: torch.device | str = "cpu", *, writer: str = "trgp"
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What `write_tensors` was given, meta first, the tensors on the device.

    writer: what a file of another origin is said not to come from.
    """
    if not os.path.isfile(path):  # unlike Path.is_file never an exception, whatever the name
        raise FileNotFoundError(f"There is no file {path}; give the path that was saved to.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{path} is truncated, damaged or no safetensors file ({error}); use another copy."
        ) from None
    if "trgp" not in metadata:
        raise ValueError(f"{path} was not written by {writer}; give a file that was.")
    # Before any copy is made: torch tidies bytes in copying, as those of a bool that is neither
    # 0 nor 1, and damage would pass unseen.
    if metadata.get("sha256") != checksum(metadata["trgp"], tensors):
        raise ValueError(f"{path} is damaged: its checksum does not match; use another copy.")
    meta = _fields(metadata["trgp"], path)
    # Copied: products round differently where memory is not aligned as torch's own is.
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
    """Open a file to read; a pipe or a device is refused, since it may never begin or never end."""
    # Without waiting, as opening a pipe does for a writer. Windows has neither flag nor pipe.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is a folder, a pipe or a device")
    return os.fdopen(descriptor, "rb")


class Kind(NamedTuple):
    """A requirement on a field of JSON, as a test and in words."""

    holds: Callable[[Any], bool]
    says: str


def check_fields(
    content: Mapping[str, Any], fields: Mapping[str, Kind], path: str | os.PathLike[str], fix: str
) -> None:
    """Refuse a file's content that lacks one of the fields, or has another kind of value there."""
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
    """Whether lists and dictionaries in each other end before Python's own recursion would."""
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
    """For `json.loads`: NaN and the infinities are no JSON."""
    raise ValueError(f"{constant} is no number")


def checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """The sha256 of the metadata's text and of the tensors, which must be on the CPU."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
