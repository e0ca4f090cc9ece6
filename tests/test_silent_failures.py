"""Ways in which old tasks could be forgotten, or results be wrong, without a word."""

import copy
import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, classification, cross_entropy, learn, mlp, train
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from trgp import GPM, TRGP

F64 = torch.float64


def a_batch(task: int) -> tuple[Tensor, Tensor]:
    return classification(task, 12, rank=2, dtype=F64)


class Autoencoder(nn.Module):
    """The decoder is the encoder's weight, used without calling the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.encoder(x).tanh(), self.encoder.weight.t())


class Twice(nn.Module):
    """A layer that is called, and whose weight is used beside that as well."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(12, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(self.a(x).tanh(), self.a.weight).tanh())


@pytest.mark.parametrize("cls", [GPM, TRGP])
@pytest.mark.parametrize("model", [Autoencoder(), Twice()], ids=["autoencoder", "twice"])
def test_a_weight_that_is_called_and_also_used_around_the_call(
    cls: type[GPM], model: nn.Module
) -> None:
    learner = cls(copy.deepcopy(model).double())
    with pytest.raises(TypeError, match=r"layer '(encoder|a)' is used without calling the layer"):
        learner.begin_task(0, [a_batch(0)], lambda m, b: m(b[0]).square().mean())


def test_a_penalty_on_the_weights_is_no_other_way() -> None:
    """Also on those of a layer that this task does not call."""
    model = nn.ModuleDict({"body": nn.Linear(12, 8), "a": nn.Linear(8, 4), "b": nn.Linear(8, 4)})

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor) -> Tensor:
            return self.parts["a"](self.parts["body"](x).tanh())

    def decayed(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(net, batch) + 1e-3 * sum(p.square().sum() for p in net.parameters())

    learner = TRGP(Net().double())
    for task in range(2):
        learn(learner, task, [a_batch(task)], decayed)


def test_what_was_frozen_cannot_be_trained_again_in_the_middle_of_a_task() -> None:
    model = nn.Sequential(nn.Linear(12, 8), nn.LayerNorm(8), nn.Linear(8, 4)).double()
    learner = GPM(model)
    learn(learner, 0, [a_batch(0)])
    learner.begin_task(1, [a_batch(1)], cross_entropy)
    model.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"'1\.weight' was frozen after the first task"):
        train(learner, [a_batch(1)])


@pytest.mark.parametrize(
    "spoil",
    [
        parametrizations.spectral_norm,
        parametrizations.weight_norm,
        lambda layer: prune.random_unstructured(layer, "weight", 0.3),
    ],
    ids=["spectral", "weight norm", "pruned"],
)
def test_an_attention_whose_output_projection_is_computed(spoil) -> None:  # type: ignore[no-untyped-def]
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "plain": nn.Linear(8, 8)})
    spoil(model["attention"].out_proj)
    with pytest.raises(TypeError, match="Layer 'attention' computes its weight from other"):
        GPM(model)


def test_a_forward_put_on_one_layer() -> None:
    model = mlp(12, 8, 4)
    model[0].forward = lambda x: F.linear(2 * x + 1, model[0].weight, model[0].bias)
    with pytest.raises(TypeError, match=r"'0' is a Linear, a kind that cannot be protected"):
        GPM(model)


@pytest.mark.parametrize("option", ["exclude", "per_task"])
def test_a_tied_weight_named_under_one_of_its_names(option: str) -> None:
    model = mlp(8, 8, 8)
    model[2].weight = model[0].weight
    with pytest.raises(ValueError, match=r"'0\.weight' and '2\.weight' are one parameter"):
        GPM(model, **{option: ["2"]})


def test_a_module_under_two_names_is_found_by_both() -> None:
    model = nn.Module()
    model.body = nn.Linear(12, 8)
    model.head = nn.Linear(8, 4)
    model.heads = nn.ModuleList([model.head])
    for option in ("exclude", "per_task"):
        for pattern in ("head", "heads.*", "heads.0"):
            assert list(GPM(model, **{option: [pattern]}).ranks) == ["body"]


