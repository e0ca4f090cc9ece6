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
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parametrize
from torch.optim import Optimizer, lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from trgp import GPM, TRGP

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


def scalings(learner: GPM) -> list[nn.Parameter]:
    """The Q - I of the task being learnt."""
    return list(learner.param_groups(lr=1.0)[1]["params"])


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


def literal_weight(learner: GPM, name: str) -> Tensor:
    """W + sum_j W B_j (Q_j - I) B_j' of an open task, from W, the bases and the Q themselves."""
    layer, memory = layers(learner)[name], memories(learner)[name]
    W = layer.matrix()
    total = W.clone()
    own = dict(learner.model.get_submodule(name).named_parameters())
    Q = [p for key, p in own.items() if re.fullmatch(r"parametrizations\.weight\..*S\.\d+", key)]
    trusted = list(learner.selected.values())[-1][name]
    for j, S in zip(trusted, Q, strict=True):
        B = memory.basis(j)
        total += W @ B @ S.detach() @ B.mT
    return total


def test_while_learning_the_model_computes_with_the_effective_weights() -> None:
    learner = learnt(2)
    shared = {name: memory.C for name, memory in memories(learner).items()}
    learner.begin_task(2, [a_batch(2)], cross_entropy)
    for name in learner.ranks:
        assert_close(literal_weight(learner, name), layers(learner)[name].matrix())
    train(learner, [a_batch(2)])
    for name in learner.ranks:
        layer = learner.model.get_submodule(name)
        W_eff = torch.cat([layer.weight, layer.bias[:, None]], dim=1)
        assert_close(W_eff, literal_weight(learner, name)[0], 1e-12)
        shift = W_eff - layers(learner)[name].matrix()[0]
        assert shift.norm() > 1e-3
        assert_close(layers(learner)[name].matrix() @ memories(learner)[name].M, shared[name])


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


def test_parameters_are_what_is_to_be_trained_now() -> None:
    learner = learnt(2)
    plain = {id(p) for p in learner.model.parameters()}
    assert {id(p) for p in learner.parameters()} == plain
    learner.begin_task(2, [a_batch(2)], cross_entropy)
    everything = [id(p) for p in learner.parameters()]
    assert len(everything) == len(set(everything))
    Q = scalings(learner)
    assert len(Q) == 4  # two layers, two trusted tasks each
    assert set(everything) == plain | {id(S) for S in Q}
    assert all(p.requires_grad for p in learner.parameters())
    assert all(not S.any() for S in Q)
    assert all(S.shape[-1] == S.shape[-2] for S in Q)
    ranks = {memory.basis(j).shape[2] for memory in memories(learner).values() for j in (0, 1)}
    assert {S.shape[-1] for S in Q} == ranks


def test_param_groups_split_the_same_parameters() -> None:
    learner = learnt(2)
    learner.begin_task(2, [a_batch(2)], cross_entropy)
    weights, Q = learner.param_groups(lr=0.1, scale_lr=0.02)
    assert (weights["lr"], Q["lr"]) == (0.1, 0.02)
    both = [id(p) for group in (weights, Q) for p in group["params"]]
    assert sorted(both) == sorted(id(p) for p in learner.parameters())
    assert [group["lr"] for group in learner.param_groups(lr=0.1)] == [0.1, 0.1]


@pytest.mark.parametrize("scale_lr", [0.0, 1e-3, 0.1])
def test_the_scalings_have_their_own_learning_rate(scale_lr: float) -> None:
    """One step of SGD moves each by its gradient times its own rate."""
    learner = learnt(2)
    learner.begin_task(2, [a_batch(2)], cross_entropy)
    optimizer = torch.optim.SGD(learner.param_groups(lr=0.1, scale_lr=scale_lr), lr=7.0)
    learner.attach(optimizer)
    cross_entropy(learner.model, a_batch(2)).backward()
    optimizer.step()
    for S in scalings(learner):
        assert S.grad.norm() > 1e-6
        assert_close(S, -scale_lr * S.grad, 1e-15)


KEPT: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
}


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("name", KEPT)
def test_an_optimizer_kept_across_tasks_is_a_new_one_with_its_memories(
    name: str, groups: bool
) -> None:
    """Against an optimizer made for each task that is handed what the last one remembers."""

    def make(learner: GPM) -> Optimizer:
        params = learner.param_groups(lr=1e-2, scale_lr=5e-3) if groups else learner.parameters()
        return learner.attach(KEPT[name](params))

    ends = []
    for keep in (True, False):
        learner = a_learner()
        optimizer: Optimizer | None = None
        for task in range(3):
            learner.begin_task(task, [a_batch(task)], cross_entropy)
            if optimizer is None:
                optimizer = make(learner)
                held = sum(len(g["params"]) for g in optimizer.param_groups)
            elif not keep:
                old = optimizer.state
                optimizer = make(learner)
                for p in learner.parameters():
                    if p in old:
                        optimizer.state[p] = old[p]
            for _ in range(8):
                optimizer.zero_grad()
                cross_entropy(learner.model, a_batch(task)).backward()
                optimizer.step()
            if task:
                assert all(S.abs().max() > 1e-4 for S in scalings(learner))
                Q = scalings(learner)
            learner.end_task([a_batch(task)])
        if keep:
            assert sum(len(g["params"]) for g in optimizer.param_groups) == held
            assert len(optimizer.param_groups) == (2 if groups else 1)
            assert not any(S in optimizer.state for S in Q)
        ends.append(snapshot(learner.model))
    for key, value in ends[0].items():
        assert_close(value, ends[1][key], 1e-12)


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
    plain = [{"params": [nn.Parameter(torch.ones(2))], "lr": lr} for lr in (0.1, 0.01)]
    free = torch.optim.SGD(plain, lr=0.1, momentum=0.9)
    free_scheduler = make(free)
    optimizer: Optimizer | None = None
    rates = set()
    for task in range(3):
        learner.begin_task(task, [a_batch(task)], cross_entropy)
        if optimizer is None:
            groups = learner.param_groups(lr=0.1, scale_lr=0.01)
            optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
            scheduler = make(optimizer)
            learner.attach(optimizer)
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
        if task:
            assert all(S.abs().max() > 0 for S in scalings(learner))
        learner.end_task([a_batch(task)])
    assert len(rates) > 2


