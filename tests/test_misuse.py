"""Misuse gets a sentence that names the culprit and the way out, and changes nothing (point 10)."""

import copy
import logging
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_close, classification, cross_entropy, learn, mlp, train
from support import inside
from torch import Tensor, nn

import trgp
from trgp import GPM, TRGP, UnknownTaskError

F64 = torch.float64
both = pytest.mark.parametrize("cls", [GPM, TRGP])
NAN, INF = float("nan"), float("inf")


class Net(nn.Module):
    """Two protected layers, a norm, a parameter of its own, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.gain = nn.Parameter(torch.ones(8))
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).tanh() * self.gain
        return self.head(self.second(x).tanh())


def a_batch(task: int) -> tuple[Tensor, Tensor]:
    return classification(task, 6, rank=1, dtype=F64)


def a_learner(cls: type[GPM] = TRGP, **options: Any) -> GPM:
    torch.manual_seed(0)
    options = {"threshold": 0.9, "exclude": ["head"]} | options
    if cls is TRGP:
        options = {"epsilon": 0.0} | options
    return cls(Net().double(), **options)


def learnt(tasks: int, cls: type[GPM] = TRGP, **options: Any) -> GPM:
    learner = a_learner(cls, **options)
    for task in range(tasks):
        learn(learner, task, [a_batch(task)])
    return learner


def begun(cls: type[GPM] = TRGP, **options: Any) -> GPM:
    """Two tasks learnt, and a third in the middle of being learnt."""
    learner = learnt(2, cls, **options)
    learner.begin_task("open", [a_batch(2)], cross_entropy)
    train(learner, [a_batch(2)], steps=3)
    return learner


@contextmanager
def unchanged(learner: GPM) -> Iterator[None]:
    """Whatever is tried inside leaves every bit of model, learner and random state alone."""

    def state() -> dict[str, Any]:
        modules = list(learner.model.modules())
        return {
            "grads": [(name, p.requires_grad) for name, p in learner.model.named_parameters()],
            "modes": [module.training for module in modules],
            "kinds": [type(module) for module in modules],
            "hooks": [len(module._forward_pre_hooks) for module in modules],
            "selected": learner.selected,
            "ranks": learner.ranks,
            "summary": learner.summary(),
            "random": torch.get_rng_state().tolist(),
            "grad mode": torch.is_grad_enabled(),
            "fused": torch.backends.mha.get_fastpath_enabled(),
        }

    weights = copy.deepcopy(dict(learner.model.state_dict()))
    before = state()
    yield
    assert state() == before
    assert list(learner.model.state_dict()) == list(weights)
    for key, value in learner.model.state_dict().items():
        assert torch.equal(value, weights[key]), key


def assert_usable(learner: GPM) -> None:
    """The learner goes on to the same end as one that was never misused."""
    steady = learnt(len(learner.selected), type(learner))
    for one in (learner, steady):
        torch.manual_seed(1)
        learn(one, "next", [a_batch(5)])
    assert learner.selected == steady.selected
    for key, value in learner.model.state_dict().items():
        assert torch.equal(value, steady.model.state_dict()[key]), key


# ---- the order of calls ---------------------------------------------------------------------


@both
def test_end_task_without_begin_task(cls: type[GPM]) -> None:
    learner = learnt(1, cls)
    with unchanged(learner), pytest.raises(RuntimeError, match="call begin_task first"):
        learner.end_task([a_batch(0)])
    assert_usable(learner)


@both
def test_begin_task_twice(cls: type[GPM]) -> None:
    learner = begun(cls)
    for task in ("open", "other", 0):
        with (
            unchanged(learner),
            pytest.raises(RuntimeError, match="task 'open' is being learnt; call end_task"),
        ):
            learner.begin_task(task, [a_batch(3)], cross_entropy)
    learner.end_task([a_batch(2)])
    assert list(learner.selected) == [0, 1, "open"]


@both
def test_a_task_id_twice(cls: type[GPM]) -> None:
    learner = learnt(2, cls)
    with unchanged(learner), pytest.raises(ValueError, match="Task 1 has been learnt already"):
        learner.begin_task(1, [a_batch(1)], cross_entropy)
    assert_usable(learner)


@pytest.mark.parametrize("task", [True, False, 0.0, 1.5, None, (0,), [0], b"a", torch.tensor(0.5)])
def test_task_ids_of_other_kinds(task: Any) -> None:
    learner = learnt(1)
    with unchanged(learner), pytest.raises(TypeError, match="must be an int or a string, not"):
        learner.begin_task(task, [a_batch(1)], cross_entropy)
    assert_usable(learner)


@pytest.mark.parametrize("task", [2, "0", "", None, [0]])
def test_an_unknown_task(task: Any, tmp_path: Path) -> None:
    learner = learnt(2)
    uses: list[Callable[[Any], Any]] = [lambda t: learner.task(t).__enter__(), learner.detach]
    for use in uses:
        with unchanged(learner), pytest.raises(UnknownTaskError) as caught:
            use(task)
        assert str(caught.value) == f"Task {task!r} has not been learnt; learnt so far: 0, 1."
    assert issubclass(UnknownTaskError, KeyError)
    assert_usable(learner)


def test_an_unknown_task_before_the_first() -> None:
    with pytest.raises(UnknownTaskError, match="learnt so far: none yet"):
        a_learner().task(0).__enter__()


def test_detaching_while_learning() -> None:
    learner = begun()
    message = "detach cannot be called while task 'open'.*end_task or abort_task first"
    with unchanged(learner), pytest.raises(RuntimeError, match=message):
        learner.detach(0)
    learner.end_task([a_batch(2)])
    learner.detach(0)


def test_aborting_without_a_task() -> None:
    learner = learnt(1)
    with unchanged(learner), pytest.raises(RuntimeError, match="abort_task was called without a"):
        learner.abort_task()
    assert_usable(learner)


def test_use_after_detach(tmp_path: Path) -> None:
    learner = learnt(2)
    learner.detach(0)
    uses: list[Callable[[], Any]] = [
        lambda: learner.begin_task(2, [a_batch(2)], cross_entropy),
        lambda: learner.end_task([a_batch(2)]),
        lambda: learner.attach(torch.optim.SGD(learner.model.parameters(), lr=0.1)),
        lambda: learner.task(0).__enter__(),
        lambda: learner.detach(0),
        lambda: learner.parameters(),
        lambda: learner.save(tmp_path / "a"),
        lambda: learner.abort_task(),
        lambda: learner.state_dict(),
    ]
    for use in uses:
        with unchanged(learner), pytest.raises(RuntimeError, match="detached; make or load a new"):
            use()


def test_other_calls_while_visiting_another_task(tmp_path: Path) -> None:
    """Inside `with task(t)` the weights are there for a while: nothing may build on them."""
    learner = learnt(3)
    uses: dict[str, Callable[[], Any]] = {
        "begin_task": lambda: learner.begin_task(9, [a_batch(9)], cross_entropy),
        "detach": lambda: learner.detach(1),
        "save": lambda: learner.save(tmp_path / "a", include_model=True),
        "state_dict": lambda: learner.state_dict(),
        "load_state_dict": lambda: learner.load_state_dict({}),
        "abort_task": lambda: learner.abort_task(),
        "A copy": lambda: copy.deepcopy(learner),
    }
    for name, use in uses.items():
        message = f"{name}.*task"
        with unchanged(learner), learner.task(0), pytest.raises(RuntimeError, match=message):
            use()
    assert list(tmp_path.iterdir()) == []
    assert_usable(learner)


def test_ending_a_task_while_visiting_another() -> None:
    """What was learnt must not be thrown away silently."""
    learner = begun()
    K = {name: each.clone() for name, each in inside.present_coordinates(learner).items()}
    assert any(
        (each - C).norm() > 1e-6
        for each, C in zip(K.values(), inside.coordinates(learner).values(), strict=True)
    )
    message = r"end_task.*task"
    with unchanged(learner), learner.task(0), pytest.raises(RuntimeError, match=message):
        learner.end_task([a_batch(2)])
    for name, each in inside.present_coordinates(learner).items():
        assert torch.equal(each, K[name])
    learner.end_task([a_batch(2)])


# ---- optimizers -----------------------------------------------------------------------------


@pytest.mark.parametrize("leave_out", ["first.weight", "second.bias"])
def test_an_optimizer_that_misses_something(leave_out: str) -> None:
    learner = learnt(2)
    learner.begin_task(2, [a_batch(2)], cross_entropy)
    gone = learner.model.get_parameter(leave_out)
    left = [p for p in learner.parameters() if p is not gone]
    message = rf"does not hold '{leave_out}'.*from learner.parameters\(\), or give several"
    with unchanged(learner), pytest.raises(ValueError, match=message):
        learner.attach(torch.optim.SGD(left, lr=0.1))
    with unchanged(learner), pytest.raises(TypeError, match="attach needs a torch optimizer, or"):
        learner.attach()
    learner.attach(torch.optim.SGD(left, lr=0.1), torch.optim.SGD([gone], lr=0.1))


def test_what_replaced_param_groups_is_named() -> None:
    with pytest.raises(AttributeError, match=r"learner.parameters\(\).*scale_rate=scale_lr / lr"):
        learnt(1).param_groups(lr=0.1, scale_lr=0.01)


def test_an_optimizer_that_leaves_out_excluded_parts_is_fine() -> None:
    learner = learnt(1)
    body = [p for n, p in learner.model.named_parameters() if not n.startswith("head")]
    learner.attach(torch.optim.SGD(body, lr=0.1))


@pytest.mark.parametrize("key", ["optimizer", "base_optimizer", "_optimizer"])
def test_wrappers_of_other_libraries_are_attached_as_they_are(key: str) -> None:
    """With the torch optimizer inside, under any of the names they have for it."""
    learner = learnt(1)
    learner.begin_task(1, [a_batch(1)], cross_entropy)
    inner = torch.optim.SGD(learner.parameters(), lr=0.1)
    wrapper = types.SimpleNamespace(**{key: inner})
    assert learner.attach(wrapper) is wrapper
    cross_entropy(learner.model, a_batch(1)).backward()
    inner.step()
    with pytest.raises(RuntimeError, match="was not attached"):
        torch.optim.SGD(learner.parameters(), lr=0.1).step()
    learner.end_task([a_batch(1)])


def test_a_head_that_no_attached_optimizer_holds(caplog: pytest.LogCaptureFixture) -> None:
    """It is excluded, so it may be left out; but this task's loss depends on it."""
    learner = learnt(1)
    body = [p for n, p in learner.model.named_parameters() if not n.startswith("head")]
    optimizer = learner.attach(torch.optim.SGD(body, lr=0.1))
    with caplog.at_level(logging.WARNING, logger="trgp"):
        learner.begin_task(1, [a_batch(1)], cross_entropy)
    assert "No attached optimizer holds 'head.bias', 'head.weight', which task 1" in caplog.text
    caplog.clear()
    learner.abort_task()
    optimizer.add_param_group({"params": list(learner.model.head.parameters())})
    with caplog.at_level(logging.WARNING, logger="trgp"):
        learner.begin_task(1, [a_batch(1)], cross_entropy)
    assert not caplog.text


