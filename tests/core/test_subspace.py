"""The bases of a task against a direct SVD of its inputs (paper, section 4.3)."""

import itertools

import pytest
import torch
from helpers import assert_close, classification, learn, mse
from hypothesis import given
from hypothesis import strategies as st
from support.inside import bases, memories
from torch import Tensor, nn

from trgp import GPM, TRGP
from trgp.core.capture import Gram
from trgp.core.memory import Memory
from trgp.core.subspace import Extension, columns_of, complement, extend, put_columns

EPS = torch.finfo(torch.float64).eps


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def empty(groups: int, n: int, dtype: torch.dtype = torch.float64) -> Extension:
    """Before the first task."""
    M = torch.zeros(groups, n, 0, dtype=dtype)
    return Extension(M, torch.zeros(groups, dtype=torch.long), torch.zeros(groups, 0).bool())


def after(
    before: Extension,
    R: Tensor,
    threshold: float,
    *,
    pooled: bool = True,
    eps: float = EPS,
    known: bool = True,
) -> Extension:
    """The memory extended by a task with inputs R (g, n, N), if they are known, else by A alone."""
    n, count = R.shape[1:]
    few = [R.double()] if known and 0 < 2 * count < n else []
    gram = Gram((R @ R.mT).double(), count, eps, few)
    return extend(before.M, before.ranks, gram, threshold=threshold, pooled=pooled)


def reference(M: Tensor, R: Tensor, threshold: float, pooled: bool) -> tuple[Tensor, list[bool]]:
    """New directions, and which old ones are chosen, by SVD as the papers write it."""
    U, s, _ = torch.linalg.svd(R - M @ (M.T @ R), full_matrices=False)
    goal = threshold * R.square().sum()
    if not pooled:  # GPM: new directions until, with all of the old, the goal is reached
        held = R.square().sum() - s.square().sum()
        count = 0
        while held < goal:
            held = held + s[count] ** 2
            count += 1
        return U[:, :count], []
    delta = (M.T @ R).square().sum(1)
    pool = [(float(d), i, True) for i, d in enumerate(delta)]
    pool += [(float(v) ** 2, i, False) for i, v in enumerate(s)]
    chosen, held = [], 0.0
    for energy, i, old in sorted(pool, reverse=True):
        if held >= goal:
            break
        held += energy
        chosen.append((i, old))
    new = [i for i, old in chosen if not old]
    return U[:, new], [(i, True) in chosen for i in range(M.shape[1])]


def projector(B: Tensor) -> Tensor:
    return B @ B.mT


# ---- against the SVD ---------------------------------------------------------------------------


@pytest.mark.parametrize("pooled", [True, False], ids=["TRGP", "GPM"])
@given(
    seed=st.integers(0, 2**31),
    groups=st.integers(1, 3),
    n=st.integers(2, 12),
    samples=st.lists(st.integers(1, 15), min_size=1, max_size=4),
    threshold=st.floats(0.3, 0.999),
)
def test_it_chooses_what_the_svd_chooses(
    pooled: bool, seed: int, groups: int, n: int, samples: list[int], threshold: float
) -> None:
    """Task by task: the same new directions, the same old ones, in groups of different ranks."""
    torch.manual_seed(seed)
    memory = empty(groups, n)
    for N in samples:
        R = (
            randn(groups, n, n)
            @ torch.diag(torch.logspace(0, -2, n).double())
            @ randn(groups, n, N)
        )
        old, memory = memory, after(memory, R, threshold, pooled=pooled)
        for g in range(groups):
            rank = int(old.ranks[g])
            fresh, kept = reference(old.M[g, :, :rank], R[g], threshold, pooled)
            assert torch.equal(memory.M[g, :, :rank], old.M[g, :, :rank])  # for good
            got = memory.M[g, :, rank : int(memory.ranks[g])]
            assert got.shape == fresh.shape
            assert_close(projector(got), projector(fresh), 1e-6)
            assert not memory.M[g, :, int(memory.ranks[g]) :].any()
            if pooled:
                assert memory.mask[g, :rank].tolist() == kept
                assert memory.mask[g, rank:].sum() == fresh.shape[1]


@given(seed=st.integers(0, 2**31), threshold=st.floats(0.3, 0.999), before=st.integers(0, 8))
def test_a_tasks_basis_is_the_shortest_that_reaches_the_threshold(
    seed: int, threshold: float, before: int
) -> None:
    torch.manual_seed(seed)
    memory = empty(1, 8)
    if before:
        memory = after(memory, randn(1, 8, before), 1.0)
    R = randn(1, 8, 20) * torch.logspace(0, -2, 8).double()[:, None]
    new = after(memory, R, threshold)
    B = columns_of(new.M, new.mask)
    held = (B.mT @ R).square().sum((0, 2)).sort().values
    goal = threshold * R.square().sum()
    assert held.sum() >= goal * (1 - 1e-12)
    assert held[1:].sum() < goal
    assert_close(B.mT @ B, torch.eye(B.shape[2]).double()[None])


