"""What was learnt stays: old tasks' logits do not change while new tasks are learnt."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from helpers import (
    ConvNet,
    Cross,
    ResNet,
    Tied,
    Vit,
    assert_close,
    classification,
    cross_entropy,
    mlp,
    train,
)
from support import inside
from torch import Tensor, nn

from trgp import GPM, TRGP
from trgp.types import Norm

IMAGE = (16, 4, 4)


class Case(NamedTuple):
    """Few samples of low rank and wide layers, so that four tasks do not fill the memory."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    rank: int
    norm: Norm = "freeze"


CASES = {
    "MLP": Case(lambda: mlp(24, 64, 64, 4), (24,), 4),
    "ConvNet": Case(lambda: ConvNet(width=64), IMAGE, 2),
    "ConvNet, norms per task": Case(lambda: ConvNet(width=64), IMAGE, 2, "per_task"),
    "ViT": Case(lambda: Vit(width=96), IMAGE, 2),
    "ResNet": Case(lambda: ResNet(width=48), IMAGE, 2),
    "tied weights": Case(lambda: Tied(24, width=96), (24,), 4),
    "cross attention": Case(lambda: Cross(width=48), IMAGE, 2),
}


@pytest.mark.parametrize("method", [GPM, TRGP])
@pytest.mark.parametrize("kind", CASES)
def test_old_logits_stay_while_new_tasks_are_learnt(kind: str, method: type[GPM]) -> None:
    case = CASES[kind]
    model = case.make().double()
    learner = method(model, threshold=1.0, norm=case.norm)
    layers, logits, batches = inside.layers(learner), [], []
    for task in range(4):
        x, y = classification(task, *case.shape, samples=4, rank=case.rank, dtype=torch.float64)
        batches.append((x, y))
        before = {name: layer.matrix().clone() for name, layer in layers.items()}
        protected = {name: memory.M for name, memory in inside.memories(learner).items()}

        learner.begin_task(task, batches[-1:], cross_entropy)
        train(learner, batches[-1:], steps=60, make=torch.optim.AdamW, lr=3e-3, weight_decay=0.01)
        learner.end_task(batches[-1:])
        model.eval()

        # The task was learnt, and by weights that moved outside of the protected space.
        logits.append(model(x).detach())
        assert logits[task].argmax(1).equal(y)
        for name, layer in layers.items():
            M: Tensor = protected[name]
            change = layer.matrix() - before[name]
            assert M.shape[2] < M.shape[1]
            assert (change - change @ M @ M.mT).abs().max() >= 1e-3, name
        # Everything older is as it was, to far below what any loss could tell.
        for old, (inputs, _) in enumerate(batches):
            with learner.task(old), torch.no_grad():
                assert_close(model(inputs), logits[old], 1e-7)
    if method is TRGP:
        assert all(learner.selected[3].values())


def test_without_a_learner_the_same_tasks_are_forgotten() -> None:
    """The measure can tell: plain training changes the first task's logits by far more."""
    model = mlp(24, 64, 64, 4).double()
    kept = []
    for task in range(2):
        batch = classification(task, 24, samples=4, rank=4, dtype=torch.float64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
        for _ in range(60):
            optimizer.zero_grad()
            cross_entropy(model, batch).backward()
            optimizer.step()
        kept.append((batch[0], model(batch[0]).detach()))
    x, logits = kept[0]
    assert (model(x) - logits).abs().max() > 0.1
