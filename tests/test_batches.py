"""Reading the first samples of a loader, whatever its batches look like."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from helpers import mlp
from hypothesis import given
from hypothesis import strategies as st
from support.inside import bases
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from trgp import GPM, TRGP
from trgp.learner.loader_batches import first_samples, samples_in


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


sizes = st.lists(st.integers(1, 7), min_size=1, max_size=6)


def numbered(sizes: list[int]) -> list[Tensor]:
    """Batches of these sizes, holding 0, 1, 2, ... one after the other."""
    return list(torch.arange(sum(sizes)).split(sizes))


@given(sizes, st.integers(1, 50))
def test_exactly_the_first_samples_in_their_order(sizes: list[int], limit: int) -> None:
    total = sum(sizes)
    read = list(first_samples(numbered(sizes), limit))
    assert torch.equal(torch.cat(read), torch.arange(min(limit, total)))
    assert all(len(batch) for batch in read)


@given(sizes)
def test_without_a_limit_the_whole_loader(sizes: list[int]) -> None:
    read = list(first_samples(numbered(sizes), None))
    assert [len(batch) for batch in read] == sizes
    assert torch.equal(torch.cat(read), torch.arange(sum(sizes)))


@given(sizes, st.integers(1, 50))
def test_no_batch_is_drawn_that_is_not_needed(sizes: list[int], limit: int) -> None:
    drawn = []

    class Counting:
        def __iter__(self) -> Iterator[Tensor]:
            for batch in numbered(sizes):
                drawn.append(len(batch))
                yield batch

    list(first_samples(Counting(), limit))
    assert sum(drawn[:-1]) < limit


x, y, scale = torch.arange(12.0).reshape(4, 3), torch.arange(4), torch.tensor(7.0)


@pytest.mark.parametrize(
    "batch",
    [
        x,
        (x, y),
        [x, y],
        Pair(x, y),
        {"x": x, "y": y},
        OrderedDict(x=x, y=y),
        {"views": [x, (x, y)], "y": y},
        (x, y, scale, "name", None, 3),
    ],
)
def test_a_cut_batch_is_of_the_same_make(batch: Any) -> None:
    assert samples_in(batch) == 4
    (whole,) = first_samples([batch], 4)
    assert whole is batch
    (cut,) = first_samples([batch], 3)
    _assert_cut(cut, batch)


def _assert_cut(cut: Any, whole: Any) -> None:
    if isinstance(whole, Tensor):
        assert torch.equal(cut, whole[:3] if whole.dim() else whole)
    elif isinstance(whole, dict):
        assert isinstance(cut, dict)
        assert list(cut) == list(whole)
        for key in whole:
            _assert_cut(cut[key], whole[key])
    elif isinstance(whole, tuple | list):
        assert type(cut) is type(whole)
        assert len(cut) == len(whole)
        for a, b in zip(cut, whole, strict=True):
            _assert_cut(a, b)
    else:
        assert cut is whole


def test_what_is_not_one_entry_a_sample_is_left_whole() -> None:
    weights = torch.arange(5.0)
    (cut,) = first_samples([(x, weights)], 2)
    assert torch.equal(cut[0], x[:2])
    assert cut[1] is weights


def test_a_single_sample_without_a_batch_dimension_is_one() -> None:
    assert samples_in(torch.tensor(3.0)) == 1
    assert samples_in((torch.tensor(3.0), y)) == 1


def test_a_loader_can_be_read_again() -> None:
    loader = DataLoader(TensorDataset(x, y), batch_size=3)
    for _ in range(2):
        read = list(first_samples(loader, 4))
        assert torch.equal(torch.cat([batch[0] for batch in read]), x)


@pytest.mark.parametrize("loader", [[], DataLoader(TensorDataset(x[:0], y[:0])), [(x[:0], y[:0])]])
def test_a_loader_without_samples_is_refused(loader: Any) -> None:
    with pytest.raises(ValueError, match="yields no samples; pass one that"):
        list(first_samples(loader, None))


@pytest.mark.parametrize("loader", [iter([x]), (b for b in [x]), map(abs, [x])])
def test_a_one_shot_iterator_is_refused_before_it_is_touched(loader: Iterator[Tensor]) -> None:
    with pytest.raises(TypeError, match=r"read only once.*pass a list of batches or a DataLoader"):
        list(first_samples(loader, None))
    assert torch.equal(next(loader), x)


@pytest.mark.parametrize("batch", ["text", 3, {"a": 1}, [], None, b"bytes"])
def test_a_batch_without_a_tensor_is_refused(batch: Any) -> None:
    with pytest.raises(TypeError, match=f"type {type(batch).__name__} holds no tensor; yield"):
        list(first_samples([batch], None))


def test_memory_samples_limits_what_feeds_the_memory() -> None:
    """The memory of the first samples alone is the memory of a loader that holds no others."""
    inputs = torch.randn(30, 6)
    batches = list(inputs.split(8))
    learners = []
    for samples, loader in [(11, batches), (None, [inputs[:11]])]:
        torch.manual_seed(0)
        learner = GPM(mlp(6, 12, 3), threshold=1.0, memory_samples=samples)
        learner.begin_task(0, loader, lambda model, x: model(x).square().sum())
        learner.end_task(loader)
        learners.append(learner)
    few, alone = learners
    assert few.ranks == alone.ranks == {"0": (7, 7), "2": (11, 13)}
    for name in few.ranks:
        M, N = (bases(each)[name].M[0] for each in learners)
        assert (M - N @ (N.mT @ M)).norm() < 1e-3


def test_selection_samples_limits_what_selects() -> None:
    """Data behind the limit does not decide the trust region; data before it does."""
    e = torch.eye(4)
    loss = {"loss_fn": lambda model, batch: model(batch[0]).sub(batch[1]).square().sum()}
    first, second = [(e[:1], torch.ones(1, 2))], [(e[1:2], torch.ones(1, 2))]
    mixed = [(e[:1], torch.ones(1, 2)), (e[1:2].repeat(50, 1), torch.ones(50, 2))]
    for samples, expected in [(1, ["first"]), (51, ["second"])]:
        torch.manual_seed(0)
        learner = TRGP(mlp(4, 2, bias=False), threshold=1.0, epsilon=0.9, selection_samples=samples)
        for task, loader in {"first": first, "second": second}.items():
            learner.begin_task(task, loader, **loss)
            learner.end_task(loader)
        learner.begin_task("mixed", mixed, **loss)
        assert learner.selected["mixed"] == {"0": expected}
