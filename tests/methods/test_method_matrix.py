"""Every method on every kind of network: it learns, resumes, steps as a plain module would, and
looks at no value on the way."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close
from method_parts import (
    ConvHeads,
    OneHead,
    bound,
    context,
    eager,
    easy_tasks,
    gradients,
    logits_of,
    residual,
    some_samples,
)
from small_runs import CHAINS, ENDS, End, Make, measured_apart, run
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trgp.benchmarks.data import Tensors
from trgp.engine.batches import Part
from trgp.engine.errors import InputError
from trgp.engine.events import EpochFinished, Event
from trgp.engine.train import Epoch, train_step
from trgp.methods import METHODS, Batch, Method
from trgp.methods.finetune import Finetune
from trgp.results.result import Result
from trgp.tree import leaves


class Kind(NamedTuple):
    """A network, its samples, and whether every task has a head of its own."""

    make: Make
    shape: tuple[int, ...]
    heads: bool


NETWORKS = {
    "perceptron": Kind(OneHead, (8,), False),
    "convolutions": Kind(lambda: ConvHeads(2, dropout=0.2), (3, 8, 8), True),
    "residual": Kind(lambda: residual(2), (3, 16, 16), True),
}
# What does not fit small tasks by itself.
OPTIONS: dict[str, dict[str, Any]] = {
    "ewc": {"strength": 5.0},
    "er": {"memory_size": 20},
    "agem": {"memory_size": 20},
    "gpm": {"threshold": 0.9},
    "trgp": {"threshold": 0.9, "epsilon": 0.0},
    "pnn": {"width": 0.5},
    "den": {"growth": 0.2, "phase_epochs": 2},
    "rcl": {"growth": 0.3, "trials": 3, "per_round": 2, "trial_epochs": 2},
}
# Those that learn by Adam, and the rate that fits it.
ADAPTIVE = {"pnn": 0.02, "den": 0.02, "rcl": 0.02, "apd": 0.02}
PAIRS = [(method, network) for method in METHODS for network in NETWORKS]


def possible(method: str, network: str) -> bool:
    if method in CHAINS and network == "residual":
        return False
    return NETWORKS[network].heads or not METHODS[method].about.several_heads


CASES = [pair for pair in PAIRS if possible(*pair)]
every_case = pytest.mark.parametrize(("method", "network"), CASES)


def two_tasks(network: str) -> Any:
    return easy_tasks(2, *NETWORKS[network].shape)


def go(method: str, network: str, out: Path, **settings: Any) -> Result:
    options = {"epochs": 4, "lr": ADAPTIVE.get(method, 0.2)} | OPTIONS.get(method, {}) | settings
    return run(two_tasks(network), method, out, NETWORKS[network].make, **options)


@every_case
def test_two_tasks_are_learnt_and_evaluated(
    method: str, network: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = METHODS[method]
    end_task = kind.end_task
    ENDS.clear()

    def watched(self: Method, ctx: Any) -> Any:
        params, state = end_task(self, ctx)
        ENDS.append(End(self, ctx.params, params, state))
        return params, state

    monkeypatch.setattr(kind, "end_task", watched)
    result = go(method, network, tmp_path)
    stages = 1 if kind.about.joint else 2
    assert len(ENDS) == len(result.curves) == stages
    for curve in result.curves:
        assert curve["loss"][-1] < curve["loss"][0] - 0.05
    for t, end in enumerate(ENDS):
        row = result.accuracy_matrix[1 if kind.about.joint else t]
        for j, (_, (x, y)) in enumerate(two_tasks(network)):
            if j > t and not kind.about.joint:
                assert row[j] is None
                continue
            right = (end.logits(x, j).argmax(1) == y).double().mean()
            assert row[j] == pytest.approx(float(right))
    held = sum(t.numel() * t.element_size() for _, t in leaves(ENDS[-1].state))
    assert result.state_bytes == held
    assert all(t.isfinite().all() for _, t in leaves(ENDS[-1].state))


@every_case
def test_stopped_in_both_tasks_it_ends_the_same(method: str, network: str, tmp_path: Path) -> None:
    met: set[int] = set()

    def stop(event: Event) -> None:
        if isinstance(event, EpochFinished) and event.task not in met:
            met.add(event.task)
            raise EOFError

    whole = go(method, network, tmp_path / "whole", epochs=2, patience=1)
    parts = None
    for _ in range(3):
        with suppress(EOFError):
            parts = go(method, network, tmp_path / "parts", epochs=2, patience=1, observer=stop)
            break
    assert parts is not None
    assert met == set(range(len(whole.curves)))
    assert measured_apart(parts) == measured_apart(whole)


@pytest.mark.parametrize(("method", "network"), [pair for pair in PAIRS if pair not in CASES])
def test_what_does_not_fit_together_is_refused(method: str, network: str, tmp_path: Path) -> None:
    sentence = f"^{method} (needs a head for every task|widens chains of linear layers)"
    with pytest.raises(InputError, match=sentence):
        go(method, network, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


# ---- single steps ----------------------------------------------------------------------------


class Stage:
    """A method between two tasks, driven by hand in float64."""

    def __init__(self, method: Method, network: str) -> None:
        self.network = NETWORKS[network]
        self.method, self.params = bound(method, self.network.make, self.network.heads)
        self.state: Any = {}
        self.task = -1

    def begin(self) -> None:
        self.task += 1
        self.samples = some_samples(16, *self.network.shape, seed=self.task)
        self.params, self.state = self.method.begin_task(self._context())

    def end(self) -> None:
        self.params, self.state = self.method.end_task(self._context())

    def _context(self) -> Any:
        return context(self.method, self.params, self.samples, self.task, self.state, tasks=2)

    def batches(self, epoch: int = 0) -> Iterator[Batch]:
        head = self.task if self.network.heads else 0
        part = Part(self.task, head, Tensors(*self.samples))
        return Epoch(0, self.task, epoch, [part], 8, 0.1, self.trained).batches(self.method)

    @property
    def trained(self) -> list[str]:
        net = self.method.network
        free = net.trainable - self.method.frozen(self.task)
        return [name for name in self.params if name in free or name not in net.names]

    def step(self, batch: Batch, lr: Any = 0.125) -> tuple[Any, Any, Tensor]:
        """From where it stands, which stays as it is."""
        factored = self.method.factored(self.state, 8)
        apart = {n: self.params[n].clone() for n in self.method.network.buffers}
        params = {**self.params, **apart}
        torch.manual_seed(0)
        return train_step(self.method, params, self.state, batch, lr, self.trained, factored)


Loss = Callable[[nn.Module, Batch, Stage], Tensor]


def plain_loss(module: nn.Module, batch: Batch, stage: Stage) -> Tensor:
    return F.cross_entropy(logits_of(module, batch, stage.network.heads), batch.y)


def loss_of_the_batch_twice(module: nn.Module, batch: Batch, stage: Stage) -> Tensor:
    twice = batch._replace(x=torch.cat([batch.x, batch.x]), y=torch.cat([batch.y, batch.y]))
    return plain_loss(module, twice, stage)


def loss_behind_gates(module: Any, batch: Batch, stage: Stage) -> Tensor:
    """Of gates at the flattest, in the first task."""
    taken = []
    for gate in module.gates():
        a = torch.sigmoid(stage.params[f"embedding {gate.name}"] / 400)
        taken.append(a)

        def multiply(layer: nn.Module, args: tuple[Tensor], a: Tensor = a) -> Tensor:
            units = args[0].reshape(len(batch.x), len(a), -1)
            return (units * a[:, None]).reshape(args[0].shape)

        module.get_submodule(gate.module(batch.head)).register_forward_pre_hook(multiply)
    return plain_loss(module, batch, stage) + 0.75 * torch.cat(taken).mean()


# The loss of a run's very first step, where it is more than the cross-entropy of the batch.
FIRST: dict[str, Loss] = {"er": loss_of_the_batch_twice, "hat": loss_behind_gates}


@pytest.mark.parametrize(("method", "network"), [c for c in CASES if c[0] not in ADAPTIVE])
def test_the_first_step_is_sgd_on_a_plain_module(method: str, network: str) -> None:
    """Running averages too."""
    stage = Stage(METHODS[method](**OPTIONS.get(method, {})), network)
    stage.begin()
    batch = next(stage.batches())
    module = eager(stage.method, stage.params)
    assert any(part.training for part in module.modules())
    torch.manual_seed(0)
    loss = FIRST.get(method, plain_loss)(module, batch, stage)
    expected = gradients(loss, module)
    after, _, found = stage.step(batch)
    assert_close(found, loss.detach(), 1e-7)
    for key, g in expected.items():
        assert_close(after[key], stage.params[key] - 0.125 * g, 1e-7)
    for key, buffer in module.named_buffers():
        torch.testing.assert_close(after[key], buffer, rtol=0, atol=1e-7)


# What makes a step wait for the device, or copies from the host into it.
LOOKS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "is_nonzero",
    "equal",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "lift_fresh",
}
ASKS = ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__")


class LookError(AssertionError):
    """Somebody looked."""


class _Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in LOOKS:
            raise LookError(name)
        if name.startswith("index") and any(_mask(arg) for arg in args):
            raise LookError(f"{name} by a mask")
        return func(*args, **(kwargs or {}))


def _mask(arg: Any) -> bool:
    several = arg if isinstance(arg, (list, tuple)) else ()
    return any(isinstance(t, Tensor) and t.dtype == torch.bool for t in several)


@contextmanager
def nobody_looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While this is open, whoever asks a tensor for its values fails, in Python or below."""
    with monkeypatch.context() as patch:
        for name in ASKS:

            def refuse(tensor: Tensor, *args: Any, name: str = name, **kwargs: Any) -> Any:
                raise LookError(name)

            patch.setattr(Tensor, name, refuse)
        with _Watching():
            yield


