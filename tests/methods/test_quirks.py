"""Every quirk against the published algorithm, written out once more in the plainest way."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import mlp
from numpy.typing import NDArray
from small_runs import CLASSES, End, Samples, WatchedGPM, WatchedTRGP, some_tasks, watched
from torch import Tensor, nn

from trgp.benchmarks import from_tensors
from trgp.benchmarks.models import ResNet18
from trgp.draws import order
from trgp.engine.batches import Part, epoch_batches
from trgp.engine.network import Network
from trgp.methods.protected import Directions
from trgp.methods.trgp import TRGPMethod

Matrix = NDArray[np.float64]
NAMES = ("0", "2", "4")  # the layers of the perceptron
SEED, RATE, BATCH, EPOCHS, SAMPLES = 2, 0.1, 8, 2, 24


def perceptron() -> nn.Module:
    return mlp(12, 10, 9, CLASSES, bias=False).double()


@dataclass
class Layer:
    """What the published code holds of a layer."""

    W: Tensor
    M: Matrix | None = None
    bases: list[Matrix] = field(default_factory=list)
    kept: list[tuple[list[int], list[Tensor]]] = field(default_factory=list)  # (trusted, Q) by task

    def effective(self, W: Tensor, trusted: Sequence[int], Q: Sequence[Tensor]) -> Tensor:
        total = W
        for j, q in zip(trusted, Q, strict=True):
            B = torch.from_numpy(self.bases[j])
            total = total + W @ B @ (q - torch.eye(len(q))) @ B.T
        return total

    def of_task(self, task: int) -> Tensor:
        return self.effective(self.W, *self.kept[task])

    def remember(self, R: Matrix, threshold: float, options: "Options") -> None:
        """R has a column an input; the singular value decomposition does the rest."""
        energy = (R**2).sum()
        if self.M is None:
            U, s, _ = np.linalg.svd(R, full_matrices=False)
            r = int((np.cumsum(s**2) / energy < threshold).sum())
            self.M = U[:, : r if options.first_task_short else r + 1]
            self.bases.append(self.M)
            return
        old = self.M.shape[1]
        U, s, _ = np.linalg.svd(R - self.M @ self.M.T @ R, full_matrices=False)
        if not options.pooled:
            already = energy - (s**2).sum()
            r = int((already + np.concatenate([[0], np.cumsum(s**2)]) < threshold * energy).sum())
            self.M = np.hstack([self.M, U[:, :r]])
            return
        scores = np.concatenate([((self.M.T @ R) ** 2).sum(1), s**2])
        best = np.argsort(-scores)
        count = int((np.cumsum(scores[best]) < threshold * energy).sum()) + 1
        chosen = best[:count]
        everything = np.hstack([self.M, U])
        self.bases.append(everything[:, chosen])
        new = sorted(k for k in chosen if (k > old if options.strongest_unprotected else k >= old))
        self.M = np.hstack([self.M, everything[:, new]])


@dataclass
class Options:
    pooled: bool = True
    threshold: float = 0.9
    threshold_growth: float = 0.0
    epsilon: float = 0.3
    top_k: int = 2
    scale_rate: float = 0.5
    images_per_layer: tuple[int, ...] = ()
    no_scaling: tuple[str, ...] = ()
    first_task_short: bool = False
    strongest_unprotected: bool = False
    unscaled_inputs: bool = False
    first_layer_gate: bool = False
    third_task_trusts_second: bool = False


class Published:
    """The published training of a perceptron without biases."""

    def __init__(self, tasks: Sequence[tuple[Samples, Samples]], options: Options) -> None:
        self.benchmark = from_tensors(tasks, perceptron, seed=SEED)
        params = Network(perceptron, False, torch.device("cpu"), SEED).initial_params()
        self.layers = [Layer(params[f"{name}.weight"]) for name in NAMES]
        self.options = options
        self.selected: list[dict[str, list[int]]] = []

    def learn(self, task: int) -> None:
        """One task, from the choice of the trust region to the new bases."""
        trusted = self.trusted(task) if task else [[] for _ in self.layers]
        self.selected.append({n: j for n, j in zip(NAMES, trusted, strict=True) if j})
        W = [layer.W for layer in self.layers]
        Q = [
            [torch.eye(layer.bases[j].shape[1]) for j in js]
            for layer, js in zip(self.layers, trusted, strict=True)
        ]
        for x, y in self.batches(task):
            W, Q = self.step(W, Q, trusted, x, y)
        for layer, w, js, q in zip(self.layers, W, trusted, Q, strict=True):
            layer.W = w
            layer.kept.append((js, q))
        plain = self.options.unscaled_inputs
        seen = [layer.W if plain else layer.of_task(task) for layer in self.layers]
        x, _ = self.some(task, "bases")
        threshold = min(1.0, self.options.threshold + task * self.options.threshold_growth)
        counts = self.options.images_per_layer or (SAMPLES,) * len(NAMES)
        inputs = list(forward(seen, x))[:-1]
        for layer, h, count in zip(self.layers, inputs, counts, strict=True):
            layer.remember(h[:count].T.numpy(), threshold, self.options)

    def step(
        self,
        W: Sequence[Tensor],
        Q: Sequence[Sequence[Tensor]],
        trusted: Sequence[Sequence[int]],
        x: Tensor,
        y: Tensor,
    ) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Autograd through W_eff; the gradient of W is projected, that of Q is not."""
        W = [w.clone().requires_grad_() for w in W]
        Q = [[q.clone().requires_grad_() for q in qs] for qs in Q]
        used = [
            layer.effective(w, js, qs)
            for layer, w, js, qs in zip(self.layers, W, trusted, Q, strict=True)
        ]
        *_, logits = forward(used, x)
        F.cross_entropy(logits, y).backward()
        moved = []
        for layer, w in zip(self.layers, W, strict=True):
            assert w.grad is not None
            M = torch.from_numpy(layer.M) if layer.M is not None else w.new_zeros(w.shape[1], 0)
            moved.append((w - RATE * (w.grad - w.grad @ M @ M.T)).detach())
        rate = RATE * self.options.scale_rate
        return moved, [[(q - rate * q.grad).detach() for q in qs] for qs in Q]

    def trusted(self, task: int) -> list[list[int]]:
        W = [layer.W.clone().requires_grad_() for layer in self.layers]
        x, y = self.some(task, "selection")
        *_, logits = forward(W, x)
        F.cross_entropy(logits, y).backward()
        candidates = [1] if task == 2 and self.options.third_task_trusts_second else range(task)
        chosen = []
        for name, layer, w in zip(NAMES, self.layers, W, strict=True):
            assert w.grad is not None
            G = w.grad.numpy()
            norms = {j: np.linalg.norm(G @ layer.bases[j]) for j in candidates}
            passing = [j for j in norms if norms[j] >= self.options.epsilon * np.linalg.norm(G)]
            strongest = sorted(passing, key=lambda j: -norms[j])[: self.options.top_k]
            chosen.append([] if name in self.options.no_scaling else strongest)
        if self.options.first_layer_gate and not chosen[0]:
            return [[] for _ in chosen]
        return chosen

    def batches(self, task: int) -> Iterator[tuple[Tensor, Tensor]]:
        part = Part(task, 0, self.benchmark.tasks[task].train)
        for epoch in range(EPOCHS):
            for x, y, *_ in epoch_batches([part], BATCH, SEED, "order", task, epoch):
                yield x, y

    def some(self, task: int, purpose: str) -> tuple[Tensor, Tensor]:
        train = self.benchmark.tasks[task].train
        return train.batch(order(len(train), SEED, purpose, task)[:SAMPLES])