def test_a_call_from_a_second_thread() -> None:
    learner = learnt(1)
    told = []

    def elsewhere() -> None:
        try:
            learner.state_dict()
        except RuntimeError as error:
            told.append(str(error))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return cross_entropy(model, batch)

    learner.begin_task(1, [a_batch(1)], loss_fn)
    assert told[0].startswith("state_dict was called while another thread uses this learner; ")
    elsewhere()
    assert len(told) == 1


def test_lbfgs() -> None:
    learner = learnt(1)
    with pytest.raises(TypeError, match="LBFGS calls a closure several times a step"):
        learner.attach(torch.optim.LBFGS(learner.parameters()))
    optimizer = torch.optim.LBFGS(learner.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps the step
    with pytest.raises(TypeError, match="use a first-order optimizer such as SGD or AdamW"):
        learner.attach(optimizer)
    assert_usable(learner)


@pytest.mark.parametrize("thing", [None, "sgd", nn.Linear(2, 2)])
def test_what_is_no_optimizer(thing: Any) -> None:
    learner = learnt(1)
    optimizer = torch.optim.SGD(learner.parameters(), lr=0.1)
    for given in ([thing], [thing, optimizer], [optimizer, thing]):
        with pytest.raises(TypeError, match=f"needs a torch optimizer, not {type(thing).__name__}"):
            learner.attach(*given)


@both
def test_steps_of_an_optimizer_that_is_not_attached_beside_one_that_is(cls: type[GPM]) -> None:
    """Whoever names some has named all: another one is a mistake, told before its step."""
    learner = begun(cls)
    attached = learner.attach(torch.optim.SGD(learner.parameters(), lr=0.1))
    other = torch.optim.AdamW(learner.parameters(), lr=0.1)
    cross_entropy(learner.model, a_batch(2)).backward()
    message = r"AdamW holds protected weights but was not attached.*learner.attach\(...\)"
    with unchanged(learner), pytest.raises(RuntimeError, match=message):
        other.step()
    attached.step()
    learner.attach(other)
    other.step()
    learner.end_task([a_batch(2)])


@both
def test_a_step_between_tasks_is_refused(cls: type[GPM]) -> None:
    learner = learnt(2, cls)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=0.1)
    optimizer.zero_grad()
    cross_entropy(learner.model, a_batch(3)).backward()
    message = r"while no task is open; call begin_task first, or learner.detach\(task\)"
    with unchanged(learner), pytest.raises(RuntimeError, match=message):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()  # without gradients it does nothing
    assert_usable(learner)


