"""What becomes of an optimizer's step while a task is open: form, decay, momentum, precision."""

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Batch, assert_close, classification, cross_entropy, learn, mlp, train
from support import inside
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

from trgp import GPM, TRGP
from trgp.core.keep import reached, shown
from trgp.core.memory import in_region_order

F64 = torch.float64


def a_batch(task: int, dtype: torch.dtype = F64) -> Batch:
    x, y = classification(task, 12, rank=3, dtype=F64)
    return x.to(dtype), y


def learnt(cls: type[GPM] = TRGP, dtype: torch.dtype = F64, tasks: int = 2, **options: Any) -> GPM:
    """Two tasks behind it; a third would trust both, and has room of its own."""
    torch.manual_seed(0)
    only = {"epsilon": 0.0} if cls is TRGP else {}
    learner = cls(mlp(12, 14, 4).to(dtype), **({"threshold": 0.9} | only | options))
    for task in range(tasks):
        learn(learner, task, [a_batch(task, dtype)])
    return learner


def opened(cls: type[GPM] = TRGP, **options: Any) -> GPM:
    learner = learnt(cls, **options)
    learner.begin_task(2, [a_batch(2, next(learner.model.parameters()).dtype)], cross_entropy)
    return learner


def backward(learner: GPM, batch: Batch | None = None) -> None:
    learner.model.zero_grad()
    cross_entropy(learner.model, batch or a_batch(2)).backward()


def gradients(learner: GPM) -> dict[str, Tensor]:
    """Of every protected layer, as (g, o, n)."""
    return {
        name: layer.pack([p.grad.clone() for p in layer.params])
        for name, layer in inside.layers(learner).items()
    }


# ---- the form (2) ------------------------------------------------------------------------------


FORMS: list[tuple[str, type[Optimizer], str]] = [
    ("auto", SGD, "paper"),
    ("auto", AdamW, "range"),
    ("paper", AdamW, "paper"),
    ("range", SGD, "range"),
]


@pytest.mark.parametrize("attach", ["never", "before", "after"])
@pytest.mark.parametrize(("form", "kind", "expected"), FORMS)
def test_the_form_is_that_of_the_optimizer(
    form: Any, kind: type[Optimizer], expected: Any, attach: str
) -> None:
    """Read from the gradients as the optimizer saw them, whenever it was attached, if at all."""
    learner = learnt(form=form, scale_rate=0.5)
    optimizer = kind(learner.parameters(), lr=0.01)
    if attach == "before":
        learner.attach(optimizer)
    learner.begin_task(2, [a_batch(2)], cross_entropy)
    if attach == "after":
        learner.attach(optimizer)
    backward(learner)
    given = gradients(learner)
    optimizer.step()
    assert_shown(learner, given, dict.fromkeys(given, expected), 0.5)


def assert_shown(
    learner: GPM, given: dict[str, Tensor], forms: dict[str, Any], scale_rate: float
) -> None:
    for name, G in gradients(learner).items():
        region = inside.regions(learner)[name]
        wanted = shown(given[name] @ region.M, region, forms[name], scale_rate)
        assert wanted.norm() > 1e-6
        assert_close(G @ region.M, wanted, 1e-12)
        other = shown(given[name] @ region.M, region, other_than(forms[name]), scale_rate)
        assert (other - wanted).norm() > 0.01 * wanted.norm()


def other_than(form: str) -> Any:
    return {"paper": "range", "range": "paper"}[form]


def test_two_optimizers_have_a_form_each() -> None:
    learner = opened()
    first, second = learner.model[0].parameters(), learner.model[2].parameters()
    optimizers = learner.attach(AdamW(first, lr=0.01), SGD(second, lr=0.01))
    backward(learner)
    given = gradients(learner)
    for optimizer in optimizers:
        optimizer.step()
    assert_shown(learner, given, {"0": "range", "2": "paper"}, 1.0)


def test_a_layer_in_two_optimizers_is_shown_its_gradient_once() -> None:
    """Weights in one and biases in the other: the gain twice would be another step."""
    learner, whole = opened(), opened()
    named = [*learner.model.named_parameters()]
    optimizers = [
        SGD([p for n, p in named if n.endswith(kind)], lr=0.05) for kind in ("weight", "bias")
    ]
    one = SGD(whole.parameters(), lr=0.05)
    for _ in range(3):
        backward(learner)
        backward(whole)
        given = gradients(learner)
        for optimizer in (*optimizers, one):
            optimizer.step()
        assert_shown(learner, given, {"0": "paper", "2": "paper"}, 1.0)
    for name, W in inside.matrices(learner).items():
        K = inside.present_coordinates(learner)[name]
        assert_close(W @ inside.bases(learner)[name].M, K, 1e-12)


