"""BatchNorm's kernels: torch's numbers, by rows that lie as they should, in one node of a graph."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("triton", reason="the kernels are written in Triton")

from trgp.fast.kernels.batch_norm import batch_norm

EPS = 1e-5
SHAPES = [(2, 1), (63, 3), (1000, 20), (63, 65), (2, 1, 1, 1), (3, 20, 4, 5), (9, 65, 3, 1)]


def given(shape: tuple[int, ...], device: str, affine: str = "wb") -> list[Tensor | None]:
    """x, and those of weight and bias that are asked for by their letters."""
    x = (torch.randn(shape) * 3 + 2).to(device).requires_grad_()
    vectors = [torch.randn(shape[1]).to(device).requires_grad_() for _ in "wb"]
    return [x, *(v if name in affine else None for name, v in zip("wb", vectors, strict=True))]


def own(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return batch_norm(x, weight, bias, EPS)


def reference(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return F.batch_norm(x, None, None, weight, bias, True, eps=EPS)


def passes(
    function: Callable[..., Tensor], inputs: list[Tensor | None], dy: Tensor
) -> list[Tensor]:
    """The output, and the gradient of every input."""
    y = function(*inputs)
    return [y, *torch.autograd.grad(y, [each for each in inputs if each is not None], dy)]


def exact(inputs: list[Tensor | None], dy: Tensor) -> list[Tensor]:
    """Torch's in double precision; on a CPU, as on a GPU it refuses a bias without a weight."""
    doubles = [None if t is None else t.detach().cpu().double().requires_grad_() for t in inputs]
    return [found.to(dy.device) for found in passes(reference, doubles, dy.cpu().double())]


@pytest.mark.parametrize("affine", ["wb", "w", "b", ""])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradients_are_torchs(shape: tuple[int, ...], affine: str, device: str) -> None:
    inputs = given(shape, device, affine)
    dy = torch.randn(shape, device=device)
    for found, wanted in zip(passes(own, inputs, dy), exact(inputs, dy), strict=True):
        assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max().clamp(min=1)


