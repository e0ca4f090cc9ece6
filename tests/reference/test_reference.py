"""The learner, the suite and its literal form compute what `examples/reference.py` computes.

Four tasks; after each of them all that is kept is compared, within 1e-10 in float64.
"""

import copy
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import reference
import torch
from helpers import assert_close, cross_entropy, mlp
from small_runs import CLASSES, Make, WatchedGPM, WatchedTRGP, some_tasks, watched
from support.inside import Bases, bases, bases_of_run, shared_weights
from support.lessons import SAMPLES, Course, Lesson, course_of
from torch import Tensor, nn
from torch.optim import SGD

from trgp import GPM, TRGP

TOLERANCE = 1e-10
TASKS, RATE, SCALE_RATE = 4, 0.1, 0.5
TRAINING: dict[str, Any] = {"seeds": [3], "lr": RATE, "batch": 6, "epochs": 4}
THRESHOLD = {"threshold": 0.9}
OPTIONS: dict[str, dict[str, Any]] = {
    "GPM": THRESHOLD,
    "TRGP": THRESHOLD | {"epsilon": 0.6},
}


def conv_net() -> nn.Module:
    """A padded convolution with a bias, one with a stride and none, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(6, 5, 2, stride=2, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(20, CLASSES),
    )


# One layer is wide, so that the suite takes its steps in low rank as well as by whole matrices.
NETWORKS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "mlp": (lambda: mlp(8, 300, 10, CLASSES).double(), (8,)),
    "conv": (lambda: conv_net().double(), (4, 4, 4)),
}


class Kept(NamedTuple):
    """All that is left after a task, by layer; bases as projectors, which no rotation changes."""

    W: dict[str, Tensor]
    MM: dict[str, Tensor]
    ranks: dict[str, int]
    BB: dict[str, list[Tensor]]  # of every task
    W_eff: list[dict[str, Tensor]]  # of every task
    selected: dict[str, list[int]]  # by the task, where it trusts any


# ---- the same tasks by each of them ------------------------------------------------------------


@cache
def course(network: str) -> Course:
    make, _ = NETWORKS[network]
    return course_of(tasks_for(network), make, **TRAINING)


def tasks_for(network: str) -> Any:
    _, shape = NETWORKS[network]
    rank = 3 if len(shape) > 1 else 5
    return some_tasks(TASKS, *shape, samples=60, rank=rank, dtype=torch.float64)


@cache
def by_reference(network: str, method: str, sgd: tuple[tuple[str, Any], ...] = ()) -> list[Kept]:
    given = course(network)
    learner = getattr(reference, method)(given.network, **OPTIONS[method])

    def make(W: list[Tensor], Q: list[Tensor]) -> SGD:
        groups = [{"params": W}, {"params": Q, "lr": RATE * SCALE_RATE}]
        return SGD(groups, RATE, **dict(sgd))

    kept = []
    for t, lesson in enumerate(given.lessons):
        learner.learn(lesson.batches, lesson.first, lesson.samples[0], make)
        layers = learner.layers.items()
        kept.append(
            Kept(
                {name: layer.W.detach().clone() for name, layer in layers},
                {name: layer.M @ layer.M.T for name, layer in layers},
                {name: layer.M.shape[1] for name, layer in layers},
                {name: [B @ B.T for B in layer.B] for name, layer in layers},
                [
                    {name: layer.effective_weight(old).detach().clone() for name, layer in layers}
                    for old in range(t + 1)
                ],
                {name: list(layer.Q[t]) for name, layer in layers if layer.Q[t]},
            )
        )
    return kept


def by_learner(network: str, method: str, **sgd: Any) -> list[Kept]:
    given = course(network)
    learner = make_learner(method, given.network)
    kept = []
    for t, lesson in enumerate(given.lessons):
        learn(learner, t, lesson, **sgd)
        effective = []
        for old in range(t + 1):
            with learner.task(old):
                effective.append(matrices(learner.model.state_dict()))
        kept.append(
            Kept(
                {name: W[0] for name, W in shared_weights(learner).items()},
                *projectors(bases(learner)),
                effective,
                {name: list(js) for name, js in learner.selected[t].items() if js},
            )
        )
        assert {name: used for name, (used, _) in learner.ranks.items()} == kept[-1].ranks
    return kept


def make_learner(method: str, network: nn.Module) -> GPM:
    only = {"selection_samples": SAMPLES, "scale_rate": SCALE_RATE} if method == "TRGP" else {}
    kind = {"GPM": GPM, "TRGP": TRGP}[method]
    return kind(copy.deepcopy(network), **OPTIONS[method], **only)


def learn(learner: GPM, task: int, lesson: Lesson, **sgd: Any) -> None:
    learner.begin_task(task, [lesson.first], cross_entropy)
    optimizer = learner.attach(SGD(learner.parameters(), lr=RATE, **sgd))
    for batch in lesson.batches:
        optimizer.zero_grad()
        cross_entropy(learner.model, batch).backward()
        optimizer.step()
    learner.end_task([lesson.samples])


def by_suite(network: str, method: str, out: Path, engine: str, **options: Any) -> list[Kept]:
    make, _ = NETWORKS[network]
    only = {"selection_samples": SAMPLES, "scale_rate": SCALE_RATE} if method == "TRGP" else {}
    result, ends = watched(
        WatchedTRGP if method == "TRGP" else WatchedGPM,
        tasks_for(network),
        out,
        make,
        engine=engine,
        samples=SAMPLES,
        **TRAINING,
        **OPTIONS[method],
        **only,
        **options,
    )
    assert result.form == (options.get("form", "native") if method == "TRGP" else None)
    kept = []
    for t, end in enumerate(ends):
        MM, ranks, BB = projectors(bases_of_run(end))
        effective = [matrices(end.weights(old)) for old in range(t + 1)]
        kept.append(Kept(matrices(end.params), MM, ranks, BB, effective, result.selected[t]))
        assert {name: each[t] for name, each in result.ranks.items()} == ranks
    return kept


def matrices(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By layer the weight, flattened, with the bias as its last column."""
    found: dict[str, list[Tensor]] = {}
    for name in sorted(named, reverse=True):  # a weight before its bias
        found.setdefault(name.rpartition(".")[0], []).append(named[name].detach())
    return {
        layer: torch.cat([part.reshape(len(part), -1) for part in parts], 1)
        for layer, parts in found.items()
    }


