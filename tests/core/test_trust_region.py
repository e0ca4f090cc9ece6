"""Which old tasks are trusted, and that finding out leaves no trace (paper, section 4.1)."""

import copy
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    Batch,
    ConvNet,
    Vit,
    assert_close,
    classification,
    cross_entropy,
    learn,
    mlp,
    mse,
    train,
)
from hypothesis import given
from hypothesis import strategies as st
from support.inside import bases, coordinates
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from trgp import TRGP
from trgp.core.subspace import columns_of
from trgp.core.trust_region import projections, total_over, trust_region

# ---- the definition ----------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**31),
    g=st.integers(1, 3),
    o=st.integers(1, 5),
    n=st.integers(1, 8),
    tasks=st.integers(0, 4),
)
def test_scores_are_norms_of_projected_gradients(
    seed: int, g: int, o: int, n: int, tasks: int
) -> None:
    """||G B_j B_j'||_F, literally, over all groups together."""
    torch.manual_seed(seed)
    ranks = torch.randint(0, n + 1, (g,))
    used = torch.arange(n) < ranks[:, None]
    M = torch.linalg.qr(torch.randn(g, n, n).double()).Q * used[:, None]
    G = torch.randn(g, o, n).double()
    masks = {}
    for j in range(tasks):
        masks[j] = ((torch.rand(g, n) < 0.5) & used)[:, : int(torch.randint(0, n + 1, ()))]
    scores = projections(G, M, masks)
    assert list(scores) == list(masks)
    for j, mask in masks.items():
        B = columns_of(M, mask)
        assert scores[j] ** 0.5 == pytest.approx(float((G @ B @ B.mT).norm()), abs=1e-10)


@given(
    squared=st.dictionaries(st.integers(0, 9), st.floats(0, 1), max_size=6),
    rest=st.floats(0, 1),
    epsilon=st.floats(0, 1),
    top_k=st.integers(1, 4),
)
def test_the_strongest_that_pass_are_trusted(
    squared: dict[int, float], rest: float, epsilon: float, top_k: int
) -> None:
    total = sum(squared.values()) + rest
    trusted = trust_region(squared, total, epsilon, top_k)
    passing = [j for j in squared if squared[j] > 0 and squared[j] ** 0.5 >= epsilon * total**0.5]
    assert len(trusted) == min(top_k, len(passing))
    assert set(trusted) <= set(passing)
    scores = [squared[j] for j in trusted]
    assert scores == sorted(scores, reverse=True)
    assert all(squared[j] <= min(scores) for j in set(passing) - set(trusted))


def test_a_score_of_exactly_epsilon_passes() -> None:
    assert trust_region({"a": 0.25, "b": 0.2499}, 1.0, 0.5, 2) == ["a"]


def test_nothing_is_trusted_where_the_gradient_is_zero() -> None:
    assert trust_region({0: 0.0, 1: 0.0}, 0.0, 0.0, 2) == []


def test_a_whole_tasks_scores_are_sums_over_layers() -> None:
    assert total_over([{0: 1.0, 1: 2.0}, {0: 0.5}]) == {0: 1.5, 1: 2.0}


# ---- through the learner -----------------------------------------------------------------------


def three_tasks(method: type[TRGP] = TRGP, **options: Any) -> tuple[TRGP, nn.Sequential]:
    """A learner that knows tasks 'a', 'b' and 7, on inputs of low rank."""
    torch.manual_seed(0)
    model = mlp(8, 10, 4).double()
    learner = method(model, **({"threshold": 0.9} | options))
    for seed, task in enumerate(("a", "b", 7)):
        learn(learner, task, [classification(seed, 8, rank=3, dtype=torch.float64)], steps=10)
    return learner, model


def new_task() -> Batch:
    return classification(9, 8, rank=5, samples=12, dtype=torch.float64)


def shared_copy(learner: TRGP, model: nn.Module) -> nn.Module:
    """The model with its shared weights: W M = C in every layer."""
    shared = copy.deepcopy(model)
    for name, each in bases(learner).items():
        layer = shared.get_submodule(name)
        W = torch.cat([layer.weight, layer.bias[:, None]], dim=1).detach()
        M, C = each.M[0], coordinates(learner)[name][0]
        W = W - W @ M @ M.T + C @ M.T
        with torch.no_grad():
            layer.weight.copy_(W[:, :-1])
            layer.bias.copy_(W[:, -1])
    return shared