# ---- the explicit step of W and every Q --------------------------------------------------------


class ExplicitQ:
    """The paper's W and S_j = Q_j - I of linear layers, trained by an optimizer of their own."""

    def __init__(self, learner: GPM) -> None:
        """Taken from an open task, before its first step."""
        self.learner = learner
        self.bases = inside.bases(learner)
        self.W = {n: W.requires_grad_() for n, W in inside.shared_weights(learner).items()}
        self.S = {
            name: [
                torch.zeros(1, r, r, dtype=F64, requires_grad=True)
                for r in (self.bases[name].by_task[j].shape[2] for j in trusted)
            ]
            for name, trusted in learner.selected[2].items()
        }

    def effective(self, name: str) -> Tensor:
        total = W = self.W[name]
        M = self.bases[name].M
        frozen = (W @ M @ M.mT).detach()
        for j, S in zip(self.learner.selected[2][name], self.S[name], strict=True):
            B = self.bases[name].by_task[j]
            total = total + frozen @ B @ S @ B.mT
        return total

    def backward(self, batch: Batch) -> None:
        for t in (*self.W.values(), *(S for group in self.S.values() for S in group)):
            t.grad = None
        params = {}
        for name in self.W:
            W = self.effective(name)[0]
            params |= {f"{name}.weight": W[:, :-1], f"{name}.bias": W[:, -1]}
        F.cross_entropy(functional_call(self.learner.model, params, batch[0]), batch[1]).backward()

    @torch.no_grad()
    def step(self, lr: float, decay: float, bias_decay: float, coupled: bool, sign: int) -> None:
        """SGD; the shared weight decays outside span(M), every S as the weights do."""
        for name, W in self.W.items():
            M = self.bases[name].M
            decayed = W * torch.tensor([decay] * (W.shape[2] - 1) + [bias_decay], dtype=F64)
            W -= lr * free(sign * W.grad + decayed, M)
            for S in self.S[name]:
                S -= lr * (sign * S.grad + decay * S)


def free(G: Tensor, M: Tensor) -> Tensor:
    return G - G @ M @ M.mT


