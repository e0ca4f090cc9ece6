"""Kinds of layers: torch's, other libraries' and one's own are W times columns, exactly."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, classification, cross_entropy, learn
from support import inside
from support.foreign import (
    CastLinear,
    Conv1D,
    Conv2dSame,
    Experts,
    LlamaRMSNorm,
    Mixture,
    Router,
    StdConv2d,
    T5LayerNorm,
    named,
)
from torch import Tensor, nn

import trgp
from trgp import GPM, TRGP
from trgp.core import layer_kinds
from trgp.core.plan import make_plan
from trgp.testing import check_layer_kind


@pytest.fixture
def registry() -> Iterator[None]:
    """Kinds that a test registers are forgotten after it."""
    kinds, norms = dict(layer_kinds._KINDS), [*layer_kinds._NORMS]
    yield
    layer_kinds._KINDS.clear()
    layer_kinds._KINDS.update(kinds)
    layer_kinds._NORMS[:] = norms


def self_attention(**options: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    x = torch.randn(2, 3, 8)
    return nn.MultiheadAttention(8, 2, batch_first=True, **options), (x, x, x), {}


def cross_attention() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    module = nn.MultiheadAttention(8, 2, kdim=10, vdim=12, batch_first=True)
    call = {"key": torch.randn(2, 3, 10), "value": torch.randn(2, 3, 12)}
    return module, (torch.randn(2, 2, 8),), call


KINDS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]] = {
    "Linear": lambda: (nn.Linear(9, 4), (torch.randn(2, 3, 9),), {}),
    "Linear by name": lambda: (nn.Linear(9, 4), (), {"input": torch.randn(5, 9)}),
    "Conv1d": lambda: (nn.Conv1d(4, 3, 3, stride=2), (torch.randn(1, 4, 9),), {}),
    "Conv2d": lambda: (
        nn.Conv2d(6, 4, 3, groups=2, padding=1, padding_mode="circular"),
        (torch.randn(1, 6, 3, 3),),
        {},
    ),
    "Conv2d unbatched": lambda: (nn.Conv2d(6, 4, 3), (torch.randn(6, 4, 4),), {}),
    "Conv3d": lambda: (
        nn.Conv3d(3, 2, 2, dilation=2, bias=False),
        (torch.randn(1, 3, 4, 4, 4),),
        {},
    ),
    "self-attention": self_attention,
    "self-attention without bias": lambda: self_attention(bias=False),
    "cross-attention": cross_attention,
    "Conv1D": lambda: (Conv1D(4, 9), (torch.randn(2, 3, 9),), {}),
    "Conv2dSame": lambda: (Conv2dSame(6, 4, 3, stride=2, groups=2), (torch.randn(1, 6, 5, 4),), {}),
    "Conv2dSame dilated": lambda: (
        Conv2dSame(4, 3, (3, 2), stride=(1, 3), dilation=2),
        (torch.randn(2, 4, 5, 4),),
        {},
    ),
    "router": lambda: (Router(9, 4, 2), (torch.randn(2, 3, 9),), {}),
    "experts": lambda: (Mixture(9, 12, 3), (torch.randn(2, 3, 9),), {}),
    "experts transposed": lambda: (Mixture(9, 12, 3, transposed=True), (torch.randn(5, 9),), {}),
    "timm's Linear": lambda: (CastLinear(9, 4), (torch.randn(3, 9),), {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_known_kind_is_protected_exactly(kind: str) -> None:
    module, args, kwargs = KINDS[kind]()
    check_layer_kind(module, *args, **kwargs)


# ---- kinds of other libraries in a learner -----------------------------------------------------


class Block(nn.Module):
    """A part of GPT-2: a norm layer of its own, and transposed linear layers."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.enter = Conv1D(width, 16)
        self.norm = LlamaRMSNorm(width)
        self.up = Conv1D(2 * width, width)
        self.down = Conv1D(width, 2 * width)
        self.head = Conv1D(4, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x.flatten(2).mT if x.dim() > 2 else x)
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


