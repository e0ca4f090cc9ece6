"""Compiled loss and gradients: what the plain ones are, compiled once for all heads."""

import shutil
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trgp.engine import compiled
from trgp.engine.company import PER_LAYER, compiling_pays
from trgp.engine.compiled import Compiler
from trgp.engine.gradients import loss_and_gradients
from trgp.engine.network import Network
from trgp.methods.base import Batch, Method
from trgp.methods.finetune import Finetune
from trgp.models import AlexNet

CPU = torch.device("cpu")


class Unmarked(nn.Module):
    """A convolution with all that comes with one; nothing says that only heads differ."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3, track_running_stats=False)
        self.drop = nn.Dropout(0.0)
        self.fc = nn.Linear(27, 5)
        self.heads = nn.ModuleList(nn.Linear(5, 4) for _ in range(3))

    def hidden(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.fc(self.drop(self.norm(self.conv(x)).relu()).flatten(1))
        return hidden.relu()

    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        logits: Tensor = self.heads[head]((head + 1) * self.hidden(x))
        return logits


class Small(Unmarked):
    """The same with heads after features, which all share."""

    def features(self, x: Tensor) -> Tensor:
        return self.hidden(x)

    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        logits: Tensor = self.heads[head](self.features(x))
        return logits


class Dropping(Small):
    """On a CPU dropout changes a tensor in place."""

    def __init__(self) -> None:
        super().__init__()
        self.drop.p = 0.5


class Penalised(Finetune):
    """A loss that reads the method's state."""

    def loss(self, params: Mapping[str, Tensor], state: Any, batch: Batch) -> Tensor:
        return super().loss(params, state, batch) + state["factor"] * params["conv.weight"].sum()


class Distilled(Finetune):
    """A loss that reads other heads than the task's own."""

    def loss(self, params: Mapping[str, Tensor], state: Any, batch: Batch) -> Tensor:
        return self.network.every_head(params, batch.x).square().mean()


def bound(method: Method, kind: type[nn.Module] = Small) -> Method:
    return method.bind(Network(kind, True, CPU, 0))


def batch(head: int, count: int = 6) -> Batch:
    draw = torch.Generator().manual_seed(head)
    x = torch.randn(count, 1, 5, 5, generator=draw)
    return Batch(x, torch.arange(count) % 4, head, head)


def compared(method: Method, compiler: Compiler, given: Batch, factored: Any, state: Any) -> float:
    """The largest difference between compiled and plain, of the loss and all gradients."""
    method.train_mode(0)
    params = method.network.initial_params()
    compiler(method, params, state, given, list(params), factored)  # draws, while it is traced
    found = []
    for compute in (compiler, loss_and_gradients):
        torch.manual_seed(1)
        found.append(compute(method, params, state, given, list(params), factored))
    (loss, grads), (plain_loss, plain) = found
    assert list(grads) == list(plain)
    differences = [(loss - plain_loss).abs().max()]
    for name, gradient in plain.items():
        assert type(grads[name]) is type(gradient)
        pairs = [(grads[name], gradient)]
        if not isinstance(gradient, Tensor):
            pairs = list(zip(grads[name], gradient, strict=True))
        differences += [(own - other).abs().max() for own, other in pairs]  # type: ignore[operator]
    return float(torch.stack(differences).max())


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs one for C++")
def test_compiled_gradients_are_the_plain_ones_and_serve_every_head_of_every_run() -> None:
    """Factors come where they are asked for."""
    before = len(compiled._COMPILED)
    for _ in range(2):
        method, compiler = bound(Finetune()), Compiler(6)
        for head in range(3):
            for factored in ((), ("fc.weight",)):
                assert compared(method, compiler, batch(head), factored, {}) < 1e-5
    assert len(compiled._COMPILED) == before + 2


@pytest.mark.parametrize(
    ("method", "kind", "count"),
    [
        (Finetune(), Small, 5),  # a last batch
        (Finetune(), Unmarked, 6),
        (Finetune(), Dropping, 6),
        (Penalised(), Small, 6),
        (Distilled(), Small, 6),
    ],
)
def test_what_can_change_from_task_to_task_is_not_compiled(
    method: Method, kind: type[nn.Module], count: int
) -> None:
    before = len(compiled._COMPILED)
    state = {"factor": torch.tensor(0.5)}
    difference = compared(bound(method, kind), Compiler(6), batch(1, count), (), state)
    assert difference == 0
    assert len(compiled._COMPILED) == before


def test_a_compiler_that_fails_leaves_the_steps_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any) -> Any:
        raise OSError("no compiler")

    monkeypatch.setattr(compiled, "_once_compiled", broken)
    method = bound(Finetune())
    with pytest.warns(UserWarning, match="taken uncompiled.*--engine captured"):
        assert compared(method, Compiler(6), batch(0), (), {}) == 0


def test_only_many_steps_of_convolutions_on_a_gpu_are_worth_compiling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = Network(AlexNet, True, CPU, 0)
    enough = 6 * PER_LAYER  # three convolutions, two linear layers, and a head
    assert not compiling_pays(network, enough)
    monkeypatch.setattr("trgp.engine.company.has_triton", lambda: True)
    monkeypatch.setattr("trgp.engine.company.shutil.which", lambda name: name)
    network.device = torch.device("cuda")
    assert compiling_pays(network, enough)
    assert not compiling_pays(network, enough - 1)
    plain = Network(lambda: nn.Linear(3, 2), False, CPU, 0)
    plain.device = torch.device("cuda")
    assert not compiling_pays(plain, 10**9)
