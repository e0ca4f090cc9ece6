"""Ordinary use at its edges: skipped steps, writes without a trace, states of before."""

import copy

import pytest
import torch
from helpers import assert_close, classification, cross_entropy, learn, mlp
from torch import Tensor, nn

from trgp import GPM, TRGP

F64 = torch.float64


def a_batch(task: int) -> tuple[Tensor, Tensor]:
    return classification(task, 12, rank=2, dtype=F64)


def begun(model: nn.Module | None = None) -> TRGP:
    """A learner with an open second task that trusts the first."""
    torch.manual_seed(0)
    learner = TRGP(mlp(12, 16, 8, 4).double() if model is None else model, epsilon=0.0)
    learn(learner, 0, [a_batch(0)])
    learner.begin_task(1, [a_batch(1)], cross_entropy)
    return learner


def values(learner: GPM) -> list[Tensor]:
    return [p.detach().clone() for p in learner.model.parameters()]


def test_weights_written_through_data_are_adopted_when_the_task_ends() -> None:
    learner = begun()
    optimizer = torch.optim.AdamW(learner.parameters(), lr=1e-2)
    average = values(learner)
    for _ in range(10):
        optimizer.zero_grad()
        cross_entropy(learner.model, a_batch(1)).backward()
        optimizer.step()
        for a, p in zip(average, learner.model.parameters(), strict=True):
            a.lerp_(p.detach(), 0.3)
    for a, p in zip(average, learner.model.parameters(), strict=True):
        p.data.copy_(a)
    learner.end_task([a_batch(1)])
    assert_close(torch.cat([v.flatten() for v in values(learner)]), _flat(average), 1e-12)
    after = values(learner)
    with learner.task(0):
        pass
    with learner.task(1):
        assert_close(_flat(values(learner)), _flat(after), 1e-12)


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])


def test_a_reloaded_optimizer_decays_by_its_new_rate() -> None:
    moved = []
    for reload in (False, True):
        learner = begun()
        optimizer = torch.optim.AdamW(learner.parameters(), lr=1e-2, weight_decay=0.5)
        for step in range(12):
            if step == 6:
                if reload:
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                optimizer.param_groups[0]["lr"] = 1e-5
            optimizer.zero_grad()
            cross_entropy(learner.model, a_batch(1)).backward()
            optimizer.step()
        moved.append(_flat(values(learner)))
    assert torch.equal(*moved)


def test_a_layer_without_a_gradient_rests_under_weight_decay() -> None:
    learner = begun()
    optimizer = torch.optim.AdamW(learner.parameters(), lr=1e-2, weight_decay=0.1)
    before = values(learner)[0]
    for _ in range(20):
        optimizer.zero_grad()
        cross_entropy(learner.model, a_batch(1)).backward()
        learner.model[0].weight.grad = learner.model[0].bias.grad = None
        optimizer.step()
    assert_close(values(learner)[0], before, 1e-12)


def test_a_fused_step_that_a_scaler_skips_moves_nothing() -> None:
    learner = begun(mlp(12, 16, 8, 4).double())
    optimizer = torch.optim.AdamW(learner.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    before = _flat(values(learner))
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(cross_entropy(learner.model, a_batch(1))).backward()
        learner.model[0].weight.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
    assert_close(_flat(values(learner)), before, 1e-12)


def test_a_state_of_before_the_first_task_thaws_what_was_frozen() -> None:
    model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()
    learner = GPM(model)
    start, weights = learner.state_dict(), copy.deepcopy(model.state_dict())
    learn(learner, 0, [a_batch(0)])
    learner.load_state_dict(start)
    model.load_state_dict(weights)
    model.train()
    assert learner.tasks == []
    assert model[1].training
    assert model[1].weight.requires_grad


def test_an_aborted_task_gives_buffers_back() -> None:
    class Counting(nn.Module):
        """The mean of all inputs seen in training is a part of the computation."""

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(12, 4)
            self.register_buffer("mean", torch.zeros(12))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.mean.lerp_(x.detach().mean(0), 0.1)
            return self.body(x - self.mean)

    model = Counting().double()
    learner = GPM(model)
    learn(learner, 0, [a_batch(0)])
    before = model.mean.clone()
    learner.begin_task(1, [a_batch(1)], cross_entropy)
    model.train()
    cross_entropy(model, a_batch(1))
    assert not torch.equal(model.mean, before)
    learner.abort_task()
    assert torch.equal(model.mean, before)


@pytest.mark.parametrize("alone", [False, True], ids=["with the rest", "by itself"])
def test_a_frozen_norm_that_trains_again_is_refused(alone: bool) -> None:
    model = nn.Sequential(nn.Linear(12, 8), nn.LayerNorm(8), nn.Linear(8, 4)).double()
    learner = GPM(model)
    learn(learner, 0, [a_batch(0)])
    learner.begin_task(1, [a_batch(1)], cross_entropy)
    model[1].requires_grad_(True)
    optimizer = torch.optim.SGD((model[1] if alone else model).parameters(), lr=0.1)
    cross_entropy(model, a_batch(1)).backward()
    with pytest.raises(RuntimeError, match="requires_grad"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="requires_grad_"):
        learner.end_task([a_batch(1)])
