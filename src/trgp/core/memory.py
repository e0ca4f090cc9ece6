"""A layer's memory: its basis M, the frozen coordinates C, and the tasks that use them.

Also what follows from it: the region that a new task may reach (4.2), and what a finished task
keeps so that its effective weight can be put together again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ..types import TaskId
from .decompositions import qr, svd
from .keep import Block, Region, SumRows
from .precision import doubled, full_precision
from .subspace import Extension, columns_of, put_columns

MOST_BLOCKS = 7  # beyond, all blocks share one reach: a set of tasks each would cost too many bases


def range_of(C: Tensor) -> Tensor:
    """Return an orthonormal basis L of the range of C (g, o, k), to the precision of C."""
    U, values, _ = svd(doubled(C))
    zero = max(C.shape[1:]) * torch.finfo(C.dtype).eps * values[:, :1]
    count = int((values > zero).sum(1).max())
    return (U * (values > zero)[:, None, :])[:, :, :count].to(C)


@dataclass
class Memory:
    """The directions that a layer must not forget, and the shared weight's part in them.

    M (g, n, m) is an orthonormal basis of every protected direction, group by group; a group of
    lower rank has zero columns on the right, which contribute nothing anywhere.
    C = W M (g, o, m) is the shared weight's part inside span(M): frozen for good, it is what all
    old tasks rely on. A column never changes its place, so the basis of task j is a mask over them.
    """

    M: Tensor
    C: Tensor
    ranks: Tensor  # (g,) columns in use
    masks: dict[TaskId, Tensor]  # per task, (g, m at that time) bool: B_j = M[:, mask]

    @classmethod
    def empty(cls, groups: int, outputs: int, inputs: int, like: Tensor) -> "Memory":
        """Return a memory of no direction."""
        return cls(
            M=like.new_zeros(groups, inputs, 0),
            C=like.new_zeros(groups, outputs, 0),
            ranks=torch.zeros(groups, dtype=torch.long, device=like.device),
            masks={},
        )

    def to(self, device: torch.device, dtype: torch.dtype) -> "Memory":
        """Return the memory on a device, in a precision."""
        return Memory(
            M=self.M.to(device, dtype),
            C=self.C.to(device, dtype),
            ranks=self.ranks.to(device),
            masks={task: mask.to(device) for task, mask in self.masks.items()},
        )

    def basis(self, task: TaskId) -> Tensor:
        """Return B_j (g, n, r_j)."""
        return columns_of(self.M, self.masks[task])

    @full_precision
    def grown(self, extension: Extension, W: Tensor, task: TaskId) -> "Memory":
        """Return the memory after a task, given a weight W that has C in the old directions.

        New columns of C are those of W in the new directions, so the task's effective weight will
        do as well as the shared one.
        """
        C = W @ extension.M
        frozen = torch.arange(self.C.shape[2], device=C.device) < self.ranks[:, None]
        m = self.C.shape[2]
        C[:, :, :m] = self.C.where(frozen[:, None, :], C[:, :, :m])  # never rounded again
        masks = self.masks | {task: extension.mask}
        return Memory(extension.M, C, extension.ranks, masks)

    def widened(self, tasks: Sequence[TaskId]) -> Tensor:
        """Return the masks of tasks over all columns (tasks, g, m)."""
        m = self.M.shape[2]
        return torch.stack([F.pad(self.masks[j], (0, m - self.masks[j].shape[1])) for j in tasks])

    @full_precision
    def region(
        self,
        trusted: Sequence[TaskId],
        range_of: Callable[[Tensor], Tensor] = range_of,
        sum_rows: SumRows | None = None,
    ) -> Region:
        """Return the region of a new task that trusts these tasks.

        Where processes hold rows of C each, they bring a way to sum over rows, and a range_of that
        does so.
        """
        if not trusted:
            return Region(self.M, self.C)
        held = self.widened(trusted)  # (k, g, m)
        weights = 2 ** torch.arange(len(trusted), device=held.device)
        sets = (held * weights[:, None, None]).sum(0)  # (g, m): which set of tasks holds a column
        codes = sorted(set(sets.flatten().tolist()) - {0})
        places = [_places(sets == code) for code in [0, *codes]]
        order = torch.cat(places, dim=1)
        M, C = _columns_at(self.M, order), _columns_at(self.C, order)
        coordinates = [columns_of(self.C, self.masks[j]) for j in trusted]
        reaches: dict[int, Tensor] = {}
        if len(codes) > MOST_BLOCKS:
            reaches = dict.fromkeys(codes, range_of(torch.cat(coordinates, dim=2)))
        blocks, first = [], places[0].shape[1]
        for code, place in zip(codes, places[1:], strict=True):
            gain = torch.cat([c for i, c in enumerate(coordinates) if code >> i & 1], dim=2)
            reach = reaches[code] if reaches else range_of(gain)
            blocks.append(Block(first, first + place.shape[1], gain, reach))
            first = blocks[-1].last
        return Region(M, C, tuple(blocks), order, sum_rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is held."""
        return sum(t.nbytes for t in (self.M, self.C, *self.masks.values()))


