"""Whatever an optimizer does, old tasks are left alone: its update stays within the reach."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from helpers import assert_close, classification, cross_entropy, learn
from support import inside
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from trgp import GPM, TRGP


class Net(nn.Module):
    """A grouped convolution, a linear layer with and one without a bias, for inputs of (8, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 16, 3, padding=1, groups=2)
        self.wide = nn.Linear(16, 16)
        self.plain = nn.Linear(16, 12, bias=False)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).tanh().mean(2)
        return self.head(self.plain(self.wide(x).tanh()).tanh())


class Lion(Optimizer):
    """The sign of interpolated momentum: an optimizer that torch does not know."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * (0.9 * m + 0.1 * p.grad).sign())
                m.lerp_(p.grad, 0.01)


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, weight_decay=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2, weight_decay=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "lion": lambda p: Lion(p, lr=1e-3, weight_decay=0.1),
}


def a_batch(task: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return classification(task, 8, 5, samples=12, rank=1, dtype=dtype)


def learnt(cls: type[GPM], **options: Any) -> GPM:
    """A learner with two tasks behind it, and room left in every memory."""
    learner = cls(Net().double(), threshold=0.95, exclude=["head"], **options)
    for task in range(2):
        learn(learner, task, [a_batch(task)])
    assert all(0 < rank < width for rank, width in learner.ranks.values())
    return learner


def without_guard(model: nn.Module, optimizer: Optimizer) -> dict[int, Tensor]:
    """Where this optimizer would take every parameter (by its id) if nothing held it back."""
    free_model, free = copy.deepcopy((model, optimizer))
    for p, twin in zip(model.parameters(), free_model.parameters(), strict=True):
        twin.grad = None if p.grad is None else p.grad.clone()
    free.step()
    return dict(zip((id(p) for p in model.parameters()), free_model.parameters(), strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("cls", [GPM, TRGP])
def test_no_update_enters_the_protected_space(cls: type[GPM], name: str) -> None:
    learner = learnt(cls, **({"epsilon": 0.0} if cls is TRGP else {}))
    learner.begin_task(2, [a_batch(2)], cross_entropy)
    assert any(learner.selected[2].values()) == (cls is TRGP)
    optimizer = learner.attach(OPTIMIZERS[name](learner.parameters()))
    leaks = dict.fromkeys(learner.ranks, 0.0)
    for step in range(6):
        optimizer.zero_grad()
        cross_entropy(learner.model, a_batch(2 + step % 3)).backward()
        norm = clip_grad_norm_(learner.parameters(), 0.01)
        assert norm > 0.01  # so that clipping really rescales
        if step == 3:
            continue  # what a GradScaler does when it meets an infinity
        before = inside.matrices(learner)
        free = without_guard(learner.model, optimizer)
        optimizer.step()
        after = inside.matrices(learner)
        for key, layer in inside.layers(learner).items():
            unguarded = layer.pack([free[id(p)] for p in layer.params]) - before[key]
            update = after[key] - before[key]
            assert inside.forbidden(learner, key, update).norm() <= 1e-9 * unguarded.norm()
            assert update.norm() > 1e-3 * unguarded.norm()  # a frozen layer would pass the above
            leak = inside.forbidden(learner, key, unguarded).norm() / unguarded.norm()
            leaks[key] = max(leaks[key], float(leak))
    K = inside.present_coordinates(learner)
    for key, W in inside.matrices(learner).items():
        assert_close(W @ inside.bases(learner)[key].M, K[key], 1e-12)
    assert min(leaks.values()) > 1e-3  # and without the guard it would have leaked


@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov", "decay"])
def test_sgd_moves_by_its_own_update_less_the_protected_part(name: str) -> None:
    learner = learnt(GPM)
    learner.begin_task(2, [a_batch(2)], cross_entropy)
    optimizer = learner.attach(OPTIMIZERS[name](learner.parameters()))
    for step in range(4):
        optimizer.zero_grad()
        cross_entropy(learner.model, a_batch(2 + step)).backward()
        before = inside.matrices(learner)
        free = without_guard(learner.model, optimizer)
        optimizer.step()
        for key, layer in inside.layers(learner).items():
            M = inside.bases(learner)[key].M
            U = layer.pack([free[id(p)] for p in layer.params]) - before[key]
            assert_close(inside.matrices(learner)[key] - before[key], U - U @ M @ M.mT, 1e-14)


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_a_step_that_a_grad_scaler_skips(name: str) -> None:
    learner = learnt(TRGP, epsilon=0.0)
    learner.begin_task(2, [a_batch(2)], cross_entropy)
    optimizer = learner.attach(OPTIMIZERS[name](learner.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    start = inside.matrices(learner)
    for step in range(4):
        before = copy.deepcopy(learner.model.state_dict())
        optimizer.zero_grad()
        loss = cross_entropy(learner.model, a_batch(2))
        scaler.scale(loss * float("inf") if step == 2 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        unmoved = [torch.equal(before[k], v) for k, v in learner.model.state_dict().items()]
        assert all(unmoved) == (step == 2)
    assert scaler.get_scale() < 64.0
    for key, W in inside.matrices(learner).items():
        update = W - start[key]
        assert inside.forbidden(learner, key, update).norm() <= 1e-9 * update.norm()
    learner.end_task([a_batch(2)])


def test_a_closure_is_called_once_and_guarded() -> None:
    learner = learnt(GPM)
    learner.begin_task(2, [a_batch(2)], cross_entropy)
    optimizer = learner.attach(torch.optim.Adam(learner.parameters(), lr=1e-2))
    start = inside.matrices(learner)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(learner.model, a_batch(2))
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(20)]
    assert losses[-1] < losses[0]
    for key, W in inside.matrices(learner).items():
        update = W - start[key]
        assert (update @ inside.bases(learner)[key].M).norm() <= 1e-9 * update.norm()


@pytest.mark.parametrize("rank", [3, 6])  # a memory less and more than half full
@pytest.mark.parametrize("name", ["decay", "adamw"])
def test_no_drift_in_float32(name: str, rank: int) -> None:
    """What rounding leaves inside span(M) after 10,000 steps is what it leaves after 1,000."""
    model = nn.Linear(8, 4, bias=False)
    learner = GPM(model, threshold=1.0)
    old = (torch.randn(rank, 8)[torch.arange(20) % rank], torch.arange(20) % 4)
    learn(learner, 0, [old])
    assert learner.ranks == {"": (rank, 8)}
    with torch.no_grad():
        logits = model(old[0])
    new = [(torch.randn(4, 8), torch.arange(4))]
    learner.begin_task(1, new, cross_entropy)
    optimizer = learner.attach(OPTIMIZERS[name](model.parameters()))
    start = model.weight.detach().clone()
    M, C = inside.bases(learner)[""].M[0], inside.coordinates(learner)[""][0]
    gradients = torch.randn(64, *model.weight.shape)  # of any loss whatever
    drift = []
    for step in range(10_000):
        model.weight.grad = gradients[step % 64].clone()
        optimizer.step()
        if step % 7 == 0:  # at any phase of whatever the guard may do in turns
            W = model.weight.detach()
            drift.append((W @ M - C).norm() / W.norm())
    moved = (model.weight.detach() - start).norm()
    assert moved > 0.01
    first, *_, last = torch.stack(drift).split(143)
    assert last.max() <= 2 * first.max()
    assert last.max() <= 10 * torch.finfo(torch.float32).eps
    with torch.no_grad():
        assert_close(model(old[0]), logits, 1e-5)
    learner.end_task(new)


def packed(tensors: list[Tensor]) -> Tensor:
    """The convolution's weight and bias as (g, o, n)."""
    return torch.cat([t.reshape(2, 8, -1) for t in tensors], dim=2)


