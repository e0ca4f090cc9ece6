"""How weights lie over the ranks: whole on each of them, or some rows on each (FSDP2).

`fully_shard` cuts every parameter along its first dimension: a rank holds some rows of W with the
entries of its biases, or none. The projection acts on columns, so W, C and K are held as these
rows, M is the same on all ranks, and a sum over rows is a sum over ranks as well.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..core.decompositions import eigh
from ..core.keep import Region, SumRows
from ..core.layers import PLAIN, Layer, local
from ..core.memory import Change, Memory
from ..types import TaskId
from . import ranks
from .layer_gradients import LossFn, backward, layer_gradients, require_finite

RESOLVED = 1e-7  # least singular value, relative to the largest, that its square tells from zero


class Whole:
    """Every rank holds every weight: a process alone, or data parallel training."""

    sum_rows: SumRows | None = None  # of what is summed over a weight's rows

    def reshard(self) -> None:
        """Put parameters that a pass has joined back into rows."""

    def agreed(self, device: torch.device) -> AbstractContextManager[None]:
        """Passes over batches that fail on all ranks if they fail on one."""
        return ranks.agreed(device)

    def together(self, device: torch.device) -> AbstractContextManager[None]:
        """A part of a call that a rank may make alone."""
        return nullcontext()

    def in_step(self, batches: Iterable[Any], device: torch.device) -> Iterable[Any]:
        """Batches, of which every rank may have another number."""
        return batches

    def gradients(
        self,
        model: nn.Module,
        layers: Mapping[str, Layer],
        batches: Iterable[Any],
        loss_fn: LossFn,
        others: Mapping[str, nn.Parameter],
        device: torch.device,
    ) -> tuple[dict[str, Tensor], list[str]]:
        """The gradient of every layer over the batches of all ranks; see layer_gradients."""
        with ranks.agreed(device):
            gradients, used = layer_gradients(model, layers, batches, loss_fn, others)
        for G in gradients.values():
            ranks.summed(G)
        require_finite(gradients)
        return gradients, ranks.from_first(lambda: used, device)

    def region(self, memory: Memory, trusted: Sequence[TaskId]) -> Region:
        """The region of a task that trusts these tasks."""
        return memory.region(trusted)

    def change(self, trusted: list[TaskId], D: Tensor, memory: Memory) -> Change:
        """A finished task's K - C, held."""
        return Change.of_coordinates(trusted, D, memory)

    def same(self, C: Mapping[str, Tensor], device: torch.device) -> Mapping[str, Tensor]:
        """New coordinates with the same bits on every rank that holds them."""
        return ranks.tensors_from_first(lambda: C, device)


