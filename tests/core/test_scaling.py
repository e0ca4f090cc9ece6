"""Scaled weight projection: the formula, and that the parametrization trains as it says (4.2)."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    Batch,
    ConvNet,
    Tied,
    Vit,
    assert_close,
    classification,
    cross_entropy,
    learn,
    mlp,
    train,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from trgp import TRGP
from trgp.core.layers import Layer
from trgp.core.scaling import effective_weight
from trgp.core.subspace import Memory
from trgp.task import Change


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@given(
    seed=st.integers(0, 2**31),
    g=st.integers(1, 3),
    o=st.integers(1, 5),
    n=st.integers(1, 6),
    ranks=st.lists(st.integers(0, 6), max_size=3),
)
def test_the_effective_weight_is_the_papers(
    seed: int, g: int, o: int, n: int, ranks: list[int]
) -> None:
    """W + sum_j (Proj^Q_j(W) - Proj_j(W)) with Proj^Q(W) = W B Q B', group by group."""
    torch.manual_seed(seed)
    W = randn(g, o, n)
    bases = [torch.linalg.qr(randn(g, n, min(r, n))).Q for r in ranks]
    scalings = [randn(g, B.shape[2], B.shape[2]) for B in bases]
    got = effective_weight(W, bases, scalings)
    for i in range(g):
        expected = W[i]
        for B, S in zip(bases, scalings, strict=True):
            Q = S[i] + torch.eye(len(S[i]))
            expected = expected + W[i] @ B[i] @ Q @ B[i].T - W[i] @ B[i] @ B[i].T
        assert_close(got[i], expected)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(6, 10, 8, 4), (6,)),
    "tied": (Tied, (6,)),
    "convolutions": (lambda: ConvNet(width=8), (16, 4, 4)),
    "attention": (lambda: Vit(width=8, depth=1), (16, 4, 4)),
}


def third_task(kind: str, dtype: torch.dtype = torch.float64) -> tuple[TRGP, nn.Module, Batch]:
    """A learner that trusts both tasks it has learnt in every layer, and the next task's data."""
    make, shape = MODELS[kind]
    model = make().to(dtype)
    learner = TRGP(model, threshold=0.7, epsilon=0.0, top_k=2)
    batches = [classification(t, *shape, samples=6, dtype=dtype) for t in range(3)]
    for task in range(2):
        learn(learner, task, [batches[task]], steps=10)
    return learner, model.eval(), batches[2]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_task_starts_with_exactly_the_shared_weights_output(
    kind: str, dtype: torch.dtype
) -> None:
    learner, model, batch = third_task(kind, dtype)
    outputs = []

    def recording(net: nn.Module, batch: Batch) -> Tensor:
        outputs.append(net(batch[0]))  # during begin_task, with the shared weights
        return nn.functional.cross_entropy(outputs[-1], batch[1])

    with torch.no_grad():
        before = model(batch[0])
    learner.begin_task(2, [batch], recording)
    assert all(learner.selected[2].values())
    assert torch.equal(model(batch[0]), outputs[0])
    assert not torch.allclose(outputs[0], before)  # the last task's effective weights differ


@pytest.mark.parametrize("kind", MODELS)
def test_a_task_adds_a_square_of_the_rank_per_trusted_task(kind: str) -> None:
    learner, model, batch = third_task(kind)
    plain = set(model.parameters())
    learner.begin_task(2, [batch], cross_entropy)
    scalings = [p for p in model.parameters() if p not in plain]
    expected = []
    for name, memory in learner._memory.items():
        for j in learner.selected[2][name]:
            r = int(memory.masks[j].sum(1).max())
            assert 0 < r < memory.M.shape[1]
            expected.append((len(memory.M), r, r))
    assert sorted(tuple(S.shape) for S in scalings) == sorted(expected)
    assert not any(S.any() for S in scalings)
    assert set(scalings) <= set(learner.parameters())


# ---- training it is training the formula -------------------------------------------------------