@pytest.mark.parametrize("method", [GPM, TRGP])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_a_model_of_transposed_layers_does_not_forget(
    method: type[GPM], make: type[torch.optim.Optimizer]
) -> None:
    model = Block().double()
    learner = method(model, threshold=1.0)
    batches = [classification(t, 16, dtype=torch.float64, samples=6, rank=4) for t in range(3)]
    answers = []
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for task, batch in enumerate(batches):
        learn(learner, task, [batch], make=make, lr=0.01)
        answers.append(model.eval()(batch[0]).detach())
    assert set(learner.ranks) == {"enter", "up", "down", "head"}
    assert all(not torch.equal(p, start[name]) for name, p in model.named_parameters())
    for task, batch in enumerate(batches):
        with learner.task(task):
            assert_close(model(batch[0]), answers[task], 1e-9)


def test_a_transposed_weight_is_stepped_in_its_own_memory() -> None:
    """No copy of the weight or of its gradient is made in a step."""
    model = nn.Sequential(Conv1D(300, 200))
    learner = GPM(model, threshold=1.0)
    batch = classification(0, 200, samples=4, classes=300)
    learn(learner, 0, [batch], steps=1)
    (layer,) = make_plan(model, [], [], "freeze").layers.values()
    W = layer.layout.matrices(model[0].weight)
    assert W.shape == (1, 300, 200)
    assert W.data_ptr() == model[0].weight.data_ptr()
    learner.begin_task(1, [classification(1, 200, samples=4, classes=300)], cross_entropy)
    guard = inside.guarded_task(learner).layers["0"]
    weight = model[0].weight
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
        guard.keep_update()
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest < weight.nbytes


@pytest.mark.parametrize("transposed", [False, True])
def test_a_mixture_of_experts_does_not_forget(transposed: bool) -> None:
    """Every expert is protected against its own tokens alone."""
    model = nn.Sequential(nn.Linear(12, 20), Mixture(20, 24, 3, transposed), nn.Linear(20, 4))
    learner = TRGP(model.double(), threshold=1.0)
    experts = {"1.experts.gate_up_proj", "1.experts.down_proj"}
    assert set(learner.ranks) == {"0", "1.gate", "2"} | experts
    batches = [classification(t, 12, samples=5, dtype=torch.float64, rank=3) for t in range(3)]
    answers = []
    for task, batch in enumerate(batches):
        before = model[1].experts.down_proj.detach().clone()
        learn(learner, task, [batch], make=torch.optim.AdamW, lr=0.01)
        assert not torch.equal(before, model[1].experts.down_proj)
        answers.append(model(batch[0]).detach())
    for task, batch in enumerate(batches):
        with learner.task(task):
            assert_close(model(batch[0]), answers[task], 1e-9)
    held = inside.memories(learner)["1.experts.gate_up_proj"]
    assert held.M.shape[:2] == (3, 20)
    assert int(held.ranks.sum()) <= 2 * sum(len(x) for x, _ in batches)


def test_experts_of_another_make_are_frozen_as_other_parameters() -> None:
    module = Experts(6, 8, 3)
    module.has_bias = True
    plan = make_plan(nn.Sequential(module), [], [], "freeze")
    assert not plan.layers
    assert set(plan.others) == {"0.gate_up_proj", "0.down_proj"}


def test_a_standardised_weight_is_refused_with_the_reason() -> None:
    model = nn.Sequential(StdConv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(TypeError, match=r"'0' is a StdConv2d, which standardises.*variance.*'0'"):
        GPM(model)
    assert list(GPM(model, exclude=["0"]).ranks) == ["2"]


def test_a_subclass_of_a_foreign_kind_must_compute_as_it_does() -> None:
    class Doubled(Conv1D):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    with pytest.raises(TypeError, match=r"'0' is a Doubled.*Conv1D.*trgp\.protects"):
        GPM(nn.Sequential(Doubled(4, 4)))


def test_weights_that_are_read_in_two_ways_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Conv1D(4, 4))
    model[1].weight = model[0].weight
    with pytest.raises(TypeError, match=r"'0'.*transposed.*exclude"):
        GPM(model)


