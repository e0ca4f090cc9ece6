"""LwF: old heads' answers as targets, from a network that is asked once and learns nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close
from method_parts import (
    ConvHeads,
    WatchedLwF,
    bound,
    context,
    eager,
    gradients,
    logits_of,
    mlp_heads,
    moved_at_random,
    one_head,
    some_samples,
)
from small_runs import CLASSES, Heads, Make, WatchedFinetune, run, some_tasks, watched
from torch import Tensor

from trgp.engine.errors import InputError
from trgp.engine.train import train_step
from trgp.methods import Batch
from trgp.methods.lwf import LwF

NETWORKS: dict[str, tuple[Make, bool, tuple[int, ...]]] = {
    "one head": (one_head, False, (8,)),
    "heads": (mlp_heads, True, (8,)),
    "heads without features": (Heads, True, (8,)),
    "conv": (lambda: ConvHeads(track=False), True, (3, 8, 8)),
}


@pytest.mark.parametrize("make", [one_head, ConvHeads])
def test_without_strength_it_is_fine_tuning_to_the_bit(make: Make, tmp_path: Path) -> None:
    tasks = some_tasks(3, 8) if make is one_head else some_tasks(3, 3, 8, 8, samples=20)
    plain, free = watched(WatchedFinetune, tasks, tmp_path, make)
    ours, taught = watched(WatchedLwF, tasks, tmp_path, make, strength=0.0)
    assert ours.digest == plain.digest
    assert ours.curves == plain.curves
    assert ours.accuracy_matrix == plain.accuracy_matrix
    for a, b in zip(free, taught, strict=True):
        assert all(torch.equal(tensor, b.params[key]) for key, tensor in a.params.items())
    strong = run(tasks, "lwf", tmp_path, make, strength=3.0)
    assert strong.curves[0] == plain.curves[0]
    assert strong.curves[1] != plain.curves[1]


def third_task(
    network: tuple[Make, bool, tuple[int, ...]], **options: Any
) -> tuple[LwF, dict[str, Tensor], Any, Batch]:
    """The method in its third task, whose weights have left the teacher's."""
    make, heads, shape = network
    method, begun = bound(LwF(**options), make, heads)
    samples = some_samples(8, *shape)
    params, state = method.begin_task(context(method, begun, samples, 2))
    assert params is begun
    params = moved_at_random(params, 4)
    batch = Batch(*samples, 2, 2 if heads else 0)
    method.train_mode(2)
    return method, params, state, batch


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_loss_is_that_of_the_labels_and_of_every_old_heads_answers(
    name: str, temperature: float
) -> None:
    """Sample by sample and class by class, of plain modules."""
    method, params, state, batch = third_task(NETWORKS[name], strength=1.5, temperature=temperature)
    heads = NETWORKS[name][1]
    student, teacher = eager(method, params), eager(method, state["teacher"]).eval()
    old = [batch._replace(head=h) for h in range(2)] if heads else [batch]
    total = torch.zeros((), dtype=torch.float64)
    own = logits_of(student, batch, heads).log_softmax(1)
    for i in range(8):
        total = total - own[i, batch.y[i]] / 8
    for each in old:
        asked = (logits_of(teacher, each, heads) / temperature).exp().detach()
        given = (logits_of(student, each, heads) / temperature).exp()
        for i in range(8):
            for k in range(CLASSES):
                target = asked[i, k] / asked[i].sum()
                total = total - 1.5 * target * (given[i, k] / given[i].sum()).log() / 8
    expected = gradients(total, student)
    after, _, loss = train_step(method, params, state, batch, 0.1, sorted(expected), [])
    assert_close(loss, total.detach())
    for key, g in expected.items():
        assert_close(after[key], params[key] - 0.1 * g)
    plain = gradients(-own[torch.arange(8), batch.y].mean(), eager(method, params))
    assert any(not torch.allclose(g, plain[key], atol=1e-4) for key, g in expected.items())


def test_right_after_the_teacher_its_answers_pull_nowhere() -> None:
    """There the old heads agree with it, and what is left is the gradient of the labels."""
    method, _, state, batch = third_task(NETWORKS["heads"])
    params = state["teacher"]
    module = eager(method, params)
    expected = gradients(F.cross_entropy(module(batch.x, 2), batch.y), module)
    after, _, _ = train_step(method, params, state, batch, 0.1, sorted(expected), [])
    for key, g in expected.items():
        assert_close(after[key], params[key] - 0.1 * g)


