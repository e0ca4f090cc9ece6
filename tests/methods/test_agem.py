"""A-GEM: the examples kept, the gradient they ask for, and what it makes of a batch's own."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close
from hypothesis import given
from hypothesis import strategies as st
from method_parts import (
    ConvHeads,
    WatchedAGEM,
    bound,
    eager,
    gradients,
    logits_of,
    mlp_heads,
    moved_at_random,
    one_head,
    some_samples,
)
from small_runs import Make, run, some_tasks, watched
from torch import Tensor

from trgp.benchmarks import from_tensors
from trgp.engine.errors import InputError
from trgp.engine.train import train_step
from trgp.methods import Batch
from trgp.methods.agem import AGEM, projected

NETWORKS: dict[str, tuple[Make, bool, tuple[int, ...]]] = {
    "one head": (one_head, False, (8,)),
    "heads": (mlp_heads, True, (8,)),
    "conv": (lambda: ConvHeads(track=False), True, (3, 8, 8)),
}


def flat(named: dict[str, Tensor], keys: Any) -> Tensor:
    return torch.cat([named[key].flatten() for key in sorted(keys)])


@given(seed=st.integers(0, 10**6), lean=st.floats(-3, 3), log_size=st.integers(-8, 8))
def test_a_projected_gradient_never_points_against_the_reference(
    seed: int, lean: float, log_size: int
) -> None:
    """To rounding; and it is the nearest that does not: the change is along the reference."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"a": (3, 4), "b": (5,), "c": (2, 2, 2)}
    ref = {n: torch.randn(s, generator=draw, dtype=torch.float64) for n, s in shapes.items()}
    own = {
        n: 10.0**log_size * (torch.randn(s, generator=draw, dtype=torch.float64) + lean * ref[n])
        for n, s in shapes.items()
    }
    found = projected(own, ref)
    g, r, new = (flat(d, shapes) for d in (own, ref, found))
    rounding = 1e-14 * float(g.norm() * r.norm())
    assert float(new @ r) >= -rounding
    if float(g @ r) >= 0:
        assert torch.equal(new, g)
    else:
        assert abs(float(new @ r)) <= rounding
        assert_close(new, g - (g @ r) / (r @ r) * r, 1e-13 * float(g.norm()))


def test_a_gradient_of_what_the_reference_does_not_reach_stays() -> None:
    own = {"shared": torch.tensor([1.0, 0.0]), "alone": torch.tensor([3.0])}
    found = projected(own, {"shared": torch.tensor([-1.0, 1.0])})
    assert_close(found["shared"], torch.tensor([0.5, 0.5]))
    assert torch.equal(found["alone"], own["alone"])


def test_a_reference_of_zero_changes_nothing() -> None:
    own = {"a": torch.tensor([1.0, -2.0])}
    assert torch.equal(projected(own, {"a": torch.zeros(2)})["a"], own["a"])


# ---- a step ----------------------------------------------------------------------------------


def with_memory(name: str) -> tuple[AGEM, dict[str, Tensor], Any, Batch]:
    """A third task with examples of two, and one batch of it."""
    make, heads, shape = NETWORKS[name]
    method, params = bound(AGEM(), make, heads)
    params = moved_at_random(params)
    parts = [some_samples(5, *shape, seed=t) for t in range(2)]
    held = {
        "x": torch.cat([x for x, _ in parts]),
        "y": torch.cat([y for _, y in parts]),
        "head": torch.arange(2).repeat_interleave(5) if heads else torch.zeros(10).long(),
    }
    u = torch.rand(9, generator=torch.Generator().manual_seed(3))
    batch = Batch(*some_samples(8, *shape, seed=7), 2, 2 if heads else 0, u=u)
    method.train_mode(2)
    return method, params, {"memory": held}, batch