def test_buffers_that_training_changes_are_named(caplog: pytest.LogCaptureFixture) -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 4)
            self.register_buffer("mean", torch.zeros(12))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.mean.lerp_(x.mean(0), 0.1)
            return self.layer(x - self.mean)

    for options, named in (({}, True), ({"per_task": ["mean"]}, False)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="trgp"):
            learn(GPM(Running().double(), **options), 0, [a_batch(0)])
        assert ("Training changes buffers" in caplog.text) == named


def test_an_optimizer_that_nothing_was_told_of_is_guarded() -> None:
    learner = GPM(mlp(12, 16, 4).double(), threshold=1.0)
    learn(learner, 0, [a_batch(0)])
    with torch.no_grad():
        logits = learner.model(a_batch(0)[0])
    learner.begin_task(1, [a_batch(1)], cross_entropy)
    optimizer = torch.optim.AdamW(learner.model.parameters(), lr=1e-2)
    for _ in range(10):
        optimizer.zero_grad()
        cross_entropy(learner.model, a_batch(1)).backward()
        optimizer.step()
    learner.end_task([a_batch(1)])
    with learner.task(0), torch.no_grad():
        assert_close(learner.model(a_batch(0)[0]), logits, 1e-8)


def test_parameters_that_no_optimizer_stepped_are_named(caplog: pytest.LogCaptureFixture) -> None:
    learner = GPM(mlp(12, 16, 4).double())
    learner.begin_task(0, [a_batch(0)], cross_entropy)
    optimizer = torch.optim.SGD(learner.model[0].parameters(), lr=0.1)
    cross_entropy(learner.model, a_batch(0)).backward()
    optimizer.step()
    with caplog.at_level(logging.WARNING, logger="trgp"):
        learner.end_task([a_batch(0)])
    assert "No optimizer that stepped in task 0 holds '2.weight', '2.bias' (2" in caplog.text


def test_adam_is_the_same_with_a_closure_and_without() -> None:
    def run(closures: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = mlp(12, 16, 4).double()
        learner = TRGP(model, epsilon=0.0)
        learn(learner, 0, [a_batch(0)])
        learner.begin_task(1, [a_batch(1)], cross_entropy)
        optimizer = learner.attach(torch.optim.Adam(learner.parameters(), lr=0.01))

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model, a_batch(1))
            loss.backward()
            return loss

        for _ in range(10):
            if closures:
                assert optimizer.step(closure) is not None
            else:
                closure()
                optimizer.step()
        learner.end_task([a_batch(1)])
        return model.state_dict()

    with_closure, without = run(True), run(False)
    for key, value in without.items():
        assert torch.equal(with_closure[key], value), key


def test_an_attention_that_is_the_whole_model() -> None:
    assert list(GPM(nn.MultiheadAttention(8, 2)).ranks) == ["in_proj_weight", "out_proj"]


def test_everything_protected_may_be_frozen_by_the_user() -> None:
    model = mlp(12, 8, 4).double()
    learner = TRGP(model, exclude=["2"])
    learn(learner, 0, [a_batch(0)])
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    learn(learner, 1, [a_batch(1)])
    assert_close(model[0].weight, before, 1e-14)  # rounding, where it is read and written back


def test_a_layer_frozen_in_part_is_refused() -> None:
    model = mlp(12, 8, 4).double()
    learner = GPM(model)
    learn(learner, 0, [a_batch(0)])
    model[0].weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="Layer '0' trains its weight but not its bias"):
        learner.begin_task(1, [a_batch(1)], cross_entropy)


def test_an_expanded_buffer_is_no_obstacle() -> None:
    model = mlp(12, 8, 4).double()
    model.register_buffer("mask", torch.ones(1, 8).expand(4, 8))
    learn(GPM(model), 0, [a_batch(0)])


