"""The step without Q: what it shows, what it keeps, and that it is the paper's (4.2)."""

import pytest
import torch
from helpers import assert_close
from hypothesis import given
from hypothesis import strategies as st
from support.memories import Trusting, a_case, cases, random
from torch import Tensor

from trgp.core.keep import filtered, kept, reached, shown, with_coordinates
from trgp.core.memory import MOST_BLOCKS, in_memory_order, in_region_order
from trgp.core.subspace import columns_of, put_columns

# ---- the same by its definition ----------------------------------------------------------------


def sets_of(case: Trusting) -> Tensor:
    """By group and column of the memory, a number for the set of trusted tasks that hold it."""
    if not case.trusted:
        return torch.zeros(case.memory.C.shape[0], case.memory.C.shape[2])
    held = case.memory.widened(case.trusted)
    return (held * 2 ** torch.arange(len(held))[:, None, None]).sum(0)


def projected(case: Trusting, D: Tensor) -> Tensor:
    """Pi by its definition: a column moves in the range of the C_j of all tasks that hold it."""
    C = [columns_of(case.memory.C, case.memory.masks[j]) for j in case.trusted]
    sets, out = sets_of(case), torch.zeros_like(D)
    for g in range(len(D)):
        for column, code in enumerate(sets[g].tolist()):
            tasks = [c[g] for j, c in enumerate(C) if int(code) >> j & 1]
            if tasks:
                F = torch.cat(tasks, dim=1)
                out[g, :, column] = F @ torch.linalg.pinv(F) @ D[g, :, column]
    return out


def gained(case: Trusting, T: Tensor) -> Tensor:
    """sum_j C_j C_j' T_j, at the columns of every trusted task."""
    total = torch.zeros_like(T)
    for j in case.trusted:
        mask = case.memory.masks[j]
        C = columns_of(case.memory.C, mask)
        total += put_columns(C @ (C.mT @ columns_of(T, mask)), mask, T.shape[2])
    return total


def free(case: Trusting, G: Tensor) -> Tensor:
    """The part of G outside span(M)."""
    M = case.memory.M
    return G - G @ M @ M.mT


def inside(case: Trusting) -> Tensor:
    """Random coordinates, zero in columns that are not in use."""
    M = case.memory.M
    return random(*case.memory.C.shape) @ (M.mT @ M)


@given(cases())
def test_the_reach_is_what_any_scaling_could_do(case: Trusting) -> None:
    D, region = inside(case), case.region
    here = reached(in_region_order(D, region), region)
    assert_close(in_memory_order(here, region, D.shape[2]), projected(case, D), 1e-9)


@given(cases(), st.sampled_from([1.0, 0.1, 3.0]))
def test_what_the_paper_shows_is_the_gradient_of_the_scalings(case: Trusting, rate: float) -> None:
    T, region = inside(case), case.region
    here = shown(in_region_order(T, region), region, "paper", rate)
    assert_close(in_memory_order(here, region, T.shape[2]), rate * gained(case, T), 1e-10)


@given(cases())
def test_what_range_shows_is_the_reach(case: Trusting) -> None:
    """And no rate is needed: it is a projection, so it can be applied twice."""
    region = case.region
    T = in_region_order(inside(case), region)
    assert torch.equal(shown(T, region, "range", 7.0), reached(T, region))
    assert_close(reached(reached(T, region), region), reached(T, region), 1e-10)


@given(cases(), st.sampled_from(["paper", "range"]))
def test_a_filtered_gradient_differs_inside_alone(case: Trusting, form: str) -> None:
    G, region = random(*case.W.shape), case.region
    found = filtered(G, region, form, 0.5)
    assert_close(free(case, found), free(case, G), 1e-12)
    wanted = 0.5 * gained(case, G @ case.memory.M) if form == "paper" else None
    if wanted is None:
        wanted = projected(case, G @ case.memory.M)
    assert_close(found @ case.memory.M, wanted, 1e-9)


@given(cases())
def test_after_a_step_the_weight_lies_within_the_reach(case: Trusting) -> None:
    """K = W M; what lies outside span(M) stays; doing it twice is doing it once."""
    region, change = case.region, random(*case.W.shape)
    W, K = kept(case.W + change, region.C.clone(), region)
    assert_close(W @ region.M, K, 1e-10)
    assert_close(free(case, W), free(case, case.W + change), 1e-10)
    moved = in_memory_order(K - region.C, region, case.memory.M.shape[2])
    assert_close(moved, projected(case, change @ case.memory.M), 1e-9)
    again, K_again = kept(W, K, region)
    assert_close(again, W, 1e-10)
    assert_close(K_again, K, 1e-10)