def forward(W: Sequence[Tensor], x: Tensor) -> Iterator[Tensor]:
    """The input of every layer, and the logits."""
    for k, w in enumerate(W):
        x = x.relu() if k else x
        yield x
        x = x @ w.T
    yield x


def assert_follows(published: Published, ends: Sequence[End], tasks: int) -> None:
    """After every task the same weights for all tasks, the same M and the same bases."""
    for task, end in enumerate(ends):
        published.learn(task)
        for name, layer in zip(NAMES, published.layers, strict=True):
            torch.testing.assert_close(end.params[f"{name}.weight"], layer.W, rtol=0, atol=1e-9)
            for old in range(task + 1):
                theirs = end.weights(old)[f"{name}.weight"]
                torch.testing.assert_close(theirs, layer.of_task(old), rtol=0, atol=1e-9)
            ours = Directions.read(end.state, end.method.layers[name].layer)
            assert layer.M is not None
            assert_same_space(ours.M[0].numpy(), layer.M)
            if published.options.pooled:
                for old in range(task + 1):
                    assert_same_space(ours.basis(old)[0].numpy(), layer.bases[old])
    assert len(ends) == tasks


def assert_same_space(A: Matrix, B: Matrix) -> None:
    """Two orthonormal bases of one space, up to columns of zeros."""
    np.testing.assert_allclose(A @ A.T, B @ B.T, rtol=0, atol=1e-9)


