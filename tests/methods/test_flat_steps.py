"""What a training step does depends on the width of the memory, not on the number of tasks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from companies import asked_for, begun
from small_runs import CLASSES, Heads, some_tasks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trgp.benchmarks.data import Tensors
from trgp.benchmarks.models import MLP
from trgp.engine.batches import Part
from trgp.engine.captured import CapturedTask
from trgp.engine.context import Context
from trgp.engine.network import Network
from trgp.engine.train import Epoch, Work, train_epoch
from trgp.methods.base import Method
from trgp.methods.gpm import GPMMethod
from trgp.methods.trgp import TRGPMethod
from trgp.types import Params, State

CPU = torch.device("cpu")
FEW, MANY = 3, 12


class Noted(TorchDispatchMode):
    """Notes every operation with the shapes of the tensors it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[torch.Size]]] = []
        self.computed = 0  # how many of them do anything

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = [
            leaf.shape
            for leaf in torch.utils._pytree.tree_leaves((args, kwargs or {}))
            if isinstance(leaf, Tensor)
        ]
        self.calls.append((str(func), read))
        nothing = func.is_view or func.overloadpacket.__name__ in ("_unsafe_view", "promote_types")
        self.computed += not nothing
        return func(*args, **(kwargs or {}))


def epoch_of(
    method: Method, network: Network, samples: Tensors, task: int, params: Params
) -> Epoch:
    free = network.trainable - method.frozen(task)
    trained = [name for name in params if name in free or name not in network.names]
    return Epoch(0, task, 0, [Part(task, task, samples)], 20, 0.1, trained)


@pytest.mark.parametrize(
    "method",
    [
        GPMMethod(threshold=(1.0,)),
        TRGPMethod(threshold=(1.0,), epsilon=0.0, scale_rate=0.1),
        TRGPMethod(threshold=(1.0,), epsilon=0.0, scale_rate=0.1, form="literal"),
    ],
    ids=["gpm", "trgp", "literal"],
)
def test_a_step_after_many_tasks_is_that_after_few(method: Method) -> None:
    network = Network(lambda: Heads(heads=MANY + 1), True, CPU, 0)
    method = method.bind(network)
    params: Params = network.initial_params()
    state: State = {}
    noted: dict[int, list[tuple[str, list[torch.Size]]]] = {}
    for task, ((x, y), _) in enumerate(some_tasks(MANY + 1)):
        samples = Tensors(x, y)
        ctx = Context(network, task, task, samples, params, state, 20, 0, MANY + 1)
        begun, started = method.begin_task(ctx)
        epoch = epoch_of(method, network, samples, task, begun)
        if task in (FEW, MANY):
            # Of the same width, whatever the memories hold by now.
            full = method.to_stack(begun, started)
            wide = epoch_of(method, network, samples, task, full)
            with Noted() as each:
                train_epoch(method, Work(full, {**started, **method.padded(started)}, wide))
            noted[task] = each.calls
        trained = train_epoch(method, Work(begun, started, epoch))
        ended = Context(
            network, task, task, samples, trained.params, trained.state, 20, 0, MANY + 1
        )
        params, state = method.end_task(ended)
    assert len(noted[FEW]) > 50
    assert noted[FEW] == noted[MANY]


def test_projections_add_few_operations_to_a_stacked_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as kernels of a GPU, which is what so small a step costs there; of batches so small
    that steps are made from factors. What the literal form needs of the inputs alone is computed
    beside the pass: of it those count that wait for the gradient."""
    made: dict[str, int] = {}
    waiting: dict[str, int] = {}
    differentiate = torch.autograd.grad
    trust: dict[str, Any] = {"epsilon": 0.0, "scale_rate": 0.1}
    ways: dict[str, tuple[str, dict[str, Any]]] = {
        "finetune": ("finetune", {}),
        "gpm": ("gpm", {}),
        "trgp": ("trgp", trust),
        "literal": ("trgp", trust | {"strongest_unprotected": True}),
    }
    for name, (method, options) in ways.items():
        asked = asked_for(
            some_tasks(3),
            method,
            tmp_path / name,
            lambda: MLP(8, (12, 10), CLASSES, heads=3),
            [0, 1],
            batch=4,
            **options,
        )
        runs = [begun(run, 2) for run in asked]
        steps = CapturedTask(runs[0].method, [run.work for run in runs], stacked=True)
        cut = runs[0].work.epoch.rows()[0][0]
        steps._body(runs[0].work, cut, first=False)
        steps._step.zero_()
        passed = []

        def differentiated(*given: Any, _to: Any = passed, **how: Any) -> Any:
            found = differentiate(*given, **how)
            _to.append(noted.computed)
            return found

        monkeypatch.setattr(torch.autograd, "grad", differentiated)
        with Noted() as noted:
            steps._body(runs[0].work, cut, first=False)
        made[name] = noted.computed
        waiting[name] = noted.computed - passed[0]
    layers = 2  # and the heads
    assert made["gpm"] == made["finetune"]
    assert made["gpm"] < made["trgp"] <= made["gpm"] + layers
    assert made["trgp"] < made["literal"] <= made["trgp"] + 9 * layers
    assert waiting["literal"] <= waiting["trgp"] + 6 * layers