def test_a_step_inside_a_visit_is_refused() -> None:
    learner = begun()
    optimizer = torch.optim.SGD(learner.parameters(), lr=0.1)
    message = r"An optimizer stepped inside `with learner.task\(...\)`"
    with unchanged(learner), learner.task(0), pytest.raises(RuntimeError, match=message):
        optimizer.step()
    learner.end_task([a_batch(2)])


@both
def test_weights_written_between_tasks(cls: type[GPM]) -> None:
    learner = learnt(2, cls)
    good = copy.deepcopy(learner.model.state_dict())
    with torch.no_grad():
        for p in learner.model.parameters():
            p += 0.1
    uses: list[Callable[[], Any]] = [
        lambda: learner.begin_task(2, [a_batch(2)], cross_entropy),
        lambda: learner.task(0).__enter__(),
        lambda: learner.detach(0),
    ]
    for use in uses:
        message = "Layer '(first|second)' no longer holds the weights of task 1; load the model"
        with unchanged(learner), pytest.raises(RuntimeError, match=message):
            use()
    learner.model.load_state_dict(good)
    assert_usable(learner)


# ---- data and loss --------------------------------------------------------------------------


def a_generator() -> Iterator[Any]:
    yield a_batch(2)


def poisoned(value: float) -> list[tuple[Tensor, Tensor]]:
    x, y = a_batch(2)
    x = x.clone()
    x[3, 2] = value
    return [(x, y)]