QUIRKS: dict[str, dict[str, Any]] = {
    "none": {},
    "first task short": {"first_task_short": True},
    "strongest unprotected": {"strongest_unprotected": True},
    "unscaled inputs": {"unscaled_inputs": True},
    "first layer gate": {"first_layer_gate": True},
    "third trusts second": {"third_task_trusts_second": True},
    "images": {"images_per_layer": (5, 24, 9)},
    "no scaling": {"no_scaling": ("2",)},
    "growth": {"threshold_growth": 0.02},
    "all": {
        "first_task_short": True,
        "strongest_unprotected": True,
        "unscaled_inputs": True,
        "first_layer_gate": True,
        "third_task_trusts_second": True,
        "images_per_layer": (5, 24, 9),
        "no_scaling": ("2",),
        "threshold_growth": 0.02,
    },
}


def learnt(
    kind: Any, tasks: Sequence[tuple[Samples, Samples]], out: Path, settings: Mapping[str, Any]
) -> tuple[Any, list[End]]:
    usual: dict[str, Any] = {"threshold": Options.threshold, "samples": SAMPLES}
    if kind is WatchedTRGP:
        usual |= {"epsilon": Options.epsilon, "scale_rate": Options.scale_rate}
        usual["selection_samples"] = SAMPLES
    training = {"seeds": [SEED], "lr": RATE, "batch": BATCH, "epochs": EPOCHS}
    return watched(kind, tasks, out, perceptron, **training, **(usual | dict(settings)))


@pytest.mark.parametrize("name", QUIRKS)
def test_trgp_with_a_quirk_is_the_published_algorithm_with_it(name: str, tmp_path: Path) -> None:
    tasks = some_tasks(4, 12, dtype=torch.float64, rank=6)
    result, ends = learnt(WatchedTRGP, tasks, tmp_path, QUIRKS[name])
    published = Published(tasks, Options(**QUIRKS[name]))
    torch.set_default_dtype(torch.float64)
    assert_follows(published, ends, 4)
    assert result.selected == published.selected
    assert any(len(j) == 2 for chosen in result.selected for j in chosen.values())
    assert result.form == ("literal" if "strongest_unprotected" in QUIRKS[name] else "native")


@pytest.mark.parametrize("name", ["none", "first task short", "images", "growth"])
def test_gpm_with_a_quirk_is_the_published_algorithm_with_it(name: str, tmp_path: Path) -> None:
    tasks = some_tasks(4, 12, dtype=torch.float64, rank=6)
    result, ends = learnt(WatchedGPM, tasks, tmp_path, QUIRKS[name])
    published = Published(tasks, Options(**QUIRKS[name], pooled=False))
    published.trusted = lambda task: [[] for _ in NAMES]  # type: ignore[method-assign]
    torch.set_default_dtype(torch.float64)
    assert_follows(published, ends, 4)
    assert result.selected == [{}] * 4


@pytest.mark.parametrize("name", [name for name in QUIRKS if name not in ("none", "all")])
def test_no_quirk_is_without_effect(name: str, tmp_path: Path) -> None:
    """Else the tests above would pass with the option ignored on both sides."""
    tasks = some_tasks(3, 12, dtype=torch.float64, rank=6)
    if name == "first layer gate":
        tasks = strangers(3)
    plain, quirky = (
        learnt(WatchedTRGP, tasks, tmp_path, settings)[0] for settings in ({}, QUIRKS[name])
    )
    assert plain.digest != quirky.digest


def test_a_loose_direction_can_be_all_that_a_layer_knows(tmp_path: Path) -> None:
    """Two quirks and a low threshold leave M empty, and B_1 has nothing but what lies outside."""
    tasks = some_tasks(3, 12, dtype=torch.float64, rank=6)
    quirks = {"first_task_short": True, "strongest_unprotected": True, "threshold": 0.2}
    quirks["epsilon"] = 0.1
    result, ends = learnt(WatchedTRGP, tasks, tmp_path, quirks)
    assert result.ranks == {name: [0, 0, 0] for name in NAMES}
    assert result.selected[2] == {name: [1] for name in NAMES}
    published = Published(tasks, Options(**quirks))
    torch.set_default_dtype(torch.float64)
    assert_follows(published, ends, 3)


def strangers(count: int) -> list[tuple[Samples, Samples]]:
    """Tasks whose inputs have nothing in common: each uses features of its own."""
    tasks = some_tasks(count, 12, dtype=torch.float64, rank=None)
    for t, task in enumerate(tasks):
        for x, _ in task:
            x[:, : 4 * t] = 0
            x[:, 4 * (t + 1) :] = 0
    return tasks