@given(seed=st.integers(0, 2**31), threshold=st.floats(0.3, 0.999))
def test_gpm_adds_the_fewest_directions_that_reach_the_threshold(
    seed: int, threshold: float
) -> None:
    """All of the memory counts, also the directions that hold little of the new task."""
    torch.manual_seed(seed)
    first = after(empty(1, 8), randn(1, 8, 3), 1.0, pooled=False)
    R = randn(1, 8, 20)
    second = after(first, R, threshold, pooled=False)

    def held(columns: int) -> Tensor:
        return (second.M[:, :, :columns].mT @ R).square().sum()

    goal, rank = threshold * R.square().sum(), int(second.ranks)
    assert held(rank) >= goal * (1 - 1e-12)
    assert rank == 3 or held(rank - 1) < goal


def test_gpm_and_trgp_differ_where_old_directions_hold_little() -> None:
    """Pooled, a strong new direction is taken before a weak old one; that is all of the rule."""
    e = torch.eye(4).double()[None]
    first = after(empty(1, 4), e[:, :, :1], 1.0)
    R = torch.cat([0.5 * e[:, :, :1], e[:, :, 1:2]], dim=2)  # energies 0.25 and 1: 20 % and 80 %
    trgp, gpm = after(first, R, 0.7), after(first, R, 0.15, pooled=False)
    assert trgp.ranks.tolist() == [2]
    assert trgp.mask.tolist() == [[False, True]]
    assert gpm.ranks.tolist() == [1]
    assert after(first, R, 0.15).mask.tolist() == [[False, True]]


# ---- numerical zeros ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("samples", [7, 12, 400], ids=lambda n: f"{n} samples")
@pytest.mark.parametrize("pooled", [True, False], ids=["TRGP", "GPM"])
@pytest.mark.parametrize("width", [6, 40, 300])
def test_rank_five_stays_five(dtype: torch.dtype, samples: int, pooled: bool, width: int) -> None:
    """At threshold 1.0 rounding is not collected, however often the span comes back."""
    directions = torch.randn(5, width, dtype=dtype)
    memory = empty(1, width, dtype)
    for task in range(6):
        gram = Gram(torch.zeros(1, width, width, dtype=torch.float64))
        x = 10.0 ** (task - 3) * torch.randn(samples, 5, dtype=dtype) @ directions
        for part in x.split(5):
            gram.add(part[None])
        memory = extend(memory.M, memory.ranks, gram, threshold=1.0, pooled=pooled)
        assert memory.ranks.tolist() == [5]
        assert memory.mask.tolist() == [[True] * 5]


@pytest.mark.parametrize("method", [GPM, TRGP])
def test_rank_five_stays_five_through_a_network(method: type[GPM]) -> None:
    """A deep linear net in float32: five directions in every layer, task after task."""
    sizes = itertools.pairwise((60, 50, 40, 3))
    model = nn.Sequential(*(nn.Linear(n, o, bias=False) for n, o in sizes))
    directions = torch.randn(5, 60)
    teacher = torch.randn(60, 3)
    learner = method(model, threshold=1.0)
    for task in range(5):
        x = torch.randn(30, 5) @ directions
        learn(learner, task, [(x, x @ teacher)], mse, steps=10, lr=1e-4)
        assert [rank for rank, _ in learner.ranks.values()] == [5, 5, 5]


def test_a_direction_above_the_zero_is_kept_and_below_it_is_not() -> None:
    """n * eps * lambda_max, in squared singular values, is the line."""
    n, eps = 10, 1e-6
    e = torch.eye(n).double()[None]
    for factor, rank in ((1.2, 2), (0.8, 1)):
        R = torch.cat([e[:, :, :1], (factor * n * eps) ** 0.5 * e[:, :, 1:2]], dim=2)
        assert after(empty(1, n), R, 1.0, eps=eps).ranks.tolist() == [rank]


def test_at_one_nothing_is_lost_to_rounding_sums() -> None:
    """A direction just above the zero is less than the rounding of the sum of all the others."""
    n = 300
    weak = (1.5 * n * EPS) ** 0.5
    strengths = torch.tensor([1.0] * (n - 1) + [weak], dtype=torch.float64)
    for _ in range(3):
        R = torch.linalg.qr(randn(1, n, n)).Q * strengths
        assert after(empty(1, n), R, 1.0).ranks.tolist() == [n]


