"""A call that is interrupted at any line has done all of its work or none of it."""

import copy
import random
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from helpers import classification, cross_entropy, train
from torch import Tensor, nn

import trgp
from trgp import GPM, TRGP

SOURCE = str(Path(trgp.__file__).parent)


class Net(nn.Module):
    """What is protected, frozen, copied per task and left alone; it draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 6, 2, groups=2)
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.ones(1))
        self.drop = nn.Dropout()
        self.fc = nn.Linear(18, 6)
        self.own = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.conv(x)) * self.scale).flatten(1)
        return self.head(self.own(self.fc(x).tanh()).tanh())


def a_batch(task: int) -> Any:
    return classification(task, 4, 4, samples=6, rank=1, classes=3)


def learnt(cls: type[GPM], tasks: int) -> GPM:
    torch.manual_seed(0)
    only = {"epsilon": 0.0} if cls is TRGP else {}
    learner = cls(Net(), threshold=0.9, exclude=["head"], per_task=["own"], **only)
    for task in range(tasks):
        learner.begin_task(task, [a_batch(task)], cross_entropy)
        train(learner, [a_batch(task)], steps=3)
        learner.end_task([a_batch(task)])
    return learner


@cache
def before(cls: type[GPM], call: str, tasks: int) -> GPM:
    """A learner whose next call is this one."""
    learner = learnt(cls, tasks)
    if call != "begin_task":
        learner.begin_task("new", [a_batch(tasks)], cross_entropy)
        train(learner, [a_batch(tasks)], steps=2)
    learner.model.drop.eval()  # a mode that `train()` alone would not bring back
    return learner


def fresh(cls: type[GPM], call: str, tasks: int) -> GPM:
    """A copy of that, with gradients and random states that nothing should change.

    In an open task weights have been written by hand, which the call adopts first.
    """
    learner = copy.deepcopy(before(cls, call, tasks))
    if call != "begin_task":
        with torch.no_grad():
            for p in learner.model.fc.parameters():
                p += 0.02
    for p in learner.model.parameters():
        p.grad = torch.full_like(p, 3.0) if p.requires_grad else None
    torch.manual_seed(7)
    return learner


CALLS: dict[str, Callable[[GPM, int], None]] = {
    "begin_task": lambda learner, n: learner.begin_task("new", [a_batch(n)], cross_entropy),
    "end_task": lambda learner, n: learner.end_task([a_batch(n)]),
    "abort_task": lambda learner, n: learner.abort_task(),
}
CASES = [(cls, call, tasks) for cls in (GPM, TRGP) for call in CALLS for tasks in (0, 2)]


def at_line(number: int | None, call: Callable[[], None]) -> tuple[int, bool]:
    """Interrupt a call before a line of the package, by its number in the order of running.

    Returns how many lines began, and whether the interrupt came.
    """
    count, raised = 0, False

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count, raised
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        if event == "line":
            count += 1
            if count == number:
                raised = True
                raise KeyboardInterrupt
        return trace

    old = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(old)
    return count, raised


def state_of(learner: GPM) -> dict[str, Any]:
    """All that could be left half-way; a copy of the learner has another model, but the same."""
    model = learner.model
    kind, keys, *rest = np.random.get_state()
    return {
        "weights": {key: value.clone() for key, value in model.state_dict().items()},
        "trains": [(name, p.requires_grad) for name, p in model.named_parameters()],
        "modes": [(name, m.training, "train" in vars(m)) for name, m in model.named_modules()],
        "hooks": [
            len(vars(m)[key]) for m in model.modules() for key in vars(m) if key.endswith("hooks")
        ],
        "random": (random.getstate(), kind, keys.tolist(), rest, torch.get_rng_state().tolist()),
        "grads": [p.grad is not None and p.grad.sum().item() for p in model.parameters()],
        "grad": torch.is_grad_enabled(),
        "fused": torch.backends.mha.get_fastpath_enabled(),
        "tasks": learner.tasks,
        "selected": learner.selected,
        "ranks": learner.ranks,
        "bytes": (learner.memory_bytes, learner.task_bytes),
        "repr": repr(learner),
    }


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """What is not the same; weights to the bit."""
    found = [key for key in a if key != "weights" and a[key] != b[key]]
    pairs = a["weights"].keys() | b["weights"].keys()
    return found + [key for key in pairs if not torch.equal(a["weights"][key], b["weights"][key])]


def outcome(learner: GPM, tasks: int, path: Path) -> dict[str, Any]:
    """Every call works from here, to the end of the task and of another; a save loads."""
    torch.manual_seed(5)
    learner.save(path, include_model=True)
    again = type(learner).load(path, Net())
    assert again.tasks == learner.tasks
    assert again.selected == learner.selected
    for task in learner.tasks:
        with learner.task(task), again.task(task):
            pairs = zip(
                learner.model.state_dict().values(), again.model.state_dict().values(), strict=True
            )
            assert all(torch.equal(a, b) for a, b in pairs)
    copy.deepcopy(learner)
    if "new" not in learner.tasks:
        if "learning 'new'" not in repr(learner):
            learner.begin_task("new", [a_batch(tasks)], cross_entropy)
        train(learner, [a_batch(tasks)], steps=2)
        learner.end_task([a_batch(tasks)])
    learner.begin_task("next", [a_batch(9)], cross_entropy)
    train(learner, [a_batch(9)], steps=2)
    learner.end_task([a_batch(9)])
    with learner.task("new"):
        pass
    return state_of(learner)


def interrupted(cls: type[GPM], call: str, tasks: int, positions: int, path: Path) -> None:
    """At so many lines, evenly spread over all that run."""
    whole = fresh(cls, call, tasks)
    was = state_of(whole)
    lines, _ = at_line(None, lambda: CALLS[call](whole, tasks))
    then = state_of(whole)
    assert differences(was, then)
    ends = {"before": outcome(fresh(cls, call, tasks), tasks, path)}
    ends["after"] = outcome(whole, tasks, path)
    for position in range(positions):
        line = 1 + int((position + 0.5) * lines / positions)
        learner = fresh(cls, call, tasks)
        _, raised = at_line(line, partial(CALLS[call], learner, tasks))
        assert raised
        if differences(state_of(learner), was) and differences(state_of(learner), then):
            learner.state_dict()  # the next call puts back what the interrupted one could not
        found = state_of(learner)
        which = "after" if differences(found, was) else "before"
        place = f"line {line} of {lines}, {which}"
        other = differences(found, was), differences(found, then)
        assert not all(other), f"{place}: {other}"
        assert not differences(outcome(learner, tasks, path), ends[which]), place


EACH = pytest.mark.parametrize(("cls", "call", "tasks"), CASES)


@EACH
def test_an_interrupted_call_is_whole_or_not_at_all(
    cls: type[GPM], call: str, tasks: int, tmp_path: Path
) -> None:
    interrupted(cls, call, tasks, 4, tmp_path / "a")


@pytest.mark.slow
@EACH
def test_at_hundreds_of_lines(cls: type[GPM], call: str, tasks: int, tmp_path: Path) -> None:
    interrupted(cls, call, tasks, 60, tmp_path / "a")
