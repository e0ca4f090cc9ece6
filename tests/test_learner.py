"""The public interface: the loop, the options over modules, optimizers, and what a task keeps."""

import copy
import io
import random
import re
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ConvNet, assert_close, classification, cross_entropy, learn, mlp, mse, train
from support import inside
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from trgp import GPM, TRGP, UnknownTaskError
from trgp.core.memory import scalings_of

F64 = torch.float64
Ids = list[int | str]


def a_batch(
    task: int, samples: int = 8, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """The same numbers in any dtype."""
    x, y = classification(task, 12, rank=3, samples=samples, dtype=torch.float64)
    return x.to(dtype), y


def a_learner(cls: type[GPM] = TRGP, model: nn.Module | None = None, **options: Any) -> GPM:
    """An MLP whose last layer is a head; TRGP trusts every old task."""
    torch.manual_seed(0)
    model = mlp(12, 10, 10, 4) if model is None else model
    if cls is TRGP:
        options = {"epsilon": 0.0} | options
    return cls(model.double(), **({"threshold": 0.95, "exclude": ["4"]} | options))


def learnt(tasks: int, cls: type[GPM] = TRGP, **options: Any) -> GPM:
    learner = a_learner(cls, **options)
    for task in range(tasks):
        learn(learner, task, [a_batch(task)])
    return learner


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def assert_same(model: nn.Module, before: dict[str, Tensor]) -> None:
    now = model.state_dict()
    assert list(now) == list(before)
    for key, value in now.items():
        assert torch.equal(value, before[key]), key


def changed(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}


@torch.no_grad()
def evaluated(model: nn.Module, x: Tensor) -> Tensor:
    training = model.training
    model.eval()
    y = model(x)
    model.train(training)
    return y


# ---- task ids -------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [[0, 1, 2], [2, 0, 1], ["b", "a", ""], [3, "3", -3]])
def test_task_ids_are_names_and_nothing_more(ids: Ids) -> None:
    """Any ints and strings in any order give the very weights that 0, 1, 2 give."""
    plain = learnt(3)
    learner = a_learner()
    for i, task in enumerate(ids):
        learn(learner, task, [a_batch(i)])
    assert_same(learner.model, snapshot(plain.model))
    assert list(learner.selected) == ids
    for i, task in enumerate(ids):
        renamed = {layer: [ids[j] for j in js] for layer, js in plain.selected[i].items()}
        assert learner.selected[task] == renamed
        with learner.task(task), plain.task(i):
            assert_same(learner.model, snapshot(plain.model))


def test_integers_of_other_libraries_are_the_same_ids() -> None:
    learner = a_learner()
    learn(learner, np.int64(4), [a_batch(0)])
    learn(learner, torch.tensor(5), [a_batch(1)])
    assert [type(task) for task in learner.selected] == [int, int]
    with learner.task(4), learner.task(np.int32(5)):
        pass


# ---- the weights the model computes with ----------------------------------------------------


def test_while_learning_the_model_holds_the_effective_weights() -> None:
    """Plain keys; outside span(M) the shared weights, inside it some Q could have made them."""
    learner = learnt(2)
    keys = list(learner.model.state_dict())
    shared = inside.shared_weights(learner)
    learner.begin_task(2, [a_batch(2)], cross_entropy)
    for name, W in inside.matrices(learner).items():
        assert_close(W, shared[name], 1e-12)
    train(learner, [a_batch(2)])
    assert list(learner.model.state_dict()) == keys
    trusted = learner.selected[2]
    for name, W in inside.matrices(learner).items():
        memory = inside.memories(learner)[name]
        shift = W @ memory.M - memory.C
        assert shift.norm() > 1e-3
        scalings = scalings_of(shift, memory, trusted[name])
        rebuilt = sum(
            memory.C @ memory.M.mT @ (B := memory.basis(j)) @ (Q - torch.eye(Q.shape[1])) @ B.mT
            for j, Q in zip(trusted[name], scalings, strict=True)
        )
        assert_close(shift @ memory.M.mT, rebuilt, 1e-8)


def test_the_papers_scalings_are_told_of_a_learnt_task() -> None:
    """W + sum_j W B_j (Q_j - I) B_j' is what the task computes with."""
    learner = learnt(3)
    assert learner.scalings(0) == {}
    Q = learner.scalings(2)
    for name, W in inside.shared_weights(learner).items():
        total = W.clone()
        for j, each in zip(learner.selected[2][name], Q[name], strict=True):
            B = inside.bases(learner)[name].by_task[j]
            total += W @ B @ (each - torch.eye(each.shape[1])) @ B.mT
        assert_close(inside.matrices(learner)[name], total, 1e-8)
    learner.begin_task(3, [a_batch(3)], cross_entropy)
    with pytest.raises(ValueError, match="Task 3 is being learnt; call end_task first"):
        learner.scalings(3)
    with pytest.raises(UnknownTaskError, match="'no' has not been learnt"):
        learner.scalings("no")


@pytest.mark.parametrize("cls", [GPM, TRGP])
def test_beginning_changes_no_output_but_that_of_the_shared_weights(cls: type[GPM]) -> None:
    """The shared weights of the first task are its own, so a second task starts from its output."""
    learner = learnt(1, cls)
    x = torch.randn(9, 12, dtype=F64)
    before = evaluated(learner.model, x)
    learner.begin_task(1, [a_batch(1)], cross_entropy)
    assert_close(evaluated(learner.model, x), before, 1e-12)


@pytest.mark.parametrize("cls", [GPM, TRGP])
def test_afterwards_the_model_stays_on_the_task_just_learnt(cls: type[GPM]) -> None:
    learner = learnt(2, cls)
    x = torch.randn(9, 12, dtype=F64)
    learner.begin_task(2, [a_batch(2)], cross_entropy)
    train(learner, [a_batch(2)])
    trained = evaluated(learner.model, x)
    learner.end_task([a_batch(2)])
    assert_close(evaluated(learner.model, x), trained, 1e-10)
    with learner.task(2):
        assert_close(evaluated(learner.model, x), trained, 1e-10)


def test_old_tasks_keep_their_outputs() -> None:
    """The head is excluded, so each task's own is put back by the test."""
    learner = a_learner(threshold=1.0)
    recorded: list[tuple[Tensor, dict[str, Tensor]]] = []
    for task in range(3):
        learn(learner, task, [a_batch(task)])
        y = evaluated(learner.model, a_batch(task)[0])
        recorded.append((y, copy.deepcopy(learner.model[4].state_dict())))
    for task, (y, head) in enumerate(recorded):
        with learner.task(task):
            learner.model[4].load_state_dict(head)
            assert_close(evaluated(learner.model, a_batch(task)[0]), y, 1e-8)


def test_a_layer_that_a_task_does_not_use() -> None:
    """Branches and heads of other tasks are no reason to stop."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branch = nn.ModuleList(nn.Linear(12, 6) for _ in range(3))
            self.head = nn.Linear(6, 4)
            self.use = 0

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.branch[self.use](x).tanh())

    model = Branches()
    learner = a_learner(model=model, exclude=["head"], threshold=1.0)
    for task in range(3):
        model.use = task
        learn(learner, task, [a_batch(task)])
        ranks = [learner.ranks[f"branch.{i}"][0] for i in range(3)]
        assert [r > 0 for r in ranks] == [i <= task for i in range(3)]
    model.use = 0
    y = evaluated(model.branch[0], a_batch(0)[0])
    learn(learner, 3, [a_batch(3)])
    assert learner.selected[3] == {"branch.0": [0], "branch.1": [], "branch.2": []}
    assert (evaluated(model.branch[0], a_batch(0)[0]) - y).norm() > 1e-3
    with learner.task(0):
        assert_close(evaluated(model.branch[0], a_batch(0)[0]), y, 1e-8)


def test_a_layer_frozen_by_its_user_stays_where_it_is() -> None:
    learner = learnt(1)
    learner.model[0].requires_grad_(False)
    before = snapshot(learner.model)
    learn(learner, 1, [a_batch(1)], make=torch.optim.AdamW, lr=1e-2)
    x = torch.randn(9, 12, dtype=F64)
    with learner.task(0):
        assert_close(evaluated(learner.model[0], x), x @ before["0.weight"].T + before["0.bias"])
    assert "2.weight" in changed(learner.model, before)


# ---- task(t) --------------------------------------------------------------------------------


class StoppedError(Exception):
    pass


def ending_by(error: bool) -> AbstractContextManager[Any]:
    """For a block that ends with `leave(error)`."""
    return pytest.raises(StoppedError) if error else nullcontext()


def leave(error: bool) -> None:
    if error:
        raise StoppedError


def test_task_yields_the_model_with_other_weights() -> None:
    learner = learnt(3)
    before = snapshot(learner.model)
    with learner.task(0) as model:
        assert model is learner.model
        assert changed(model, before) == {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.mark.parametrize("error", [False, True])
@pytest.mark.parametrize("learning", [False, True])
def test_task_puts_every_bit_back(learning: bool, error: bool) -> None:
    learner = learnt(3)
    if learning:
        learner.begin_task(3, [a_batch(3)], cross_entropy)
        train(learner, [a_batch(3)], steps=3)
    before = snapshot(learner.model)
    for task in (0, 1, 2):
        with ending_by(error), learner.task(task):
            assert changed(learner.model, before) or (task == 2 and not learning)
            leave(error)
        assert_same(learner.model, before)


@pytest.mark.parametrize("error", [False, True])
@pytest.mark.parametrize("learning", [False, True])
def test_task_can_be_nested(learning: bool, error: bool) -> None:
    learner = learnt(3, threshold=1.0, model=mlp(12, 64, 64, 4))
    body = learner.model[:4]
    expected = {}
    for task in range(3):
        with learner.task(task):
            expected[task] = evaluated(body, a_batch(task)[0])
    if learning:
        learner.begin_task(3, [a_batch(3)], cross_entropy)
        train(learner, [a_batch(3)], steps=3)
    before = snapshot(learner.model)
    with learner.task(0):
        outer = snapshot(learner.model)
        for task in (1, 2, 0):
            with ending_by(error), learner.task(task):
                assert_close(evaluated(body, a_batch(task)[0]), expected[task], 1e-8)
                leave(error)
            assert_same(learner.model, outer)
        assert_close(evaluated(body, a_batch(0)[0]), expected[0], 1e-8)
    assert_same(learner.model, before)


def test_a_visit_in_the_middle_of_learning_leaves_no_trace() -> None:
    """Evaluating old tasks every few steps, or never: the same bits in the end."""
    results = []
    for visits in (False, True):
        learner = learnt(2)
        learner.begin_task(2, [a_batch(2)], cross_entropy)
        optimizer = learner.attach(torch.optim.AdamW(learner.parameters(), lr=1e-2))
        for _ in range(6):
            optimizer.zero_grad()
            cross_entropy(learner.model, a_batch(2)).backward()
            if visits:
                with learner.task(0), torch.no_grad():
                    learner.model(a_batch(0)[0])
            optimizer.step()
        learner.end_task([a_batch(2)])
        results.append(snapshot(learner.model))
    assert_same(learner.model, results[0])


@pytest.mark.parametrize("learning", [False, True])
def test_evaluation_in_inference_mode_does_not_hinder_training(learning: bool) -> None:
    learner, steady = learnt(2), learnt(2)
    for one in (learner, steady):
        if not learning:
            one.model.float().double()  # so that the learner's tensors have to follow
        one.begin_task(2, [a_batch(2)], cross_entropy)
        if not learning:
            one.end_task([a_batch(2)])
    with torch.inference_mode(), learner.task(0):
        learner.model(a_batch(0)[0])
    for one in (learner, steady):
        if not learning:
            one.begin_task(3, [a_batch(2)], cross_entropy)
        train(one, [a_batch(2)], steps=3)
        one.end_task([a_batch(2)])
    assert_same(learner.model, snapshot(steady.model))


def test_the_learners_own_calls_in_inference_mode() -> None:
    """What they keep must serve in training."""
    learner, steady = learnt(2), learnt(2)
    for one, mode in ((learner, True), (steady, False)):
        for task in (2, 3):
            batches = [a_batch(task)]
            with torch.inference_mode(mode):
                one.begin_task(task, batches, cross_entropy)
            train(one, batches, steps=3)
            with torch.inference_mode(mode):
                one.end_task(batches)
    assert_same(learner.model, snapshot(steady.model))


def test_the_task_being_learnt_is_itself() -> None:
    learner = learnt(2)
    learner.begin_task("new", [a_batch(2)], cross_entropy)
    train(learner, [a_batch(2)], steps=3)
    before = snapshot(learner.model)
    with learner.task("new"):
        assert_same(learner.model, before)
        with learner.task(0):
            assert changed(learner.model, before)
            with learner.task("new"):  # also from within another one
                assert_same(learner.model, before)
        assert_same(learner.model, before)


# ---- exclude, per_task, norm ----------------------------------------------------------------


class Heads(nn.Module):
    """A body of two layers and three heads, one of them in use."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 10), nn.BatchNorm1d(10), nn.Linear(10, 10))
        self.heads = nn.ModuleList(nn.Linear(10, 4) for _ in range(3))
        self.header = nn.Linear(10, 10)
        self.use = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[self.use](self.header(self.body(x).tanh()).tanh())


@pytest.mark.parametrize(
    ("exclude", "layers"),
    [
        ([], {"body.0", "body.2", "heads.0", "heads.1", "heads.2", "header"}),
        (["heads.*"], {"body.0", "body.2", "header"}),
        (["heads"], {"body.0", "body.2", "header"}),
        (["head*"], {"body.0", "body.2"}),
        (["heads.[02]", "body.0"], {"body.2", "heads.1", "header"}),
        (["HEADS.*", "ody.0"], {"body.0", "body.2", "heads.0", "heads.1", "heads.2", "header"}),
        (["body", "*.1"], {"heads.0", "heads.2", "header"}),
    ],
)
def test_patterns_are_globs_over_module_names(exclude: list[str], layers: set[str]) -> None:
    assert GPM(Heads(), exclude=exclude).ranks.keys() == layers
    assert GPM(Heads(), per_task=exclude).ranks.keys() == layers


def test_excluded_modules_are_left_alone() -> None:
    """They train in every task, wherever their optimizer takes them, and task(t) keeps them."""
    model = Heads().double()
    learner = GPM(model, threshold=1.0, exclude=["heads.*", "body.1"])
    for task in range(2):
        model.use = task
        learn(learner, task, [a_batch(task)])
        assert all(p.requires_grad for p in model.parameters())
    model.train()
    assert model.body[1].training
    model.use = 0
    before = snapshot(model)
    learner.begin_task(2, [a_batch(2)], cross_entropy)
    twin = copy.deepcopy(model)
    train(learner, [a_batch(2)], steps=1)
    twin.train()
    cross_entropy(twin, a_batch(2)).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    for name in ("heads.0.weight", "heads.0.bias", "body.1.weight", "body.1.bias"):
        assert_close(model.get_parameter(name), twin.get_parameter(name), 1e-12)
        assert not torch.equal(model.get_parameter(name), before[name])
    learner.end_task([a_batch(2)])
    now = snapshot(model)
    with learner.task(0):
        assert not changed(model, now) & {k for k in now if k.startswith(("heads", "body.1"))}


def test_per_task_modules_come_back_with_their_buffers() -> None:
    model = Heads().double()
    learner = GPM(model, threshold=1.0, per_task=["heads.*"], norm="per_task")
    own = {key for key in model.state_dict() if key.startswith(("heads", "body.1"))}
    assert {"body.1.running_mean", "body.1.num_batches_tracked", "heads.0.bias"} <= own
    kept, outputs = [], []
    for task in range(3):
        learn(learner, task, [a_batch(task)], steps=5 + task)
        kept.append(snapshot(model))
        outputs.append(evaluated(model, a_batch(task)[0]))
        model.train()
        assert model.body[1].training
    for task in (1, 0, 2, 0):
        with learner.task(task):
            for key in own:
                assert torch.equal(model.state_dict()[key], kept[task][key]), key
            assert_close(evaluated(model, a_batch(task)[0]), outputs[task], 1e-8)
            model.train()
            model(torch.randn(7, 12, dtype=F64))  # moves the running statistics, until the exit
        assert_same(model, kept[2])
    for key in ("body.1.running_mean", "body.1.weight", "heads.0.weight"):
        assert not torch.equal(kept[0][key], kept[1][key])


def test_heads_may_be_added_between_tasks() -> None:
    model = Heads().double()
    learner = TRGP(model, threshold=0.95, per_task=["heads.*"])
    learn(learner, 0, [a_batch(0)])
    model.heads.append(nn.Linear(10, 4).double())
    model.use = 3
    learn(learner, 1, [a_batch(1)])
    added = model.heads[3].weight.detach().clone()
    learn(learner, 2, [a_batch(2)])
    assert not torch.equal(model.heads[3].weight, added)
    with learner.task(1):
        assert torch.equal(model.heads[3].weight, added)


def test_frozen_parts_do_not_move_after_the_first_task() -> None:
    model = ConvNet(width=8).double()
    model.register_parameter("scale", nn.Parameter(torch.ones(1, dtype=F64)))
    model.register_forward_pre_hook(lambda net, args: (args[0] * net.scale,))
    learner = TRGP(model, threshold=0.8, exclude=["head"])
    still = ["scale", *(k for k in model.state_dict() if k.startswith("norm"))]
    first = snapshot(model)
    optimizer: Optimizer | None = None
    after: dict[str, Tensor] = {}
    for task in range(3):
        batch = classification(task, 16, 4, 4, rank=2, dtype=F64)
        learner.begin_task(task, [batch], cross_entropy)
        if optimizer is None:
            options = {"lr": 1e-2, "weight_decay": 0.1}
            optimizer = learner.attach(torch.optim.AdamW(learner.parameters(), **options))
        model.train()
        assert model.norm1.training == (task == 0)
        for _ in range(4):
            optimizer.zero_grad(set_to_none=False)
            cross_entropy(model, batch).backward()
            optimizer.step()
        learner.end_task([batch])
        if task == 0:
            after = snapshot(model)
            assert set(still) <= changed(model, first)
    assert not changed(model, after) & set(still)
    assert "conv.weight" in changed(model, after)


# ---- parameters and optimizers --------------------------------------------------------------


def test_parameters_are_the_models_own_that_train() -> None:
    learner = learnt(2, norm="freeze")
    plain = [id(p) for p in learner.model.parameters()]
    for begin in (False, True):
        if begin:
            learner.begin_task(2, [a_batch(2)], cross_entropy)
        assert [id(p) for p in learner.parameters()] == plain
        assert all(p.requires_grad for p in learner.parameters())
    learner.model[0].requires_grad_(False)
    assert [id(p) for p in learner.parameters()] == plain[2:]


KEPT: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
}


