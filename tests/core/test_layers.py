"""Which parts of a model are protected, and that a layer's output is W times its columns."""

import itertools
import logging
import pickle
import warnings

import pytest
import torch
from helpers import ConvNet, Vit, assert_close, classification, cross_entropy, learn, mlp, train
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from trgp import GPM, TRGP
from trgp.core.layers import Layer
from trgp.core.plan import Plan, make_plan

CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def plan_of(model: nn.Module, **options: list[str]) -> Plan:
    return make_plan(model, options.get("exclude", []), options.get("per_task", []), norm="freeze")


def only_layer(module: nn.Module) -> Layer:
    (layer,) = plan_of(nn.Sequential(module)).layers.values()
    return layer


def from_columns(layer: Layer, x: Tensor, site: int = 0) -> Tensor:
    """The layer's output as (g, N, o), from its matrix and its columns alone."""
    where = layer.sites[site]
    (seen,) = where.inputs(where.module, (x,), {})
    return layer.columns(where, seen) @ layer.matrix().mT


def as_rows(y: Tensor, groups: int, dims: int) -> Tensor:
    """A convolution's output as (g, N, o), in the order of the columns."""
    y = y if y.dim() == dims + 2 else y[None]
    y = y.unflatten(1, (groups, -1)).movedim(1, 0).movedim(2, -1)
    return y.reshape(groups, -1, y.shape[-1])


# ---- every kind of layer: output = W times columns ---------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 3, 4), (2, 1, 3, 2)])
def test_linear_is_its_matrix_times_columns(leading: tuple[int, ...], bias: bool) -> None:
    module = nn.Linear(5, 7, bias=bias).double()
    x = torch.randn(*leading, 5, dtype=torch.float64)
    layer = only_layer(module)
    assert layer.shape == (1, 7, 5 + bias)
    assert_close(from_columns(layer, x), module(x).reshape(1, -1, 7), 1e-12)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    """Any convolution that torch can build, with an input it accepts."""

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    dims = draw(st.integers(1, 3))
    groups = draw(st.integers(1, 3))
    inputs = groups * draw(st.integers(1, 2))  # one channel a group: depthwise
    outputs = groups * draw(st.integers(1, 3))
    padding: str | tuple[int, ...] = draw(st.sampled_from(["same", "valid", each(0, 2)]))
    module = CONVS[dims](
        inputs,
        outputs,
        each(1, 3),
        stride=(1,) * dims if padding == "same" else each(1, 3),
        padding=padding,
        dilation=each(1, 2),
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"])),
        dtype=torch.float64,
    )
    torch.manual_seed(draw(st.integers(0, 1000)))
    batch = draw(st.sampled_from([(), (1,), (2,)]))
    return module, torch.randn(*batch, inputs, *each(5, 7), dtype=torch.float64)


@given(convolutions())
def test_a_convolution_is_its_matrix_times_patches(drawn: tuple[nn.Module, Tensor]) -> None:
    module, x = drawn
    layer = only_layer(module)
    with warnings.catch_warnings():  # "same" with an even kernel copies the input, torch remarks
        warnings.simplefilter("ignore")
        y = module(x)
    groups, dims = module.groups, len(module.kernel_size)
    assert layer.shape[0] == groups
    assert_close(from_columns(layer, x), as_rows(y, groups, dims), 1e-12)


@pytest.mark.parametrize(
    "module", [nn.Linear(4, 6), nn.Conv2d(6, 9, 3, groups=3), nn.Conv1d(4, 2, 1, bias=False)]
)
def test_assign_writes_what_matrix_reads(module: nn.Module) -> None:
    layer = only_layer(module)
    W = torch.randn(layer.shape)
    layer.assign(W)
    assert torch.equal(layer.matrix(), W)
    assert module.weight.flatten()[0] == W.flatten()[0]


# ---- shared weights and biases -----------------------------------------------------------------


def tied(first: nn.Linear, second: nn.Linear) -> nn.Sequential:
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second).double()


@pytest.mark.parametrize(("biases", "extra"), [("same", 1), ("own", 2), ("one", 1), ("none", 0)])
def test_a_shared_weight_is_one_layer_with_all_its_biases(biases: str, extra: int) -> None:
    """Both places are W times columns of one matrix, each with a 1 for its own bias only."""
    model = tied(
        nn.Linear(5, 5, bias=biases != "none"), nn.Linear(5, 5, bias=biases in ("same", "own"))
    )
    if biases == "same":
        model[2].bias = model[0].bias
    plan = plan_of(model)
    assert list(plan.layers) == ["0"]
    assert not plan.others
    (layer,) = plan.layers.values()
    assert layer.shape == (1, 5, 5 + extra)
    x = torch.randn(6, 5, dtype=torch.float64)
    for site, module in enumerate((model[0], model[2])):
        assert_close(from_columns(layer, x, site)[0], module(x), 1e-12)