class DecoupledSGD(SGD):
    """SGD that shrinks weights apart from its step, and says so as torch's Adam does."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay=weight_decay)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * (p.grad + group["weight_decay"] * p)


@pytest.mark.parametrize("bias_decay", [0.3, 0.0, 1.0])
@pytest.mark.parametrize("kind", ["coupled", "decoupled", "maximized"])
def test_weight_decay_is_that_of_the_shared_weight_and_every_q(
    kind: str, bias_decay: float
) -> None:
    """Fifteen steps; biases may decay at a rate of their own."""
    learner = opened(form="paper")
    explicit = ExplicitQ(learner)
    named = [*learner.model.named_parameters()]
    weights, biases = ([p for n, p in named if n.endswith(k)] for k in ("weight", "bias"))
    groups = [
        {"params": weights, "weight_decay": 0.3},
        {"params": biases, "weight_decay": bias_decay},
    ]
    if kind == "decoupled":
        optimizer: Optimizer = DecoupledSGD(groups, lr=0.05)
    else:
        optimizer = SGD(groups, lr=0.05, maximize=kind == "maximized")
    for _ in range(15):
        backward(learner)
        optimizer.step()
        explicit.backward(a_batch(2))
        explicit.step(0.05, 0.3, bias_decay, kind == "coupled", -1 if kind == "maximized" else 1)
    for name, W in inside.matrices(learner).items():
        assert_close(W, explicit.effective(name).detach(), 1e-12)
        moved = W - explicit.W[name].detach()
        assert moved.norm() > 1e-3


# ---- momentum of an earlier task (1) -----------------------------------------------------------


@pytest.mark.parametrize("cls", [GPM, TRGP])
def test_an_earlier_tasks_momentum_is_taken_out_of_the_protected_space(cls: type[GPM]) -> None:
    learner = learnt(cls, tasks=1)
    optimizer = SGD(learner.parameters(), lr=0.05, momentum=0.9)
    learner.begin_task(1, [a_batch(1)], cross_entropy)
    train_with(learner, optimizer, a_batch(1))
    learner.end_task([a_batch(1)])
    before = {name: buffer.clone() for name, buffer in momentum(learner, optimizer).items()}
    learner.begin_task(2, [a_batch(2)], cross_entropy)
    start = inside.matrices(learner)
    backward(learner)
    given = gradients(learner)
    optimizer.step()
    for name, region in inside.regions(learner).items():
        M = region.M
        assert (before[name] @ M).norm() > 1e-3 * before[name].norm()
        G = free(given[name], M) + shown(given[name] @ M, region, "paper") @ M.mT
        wanted = start[name] - 0.05 * (0.9 * free(before[name], M) + G)
        assert_close(inside.matrices(learner)[name], wanted, 1e-12)
    kept = momentum(learner, optimizer)
    backward(learner)
    given = gradients(learner)
    optimizer.step()  # and from then on it is the task's own
    for name, region in inside.regions(learner).items():
        T = shown(given[name] @ region.M, region, "paper")
        if learner.selected[2][name]:
            found = momentum(learner, optimizer)[name] @ region.M
            assert_close(found, 0.9 * kept[name] @ region.M + T, 1e-12)


@pytest.mark.parametrize("cls", [GPM, TRGP])
def test_an_earlier_tasks_running_average_is_taken_out_too(cls: type[GPM]) -> None:
    learner = learnt(cls, tasks=1)
    optimizer = Adam(learner.parameters(), lr=0.01)
    learner.begin_task(1, [a_batch(1)], cross_entropy)
    train_with(learner, optimizer, a_batch(1))
    learner.end_task([a_batch(1)])
    before = momentum(learner, optimizer, "exp_avg")
    learner.begin_task(2, [a_batch(2)], cross_entropy)
    backward(learner)
    given = gradients(learner)
    optimizer.step()
    for name, region in inside.regions(learner).items():
        M = region.M
        G = free(given[name], M) + reached(given[name] @ M, region) @ M.mT
        wanted = 0.9 * free(before[name], M) + 0.1 * G
        assert_close(momentum(learner, optimizer, "exp_avg")[name], wanted, 1e-12)


def train_with(learner: GPM, optimizer: Optimizer, batch: Batch, steps: int = 6) -> None:
    for _ in range(steps):
        backward(learner, batch)
        optimizer.step()


def momentum(learner: GPM, optimizer: Optimizer, key: str = "momentum_buffer") -> dict[str, Tensor]:
    return {
        name: layer.pack([optimizer.state[p][key].clone() for p in layer.params])
        for name, layer in inside.layers(learner).items()
    }


# ---- weights that something else wrote (4, 5) --------------------------------------------------


@contextmanager
def warnings_in(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], str]]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="trgp"):
        yield lambda: caplog.text


TOLD = "Weights were loaded or written by hand while task 2 is being learnt"


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("scale_rate", [1.0, 0.1])
@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_a_tasks_own_state_is_adopted_without_a_word(
    kind: type[Optimizer],
    scale_rate: float,
    dtype: torch.dtype,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Best weights, and averages over the task; K follows whole, whatever the rate of Q."""
    learner = opened(dtype=dtype, scale_rate=scale_rate)
    batch = a_batch(2, dtype)
    train(learner, [batch], make=kind, lr=0.01)
    best, K = copy.deepcopy(learner.model.state_dict()), inside.present_coordinates(learner)
    train(learner, [batch], make=kind, lr=0.01)
    latest, K_latest = learner.model.state_dict(), inside.present_coordinates(learner)
    averaged = {key: (value + latest[key]) / 2 for key, value in best.items()}
    tolerance = 1e-12 if dtype == F64 else 1e-5
    with warnings_in(caplog) as told:
        for state, expected in (
            (best, K),
            (averaged, {name: (K[name] + K_latest[name]) / 2 for name in K}),
        ):
            learner.model.load_state_dict(state)
            inside.settle(learner)
            for name, found in inside.present_coordinates(learner).items():
                assert_close(found, expected[name], tolerance)
                assert (expected[name] - K_latest[name]).norm() > 1e-3
            for key, value in learner.model.state_dict().items():
                assert_close(value, state[key], tolerance)
        train(learner, [batch], make=kind, lr=0.01, steps=2)
        learner.end_task([batch])
    assert TOLD not in told()


