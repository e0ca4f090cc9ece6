"""A compiled model is not compiled again because a task begins or ends."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import classification, cross_entropy, mlp
from torch import Tensor

from trgp import GPM, TRGP

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("cls", [GPM, TRGP])
def test_two_graphs_serve_four_tasks(cls: type[GPM]) -> None:
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = mlp(6, 8, 8, 4)
    compiled = torch.compile(model, backend=backend)
    learner = TRGP(model, epsilon=0.0) if cls is TRGP else GPM(model)
    for task in range(4):
        batch = classification(task, 6, rank=2)
        learner.begin_task(task, [batch], cross_entropy)
        optimizer = torch.optim.AdamW(learner.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            cross_entropy(compiled, batch).backward()
            optimizer.step()
        learner.end_task([batch])
    if cls is TRGP:
        assert any(learner.selected[3].values())
    assert 1 <= len(graphs) <= 2
