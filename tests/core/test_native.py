"""The native form is the literal one: same effective weight, same scalings, same shared weight."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trgp.core import native
from trgp.core.keep import with_coordinates
from trgp.core.literal import effective_weight
from trgp.core.products import plus_product
from trgp.core.subspace import columns_of

STEPS = 50
FORMS: list[native.Form] = ["gradient", "factored"]


class Problem(NamedTuple):
    """One layer that starts a new task: its weight, its memory, the trusted tasks and the data."""

    W: Tensor
    M: Tensor
    masks: list[Tensor]
    x: Tensor  # (STEPS, g, b, n)
    target: Tensor  # (STEPS, g, b, o)


class Literal(NamedTuple):
    """The paper's own variables and the momentum of each."""

    W: Tensor
    S: list[Tensor]
    VW: Tensor
    VS: list[Tensor]


class Schedule(NamedTuple):
    """A rate that changes at every step, and that of Q as a multiple of it."""

    mu: float = 0.0
    nesterov: bool = False
    ratio: float = 0.4

    def rate(self, step: int) -> float:
        return 0.3 / (1 + step / 20)


def make_problem(
    seed: int, g: int, o: int, n: int, K: int, b: int, ranks: list[int] | None = None
) -> Problem:
    """Groups differ in rank, bases overlap, and one task is older than the newest columns of M."""
    draw = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    def randint(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw))

    ranks = [randint(0, n + 1) for _ in range(g)] if ranks is None else ranks
    m = max(ranks)
    used = torch.arange(m) < torch.tensor(ranks)[:, None]
    M = torch.linalg.qr(randn(g, n, n)).Q[:, :, :m] * used[:, None]
    masks = [(torch.rand(g, m, generator=draw) < 0.6) & used for _ in range(K)]
    if masks:
        masks[0] = masks[0][:, : randint(0, m + 1)]
    x = randn(STEPS, g, b, n)
    x[..., -1] = 1  # a bias
    return Problem(randn(g, o, n) / n**0.5, M, masks, x, randn(STEPS, g, b, o))


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y.tanh() - target).square().mean()


def bases(problem: Problem) -> list[Tensor]:
    return [columns_of(problem.M, mask) for mask in problem.masks]


def literal_begin(problem: Problem) -> Literal:
    S = [problem.W.new_zeros(len(B), B.shape[2], B.shape[2]) for B in bases(problem)]
    return Literal(problem.W, S, torch.zeros_like(problem.W), [torch.zeros_like(s) for s in S])


def literal_step(problem: Problem, now: Literal, step: int, schedule: Schedule) -> Literal:
    """Autograd through W_eff; the gradient of W is projected, Q is not constrained."""
    lr = schedule.rate(step)
    variables = [t.clone().requires_grad_() for t in (now.W, *now.S)]
    W_eff = effective_weight(variables[0], bases(problem), variables[1:])
    loss = loss_of(problem.x[step] @ W_eff.mT, problem.target[step])
    G, *grads = torch.autograd.grad(loss, variables)
    G = G - G @ problem.M @ problem.M.mT
    V = [schedule.mu * v + d for v, d in zip((now.VW, *now.VS), (G, *grads), strict=True)]
    along = [d + schedule.mu * v for v, d in zip(V, (G, *grads), strict=True)]
    D = along if schedule.nesterov else V
    S = [s - schedule.ratio * lr * d for s, d in zip(now.S, D[1:], strict=True)]
    return Literal(now.W - lr * D[0], S, V[0], V[1:])