@pytest.mark.parametrize("name", KEPT)
def test_an_optimizer_kept_across_tasks_sees_the_same_parameters(name: str) -> None:
    """With a scheduler and an average of weights made once; no group grows or shrinks."""
    learner = a_learner()
    optimizer = KEPT[name](learner.parameters())
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    average = AveragedModel(learner.model)
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    ends = []
    for task in range(5):
        learner.begin_task(task, [a_batch(task)], cross_entropy)
        for _ in range(8):
            optimizer.zero_grad()
            cross_entropy(learner.model, a_batch(task)).backward()
            optimizer.step()
            average.update_parameters(learner.model)
        scheduler.step()
        learner.end_task([a_batch(task)])
        assert [id(p) for group in optimizer.param_groups for p in group["params"]] == held
        assert set(optimizer.state) <= set(learner.model.parameters())
        ends.append(evaluated(learner.model[:4], a_batch(task)[0]))
    assert list(average.module.state_dict()) == list(learner.model.state_dict())
    for task, expected in enumerate(ends):
        with learner.task(task):
            found = evaluated(learner.model[:4], a_batch(task)[0])
        assert (found - expected).norm() < 0.3 * expected.norm()


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=20),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=30),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.5),
        lambda o: lr_scheduler.LambdaLR(o, [lambda s: 0.9**s, lambda s: 0.8**s]),
    ],
    ids=["cosine", "one cycle", "plateau", "lambda"],
)
def test_schedulers_keep_working_over_tasks(make: Callable[[Optimizer], Any]) -> None:
    """Rates are those of the same scheduler on an optimizer that knows of no tasks."""
    learner = a_learner()
    weights = [p for p in learner.parameters() if p.dim() > 1]
    biases = [p for p in learner.parameters() if p.dim() == 1]

    def groups(*params: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": p, "lr": lr} for p, lr in zip(params, (0.1, 0.01), strict=True)]

    free = torch.optim.SGD(groups(*([nn.Parameter(torch.ones(2))] for _ in range(2))), momentum=0.9)
    free_scheduler = make(free)
    optimizer = learner.attach(torch.optim.SGD(groups(weights, biases), momentum=0.9))
    scheduler = make(optimizer)
    rates = set()
    for task in range(3):
        learner.begin_task(task, [a_batch(task)], cross_entropy)
        for step in range(8):
            optimizer.zero_grad()
            cross_entropy(learner.model, a_batch(task)).backward()
            optimizer.step()
            free.step()
            value = [float(step)] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []
            scheduler.step(*value)
            free_scheduler.step(*value)
            found = [group["lr"] for group in optimizer.param_groups]
            assert found == [group["lr"] for group in free.param_groups]
            rates.add(found[1])
        learner.end_task([a_batch(task)])
    assert len(rates) > 2


def test_an_optimizer_may_be_attached_before_the_task_begins() -> None:
    ends = []
    for before in (False, True):
        learner = learnt(1)
        optimizer = torch.optim.SGD(learner.parameters(), lr=0.1)
        if before:
            learner.attach(optimizer)
        learner.begin_task(1, [a_batch(1)], cross_entropy)
        if not before:
            learner.attach(optimizer)
        learner.model.zero_grad()
        cross_entropy(learner.model, a_batch(1)).backward()
        optimizer.step()
        ends.append(snapshot(learner.model))
        moved = inside.matrices(learner)["0"] @ inside.bases(learner)["0"].M
        assert (moved - inside.coordinates(learner)["0"]).norm() > 1e-6  # within the reach
    assert_same(learner.model, ends[0])


def test_the_rate_of_the_scalings_is_an_option() -> None:
    """One step of SGD moves inside span(M) by scale_rate times what it moves at 1, not outside."""
    before, steps = learnt(2), {}
    for rate in (1.0, 0.1):
        learner = copy.deepcopy(before)
        learner.scale_rate = rate
        learner.begin_task(2, [a_batch(2)], cross_entropy)
        start = inside.matrices(learner)
        train(learner, [a_batch(2)], steps=1)
        steps[rate] = {name: W - start[name] for name, W in inside.matrices(learner).items()}
    for name, each in inside.bases(before).items():
        whole, less = steps[1.0][name], steps[0.1][name]
        assert min((whole @ each.M).norm(), (whole - whole @ each.M @ each.M.mT).norm()) > 1e-6
        assert_close(less @ each.M, 0.1 * whole @ each.M, 1e-15)
        difference = whole - less
        assert_close(difference @ each.M @ each.M.mT, difference, 1e-15)


def test_autocast_and_clipping() -> None:
    """In bfloat16 the loss falls, and old outputs stay to what float32 weights can hold."""
    torch.manual_seed(0)
    model = mlp(12, 32, 32, 4)
    learner = TRGP(model, threshold=0.999, epsilon=0.0, exclude=["4"])
    outputs = []
    for task in range(3):
        batch = a_batch(task, dtype=torch.float32)
        learner.begin_task(task, [batch], cross_entropy)
        optimizer = learner.attach(torch.optim.AdamW(learner.parameters(), lr=1e-2))
        losses = []
        for _ in range(30):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = cross_entropy(model, batch)
            assert model(batch[0]).dtype == torch.float32
            loss.backward()
            clip_grad_norm_(learner.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.5 * losses[0]
        learner.end_task([batch])
        outputs.append(evaluated(model[:4], batch[0]))
    for task, expected in enumerate(outputs):
        with learner.task(task):
            x = a_batch(task, dtype=torch.float32)[0]
            error = evaluated(model[:4], x) - expected
            assert error.norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("cls", [GPM, TRGP])
def test_the_whole_loop_may_run_under_autocast(cls: type[GPM]) -> None:
    """Also the steps and what the learner does itself: what is protected stays to float32."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"epsilon": 0.0} if cls is TRGP else {}
    learner = cls(mlp(12, 32, 32, 4), threshold=0.95, exclude=["4"], **options)
    layers = inside.layers(learner)
    with torch.autocast("cpu", torch.bfloat16):
        learn(learner, 0, [a_batch(0, dtype=torch.float32)])
    bases = {name: each.M.clone() for name, each in inside.bases(learner).items()}
    protected = {name: layers[name].matrix() @ M for name, M in bases.items()}
    with torch.autocast("cpu", torch.bfloat16):
        learn(learner, 1, [a_batch(1, dtype=torch.float32)], make=torch.optim.AdamW, lr=1e-2)
    with learner.task(0):
        for name, M in bases.items():
            assert M.dtype == torch.float32
            assert M.shape[2] > 0
            assert_close(M.mT @ M, torch.eye(M.shape[2])[None], 1e-5)
            assert_close(layers[name].matrix() @ M, protected[name], 1e-5)
    with torch.autocast("cpu", torch.bfloat16), learner.task(0):
        for name, M in bases.items():
            assert (layers[name].matrix().double() @ M.double() - protected[name]).norm() < 1e-5


# ---- the model between tasks ----------------------------------------------------------------


@pytest.mark.parametrize("cls", [GPM, TRGP])
def test_between_tasks_the_model_is_a_plain_one(cls: type[GPM]) -> None:
    model = ConvNet(width=8).double()
    classes = [type(module) for module in model.modules()]
    keys = list(model.state_dict())
    parameters = [name for name, _ in model.named_parameters()]
    learner = a_learner(cls, model, exclude=["head"])
    for task in range(3):
        learn(learner, task, [classification(task, 16, 4, 4, rank=1, dtype=F64)], steps=3)
        assert list(model.state_dict()) == keys
        assert [name for name, _ in model.named_parameters()] == parameters
        assert [type(module) for module in model.modules()] == classes
        fresh = ConvNet(width=8).double()
        fresh.load_state_dict(model.state_dict())
        x = torch.randn(3, 16, 4, 4, dtype=F64)
        assert torch.equal(evaluated(fresh, x), evaluated(model, x))
    if cls is TRGP:
        assert any(learner.selected[2].values())


def test_the_whole_model_can_be_pickled_between_tasks() -> None:
    """With its frozen norms, which stay frozen there."""
    model = ConvNet(width=8)
    learner = TRGP(model, threshold=0.9, exclude=["head"])
    learn(learner, 0, [classification(0, 16, 4, 4, rank=1)], steps=3)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    assert_same(other, snapshot(model))
    other.train()
    assert other.training
    assert not other.norm1.training


class Operations(TorchDispatchMode):
    """Counts every operation that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(op)] += 1
        return op(*args, **(kwargs or {}))


def operations(model: nn.Module, x: Tensor) -> Counter[str]:
    with Operations() as counted:
        model(x).sum().backward()
    return counted.seen


def untouched_by_hooks(model: nn.Module) -> bool:
    return not any(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        for module in model.modules()
    )


@pytest.mark.parametrize("norm", ["freeze", "per_task"])
@pytest.mark.parametrize("cls", [GPM, TRGP])
def test_no_work_is_added_to_a_forward_pass(cls: type[GPM], norm: Any) -> None:
    """Operation by operation the forward and backward pass is that of a plain model."""
    x = torch.randn(5, 16, 4, 4, dtype=F64)
    model = ConvNet(width=8).double()
    classes = [type(module) for module in model.modules()]
    learner = a_learner(cls, model, threshold=0.9, exclude=["head"], norm=norm)
    for task in range(3):
        batch = classification(task, 16, 4, 4, rank=1, dtype=F64)
        learner.begin_task(task, [batch], cross_entropy)
        train(learner, [batch], steps=2)
        for _ in range(2):  # while the task is learnt, and after
            plain = ConvNet(width=8).double()
            plain.load_state_dict(model.state_dict())
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                p.requires_grad_(q.requires_grad)
            for a, b in zip(plain.modules(), model.modules(), strict=True):
                a.training = b.training
            model.zero_grad()
            assert operations(model, x) == operations(plain, x)
            assert untouched_by_hooks(model)
            assert [type(module) for module in model.modules()] == classes
            if len(learner.tasks) == task:
                learner.end_task([batch])
    assert all(rank > 0 for rank, _ in learner.ranks.values())


def test_best_weights_can_be_restored_while_learning() -> None:
    """A state_dict taken in the middle has plain keys and brings the whole task back."""
    learner = learnt(2)
    learner.begin_task(2, [a_batch(2)], cross_entropy)
    train(learner, [a_batch(2)], steps=5)
    best, y = snapshot(learner.model), evaluated(learner.model, a_batch(2)[0])
    train(learner, [a_batch(2)], steps=5)
    assert (evaluated(learner.model, a_batch(2)[0]) - y).norm() > 1e-3
    learner.model.load_state_dict(best)
    learner.end_task([a_batch(2)])
    assert_close(evaluated(learner.model, a_batch(2)[0]), y, 1e-10)


# ---- dtype ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [GPM, TRGP])
@pytest.mark.parametrize("when", ["between", "within"])
def test_the_learner_follows_the_models_dtype(cls: type[GPM], when: str) -> None:
    """float32, then float64, then float32 again: nothing breaks and nothing is forgotten."""
    torch.manual_seed(0)
    model = mlp(12, 32, 32, 4)
    options: dict[str, Any] = {"epsilon": 0.0} if cls is TRGP else {}
    learner = cls(model, threshold=0.999, exclude=["4"], norm="per_task", **options)
    dtype = torch.float32
    outputs = []
    for task, then in enumerate([torch.float32, F64, F64, torch.float32, torch.float32]):
        if when == "between":
            model.to(dtype := then)
        learner.begin_task(task, [a_batch(task, dtype=dtype)], cross_entropy)
        train(learner, [a_batch(task, dtype=dtype)], steps=5)
        if when == "within":
            model.to(dtype := then)
        batch = a_batch(task, dtype=dtype)
        train(learner, [batch], steps=5)
        learner.end_task([batch])
        assert {p.dtype for p in model.parameters()} == {dtype}
        outputs.append(evaluated(model[:4], batch[0]).double())
        for old, expected in enumerate(outputs):
            with learner.task(old):
                y = evaluated(model[:4], a_batch(old, dtype=dtype)[0])
            assert (y - expected).norm() < 0.05 * expected.norm()
    assert "after 5 tasks" in learner.summary()


def test_doubling_between_tasks_changes_no_weight() -> None:
    """float64 holds every float32 exactly: casting there and back leaves each task's bits."""
    torch.manual_seed(0)
    learner = TRGP(mlp(12, 10, 4).float(), epsilon=0.0)
    for task in range(3):
        learn(learner, task, [a_batch(task, dtype=torch.float32)])
    with learner.task(1):
        before = snapshot(learner.model)
    learner.model.double()
    with learner.task(1):
        for key, value in learner.model.state_dict().items():
            assert_close(value, before[key].double(), 1e-5)
    learner.model.float()
    with learner.task(1):
        for key, value in learner.model.state_dict().items():
            assert_close(value, before[key], 1e-5)


# ---- what a task keeps, and the summary -----------------------------------------------------


def in_bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * 1024 ** ["B", "KiB", "MiB", "GiB"].index(unit)


def test_the_summary_names_ranks_and_bytes() -> None:
    learner = learnt(3, per_task=["4"], exclude=[])
    text = learner.summary()
    assert text.startswith("TRGP after 3 tasks")
    assert set(learner.ranks) == {"0", "2"}
    for name, (rank, width) in learner.ranks.items():
        assert width == {"0": 13, "2": 11}[name]
        share = f"{rank / width:.1%}"
        assert re.search(rf"^{name} +{rank} / {width} +{re.escape(share)}$", text, re.M)
    whole = sum(p.numel() * 8 for p in learner.model.parameters())
    shown = re.search(r"^model, one copy: (.+)$", text, re.M)
    assert shown is not None
    assert in_bytes(shown[1]) == pytest.approx(whole, rel=0.02)
    head = sum(p.numel() * 8 for p in learner.model[4].parameters())
    tasks = re.findall(r"^task (\d): (.+) \((.+)% of the model\)$", text, re.M)
    assert [task for task, _, _ in tasks] == ["0", "1", "2"]
    assert in_bytes(tasks[0][1]) == head  # nothing is trusted yet
    for _, held, share in tasks:
        assert float(share) == pytest.approx(100 * in_bytes(held) / whole, abs=2)
    assert in_bytes(tasks[2][1]) > head
    memory = re.search(r"^memory shared by all tasks: (.+) \(", text, re.M)
    assert memory is not None
    assert in_bytes(memory[1]) == pytest.approx(learner.memory_bytes, rel=0.02)
    held = inside.memories(learner).values()
    tensors = [t for m in held for t in (m.M, m.C, *m.masks.values())]
    assert learner.memory_bytes == sum(t.nbytes for t in tensors)


def test_the_summary_of_a_learner_without_tasks() -> None:
    text = a_learner(GPM).summary()
    assert text.startswith("GPM after 0 tasks")
    assert re.search(r"^0 +0 / 13 +0\.0%$", text, re.M)


@pytest.mark.parametrize(("outputs", "rank"), [(32, 2), (2, 6)])
def test_a_task_keeps_the_smaller_of_its_effect_and_its_parts(outputs: int, rank: int) -> None:
    """K - C at the columns that trusted tasks hold, or per set of tasks in the range of their C."""
    torch.manual_seed(0)
    learner = TRGP(mlp(16, outputs, bias=False), threshold=1.0, epsilon=0.0)
    x = torch.randn(9, 16)
    outs = {}
    for task in range(3):
        draw = torch.Generator().manual_seed(task)
        inputs = torch.randn(rank, 16, generator=draw)
        batch = (inputs, torch.randn(rank, outputs, generator=draw))
        learner.begin_task(task, [batch], mse)
        train(learner, [batch], mse, steps=5)
        outs[task] = evaluated(learner.model, x), evaluated(learner.model, inputs), inputs
        learner.end_task([batch])
    assert sorted(learner.selected[2]["0"]) == [0, 1]
    masks = inside.memories(learner)["0"].widened([0, 1])[:, 0]
    sets = [(masks[0] & ~masks[1]), (masks[1] & ~masks[0]), masks[0] & masks[1]]
    ranges = [int(masks[0].sum()), int(masks[1].sum()), int((masks[0] | masks[1]).sum())]
    parts = sum(r * int(s.sum()) for r, s in zip(ranges, sets, strict=True))
    effect = outputs * int((masks[0] | masks[1]).sum())
    assert learner.task_bytes[2] == 4 * (parts if outputs == 32 else effect)
    assert parts < effect or outputs == 2
    assert_close(evaluated(learner.model, x), outs[2][0], 1e-5)
    for task, (_, y, inputs) in outs.items():
        with learner.task(task):
            assert_close(evaluated(learner.model, inputs), y, 1e-4)


def test_selected_is_a_copy() -> None:
    learner = learnt(2)
    learner.selected[1]["0"].clear()
    learner.selected.clear()
    assert learner.selected[1] == {"0": [0], "2": [0]}


# ---- leaving no trace -----------------------------------------------------------------------


class Noisy(nn.Module):
    """Dropout, BatchNorm, and random numbers of every kind drawn in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(12, 10)
        self.norm = nn.BatchNorm1d(10)
        self.drop = nn.Dropout()
        self.head = nn.Linear(10, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        noise = random.random() + float(np.random.rand()) + torch.rand(1, dtype=x.dtype)
        return self.head(self.drop(self.norm(self.fc(x)))) + 0 * noise


def random_state() -> list[Any]:
    kind, keys, *rest = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), kind, keys.tolist(), *rest]


@pytest.mark.parametrize("cls", [GPM, TRGP])
def test_reading_the_loader_leaves_no_trace(cls: type[GPM]) -> None:
    model = Noisy().double()
    options: dict[str, Any] = {"epsilon": 0.0} if cls is TRGP else {}
    learner = cls(model, threshold=0.95, norm="shared", exclude=["head"], **options)
    x, y = a_batch(0, samples=16)
    own = torch.Generator().manual_seed(3)
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True, generator=own)
    for task in range(3):
        model.train()
        model.drop.eval()  # a mode that `model.train()` alone would not bring back
        for p in model.parameters():
            p.grad = torch.full_like(p, 7.0)
        modes = [module.training for module in model.modules()]
        buffers = {key: b.clone() for key, b in model.named_buffers()}

        def assert_no_trace(
            modes: list[bool] = modes, buffers: dict[str, Tensor] = buffers
        ) -> None:
            assert [module.training for module in model.modules()] == modes
            for key, b in buffers.items():
                assert torch.equal(model.get_buffer(key), b)

        before, order = random_state(), own.get_state()
        learner.begin_task(task, loader, cross_entropy)
        assert random_state() == before
        assert torch.equal(own.get_state(), order)
        assert_no_trace()
        for p in model.parameters():
            assert p.grad is None or bool((p.grad == 7).all())
        learner.end_task(loader)
        assert random_state() == before
        assert torch.equal(own.get_state(), order)
        assert_no_trace()
        assert torch.is_grad_enabled()


# ---- wrapped models -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(
            nn.DataParallel,
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="moves the model to a GPU"),
            id="parallel",
        ),
        pytest.param(partial(torch.compile, backend="eager"), id="compiled"),
    ],
)
def test_a_wrapped_model_is_known_by_the_names_inside(
    wrap: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    def run(wrapped: bool) -> tuple[nn.Module, TRGP]:
        torch.manual_seed(0)
        model = Heads().double()
        learner = TRGP(wrap(model) if wrapped else model, threshold=0.9, exclude=["heads.*"])
        for task in range(3):
            learn(learner, task, [a_batch(task)])
        return model, learner

    model, learner = run(wrapped=True)
    plain, steady = run(wrapped=False)
    assert learner.ranks == steady.ranks
    assert learner.selected == steady.selected
    for key, value in model.state_dict().items():
        assert_close(value, plain.state_dict()[key])
    learner.save(tmp_path / "a", include_model=True)
    TRGP.load(tmp_path / "a", Heads().double())