@given(cases(most_tasks=0))
def test_gpm_moves_nothing_inside(case: Trusting) -> None:
    region = case.region
    assert not region.blocks
    assert region.start == case.memory.M.shape[2]
    G = random(*case.W.shape)
    assert_close(filtered(G, region, "range"), free(case, G), 1e-12)
    W, K = kept(case.W + G, region.C, region)
    assert torch.equal(K, case.memory.C)
    assert_close(W @ case.memory.M, case.memory.C, 1e-10)


@given(cases())
def test_coordinates_are_replaced_and_nothing_else(case: Trusting) -> None:
    K = inside(case)
    W = with_coordinates(case.W, case.memory.M, K)
    assert_close(W @ case.memory.M, K, 1e-12)
    assert_close(free(case, W), free(case, case.W), 1e-12)


# ---- more sets than a basis each ---------------------------------------------------------------


def test_many_sets_of_tasks_share_the_union_of_their_ranges() -> None:
    """Four tasks hold columns in up to fifteen ways: one basis for all of them."""
    torch.manual_seed(0)
    case = a_case(2, 30, 24, [24, 20], 4)
    region = case.region
    assert len(region.blocks) > MOST_BLOCKS
    assert len({block.reach.data_ptr() for block in region.blocks}) == 1
    C = torch.cat([columns_of(case.memory.C, case.memory.masks[j]) for j in case.trusted], 2)
    P = C @ torch.linalg.pinv(C)
    D = inside(case)
    held = sets_of(case)[:, None, :] > 0
    found = in_memory_order(reached(in_region_order(D, region), region), region, D.shape[2])
    assert_close(found, P @ D * held, 1e-9)
    few = case._replace(trusted=case.trusted[:2]).region
    assert len({block.reach.data_ptr() for block in few.blocks}) == len(few.blocks) > 1


# ---- several steps against the paper's W and Q -------------------------------------------------


class Loss:
    """A quadratic in the effective weight, with a minimum anywhere."""

    def __init__(self, shape: torch.Size) -> None:
        g, o, n = shape
        self.A = random(g, o, o) / o**0.5
        self.B = random(g, n, n) / n**0.5
        self.target = random(g, o, n)

    def gradient(self, W: Tensor) -> Tensor:
        """At a weight, in closed form."""
        return self.A.mT @ self.A @ (W - self.target) @ self.B @ self.B.mT


@pytest.mark.parametrize("scale_rate", [1.0, 0.3])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("groups", [1, 3])
def test_the_paper_form_is_the_joint_step_of_w_and_every_q(
    groups: int, momentum: float, scale_rate: float
) -> None:
    """Twenty steps of SGD, with columns that both trusted tasks hold, one does and none does."""
    torch.manual_seed(0)
    case = a_case(groups, 5, 12, [10, 7, 9][:groups], 3)
    case = case._replace(trusted=case.trusted[:2])
    assert set(sets_of(case).flatten().tolist()) >= {0, 1, 2, 3}
    loss, region, lr = Loss(case.W.shape), case.region, 0.003

    bases = [case.memory.basis(j) for j in case.trusted]
    shared = case.W.clone()
    scalings = [torch.zeros(groups, r, r).double() for r in (B.shape[2] for B in bases)]
    velocity = [torch.zeros_like(t) for t in (shared, *scalings)]
    W, K = case.W.clone(), region.C.clone()
    v = torch.zeros_like(W)
    for _ in range(20):
        explicit = case._replace(W=shared).scaled(scalings)
        G = loss.gradient(explicit)
        steps = [free(case, G)]
        steps += [scale_rate * (shared @ B).mT @ G @ B for B in bases]
        for i, step in enumerate(steps):
            velocity[i] = momentum * velocity[i] + step
        shared = shared - lr * velocity[0]
        scalings = [S - lr * u for S, u in zip(scalings, velocity[1:], strict=True)]

        v = momentum * v + filtered(loss.gradient(W), region, "paper", scale_rate)
        W, K = kept(W - lr * v, K, region)
        assert_close(W, case._replace(W=shared).scaled(scalings), 1e-12)
    assert float((W - shared).norm()) > 0.1


def test_the_range_form_is_the_gradients_own_part_in_reach() -> None:
    torch.manual_seed(0)
    case = a_case(2, 5, 12, [10, 7], 2)
    loss, region, lr = Loss(case.W.shape), case.region, 0.01
    W, K, explicit = case.W.clone(), region.C.clone(), case.W.clone()
    for _ in range(20):
        G = loss.gradient(explicit)
        inner = projected(case, G @ case.memory.M) @ case.memory.M.mT
        explicit = explicit - lr * (free(case, G) + inner)
        W, K = kept(W - lr * filtered(loss.gradient(W), region, "range"), K, region)
        assert_close(W, explicit, 1e-11)
    assert float((K - region.C).norm()) > 0.1