class Quantised(nn.Linear):
    """A frozen base in eight bits, as other libraries have it: a linear layer by name alone."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        whole = self.weight.detach()
        self.register_buffer("scale", whole.abs().max() / 127)
        codes = (whole / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


class Adapted(nn.Module):
    """A low-rank adapter over a quantised base."""

    def __init__(self, inputs: int, outputs: int, rank: int = 3) -> None:
        super().__init__()
        self.base = Quantised(inputs, outputs)
        self.A = nn.Linear(inputs, rank, bias=False)
        self.B = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.B(self.A(x))


def test_an_adapter_over_a_quantised_base_is_protected() -> None:
    model = nn.Sequential(Adapted(12, 10), nn.Tanh(), Adapted(10, 4))
    learner = TRGP(model)
    assert set(learner.ranks) == {"0.A", "0.B", "2.A", "2.B"}
    batches = [classification(t, 12, samples=6, rank=3) for t in range(2)]
    answers = []
    for task, batch in enumerate(batches):
        learn(learner, task, [batch])
        answers.append(model(batch[0]).detach())
    with learner.task(0):
        assert model[0].base.weight.dtype == torch.int8
        assert (model(batches[0][0]) - answers[0]).abs().max() < 0.1 * answers[0].abs().max()


# ---- norm layers -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LlamaRMSNorm, T5LayerNorm])
def test_norm_layers_of_other_libraries_are_norm_layers(
    kind: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(6, 6), kind(6), nn.Linear(6, 4))
    plan = make_plan(model, [], [], "freeze")
    assert list(plan.norms) == ["1"]
    assert not plan.others
    with caplog.at_level(logging.WARNING, logger="trgp"):
        learner = GPM(model, norm="per_task")
    assert not caplog.records
    kept = []
    for task in range(2):
        learn(learner, task, [classification(task, 6)])
        kept.append(model[1].weight.detach().clone())
    assert not torch.equal(*kept)
    with learner.task(0):
        assert torch.equal(model[1].weight, kept[0])


class NormedLinear(nn.Module):
    """Its name ends as that of no norm layer, and it holds a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(6))


class MatrixNorm(NormedLinear):
    """Its name does, but it holds a matrix."""


class Scale(nn.Module):
    """A norm layer under a name that does not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x / x.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("module", [NormedLinear(), MatrixNorm(), nn.PReLU(), Scale()])
def test_other_modules_are_no_norm_layers(module: nn.Module) -> None:
    assert not make_plan(nn.Sequential(module), [], [], "freeze").norms


@pytest.mark.usefixtures("registry")
def test_a_norm_layer_of_ones_own_is_registered() -> None:
    assert trgp.norm_layer(Scale) is Scale
    assert list(make_plan(nn.Sequential(Scale()), [], [], "freeze").norms) == ["0"]
    with pytest.raises(TypeError, match="must be a class of modules"):
        trgp.norm_layer(Scale())  # type: ignore[type-var]


# ---- kinds of one's own ------------------------------------------------------------------------


class Pairs(nn.Module):
    """Sums of neighbours, times a weight that lies the other way round."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(inputs // 2, outputs))
        self.shift = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return (x[..., ::2] + x[..., 1::2]) @ self.kernel + self.shift


def pair_sums(module: Pairs, x: Tensor) -> Tensor:
    sums = x[..., ::2] + x[..., 1::2]
    return sums.reshape(1, -1, sums.shape[-1])