def test_a_learner_loaded_beside_the_first_thaws_what_that_one_froze(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = nn.Sequential(nn.Linear(12, 8), nn.LayerNorm(8), nn.Linear(8, 4)).double()
    learner = GPM(model)
    learn(learner, 0, [a_batch(0)])
    learner.save(tmp_path / "a")
    GPM.load(tmp_path / "a", model).detach(0)
    assert all(p.requires_grad for p in model.parameters())
    assert all(module.training for module in model.train().modules())


def test_no_copy_inside_a_visit() -> None:
    learner = GPM(mlp(12, 8, 4).double())
    learn(learner, 0, [a_batch(0)])
    with learner.task(0), pytest.raises(RuntimeError, match="copy or pickle cannot be"):
        copy.deepcopy(learner)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_old_heads_that_an_optimizer_moves_without_a_gradient_are_named(
    kept: bool, zeros: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """By weight decay, or by what it remembers of them; not where the gradient is None."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(12, 8)
            self.heads = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))
            self.use = 0

        def forward(self, x: Tensor) -> Tensor:
            return self.heads[self.use](self.body(x).tanh())

    model = Heads().double()
    learner = GPM(model, exclude=["heads"])
    options = {"momentum": 0.9} if kept else {"weight_decay": 0.1}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
    for task in range(2):
        model.use = task
        learner.begin_task(task, [a_batch(task)], cross_entropy)
        optimizer.zero_grad(set_to_none=not zeros)
        cross_entropy(model, a_batch(task)).backward()
        old = model.heads[0].weight.detach().clone()
        with caplog.at_level(logging.WARNING, logger="trgp"):
            optimizer.step()
        learner.end_task([a_batch(task)])
    assert torch.equal(model.heads[0].weight, old) != zeros
    told = "excluded 'heads.0.weight', 'heads.0.bias', of which rows have no gradient"
    assert (told in caplog.text) == zeros


def test_options_per_layer_match_as_exclude_does() -> None:
    model = nn.ModuleDict({"body": mlp(12, 8, 8), "head": nn.Linear(8, 4)}).double()
    model.forward = lambda x: model["head"](model["body"](x))  # type: ignore[method-assign]
    learner = GPM(model, threshold={"body": 0.5, "*": 0.9})
    learn(learner, 0, [a_batch(0)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exclude": None}, "exclude must be a list"),
        ({"exclude": [0]}, "exclude must be a list"),
        ({"memory_samples": 0}, "memory_samples must be a whole number"),
    ],
)
def test_odd_options(options: dict[str, object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        GPM(mlp(3, 3), **options)


def test_counts_of_other_libraries_can_be_saved(tmp_path) -> None:  # type: ignore[no-untyped-def]
    count = np.int64(3)
    learner = TRGP(mlp(12, 4), memory_samples=count, top_k=count, selection_samples=count)
    learner.save(tmp_path / "a")
    loaded = TRGP.load(tmp_path / "a", mlp(12, 4))
    assert (loaded.memory_samples, loaded.top_k, loaded.selection_samples) == (3, 3, 3)


def test_odd_arguments() -> None:
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, not str"):
        GPM("model")
    learner = GPM(mlp(12, 4).double())
    with pytest.raises(TypeError, match="loss_fn must be a function"):
        learner.begin_task(0, [a_batch(0)], None)
    with pytest.raises(TypeError, match="The loader is a NoneType"):
        learner.begin_task(0, None, cross_entropy)


def test_a_shared_head_with_masked_logits_does_not_shrink_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its rows for the classes of old tasks have no gradient, and decay moves them."""
    model = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    learner = TRGP(model, exclude=["2"])

    def loss_of(task: int) -> Callable[..., Tensor]:
        hidden = torch.zeros(8, dtype=F64)
        hidden[4 * (1 - task) : 4 * (2 - task)] = -torch.inf
        return lambda m, b: F.cross_entropy(m(b[0]) + hidden, b[1] + 4 * task)

    for task in range(2):
        learner.begin_task(task, [a_batch(task)], loss_of(task))
        optimizer = torch.optim.AdamW(learner.parameters(), weight_decay=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(task)(model, a_batch(task)).backward()
            optimizer.step()
        learner.end_task([a_batch(task)])
    told = [r.getMessage() for r in caplog.records if "weight_decay=0" in r.getMessage()]
    assert len(told) == 1
    assert "'2.weight'" in told[0]
