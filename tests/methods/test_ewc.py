"""EWC: the optimum between a new task and springs on old weights, and their Fisher matrix."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from companies import capture_as_on_a_gpu
from helpers import assert_close
from method_parts import (
    ConvHeads,
    WatchedEWC,
    bound,
    context,
    eager,
    gradients,
    mlp_heads,
    moved_at_random,
    one_head,
    some_samples,
    weights_of,
)
from small_runs import Conv, Make, WatchedFinetune, run, some_tasks, watched
from torch import Tensor, nn

from trgp.engine.errors import InputError
from trgp.engine.train import train_step
from trgp.methods import Batch
from trgp.methods.ewc import EWC

Ways = Literal["average", "sum"]
CURVATURE = torch.tensor([1.0, 1.5, 2.0, 1.2, 1.0], dtype=torch.float64)


class Quadratic(nn.Module):
    """Its cross-entropy with label 0 is q = 1/2 sum h (w - x)^2 + 1, by logits log p, log(1 - p)
    of p = exp(-q): the best weights are the samples' mean, the gradient of one is h (w - x)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        q = (CURVATURE * (self.w - x).square()).sum(1) / 2 + 1
        return torch.stack([-q, torch.log1p(-torch.exp(-q))], 1)


def quadratic_task(t: int) -> tuple[Tensor, Tensor]:
    """Samples around a point of the task's own, by every weight with their own spread."""
    draw = torch.Generator().manual_seed(t)
    spread = torch.rand(5, generator=draw, dtype=torch.float64)
    x = torch.randn(1, 5, generator=draw, dtype=torch.float64)
    x = x + spread * torch.randn(30, 5, generator=draw, dtype=torch.float64)
    return x, torch.zeros(30, dtype=torch.long)


@pytest.mark.parametrize("tasks_as", ["average", "sum"])
@pytest.mark.parametrize("strength", [0.3, 2.0])
def test_the_optimum_found_is_the_closed_form_one(strength: float, tasks_as: Ways) -> None:
    """Three tasks, each trained until nothing moves."""
    plain = EWC(strength=strength, tasks_as=tasks_as, fisher_batch=1)
    method, params = bound(plain, Quadratic)
    state: Any = {}
    h = CURVATURE
    optima: list[Tensor] = []
    fishers: list[Tensor] = []
    for t in range(3):
        x, y = quadratic_task(t)
        for _ in range(130):
            batch = Batch(x, y, t, 0)
            params, state, _ = train_step(method, params, state, batch, 0.2, ["w"], [])
        params, state = method.end_task(context(method, params, (x, y), t, state))
        if tasks_as == "sum":
            springs = list(zip(fishers, optima, strict=True))
        else:
            springs = [(sum(fishers) / t, optima[-1])] if t else []
        pull = sum((strength * f * w for f, w in springs), h * x.mean(0))
        optima.append(pull / (h + strength * sum(f for f, _ in springs)))
        fishers.append(h.square() * (optima[-1] - x).square().mean(0))
        assert_close(params["w"], optima[-1])
    assert not torch.allclose(optima[2], x.mean(0), atol=0.05)  # the springs do pull
    total = torch.stack(fishers).sum(0)
    assert_close(state["fisher"]["w"], total if tasks_as == "sum" else total / 3)


