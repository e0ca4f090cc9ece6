"""The literal form by whole matrices: the same W, S_j and W_eff, wherever a basis lies."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trgp.core import drifting
from trgp.core.literal import effective_weight

STEPS = 30
RATE = 0.2
LOOSE = ["outside", "partly outside", "inside", "zero"]
EMPTY = "no column"


class Problem(NamedTuple):
    """A layer that learns a task, and what it trusts."""

    W: Tensor
    M: Tensor
    bases: list[Tensor]
    x: Tensor  # (STEPS, g, b, n)
    target: Tensor  # (STEPS, g, b, o)


class Literal(NamedTuple):
    """The paper's own variables."""

    W: Tensor
    S: list[Tensor]


def make_problem(
    seed: int, g: int, o: int, n: int, m: int, b: int, loose: list[str], inside: int | None = None
) -> Problem:
    """A basis for every word, which says where its last column lies; the others are some of M's.

    inside: how many others.
    """
    draw = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    Q = torch.linalg.qr(randn(g, n, n)).Q
    M = Q[:, :, :m]
    bases = []
    for word in loose:
        order = torch.randperm(m, generator=draw)
        some = int(torch.randint(0, m + 1, (), generator=draw))
        count = some if inside is None else inside
        chosen, left = order[:count], order[count:]
        parts = {"outside": Q[:, :, m:], "inside": M[:, :, left], "zero": Q[:, :, :0]}
        space = parts.get(word, torch.cat([parts["inside"], parts["outside"]], 2))
        if word == EMPTY:
            bases.append(M[:, :, :0])
            continue
        u = space @ randn(g, space.shape[2], 1)
        bases.append(torch.cat([M[:, :, chosen], u / u.norm(dim=1, keepdim=True).clamp(1e-9)], 2))
    return Problem(randn(g, o, n) / n**0.5, M, bases, randn(STEPS, g, b, n), randn(STEPS, g, b, o))


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y.tanh() - target).square().mean()


def begun(problem: Problem) -> Literal:
    widths = [B.shape[2] for B in problem.bases]
    return Literal(problem.W, [problem.W.new_zeros(len(problem.W), r, r) for r in widths])


def literal_step(problem: Problem, now: Literal, i: int, ratio: float) -> Literal:
    """Autograd through W_eff; the gradient of W is projected, Q is not constrained."""
    variables = [t.clone().requires_grad_() for t in (now.W, *now.S)]
    W_eff = effective_weight(variables[0], problem.bases, variables[1:])
    G, *grads = torch.autograd.grad(loss_of(problem.x[i] @ W_eff.mT, problem.target[i]), variables)
    W = now.W - RATE * (G - G @ problem.M @ problem.M.mT)
    return Literal(W, [S - ratio * RATE * d for S, d in zip(now.S, grads, strict=True)])


class Stacked:
    """The same layer as it is in a stack."""

    def __init__(self, problem: Problem, K: int, ratio: float, factored: bool) -> None:
        self.problem, self.ratio, self.factored, self.K = problem, ratio, factored, K
        C, M = problem.W @ problem.M, problem.M
        self.constant = [drifting.constant(M, C, B) for B in problem.bases]
        o = problem.W.shape[1]
        self.fixed = drifting.fixed(M, o, problem.bases, self.constant, K, ratio)
        self.enter(begun(problem))

    def enter(self, own: Literal) -> None:
        self.own = own
        self.W_eff, self.moving = drifting.enter(own.W, self.problem.bases, own.S, self.K)

    def step(self, i: int) -> None:
        x = self.problem.x[i]
        y = (x @ self.W_eff.mT).requires_grad_()
        (delta,) = torch.autograd.grad(loss_of(y, self.problem.target[i]), y)
        if not self.factored:
            o = delta.shape[2]
            x, delta = delta.mT @ x, torch.eye(o, dtype=x.dtype).expand(len(x), o, o)
        inputs = drifting.ahead(self.fixed, self.moving.s, x)
        self.W_eff, self.moving = drifting.step(
            self.fixed, self.moving, self.W_eff, delta, inputs, RATE, self.ratio
        )

    def leave(self) -> Literal:
        found = drifting.leave(
            self.moving, self.problem.bases, self.constant, self.own.S, self.ratio
        )
        return Literal(*found)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 2**31),
    g=st.integers(1, 2),
    o=st.integers(1, 6),
    n=st.integers(1, 8),
    b=st.integers(1, 5),
    loose=st.lists(st.sampled_from([*LOOSE, EMPTY]), max_size=3),
    more=st.integers(0, 2),
    ratio=st.sampled_from([1.0, 0.02, 2.5]),
    factored=st.booleans(),
    alone=st.booleans(),
    data=st.data(),
)
def test_it_takes_the_literal_steps(
    seed: int,
    g: int,
    o: int,
    n: int,
    b: int,
    loose: list[str],
    more: int,
    ratio: float,
    factored: bool,
    alone: bool,
    data: st.DataObject,
) -> None:
    """Also of a layer that may trust more tasks than it does, left and entered on the way."""
    m = data.draw(st.integers(0, n))
    problem = make_problem(seed, g, o, n, m, b, loose, 0 if alone else None)
    literal = begun(problem)
    stacked = Stacked(problem, max(1, len(loose) + more), ratio, factored)
    for i in range(STEPS):
        literal = literal_step(problem, literal, i, ratio)
        stacked.step(i)
        close(stacked.W_eff, effective_weight(literal.W, problem.bases, literal.S))
        if i % 10 == 9:
            found = stacked.leave()
            close(found.W, literal.W)
            for S, expected in zip(found.S, literal.S, strict=True):
                close(S, expected)
            stacked.enter(found)