def by_hand(
    method: AGEM, params: dict[str, Tensor], state: Any, batch: Batch
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The batch's gradient and the memory's, of a plain module, example by example."""
    heads = method.network.separate_heads
    module = eager(method, params)
    own = gradients(F.cross_entropy(logits_of(module, batch, heads), batch.y), module)
    held = state["memory"]
    picked = [int(float(number) * len(held["y"])) for number in batch.u[: len(batch.y)]]
    x = held["x"][picked]
    # BatchNorm sees all of them at once, so they go through together, once a head.
    by_head = [module(x, h) for h in range(3)] if heads else [module(x)]
    losses = [
        F.cross_entropy(by_head[int(held["head"][index])][i : i + 1], held["y"][index : index + 1])
        for i, index in enumerate(picked)
    ]
    assert len(set(picked)) > 2
    return own, gradients(torch.stack(losses).mean(), module)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_reference_is_the_gradient_over_the_picked_examples_by_their_own_heads(
    name: str,
) -> None:
    method, params, state, batch = with_memory(name)
    _, expected = by_hand(method, params, state, batch)
    trained = sorted(method.network.trainable)
    with torch.no_grad():
        found = method.reference(params, state, batch, trained)
    for key in trained:
        assert_close(found.get(key, torch.zeros(())).expand_as(params[key]), expected[key])
    assert not any(g.requires_grad for g in found.values())


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_is_projected_only_on_conflict(name: str, flip: bool) -> None:
    """Between a batch and examples it agrees with, or the same samples with other labels."""
    method, params, state, batch = with_memory(name)
    held = state["memory"]
    head = torch.full_like(held["y"], batch.head)
    labels = (batch.y + 1) % 3 if flip else batch.y
    state = {"memory": {"x": batch.x, "y": labels, "head": head[:8]}}
    own, reference = by_hand(method, params, state, batch)
    used = [key for key, g in own.items() if g.any() or "heads" not in key]
    product = flat(own, used) @ flat(reference, used)
    after, changed, _ = train_step(method, params, state, batch, 0.1, sorted(own), [])
    assert changed == state
    step = {key: (params[key] - after[key]) / 0.1 for key in own}
    if flip:
        assert product < 0
        excess = product / flat(reference, used).square().sum()
        assert abs(float(flat(step, used) @ flat(reference, used))) < 1e-10
        expected = {key: own[key] - excess * reference[key] for key in used}
    else:
        assert product > 0
        expected = own
    for key in used:
        assert_close(step[key], expected[key])


def test_old_heads_count_in_the_reference_and_move_along_it() -> None:
    """The gradient of the paper is that of all parameters, 0 where the batch reaches none."""
    method, params, _, batch = with_memory("heads")
    params["heads.0.weight"] = params["heads.2.weight"].clone()
    y = (batch.y + 1) % 3  # a conflict: other answers to the same samples
    state = {"memory": {"x": batch.x, "y": y, "head": torch.zeros_like(y)}}
    own, reference = by_hand(method, params, state, batch)
    product = flat(own, own) @ flat(reference, own)
    assert product < 0
    excess = product / flat(reference, own).square().sum()
    after, _, _ = train_step(method, params, state, batch, 0.1, sorted(own), [])
    for key, g in own.items():
        assert_close(after[key], params[key] - 0.1 * (g - excess * reference[key]))


def test_the_first_task_is_plain_sgd_to_the_bit() -> None:
    method, params, _, batch = with_memory("heads")
    module = eager(method, params)
    own = gradients(F.cross_entropy(module(batch.x, 2), batch.y), module)
    after, state, _ = train_step(method, params, {}, batch, 0.1, sorted(own), [])
    assert state == {}
    assert all(torch.equal(after[key], params[key] - 0.1 * g) for key, g in own.items())


# ---- the memory ------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "each"), [(20, 6), (9, 3), (600, 36)])
def test_every_task_leaves_the_same_share_of_the_memory(
    size: int, each: int, tmp_path: Path
) -> None:
    """memory_size // tasks examples of its train samples, each once; all where it has fewer."""
    tasks = some_tasks(3)
    result, ends = watched(WatchedAGEM, tasks, tmp_path, mlp_heads, memory_size=size)
    train = [task.train for task in from_tensors(tasks, mlp_heads, seed=0).tasks]
    for t, end in enumerate(ends):
        held = end.state["memory"]
        assert len(held["y"]) == len(held["x"]) == each * (t + 1)
        assert held["head"].tolist() == [k for k in range(t + 1) for _ in range(each)]
        for k in range(t + 1):
            known = {(*x.tolist(), int(y)) for x, y in zip(train[k].x, train[k].y, strict=True)}
            mine = held["head"] == k
            found = [
                (*x.tolist(), int(y)) for x, y in zip(held["x"][mine], held["y"][mine], strict=True)
            ]
            assert set(found) <= known
            assert len(set(found)) == each
    # 8 features in 4 bytes each, a label and a head in 8.
    assert result.state_bytes == 3 * each * (8 * 4 + 8 + 8)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_memory_never_exceeds_its_size(size: int, tmp_path: Path) -> None:
    """Where there are more tasks than examples, the first have one each."""
    _, ends = watched(WatchedAGEM, some_tasks(4), tmp_path, lambda: mlp_heads(4), memory_size=size)
    for t, end in enumerate(ends):
        assert end.state["memory"]["head"].tolist() == list(range(t + 1))[:size]
        assert len(end.state["memory"]["x"]) <= size


def test_one_head_is_the_head_of_every_example(tmp_path: Path) -> None:
    _, ends = watched(WatchedAGEM, some_tasks(2), tmp_path, memory_size=8)
    assert ends[1].state["memory"]["head"].tolist() == [0] * 8


def test_picked_examples_are_of_all_the_memory() -> None:
    """Numbers from 0 to just below 1 reach the first, the last and nothing beyond."""
    method, params, state, batch = with_memory("one head")
    almost = torch.tensor([0.0, 0.05, 0.15, 0.5, 0.85, 0.95, 0.999, 1 - 2**-24])
    rows = [0, 0, 1, 5, 8, 9, 9, 9]
    module = eager(method, params)
    held = state["memory"]
    expected = gradients(F.cross_entropy(module(held["x"][rows]), held["y"][rows]), module)
    names = sorted(params)
    found = method.reference(params, state, batch._replace(u=almost), names)
    for key in names:
        assert_close(found[key], expected[key])


def test_the_reference_may_be_of_more_examples_than_the_batch_has_samples() -> None:
    """Also of more than there are stored: they are drawn with replacement."""
    method, params, state, batch = with_memory("heads")
    assert (method.random_numbers(8), AGEM(reference_size=40).random_numbers(8)) == (8, 40)
    u = torch.rand(40, generator=torch.Generator().manual_seed(4))
    as_large = batch._replace(y=batch.y.repeat(5), u=u)  # of whose samples nothing is read
    names = sorted(params)
    expected = method.reference(params, state, as_large, names)
    wide = AGEM(reference_size=40).bind(method.network)
    found = wide.reference(params, state, batch._replace(u=u), names)
    assert all(torch.equal(found[key], g) for key, g in expected.items())
    fewer = method.reference(params, state, batch._replace(u=u), names)
    assert not torch.allclose(found["layers.0.weight"], fewer["layers.0.weight"])


def test_a_run_with_a_larger_reference_keeps_no_more(tmp_path: Path) -> None:
    plain = run(some_tasks(2), "agem", tmp_path, memory_size=10)
    wide = run(some_tasks(2), "agem", tmp_path, memory_size=10, reference_size=32)
    assert wide.curves[0] == plain.curves[0]
    assert wide.curves[1] != plain.curves[1]
    assert wide.state_bytes == plain.state_bytes


def test_a_reference_of_less_than_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^reference_size must be"):
        run(some_tasks(1), "agem", tmp_path, reference_size=-1)


def test_a_memory_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^memory_size must be"):
        run(some_tasks(1), "agem", tmp_path, memory_size=0)