class Counting(ConvHeads):
    """Counts how often it is asked, and in which mode."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.asked: list[bool] = []

    def features(self, x: Tensor) -> Tensor:
        self.asked.append(self.training)
        return super().features(x)


COUNTING = (Counting, True, (3, 8, 8))


def test_a_step_asks_the_teacher_once_and_trains_through_the_student_once() -> None:
    method, params, state, batch = third_task(COUNTING)
    module = method.network.module
    module.asked.clear()
    train_step(method, params, state, batch, 0.1, sorted(method.network.trainable), [])
    assert sorted(module.asked) == [False, True]
    module.asked.clear()
    train_step(method, params, {}, batch, 0.1, sorted(method.network.trainable), [])
    assert module.asked == [True]  # without a teacher nobody is asked


@pytest.mark.parametrize("mode", ["trained", "one part evaluated", "evaluated"])
def test_targets_need_no_gradients_and_modes_come_back(mode: str) -> None:
    method, _, state, batch = third_task(COUNTING)
    module = method.network.module
    module.train(mode != "evaluated")
    if mode == "one part evaluated":
        module.bn2.eval()
    before = [part.training for part in module.modules()]
    teacher = {
        key: p.clone().requires_grad_() if key in method.network.trainable else p.clone()
        for key, p in state["teacher"].items()
    }
    averages = {key: teacher[key].clone() for key in method.network.buffers}
    targets = method.targets(teacher, batch, 2)
    assert [part.training for part in module.modules()] == before
    assert not targets.requires_grad
    assert targets.shape == (2, 8, CLASSES)
    assert_close(targets.sum(2), torch.ones(2, 8, dtype=torch.float64))
    assert torch.equal(targets, method.targets(teacher, batch, 2)), "dropout was on"
    assert all(torch.equal(teacher[key], tensor) for key, tensor in averages.items())


def test_modes_come_back_where_the_teacher_fails() -> None:
    method, _, state, batch = third_task(COUNTING)
    with pytest.raises(RuntimeError):
        method.targets(state["teacher"], batch._replace(x=batch.x[:, :2]), 2)
    assert all(part.training for part in method.network.module.modules())


def test_the_teacher_is_the_network_as_the_last_task_left_it() -> None:
    """Also its running averages, which the student's go on from; and it stays so in a task."""
    method, params = bound(LwF(), ConvHeads, True)
    x, y = some_samples(8, 3, 8, 8)
    begun, state = method.begin_task(context(method, params, (x, y), 1))
    assert state["teacher"].keys() == params.keys()
    method.train_mode(1)
    apart: Any = {key: p.clone() for key, p in begun.items()}
    for _ in range(3):
        batch = Batch(x, y, 1, 1)
        trained = sorted(method.network.trainable)
        apart, state, _ = train_step(method, apart, state, batch, 0.1, trained, [])
    for key, tensor in state["teacher"].items():
        assert torch.equal(tensor, params[key])
    assert not torch.equal(apart["bn1.running_mean"], params["bn1.running_mean"])
    _, nobody = method.begin_task(context(method, params, (x, y), 0))
    assert nobody == {}
    idle, _ = bound(LwF(strength=0.0), ConvHeads, True)
    assert idle.begin_task(context(idle, params, (x, y), 1))[1] == {}


def test_old_heads_answer_more_as_they_did_the_stronger_it_is(tmp_path: Path) -> None:
    """On the new task's samples, which is what it asks for."""
    tasks = some_tasks(2, rank=None)
    distances = []
    for strength in (0.0, 1.0, 10.0):
        options: dict[str, Any] = {"strength": strength, "epochs": 4, "lr": 0.05}
        _, ends = watched(WatchedLwF, tasks, tmp_path, mlp_heads, **options)
        x = tasks[1][0][0]
        then, now = (end.logits(x, 0).softmax(1) for end in ends)
        distances.append(float((now - then).norm()))
    assert distances[0] > distances[1] > distances[2] > 0


def test_the_stored_network_is_counted_in_the_memory(tmp_path: Path) -> None:
    result = run(some_tasks(2), "lwf", tmp_path)
    assert result.state_bytes >= result.network_bytes


@pytest.mark.parametrize("options", [{"strength": -1.0}, {"temperature": 0.0}], ids=str)
def test_wrong_options_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"^{next(iter(options))} must be"):
        run(some_tasks(1), "lwf", tmp_path, **options)
