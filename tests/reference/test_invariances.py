"""What cannot change ranks, choices and logits: turned inputs, hidden units in another order.

And TRGP that trusts nothing is GPM, apart from how it chooses its bases.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import Batch, assert_close, classification, learn, mlp
from support.inside import bases, shared_weights
from torch import Tensor, nn

from trgp import GPM, TRGP

CLASSES = 4


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(5, 6, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(6, 4, 2, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


# A network and the shape of its inputs, features or channels first.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(9, 12, 10, CLASSES), (9,)),
    "conv": (conv_net, (5, 4, 4)),
}


def tasks_for(network: str, samples: int = 20, rank: int | None = 4) -> list[Batch]:
    _, shape = NETWORKS[network]
    return [
        classification(t, *shape, samples=samples, classes=CLASSES, rank=rank, dtype=torch.float64)
        for t in range(4)
    ]


def learnt(learner: GPM, tasks: Sequence[Batch], **sgd: Any) -> GPM:
    for t, batch in enumerate(tasks):
        learn(learner, t, [batch], **({"momentum": 0.9} | sgd))
    return learner


def logits(learner: GPM, tasks: Sequence[Batch]) -> Tensor:
    """Of all samples of every task, each with the weights of its own."""
    found = []
    for t, (x, _) in enumerate(tasks):
        with torch.no_grad(), learner.task(t):
            found.append(learner.model(x))
    return torch.cat(found)


def assert_same(one: GPM, tasks: Sequence[Batch], other: GPM, others: Sequence[Batch]) -> None:
    assert one.ranks == other.ranks
    assert one.selected == other.selected
    assert_close(logits(one, tasks), logits(other, others))


def turned(values: Tensor, turn: Tensor) -> Tensor:
    """The second axis by an orthogonal matrix: channels of inputs, or a weight's columns."""
    return torch.einsum("ac...,cd->ad...", values, turn)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("kind", [GPM, TRGP])
def test_turned_inputs_change_nothing(kind: type[GPM], network: str) -> None:
    """The first layer's weights are turned with them."""
    make, shape = NETWORKS[network]
    model, tasks = make().double(), tasks_for(network)
    turn = torch.linalg.qr(torch.randn(shape[0], shape[0], dtype=torch.float64)).Q
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.copy_(turned(model[0].weight, turn))
    others = [(turned(x, turn), y) for x, y in tasks]
    plain, other = (
        learnt(kind(each, threshold=0.9), data) for each, data in ((model, tasks), (twin, others))
    )
    assert kind is GPM or any(plain.selected[3].values())
    assert_same(plain, tasks, other, others)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("kind", [GPM, TRGP])
def test_the_order_of_hidden_units_changes_nothing(kind: type[GPM], network: str) -> None:
    make, _ = NETWORKS[network]
    model, tasks = make().double(), tasks_for(network)
    twin = copy.deepcopy(model)
    order = torch.randperm(len(model[0].weight))
    with torch.no_grad():
        twin[0].weight.copy_(model[0].weight[order])
        twin[0].bias.copy_(model[0].bias[order])
        twin[2].weight.copy_(model[2].weight[:, order])
    plain, other = (learnt(kind(each, threshold=0.9), tasks) for each in (model, twin))
    assert kind is GPM or any(plain.selected[3].values())
    assert_same(plain, tasks, other, tasks)


# ---- trusting nothing --------------------------------------------------------------------------


def pair(network: str, threshold: float) -> tuple[GPM, TRGP]:
    """GPM, and TRGP that asks a task's basis to hold all of a gradient."""
    make, _ = NETWORKS[network]
    model = make().double()
    gpm = GPM(copy.deepcopy(model), threshold=threshold)
    return gpm, TRGP(model, threshold=threshold, epsilon=1.0)


def trusts_nothing(learner: TRGP) -> bool:
    return not any(js for chosen in learner.selected.values() for js in chosen.values())


@pytest.mark.parametrize("network", NETWORKS)
def test_trgp_that_trusts_nothing_and_keeps_all_is_gpm(network: str) -> None:
    """At a threshold of 1 every direction is kept, in whatever order they are counted."""
    tasks = tasks_for(network, samples=2, rank=1)[:3]  # so few that M never fills up
    gpm, trgp = (learnt(each, tasks, steps=5) for each in pair(network, threshold=1.0))
    assert trusts_nothing(trgp)
    assert all(used < of for used, of in gpm.ranks.values())
    assert_same(gpm, tasks, trgp, tasks)


@pytest.mark.parametrize("network", NETWORKS)
def test_below_one_trgp_adds_the_directions_of_gpm_and_more(network: str) -> None:
    """GPM counts all that old directions hold; TRGP no more of them than are among the strongest.

    Both add the strongest new directions of one task, so that GPM's are the first of TRGP's. Until
    then they learn the same.
    """
    tasks = tasks_for(network)[:2]
    gpm, trgp = (learnt(each, tasks) for each in pair(network, threshold=0.9))
    assert trusts_nothing(trgp)
    assert_close(logits(gpm, tasks), logits(trgp, tasks))
    for name, W in shared_weights(gpm).items():
        assert_close(shared_weights(trgp)[name], W)
        few, more = bases(gpm)[name].M, bases(trgp)[name].M
        assert_close(more @ (more.mT @ few), few)
    counts = [[used for used, _ in each.ranks.values()] for each in (gpm, trgp)]
    assert counts[0] != counts[1]