def in_memory_order(D: Tensor, region: Region, width: int) -> Tensor:
    """Return values (g, o, columns of the region) at the columns (g, o, width) of the memory."""
    if region.places is None:
        return D
    out = D.new_zeros(*D.shape[:2], width + 1)
    places = torch.where(region.places < 0, width, region.places)
    out.scatter_(2, places[:, None, :].expand_as(D), D)
    return out[:, :, :width].contiguous()


def in_region_order(D: Tensor, region: Region) -> Tensor:
    """Return values (g, o, m) at the memory's columns in the order of the region's."""
    return D if region.places is None else _columns_at(D, region.places)


@dataclass
class Change:
    """A finished task's effective weight against the shared one, inside span(M): K - C.

    Three ways of holding it; the smallest that gives it back is taken:
    shift: K - C (g, o, u) at the u columns that the trusted tasks' bases use together;
    parts: L'(K - C) for each set of trusted tasks that holds columns, where L is the orthonormal
        basis that a QR decomposition makes of their columns of C, which never change;
    scalings: the paper's S_j = Q_j - I (g, r_j, r_j), one per trusted task.
    """

    trusted: list[TaskId]
    scalings: list[Tensor]
    shift: Tensor | None = None
    parts: list[Tensor] = field(default_factory=list)

    @classmethod
    def of_shift(cls, trusted: list[TaskId], D: Tensor, memory: Memory) -> "Change | None":
        """Hold D = K - C (g, o, m) by its columns, or return None if scalings would be smaller."""
        columns = columns_of(D, cls(trusted, []).union(memory))
        ranks = [int(memory.masks[j].sum(1).max()) for j in trusted]
        if columns.numel() < len(D) * sum(r * r for r in ranks):
            return cls(trusted, [], columns)
        return None

    @classmethod
    @full_precision
    def of_coordinates(
        cls, trusted: list[TaskId], D: Tensor, memory: Memory, *, apart: bool = True
    ) -> "Change":
        """Hold D = K - C (g, o, m), whatever made it.

        apart: whether parts may be taken, which need all rows of C.
        """
        change = cls(trusted, [])
        change.shift = columns_of(D, change.union(memory)).contiguous()
        parts = []
        # In float64 another machine's QR could be off by more than the weights' own rounding.
        apart = apart and len(D) == 1 and D.dtype == torch.float32
        for columns, C in change._sets(memory) if apart else []:
            L = _canonical(C)
            if L is None:
                return change
            inside = doubled(D[0, :, columns])
            part = L.mT @ inside
            # K = C + D is what is rounded: where D is small, its own rounding is not.
            size = doubled(memory.C[0, :, columns]).norm() + inside.norm()
            if not bool((L @ part - inside).norm() <= 4 * torch.finfo(D.dtype).eps * size):
                return change
            parts.append(part.to(D))
        if parts and sum(part.numel() for part in parts) < change.shift.numel():
            return cls(trusted, [], None, parts)
        return change

    @full_precision
    def coordinates(self, memory: Memory) -> Tensor:
        """Return (W_eff - W) M, of shape (g, o, m)."""
        m = memory.M.shape[2]
        if self.shift is not None:
            return put_columns(self.shift, self.union(memory), m)
        total = torch.zeros_like(memory.C)
        if self.parts:
            for (columns, C), part in zip(self._sets(memory), self.parts, strict=True):
                L = _canonical(C)
                assert L is not None  # as it was when the change was made
                total[0, :, columns] = (L @ doubled(part)).to(total)
            return total
        for j, S in zip(self.trusted, self.scalings, strict=True):
            mask = memory.masks[j]
            total += put_columns(columns_of(memory.C, mask) @ S, mask, m)
        return total

    def union(self, memory: Memory) -> Tensor:
        """Return a mask over the columns that any trusted task holds, at the widest of them."""
        width = max(memory.masks[j].shape[1] for j in self.trusted)
        return memory.widened(self.trusted).any(0)[:, :width]

    def _sets(self, memory: Memory) -> list[tuple[Tensor, Tensor]]:
        """Per set of tasks that holds columns, of a layer of one group: these, and the tasks' C."""
        held = memory.widened(self.trusted)[:, 0]  # (k, m)
        codes = (held * (2 ** torch.arange(len(held), device=held.device))[:, None]).sum(0)
        found = []
        for code in sorted(set(codes.tolist()) - {0}):
            tasks = [i for i in range(len(held)) if code >> i & 1]
            columns = (codes == code).nonzero().flatten()
            found.append((columns, memory.C[0][:, held[tasks].any(0)]))
        return found

    @property
    def tensors(self) -> list[Tensor]:
        """All that is held."""
        return [self.shift] if self.shift is not None else self.parts or self.scalings

    def to(self, like: Tensor) -> "Change":
        """Return the change on the device and in the precision of a tensor."""
        shift = self.shift.to(like) if self.shift is not None else None
        scalings, parts = ([t.to(like) for t in kept] for kept in (self.scalings, self.parts))
        return Change(self.trusted, scalings, shift, parts)