class Grouped(nn.Module):
    """Each part of the input has a matrix of its own."""

    def __init__(self, parts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.parts = parts
        self.weight = nn.Parameter(torch.randn(parts * outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        matrices = self.weight.unflatten(0, (self.parts, -1))
        return torch.einsum("bgn,gon->bgo", x.unflatten(1, (self.parts, -1)), matrices).flatten(1)


@pytest.mark.usefixtures("registry")
def test_a_kind_of_ones_own_is_protected_in_few_lines() -> None:
    trgp.protects(Pairs, weight="kernel", bias="shift", transposed=True)(pair_sums)
    check_layer_kind(Pairs(12, 3), torch.randn(4, 12))

    @trgp.protects(Grouped, groups="parts")
    def parts(module: Grouped, x: Tensor) -> Tensor:
        return x.unflatten(1, (module.parts, -1)).movedim(1, 0)

    check_layer_kind(Grouped(3, 6, 2), torch.randn(4, 18))
    model = nn.Sequential(Pairs(12, 16), nn.Tanh(), Grouped(2, 8, 2)).double()
    learner = TRGP(model, threshold=1.0)
    batches = [classification(t, 12, samples=5, dtype=torch.float64, rank=2) for t in range(2)]
    learn(learner, 0, batches[:1])
    answer = model(batches[0][0])
    learn(learner, 1, batches[1:])
    with learner.task(0):
        assert_close(model(batches[0][0]), answer.detach(), 1e-9)


@pytest.mark.usefixtures("registry")
def test_a_kind_is_known_by_its_name_alone() -> None:
    @named("elsewhere.layers.Reversed")
    class Reversed(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.flip(-1))

    module = Reversed(6, 3)
    with pytest.raises(TypeError, match=r"tell what it computes with trgp\.protects"):
        GPM(nn.Sequential(module))
    trgp.protects("elsewhere.*.Reversed")(lambda module, x: x.flip(-1).reshape(1, -1, 6))
    check_layer_kind(module, torch.randn(3, 6))


@pytest.mark.usefixtures("registry")
def test_what_is_told_of_a_refused_kind_holds() -> None:
    """A bilinear layer is linear in the products of its two inputs; here the second is fixed."""

    class Halved(nn.Bilinear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x, torch.ones(len(x), 2, dtype=x.dtype))

    with pytest.raises(TypeError, match="is a Halved, a kind that cannot be protected"):
        GPM(nn.Sequential(Halved(6, 2, 3)))
    trgp.protects(Halved)(lambda module, x: x.repeat_interleave(2, 1).unsqueeze(0))
    check_layer_kind(Halved(6, 2, 3), torch.randn(3, 6))


def test_only_a_class_or_its_name_is_a_kind() -> None:
    with pytest.raises(TypeError, match="must be a class of modules or its name"):
        trgp.protects(nn.Linear(2, 2))  # type: ignore[arg-type]


# ---- the test kit finds what is wrong ----------------------------------------------------------


WRONG: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "scaled": (lambda m, x: 2 * pair_sums(m, x), "not its weight times its columns"),
    "twice": (lambda m, x: pair_sums(m, x).repeat(1, 2, 1), "not its weight times its columns"),
    "shuffled": (lambda m, x: pair_sums(m, x).flip(2), "not its weight times its columns"),
    "missing": (lambda m, x: pair_sums(m, x)[:, :2], "not its weight times its columns"),
    "flat": (lambda m, x: pair_sums(m, x)[0], r"have the shape \(5, 6\); it must be \(1, N, 6\)"),
}


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("how", WRONG)
def test_the_kit_finds_columns_that_are_wrong(how: str) -> None:
    columns, complaint = WRONG[how]
    trgp.protects(Pairs, weight="kernel", bias="shift", transposed=True)(columns)
    with pytest.raises(AssertionError, match=complaint):
        check_layer_kind(Pairs(12, 3), torch.randn(5, 12))


@pytest.mark.usefixtures("registry")
def test_the_kit_finds_inputs_that_stay_unseen_of_a_layer_with_two_weights() -> None:
    from trgp.core.layer_kinds import described_by, first_input, one_site, rows

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.randn(8, 8))
            self.second = nn.Parameter(torch.randn(3, 8))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.linear(x, self.first).tanh(), self.second)

    @described_by(Two)
    def sites(name: str, module: Two) -> Iterator[tuple[str, Any]]:
        yield f"{name}.first", one_site(module, rows, first_input, "first", None)
        yield f"{name}.second", one_site(module, rows, first_input, "second", None)

    with pytest.raises(AssertionError, match=r"'Two\.second' orthogonal.*missing"):
        check_layer_kind(Two(), torch.randn(3, 8))


def test_the_kit_asks_for_a_layer_that_trains_and_for_few_samples() -> None:
    with pytest.raises(AssertionError, match=r"Tanh has no weight.*trgp\.protects"):
        check_layer_kind(nn.Tanh(), torch.randn(2, 3))
    with pytest.raises(AssertionError, match="fewer samples"):
        check_layer_kind(nn.Linear(3, 2), torch.randn(9, 3))