def test_projecting_gradients_alone_leaks_under_adam() -> None:
    """The reason for the guard: Adam's rescaling turns a projected gradient back into span(M)."""
    learner = learnt(GPM)
    learner.begin_task(2, [a_batch(2)], cross_entropy)
    M = inside.bases(learner)["conv"].M
    start = inside.matrices(learner)["conv"]
    shares = {}
    for model in (learner.model, copy.deepcopy(learner.model)):
        guarded = model is learner.model
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        params = [model.conv.weight, model.conv.bias]
        for step in range(20):
            optimizer.zero_grad()
            cross_entropy(model, a_batch(2 + step % 3)).backward()
            if not guarded:
                G = packed([p.grad for p in params])
                for p, g in zip(params, (G - G @ M @ M.mT).split([12, 1], 2), strict=True):
                    p.grad.copy_(g.reshape(p.shape))
                assert (packed([p.grad for p in params]) @ M).norm() < 1e-14
            optimizer.step()
        update = packed([p.detach() for p in params]) - start
        shares[guarded] = float((update @ M).norm() / update.norm())
    assert shares[False] > 0.05
    assert shares[True] < 1e-9


def test_adam_remembers_only_gradients_of_free_directions() -> None:
    """What it rescales by must not be dominated by directions it cannot move in."""
    learner = learnt(GPM)
    learner.begin_task(2, [a_batch(2)], cross_entropy)
    optimizer = learner.attach(torch.optim.Adam(learner.parameters(), lr=1e-2))
    for step in range(3):
        optimizer.zero_grad()
        cross_entropy(learner.model, a_batch(2 + step)).backward()
        optimizer.step()
    for key, layer in inside.layers(learner).items():
        m = layer.pack([optimizer.state[p]["exp_avg"] for p in layer.params])
        assert (m @ inside.bases(learner)[key].M).norm() <= 1e-12 * m.norm()


def test_attaching_is_optional_and_twice_is_once() -> None:
    results = []
    for times in (0, 1, 3):
        torch.manual_seed(0)
        learner = learnt(GPM)
        learner.begin_task(2, [a_batch(2)], cross_entropy)
        optimizer = torch.optim.AdamW(learner.parameters(), lr=1e-2)
        for _ in range(times):
            assert learner.attach(optimizer) is optimizer
        cross_entropy(learner.model, a_batch(2)).backward()
        optimizer.step()
        results.append(inside.matrices(learner))
    for other in results[1:]:
        for key, W in results[0].items():
            assert torch.equal(W, other[key])


def test_in_the_first_task_an_optimizer_is_free() -> None:
    model = Net().double()
    learner = GPM(model, exclude=["head"])
    twin = copy.deepcopy(model)
    learner.begin_task(0, [a_batch(0)], cross_entropy)
    optimizers = [learner.attach(torch.optim.AdamW(learner.parameters(), lr=1e-2))]
    optimizers.append(torch.optim.AdamW(twin.parameters(), lr=1e-2))
    for net, optimizer in zip((model, twin), optimizers, strict=True):
        for _ in range(5):
            optimizer.zero_grad()
            cross_entropy(net, a_batch(0)).backward()
            optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