def snapshot(stage: Stage) -> dict[str, Tensor]:
    named = [*stage.params.items(), *((f"state/{path}", t) for path, t in leaves(stage.state))]
    return {name: tensor.clone() for name, tensor in named}


@every_case
def test_a_step_looks_at_no_value_and_changes_nothing_it_was_given(
    method: str, network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first task and the second, also with rate and progress as tensors on the device."""
    stage = Stage(METHODS[method](**OPTIONS.get(method, {})), network)
    for _ in range(2):
        stage.begin()
        first, (_, last) = next(stage.batches(0)), stage.batches(1)
        assert (first.first, last.first, first.progress, last.progress) == (True, False, 0, 1)
        for batch in (first, last):
            before = snapshot(stage)
            lr, progress = (torch.as_tensor(v).double() for v in (0.125, batch.progress))
            with nobody_looks(monkeypatch):
                found = stage.step(batch._replace(progress=progress), lr)
            after = snapshot(stage)
            assert before.keys() == after.keys()
            assert all(torch.equal(before[name], after[name]) for name in before)
            params, state, loss = stage.step(batch)
            assert_close(found[2], loss)
            assert params.keys() == found[0].keys()
            for name, tensor in params.items():
                assert_close(found[0][name], tensor)
            stage.params, stage.state = params, state
        stage.end()


class Looking(Finetune):
    """Asks for a value in some way."""

    ways: tuple[Callable[[Tensor], Any], ...] = (
        float,
        bool,
        lambda t: t.tolist(),
        lambda t: t.item(),
        lambda t: t.numpy(),
        lambda t: t[t > 0],
        lambda t: t.nonzero(),
        lambda t: torch.tensor([1.0]) + t,
        lambda t: torch.equal(t, t),
        lambda t: [1, 2][t.long().clamp(0, 1)],
    )
    way = 0

    def step(self, params: Any, grads: Any, state: Any, batch: Batch, lr: Any) -> Any:
        self.ways[Looking.way](batch.x.sum())
        return super().step(params, grads, state, batch, lr)


@pytest.mark.parametrize("way", range(len(Looking.ways)))
def test_whoever_looks_is_seen(way: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Looking, "way", way)
    stage = Stage(Looking(), "perceptron")
    stage.begin()
    batch = next(stage.batches())
    stage.step(batch)
    with pytest.raises(LookError), nobody_looks(monkeypatch):
        stage.step(batch)
