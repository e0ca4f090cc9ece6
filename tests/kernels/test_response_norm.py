"""Local response norm's kernels: torch's numbers, channels last, in one node of a graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from trgp.benchmarks.models import lenet
from trgp.fast.kernels.mode import OwnKernels
from trgp.fast.kernels.response_norm import response_norm

STRONG = (0.3, 0.6, 1.5)  # alpha, beta and k that leave no channel as it was
ROOTS = (0.3, 0.75, 1.5)  # of which the power is taken by roots
LENETS = (lenet.SIZE, lenet.ALPHA, lenet.BETA, lenet.K)
SHAPES = [(1, 1, 1, 1), (2, 1, 3, 5), (2, 3, 7, 1), (3, 4, 5, 7), (2, 20, 3, 5), (1, 50, 3, 3)]


def passes(function: Callable[..., Tensor], x: Tensor, dy: Tensor, *constants: Any) -> list[Tensor]:
    """The output and the gradient of x."""
    x = x.detach().requires_grad_()
    y = function(x, *constants)
    return [y, *torch.autograd.grad(y, x, dy)]


def is_torchs(x: Tensor, dy: Tensor, *constants: Any) -> bool:
    """In double precision."""
    found = passes(response_norm, x, dy, *constants)
    wanted = passes(F.local_response_norm, x.double(), dy.double(), *constants)
    return all(
        bool((a - b).abs().max() <= 1e-5 * b.abs().max().clamp(min=1))
        for a, b in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("constants", [STRONG, ROOTS], ids=["strong", "roots"])
@pytest.mark.parametrize("size", [1, 3, 4, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradient_are_torchs(
    shape: tuple[int, ...], size: int, constants: tuple[float, ...], device: str
) -> None:
    x, dy = (torch.randn(shape, device=device) * 3 for _ in "xy")
    assert is_torchs(x, dy, size, *constants)


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_output_and_gradient_are_lenets(scale: float, device: str) -> None:
    """Also of numbers large enough that its small factor matters."""
    x, dy = (torch.randn(2, 20, 4, 4, device=device) * s for s in (scale, 1.0))
    assert is_torchs(x, dy, *LENETS)
    own, torchs = passes(response_norm, x, dy, *LENETS), passes(lenet.response_norm, x, dy)
    for found, wanted in zip(own, torchs, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_lenets_norm_is_sent_to_the_kernel(device: str) -> None:
    x = torch.randn(2, 20, 4, 4, device=device)
    with OwnKernels():
        found = lenet.ResponseNorm()(x)
    assert torch.equal(found, response_norm(x, *LENETS))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("constants", [STRONG, ROOTS], ids=["strong", "roots"])
@pytest.mark.parametrize("special", [float("nan"), float("inf")])
@pytest.mark.parametrize("channel", [0, 3, 6])
def test_what_is_no_number_spoils_what_it_does_in_torch(
    channel: int, special: float, constants: tuple[float, ...], device: str
) -> None:
    x, dy = (torch.randn(2, 7, 3, 3, device=device) for _ in "xy")
    x[1, channel, 1, 1] = special
    own, torchs = (passes(f, x, dy, 4, *constants) for f in (response_norm, F.local_response_norm))
    for found, wanted in zip(own, torchs, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_every_call_comes_to_the_same_bits(device: str) -> None:
    x, dy = (torch.randn(3, 20, 7, 7, device=device) for _ in "xy")
    first, second = (passes(response_norm, x, dy, *LENETS) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_maps_come_out_channels_last(layout: torch.memory_format, device: str) -> None:
    """However they and their gradients come in."""
    x = torch.randn(4, 3, 5, 6, device=device).contiguous(memory_format=layout)
    for dy_layout in (torch.channels_last, torch.contiguous_format):
        dy = torch.randn(4, 3, 5, 6, device=device).contiguous(memory_format=dy_layout)
        y, dx = passes(response_norm, x, dy, 4, *STRONG)
        assert y.stride() == dx.stride() == (90, 1, 18, 3)
        assert is_torchs(x, dy, 4, *STRONG)


def test_a_part_of_a_map_is_taken_as_it_lies(device: str) -> None:
    x, dy = (torch.randn(2, 9, 5, 6, device=device)[:, 1::2, :, 1:] for _ in "xy")
    assert is_torchs(x, dy, 4, *STRONG)


def test_a_graph_has_one_node_for_each_pass(device: str) -> None:
    x, dy = (torch.randn(2, 3, 6, 6, device=device) for _ in "xy")
    traced = make_fx(lambda x: passes(response_norm, x, dy, *LENETS))(x)
    called = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert [name for name in called if "detach" not in name] == [
        "trgp.response_norm.default",
        "trgp.response_norm_backward.default",
    ]
    for again, now in zip(traced(x), passes(response_norm, x, dy, *LENETS), strict=True):
        assert torch.equal(again, now)


def test_torch_knows_what_the_operations_return(device: str) -> None:
    """Shapes and strides before they are computed, for a compiler."""
    x = torch.randn(2, 3, 7, 6, device=device, requires_grad=True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    forward, backward = torch.ops.trgp.response_norm, torch.ops.trgp.response_norm_backward
    torch.library.opcheck(forward, (x, *LENETS), test_utils=checks)
    torch.library.opcheck(backward, (x.detach(), x.detach(), *LENETS), test_utils=checks)
