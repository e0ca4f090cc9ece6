"""ER: the reservoir, what enters it, and the loss over a batch and what is replayed."""

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
    WatchedER,
    bound,
    context,
    eager,
    gradients,
    mlp_heads,
    one_head,
    some_samples,
)
from small_runs import Make, run, some_tasks, watched
from torch import Tensor

from trgp.benchmarks import from_tensors
from trgp.engine.batches import Part, epoch_batches
from trgp.engine.errors import InputError
from trgp.engine.train import train_step
from trgp.methods import Batch, memory
from trgp.methods.er import ER

# ---- the reservoir ---------------------------------------------------------------------------


def room(size: int) -> memory.Examples:
    """An empty memory for single numbers."""
    whole = torch.zeros(size, dtype=torch.long)
    return {"x": torch.zeros(size, 1), "y": whole, "head": whole.clone()}


def numbered(start: int, count: int) -> memory.Examples:
    """Samples that are told apart by their labels."""
    y = torch.arange(start, start + count)
    return {"x": y[:, None].float(), "y": y, "head": y % 5}


def streamed(size: int, sizes: list[int], u: Tensor) -> tuple[memory.Examples, Tensor]:
    """The memory after batches of these sizes, with a number of u for every sample."""
    held, seen, start = room(size), torch.tensor(0), 0
    for count in sizes:
        held, seen = memory.reservoir(held, seen, numbered(start, count), u[start : start + count])
        start += count
    return held, seen


def test_every_sample_of_a_stream_is_held_with_the_same_probability() -> None:
    """Chi-square over many streams, of the times that each sample is held at the end."""
    size, length, streams = 8, 40, 1000
    draw = torch.Generator().manual_seed(0)
    u = torch.rand(streams, length, generator=draw)
    counts = torch.zeros(length)
    for numbers in u:
        held, _ = streamed(size, [9, 9, 9, 9, 4], numbers)
        counts += torch.bincount(held["y"], minlength=length)
    share = size / length
    assert counts.sum() == streams * size
    # Without replacement: of variance streams * share (1 - share), and of a fixed sum.
    squares = (counts - streams * share).square() / (streams * share * (1 - share))
    statistic = float(squares.sum() * (length - 1) / length)
    assert 17.3 < statistic < 72.1  # of chi-square with 39 degrees all but 1 in 1000 at each end


def test_no_place_is_favoured() -> None:
    """Late samples lie anywhere in the memory."""
    draw = torch.Generator().manual_seed(0)
    places = torch.zeros(8)
    for numbers in torch.rand(800, 40, generator=draw):
        held, _ = streamed(8, [20, 20], numbers)
        places += held["y"] >= 20
    expected = places.mean()
    assert expected == pytest.approx(400, abs=40)
    statistic = float(((places - expected).square() / (expected * 0.5)).sum())
    assert statistic < 24.4  # the same of 7 degrees


@given(
    size=st.integers(1, 12),
    sizes=st.lists(st.integers(1, 10), min_size=1, max_size=6),
    seed=st.integers(0, 10**6),
)
def test_a_batch_enters_as_its_samples_would_one_by_one(
    size: int, sizes: list[int], seed: int
) -> None:
    total = sum(sizes)
    u = torch.rand(total, generator=torch.Generator().manual_seed(seed))
    together, seen = streamed(size, sizes, u)
    alone, again = streamed(size, [1] * total, u)
    assert seen == again == total
    for key, tensor in together.items():
        assert torch.equal(tensor, alone[key])
    # By Vitter's own words.
    places: list[int] = []
    for n in range(total):
        if n < size:
            places.append(n)
        else:
            j = int(float(u[n]) * (n + 1))
            if j < size:
                places[j] = n
    filled = min(total, size)
    assert together["y"][:filled].tolist() == places
    assert len(together["y"]) == size
    assert torch.equal(together["x"][:filled, 0], together["y"][:filled].float())
    assert torch.equal(together["head"][:filled], together["y"][:filled] % 5)
    assert not together["x"][filled:].any()


def test_more_random_numbers_than_samples_are_left_alone() -> None:
    u = torch.rand(30, generator=torch.Generator().manual_seed(0))
    before = streamed(4, [10], u)
    expected = memory.reservoir(*before, numbered(10, 7), u[:7])
    found = memory.reservoir(*before, numbered(10, 7), u)
    assert torch.equal(found[0]["y"], expected[0]["y"])


# ---- the loss --------------------------------------------------------------------------------

NETWORKS: dict[str, tuple[Make, bool, tuple[int, ...]]] = {
    "one head": (one_head, False, (8,)),
    "heads": (mlp_heads, True, (8,)),
    "conv": (lambda: ConvHeads(track=False), True, (3, 8, 8)),
}


def half_filled(
    name: str, size: int = 6, seen: int = 4
) -> tuple[ER, dict[str, Tensor], Any, Batch]:
    make, heads, shape = NETWORKS[name]
    method, params = bound(ER(memory_size=size), make, heads)
    x, y = some_samples(size, *shape, seed=1)
    x[seen:] = 1e6  # what is not filled must not be read
    head = torch.arange(size) % 2 if heads else torch.zeros(size).long()
    state = {"memory": {"x": x, "y": y, "head": head}, "seen": torch.tensor(seen)}
    u = torch.rand(18, generator=torch.Generator().manual_seed(3))
    batch = Batch(*some_samples(8, *shape, seed=7), 2, 2 if heads else 0, u=u)
    method.train_mode(2)
    return method, params, state, batch


