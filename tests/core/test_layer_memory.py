"""What a layer keeps: its columns in order, and a task's change in the smallest way that holds."""

from dataclasses import replace

import torch
from helpers import assert_close
from hypothesis import given
from hypothesis import strategies as st
from support.memories import Trusting, a_case, cases, random

from trgp.core.keep import with_coordinates
from trgp.core.memory import Change, in_memory_order, in_region_order, scalings_of
from trgp.core.subspace import Extension, columns_of


@given(cases(most_tasks=4))
def test_the_order_of_the_region_and_that_of_the_memory(case: Trusting) -> None:
    """Each undoes the other, but for columns of zeros that only one of them has."""
    region, m = case.region, case.memory.M.shape[2]
    D = random(*case.memory.C.shape)
    assert torch.equal(in_memory_order(in_region_order(D, region), region, m), D)
    assert torch.equal(in_region_order(case.memory.C, region), region.C)
    assert torch.equal(in_memory_order(region.M, region, m), case.memory.M)
    there = in_region_order(D, region)
    assert torch.equal(in_region_order(in_memory_order(there, region, m), region), there)


@given(cases(most_tasks=4))
def test_blocks_hold_the_columns_of_trusted_tasks_and_no_others(case: Trusting) -> None:
    region, m = case.region, case.memory.M.shape[2]
    inside = torch.zeros_like(region.C)
    for block in region.blocks:
        inside[:, :, block.first : block.last] = 1
        assert block.first >= region.start
    found = in_memory_order(inside, region, m)[:, 0] > 0
    trusted = case.memory.widened(case.trusted).any(0) if case.trusted else torch.zeros_like(found)
    assert torch.equal(found, trusted)


def test_old_coordinates_are_never_rounded_again() -> None:
    torch.manual_seed(0)
    case = a_case(2, 4, 9, [5, 3], 1, torch.float32)
    before = case.memory
    M = torch.linalg.qr(torch.cat([before.M, random(2, 9, 9, dtype=torch.float32)], 2)).Q[:, :, :6]
    M[:, :, :5] = before.M
    M[1, :, 3:] = torch.linalg.qr(
        torch.cat([before.M[1, :, :3], random(9, 3, dtype=torch.float32)], 1)
    ).Q[:, 3:]
    after = Extension(M, torch.tensor([6, 6]), torch.ones(2, 6).bool())
    W = with_coordinates(random(2, 4, 9, dtype=torch.float32), before.M, before.C)
    grown = before.grown(after, W, "new")
    assert torch.equal(grown.C[0, :, :5], before.C[0])
    assert torch.equal(grown.C[1, :, :3], before.C[1, :, :3])
    assert_close(grown.C, W @ M, 1e-5)
    assert list(grown.masks) == [0, "new"]


# ---- a task's change ---------------------------------------------------------------------------


@given(cases(least_tasks=1))
def test_any_way_of_keeping_a_change_gives_it_back(case: Trusting) -> None:
    D = in_reach(case)
    change = Change.of_coordinates(case.trusted, D, case.memory)
    assert torch.equal(change.coordinates(case.memory), D)
    assert change.shift is not None  # in float64: another machine's QR may round otherwise
    assert change.shift.shape[2] <= case.memory.M.shape[2]


@given(
    seed=st.integers(0, 2**31),
    outputs=st.integers(1, 8),
    ranks=st.lists(st.integers(1, 6), min_size=1, max_size=3),
)
def test_a_change_known_by_scalings_keeps_them_where_they_are_smaller(
    seed: int, outputs: int, ranks: list[int]
) -> None:
    """S_j = Q_j - I, or K - C at the columns in use."""
    torch.manual_seed(seed)
    case = a_case(2, outputs, 8, [6, 6], len(ranks))
    for j, r in enumerate(ranks):
        case.memory.masks[j] = torch.stack([torch.randperm(6) < r for _ in range(2)])
    scalings = case.some_scalings()
    full = Change(case.trusted, scalings)
    change = Change.of_shift(case.trusted, full.coordinates(case.memory), case.memory) or full
    expected = case.scaled(scalings)
    assert_close(case.W + change.coordinates(case.memory) @ case.memory.M.mT, expected)
    union = int(torch.stack([*case.memory.masks.values()]).any(0).sum(1).max())
    smaller = min(sum(2 * r * r for r in ranks), 2 * outputs * union)
    assert sum(t.numel() for t in change.tensors) == smaller