def factors(problem: Problem, W: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """(delta, x) of the layer with effective weight W."""
    y = (problem.x[step] @ W.mT).requires_grad_()
    (delta,) = torch.autograd.grad(loss_of(y, problem.target[step]), y)
    return delta, problem.x[step]


def along_of(task: native.Task, form: native.Form, delta: Tensor, x: Tensor) -> Tensor:
    """What a step moves along, as one matrix."""
    if form == "factored":
        left, right = native.scaled_factors(task, delta, x)
        return left.mT @ right
    G = delta.mT @ x
    left, right = native.scaled_excess(task, G)
    return G - left.mT @ right


Snapshot = tuple[Tensor, Tensor]  # the effective weight and the momentum
Step = Callable[[Snapshot, int], Snapshot]


def native_run(
    form: native.Form, problem: Problem, schedule: Schedule
) -> tuple[native.Task, Snapshot, Step]:
    task = native.begin(problem.W, problem.M, problem.masks, form, schedule.ratio)

    def step(now: Snapshot, i: int) -> Snapshot:
        W, V = now
        D = along_of(task, form, *factors(problem, W, i))
        V = schedule.mu * V + D
        return W - schedule.rate(i) * (D + schedule.mu * V if schedule.nesterov else V), V

    return task, (problem.W, torch.zeros_like(problem.W)), step


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    g=st.integers(1, 3),
    o=st.integers(1, 7),
    n=st.integers(1, 9),
    K=st.integers(1, 4),
    b=st.integers(1, 6),
    schedule=st.sampled_from([Schedule(), Schedule(0.9), Schedule(0.8, nesterov=True)]),
    best=st.integers(0, STEPS - 1),
    restored=st.integers(0, STEPS - 1),
)
def test_equals_the_literal_form(
    form: native.Form,
    seed: int,
    g: int,
    o: int,
    n: int,
    K: int,
    b: int,
    schedule: Schedule,
    best: int,
    restored: int,
) -> None:
    """Over 50 steps, going back to an earlier snapshot on the way."""
    problem = make_problem(seed, g, o, n, K, b)
    literal = kept = literal_begin(problem)
    task, now, step = native_run(form, problem, schedule)
    snapshot = now
    for i in range(STEPS):
        literal = literal_step(problem, literal, i, schedule)
        now = step(now, i)
        if i == best:
            kept, snapshot = literal, now
        if i == restored:
            literal, now = kept, snapshot
    W, _ = now
    close(W, effective_weight(literal.W, bases(problem), literal.S))
    close(with_coordinates(W, task.M, task.C), literal.W)
    found = native.scalings(task, W)
    close(effective_weight(literal.W, bases(problem), found), W)
    for S, expected in zip(found, literal.S, strict=True):
        # A weight that all but ignores a direction has all but forgotten how it was scaled there.
        torch.testing.assert_close(S, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("rows", [1, 3, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scalings_found_in_a_weight_make_that_weight(rows: int, dtype: torch.dtype) -> None:
    """Also where C is nearly or wholly singular, as in a layer that lost some of its outputs."""
    problem = make_problem(7, 2, 12, 9, 2, 4, [8, 6])
    W = problem.W.clone()
    W[:, rows:] *= 1e-9
    W, M = W.to(dtype), problem.M.to(dtype)
    task = native.begin(W, M, problem.masks, "gradient")
    eff = W
    for i in range(STEPS):
        delta, x = factors(problem, eff.double(), i)
        G = (delta.mT @ x).to(dtype)
        left, right = native.scaled_excess(task, G)
        eff = native.taken_off(eff - 0.1 * G, native.Product(-0.1 * left, right))
    found = native.scalings(task, eff)
    assert all(S.dtype == dtype and bool(S.isfinite().all()) for S in found)
    shared = with_coordinates(eff, task.M, task.C)
    made = effective_weight(shared, [columns_of(M, mask) for mask in problem.masks], found)
    torch.testing.assert_close(made, eff, rtol=0, atol=50 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("form", FORMS)
def test_without_old_tasks_it_is_gpm_and_without_memory_sgd(form: native.Form) -> None:
    for ranks in ([4, 2], [0, 0]):
        problem = make_problem(0, 2, 3, 6, 0, 4, ranks)
        _, now, step = native_run(form, problem, Schedule())
        W = problem.W
        for i in range(STEPS):
            delta, x = factors(problem, W, i)
            G = delta.mT @ x
            W = W - Schedule().rate(i) * (G - G @ problem.M @ problem.M.mT)
            now = step(now, i)
        close(now[0], W)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("o", [2, 40])
def test_both_gains_agree(form: native.Form, o: int) -> None:
    """A narrow layer keeps the A_j, a wide one goes through C; either may stand in."""
    problem = make_problem(1, 2, o, 9, 3, 4, [7, 5])
    task = native.begin(problem.W, problem.M, problem.masks, form, 2.0)
    C_j = task.C[:, None] * task.masks[:, :, None]
    A, N = (C_j @ C_j.mT).transpose(1, 2), task.masks.mT @ task.masks
    assert task.gain.shape == (A if o == 2 else N).shape
    given = factors(problem, problem.W, 0)
    either = [task._replace(gain=gain) for gain in (A, 2.0 * N)]
    close(*(along_of(one, form, *given) for one in either))


class Stacked(NamedTuple):
    """One run among several of equal shapes: constants, weight, factors."""

    task: native.Task
    dense: native.Dense
    W: Tensor
    delta: Tensor
    x: Tensor


def stacked_problems() -> list[Stacked]:
    """Runs of different ranks, padded to one width as vmap needs it."""
    problems = [make_problem(seed, 1, 4, 6, 2, 3, [rank]) for seed, rank in enumerate([2, 5, 0])]
    runs = []
    for p in problems:
        M = torch.nn.functional.pad(p.M, (0, 5 - p.M.shape[2]))
        task = native.begin(p.W, M, p.masks, "factored")
        delta, x = factors(p, p.W, 0)
        runs.append(Stacked(task, native.dense(task, 2, 3.0), p.W, delta[0], x[0]))
    return runs


def every_step(run: Stacked, lr: Tensor) -> list[Tensor]:
    """The weight after one step of every kind."""
    task, dense, W, delta, x = run
    G = (delta.mT @ x)[None]
    P = native.outside(task.M)
    along = [
        native.scaled_factors(task, delta, x),
        native.scaled_excess(task, G),
        native.dense_factors(dense, delta, native.projected(dense.P, x)),
        native.dense_gradient(dense, G),
        native.free_factors(task.M, delta, x),
        native.free_excess(task.M, G),
        native.narrowed_factors(delta, native.projected(P, x)),
    ]
    return [native.taken_off(W.clone(), native.Product(lr * left, right)) for left, right in along]


def test_runs_under_vmap() -> None:
    """Every run with rates of its own, as plain (b, o) and (b, n) factors."""
    runs = stacked_problems()
    lr = torch.tensor([0.1, 0.2, 0.3])
    together = torch.utils._pytree.tree_map(lambda *each: torch.stack(each), *runs)
    batched = torch.func.vmap(every_step)(together, lr)
    for i, run in enumerate(runs):
        for stacked, alone in zip(batched, every_step(run, lr[i]), strict=True):
            close(stacked[i], alone)


def test_steps_depend_on_shapes_alone() -> None:
    """Tensors without data refuse whatever a CUDA graph would: reading a value on the host."""
    rate = torch.empty((), device="meta")
    run = torch.utils._pytree.tree_map(lambda tensor: tensor.to("meta"), stacked_problems()[0])
    every_step(run, rate)


@pytest.mark.parametrize("form", FORMS)
@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    g=st.integers(1, 3),
    o=st.integers(1, 7),
    n=st.integers(1, 9),
    b=st.integers(1, 6),
    K=st.integers(0, 3),
    more=st.integers(0, 2),
    data=st.data(),
)
def test_whole_matrices_take_the_same_steps(
    form: native.Form, seed: int, g: int, o: int, n: int, b: int, K: int, more: int, data: Any
) -> None:
    """Also of a layer that may trust more tasks than it does, and of one that trusts nobody."""
    ranks = data.draw(st.lists(st.integers(0, n), min_size=g, max_size=g))
    ratio = data.draw(st.sampled_from([1.0, 0.02, 3.0]))
    problem = make_problem(seed, g, o, n, K, b, ranks)
    task = native.begin(problem.W, problem.M, problem.masks, form, ratio)
    dense, P = native.dense(task, K + more, ratio), native.outside(problem.M)
    for i in range(3):
        delta, x = factors(problem, problem.W, i)
        G = delta.mT @ x
        if form == "gradient":
            whole, free = native.dense_gradient(dense, G), native.free_excess(problem.M, G)
            narrowed = native.Product(G.mT, P)
        else:
            whole = native.dense_factors(dense, delta, native.projected(dense.P, x))
            free = native.free_factors(problem.M, delta, x)
            narrowed = native.narrowed_factors(delta, native.projected(P, x))
        plain, sign = (G, -1) if form == "gradient" else (torch.zeros_like(G), 1)
        close(whole.left.mT @ whole.right, along_of(task, form, delta, x))
        close(narrowed.left.mT @ narrowed.right, plain + sign * free.left.mT @ free.right)


def test_shapes_of_whole_matrices_depend_on_the_layer_alone() -> None:
    """So runs of any memory and trust can be stacked."""
    shapes = set()
    for K in range(4):
        for rank in range(7):
            problem = make_problem(K, 1, 4, 6, K, 3, [rank])
            task = native.begin(problem.W, problem.M, problem.masks, "gradient")
            shapes.add(tuple(t.shape for t in native.dense(task, 3, 1.0)))
    assert shapes == {((1, 6, 24), (1, 4, 16))}


@pytest.mark.parametrize("g", [1, 2])
@pytest.mark.parametrize("stacked", ["XAB", "XA", "XB", "AB", "A", "X"])
def test_a_sum_with_a_product_under_vmap_is_that_of_each(g: int, stacked: str) -> None:
    """Whichever of the three differ from run to run, and wherever their axis is."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"X": (g, 3, 5), "A": (g, 3, 4), "B": (g, 4, 5)}
    given = {
        name: torch.randn(*(6,) * (name in stacked), *shape, generator=draw, dtype=torch.float64)
        for name, shape in shapes.items()
    }
    for axis in (0, 1, -1):
        for alpha in (1, -1, 0.5):
            dims = tuple(axis if name in stacked else None for name in "XAB")
            moved = [t.movedim(0, axis) if n in stacked else t for n, t in given.items()]
            found = torch.vmap(partial(plus_product, alpha=alpha), in_dims=dims)(*moved)
            for k in range(6):
                X, A, B = (t[k] if n in stacked else t for n, t in given.items())
                torch.testing.assert_close(found[k], X + alpha * A @ B, rtol=0, atol=1e-13)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_steps_are_captured() -> None:
    run = torch.utils._pytree.tree_map(lambda tensor: tensor.cuda(), stacked_problems()[1])
    lr = torch.tensor(0.1, device="cuda")
    every_step(run, lr)  # libraries are set up before a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = every_step(run, lr)
    lr.fill_(0.3)
    graph.replay()
    for got, expected in zip(captured, every_step(run, lr), strict=True):
        close(got, expected)


def test_the_cheaper_form_is_chosen_by_counting() -> None:
    # The MLP's first layer at batch 10 and AlexNet's widest layer at batch 64: few samples.
    assert native.cheaper_form(10, 2, 1, 100, 784, 235) == "factored"
    assert native.cheaper_form(64, 2, 1, 2048, 2048, 1434) == "factored"
    # More samples than the weight has rows or columns: their sum is the smaller thing to project.
    assert native.cheaper_form(4096, 2, 1, 100, 784, 235) == "gradient"
    # Nothing to project: neither form does anything but form the gradient.
    assert native.costs(10, 0, 2, 3, 5, 0) == {"gradient": 300, "factored": 300}
    # Worked by hand for b = 2, K = 1, g = 1, o = 3, n = 5, m = 4.
    assert native.costs(2, 1, 1, 3, 5, 4) == {
        "gradient": 30 + 2 * 60 + 36,
        "factored": 40 + 2 * 40 + 2 * 30 + 18,
    }


def test_whole_matrices_are_for_small_layers() -> None:
    """Measured on one core: 0.09 ms, not 0.13, for the first; 0.88, not 0.41, for the second."""
    assert native.dense_pays(10, 2, 1, 100, 100, 30)
    assert not native.dense_pays(10, 2, 1, 100, 784, 235)
    assert not native.dense_pays(64, 2, 1, 2048, 2048, 614)
    # A wide layer with few inputs: its outputs' products would be the most expensive part.
    assert not native.dense_pays(128, 2, 1, 256, 3, 2)
    counted = native.dense_costs(128, 2, 1, 256, 3)
    assert counted["gradient"] < counted["factored"]
    # Worked by hand for b = 2, K = 1, g = 1, o = 3, n = 5.
    assert native.dense_costs(2, 1, 1, 3, 5) == {
        "gradient": 30 + 2 * 15 * 8,
        "factored": 2 * 2 * (25 + 9 + 15),
    }