BAD_DATA: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "nothing": (list, ValueError, "yields no samples; pass one that"),
    "a generator": (a_generator, TypeError, "read only once.*list of batches or a DataLoader"),
    "no tensor": (lambda: [("a", 3)], TypeError, "holds no tensor; yield tensors"),
    "nan": (lambda: poisoned(NAN), ValueError, "Layer 'first' received NaN or infinite inputs"),
    "inf": (lambda: poisoned(INF), ValueError, "Layer 'first' received NaN or infinite inputs"),
    "integers": (
        lambda: [(torch.ones(4, 6, dtype=torch.long), torch.arange(4))],
        TypeError,
        r"Layer 'first' received integer inputs \(torch.int64\); convert them",
    ),
}


@both
@pytest.mark.parametrize("kind", BAD_DATA)
@pytest.mark.parametrize("tasks", [0, 1, 2])
def test_bad_data_at_the_beginning(cls: type[GPM], kind: str, tasks: int) -> None:
    make, error, message = BAD_DATA[kind]
    learner = learnt(tasks, cls)
    learner.model.train()
    with unchanged(learner), pytest.raises(error, match=message):
        learner.begin_task("bad", make(), cross_entropy)
    assert_usable(learner)


@both
@pytest.mark.parametrize("kind", BAD_DATA)
def test_bad_data_at_the_end_leaves_the_task_open(cls: type[GPM], kind: str) -> None:
    make, error, message = BAD_DATA[kind]
    learner, steady = begun(cls), begun(cls)
    with unchanged(learner), pytest.raises(error, match=message):
        learner.end_task(make())
    for one in (learner, steady):
        train(one, [a_batch(2)], steps=2)
        one.end_task([a_batch(2)])
    assert learner.ranks == steady.ranks
    for key, value in learner.model.state_dict().items():
        assert torch.equal(value, steady.model.state_dict()[key]), key