@pytest.mark.parametrize("word", LOOSE)
def test_what_drifts_is_what_lies_outside(word: str) -> None:
    """Else the test above would prove little."""
    problem = make_problem(0, 1, 5, 8, 4, 3, [word, word], inside=2)
    stacked = Stacked(problem, 2, 0.5, True)
    first = stacked.moving.c
    for i in range(STEPS):
        stacked.step(i)
    drift = (stacked.moving.c - first).abs().max()
    assert drift > 1e-2 if "outside" in word else drift < 1e-12
    (_, S) = stacked.leave().S
    assert S[:, :-1].abs().max() > 1e-3
    assert (S[:, -1].abs().max() > 1e-3) == (word != "zero")


def test_there_and_back_it_is_what_it_was() -> None:
    """But for rounding, and whatever S_j is."""
    problem = make_problem(1, 1, 5, 8, 4, 3, ["partly outside", "outside"])
    draw = torch.Generator().manual_seed(0)
    S = [torch.randn(s.shape, generator=draw, dtype=s.dtype) for s in begun(problem).S]
    stacked = Stacked(problem, 3, 0.5, True)
    stacked.enter(Literal(problem.W, S))
    close(stacked.W_eff, effective_weight(problem.W, problem.bases, S))
    W, found = stacked.leave()
    assert torch.equal(W, problem.W)
    for one, other in zip(found, S, strict=True):
        close(one, other)


def test_runs_of_any_memory_and_trust_are_stacked() -> None:
    """Every run with a rate of its own; shapes depend on the layer and K alone."""
    trusts = [["outside", "partly outside"], ["zero"], []]
    problems = [make_problem(k, 1, 4, 6, 2 * k, 3, trust) for k, trust in enumerate(trusts)]
    runs = [Stacked(problem, 2, 0.5, True) for problem in problems]
    for run in runs:  # else W is all that has moved
        run.step(0)
    delta = torch.randn(3, 5, 4, dtype=torch.float64)
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    lr = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)

    def step(
        run: tuple[drifting.Fixed, drifting.Moving, Tensor], delta: Tensor, x: Tensor, lr: Tensor
    ) -> object:
        return drifting.step(*run, delta, drifting.ahead(run[0], run[1].s, x), lr, 0.5)

    own = [(run.fixed, run.moving, run.W_eff) for run in runs]
    together = torch.utils._pytree.tree_map(lambda *each: torch.stack(each), *own)
    found = torch.utils._pytree.tree_leaves(torch.vmap(step)(together, delta, x, lr))
    for k, now in enumerate(own):
        before = [tensor.clone() for tensor in torch.utils._pytree.tree_leaves(now)]
        alone = torch.utils._pytree.tree_leaves(step(now, delta[k], x[k], lr[k]))
        for tensor, kept in zip(torch.utils._pytree.tree_leaves(now), before, strict=True):
            assert torch.equal(tensor, kept)
        for stacked, expected in zip(found, alone, strict=True):
            close(stacked[k], expected)