@full_precision
def scalings_of(D: Tensor, memory: Memory, trusted: Sequence[TaskId]) -> list[Tensor]:
    """Return the paper's Q_j (g, r_j, r_j), the nearest to I with sum_j C_j (Q_j - I) = D.

    In a column that several tasks hold, Q_j - I is C_j' y with (sum of their C_j C_j') y = D there.
    """
    found = []
    held = memory.widened(trusted)
    weights = 2 ** torch.arange(len(trusted), device=held.device)
    sets = (held * weights[:, None, None]).sum(0)
    coordinates = [doubled(columns_of(memory.C, memory.masks[j])) for j in trusted]
    Y = torch.zeros_like(doubled(D))
    for code in sorted(set(sets.flatten().tolist()) - {0}):
        F_s = torch.cat([c for i, c in enumerate(coordinates) if code >> i & 1], dim=2)
        here = doubled(D * (sets == code)[:, None, :])
        Y += torch.linalg.pinv(F_s @ F_s.mT, hermitian=True) @ here
    for j, C in zip(trusted, coordinates, strict=True):
        S = C.mT @ columns_of(Y, memory.masks[j].to(Y.device))
        found.append((torch.eye(S.shape[1], device=S.device) + S).to(D))
    return found


def _canonical(C: Tensor) -> Tensor | None:
    """Return the Q (o, k) of C = QR with a positive diagonal, or None if rounding could turn it."""
    if C.shape[1] > C.shape[0]:
        return None
    Q, R = qr(doubled(C))
    values = torch.linalg.svdvals(R)
    return Q * R.diagonal().sign() if bool(values[-1] > 1e-5 * values[0]) else None


def _places(mask: Tensor) -> Tensor:
    """Return the places of the True entries of each row (g, most), -1 where a row has fewer."""
    count = int(mask.sum(1).max()) if mask.numel() else 0
    index = mask.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :count]
    return index.where(mask.gather(1, index), -1)


def _columns_at(values: Tensor, places: Tensor) -> Tensor:
    """Return the columns of values (g, k, m) at places (g, c); zeros where a place is -1."""
    index = places.clamp_min(0)[:, None, :].expand(-1, values.shape[1], -1)
    return values.gather(2, index) * (places >= 0)[:, None, :]