def gradients_at(shared: nn.Module, layers: Iterable[str], batch: Batch) -> dict[str, Tensor]:
    """dL/dW of these layers, the bias in the last column, in eval mode."""
    shared.eval().zero_grad()
    cross_entropy(shared, batch).backward()
    modules = {name: shared.get_submodule(name) for name in layers}
    return {n: torch.cat([m.weight.grad, m.bias.grad[:, None]], 1) for n, m in modules.items()}


def literal_scores(
    learner: TRGP, model: nn.Module, batch: Batch
) -> tuple[dict[str, dict[Any, float]], dict[str, float]]:
    """Per layer ||G B_j B_j'|| of every old task and ||G||, as the paper writes them."""
    gradients = gradients_at(shared_copy(learner, model), learner.ranks, batch)
    scores = {}
    for name, G in gradients.items():
        of_tasks = bases(learner)[name].by_task
        scores[name] = {j: float((G @ B[0] @ B[0].T).norm()) for j, B in of_tasks.items()}
    return scores, {name: float(G.norm()) for name, G in gradients.items()}


def chosen(scores: dict[Any, float], norm: float, epsilon: float, top_k: int) -> list[Any]:
    passing = [j for j in scores if scores[j] >= epsilon * norm]
    return sorted(passing, key=lambda j: -scores[j])[:top_k]


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("epsilon", [0.0, 0.5, 0.7, 0.8, 1.0])
def test_every_layer_trusts_by_its_own_gradient(epsilon: float, top_k: int) -> None:
    learner, model = three_tasks(epsilon=epsilon, top_k=top_k)
    scores, norms = literal_scores(learner, model, new_task())
    learner.begin_task("new", [new_task()], cross_entropy)
    expected = {n: chosen(scores[n], norms[n], epsilon, top_k) for n in scores}
    assert learner.selected["new"] == expected
    if epsilon == 0.0:
        assert all(len(trusted) == top_k for trusted in expected.values())
    if epsilon == 1.0:
        assert not any(expected.values())


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_a_task_trusts_by_the_whole_gradient(top_k: int) -> None:
    """The weakest of the chosen passes with an epsilon just below its share, not just above."""
    learner, model = three_tasks(top_k=top_k, scope="task")
    scores, norms = literal_scores(learner, model, new_task())
    whole = {j: sum(scores[n][j] ** 2 for n in scores) ** 0.5 for j in ("a", "b", 7)}
    strongest = sorted(whole, key=lambda j: -whole[j])[:top_k]
    share = whole[strongest[-1]] / sum(value**2 for value in norms.values()) ** 0.5
    for shift, expected in ((-1e-9, strongest), (1e-9, strongest[:-1])):
        twin = copy.deepcopy(learner)
        twin.epsilon = share + shift
        twin.begin_task("new", [new_task()], cross_entropy)
        assert twin.selected["new"] == {"0": expected, "2": expected}


def test_scope_task_leaves_out_layers_without_gradient() -> None:
    """A head that the new task does not use has nothing to scale."""
    model = nn.ModuleDict({"body": nn.Linear(6, 6), "one": nn.Linear(6, 3), "two": nn.Linear(6, 3)})

    def loss_of(head: str) -> Callable[[nn.Module, Batch], Tensor]:
        return lambda net, batch: nn.functional.mse_loss(net[head](net["body"](batch[0])), batch[1])

    learner = TRGP(model, scope="task", epsilon=0.0)
    batch = torch.randn(5, 6), torch.randn(5, 3)
    learn(learner, 0, [batch], loss_of("one"))
    learner.begin_task(1, [batch], loss_of("two"))
    assert learner.selected[1] == {"body": [0], "one": [], "two": []}


def test_a_layer_without_gradient_trusts_nothing() -> None:
    """Both ways: a dead layer, and a loss at its minimum."""
    model = mlp(6, 6, 4).double()
    learner = TRGP(model, epsilon=0.0)
    x = torch.randn(5, 6).double()
    learn(learner, 0, [(x, torch.randn(5, 4).double())], mse)
    with torch.no_grad():
        target = model(x)
    learner.begin_task(1, [(x, target)], mse)
    assert learner.selected[1] == {"0": [], "2": []}