def test_an_old_direction_that_a_task_does_not_use_is_not_in_its_basis() -> None:
    e = torch.eye(5).double()[None]
    first = after(empty(1, 5), e[:, :, :2] * torch.tensor([2.0, 1.0]), 1.0)
    second = after(first, e[:, :, 1:4], 1.0)
    assert first.mask.tolist() == [[True, True]]
    assert second.mask.sum() == 3
    B = columns_of(second.M, second.mask)
    assert_close(projector(B)[0], torch.diag(torch.tensor([0.0, 1, 1, 1, 0])).double(), 1e-12)


@pytest.mark.parametrize("threshold", [0.9, 0.999999, 1.0])
@pytest.mark.parametrize("spread", [1, 3, 6])
def test_few_columns_give_what_all_eigenvectors_give(threshold: float, spread: int) -> None:
    """R'R against the whole eigenproblem, with singular values over decades."""
    n, memory, direct = 60, empty(2, 60), empty(2, 60)
    for N in (1, 5, 20, 29):
        R = torch.linalg.qr(randn(2, n, N)).Q * torch.logspace(0, -spread, N).double()
        R = R @ torch.linalg.qr(randn(2, N, N)).Q
        memory, direct = after(memory, R, threshold), after(direct, R, threshold, known=False)
        assert memory.ranks.tolist() == direct.ranks.tolist()
        assert torch.equal(memory.mask, direct.mask)
        # A Gram matrix resolves directions to eps * lambda_max / lambda.
        assert_close(projector(memory.M), projector(direct.M), 1e-14 * 100**spread)
        assert_close(memory.M.mT @ R, memory.M.mT @ projector(direct.M) @ R, 1e-10)


# ---- the shape of the memory -------------------------------------------------------------------


def test_groups_have_ranks_of_their_own() -> None:
    """A group of lower rank is padded with zero columns, and fills them later."""
    e = torch.eye(6).double()
    R = torch.stack([e[:, :4], torch.cat([e[:, :1]] * 4, dim=1)])
    first = after(empty(2, 6), R, 1.0)
    assert first.ranks.tolist() == [4, 1]
    assert first.M.shape == (2, 6, 4)
    assert first.mask.tolist() == [[True] * 4, [True, False, False, False]]
    second = after(first, R.flip(0), 1.0)
    assert second.ranks.tolist() == [4, 4]
    assert second.M.shape == (2, 6, 4)
    assert second.mask.sum(1).tolist() == [1, 4]
    for g in range(2):
        assert_close(second.M[g].T @ second.M[g], torch.eye(4).double())


def test_nothing_seen_adds_nothing() -> None:
    first = after(empty(1, 4), randn(1, 4, 2), 0.9)
    for memory in (empty(1, 4), first):
        unused = after(memory, torch.zeros(1, 4, 0).double(), 0.9)
        assert torch.equal(unused.M, memory.M)
        assert not unused.mask.any()


def test_old_bases_that_suffice_leave_the_memory_as_it_is() -> None:
    directions = randn(6, 3)
    first = after(empty(1, 6), (directions @ randn(3, 10))[None], 1.0)
    again = after(first, (directions[:, :2] @ randn(2, 10))[None], 1.0)
    assert torch.equal(again.M, first.M)
    assert again.mask.any()


def test_a_full_memory_stays_full_also_after_a_cast() -> None:
    """A basis rounded to float32 leaves a residual that float64 would take for directions."""
    M = torch.linalg.qr(randn(1, 6, 6)).Q.float().double()
    full = Extension(M, torch.tensor([6]), torch.ones(1, 6).bool())
    for samples in (2, 20):
        again = after(full, randn(1, 6, samples), 1.0)
        assert torch.equal(again.M, M)
        assert again.ranks.tolist() == [6]


@given(seed=st.integers(0, 2**31), ranks=st.lists(st.integers(0, 7), min_size=1, max_size=3))
def test_the_complement_is_all_the_rest(seed: int, ranks: list[int]) -> None:
    torch.manual_seed(seed)
    counts = torch.tensor(ranks)
    used = torch.arange(max(ranks)) < counts[:, None]
    M = torch.linalg.qr(randn(len(ranks), 7, 7)).Q[:, :, : max(ranks)] * used[:, None]
    N = complement(M, counts)
    assert N.shape[2] == 7 - min(ranks)
    assert_close(projector(M) + projector(N), torch.eye(7).double().expand(len(ranks), -1, -1))


