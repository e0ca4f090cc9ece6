"""Layers with random memories and trusted tasks, as hypothesis draws them."""

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from trgp.core.keep import Region
from trgp.core.memory import Memory


class Trusting(NamedTuple):
    """A layer's shared weight and memory, and the old tasks that a new one trusts."""

    W: Tensor  # (g, o, n)
    memory: Memory
    trusted: list[int | str]

    @property
    def region(self) -> Region:
        """What the new task may reach."""
        return self.memory.region(self.trusted)

    def scaled(self, scalings: list[Tensor]) -> Tensor:
        """W + sum_j W B_j S_j B_j', the effective weight as the paper writes it, S_j = Q_j - I."""
        total = self.W.clone()
        for j, S in zip(self.trusted, scalings, strict=True):
            B = self.memory.basis(j)
            total += self.W @ B @ S @ B.mT
        return total

    def some_scalings(self) -> list[Tensor]:
        """Random S_j, zero in columns that a group does not use."""
        found = []
        for j in self.trusted:
            B = self.memory.basis(j)
            used = B.norm(dim=1) > 0.5
            S = torch.randn(len(B), B.shape[2], B.shape[2], dtype=B.dtype)
            found.append(S * used[:, None, :] * used[:, :, None])
        return found


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def a_case(
    groups: int,
    outputs: int,
    inputs: int,
    ranks: list[int],
    tasks: int,
    dtype: torch.dtype = torch.float64,
) -> Trusting:
    """Each task holds a random half of the columns there were when it ended."""
    width = max(ranks)
    used = torch.arange(width) < torch.tensor(ranks)[:, None]
    M = torch.linalg.qr(random(groups, inputs, inputs, dtype=dtype)).Q[:, :, :width]
    M = M * used[:, None, :]
    W = random(groups, outputs, inputs, dtype=dtype)
    masks: dict[int | str, Tensor] = {}
    for j in range(tasks):
        then = int(torch.randint(0, width + 1, ())) if j < tasks - 1 else width
        masks[j] = ((torch.rand(groups, width) < 0.5) & used)[:, :then]
    trusted = [int(j) for j in torch.randperm(tasks)]
    return Trusting(W, Memory(M, W @ M, torch.tensor(ranks), masks), list(trusted))


@st.composite
def cases(draw: st.DrawFn, most_tasks: int = 3, least_tasks: int = 0) -> Trusting:
    """A layer of up to three groups, of any ranks, with any trusted tasks."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    groups, outputs = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    inputs = draw(st.integers(1, 8))
    ranks = draw(st.lists(st.integers(0, inputs), min_size=groups, max_size=groups))
    return a_case(groups, outputs, inputs, ranks, draw(st.integers(least_tasks, most_tasks)))