@pytest.mark.parametrize("seen", [4, 6, 50])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_loss_is_the_mean_over_the_batch_and_as_many_examples(name: str, seen: int) -> None:
    method, params, state, batch = half_filled(name, seen=seen)
    heads = NETWORKS[name][1]
    held = state["memory"]
    picked = [int(float(number) * min(seen, 6)) for number in batch.u[:8]]
    assert len(set(picked)) > 2
    x = torch.cat([batch.x, held["x"][picked]])
    y = [*batch.y.tolist(), *held["y"][picked].tolist()]
    own = [*[batch.head] * 8, *held["head"][picked].tolist()]
    module = eager(method, params)
    by_head = [module(x, h) for h in range(3)] if heads else [module(x)]
    total = sum(-by_head[h].log_softmax(1)[i, y[i]] for i, h in enumerate(own))
    loss = total / 16
    expected = gradients(loss, module)
    after, _, found = train_step(method, params, state, batch, 0.1, sorted(expected), [])
    assert_close(found, loss.detach())
    for key, g in expected.items():
        assert_close(after[key], params[key] - 0.1 * g)


@pytest.mark.parametrize("name", NETWORKS)
def test_before_there_are_examples_it_is_the_batch_alone(name: str) -> None:
    """The first step of a run; those that this batch leaves are replayed from the second on."""
    make, heads, shape = NETWORKS[name]
    method, params = bound(ER(memory_size=6), make, heads)
    batch = Batch(*some_samples(8, *shape), 0, 0, u=torch.rand(18), first=True)
    _, state = method.begin_task(context(method, params, (batch.x, batch.y)))
    method.train_mode(0)
    module = eager(method, params)
    logits = module(batch.x, 0) if heads else module(batch.x)
    expected = gradients(F.cross_entropy(logits, batch.y), module)
    after, state, _ = train_step(method, params, state, batch, 0.1, sorted(expected), [])
    for key, g in expected.items():
        assert_close(after[key], params[key] - 0.1 * g)
    assert state["seen"] == 8


# ---- whole runs ------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False])
def test_only_samples_that_are_new_enter(first: bool) -> None:
    method, params, state, batch = half_filled("heads")
    batch = batch._replace(first=first)
    after, changed, _ = train_step(method, params, state, batch, 0.1, sorted(params), [])
    assert not torch.equal(after["layers.0.weight"], params["layers.0.weight"])
    if not first:
        assert changed == state
        return
    held, seen = memory.reservoir(
        state["memory"], state["seen"], memory.examples(batch), batch.u[8:]
    )
    assert changed["seen"] == seen == 12
    assert all(torch.equal(changed["memory"][key], held[key]) for key in held)
    assert 2 in held["head"]
    assert not torch.equal(state["memory"]["y"], held["y"])  # nothing was changed in place


@pytest.mark.parametrize("size", [10, 70, 500])
def test_the_memory_is_a_sample_of_all_that_was_seen_and_never_larger(
    size: int, tmp_path: Path
) -> None:
    """Each train sample at most once, with its own label and head, though epochs are three."""
    tasks = some_tasks(3)
    result, ends = watched(WatchedER, tasks, tmp_path, mlp_heads, memory_size=size, epochs=3)
    train = [task.train for task in from_tensors(tasks, mlp_heads, seed=0).tasks]
    known = {
        (*x.tolist(), int(y), t)
        for t, part in enumerate(train)
        for x, y in zip(part.x, part.y, strict=True)
    }
    for t, end in enumerate(ends):
        held = end.state["memory"]
        assert int(end.state["seen"]) == 36 * (t + 1)
        assert len(held["x"]) == len(held["y"]) == len(held["head"]) == size
        filled = min(size, 36 * (t + 1))
        found = [
            (*held["x"][i].tolist(), int(held["y"][i]), int(held["head"][i])) for i in range(filled)
        ]
        assert set(found) <= known
        assert len(set(found)) == filled
        assert not held["x"][filled:].any()
        if filled > 30:
            assert {task for *_, task in found} == set(range(t + 1))
    assert result.state_bytes == size * (8 * 4 + 8 + 8) + 8


def test_what_enters_is_the_first_epochs_order(tmp_path: Path) -> None:
    """In a memory that is never full."""
    tasks = some_tasks(1)
    _, ends = watched(WatchedER, tasks, tmp_path, mlp_heads, memory_size=99, epochs=2)
    part = Part(0, 0, from_tensors(tasks, mlp_heads, seed=0).tasks[0].train)
    order = torch.cat([batch.x for batch in epoch_batches([part], 8, 0, "order", 0, 0)])
    assert torch.equal(ends[0].state["memory"]["x"][:36], order)


def test_the_memory_of_the_best_epoch_is_the_same(tmp_path: Path) -> None:
    """Restored weights bring back no older memory: all epochs but the first leave it alone."""
    options: dict[str, Any] = {"memory_size": 20, "epochs": 4, "lr": 0.5}
    _, plain = watched(WatchedER, some_tasks(2), tmp_path, **options)
    _, best = watched(WatchedER, some_tasks(2), tmp_path, patience=1, **options)
    for a, b in zip(plain, best, strict=True):
        for key, tensor in a.state["memory"].items():
            assert torch.equal(tensor, b.state["memory"][key])


def test_a_memory_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^memory_size must be"):
        run(some_tasks(1), "er", tmp_path, memory_size=0)