def test_options_per_layer_and_as_functions() -> None:
    """Globs over layer names; a function sees layer and task."""
    asked = []

    def epsilon(layer: str, task: int | str) -> float:
        asked.append((layer, task))
        return {"0": 0.0, "2": 1.0}[layer]

    plain, _ = three_tasks(epsilon=0.0)
    by_function, _ = three_tasks(epsilon=epsilon)
    by_mapping, _ = three_tasks(epsilon={"0": 0.0, "*": 1.0})
    for learner in (plain, by_function, by_mapping):
        learner.begin_task("new", [new_task()], cross_entropy)
    both = plain.selected["new"]
    assert both["0"]
    assert both["2"]
    assert by_function.selected["new"] == {"0": both["0"], "2": []}
    assert by_mapping.selected["new"] == {"0": both["0"], "2": []}
    assert {("0", "new"), ("2", "new"), ("0", 7)} <= set(asked)


def test_a_threshold_may_follow_a_schedule() -> None:
    def ranks(threshold: Any) -> list[int]:
        learner = TRGP(mlp(20, 20, 4).double(), threshold=threshold)
        seen = []
        for task in range(2):
            batch = classification(task, 20, samples=16, dtype=torch.float64)
            learn(learner, task, [batch], steps=1)
            seen.append([rank for rank, _ in learner.ranks.values()])
        return seen

    torch.manual_seed(0)
    low = ranks(0.5)
    torch.manual_seed(0)
    high = ranks(0.9)
    torch.manual_seed(0)
    mapped = ranks({"0": 0.9, "2": 0.5})
    torch.manual_seed(0)
    scheduled = ranks(lambda layer, task: 0.5 + 0.4 * task)
    assert low[0] < high[0]
    assert mapped[0] == [high[0][0], low[0][1]]
    assert scheduled[0] == low[0]
    assert scheduled[1][0] > low[1][0]


@pytest.mark.parametrize("sizes", [[12], [5, 7], [1, 4, 3, 4], [10, 2]], ids=str)
def test_samples_not_batches_are_averaged(sizes: list[int]) -> None:
    """However the loader cuts them, and only as many as are asked for.

    An epsilon just below the strongest task's share of the gradient trusts it, just above not.
    """
    learner, model = three_tasks(selection_samples=10)
    x, y = new_task()
    scores, norms = literal_scores(learner, model, (x[:10], y[:10]))
    share = {name: max(scores[name].values()) / norms[name] for name in scores}
    batches = list(zip(x.split(sizes), y.split(sizes), strict=True))
    for shift, trusted in ((-1e-9, 1), (1e-9, 0)):
        twin = copy.deepcopy(learner)
        twin.epsilon = {name: value + shift for name, value in share.items()}
        twin.begin_task("new", batches, cross_entropy)
        assert [len(tasks) for tasks in twin.selected["new"].values()] == [trusted, trusted]
    other, norms = literal_scores(learner, model, (x, y))
    assert all(abs(max(other[n].values()) / norms[n] - share[n]) > 1e-6 for n in share)


# ---- no trace ----------------------------------------------------------------------------------