def in_reach(case: Trusting) -> torch.Tensor:
    return Change(case.trusted, case.some_scalings()).coordinates(case.memory)


def test_a_wide_layer_keeps_its_change_by_parts() -> None:
    """In float32 L'(K - C) for every set of tasks is smaller than K - C where outputs are many."""
    torch.manual_seed(0)
    case = a_case(1, 60, 20, [12], 2, torch.float32)
    D = in_reach(case)
    change = Change.of_coordinates(case.trusted, D, case.memory)
    assert change.shift is None
    assert change.parts
    assert not change.scalings
    union = int(change.union(case.memory).sum())
    assert sum(part.numel() for part in change.parts) < 60 * union / 2
    error = (change.coordinates(case.memory) - D).norm()
    assert error <= 10 * torch.finfo(torch.float32).eps * D.norm()


def test_parts_are_not_taken_where_they_would_lose_something() -> None:
    """A change that no Q made, a shared weight of low rank in the columns, and groups."""
    torch.manual_seed(0)
    case = a_case(1, 60, 20, [12], 2, torch.float32)
    beyond = in_reach(case) + 0.1 * random(1, 60, 12, dtype=torch.float32)
    beyond = beyond * case.memory.widened(case.trusted).any(0)[:, None, :]
    flat = case.memory.C[:, :, :1].expand(-1, -1, 12).contiguous()
    low = case._replace(memory=replace(case.memory, C=flat))
    several = a_case(2, 60, 20, [12, 12], 2, torch.float32)
    for each, D in ((case, beyond), (low, in_reach(low)), (several, in_reach(several))):
        change = Change.of_coordinates(each.trusted, D, each.memory)
        assert change.shift is not None
        assert_close(change.coordinates(each.memory), D, 1e-5)


@given(cases(least_tasks=1))
def test_scalings_are_found_that_rebuild_the_change(case: Trusting) -> None:
    D = in_reach(case)
    Q = scalings_of(D, case.memory, case.trusted)
    S = [q - torch.eye(q.shape[1]).double() for q in Q]
    rebuilt = Change(case.trusted, S).coordinates(case.memory)
    assert_close(rebuilt, D, 1e-6 * float(1 + D.norm()))


def test_of_all_scalings_they_are_the_nearest_to_the_identity() -> None:
    """No other solution has a smaller norm: those of random ones that do the same are larger."""
    torch.manual_seed(0)
    case = a_case(1, 3, 9, [8], 2)
    made = case.some_scalings()
    D = case.scaled(made) @ case.memory.M - case.memory.C
    found = scalings_of(D, case.memory, case.trusted)
    sizes = [sum(float(S.square().sum()) for S in each) for each in (
        [q - torch.eye(q.shape[1]).double() for q in found],
        made,
    )]  # fmt: skip
    assert sizes[0] < sizes[1]
    # The least solution is a combination of rows of the map S -> D: it lies in the range of C_j'.
    for j, Q in zip(case.trusted, found, strict=True):
        C = columns_of(case.memory.C, case.memory.masks[j])[0]
        S = Q[0] - torch.eye(Q.shape[1]).double()
        assert_close(torch.linalg.pinv(C) @ C @ S, S, 1e-9)


def test_a_change_follows_device_and_precision() -> None:
    torch.manual_seed(0)
    case = a_case(1, 60, 20, [12], 2, torch.float32)
    D = in_reach(case)
    change = Change.of_coordinates(case.trusted, D, case.memory)
    wide = case.memory.to(torch.device("cpu"), torch.float64)
    found = change.to(wide.C).coordinates(wide)
    assert found.dtype == torch.float64
    assert_close(found, D.double(), 1e-4)
