"""Misuse gets a sentence that names the culprit and the way out, and changes nothing (point 10)."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import classification, cross_entropy, learn, mlp, train
from torch import Tensor, nn

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


def scalings(learner: GPM) -> list[nn.Parameter]:
    return list(learner.param_groups(lr=1.0)[1]["params"])


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
            pytest.raises(RuntimeError, match="task 'open' is being learnt; call end_task first"),
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


def test_saving_or_detaching_while_learning(tmp_path: Path) -> None:
    learner = begun()
    uses: dict[str, Callable[[], Any]] = {
        "save": lambda: learner.save(tmp_path / "a"),
        "detach": lambda: learner.detach(0),
    }
    for name, use in uses.items():
        message = f"{name} cannot be called while task 'open'.*end_task first"
        with unchanged(learner), pytest.raises(RuntimeError, match=message):
            use()
    assert list(tmp_path.iterdir()) == []
    learner.end_task([a_batch(2)])
    learner.save(tmp_path / "a")


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
        lambda: learner.param_groups(lr=0.1),
        lambda: learner.save(tmp_path / "a"),
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
    learnt_scalings = [S.detach().clone() for S in scalings(learner)]
    assert any(S.any() for S in learnt_scalings)
    message = r"end_task.*task"
    with unchanged(learner), learner.task(0), pytest.raises(RuntimeError, match=message):
        learner.end_task([a_batch(2)])
    for S, before in zip(scalings(learner), learnt_scalings, strict=True):
        assert torch.equal(S, before)
    learner.end_task([a_batch(2)])


# ---- optimizers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "leave_out", ["first.weight", "second.bias", "parametrizations.weight"], ids=str
)
def test_an_optimizer_that_misses_something(leave_out: str) -> None:
    learner = learnt(2)
    learner.begin_task(2, [a_batch(2)], cross_entropy)
    if leave_out == "parametrizations.weight":  # the scalings: a list made before begin_task
        left = [p for p in learner.parameters() if not any(p is S for S in scalings(learner))]
        named = "S.0"
    else:
        gone = layers(learner)[leave_out.split(".")[0]].params[leave_out.endswith("bias")]
        left = [p for p in learner.parameters() if p is not gone]
        named = leave_out.split(".")[0]
    optimizer = torch.optim.SGD(left, lr=0.1)
    message = rf"does not hold '.*{named}.*' .*from learner.parameters\(\) or learner.param_groups"
    with unchanged(learner), pytest.raises(ValueError, match=message):
        learner.attach(optimizer)
    assert not optimizer._optimizer_step_post_hooks
    learner.attach(torch.optim.SGD(learner.parameters(), lr=0.1))


def test_an_optimizer_that_leaves_out_excluded_parts_is_fine() -> None:
    learner = learnt(1)
    body = [p for n, p in learner.model.named_parameters() if not n.startswith("head")]
    learner.attach(torch.optim.SGD(body, lr=0.1))


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
    with pytest.raises(TypeError, match=f"needs a torch optimizer, not {type(thing).__name__}"):
        learnt(1).attach(thing)


@both
def test_steps_of_an_optimizer_that_is_not_attached(cls: type[GPM]) -> None:
    learner = learnt(2, cls)
    learner.begin_task("open", [a_batch(2)], cross_entropy)
    before = copy.deepcopy(learner.model.state_dict())
    optimizer = torch.optim.AdamW(learner.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(learner.model, a_batch(2)).backward()
        optimizer.step()
    optimizer.zero_grad()
    message = r"The weights of layer '(first|second)' moved inside.*learner.attach\(...\)"
    with unchanged(learner), pytest.raises(RuntimeError, match=message):
        learner.end_task([a_batch(2)])
    learner.model.load_state_dict(before)
    train(learner, [a_batch(2)])
    learner.end_task([a_batch(2)])
    assert list(learner.selected) == [0, 1, "open"]


@both
def test_training_between_tasks(cls: type[GPM]) -> None:
    learner = learnt(2, cls)
    good = copy.deepcopy(learner.model.state_dict())
    train(learner, [a_batch(3)], make=torch.optim.AdamW, lr=0.1)
    learner.model.zero_grad()
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


@pytest.mark.parametrize("value", [NAN, INF, -1e30, 1e7])
@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_a_diverging_scaling(which: int, value: float) -> None:
    """Any of the Q, of any layer and any trusted task."""
    learner = begun()
    Q = scalings(learner)
    assert len(Q) == 4
    good = [S.detach().clone() for S in Q]
    with torch.no_grad():
        Q[which].view(-1)[-1] = value
    name = "first" if which < 2 else "second"
    message = rf"The scalings of layer '{name}' have diverged.*smaller scale_lr"
    with unchanged_but_nan(learner), pytest.raises(RuntimeError, match=message):
        learner.end_task([a_batch(2)])
    with torch.no_grad():
        for S, before in zip(Q, good, strict=True):
            S.copy_(before)
    learner.end_task([a_batch(2)])
    assert all(p.isfinite().all() for p in learner.model.parameters())


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
    param = layers(learner)["second"].params[part == "bias"]
    good = param.detach().clone()
    with torch.no_grad():
        param.view(-1)[0] = value
    message = "Layer 'second' has NaN or infinite weights; go back to the last save"
    with unchanged_but_nan(learner), pytest.raises(RuntimeError, match=message):
        learner.end_task([a_batch(2)])
    with torch.no_grad():
        param.copy_(good)
    learner.end_task([a_batch(2)])


def test_a_really_diverging_run() -> None:
    """Steps on Q scale with the squared weight: too large a rate blows up, and is told."""
    learner = learnt(2)
    learner.begin_task("open", [a_batch(2)], cross_entropy)
    optimizer = torch.optim.SGD(learner.param_groups(lr=1e-3, scale_lr=1e9), lr=1e-3)
    learner.attach(optimizer)
    for _ in range(5):
        optimizer.zero_grad()
        cross_entropy(learner.model, a_batch(2)).backward()
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"The scalings of layer '.*' have diverged"):
        learner.end_task([a_batch(2)])


# ---- the model ------------------------------------------------------------------------------


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
    "layer", [nn.LSTM(6, 8), nn.Bilinear(6, 6, 8), nn.ConvTranspose1d(6, 8, 3)]
)
def test_a_layer_that_cannot_be_protected(layer: nn.Module) -> None:
    kind = type(layer).__name__
    model = nn.ModuleDict({"body": nn.Linear(3, 3), "odd": layer})
    with pytest.raises(TypeError, match=rf"'odd' is a {kind}.*add 'odd' to exclude=\[...\] or"):
        TRGP(model)
    assert TRGP(model, exclude=["odd"]).ranks.keys() == {"body"}