@pytest.mark.parametrize("affine", ["wb", "w", "b", ""])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rectified_it_is_what_relu_makes_of_it(
    shape: tuple[int, ...], affine: str, device: str
) -> None:
    inputs = given(shape, device, affine)
    dy = torch.randn(shape, device=device)
    rectified = passes(lambda *own_inputs: batch_norm(*own_inputs, EPS, relu=True), inputs, dy)
    apart = passes(lambda *own_inputs: own(*own_inputs).relu(), inputs, dy)
    assert torch.equal(rectified[0], apart[0])
    for found, wanted in zip(rectified, apart, strict=True):
        assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max().clamp(min=1)


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("which", ["plus", "keep", "both"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_follows_comes_along(
    shape: tuple[int, ...], which: str, relu: bool, device: str
) -> None:
    """Something is added before the ReLU, and some of it dropped after."""
    inputs = given(shape, device)
    dy = torch.randn(shape, device=device)
    keep = (torch.rand(shape, device=device) < 0.7).to(torch.uint8) if which != "plus" else None
    if which != "keep":
        inputs.append(torch.randn(shape, device=device).requires_grad_())

    def together(x: Tensor, weight: Tensor, bias: Tensor, plus: Tensor | None = None) -> Tensor:
        share = 1.0 if keep is None else 0.7
        return batch_norm(x, weight, bias, EPS, relu, plus, keep, share)

    def apart(x: Tensor, weight: Tensor, bias: Tensor, plus: Tensor | None = None) -> Tensor:
        y = own(x, weight, bias)
        y = y if plus is None else y + plus
        y = y.relu() if relu else y
        return y if keep is None else y * keep / 0.7

    for found, wanted in zip(passes(together, inputs, dy), passes(apart, inputs, dy), strict=True):
        assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max().clamp(min=1)


def test_rectified_a_constant_channel_gets_what_torch_gives_it(device: str) -> None:
    """At exactly 0 nothing, and what is no number stays so."""
    x = torch.full((6, 2), 0.5, device=device)
    x[0, 1] = float("nan")
    x.requires_grad_()
    y = batch_norm(x, None, None, EPS, relu=True)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert not y[:, 0].any()
    assert not dx[:, 0].any()
    assert y[:, 1].isnan().all()


def test_vectors_may_lie_scattered(device: str) -> None:
    x, weight, bias = given((20, 3), device)
    weight, bias = (torch.stack([v, -v], 1).detach()[:, 0].requires_grad_() for v in (weight, bias))
    dy = torch.randn(20, 3, device=device)
    inputs = [x, weight, bias]
    for found, wanted in zip(passes(own, inputs, dy), exact(inputs, dy), strict=True):
        assert (found - wanted).abs().max() < 1e-5


def test_a_large_mean_takes_nothing_from_the_variance(device: str) -> None:
    """As E[x^2] - E[x]^2 it would be lost: single precision has seven digits."""
    x = (torch.randn(500, 3) + 1e3).to(device)
    variance = batch_norm(x, None, None, EPS).double().var(0, correction=0)
    torch.testing.assert_close(variance, torch.ones_like(variance), rtol=1e-3, atol=0)


def test_a_first_number_far_off_takes_nothing_from_the_others(device: str) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 2, generator=draw)
    x[0] = 100.0
    y = batch_norm(x.to(device), None, None, EPS)
    wanted = reference(x.double(), None, None)
    assert (y.cpu() - wanted).abs().max() < 2e-5 * wanted.abs().max()


def test_a_constant_channel_is_its_bias(device: str) -> None:
    x, weight, bias = given((70, 3), device)
    x = torch.full_like(x, 0.1).requires_grad_()
    y, *gradients = passes(own, [x, weight, bias], torch.randn(70, 3, device=device))
    # Rounding of the mean, times 1 / sqrt(eps).
    torch.testing.assert_close(y, bias.expand_as(y), rtol=0, atol=1e-5)
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("special", [float("nan"), float("inf")])
@pytest.mark.parametrize("row", [0, 69])
def test_what_is_no_number_spoils_its_own_channel(row: int, special: float, device: str) -> None:
    x, weight, bias = given((70, 3), device)
    x = x.detach()
    x[row, 1] = special
    spoilt = batch_norm(x, weight, bias, EPS).isnan()
    assert spoilt[:, 1].all()
    assert not spoilt[:, ::2].any()


@pytest.mark.parametrize("shape", [(300, 20), (5, 20, 7, 7)], ids=str)
def test_every_call_comes_to_the_same_bits(shape: tuple[int, ...], device: str) -> None:
    inputs = given(shape, device)
    dy = torch.randn(shape, device=device)
    first, second = (passes(own, inputs, dy) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_maps_come_out_channels_last(layout: torch.memory_format, device: str) -> None:
    """However they and their gradients come in."""
    inputs = given((4, 3, 5, 6), device)
    for dy_layout in (torch.channels_last, torch.contiguous_format):
        dy = torch.randn(4, 3, 5, 6, device=device).contiguous(memory_format=dy_layout)
        inputs[0] = inputs[0].detach().contiguous(memory_format=layout).requires_grad_()
        y, dx, *_ = passes(own, inputs, dy)
        assert y.stride() == dx.stride() == (90, 1, 18, 3)
        wanted = exact(inputs, dy)
        assert (y - wanted[0]).abs().max() < 1e-5
        assert (dx - wanted[1]).abs().max() < 1e-5


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5, 6)], ids=str)
def test_a_graph_has_one_node_for_each_pass(shape: tuple[int, ...], device: str) -> None:
    inputs = given(shape, device)
    dy = torch.randn(shape, device=device)
    traced = make_fx(lambda *own_inputs: passes(own, list(own_inputs), dy))(*inputs)
    called = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert [name for name in called if "getitem" not in name and "detach" not in name] == [
        "trgp.batch_norm.default",
        "trgp.batch_norm_backward.default",
    ]
    for again, now in zip(traced(*inputs), passes(own, inputs, dy), strict=True):
        assert torch.equal(again, now)


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5, 6)], ids=str)
def test_torch_knows_what_the_operations_return(shape: tuple[int, ...], device: str) -> None:
    """Shapes and strides before they are computed, for a compiler."""
    x, weight, bias = given(shape, device)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    forward, backward = torch.ops.trgp.batch_norm, torch.ops.trgp.batch_norm_backward
    plain = x.detach()
    keep = torch.ones_like(plain, dtype=torch.uint8)
    for more in ((None, None, 1.0), (plain, keep, 0.5)):
        torch.library.opcheck(forward, (x, weight, bias, EPS, True, *more), test_utils=checks)
        _, mean, rstd = forward(plain, weight, None, EPS, False, *more)
        given_back = (plain, plain, None, None, mean, rstd, False, *more)
        torch.library.opcheck(backward, given_back, test_utils=checks)
