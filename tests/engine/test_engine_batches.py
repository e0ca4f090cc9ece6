"""Orders by key, an epoch's batches, and the measure of what was learnt."""

import itertools
from collections import Counter
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers import mlp
from hypothesis import example, given
from hypothesis import strategies as st
from small_runs import CLASSES, Conv, Heads, Make
from torch import Tensor, nn

from trgp.benchmarks.data import Normalisation, Tensors
from trgp.draws import order, seed_of
from trgp.engine import batches
from trgp.engine.batches import Part, cuts, epoch_batches, joined, rows_of
from trgp.engine.evaluate import Evaluation, mean
from trgp.engine.network import Network
from trgp.methods import Params

KEYS = st.lists(st.integers(0, 2**32 - 1) | st.text(max_size=9), min_size=1, max_size=5)


# ---- orders ----------------------------------------------------------------------------------


@given(n=st.integers(0, 300), key=KEYS)
def test_an_order_is_a_permutation_that_belongs_to_its_key(n: int, key: list[int | str]) -> None:
    first = order(n, *key)
    torch.rand(3)  # what was drawn before must not matter
    order(n, *key, "between")
    assert torch.equal(order(n, *key), first)
    assert sorted(first.tolist()) == list(range(n))


@given(
    a=st.tuples(st.integers(0, 2**32 - 1), st.text(max_size=9), st.integers(0, 99)),
    b=st.tuples(st.integers(0, 2**32 - 1), st.text(max_size=9), st.integers(0, 99)),
)
@example(a=(0, "order", 1), b=(1, "order", 0))
@example(a=(0, "order", 0), b=(0, "dropout", 0))
def test_other_keys_are_other_seeds(a: tuple[int, str, int], b: tuple[int, str, int]) -> None:
    assert (seed_of(*a) == seed_of(*b)) == (a == b)
    assert 0 <= seed_of(*a) < 2**63