@given(seed=st.integers(0, 2**31), groups=st.integers(1, 3), m=st.integers(0, 6))
def test_columns_are_picked_and_put_back(seed: int, groups: int, m: int) -> None:
    torch.manual_seed(seed)
    M, mask = randn(groups, 4, m), torch.rand(groups, m) < 0.5
    picked = columns_of(M, mask)
    for g in range(groups):
        count = int(mask[g].sum())
        assert torch.equal(picked[g, :, :count], M[g][:, mask[g]])
        assert not picked[g, :, count:].any()
    assert torch.equal(put_columns(picked, mask, m + 2)[:, :, :m], M * mask[:, None])


def test_frozen_coordinates_are_never_rounded_again() -> None:
    """A memory grown by a task keeps the bits of what it held, whatever W has become."""
    R, W = torch.randn(1, 5, 2), torch.randn(1, 3, 5)
    start = Memory.empty(1, 3, 5, like=W)
    first = start.grown(after(empty(1, 5, torch.float32), R, 1.0, eps=1e-7), W, "a")
    assert_close(first.C, W @ first.M, 1e-6)
    other = Extension(first.M, first.ranks, first.masks["a"])
    moved = W + 1e-3
    second = first.grown(after(other, torch.randn(1, 5, 1), 1.0, eps=1e-7), moved, "b")
    assert torch.equal(second.C[:, :, :2], first.C)
    assert_close(second.C[:, :, 2:], moved @ second.M[:, :, 2:], 1e-6)
    assert list(second.masks) == ["a", "b"]
    assert_close(second.basis("a"), first.basis("a"), 0)


# ---- through the learner -----------------------------------------------------------------------


def test_the_memory_is_orthonormal_after_a_hundred_tasks() -> None:
    """In float32, growing all the way."""
    model = nn.Sequential(nn.Linear(300, 60), nn.ReLU(), nn.Linear(60, 4))
    learner = TRGP(model, threshold=0.95)
    grown = [0]
    for task in range(100):
        batch = classification(task, 300, samples=2)
        learn(learner, task, [batch], steps=2)
        grown.append(learner.ranks["0"][0])
    assert grown[100] > grown[90] > grown[50] > 90
    assert model[0].weight.dtype == torch.float32
    for each in bases(learner).values():
        M = each.M[0].double()
        assert (M.T @ M - torch.eye(M.shape[1])).abs().max() <= 1e-6


@pytest.mark.parametrize("method", [GPM, TRGP])
def test_learning_goes_on_when_the_memory_is_full(method: type[GPM]) -> None:
    """All directions protected: GPM stands still, TRGP learns through Q; old tasks are kept."""
    model = nn.Sequential(nn.Linear(4, 4)).double()
    learner = method(model, threshold=1.0)
    x = [randn(20, 4) for _ in range(4)]
    teacher = torch.linalg.qr(randn(4, 4, 4)).Q
    tasks = [(x[t], x[t] @ teacher[t]) for t in range(4)]
    outputs = []
    for task, batch in enumerate(tasks):
        start = mse(model, batch).item()
        learn(learner, task, [batch], mse, steps=400, make=torch.optim.Adam, lr=0.1)
        end = mse(model, batch).item()
        assert learner.ranks["0"] == (5, 5)
        if task == 0 or method is TRGP:
            assert end < 0.1 * start
            assert bool(learner.selected[task]["0"]) == bool(task)
        else:
            assert end == pytest.approx(start)
        outputs.append(model(batch[0]).detach())
    for task, batch in enumerate(tasks):
        with learner.task(task):
            assert_close(model(batch[0]), outputs[task], 1e-9)


def test_the_groups_of_a_convolution_fill_apart() -> None:
    """The second half of the channels is constant: its group needs one direction for weight and
    bias together, the first half needs more."""
    model = nn.Sequential(nn.Conv1d(8, 6, 2, groups=2), nn.Flatten(), nn.Linear(18, 4)).double()
    learner = TRGP(model, threshold=1.0, epsilon=0.0)
    outputs, batches = [], []
    for task in range(3):
        x, y = classification(task, 8, 4, dtype=torch.float64, samples=2)
        x[:, 4:] = 1.0
        batches.append((x, y))
        learn(learner, task, batches[-1:], steps=30)
        outputs.append(model(x).detach())
        ranks = memories(learner)["0"].ranks.tolist()
        assert ranks[1] == 1
        assert ranks[0] == min(9, 6 * (task + 1))
    assert learner.selected[2]["0"]
    for task, (x, _) in enumerate(batches):
        with learner.task(task):
            assert_close(model(x), outputs[task], 1e-9)
