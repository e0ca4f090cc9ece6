"""Files that are written whole or not at all: text, and tensors with what is said about them.

A file of tensors is a safetensors file with JSON metadata and a checksum of both, so that a damaged
one is refused before anything is used.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


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
    text = json.dumps(meta)
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
    if not Path(path).is_file():
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
    meta: dict[str, Any] = json.loads(metadata["trgp"])
    # Copied: products round differently where memory is not aligned as torch's own is.
    return meta, {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}


def checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """The sha256 of the metadata's text and of the tensors, which must be on the CPU."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