def test_a_weight_shared_by_different_convolutions() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, stride=2, dilation=2))
    model[1].weight = model[0].weight
    model.double()
    (layer,) = plan_of(model).layers.values()
    x = torch.randn(2, 4, 7, 7, dtype=torch.float64)
    for site, module in enumerate(model):
        assert_close(from_columns(layer, x, site), as_rows(module(x), 1, 2), 1e-12)


def test_a_weight_shared_by_convolutions_of_different_groups_is_refused() -> None:
    model = nn.Sequential(nn.Conv1d(4, 4, 2), nn.Conv1d(8, 4, 2, groups=2))
    model[1].weight = model[0].weight
    with pytest.raises(TypeError, match=r"'0'.*groups.*exclude"):
        GPM(model)


def test_a_bias_shared_by_two_weights_is_frozen() -> None:
    model = mlp(5, 5, 5)
    model[2].bias = model[0].bias
    plan = plan_of(model)
    assert [layer.shape for layer in plan.layers.values()] == [(1, 5, 5), (1, 5, 5)]
    assert list(plan.others) == ["0.bias"]
    learner = GPM(model)
    learn(learner, 0, [classification(0, 5)])
    assert not model[0].bias.requires_grad


class Tongue(nn.Module):
    """An embedding whose weight is the output layer's as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(x)).relu())


def test_a_linear_tied_to_an_embedding_is_frozen() -> None:
    model = Tongue()
    plan = plan_of(model)
    assert list(plan.layers) == ["body"]
    assert set(plan.others) == {"embedding.weight", "head.bias"}
    learner = TRGP(model)
    batch = torch.arange(8), torch.arange(8)
    learn(learner, 0, [batch])
    kept = model.head.weight.detach().clone()
    learn(learner, 1, [batch])
    assert torch.equal(model.head.weight, kept)
    assert "body" in learner.ranks


def test_a_bias_whose_weight_does_not_train_is_frozen_and_the_other_way_round() -> None:
    model = mlp(4, 4, 4, 4)
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    plan = plan_of(model)
    assert list(plan.others) == ["0.bias"]
    assert {name: layer.shape for name, layer in plan.layers.items()} == {
        "2": (1, 4, 4),
        "4": (1, 4, 5),
    }


# ---- what is not protected ---------------------------------------------------------------------


def test_excluded_modules_are_left_alone() -> None:
    model = mlp(4, 6, 6, 3)
    learner = GPM(model, exclude=["4"])
    for task in range(2):
        learn(learner, task, [classification(task, 4, classes=3)])
    assert list(learner.ranks) == ["0", "2"]
    assert all(p.requires_grad for p in model[4].parameters())


def test_patterns_name_modules_within_modules_and_single_parameters() -> None:
    model = Vit(width=8)
    plan = plan_of(model, exclude=["blocks.0", "position"], per_task=["token", "blocks.*.linear?"])
    assert list(plan.layers) == [
        "patches",
        "blocks.1.self_attn.in_proj_weight",
        "blocks.1.self_attn.out_proj",
        "head",
    ]
    assert set(plan.per_task) == {
        "token",
        *(f"blocks.1.linear{i}.{key}" for i in (1, 2) for key in ("weight", "bias")),
    }
    assert not plan.others
    assert set(plan.norms) == {"blocks.1.norm1", "blocks.1.norm2", "norm"}


def test_other_parameters_train_once_and_one_notice_lists_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Vit(width=8)
    with caplog.at_level(logging.WARNING, logger="trgp"):
        learner = GPM(model)
    (notice,) = caplog.records
    assert "token" in notice.getMessage()
    assert "position" in notice.getMessage()
    assert "\n" not in notice.getMessage()

    start = model.token.detach().clone(), model.position.detach().clone()
    learn(learner, 0, [classification(0, 16, 4, 4)])
    kept = model.token.detach().clone(), model.position.detach().clone()
    assert not torch.equal(kept[0], start[0])
    assert not torch.equal(kept[1], start[1])
    learn(learner, 1, [classification(1, 16, 4, 4)], make=torch.optim.AdamW)
    assert torch.equal(model.token, kept[0])
    assert torch.equal(model.position, kept[1])


def test_other_parameters_go_on_training_when_excluded_and_are_copied_per_task(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Vit(width=8)
    with caplog.at_level(logging.WARNING, logger="trgp"):
        learner = GPM(model, exclude=["token"], per_task=["position"])
    assert not caplog.records
    tokens, positions = [], []
    for task in range(2):
        learn(learner, task, [classification(task, 16, 4, 4)])
        tokens.append(model.token.detach().clone())
        positions.append(model.position.detach().clone())
    assert not torch.equal(tokens[0], tokens[1])
    assert not torch.equal(positions[0], positions[1])
    with learner.task(0):
        assert torch.equal(model.token, tokens[1])
        assert torch.equal(model.position, positions[0])
    assert torch.equal(model.position, positions[1])


def test_a_pattern_that_matches_nothing_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="trgp"):
        GPM(mlp(4, 4), exclude=["heads.*"])
    assert "'heads.*'" in caplog.text


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Centred(nn.Conv1d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight - weight.mean(), bias)


class Named(nn.Linear):
    """A subclass that computes as nn.Linear does."""


@pytest.mark.parametrize(
    "module",
    [
        nn.LSTM(4, 4, proj_size=2),
        nn.ConvTranspose2d(4, 4, 2),
        nn.Bilinear(4, 4, 4),
        weight_norm(nn.Linear(4, 4)),
        spectral_norm(nn.Conv1d(4, 4, 2)),
        Doubled(4, 4),
        Centred(4, 4, 2),
        nn.Linear(4, 4, dtype=torch.complex64),
    ],
    ids=lambda module: type(module).__name__,
)
def test_a_kind_that_cannot_be_protected_is_named_with_the_way_out(module: nn.Module) -> None:
    model = nn.ModuleDict({"odd": module, "plain": nn.Linear(4, 4)})
    with pytest.raises(TypeError, match=r"'odd'.*add 'odd' to exclude"):
        GPM(model)
    assert list(GPM(model, exclude=["odd"]).ranks) == ["plain"]
    for p in module.parameters():
        p.requires_grad_(False)
    assert list(GPM(model).ranks) == ["plain"]


def test_a_lazy_layer_is_named_until_it_has_a_shape() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(TypeError, match=r"'0\.(weight|bias)' has no shape yet"):
        GPM(model)
    model(torch.ones(1, 3))
    assert GPM(model).ranks == {"0": (0, 4)}


def test_a_subclass_that_computes_as_its_parent_is_protected() -> None:
    assert list(plan_of(nn.Sequential(Named(3, 3))).layers) == ["0"]


# ---- norm layers -------------------------------------------------------------------------------

NORMS = ("norm1", "norm2")
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def norm_state(model: ConvNet) -> dict[str, Tensor]:
    return {
        key: value.detach().clone()
        for key, value in model.state_dict().items()
        if key.split(".")[0] in NORMS
    }


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {key for key in before if not torch.equal(before[key], after[key])}


def test_norm_freeze_stills_affine_and_statistics_after_the_first_task() -> None:
    model = ConvNet(width=8)
    learner = GPM(model, norm="freeze")
    start = norm_state(model)
    learn(learner, 0, [classification(0, 16, 4, 4)])
    kept = norm_state(model)
    assert changed(start, kept) == set(start)  # the first task trains them like any other part
    assert model.conv.training
    assert not model.norm1.training

    learner.begin_task(1, [classification(1, 16, 4, 4)], cross_entropy)
    train(learner, [classification(1, 16, 4, 4)])  # calls model.train()
    assert model.training
    assert not model.norm1.training
    assert not model.norm2.training
    assert not any(p.requires_grad for p in model.norm1.parameters())
    assert not changed(kept, norm_state(model))
    learner.end_task([classification(1, 16, 4, 4)])
    assert not changed(kept, norm_state(model))

    learner.detach(1)
    model.train()
    assert model.norm1.training
    assert all(p.requires_grad for p in model.norm1.parameters())


def test_norm_per_task_brings_every_tasks_own_back() -> None:
    model = ConvNet(width=8)
    learner = GPM(model, norm="per_task")
    states = []
    for task in range(3):
        learn(learner, task, [classification(task, 16, 4, 4)])
        model.train()
        assert model.norm1.training
        states.append(norm_state(model))
    for earlier, later in itertools.pairwise(states):
        assert changed(earlier, later) == set(earlier)
    for task in (1, 0, 2):
        with learner.task(task):
            assert not changed(states[task], norm_state(model))
    assert not changed(states[2], norm_state(model))


def test_norm_shared_goes_on_training() -> None:
    model = ConvNet(width=8)
    learner = GPM(model, norm="shared")
    learn(learner, 0, [classification(0, 16, 4, 4)])
    before = norm_state(model)
    learn(learner, 1, [classification(1, 16, 4, 4)])
    after = norm_state(model)
    assert changed(before, after) == set(before)
    with learner.task(0):
        assert not changed(after, norm_state(model))


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(6),
        nn.LayerNorm(6),
        nn.GroupNorm(2, 6),
        nn.RMSNorm(6),
        pytest.param(nn.BatchNorm1d(6, affine=False), id="without affine"),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_every_norm_layer_is_recognised(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 4))
    plan = plan_of(model)
    assert list(plan.norms) == ["1"]
    assert not plan.others
    learner = GPM(model)
    learn(learner, 0, [classification(0, 6)])
    model.train()
    assert not norm.training
    assert not any(p.requires_grad for p in norm.parameters())


def test_a_model_with_frozen_norms_can_be_pickled() -> None:
    model = ConvNet(width=8)
    learner = GPM(model)
    learn(learner, 0, [classification(0, 16, 4, 4)])
    again = pickle.loads(pickle.dumps(model))
    again.train()
    assert not again.norm1.training
    x, _ = classification(1, 16, 4, 4)
    assert torch.equal(again(x), model.train()(x))