NETWORKS: dict[str, tuple[Make, bool, tuple[int, ...]]] = {
    "one head": (one_head, False, (8,)),
    "heads": (mlp_heads, True, (8,)),
    "conv": (ConvHeads, True, (3, 8, 8)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_one_sample_at_a_time_makes_the_empirical_fisher(name: str) -> None:
    make, heads, shape = NETWORKS[name]
    method, params = bound(EWC(fisher_batch=1), make, heads)
    x, y = some_samples(9, *shape)
    task = 1 if heads else 0
    found = method.fisher(context(method, params, (x, y), task))
    method.network.module.eval()
    module = eager(method, params)
    expected = {key: torch.zeros_like(p) for key, p in module.named_parameters()}
    for i in range(9):
        logits = module(x[i : i + 1], task) if heads else module(x[i : i + 1])
        log_likelihood = logits.log_softmax(1)[0, y[i]]
        for key, g in gradients(log_likelihood, module).items():
            expected[key] += g.square() / 9
    assert found.keys() == expected.keys()
    for key, fisher in found.items():
        assert_close(fisher, expected[key])
    if heads:
        assert not found["heads.0.weight"].any()
        assert found["heads.1.weight"].any()


@pytest.mark.parametrize("size", [4, 9, 20])
def test_in_larger_batches_it_is_the_squared_mean_gradient(size: int) -> None:
    method, params = bound(EWC(fisher_batch=size), one_head)
    ctx = context(method, params, some_samples(18, 8))
    found = method.fisher(ctx)
    module = eager(method, params)
    expected = {key: torch.zeros_like(p) for key, p in module.named_parameters()}
    batches = list(ctx.batches(size, "fisher"))
    assert sum(len(batch.y) for batch in batches) == 18
    for batch in batches:
        mean = gradients(F.cross_entropy(module(batch.x), batch.y), module)
        for key, g in mean.items():
            expected[key] += g.square() * len(batch.y) / 18
    for key, fisher in found.items():
        assert_close(fisher, expected[key])


class Normed(nn.Module):
    """A perceptron with BatchNorm, which counts its passes, for 8 features."""

    passes = 0

    def __init__(self, track: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(8, 12)
        self.norm = nn.BatchNorm1d(12, track_running_stats=track)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        Normed.passes += 1
        return self.head(self.norm(self.body(x)).relu())


class Looking(Normed):
    """Asks for a value on its way, which no vmapped network can."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + float(x[0, 0] > 0))


@pytest.mark.parametrize("samples", [6000, 6001, 6007])
@pytest.mark.parametrize("make", [Normed, lambda: Normed(True), Looking, one_head])
def test_many_batches_are_computed_at_once_and_each_is_as_if_alone(
    make: Make, samples: int
) -> None:
    """BatchNorm, too, sees the samples of one batch and no others."""
    method, params = bound(EWC(), make)
    ctx = context(method, params, some_samples(samples, 8))
    Normed.passes = 0
    found = method.fisher(ctx)
    if make not in (Looking, one_head):
        assert 0 < Normed.passes <= 8
    module = eager(method, params)
    expected = {key: torch.zeros_like(p) for key, p in module.named_parameters()}
    for batch in ctx.batches(20, "fisher"):
        mean = gradients(F.cross_entropy(module(batch.x), batch.y), module)
        for key, g in mean.items():
            expected[key] += g.square() * len(batch.y) / samples
    for key, fisher in found.items():
        assert_close(fisher, expected[key])


def test_a_single_sample_has_no_statistics(tmp_path: Path) -> None:
    for make in (Normed, lambda: ConvHeads(track=False)):
        tasks = some_tasks(1) if make is Normed else some_tasks(1, 3, 8, 8)
        with pytest.raises(InputError) as caught:
            run(tasks, "ewc", tmp_path / "runs", make, fisher_batch=1)
        assert str(caught.value) == (
            "The network's BatchNorm uses the statistics of the current batch, which a single "
            "sample does not have; give fisher_batch 2 or more."
        )
        assert not (tmp_path / "runs").exists()
        run(tasks, "ewc", tmp_path / "two", make, fisher_batch=2)
    run(some_tasks(1), "ewc", tmp_path / "averages", lambda: Normed(True), fisher_batch=1)


@pytest.mark.parametrize("tasks_as", ["average", "sum"])
@pytest.mark.parametrize("make", [one_head, ConvHeads])
def test_without_strength_it_is_fine_tuning_to_the_bit(
    make: Make, tasks_as: Ways, tmp_path: Path
) -> None:
    tasks = some_tasks(3, 8) if make is one_head else some_tasks(2, 3, 8, 8, samples=20)
    plain, free = watched(WatchedFinetune, tasks, tmp_path, make)
    ours, held = watched(WatchedEWC, tasks, tmp_path, make, strength=0.0, tasks_as=tasks_as)
    for a, b in zip(free, held, strict=True):
        theirs = weights_of(a)
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in weights_of(b).items())
    assert ours.accuracy_matrix == plain.accuracy_matrix
    assert ours.curves == plain.curves
    strong, _ = watched(WatchedEWC, tasks, tmp_path, make, strength=50.0, tasks_as=tasks_as)
    assert strong.curves[0] == plain.curves[0]
    assert strong.curves[1] != plain.curves[1]


def after_three_tasks(
    tasks_as: Ways,
) -> tuple[EWC, Any, list[tuple[dict[str, Tensor], dict[str, Tensor]]]]:
    """The state, and every task's own Fisher matrix beside the weights it ended with."""
    method, params = bound(EWC(strength=7.0, tasks_as=tasks_as), mlp_heads, True)
    state: Any = {}
    each = []
    for t in range(3):
        params = moved_at_random(params, t)
        ctx = context(method, params, some_samples(25, 8, seed=t), t, state)
        each.append((method.fisher(ctx), dict(params)))
        kept, state = method.end_task(ctx)
        assert kept is ctx.params
    return method, state, each


def penalty_at(
    method: EWC, params: dict[str, Tensor], state: Any, batch: Batch
) -> tuple[Tensor, dict[str, Tensor]]:
    """What the state adds to a loss, and its gradient."""
    free = {key: p.clone().requires_grad_() for key, p in params.items()}
    method.network.module.eval()
    added = method.loss(free, state, batch) - method.loss(free, {}, batch)
    found = torch.autograd.grad(added, list(free.values()))
    return added.detach(), dict(zip(free, found, strict=True))


def test_two_tensors_hold_the_sum_over_all_tasks() -> None:
    """The penalty is that of every task for itself, but for a constant."""
    method, state, each = after_three_tasks("sum")
    assert {key: set(level) for key, level in state.items()} == {
        "fisher": method.network.trainable,
        "old": method.network.trainable,
    }
    batch = Batch(*some_samples(4, 8), 2, 2)
    differences = []
    for seed in range(3):
        params = moved_at_random(each[-1][1], 10 + seed, 1.0)
        added, slope = penalty_at(method, params, state, batch)
        parts = [
            3.5 * (fisher[key] * (params[key] - old[key]).square()).sum()
            for fisher, old in each
            for key in fisher
        ]
        differences.append(added - torch.stack(parts).sum())
        assert added > 0.1
        for key, g in slope.items():
            expected = sum(7.0 * fisher[key] * (params[key] - old[key]) for fisher, old in each)
            assert_close(g, expected)
    assert_close(torch.stack(differences), differences[0].expand(3))


def test_the_average_is_of_all_tasks_and_held_at_the_latest_weights() -> None:
    method, state, each = after_three_tasks("average")
    for key in method.network.trainable:
        mean = torch.stack([fisher[key] for fisher, _ in each]).mean(0)
        assert_close(state["fisher"][key], mean)
        assert torch.equal(state["old"][key], each[-1][1][key])
    batch = Batch(*some_samples(4, 8), 2, 2)
    params = moved_at_random(each[-1][1], 10, 1.0)
    added, slope = penalty_at(method, params, state, batch)
    last = each[-1][1]
    for key, g in slope.items():
        assert_close(g, 7.0 * state["fisher"][key] * (params[key] - last[key]))
    at_rest, still = penalty_at(method, last, state, batch)
    assert added > 0.1
    assert at_rest == 0
    assert not any(g.any() for g in still.values())


def test_it_stores_two_numbers_a_weight(tmp_path: Path) -> None:
    for tasks in (some_tasks(1), some_tasks(3)):
        result = run(tasks, "ewc", tmp_path, strength=1.0)
        assert result.state_bytes == 2 * result.network_bytes


@pytest.mark.parametrize(
    "options",
    [{"strength": -1.0}, {"strength": float("nan")}, {"fisher_batch": 0}, {"tasks_as": "max"}],
    ids=str,
)
def test_wrong_options_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"^{next(iter(options))} must be"):
        run(some_tasks(1), "ewc", tmp_path, **options)


class Reshaping(Conv):
    """Changes the shape of what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unsqueeze_(1).squeeze(1))


@pytest.mark.parametrize("samples", [60, 61, 67])
@pytest.mark.parametrize("kind", [Conv, Reshaping])
def test_a_fisher_matrix_of_convolutions_is_the_same_captured(
    kind: type[Conv], samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where capturing does the work once, as on a GPU; the last batch has its own."""
    method, params = bound(EWC(), lambda: kind().double())
    ctx = context(method, params, some_samples(samples, 4, 4, 4))
    plain = method.fisher(ctx)
    taped = method.fisher(replace(ctx, captured=True))
    capture_as_on_a_gpu(monkeypatch)
    on_a_gpu = method.fisher(replace(ctx, captured=True))
    assert any(bool(fisher.any()) for fisher in plain.values())
    for key, fisher in plain.items():
        assert torch.equal(taped[key], fisher)
        assert torch.equal(on_a_gpu[key], fisher)