class Noisy(TensorDataset):
    """Draws from every source of randomness while it is read."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y = super().__getitem__(index)
        return x + random.random() + np.random.rand() + torch.rand(1), y


def noisy_loss(model: nn.Module, batch: Batch) -> Tensor:
    random.random()
    np.random.rand()
    return cross_entropy(model, batch) + 0 * torch.rand(())


def states() -> tuple[Any, ...]:
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


def loaders(batch: Batch, kind: str) -> tuple[DataLoader[Any], torch.Generator | None]:
    data = Noisy(*batch)
    generator = torch.Generator().manual_seed(5)
    if kind == "own generator":
        return DataLoader(data, 4, shuffle=True, generator=generator), generator
    if kind == "sampler":
        sampler = RandomSampler(data, generator=generator)
        return DataLoader(data, 4, sampler=sampler), generator
    if kind == "batch sampler":
        batches = BatchSampler(RandomSampler(data, generator=generator), 4, drop_last=False)
        return DataLoader(data, batch_sampler=batches), generator
    return DataLoader(data, 4, shuffle=True), None


@pytest.mark.parametrize("kind", ["torch's", "own generator", "sampler", "batch sampler"])
@pytest.mark.parametrize("step", ["begin_task", "end_task"])
def test_random_states_are_as_before(kind: str, step: str) -> None:
    """Training sees the batches it would have seen without a learner."""
    model = ConvNet(width=8)
    learner = TRGP(model)
    batch = classification(0, 16, 4, 4)
    learn(learner, 0, [batch])
    loader, generator = loaders(batch, kind)
    if step == "end_task":
        learner.begin_task(1, [batch], noisy_loss)
    before = states()
    drawn = generator.get_state() if generator is not None else None
    if step == "begin_task":
        learner.begin_task(1, loader, noisy_loss)
    else:
        learner.end_task(loader)
    assert states() == before
    if generator is not None:
        assert torch.equal(generator.get_state(), drawn)


@pytest.mark.parametrize("make", [ConvNet, Vit])
def test_the_model_is_as_before(make: Callable[..., nn.Module]) -> None:
    """Parameters, buffers, modes, gradients and what requires one, as values and as objects."""
    model = make(width=8)
    learner = TRGP(model, epsilon=0.0, norm="shared")
    batches = [classification(task, 16, 4, 4) for task in range(2)]
    learn(learner, 0, batches[:1])
    model.train()
    model.head.eval()
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    values = {n: t.detach().clone() for n, t in (params | buffers).items()}
    training = {n: p.requires_grad for n, p in params.items()}
    modes = {module: module.training for module in model.modules()}

    def check() -> None:
        assert {module: module.training for module in modes} == modes
        assert {n: p.requires_grad for n, p in params.items()} == training
        for n, tensor in (params | buffers).items():
            assert_close(tensor.detach(), values[n], 1e-6 if n in params else 0)
        for p in params.values():
            assert torch.equal(p.grad, torch.full_like(p, 3.0))

    learner.begin_task(1, [batches[1]], cross_entropy)
    check()
    learner.end_task([batches[1]])
    check()
    for now, before in ((model.named_parameters(), params), (model.named_buffers(), buffers)):
        assert all(tensor is before[name] for name, tensor in now)


def test_buffers_and_modes_survive_an_error() -> None:
    model = ConvNet(width=8)
    learner = TRGP(model)
    learn(learner, 0, [classification(0, 16, 4, 4)])
    model.train()
    before = copy.deepcopy(model.state_dict())

    def broken(net: nn.Module, batch: Batch) -> Tensor:
        net.norm1.train = nn.BatchNorm2d.train.__get__(net.norm1)  # type: ignore[method-assign]
        net.train()
        net(batch[0])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        learner.begin_task(1, [classification(1, 16, 4, 4)], broken)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    assert model.training
    assert not model.norm1.training


def test_the_gradient_is_that_of_the_shared_weights_in_eval_mode() -> None:
    """Not of the last task's effective weights, and not with dropout or batch statistics."""
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4)
    ).double()
    learner = TRGP(model, epsilon=0.0, top_k=1, norm="shared")
    batches = [classification(task, 6, dtype=torch.float64) for task in range(3)]
    learn(learner, 0, batches[:1])
    learner.begin_task(1, batches[1:2], cross_entropy)
    train(learner, batches[1:2], steps=40)
    learner.end_task(batches[1:2])
    original = shared_copy(learner, model)[0].weight
    assert not torch.allclose(original, model[0].weight)  # the trust region makes a difference
    scores, norms = literal_scores(learner, model, batches[2])

    seen = []

    def recording(net: nn.Module, batch: Batch) -> Tensor:
        seen.append((net[0].weight.detach().clone(), any(m.training for m in net.modules())))
        return cross_entropy(net, batch)

    model.train()
    learner.begin_task(2, batches[2:], recording)
    ((weight, training),) = seen
    assert_close(weight, original)
    assert not training
    assert learner.selected[2] == {n: chosen(scores[n], norms[n], 0.0, 1) for n in scores}
    assert model[3].training