def projectors(
    found: Mapping[str, Bases],
) -> tuple[dict[str, Tensor], dict[str, int], dict[str, list[Tensor]]]:
    """M M', the rank of M, and B B' of every task whose basis is kept, by layer."""
    return (
        {name: (each.M @ each.M.mT)[0] for name, each in found.items()},
        {name: each.M.shape[2] for name, each in found.items()},
        {name: [(B @ B.mT)[0] for B in each.by_task.values()] for name, each in found.items()},
    )


# ---- held to the reference ---------------------------------------------------------------------


def assert_same(found: list[Kept], expected: list[Kept]) -> None:
    assert len(found) == len(expected) == TASKS
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.ranks == theirs.ranks
        assert ours.selected == theirs.selected
        close = partial(torch.testing.assert_close, rtol=0, atol=TOLERANCE)
        close(ours.W, theirs.W)
        close(ours.MM, theirs.MM)
        close(ours.W_eff, theirs.W_eff)
        if any(ours.BB.values()):  # the suite's GPM keeps none
            close(ours.BB, theirs.BB)


BOTH = pytest.mark.parametrize("method", OPTIONS)
EACH = pytest.mark.parametrize("network", NETWORKS)
PLAIN: dict[str, Any] = {}
MOMENTUM: dict[str, Any] = {"momentum": 0.9}
NESTEROV: dict[str, Any] = {"momentum": 0.9, "nesterov": True}


@BOTH
@EACH
@pytest.mark.parametrize("sgd", [PLAIN, MOMENTUM, NESTEROV], ids=["plain", "momentum", "Nesterov"])
def test_the_learner(network: str, method: str, sgd: dict[str, Any]) -> None:
    expected = by_reference(network, method, tuple(sgd.items()))
    assert_same(by_learner(network, method, **sgd), expected)


@BOTH
@EACH
@pytest.mark.parametrize("engine", ["eager", "captured"])
def test_the_suite(network: str, method: str, engine: str, tmp_path: Path) -> None:
    assert_same(by_suite(network, method, tmp_path, engine), by_reference(network, method))


@EACH
@pytest.mark.parametrize("engine", ["eager", "captured"])
def test_the_literal_form_of_the_suite(network: str, engine: str, tmp_path: Path) -> None:
    """In which the published code computes W_eff."""
    found = by_suite(network, "TRGP", tmp_path, engine, form="literal")
    assert_same(found, by_reference(network, "TRGP"))


# ---- the reference itself ----------------------------------------------------------------------


@BOTH
@EACH
def test_what_old_tasks_read_is_frozen(network: str, method: str) -> None:
    """Proj_Sj(W_t) = Proj_Sj(W_j) for every later task t, equation (5)."""
    kept = by_reference(network, method)
    for j, then in enumerate(kept):
        for name, found in kept[-1].BB.items():
            BB = found[j]
            for now in kept[j:]:
                assert_close(now.W[name] @ BB, then.W[name] @ BB)


@EACH
def test_the_tasks_ask_for_all_of_it(network: str) -> None:
    """They scale, refuse and add, or the tests above would hold little."""
    first, second, third, last = kept = by_reference(network, "TRGP")
    chosen = [trusted for each in kept for trusted in each.selected.values()]
    assert [1, 2] in chosen  # by strength, not by age
    assert [2, 1] in chosen
    assert sum(map(len, chosen)) < (1 + 2 + 2) * len(first.W)  # not all that could be trusted
    for name, W in last.W.items():
        assert first.ranks[name] < third.ranks[name]
        assert not torch.allclose(last.W_eff[3][name], W, rtol=0, atol=1e-2)
        assert not torch.allclose(last.BB[name][1], last.MM[name], rtol=0, atol=1e-2)
    assert second.ranks != by_reference(network, "GPM")[1].ranks