def test_foreign_weights_are_adopted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """What the reach allows stays, the rest is taken out, and its share is named."""
    learner = opened()
    old = old_coordinates(learner)
    train(learner, [a_batch(2)], steps=3)
    start = inside.matrices(learner)
    K = inside.present_coordinates(learner)
    with torch.no_grad():
        for p in learner.model.parameters():
            p += 0.1 * torch.randn_like(p)
    changed = inside.matrices(learner)
    forbidden = {n: inside.forbidden(learner, n, W - start[n]) for n, W in changed.items()}
    shares = {n: float(D.norm() / changed[n].norm()) for n, D in forbidden.items()}
    worst = max(shares, key=lambda name: shares[name])
    with warnings_in(caplog) as told:
        train(learner, [a_batch(2)], steps=0)
        inside.settle(learner)
    assert TOLD in told()
    share = f"{shares[worst]:.1e}"
    count = sum(each > 1e-6 for each in shares.values())
    assert f"in {count} layers, most in '{worst}', {share} of the weights' norm" in told()
    for name, W in inside.matrices(learner).items():
        region = inside.regions(learner)[name]
        assert_close(W, changed[name] - forbidden[name] @ region.M.mT, 1e-12)
        moved = reached((changed[name] - start[name]) @ region.M, region)
        wanted = in_region_order(K[name], region) + moved
        assert_close(in_region_order(inside.present_coordinates(learner)[name], region), wanted)
    learner.end_task([a_batch(2)])
    assert_old_tasks_hold(learner, old)


def test_weights_of_new_parameters_are_adopted(caplog: pytest.LogCaptureFixture) -> None:
    """`load_state_dict(assign=True)` puts other parameters in their places."""
    learner = opened()
    old = old_coordinates(learner)
    train(learner, [a_batch(2)], steps=3)
    state = {key: value + 0.1 for key, value in learner.model.state_dict().items()}
    learner.model.load_state_dict(state, assign=True)
    with warnings_in(caplog) as told:
        train(learner, [a_batch(2)], steps=3, make=AdamW)
        learner.end_task([a_batch(2)])
    assert TOLD in told()
    assert_old_tasks_hold(learner, old)


def test_the_data_of_a_parameter_may_be_exchanged() -> None:
    """As SAM does; here in every step."""
    learner = opened()
    old = old_coordinates(learner)
    optimizer = SGD(learner.parameters(), lr=0.1)
    for _ in range(3):
        backward(learner)
        for p in learner.parameters():
            p.data = p.data + 1e-3 * p.grad
        optimizer.step()
    learner.end_task([a_batch(2)])
    assert_old_tasks_hold(learner, old)


def old_coordinates(learner: GPM) -> dict[int | str, dict[str, Tensor]]:
    """Of every old task what its weights do to protected inputs."""
    found = {}
    for task in learner.tasks:
        with learner.task(task):
            M = inside.bases(learner)
            found[task] = {n: W @ M[n].M for n, W in inside.matrices(learner).items()}
    return found


def assert_old_tasks_hold(
    learner: GPM, old: dict[int | str, dict[str, Tensor]], tolerance: float = 1e-10
) -> None:
    for task, expected in old.items():
        with learner.task(task):
            for name, W in inside.matrices(learner).items():
                M = inside.bases(learner)[name].M[:, :, : expected[name].shape[2]]
                assert_close(W @ M, expected[name], tolerance)


# ---- precision, the complement, steps that break off (6, 10) -----------------------------------


MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "momentum": lambda p: SGD(p, lr=0.02, momentum=0.9),
    "AdamW": lambda p: AdamW(p, lr=2e-3),
}


@pytest.mark.parametrize("name", MAKERS)
def test_in_bfloat16_the_coordinates_do_not_wander(name: str) -> None:
    """500 steps: K stays what W_eff M is to the rounding of one weight, and so do old tasks."""
    dtype = torch.bfloat16
    learner = learnt(dtype=dtype)
    old = old_coordinates(learner)
    batch = a_batch(2, dtype)
    learner.begin_task(2, [batch], cross_entropy)
    optimizer = MAKERS[name](learner.parameters())
    drifts = []
    for step in range(500):
        learner.model.zero_grad()
        cross_entropy(learner.model, batch).backward()
        optimizer.step()
        if step % 50 == 49:
            K = inside.present_coordinates(learner)
            drifts.append(
                max(
                    float((W @ inside.bases(learner)[name].M - K[name]).norm() / W.norm())
                    for name, W in inside.matrices(learner).items()
                )
            )
    eps = torch.finfo(dtype).eps
    assert max(drifts) < eps
    assert drifts[-1] < 3 * drifts[0]
    learner.end_task([batch])
    assert_old_tasks_hold(learner, old, 4 * eps)


