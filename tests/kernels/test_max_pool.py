"""Max pooling's kernels: torch's winners, channels last, in one node of a graph."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("triton", reason="the kernels are written in Triton")

from trgp.fast.kernels.max_pool import max_pool2d

Pair = tuple[int, int]
WINDOWS = [  # kernel, stride, padding
    ((2, 2), (2, 2), (0, 0)),
    ((3, 3), (2, 2), (1, 1)),
    ((3, 3), (1, 1), (1, 1)),
    ((2, 2), (3, 3), (0, 0)),
    ((3, 2), (1, 2), (1, 0)),
    ((5, 4), (2, 3), (1, 2)),
]
SHAPES = [(1, 1, 3, 3), (2, 3, 7, 8), (3, 20, 5, 5), (1, 65, 9, 4)]


def passes(x: Tensor, dy: Tensor | None, kernel: Pair, stride: Pair, padding: Pair) -> list[Tensor]:
    """The output and the gradient of x."""
    x = x.detach().requires_grad_()
    y = max_pool2d(x, kernel, stride, padding)
    return [y, *torch.autograd.grad(y, x, torch.ones_like(y) if dy is None else dy)]


def is_torchs(x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> bool:
    """Outputs to the bit; gradients, where windows overlap, up to the order of a sum."""
    x = x.detach().requires_grad_()
    wanted = F.max_pool2d(x, kernel, stride, padding)
    dy = torch.randn_like(wanted)
    (dx,) = torch.autograd.grad(wanted, x, dy)
    y, own_dx = passes(x, dy, kernel, stride, padding)
    assert torch.allclose(y, wanted, rtol=0, atol=0, equal_nan=True)
    return torch.allclose(own_dx, dx, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kernel", "stride", "padding"), WINDOWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradient_are_torchs(
    shape: tuple[int, ...], kernel: Pair, stride: Pair, padding: Pair, device: str
) -> None:
    assert is_torchs(torch.randn(shape, device=device), kernel, stride, padding)


def test_the_largest_windows_find_their_winners(device: str) -> None:
    """Places are kept in a byte: the last of 11 x 11 is 120."""
    x = torch.arange(121.0, device=device).view(1, 1, 11, 11)
    assert is_torchs(x, (11, 11), (11, 11), (0, 0))


@pytest.mark.parametrize(("kernel", "stride", "padding"), WINDOWS[:4])
@pytest.mark.parametrize("special", [0.0, float("nan"), float("-inf"), float("inf")])
def test_winners_of_ties_and_of_what_is_no_number_are_torchs(
    special: float, kernel: Pair, stride: Pair, padding: Pair, device: str
) -> None:
    x = torch.randint(0, 2, (3, 5, 7, 7), device=device).float()
    x[torch.rand(x.shape, device=device) < 0.4] = special
    x[0] = special
    assert is_torchs(x, kernel, stride, padding)


def test_every_call_comes_to_the_same_bits(device: str) -> None:
    x, window = torch.randn(2, 20, 9, 9, device=device), WINDOWS[1]
    dy = torch.randn(2, 20, 5, 5, device=device)
    first, second = (passes(x, dy, *window) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_maps_come_out_channels_last(layout: torch.memory_format, device: str) -> None:
    """However they and their gradients come in."""
    x = torch.randn(4, 3, 5, 6, device=device).contiguous(memory_format=layout)
    for dy_layout in (torch.channels_last, torch.contiguous_format):
        dy = torch.randn(4, 3, 2, 3, device=device).contiguous(memory_format=dy_layout)
        y, dx = passes(x, dy, *WINDOWS[0])
        assert y.stride() == (18, 1, 9, 3)
        assert dx.stride() == (90, 1, 18, 3)
        assert is_torchs(x, *WINDOWS[0])


def test_a_graph_has_one_node_for_each_pass(device: str) -> None:
    x = torch.randn(2, 3, 6, 6, device=device)
    dy = torch.randn(2, 3, 3, 3, device=device)
    traced = make_fx(lambda x: passes(x, dy, *WINDOWS[1]))(x)
    called = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert [name for name in called if "getitem" not in name and "detach" not in name] == [
        "trgp.max_pool2d.default",
        "trgp.max_pool2d_backward.default",
    ]
    for again, now in zip(traced(x), passes(x, dy, *WINDOWS[1]), strict=True):
        assert torch.equal(again, now)


def test_torch_knows_what_the_operations_return(device: str) -> None:
    """Shapes and strides before they are computed, for a compiler."""
    x = torch.randn(2, 3, 7, 6, device=device, requires_grad=True)
    window = [list(pair) for pair in WINDOWS[1]]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    forward, backward = torch.ops.trgp.max_pool2d, torch.ops.trgp.max_pool2d_backward
    torch.library.opcheck(forward, (x, *window), test_utils=checks)
    y, winners = forward(x.detach(), *window)
    torch.library.opcheck(backward, (y, winners, [7, 6], *window), test_utils=checks)