@both
def test_a_loader_or_loss_that_fails_in_the_middle(cls: type[GPM]) -> None:
    class Broken:
        def __iter__(self) -> Iterator[Any]:
            yield a_batch(2)
            raise OSError("disk gone")

    def failing(model: nn.Module, batch: Any) -> Tensor:
        cross_entropy(model, batch)
        raise ZeroDivisionError

    learner = learnt(2, cls)
    with unchanged(learner), pytest.raises(ZeroDivisionError):
        learner.begin_task("bad", [a_batch(2)], failing)
    if cls is TRGP:
        with unchanged(learner), pytest.raises(OSError, match="disk gone"):
            learner.begin_task("bad", Broken(), cross_entropy)
    learner.begin_task("open", [a_batch(2)], cross_entropy)
    with unchanged(learner), pytest.raises(OSError, match="disk gone"):
        learner.end_task(Broken())
    learner.end_task([a_batch(2)])


class Poisoning(torch.autograd.Function):
    """The identity, with a gradient that is not a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * NAN


BAD_LOSSES: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "vector": (
        lambda m, b: m(b[0]).sum(1),
        TypeError,
        r"scalar tensor, not a tensor of shape \(8,",
    ),
    "number": (lambda m, b: m(b[0]).sum().item(), TypeError, "must return a scalar tensor, not -?"),
    "nothing": (lambda m, b: None, TypeError, "must return a scalar tensor, not None"),
    "detached": (lambda m, b: m(b[0]).sum().detach(), ValueError, "loss without a gradient"),
    "nan gradient": (
        lambda m, b: Poisoning.apply(m(b[0])).sum(),
        ValueError,
        "The gradient of layer 'first' is NaN or infinite; check the loss",
    ),
    "infinite": (
        lambda m, b: m(b[0]).sum() * INF,
        ValueError,
        "The gradient of layer '(first|second)' is NaN or infinite; check the loss",
    ),
}


@both
@pytest.mark.parametrize("kind", BAD_LOSSES)
@pytest.mark.parametrize("tasks", [0, 2])
def test_bad_losses(cls: type[GPM], kind: str, tasks: int) -> None:
    loss_fn, error, message = BAD_LOSSES[kind]
    learner = learnt(tasks, cls)
    with unchanged(learner), pytest.raises(error, match=message):
        learner.begin_task("bad", [a_batch(2)], loss_fn)
    assert_usable(learner)


# ---- what training may have done ------------------------------------------------------------


@contextmanager
def unchanged_but_nan(learner: GPM) -> Iterator[None]:
    """`unchanged` where NaN counts as equal to itself."""
    weights = copy.deepcopy(dict(learner.model.state_dict()))
    yield
    assert list(learner.model.state_dict()) == list(weights)
    for key, value in learner.model.state_dict().items():
        torch.testing.assert_close(value, weights[key], rtol=0, atol=0, equal_nan=True)


@both
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("part", ["weight", "bias"])
def test_weights_that_are_not_numbers(cls: type[GPM], part: str, value: float) -> None:
    learner = begun(cls)
    param = learner.model.get_parameter(f"second.{part}")
    good = param.detach().clone()
    with torch.no_grad():
        param.view(-1)[0] = value
    message = "layer 'second' reuses of old tasks has diverged|'second' has NaN or infinite weights"
    with unchanged_but_nan(learner), pytest.raises(RuntimeError, match=message):
        learner.end_task([a_batch(2)])
    with torch.no_grad():
        param.copy_(good)
    learner.end_task([a_batch(2)])


@pytest.mark.parametrize(("lr", "scale_rate"), [(1e-3, 1e12), (1e30, 1.0)])
def test_a_diverging_run(lr: float, scale_rate: float) -> None:
    """Inside the trust region steps grow with the squared weight: too large a rate is told."""
    learner = learnt(2)
    learner.scale_rate = scale_rate
    kept = {}
    for task in learner.tasks:
        with learner.task(task):
            M = inside.bases(learner)
            kept[task] = {n: W @ M[n].M for n, W in inside.matrices(learner).items()}
    before = copy.deepcopy(learner.model.state_dict())
    learner.begin_task("open", [a_batch(2)], cross_entropy)
    optimizer = torch.optim.SGD(learner.parameters(), lr=lr)
    for _ in range(5):
        optimizer.zero_grad()
        cross_entropy(learner.model, a_batch(2)).backward()
        optimizer.step()
    message = r"layer '(first|second)' reuses of old tasks has diverged; load earlier.*scale_rate"
    with unchanged_but_nan(learner), pytest.raises(RuntimeError, match=message):
        learner.end_task([a_batch(2)])
    if not all(p.isfinite().all() for p in learner.model.parameters()):
        with pytest.raises(RuntimeError, match="NaN or infinite weights; load earlier weights"):
            learner.abort_task()
    learner.model.load_state_dict(before)
    going_on = copy.deepcopy(learner)
    train(going_on, [a_batch(2)], steps=5, lr=1e-3 / scale_rate)
    going_on.end_task([a_batch(2)])
    learner.abort_task()
    for one in (learner, going_on):
        for task, protected in kept.items():
            with one.task(task):
                for name, W in inside.matrices(one).items():
                    M = inside.bases(one)[name].M[:, :, : protected[name].shape[2]]
                    assert_close(W @ M, protected[name], 1e-12)


# ---- the model ------------------------------------------------------------------------------


def test_a_model_that_deepspeed_has_partitioned() -> None:
    """Its parameters carry the mark that ZeRO-3 leaves on them."""
    model = Net()
    model.second.weight.ds_id = 3  # type: ignore[attr-defined]
    for refuse in (GPM, trgp.inspect):
        with pytest.raises(TypeError, match=r"'second\.weight' is partitioned by DeepSpeed ZeRO-3"):
            refuse(model)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (nn.Sequential(nn.ReLU()), {}),
        (nn.Sequential(nn.BatchNorm1d(3), nn.Embedding(3, 3)), {}),
        (mlp(3, 3), {"exclude": ["*"]}),
        (mlp(3, 3), {"per_task": ["0"]}),
        (mlp(3, 3).requires_grad_(False), {}),
    ],
    ids=["no parameters", "no layers", "excluded", "per task", "frozen"],
)
@both
def test_a_model_with_nothing_to_protect(
    cls: type[GPM], model: nn.Module, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"nothing to protect: no trainable.*exclude=\[...\]"):
        cls(model, **options)


REPLACED: dict[str, tuple[Callable[[], Any], str]] = {
    "first": (lambda: nn.Linear(6, 8).double(), "Layer 'first' was replaced"),
    "second": (lambda: nn.Linear(8, 8).double(), "Layer 'second' was replaced"),
    "norm": (lambda: nn.LayerNorm(8).double(), "'norm"),
    "gain": (lambda: nn.Parameter(torch.ones(8, dtype=F64)), "'gain'"),
}


@both
@pytest.mark.parametrize("name", REPLACED)
def test_a_module_replaced_between_tasks(cls: type[GPM], name: str) -> None:
    """A new layer is not the one that was protected, and a new norm is not frozen."""
    make, message = REPLACED[name]
    learner = learnt(2, cls)
    original = getattr(learner.model, name)
    setattr(learner.model, name, make())
    with unchanged(learner), pytest.raises(RuntimeError, match=message):
        learner.begin_task(2, [a_batch(2)], cross_entropy)
    setattr(learner.model, name, original)
    learn(learner, 2, [a_batch(2)])


@both
@pytest.mark.parametrize("name", ["first", "second"])
def test_a_replaced_layer_is_noticed_whatever_is_called_first(cls: type[GPM], name: str) -> None:
    learner = learnt(2, cls)
    setattr(learner.model, name, REPLACED[name][0]())
    uses: list[Callable[[], Any]] = [lambda: learner.task(0).__enter__(), lambda: learner.detach(0)]
    for use in uses:
        with unchanged(learner), pytest.raises(RuntimeError, match=f"Layer '{name}' was replaced"):
            use()


def test_a_layer_replaced_while_learning() -> None:
    learner = begun(GPM)
    original, learner.model.second = learner.model.second, nn.Linear(8, 8).double()
    with unchanged(learner), pytest.raises(RuntimeError, match="Layer 'second' was replaced"):
        learner.end_task([a_batch(2)])
    learner.model.second = original
    learner.end_task([a_batch(2)])


def test_a_layer_of_another_shape() -> None:
    learner = learnt(2)
    learner.model.second.weight = nn.Parameter(torch.randn(8, 9, dtype=F64))
    with unchanged(learner), pytest.raises(RuntimeError, match="'second' has another shape"):
        learner.begin_task(2, [a_batch(2)], cross_entropy)


def test_a_head_of_another_shape_gets_a_sentence() -> None:
    """A per-task head that was exchanged for a wider one cannot hold the old task's copy."""
    learner = learnt(1, exclude=[], per_task=["head"])
    learner.model.head = nn.Linear(8, 9).double()
    learn(learner, 1, [a_batch(1)])
    with unchanged(learner), pytest.raises(RuntimeError, match=r"head\.(weight|bias)"):
        learner.task(0).__enter__()