# ---- batches ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fetched", [1, 20, 1000])
@pytest.mark.parametrize(("n", "size"), [(17, 8), (16, 8), (20, 8), (1, 8), (5, 1), (65, 16)])
def test_batches_are_the_same_however_many_are_fetched_at_once(
    n: int, size: int, fetched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a last sample has joined the batch before, which is then the longest."""
    monkeypatch.setattr(batches, "FETCHED", fetched)
    samples = Tensors(torch.arange(float(n))[:, None], torch.arange(n))
    part = Part(3, 1, samples)
    found, rows = rows_of([part], size, 0, "test")
    made = list(epoch_batches([part], size, 0, "test"))
    assert [len(batch.y) for batch in made] == [cut.length for cut in found]
    for batch, row in zip(made, rows, strict=True):
        assert torch.equal(batch.y, row[: len(batch.y)])
        assert torch.equal(batch.x[:, 0], batch.y.float())
        assert (batch.task, batch.head) == (3, 1)


@given(n=st.integers(1, 200), size=st.integers(1, 50))
@example(n=9, size=8)
@example(n=1, size=8)
@example(n=2, size=1)
def test_cuts_cover_everything_once_and_leave_nobody_alone(n: int, size: int) -> None:
    pieces = cuts(n, size)
    assert [i for piece in pieces for i in range(n)[piece]] == list(range(n))
    lengths = [len(range(n)[piece]) for piece in pieces]
    assert all(length == size for length in lengths[:-1])
    assert lengths[-1] <= size + 1
    if size > 1 and n > 1:
        assert min(lengths) > 1  # BatchNorm has no statistics of a single sample


def test_a_batch_of_one_is_one_where_it_is_asked_for() -> None:
    assert [len(range(5)[piece]) for piece in cuts(5, 1)] == [1] * 5


def numbered(task: int, n: int) -> Part:
    """Samples that say in their features which they are."""
    x = torch.stack([torch.full((n,), float(task)), torch.arange(n).float()], 1)
    return Part(task, task, Tensors(x, torch.arange(n) % CLASSES))


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    size=st.integers(1, 20),
    seed=st.integers(0, 9),
)
def test_an_epoch_sees_every_sample_once_and_a_batch_one_part(
    sizes: list[int], size: int, seed: int
) -> None:
    parts = [numbered(t, n) for t, n in enumerate(sizes)]
    seen: Counter[tuple[float, ...]] = Counter()
    for x, y, task, head, *_ in epoch_batches(parts, size, seed, "order"):
        assert (x[:, 0] == task).all()
        assert head == task
        assert torch.equal(y, x[:, 1].long() % CLASSES)
        seen.update(tuple(row) for row in x.tolist())
    assert seen == {(float(t), float(i)): 1 for t, n in enumerate(sizes) for i in range(n)}


def test_every_epoch_has_an_order_of_its_own() -> None:
    part = numbered(0, 50)

    def first(*key: int | str) -> list[float]:
        return next(iter(epoch_batches([part], 50, *key))).x[:, 1].tolist()

    orders = [first(0, "order", 0, epoch) for epoch in range(5)] + [first(1, "order", 0, 0)]
    assert len({tuple(o) for o in orders}) == 6
    assert first(0, "order", 0, 3) == orders[3]


def test_joint_batches_alternate_between_tasks() -> None:
    """Not one task after the other: that would not be learning them together."""
    parts = [numbered(t, 40) for t in range(3)]
    tasks = [batch.task for batch in epoch_batches(parts, 4, 0, "order")]
    assert Counter(tasks) == {0: 10, 1: 10, 2: 10}
    changes = sum(a != b for a, b in itertools.pairwise(tasks))
    assert changes > 10
    assert tasks != [batch.task for batch in epoch_batches(parts, 4, 1, "order")]


def test_tasks_that_share_a_head_are_mixed_in_a_batch() -> None:
    together = joined([numbered(t, 40) for t in range(3)])
    mixed = [len(set(x[:, 0].tolist())) for x, *_ in epoch_batches([together], 12, 0)]
    assert sum(kinds > 1 for kinds in mixed) >= 9
    assert together.head == 0


def test_pixels_stay_pixels_where_tasks_are_joined() -> None:
    """They are normalised batch by batch, and alike for all."""
    norm = Normalisation((0.5,), (0.25,))
    pixels = [torch.full((4, 1, 2, 2), v, dtype=torch.uint8) for v in (0, 255)]
    parts = [Part(t, 0, Tensors(x, torch.zeros(4).long(), norm)) for t, x in enumerate(pixels)]
    (batch,) = epoch_batches([joined(parts)], 8, 0)
    assert sorted(batch.x.flatten().unique().tolist()) == [-2.0, 2.0]


# ---- evaluation ------------------------------------------------------------------------------


def made(make: Make = lambda: mlp(8, 12, CLASSES), heads: bool = False) -> Network:
    return Network(make, heads, torch.device("cpu"), 0)


def samples(n: int, *shape: int) -> Tensors:
    return Tensors(torch.randn(n, *(shape or (8,))), torch.arange(n) % CLASSES)


class Score(NamedTuple):
    loss: float
    accuracy: float


def evaluate(
    network: Network, params: Params, part: Part, size: int, passes: int, captured: bool = False
) -> Score:
    """Of one part; captured work is just done where there is no GPU."""
    found = Evaluation(network, captured)(params, part, size, passes, 0, "test")
    return Score(*found.tolist())


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("size", [1, 7, 16, 64])
def test_loss_and_accuracy_are_those_of_a_plain_loop(size: int, captured: bool) -> None:
    network, test = made(), samples(33)
    params = network.initial_params()
    network.module.load_state_dict(params)
    logits = network.module(test.x)
    score = evaluate(network, params, Part(0, 0, test), size, 1, captured)
    assert score.loss == pytest.approx(F.cross_entropy(logits, test.y).item(), rel=1e-6)
    assert score.accuracy == (logits.argmax(1) == test.y).double().mean().item()


def test_passes_change_nothing_where_a_sample_is_measured_by_itself() -> None:
    network, test = made(), samples(33)
    params = network.initial_params()
    scores = [evaluate(network, params, Part(0, 0, test), 8, k) for k in (1, 2, 5)]
    assert len({score.accuracy for score in scores}) == 1
    assert scores[0].loss == pytest.approx(scores[2].loss, rel=1e-6)


def test_where_the_batch_matters_an_accuracy_is_the_mean_over_passes() -> None:
    network, test = made(lambda: Conv(track=False)), samples(41, 4, 4, 4)
    params = network.initial_params()
    part = Part(2, 0, test)

    def alone(k: int) -> tuple[float, float]:
        """One pass by hand, in the batches of its key."""
        loss, right = 0.0, 0
        for x, y, *_ in epoch_batches([part], 8, 0, "test", 2, k):
            network.module.load_state_dict(params)
            with torch.no_grad():
                logits = network.module.eval()(x)
            loss += F.cross_entropy(logits, y, reduction="sum").item()
            right += int((logits.argmax(1) == y).sum())
        return loss / 41, right / 41

    passes = [alone(k) for k in range(4)]
    assert len({loss for loss, _ in passes}) == 4
    score = evaluate(network, params, part, 8, 4)
    assert score.loss == pytest.approx(sum(loss for loss, _ in passes) / 4, rel=1e-5)
    assert score.accuracy == pytest.approx(sum(right for _, right in passes) / 4)


def test_several_parts_are_weighed_by_their_samples_each_with_its_weights_and_head() -> None:
    network = made(Heads, heads=True)
    first = network.initial_params()
    second = {name: 2 * tensor for name, tensor in first.items()}
    parts = [Part(0, 0, samples(10)), Part(1, 1, samples(30))]
    measure = Evaluation(network, captured=True)  # which must take each part's own weights and head
    scores = [measure(own, part, 8, 1, 0) for own, part in zip((first, second), parts, strict=True)]
    found = Score(*mean(scores, [10, 30]).tolist())
    losses = []
    for params, part in zip((first, second), parts, strict=True):
        network.module.load_state_dict(params)
        logits = network.module(part.samples.x, part.head)
        losses.append(F.cross_entropy(logits, part.samples.y, reduction="sum").item())
    assert found.loss == pytest.approx(sum(losses) / 40, rel=1e-6)


class Watchful(nn.Linear):
    """A layer that minds the mode it is asked in."""

    def __init__(self) -> None:
        super().__init__(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        assert not self.training
        assert not torch.is_grad_enabled()
        return super().forward(x)


def test_it_is_measured_in_evaluation_mode_and_without_gradients() -> None:
    network = made(Watchful)
    network.module.train()
    evaluate(network, network.initial_params(), Part(0, 0, samples(9)), 4, 1)