class Rows(Whole):
    """Every rank holds some rows of every weight: FSDP2. All calls are made on all ranks."""

    def __init__(self, model: nn.Module) -> None:
        """Find the modules that `fully_shard` was applied to."""
        self._modules = _sharded_modules(model)
        self.sum_rows = ranks.summed

    def reshard(self) -> None:
        """Put parameters that a pass has joined back into rows."""
        for module in self._modules:
            module.reshard()

    def agreed(self, device: torch.device) -> AbstractContextManager[None]:
        """Passes over batches: a rank that fails in one leaves the others inside it anyway."""
        return nullcontext()

    def together(self, device: torch.device) -> AbstractContextManager[None]:
        """A part of a call, which fails on all ranks if it fails on one."""
        return ranks.agreed(device)

    def in_step(self, batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
        """Batches, of which every rank must have the same number: a pass needs all ranks."""
        iterator = iter(batches)
        while True:
            with ranks.agreed(device):
                batch = next(iterator, None)
            having = int(ranks.summed(torch.tensor(int(batch is not None), device=device)))
            if not having:
                return
            if having < ranks.world_size():
                raise ValueError(
                    f"Only {having} of {ranks.world_size()} ranks have another batch, but a model "
                    "under fully_shard runs on all ranks at once; give every rank the same number "
                    "of batches, as a DistributedSampler does."
                )
            yield batch

    def gradients(
        self,
        model: nn.Module,
        layers: Mapping[str, Layer],
        batches: Iterable[Any],
        loss_fn: LossFn,
        others: Mapping[str, nn.Parameter],
        device: torch.device,
    ) -> tuple[dict[str, Tensor], list[str]]:
        """The gradient's rows of every layer, by backward passes, which alone join the ranks'.

        They are left in `.grad`, which a snapshot of the caller puts back.
        """
        for module in self._modules:
            module.set_requires_gradient_sync(True)
        backward(model, layers, self.in_step(batches, device), loss_fn)
        self.reshard()
        found = {
            name: layer.pack(
                [torch.zeros_like(local(p)) if p.grad is None else local(p.grad) for p in params]
            )
            for name, layer in layers.items()
            for params in [layer.params]
        }
        with ranks.agreed(device):
            require_finite(found)
        return found, sorted(name for name, p in others.items() if p.grad is not None)

    def region(self, memory: Memory, trusted: Sequence[TaskId]) -> Region:
        """The region of a task that trusts these tasks, in rows."""
        return memory.region(trusted, _range_of, self.sum_rows)

    def change(self, trusted: list[TaskId], D: Tensor, memory: Memory) -> Change:
        """The rows of a finished task's K - C, held by columns."""
        return Change.of_coordinates(trusted, D, memory, apart=False)

    def same(self, C: Mapping[str, Tensor], device: torch.device) -> Mapping[str, Tensor]:
        """New coordinates, of which every rank holds its own rows."""
        return C


# ---- tensors in rows ----------------------------------------------------------------------------


def whole(rows: Tensor, param: Tensor, dim: int, *, everywhere: bool = True) -> Tensor:
    """All rows of a tensor that lies over the ranks along `dim` as the parameter's rows do.

    All ranks must call it. everywhere: whether ranks other than the first need them as well.
    """
    if not _in_rows(param):
        return rows
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size([*rows.shape[:dim], param.shape[0], *rows.shape[dim + 1 :]])
    stride = torch.empty(shape, device="meta").stride()
    spread = DTensor.from_local(
        rows.contiguous(), _mesh(param), [Shard(dim)], run_check=False, shape=shape, stride=stride
    )
    joined: Tensor = spread.full_tensor()
    if everywhere:
        return joined
    return joined.cpu() if ranks.rank() == 0 else rows


def own_rows(tensor: Tensor, param: Tensor, dim: int) -> Tensor:
    """This rank's part along `dim` of a tensor that every rank holds whole."""
    return local(as_laid(tensor, param, dim)).clone() if _in_rows(param) else tensor


def as_laid(tensor: Tensor, param: Tensor, dim: int = 0) -> Tensor:
    """A tensor that every rank holds whole, spread over the ranks as the parameter is."""
    if not _in_rows(param):
        return tensor
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(tensor.detach(), _mesh(param), [Shard(dim)], src_data_rank=None)


def own_change(change: Change, memory: Memory, param: Tensor) -> Change:
    """This rank's rows of a finished task's change, given whole with its memory."""
    if not _in_rows(param):
        return change
    D = change.coordinates(memory)
    held = Change.of_coordinates(change.trusted, D, memory, apart=False)
    assert held.shift is not None
    return replace(held, shift=own_rows(held.shift, param, 1))


def _range_of(C: Tensor) -> Tensor:
    """This rank's rows of an orthonormal basis of the range of C, whose rows these are."""
    least = max(RESOLVED, C.shape[2] * torch.finfo(C.dtype).eps)
    once = _divided(C.double(), least)
    # Directions of small values come out a little off the right angle: so once more.
    return _divided(once, 0.5).to(C.dtype)


def _divided(C: Tensor, least: float) -> Tensor:
    """C times its right singular vectors over its singular values: orthonormal columns."""

    def decomposed() -> dict[str, Tensor]:
        squares, vectors = eigh(CC)
        return {"values": squares.flip(1).clamp_min(0).sqrt(), "vectors": vectors.flip(2)}

    CC = ranks.summed(C.mT @ C)
    made = ranks.tensors_from_first(decomposed, C.device)
    values, vectors = made["values"], made["vectors"]
    held = values > least * values[:, :1]
    count = int(held.sum(1).max())
    scaled = vectors * (held / values.where(held, 1.0))[:, None, :]
    return C @ scaled[:, :, :count]


# ---- models -------------------------------------------------------------------------------------


def reshard(model: nn.Module) -> None:
    """Put the parameters that a pass has joined back into rows."""
    for module in _sharded_modules(model):
        module.reshard()


def reset(model: nn.Module) -> None:
    """Let a model forget a pass that failed half-way, which it would otherwise go on with."""
    modules = _sharded_modules(model)
    inner = {m for module in modules for m in module.modules() if m is not module}
    for module in modules:
        if module not in inner and hasattr(module, "reset_iter_state"):  # since torch 2.13
            with suppress(AttributeError):  # of a model that was never called
                module.reset_iter_state()


def refuse_other_ways(model: nn.Module) -> None:
    """Refuse parameters that lie over the ranks in a way that cannot be followed."""
    advice = "use fully_shard over all ranks, or DistributedDataParallel"
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise TypeError(
                f"{name or 'The model'!r} is wrapped in FullyShardedDataParallel (FSDP1), which "
                f"flattens its parameters; {advice}."
            )
    for name, param in model.named_parameters():
        if hasattr(param, "ds_id"):
            raise TypeError(
                f"'{name}' is partitioned by DeepSpeed ZeRO-3, which leaves no rows of it to "
                f"protect; {advice}."
            )
        if not _in_rows(param):
            continue
        mesh, placements = _mesh(param), tuple(getattr(param, "placements", ()))
        if tuple(mesh.shape) != (ranks.world_size(),) or not placements[0].is_shard(0):
            raise TypeError(
                f"'{name}' is spread over ranks otherwise than by rows over all of them "
                f"({placements} on a mesh {tuple(mesh.shape)}; tensor parallelism or hybrid "
                f"sharding), which cannot be protected; {advice}."
            )


def require_whole(model: nn.Module) -> None:
    """Refuse a model that lies over ranks in any way."""
    refuse_other_ways(model)
    for name, param in model.named_parameters():
        if _in_rows(param):
            raise TypeError(
                f"'{name}' lies in rows over the ranks, and inspect reads whole models; call it "
                "before fully_shard."
            )


def spread_of(model: nn.Module, layers: Mapping[str, Layer]) -> Whole:
    """How the weights of these layers lie; refuses a mixture, and groups that would be cut."""
    if not any(_in_rows(p) for layer in layers.values() for p in layer.params):
        return Whole()
    for name, layer in layers.items():
        if not all(map(_in_rows, layer.params)):
            raise TypeError(
                f"Layer '{name}' is not under fully_shard, though others are; apply fully_shard "
                f"to the whole model, or add '{name}' to exclude=[...]."
            )
        if any(isinstance(site.module, nn.RNNBase) for site in layer.sites):
            raise TypeError(
                f"Layer '{name}' is recurrent, and torch goes on computing with the weights that "
                f"it had before fully_shard; add '{name}' to exclude=[...] or per_task=[...], or "
                "train with DistributedDataParallel."
            )
        if layer.layout != PLAIN:
            raise TypeError(
                f"Layer '{name}' does not hold one row per output (it has groups, experts or a "
                "transposed weight), so fully_shard cuts through its outputs; "
                f"add '{name}' to exclude=[...] or per_task=[...], or train with "
                "DistributedDataParallel."
            )
    return Rows(model)


def _in_rows(param: Tensor) -> bool:
    return hasattr(param, "to_local")


def _mesh(param: Any) -> Any:
    return param.device_mesh


def _sharded_modules(model: nn.Module) -> list[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # takes seconds to import
    if fsdp is None:
        return []
    return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