def test_a_per_task_module_replaced_is_the_one_that_is_filled() -> None:
    """Its copies go into the module that is there now."""
    learner = learnt(1, exclude=[], per_task=["head"])
    kept = learner.model.head.weight.detach().clone()
    learner.model.head = nn.Linear(8, 4).double()
    with learner.task(0):
        assert torch.equal(learner.model.head.weight, kept)


ADDED: dict[str, Callable[[nn.Module], None]] = {
    "extra": lambda model: model.register_parameter("extra", nn.Parameter(torch.ones(3))),
    "layer": lambda model: model.add_module("layer", nn.Linear(3, 3)),
    "first.more": lambda model: model.first.add_module("more", nn.Embedding(3, 3)),
    "added": lambda model: model.add_module("added", nn.BatchNorm1d(3)),
}


@both
@pytest.mark.parametrize("name", ADDED)
def test_something_trainable_that_was_added(cls: type[GPM], name: str) -> None:
    learner = learnt(2, cls)
    ADDED[name](learner.model)
    with (
        unchanged(learner),
        pytest.raises(RuntimeError, match=rf"'{name}.*became trainable.*exclude=\[...\]"),
    ):
        learner.begin_task(2, [a_batch(2)], cross_entropy)


@both
@pytest.mark.parametrize("name", ["gain", "norm"])
def test_a_frozen_part_that_was_set_free(cls: type[GPM], name: str) -> None:
    """`model.requires_grad_(True)` would let what nothing protects train, and be forgotten."""
    learner = learnt(2, cls)
    part = getattr(learner.model, name)
    part.requires_grad_(True)
    with unchanged(learner), pytest.raises(RuntimeError, match=f"'{name}.*became trainable"):
        learner.begin_task(2, [a_batch(2)], cross_entropy)
    part.requires_grad_(False)
    assert_usable(learner)


@pytest.mark.parametrize(
    "layer", [nn.LSTM(6, 8, proj_size=2), nn.Bilinear(6, 6, 8), nn.ConvTranspose1d(6, 8, 3)]
)
def test_a_layer_that_cannot_be_protected(layer: nn.Module) -> None:
    kind = type(layer).__name__
    model = nn.ModuleDict({"body": nn.Linear(3, 3), "odd": layer})
    with pytest.raises(TypeError, match=rf"'odd' is a {kind}.*add 'odd' to exclude=\[...\] or"):
        TRGP(model)
    assert TRGP(model, exclude=["odd"]).ranks.keys() == {"body"}