def test_an_optimizer_may_be_attached_before_the_task_begins() -> None:
    learner = learnt(1)
    optimizer = learner.attach(torch.optim.SGD(learner.parameters(), lr=0.1))
    learner.begin_task(1, [a_batch(1)], cross_entropy)
    cross_entropy(learner.model, a_batch(1)).backward()
    optimizer.step()
    assert all(S.any() for S in scalings(learner))


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
    layers = layers(learner)
    with torch.autocast("cpu", torch.bfloat16):
        learn(learner, 0, [a_batch(0, dtype=torch.float32)])
    bases = {name: memory.M.clone() for name, memory in memories(learner).items()}
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
        parametrize.is_parametrized(module)
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        for module in model.modules()
    )


@pytest.mark.parametrize("norm", ["freeze", "per_task"])
def test_gpm_adds_no_work_to_a_forward_pass(norm: Any) -> None:
    """Operation by operation the forward and backward pass is that of a plain model."""
    x = torch.randn(5, 16, 4, 4, dtype=F64)
    model = ConvNet(width=8).double()
    classes = [type(module) for module in model.modules()]
    learner = GPM(model, threshold=0.9, exclude=["head"], norm=norm)
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
            if learner._open is not None:
                learner.end_task([batch])
    assert all(rank > 0 for rank, _ in learner.ranks.values())


def test_trgp_adds_no_work_between_tasks() -> None:
    learner = learnt(3)
    plain = mlp(12, 10, 10, 4).double()
    x = torch.randn(5, 12, dtype=F64)
    learner.model.zero_grad()
    assert operations(learner.model, x) == operations(plain, x)
    assert untouched_by_hooks(learner.model)


def test_best_weights_can_be_restored_while_learning() -> None:
    """A state_dict taken in the middle brings weights and scalings back together."""
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
    tensors = [t for m in memories(learner).values() for t in (m.M, m.C, *m.masks.values())]
    assert in_bytes(memory[1]) == pytest.approx(sum(t.nbytes for t in tensors), rel=0.02)


def test_the_summary_of_a_learner_without_tasks() -> None:
    text = a_learner(GPM).summary()
    assert text.startswith("GPM after 0 tasks")
    assert re.search(r"^0 +0 / 13 +0\.0%$", text, re.M)


@pytest.mark.parametrize(("outputs", "rank"), [(32, 2), (2, 6), (10, 4)])
def test_a_task_keeps_the_smaller_of_its_scalings_and_their_effect(outputs: int, rank: int) -> None:
    """With two trusted tasks, of ranks r and 2r: r² + 4r² numbers, or out times 2r."""
    torch.manual_seed(0)
    learner = TRGP(mlp(16, outputs, bias=False).double(), threshold=1.0, epsilon=0.0)
    x = torch.randn(9, 16, dtype=F64)
    outs = {}
    for task in range(3):
        draw = torch.Generator().manual_seed(task)
        inputs = torch.randn(rank, 16, generator=draw, dtype=F64)
        batch = (inputs, torch.randn(rank, outputs, generator=draw, dtype=F64))
        learner.begin_task(task, [batch], mse)
        train(learner, [batch], mse, steps=5)
        outs[task] = evaluated(learner.model, x), evaluated(learner.model, inputs), inputs
        if task == 2:
            assert sorted(learner.selected[2]["0"]) == [0, 1]
            assert sum(S.numel() for S in scalings(learner)) == 5 * rank**2
            assert all(S.norm() > 1e-6 for S in scalings(learner))
        learner.end_task([batch])
    assert learner.ranks["0"] == (min(3 * rank, 16), 16)
    held = re.search(r"^task 2: (.+) \(", learner.summary(), re.M)
    assert held is not None
    smaller = min(5 * rank**2, outputs * 2 * rank)
    assert in_bytes(held[1]) == pytest.approx(8 * smaller, rel=0.02)
    assert_close(evaluated(learner.model, x), outs[2][0], 1e-10)
    for task, (_, y, inputs) in outs.items():
        with learner.task(task):
            assert_close(evaluated(learner.model, inputs), y, 1e-10)


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
            plain = [module for module in model.modules() if module_is_plain(module)]
            assert [module.training for module in plain] == modes
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


def module_is_plain(module: nn.Module) -> bool:
    return not type(module).__module__.startswith("trgp") and not isinstance(
        module, parametrize.ParametrizationList | nn.ModuleDict | nn.ParameterList
    )


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
