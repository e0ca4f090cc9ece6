"""The literal form's weight in few products: what autograd makes of the paper's formula."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trgp.core import literal
from trgp.core.literal import effective_weight


def orthonormal(draw: torch.Generator, g: int, n: int, m: int) -> Tensor:
    return torch.linalg.qr(torch.randn(g, n, m, generator=draw, dtype=torch.float64)).Q


@given(
    seed=st.integers(0, 2**31),
    g=st.integers(1, 2),
    o=st.integers(1, 6),
    n=st.integers(4, 9),
    tasks=st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=3),
)
def test_the_weight_and_the_projected_gradients_are_autograds(
    seed: int, g: int, o: int, n: int, tasks: list[tuple[int, bool]]
) -> None:
    """Of tasks with so many directions in M each, some with a loose one beside them."""
    draw = torch.Generator().manual_seed(seed)
    M = orthonormal(draw, g, n, 3)
    bases, loose, at = [], [], 0
    for inside, has_loose in tasks:
        parts = [M[..., torch.randperm(3, generator=draw)[:inside]]]
        if has_loose:
            parts.append(orthonormal(draw, g, n, 1))  # anywhere
        bases.append(torch.cat(parts, 2))
        at += bases[-1].shape[2]
        if len(parts) > 1:
            loose.append(at - 1)
    W = torch.randn(g, o, n, generator=draw, dtype=torch.float64, requires_grad=True)
    scalings = [
        torch.randn(g, B.shape[2], B.shape[2], generator=draw, dtype=torch.float64) for B in bases
    ]
    G = torch.randn(g, o, n, generator=draw, dtype=torch.float64)
    each = [S.clone().requires_grad_() for S in scalings]
    expected = effective_weight(W, bases, each)
    dW, *dS = torch.autograd.grad(expected, [W, *each], G)

    widths = [B.shape[2] for B in bases]
    S = torch.zeros(g, sum(widths), sum(widths), dtype=torch.float64)
    for part, own in zip(literal.on_diagonal(S, widths), scalings, strict=True):
        part.copy_(own)
    S.requires_grad_()
    B = torch.cat(bases, 2)
    places = torch.tensor(loose, dtype=torch.long)
    # What drifts is not read from here.
    C = (W.detach() @ B).index_fill(2, places, torch.nan)
    found = literal.scaled(W, S, literal.Trusted(B, C, B[..., places], places), widths)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    own_dW, own_dS = torch.autograd.grad(found, [W, S], G)
    outside = torch.eye(n, dtype=torch.float64) - M @ M.mT
    torch.testing.assert_close(own_dW @ outside, dW @ outside, rtol=1e-10, atol=1e-10)
    for part, gradient in zip(literal.on_diagonal(own_dS, widths), dS, strict=True):
        torch.testing.assert_close(part, gradient, rtol=1e-10, atol=1e-10)
    assert own_dS.norm() == pytest.approx(torch.stack([d.norm() for d in dS]).norm())


def test_blocks_are_views() -> None:
    S = torch.zeros(1, 6, 6)
    for j, (block, end) in enumerate(
        zip(literal.on_diagonal(S, [1, 2, 3]), accumulate([1, 2, 3]), strict=True)
    ):
        block.fill_(j + 1)
        assert S[0, end - 1, end - 1] == j + 1
    assert S.sum() == 1 + 2 * 4 + 3 * 9


def test_nothing_is_rounded_beside_a_rounded_network() -> None:
    """Neither forward nor backward, nor is a type mixed with another on the way."""
    draw = torch.Generator().manual_seed(0)
    W = torch.randn(1, 4, 6, generator=draw, requires_grad=True)
    B = orthonormal(draw, 1, 6, 3).float()
    S = torch.randn(1, 3, 3, generator=draw, requires_grad=True)
    places = torch.tensor([2])
    task = literal.Trusted(B, W.detach() @ B, B[..., places], places)
    plain = literal.scaled(W, S, task, [3])
    expected = torch.autograd.grad(plain.square().sum(), [W, S])
    with torch.autocast("cpu", torch.bfloat16):
        rounded = literal.scaled(W, S, task, [3])
        found = torch.autograd.grad(rounded.square().sum(), [W, S])
    assert torch.equal(rounded, plain)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
