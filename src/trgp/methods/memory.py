"""Stored examples: sampled per task, or from the stream by a reservoir.

Samples made of pixels are stored as bytes. Their normalisation lies in the state, by head: tasks
that share a head share it.
"""

import torch
from torch import Tensor

from ..pixels import floats_of, pixels_of
from ..tree import level, put, tensors
from ..types import Params, State
from .base import Batch, Context, Network
from .loss import cross_entropy

Examples = dict[str, Tensor]  # x (size, ...), y (size,), head (size,)
SCALE = "scale"  # key of the state with mean and std, each (heads, channels, 1, 1)


def with_scale(ctx: Context) -> State:
    """Add the normalisation of the task's pixels to the state; float samples have none."""
    scale = ctx.train.scale
    if scale is None:
        return ctx.state
    tables = tensors(level(ctx.state, SCALE))
    for key, own in zip(("mean", "std"), scale, strict=True):
        table = tables.get(key, own.expand(ctx.network.heads, *own.shape)).clone()
        table[ctx.head] = own
        tables[key] = table
    return put(ctx.state, tables, SCALE)


def packed(them: Examples, state: State) -> Examples:
    """Convert examples to their stored form."""
    scale = tensors(level(state, SCALE))
    if not scale:
        return them
    head = them["head"]
    return them | {"x": pixels_of(them["x"], scale["mean"][head], scale["std"][head])}


def unpacked(them: Examples, state: State) -> Examples:
    """Convert stored examples back to the network's inputs, bit for bit."""
    scale = tensors(level(state, SCALE))
    if not scale:
        return them
    head = them["head"]
    return them | {"x": floats_of(them["x"], scale["mean"][head], scale["std"][head])}


def empty(size: int, like: Examples) -> Examples:
    """Allocate an empty memory for `size` examples."""
    return {key: value.new_zeros(size, *value.shape[1:]) for key, value in like.items()}


def examples(batch: Batch) -> Examples:
    """The samples of a batch with their head."""
    return {"x": batch.x, "y": batch.y, "head": torch.full_like(batch.y, batch.head)}


def joined(*parts: Examples) -> Examples:
    return {key: torch.cat([part[key] for part in parts]) for key in ("x", "y", "head")}


def picked(memory: Examples, u: Tensor, filled: Tensor) -> Examples:
    """Pick one of the first `filled` examples per random number u in [0, 1)."""
    # In float64, u times a count never rounds up to the count.
    index = (u.double() * filled).long()
    return {key: value[index] for key, value in memory.items()}


def loss(network: Network, params: Params, them: Examples) -> Tensor:
    """Mean cross-entropy, with each example evaluated by its own head."""
    logits = network.every_head(params, them["x"])
    own = logits[them["head"], torch.arange(len(them["y"]), device=logits.device)]
    return cross_entropy(own, them["y"])


def reservoir(memory: Examples, seen: Tensor, new: Examples, u: Tensor) -> tuple[Examples, Tensor]:
    """Return the memory and the count after a batch of a stream (Vitter's algorithm R).

    The n-th sample of the stream takes place floor(u n) if the memory has that place, so that at
    any time every sample seen is stored with the same probability. If several samples of a batch
    take one place, the last stays, as if they had come one by one.
    """
    size, count = len(memory["y"]), len(new["y"])
    number = seen + torch.arange(count, device=u.device)  # number of samples before each
    place = torch.where(number < size, number, (u[:count].double() * (number + 1)).long())
    # The last writer of every place, or -1.
    rank = torch.arange(count, device=u.device)
    writer = torch.full((size + 1,), -1, device=u.device)
    writer = writer.scatter_reduce(0, place.clamp(max=size), rank, "amax")[:size]
    written = writer >= 0
    source = writer.clamp(min=0)
    kept = {
        key: torch.where(written.view(-1, *[1] * (old.dim() - 1)), new[key][source], old)
        for key, old in memory.items()
    }
    return kept, seen + count
