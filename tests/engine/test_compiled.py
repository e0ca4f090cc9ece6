"""Compiled loss and gradients: what the plain ones are, and equal graphs compiled once."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from companies import STACKABLE, asked_for, with_heads
from small_runs import some_tasks
from torch import Tensor, nn

import trgp
from trgp.engine import compiled
from trgp.engine.compiled import Compiler
from trgp.engine.errors import InputError
from trgp.engine.events import nobody
from trgp.engine.gradients import loss_and_gradients
from trgp.engine.learning import learn
from trgp.engine.network import Network
from trgp.methods import METHODS
from trgp.methods.base import Batch, Method
from trgp.methods.finetune import Finetune
from trgp.results.result import Result

pytestmark = pytest.mark.slow

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
        method = bound(Finetune())
        for head in range(3):
            compiler = Compiler(6)
            for factored in ((), ("fc.weight",)):
                assert compared(method, compiler, batch(head), factored, {}) < 1e-5
    assert len(compiled._COMPILED) == before + 2


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Graphs are traced, but not compiled: they come to the bits of plain steps. Their texts."""
    texts: list[str] = []

    def kept(module: Any, given: Any) -> Any:
        texts.append(module.code)
        return module

    monkeypatch.setattr(compiled, "_once_compiled", kept)
    return texts


@pytest.mark.parametrize("method", METHODS)
def test_a_run_of_several_tasks_ends_as_one_that_is_not_compiled(
    method: str, tmp_path: Path, uncompiled: list[str]
) -> None:
    """Also where a later task's loss is another than the first one's."""
    options = STACKABLE.get(method, {"memory_size": 20} if method == "agem" else {})
    found = []
    for name, compiling in (("a", False), ("b", True)):
        asked = asked_for(some_tasks(3), method, tmp_path / name, with_heads, [4], **options)
        ((_, end),) = learn(asked, CPU, True, nobody, compiled=compiling)
        assert isinstance(end, Result)
        found.append(end)
    plain, traced = found
    assert traced.digest == plain.digest
    assert traced.curves == plain.curves
    # HAT's gates and APD's parts are parameters of their own, and ER's loss reads examples.
    assert bool(uncompiled) == (method not in ("hat", "er", "apd"))


@pytest.mark.parametrize("kind", [Unmarked, Dropping])
def test_what_differs_from_head_to_head_is_traced_for_each(
    kind: type[nn.Module], uncompiled: list[str]
) -> None:
    method, compiler = bound(Finetune(), kind), Compiler(6)
    for head in range(3):
        assert compared(method, compiler, batch(head), (), {}) == 0
    assert len(set(uncompiled)) == (3 if kind is Unmarked else 0)  # dropout is in place on a CPU


class FirstEpoch(Finetune):
    """A loss that depends on what Python knows of a batch."""

    def loss(self, params: Mapping[str, Tensor], state: Any, batch: Batch) -> Tensor:
        return super().loss(params, state, batch) * (10 if batch.first else 1)


def test_what_python_knows_of_a_batch_is_not_taken_from_another(uncompiled: list[str]) -> None:
    method, compiler = bound(FirstEpoch()), Compiler(6)
    for first in (True, False):
        assert compared(method, compiler, batch(0)._replace(first=first), (), {}) == 0
    assert len(uncompiled) == 2


@pytest.mark.parametrize(("method", "count"), [(Finetune(), 5), (Penalised(), 6)])
def test_a_last_batch_and_a_loss_that_reads_the_state_are_not_compiled(
    method: Method, count: int, uncompiled: list[str]
) -> None:
    state = {"factor": torch.tensor(0.5)}
    assert compared(bound(method), Compiler(6), batch(1, count), (), state) == 0
    assert not uncompiled


class Reading(Small):
    def features(self, x: Tensor) -> Tensor:
        return self.hidden(x) * x.detach().mean().tolist()


@pytest.mark.parametrize("kind", [Small, Reading])
def test_a_network_that_cannot_be_compiled_leaves_the_steps_as_they_are(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise OSError("no compiler")

    monkeypatch.setattr(compiled, "_once_compiled", broken)
    method = bound(Finetune(), kind)
    why = "reads a number" if kind is Reading else "no compiler"
    with pytest.warns(UserWarning, match=f"{why}.*--engine captured"):
        assert compared(method, Compiler(6), batch(0), (), {}) == 0


def test_compiling_for_a_cpu_is_refused_with_what_to_give_instead(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="for a GPU only; give --engine captured"):
        trgp.run("permuted-digits", device="cpu", engine="compiled", out=tmp_path)
    assert not list(tmp_path.iterdir())
