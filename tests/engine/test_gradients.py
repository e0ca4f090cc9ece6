"""Gradients by name, and the factors that stand for them in linear layers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, mlp
from small_runs import CLASSES, Conv, Heads
from torch import Tensor, nn

from trgp.engine.gradients import loss_and_gradients
from trgp.engine.network import Network
from trgp.engine.stacked import stacked_step
from trgp.methods import Batch, Factors, Method
from trgp.methods.base import Grads
from trgp.methods.finetune import Finetune
from trgp.types import Params, Rate, State


class Twice(nn.Module):
    """A layer that is called twice, on inputs of different lengths."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=bias)
        self.head = nn.Linear(8, CLASSES, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).tanh() + self.layer(x[:3].tanh()).mean(0))


class Sequence(nn.Module):
    """Samples of several rows each: the layer sees three axes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 5)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.view(-1, 4, 2)).relu().mean(1))


class Named(nn.Module):
    """A layer that is given its input by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(input=x).relu())


class Aside(nn.Module):
    """A layer that is called for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(8, 6)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.idle(x)
        return self.head(x)


def in_place() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 6), nn.ReLU(inplace=True), nn.Linear(6, 5), nn.ReLU(inplace=True), Last()
    )


class Last(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, CLASSES)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: mlp(8, 12, 10, CLASSES),
    "no bias": lambda: mlp(8, 12, 10, CLASSES, bias=False),
    "in place": in_place,
    "twice": Twice,
    "twice, no bias": lambda: Twice(bias=False),
    "three axes": Sequence,
    "by name": Named,
    "one layer": lambda: nn.Linear(8, CLASSES),
}


def bound(make: Callable[[], nn.Module], heads: bool = False) -> tuple[Method, dict[str, Tensor]]:
    network = Network(lambda: make().double(), heads, torch.device("cpu"), 0)
    return Finetune().bind(network), network.initial_params()


def a_batch(n: int = 7, *shape: int) -> Batch:
    x = torch.randn(n, *(shape or (8,)), dtype=torch.float64)
    return Batch(x, torch.arange(n) % CLASSES, 0, 0)


def by_autograd(
    method: Method, params: dict[str, Tensor], batch: Batch, head: int | None = None
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The same from the module itself."""
    module = method.network.module
    module.load_state_dict(params)
    logits = module(batch.x) if head is None else module(batch.x, head)
    loss = F.cross_entropy(logits, batch.y)
    named = dict(module.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return loss.detach(), dict(zip(named, found, strict=True))


@pytest.mark.parametrize("name", NETWORKS)
def test_factors_make_up_autograds_gradient(name: str) -> None:
    method, params = bound(NETWORKS[name])
    weights = [key for key in params if key.endswith("weight")]
    batch = a_batch()
    expected_loss, expected = by_autograd(method, params, batch)
    for factored in ([], weights[:1], weights):
        loss, grads = loss_and_gradients(method, params, {}, batch, list(params), factored)
        assert_close(loss, expected_loss)
        assert not loss.requires_grad
        assert grads.keys() == expected.keys()
        for key, gradient in grads.items():
            theirs = expected[key]
            assert theirs is not None
            assert isinstance(gradient, Factors) == (key in factored)
            if isinstance(gradient, Factors):
                gradient = gradient.delta.T @ gradient.x
            assert not gradient.requires_grad
            assert_close(gradient, theirs)
    assert not any(module._forward_hooks for module in method.network.module.modules())


class AlongFactors(Finetune):
    """Steps of plain SGD that also take factors."""

    def step(
        self, params: Params, grads: Grads, state: State, batch: Batch, lr: Rate
    ) -> tuple[dict[str, Tensor], State]:
        whole = {n: g.delta.mT @ g.x if isinstance(g, Factors) else g for n, g in grads.items()}
        return super().step(params, whole, state, batch, lr)


@pytest.mark.parametrize("name", NETWORKS)
def test_factors_of_a_stack_are_those_of_each_run(name: str) -> None:
    """Whatever is done to a layer's output, and however often it is called."""
    plain, first = bound(NETWORKS[name])
    method = AlongFactors().bind(plain.network)
    each = [first, plain.network.initial_params(1), plain.network.initial_params(2)]
    batches = [a_batch() for _ in each]
    together = {key: torch.stack([params[key] for params in each]) for key in first}
    batch = Batch(torch.stack([b.x for b in batches]), torch.stack([b.y for b in batches]), 0, 0)
    lr = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    weights = [key for key in first if key.endswith("weight")]
    for factored in ([], weights[:1], weights):
        new, _, losses = stacked_step(method, together, {}, batch, lr, list(first), factored)
        assert new.keys() == first.keys()
        for k, (params, own) in enumerate(zip(each, batches, strict=True)):
            loss, expected = by_autograd(plain, params, own)
            assert_close(losses[k], loss)
            for key, gradient in expected.items():
                assert gradient is not None
                assert_close(new[key][k], params[key] - lr[k] * gradient)
    assert not any(module._forward_hooks for module in method.network.module.modules())


@pytest.mark.parametrize("factored", [[], ["idle.weight"]])
def test_a_layer_that_does_nothing_does_not_move_in_a_stack(factored: list[str]) -> None:
    plain, params = bound(Aside)
    method = AlongFactors().bind(plain.network)
    together = {key: torch.stack([tensor, tensor]) for key, tensor in params.items()}
    x, y, *_ = a_batch()
    batch = Batch(torch.stack([x, x]), torch.stack([y, y]), 0, 0)
    lr = torch.ones(2, dtype=torch.float64)
    new, _, _ = stacked_step(method, together, {}, batch, lr, list(params), factored)
    assert new.keys() == {"head.weight", "head.bias"}


def test_a_head_that_is_not_used_has_no_gradient() -> None:
    method, params = bound(Heads, heads=True)
    batch = a_batch()._replace(head=1)
    _, expected = by_autograd(method, params, batch, 1)
    _, grads = loss_and_gradients(method, params, {}, batch, list(params))
    assert {key for key in params if key not in grads} == {
        f"heads.{h}.{part}" for h in (0, 2) for part in ("weight", "bias")
    }
    for key, gradient in grads.items():
        theirs = expected[key]
        assert isinstance(gradient, Tensor)
        assert theirs is not None
        assert_close(gradient, theirs)


@pytest.mark.parametrize("factored", [[], ["idle.weight"]])
def test_a_layer_that_does_nothing_has_no_gradient(factored: list[str]) -> None:
    method, params = bound(Aside)
    _, grads = loss_and_gradients(method, params, {}, a_batch(), list(params), factored)
    assert grads.keys() == {"head.weight", "head.bias"}


def test_only_what_is_trained_has_a_gradient_and_nothing_is_changed() -> None:
    method, params = bound(Conv)
    before = {name: tensor.clone() for name, tensor in params.items()}
    method.network.module.eval()
    trained = ["conv.weight", "head.bias"]
    _, grads = loss_and_gradients(method, params, {}, a_batch(7, 4, 4, 4), trained)
    assert list(grads) == trained
    for name, tensor in params.items():
        assert torch.equal(tensor, before[name])
        assert not tensor.requires_grad


class Penalised(Finetune):
    """A loss that also depends on a parameter which the network does not know."""

    def loss(self, params: Any, state: Any, batch: Batch) -> Tensor:
        weights = {name: p for name, p in params.items() if name != "own"}
        return super().loss(weights, state, batch) + (params["own"] ** 2).sum()


def test_parameters_of_a_methods_own_have_gradients() -> None:
    plain, params = bound(lambda: mlp(8, CLASSES))
    method = Penalised().bind(plain.network)
    own = torch.tensor([1.0, -2.0], dtype=torch.float64)
    everything = {**params, "own": own}
    _, grads = loss_and_gradients(method, everything, {}, a_batch(), list(everything))
    gradient = grads["own"]
    assert isinstance(gradient, Tensor)
    assert_close(gradient, 2 * own)