class Literal:
    """The paper's variables, one W and the Q_j a layer, and a model that computes with them."""

    def __init__(self, learner: TRGP, model: nn.Module) -> None:
        """Taken before the task begins, from a plain model."""
        self.model = copy.deepcopy(model)
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.layers: dict[str, Layer] = learner._plan.layers
        self.slots = {n: [self.names[id(p)] for p in la.params] for n, la in self.layers.items()}
        self.memory: dict[str, Memory] = learner._memory
        self.W, self.S, self.bases = {}, {}, {}
        for name, layer in self.layers.items():
            M, C = self.memory[name].M, self.memory[name].C
            W = layer.matrix()
            self.W[name] = (W - W @ M @ M.mT + C @ M.mT).requires_grad_()

    def begin(self, selected: dict[str, list[Any]]) -> None:
        for name, trusted in selected.items():
            self.bases[name] = [self.memory[name].basis(j) for j in trusted]
            shapes = [(len(B), B.shape[2], B.shape[2]) for B in self.bases[name]]
            self.S[name] = [randn(*shape).mul_(0).requires_grad_() for shape in shapes]

    def variables(self) -> list[Tensor]:
        return [*self.W.values(), *(S for group in self.S.values() for S in group)]

    def effective(self, name: str) -> Tensor:
        return effective_weight(self.W[name], self.bases[name], self.S[name])

    def loss(self, batch: Batch) -> Tensor:
        params = {}
        for name, (weight, *biases) in self.slots.items():
            W = self.effective(name)
            kernel = W.shape[2] - len(biases)
            shape = self.model.get_parameter(weight).shape
            params[weight] = W[..., :kernel].reshape(shape)
            for i, bias in enumerate(biases):
                params[bias] = W[..., kernel + i].reshape(-1)
        return nn.functional.cross_entropy(functional_call(self.model, params, batch[:1]), batch[1])

    def step(self, optimizer: Optimizer, batch: Batch) -> None:
        """Gradient and update of W are projected; Q moves freely."""
        optimizer.zero_grad()
        self.loss(batch).backward()
        before = {name: W.detach().clone() for name, W in self.W.items()}
        for name, W in self.W.items():
            W.grad -= W.grad @ self.memory[name].M @ self.memory[name].M.mT
        optimizer.step()
        with torch.no_grad():
            for name, W in self.W.items():
                M = self.memory[name].M
                W -= (W - before[name]) @ M @ M.mT


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
        (torch.optim.Adam, {"lr": 0.01, "eps": 1e-3}),
        (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3}),
    ],
    ids=["SGD", "Nesterov", "Adam", "AdamW"],
)
def test_training_is_training_the_formula(
    kind: str, make: Callable[..., Optimizer], options: dict[str, Any]
) -> None:
    """Weights, Q and losses over 20 steps, then the weights a finished task leaves."""
    learner, model, batch = third_task(kind)
    literal = Literal(learner, model)
    learner.begin_task(2, [batch], cross_entropy)
    literal.begin(learner.selected[2])
    ours = learner.attach(make(learner.parameters(), **options))
    theirs = make(literal.variables(), **options)
    for _ in range(20):
        ours.zero_grad()
        loss = cross_entropy(model, batch)
        assert_close(loss.detach(), literal.loss(batch).detach())
        loss.backward()
        ours.step()
        literal.step(theirs, batch)
    moved = 0.0
    for name, layer in learner._plan.layers.items():
        assert_close(layer.matrix(), literal.W[name].detach())
        scalings = learner._open.scalings[name].S
        for S, expected in zip(scalings, literal.S[name], strict=True):
            assert_close(S.detach(), expected.detach())
            moved = max(moved, float(S.detach().abs().max()))
    assert moved > 1e-3
    learner.end_task([batch])
    for name, layer in learner._plan.layers.items():
        assert_close(layer.matrix(), literal.effective(name).detach())


# ---- what stays --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_between_tasks_the_model_is_plain(kind: str) -> None:
    learner, model, batch = third_task(kind)
    keys, params = list(model.state_dict()), list(model.parameters())
    learn(learner, 2, [batch], steps=3)
    assert list(model.state_dict()) == keys
    assert all(p is q for p, q in zip(model.parameters(), params, strict=True))
    assert all(p.is_leaf for p in model.parameters())
    assert not any("Parametrized" in type(module).__name__ for module in model.modules())


@given(
    seed=st.integers(0, 2**31),
    o=st.integers(1, 8),
    ranks=st.lists(st.integers(1, 6), min_size=1, max_size=3),
)
def test_a_task_keeps_the_smaller_of_its_two_forms(seed: int, o: int, ranks: list[int]) -> None:
    """Q_j - I, or D = (W_eff - W) M at the columns in use; both say the same weight."""
    torch.manual_seed(seed)
    W, M = randn(2, o, 8), torch.linalg.qr(randn(2, 8, 6)).Q
    masks: dict[int | str, Tensor] = {}
    for j, r in enumerate(ranks):
        masks[j] = torch.stack([torch.randperm(6) < r for _ in range(2)])
    memory = Memory(M, W @ M, torch.tensor([6, 6]), masks)
    scalings = [randn(2, r, r) for r in ranks]
    change = Change.of(list(masks), scalings, memory)
    bases = [memory.basis(j) for j in masks]
    expected = effective_weight(W, bases, scalings)
    assert_close(W + change.coordinates(memory) @ M.mT, expected)
    union = int(torch.stack(list(masks.values())).any(0).sum(1).max())
    smaller = min(sum(2 * r * r for r in ranks), 2 * o * union)
    assert sum(t.numel() for t in change.tensors) == smaller


def test_a_copy_made_within_a_task_lives_its_own_life() -> None:
    """Ending the copy's task must not touch the original, nor the other way round."""
    learner, model, batch = third_task("mlp")
    learner.begin_task(2, [batch], cross_entropy)
    train(learner, [batch], steps=3)
    twin = copy.deepcopy(learner)
    train(twin, [batch], steps=3)
    twin.end_task([batch])
    train(learner, [batch], steps=3)
    learner.end_task([batch])
    assert_close(model(batch[0]), twin.model(batch[0]))
