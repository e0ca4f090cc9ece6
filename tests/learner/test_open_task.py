"""A task in the middle: saved and gone on with to the same bits, as plain state, and given up."""

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Batch, assert_close, classification, cross_entropy, learn
from support import inside
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from trgp import GPM, TRGP

MAKERS: dict[str, Callable[..., Optimizer]] = {
    "momentum": partial(SGD, lr=0.05, momentum=0.9),
    "AdamW": partial(AdamW, lr=1e-2, weight_decay=0.1),
}
EACH = pytest.mark.parametrize("name", MAKERS)
BOTH = pytest.mark.parametrize("cls", [GPM, TRGP])


class Net(nn.Module):
    """A grouped convolution, a norm, a wide layer, and a head of each task's own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 2, groups=2)
        self.norm = nn.BatchNorm1d(8)
        self.fc = nn.Linear(24, 12)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fc(self.norm(self.conv(x)).flatten(1)).tanh())


def a_batch(task: int, dtype: torch.dtype = torch.float32) -> Batch:
    x, y = classification(task, 8, 4, rank=2)
    return x.to(dtype), y


def learnt(cls: type[GPM], dtype: torch.dtype = torch.float32, **options: Any) -> GPM:
    torch.manual_seed(0)
    only = {"epsilon": 0.0} if cls is TRGP else {}
    options = {"threshold": 0.9, "per_task": ["head"]} | only | options
    learner = cls(Net().to(dtype), **options)
    for task in range(2):
        learn(learner, task, [a_batch(task, dtype)], steps=5)
    return learner


def opened(
    cls: type[GPM], name: str, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[GPM, Optimizer]:
    """In the middle of a third task, after a number of steps that ends no round of ten."""
    learner = learnt(cls, dtype, **options)
    learner.begin_task("new", [a_batch(2, dtype)], cross_entropy)
    optimizer = MAKERS[name](learner.parameters())
    steps(learner, optimizer, 7)
    return learner, optimizer


def steps(learner: GPM, optimizer: Optimizer, count: int) -> None:
    dtype = next(learner.model.parameters()).dtype
    learner.model.train()
    for _ in range(count):
        optimizer.zero_grad()
        cross_entropy(learner.model, a_batch(2, dtype)).backward()
        optimizer.step()


def go_on(learner: GPM, optimizer: Optimizer) -> None:
    dtype = next(learner.model.parameters()).dtype
    steps(learner, optimizer, 8)
    learner.end_task([a_batch(2, dtype)])
    learn(learner, "more", [a_batch(3, dtype)], steps=3)


def restored(learner: GPM, name: str, state: dict[str, Any]) -> Optimizer:
    """An optimizer made anew over the same parameters, with the state of the old one."""
    optimizer = MAKERS[name](learner.parameters())
    optimizer.load_state_dict(state)
    return optimizer


def assert_equal(a: GPM, b: GPM) -> None:
    assert a.tasks == b.tasks
    assert (a.selected, a.ranks, a.task_bytes) == (b.selected, b.ranks, b.task_bytes)
    for task in a.tasks:
        with a.task(task), b.task(task):
            ours, theirs = a.model.state_dict(), b.model.state_dict()
            assert ours.keys() == theirs.keys()
            for key, value in ours.items():
                assert torch.equal(value, theirs[key]), (task, key)


# ---- the same bits -----------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (GPM, {"threshold": 0.6}),
        (GPM, {"threshold": 0.999}),
        (TRGP, {}),
        (TRGP, {"threshold": 0.999}),
        (TRGP, {"form": "range", "scale_rate": 0.3}),
        (TRGP, {"epsilon": 1.0, "threshold": 0.999}),
    ],
    ids=["GPM", "GPM, complement", "TRGP", "TRGP, full", "range", "nothing trusted"],
)
@pytest.mark.parametrize("way", ["file", "model apart", "model later"])
def test_a_saved_open_task_goes_on_to_the_same_bits(
    way: str, cls: type[GPM], options: dict[str, Any], name: str, tmp_path: Path
) -> None:
    learner, optimizer = opened(cls, name, **options)
    learner.save(tmp_path / "a", include_model=way == "file")
    weights = copy.deepcopy(learner.model.state_dict())
    state = copy.deepcopy(optimizer.state_dict())
    model = Net()
    if way == "model apart":
        model.load_state_dict(weights)
    loaded = cls.load(tmp_path / "a", model)
    if way == "model later":
        model.load_state_dict(weights)
    assert "learning 'new'" in repr(loaded)
    assert loaded.selected == learner.selected
    loaded.begin_task("new", [a_batch(2)], cross_entropy)
    go_on(learner, optimizer)
    go_on(loaded, restored(loaded, name, state))
    assert_equal(learner, loaded)


def test_the_cases_above_take_the_ways_they_name() -> None:
    for threshold, complement in ((0.6, False), (0.999, True)):
        learner, _ = opened(GPM, "AdamW", threshold=threshold)
        guards = inside.guarded_task(learner).layers.values()
        assert any(guard.N is not None for guard in guards) == complement
    learner, _ = opened(TRGP, "AdamW")
    assert all(region.blocks for region in inside.regions(learner).values())
    assert any(len(region.M) > 1 for region in inside.regions(learner).values())


@EACH
@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_state_dict_goes_on_to_the_same_bits(
    dtype: torch.dtype, cls: type[GPM], name: str
) -> None:
    """As plain values and tensors, which later steps do not change."""
    learner, optimizer = opened(cls, name, dtype)
    state = learner.state_dict()
    json.dumps(state["meta"])
    weights, moments = copy.deepcopy((learner.model.state_dict(), optimizer.state_dict()))
    go_on(learner, optimizer)
    only = {"epsilon": 0.0} if cls is TRGP else {}
    model = Net().to(dtype)
    model.load_state_dict(weights)
    loaded = cls(model, threshold=0.9, per_task=["head"], **only)
    loaded.load_state_dict(state)
    loaded.begin_task("new", [a_batch(2, dtype)], cross_entropy)
    go_on(loaded, restored(loaded, name, moments))
    assert_equal(learner, loaded)


def test_a_state_dict_between_tasks_and_of_the_same_learner() -> None:
    """Also to go back in the learner it came from, from an open task to a closed one."""
    learner = learnt(TRGP)
    state, weights = learner.state_dict(), copy.deepcopy(learner.model.state_dict())
    steady = copy.deepcopy(learner)
    learn(learner, 2, [a_batch(2)], steps=3)
    learner.begin_task(3, [a_batch(3)], cross_entropy)
    learner.load_state_dict(state)
    learner.model.load_state_dict(weights)
    assert learner.tasks == [0, 1]
    for one in (learner, steady):
        torch.manual_seed(1)
        learn(one, "next", [a_batch(5)], steps=3)
    assert_equal(learner, steady)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    learner, state = learnt(TRGP), learnt(GPM).state_dict()
    with pytest.raises(ValueError, match="The state holds a GPM learner"):
        learner.load_state_dict(state)
    assert learner.tasks == [0, 1]


# ---- going on ----------------------------------------------------------------------------------


def test_an_open_task_that_was_loaded_needs_its_loss_function_to_end(tmp_path: Path) -> None:
    learner, _ = opened(TRGP, "momentum")
    learner.save(tmp_path / "a", include_model=True)
    loaded = TRGP.load(tmp_path / "a", Net())
    with pytest.raises(
        RuntimeError, match="'new' was open when this learner was saved; call begin"
    ):
        loaded.end_task([a_batch(2)])
    with pytest.raises(RuntimeError, match="cannot be called while task 'new'"):
        loaded.begin_task("other", [a_batch(2)], cross_entropy)
    before = copy.deepcopy(loaded.model.state_dict())
    loaded.begin_task("new", [a_batch(2)], cross_entropy)
    for key, value in loaded.model.state_dict().items():
        assert torch.equal(value, before[key])
    with pytest.raises(RuntimeError, match="cannot be called while task 'new'"):
        loaded.begin_task("new", [a_batch(2)], cross_entropy)
    loaded.end_task([a_batch(2)])
    assert loaded.tasks == [0, 1, "new"]


def test_steps_before_begin_task_is_repeated_are_guarded(tmp_path: Path) -> None:
    learner, _ = opened(TRGP, "momentum")
    learner.save(tmp_path / "a", include_model=True)
    loaded = TRGP.load(tmp_path / "a", Net())
    start = inside.matrices(loaded)
    steps(loaded, SGD(loaded.parameters(), lr=0.1), 3)
    for name, W in inside.matrices(loaded).items():
        change = W - start[name]
        assert change.norm() > 1e-3
        assert inside.forbidden(loaded, name, change).norm() < 1e-5


@EACH
def test_a_kept_optimizer_is_not_taken_for_another_tasks(name: str, tmp_path: Path) -> None:
    """Momentum that an open task has gathered itself stays where it is when it is resumed."""
    learner, optimizer = opened(TRGP, name)
    key = "momentum_buffer" if name == "momentum" else "exp_avg"
    learner.save(tmp_path / "a", include_model=True)
    loaded = TRGP.load(tmp_path / "a", Net())
    loaded.begin_task("new", [a_batch(2)], cross_entropy)
    again = restored(loaded, name, copy.deepcopy(optimizer.state_dict()))
    inner = 0.0
    for layer_name, layer in inside.layers(learner).items():
        M = inside.bases(learner)[layer_name].M
        buffers = layer.pack([optimizer.state[p][key] for p in layer.params])
        inner = max(inner, float((buffers @ M).norm() / buffers.norm()))
    assert inner > 1e-3
    steps(learner, optimizer, 1)
    steps(loaded, again, 1)
    for p, q in zip(learner.model.parameters(), loaded.model.parameters(), strict=True):
        assert torch.equal(p, q)


@BOTH
def test_the_first_task_may_be_saved_open(cls: type[GPM], tmp_path: Path) -> None:
    """Before anything is known."""
    torch.manual_seed(0)
    learner = cls(Net(), per_task=["head"])
    learner.begin_task(0, [a_batch(0)], cross_entropy)
    optimizer = SGD(learner.parameters(), lr=0.1, momentum=0.9)
    steps(learner, optimizer, 3)
    learner.save(tmp_path / "a", include_model=True)
    state = copy.deepcopy(optimizer.state_dict())
    loaded = cls.load(tmp_path / "a", Net())
    loaded.begin_task(0, [a_batch(0)], cross_entropy)
    again = SGD(loaded.parameters(), lr=0.1, momentum=0.9)
    again.load_state_dict(state)
    for one, each in ((learner, optimizer), (loaded, again)):
        steps(one, each, 3)
        one.end_task([a_batch(0)])
    assert_equal(learner, loaded)


# ---- giving up ---------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("after", ["begin", "steps", "loading"])
def test_a_task_that_is_given_up_leaves_old_ones_as_they_were(
    after: str, cls: type[GPM], tmp_path: Path
) -> None:
    """Per-task copies included; the same id can be begun again."""
    learner = learnt(cls, torch.float64)
    expected = {}
    for task in learner.tasks:
        with learner.task(task):
            M = inside.bases(learner)
            found = {n: W @ M[n].M for n, W in inside.matrices(learner).items()}
            expected[task] = found, learner.model.head.weight.detach().clone()
    selected = learner.selected
    learner.begin_task("new", [a_batch(2, torch.float64)], cross_entropy)
    optimizer = SGD(learner.parameters(), lr=0.1, momentum=0.9)
    if after != "begin":
        steps(learner, optimizer, 5)
    if after == "loading":
        learner.save(tmp_path / "a", include_model=True)
        learner = cls.load(tmp_path / "a", Net().double())
    learner.abort_task()
    assert learner.selected == selected
    assert torch.equal(learner.model.head.weight, expected[1][1])
    for task, (coordinates, head) in expected.items():
        with learner.task(task):
            assert torch.equal(learner.model.head.weight, head)
            for name, W in inside.matrices(learner).items():
                assert_close(W @ inside.bases(learner)[name].M, coordinates[name], 1e-12)
    learn(learner, "new", [a_batch(2, torch.float64)], steps=3)
    assert learner.tasks == [0, 1, "new"]


@BOTH
def test_the_first_task_may_be_given_up(cls: type[GPM]) -> None:
    """Nothing is frozen yet, and what training made of the weights stays."""
    torch.manual_seed(0)
    learner = cls(Net(), per_task=["head"])
    learner.begin_task(0, [a_batch(0)], cross_entropy)
    steps(learner, SGD(learner.parameters(), lr=0.1), 3)
    before = copy.deepcopy(learner.model.state_dict())
    learner.abort_task()
    for key, value in learner.model.state_dict().items():
        assert torch.equal(value, before[key])
    assert learner.tasks == []
    assert all(p.requires_grad for p in learner.model.parameters())
    learn(learner, 0, [a_batch(0)])


def test_repr_tells_where_it_is() -> None:
    learner = learnt(TRGP)
    text = repr(learner)
    assert text.startswith("TRGP(Net, 2 layers, tasks [0, 1], ")
    assert text.endswith("of all directions protected)")
    learner.begin_task("new", [a_batch(2)], cross_entropy)
    assert "tasks [0, 1], learning 'new', " in repr(learner)
    learner.abort_task()
    assert repr(learner) == text