def test_the_first_layer_decides_for_all(tmp_path: Path) -> None:
    tasks = strangers(3)
    free, _ = learnt(WatchedTRGP, tasks, tmp_path, {})
    gated, ends = learnt(WatchedTRGP, tasks, tmp_path, {"first_layer_gate": True})
    for chosen in free.selected[1:]:
        assert "0" not in chosen
        assert chosen["2"]
    assert gated.selected == [{}, {}, {}]
    published = Published(tasks, Options(first_layer_gate=True))
    torch.set_default_dtype(torch.float64)
    assert_follows(published, ends, 3)


def test_in_a_block_its_first_layer_decides() -> None:
    network = ResNet18(heads=2, classes=2, filters=2)
    layers = [n for n, m in network.named_modules() if isinstance(m, nn.Conv2d)]
    everyone = {name: [0] for name in layers}
    gated = TRGPMethod().gated
    assert gated(everyone) == everyone
    assert not any(gated(everyone | {"conv1": []}).values())
    silent = "stages.1.0.conv1"
    left = gated(everyone | {silent: []})
    assert [name for name in layers if not left[name]] == [silent, "stages.1.0.conv2"]
    silent = "stages.2.1.conv2"
    left = gated(everyone | {silent: []})
    assert [name for name in layers if not left[name]] == [silent]


def test_the_third_task_alone_is_told_whom_to_trust(tmp_path: Path) -> None:
    """All tasks are one and the same, so that each could trust any."""
    tasks = some_tasks(1, 12, dtype=torch.float64, rank=6) * 4
    quirk = {"third_task_trusts_second": True, "epsilon": 0.0, "top_k": 4}
    quirky, _ = learnt(WatchedTRGP, tasks, tmp_path, quirk)
    for name in NAMES:
        trusted = [sorted(chosen.get(name, [])) for chosen in quirky.selected]
        assert trusted == [[], [0], [1], [0, 1, 2]]


def test_the_strongest_new_direction_is_free_to_move(tmp_path: Path) -> None:
    """What it costs: of a later task's basis one direction is never projected off."""
    tasks = some_tasks(3, 12, dtype=torch.float64, rank=6)
    for quirk in (False, True):
        _, ends = learnt(WatchedTRGP, tasks, tmp_path, {"strongest_unprotected": quirk})
        for name in NAMES:
            before, after = (end.params[f"{name}.weight"] for end in ends[1:])
            held = Directions.read(ends[1].state, ends[1].method.layers[name].layer)
            moved = after - before
            assert float((moved @ held.M[0]).abs().max()) < 1e-12
            along = float((moved @ held.basis(1)[0]).abs().max())
            assert along > 1e-6 if quirk and held.loose[1].any() else along < 1e-12
            assert bool(held.loose) == quirk
        if quirk:
            first = Directions.read(ends[1].state, ends[1].method.layers["0"].layer)
            assert first.loose[1].norm().item() == pytest.approx(1)


def test_a_layer_without_scaling_is_protected_all_the_same(tmp_path: Path) -> None:
    tasks = some_tasks(3, 12, dtype=torch.float64, rank=6)
    result, ends = learnt(WatchedTRGP, tasks, tmp_path, {"no_scaling": ("2",), "epsilon": 0.0})
    assert all("2" not in chosen for chosen in result.selected)
    assert all({"0", "4"} <= chosen.keys() for chosen in result.selected[1:])
    held = Directions.read(ends[0].state, ends[0].method.layers["2"].layer)
    moved = ends[2].params["2.weight"] - ends[0].params["2.weight"]
    assert result.ranks["2"][0] > 0
    assert float((moved @ held.M[0]).abs().max()) < 1e-12
    for task in range(3):
        assert torch.equal(ends[2].weights(task)["2.weight"], ends[2].params["2.weight"])


def test_patterns_name_layers_and_what_lies_in_them(tmp_path: Path) -> None:
    tasks = some_tasks(2, 12, dtype=torch.float64, rank=6)
    result, _ = learnt(WatchedTRGP, tasks, tmp_path, {"no_scaling": ("[02]",), "epsilon": 0.0})
    assert result.selected[1].keys() == {"4"}


def test_a_first_task_may_be_left_with_nothing(tmp_path: Path) -> None:
    """One short of one direction: nothing is protected, and nobody can trust it."""
    tasks = some_tasks(2, 12, dtype=torch.float64, rank=1)
    settings = {"first_task_short": True, "threshold": 0.5, "epsilon": 0.0}
    result, _ = learnt(WatchedTRGP, tasks, tmp_path, settings)
    assert {name: ranks[0] for name, ranks in result.ranks.items()} == dict.fromkeys(NAMES, 0)
    assert result.selected == [{}, {}]
