"""Data parallel training: what the ranks of a process group sum, agree on, and take from the first.

Every rank holds the same memory to the bit: sums are over all ranks, and whatever is decided from
them is decided by rank 0 alone.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def world_size() -> int:
    """How many ranks train together; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process among them."""
    return dist.get_rank() if world_size() > 1 else 0


def share_of(limit: int | None) -> int | None:
    """Every rank's part of a number of samples, rounded up alike; None is all of them."""
    return None if limit is None else -(-limit // world_size())


def summed(tensor: Tensor) -> Tensor:
    """The sum over all ranks, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def largest(value: float, device: torch.device) -> float:
    """The largest of a number that every rank gives."""
    if world_size() == 1:
        return value
    shared = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return float(shared)


def from_first(decide: Callable[[], T], device: torch.device) -> T:
    """Share a decision of rank 0 with all ranks: anything that JSON can say."""
    if world_size() == 1:
        return decide()
    with agreed(device):
        text = json.dumps(decide()).encode() if rank() == 0 else b""
    length = torch.tensor(len(text), device=device)
    dist.broadcast(length, 0)
    data = torch.zeros(int(length), dtype=torch.uint8, device=device)
    if rank() == 0:
        data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    dist.broadcast(data, 0)
    decided: T = json.loads(bytes(data.cpu().numpy()).decode())
    return decided


def tensors_from_first(
    make: Callable[[], Mapping[str, Tensor]], device: torch.device
) -> dict[str, Tensor]:
    """Tensors that rank 0 makes, the same bits on every rank."""
    if world_size() == 1:
        return dict(make())
    with agreed(device):
        made = {key: t.contiguous() for key, t in make().items()} if rank() == 0 else {}
    shapes: list[list[Any]] = from_first(
        lambda: [[k, list(t.shape), str(t.dtype).removeprefix("torch.")] for k, t in made.items()],
        device,
    )
    for key, shape, dtype in shapes:
        if key not in made:
            made[key] = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        if made[key].numel():
            whole = made[key].view(torch.uint8) if dtype == "bool" else made[key]
            dist.broadcast(whole, 0)
    return made


@contextmanager
def agreed(device: torch.device) -> Iterator[None]:
    """Fail on all ranks if one fails inside: the others would wait for it for ever."""
    failed = True
    try:
        yield
        failed = False
    finally:
        if largest(float(failed), device) and not failed:
            raise RuntimeError(
                "Another rank failed in this call, so nothing was changed here; see its message."
            )