def test_in_bfloat16_steps_that_round_to_nothing_move_no_coordinates() -> None:
    """Measured from the weights as they were: their own rounding is no step."""
    learner = opened(dtype=torch.bfloat16)
    train(learner, [a_batch(2, torch.bfloat16)], steps=20)
    K = inside.present_coordinates(learner)
    train(learner, [a_batch(2, torch.bfloat16)], steps=50, lr=1e-12)
    for name, found in inside.present_coordinates(learner).items():
        assert (K[name] - inside.coordinates(learner)[name]).norm() > 0.01
        assert_close(found, K[name], 1e-8)


@pytest.mark.parametrize("name", MAKERS)
def test_the_complement_is_the_other_way_round_and_the_same(name: str) -> None:
    """Where M fills more than half of the space: also over the steps that measure anew."""
    ends = []
    for way in ("complement", "memory"):
        learner = learnt(GPM, threshold=0.999)
        learner.begin_task(2, [a_batch(2)], cross_entropy)
        on_complement = [g for g in inside.guarded_task(learner).layers.values() if g.N is not None]
        assert on_complement
        for guard in on_complement:
            guard.N = guard.N if way == "complement" else None
        optimizer = MAKERS[name](learner.parameters())
        train_with(learner, optimizer, a_batch(2), steps=25)
        ends.append(inside.matrices(learner))
    for name, W in ends[0].items():
        assert_close(W, ends[1][name], 1e-12)


class Breaking(SGD):
    """Breaks off after the first parameter of a step, when told to."""

    broken = False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for i, p in enumerate(p for group in self.param_groups for p in group["params"]):
            p -= 0.1 * (p.grad + 0.5 * torch.randn_like(p))
            if self.broken and i == 0:
                raise KeyboardInterrupt


@pytest.mark.parametrize("goes_on", ["step", "visit", "end", "save"])
@pytest.mark.parametrize(("cls", "threshold"), [(GPM, 0.9), (GPM, 0.999), (TRGP, 0.9)])
def test_a_step_that_breaks_off_is_put_right_by_the_next_call(
    cls: type[GPM],
    threshold: float,
    goes_on: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also where the guard works on the complement, whose steps build on each other.

    It is no foreign weight that the log would tell of.
    """
    learner = opened(cls, threshold=threshold)
    old = old_coordinates(learner)
    optimizer = Breaking(learner.parameters(), lr=0.1)
    train_with(learner, optimizer, a_batch(2), steps=3)
    backward(learner)
    optimizer.broken = True
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    optimizer.broken = False
    if goes_on == "step":
        train_with(learner, optimizer, a_batch(2), steps=2)
    elif goes_on == "visit":
        assert_old_tasks_hold(learner, old)
    elif goes_on == "save":
        learner.save(tmp_path / "a", include_model=True)
        learner = cls.load(tmp_path / "a", mlp(12, 14, 4).double())
        learner.begin_task(2, [a_batch(2)], cross_entropy)
    learner.end_task([a_batch(2)])
    assert_old_tasks_hold(learner, old)
    assert TOLD not in caplog.text


# ---- one learner at a time (9) -----------------------------------------------------------------


def test_a_second_learner_on_the_model_of_an_open_task_is_refused() -> None:
    learner = opened()
    message = "Another learner has begun task 2 on this model and not ended it; call its end_task"
    for make in (GPM, TRGP):
        with pytest.raises(RuntimeError, match=message):
            make(learner.model)
    GPM(mlp(12, 14, 4))
    learner.abort_task()
    GPM(learner.model)


def test_a_learner_that_is_gone_guards_nothing() -> None:
    learner = opened()
    model = learner.model
    del learner
    optimizer = SGD(model.parameters(), lr=0.1)
    before = model[0].weight.detach().clone()
    optimizer.zero_grad()
    cross_entropy(model, a_batch(2)).backward()
    gradient = model[0].weight.grad.clone()
    optimizer.step()
    assert_close(model[0].weight, before - 0.1 * gradient, 1e-15)


def test_a_model_without_a_learner_beside_one_that_has_is_free() -> None:
    learner = opened()
    other: nn.Module = copy.deepcopy(learner.model)
    optimizer = SGD(other.parameters(), lr=0.1)
    cross_entropy(other, a_batch(2)).backward()
    before, gradient = other[0].weight.detach().clone(), other[0].weight.grad.clone()
    optimizer.step()
    assert_close(other[0].weight, before - 0.1 * gradient, 1e-15)
