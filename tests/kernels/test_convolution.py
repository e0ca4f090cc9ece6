"""Convolutions as products: torch's values and gradients, whatever the shape."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from trgp.fast.kernels.convolution import convolution

SHAPES = {  # samples, channels, height, width, outputs, kernel, stride, padding
    "few channels": (2, 3, 9, 8, 5, (4, 4), (1, 1), (0, 0)),
    "few channels, padded": (3, 1, 7, 7, 20, (5, 3), (1, 1), (2, 1)),
    "a tap has no power of two": (2, 20, 6, 6, 20, (3, 3), (1, 1), (1, 1)),
    "several blocks a tap": (2, 70, 5, 4, 33, (2, 2), (1, 1), (0, 0)),
    "strided": (2, 20, 8, 7, 40, (3, 3), (2, 2), (1, 1)),
    "strided one way": (2, 17, 6, 7, 16, (3, 2), (1, 3), (1, 0)),
    "a shortcut": (2, 20, 7, 7, 17, (1, 1), (2, 2), (0, 0)),
    "few outputs": (2, 16, 5, 5, 3, (3, 3), (1, 1), (1, 1)),
    "sums in parts": (40, 3, 9, 9, 18, (3, 3), (1, 1), (1, 1)),
    "one place": (2, 16, 3, 3, 16, (3, 3), (1, 1), (0, 0)),
}


@pytest.fixture(autouse=True)
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def some(case: str, device: str) -> tuple[Tensor, Tensor, tuple[int, int], tuple[int, int]]:
    n, c, h, w, o, kernel, stride, padding = SHAPES[case]
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(n, c, h, w, generator=draw)
    weight = torch.randn(o, c, *kernel, generator=draw)
    return x.to(device), weight.to(device), stride, padding


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("case", SHAPES)
def test_it_is_torchs(case: str, last: bool, device: str) -> None:
    x, weight, stride, padding = some(case, device)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    own = x.clone().requires_grad_(), weight.clone().requires_grad_()
    exact = x.double().requires_grad_(), weight.double().requires_grad_()
    y, expected = convolution(*own, stride, padding), F.conv2d(*exact, None, stride, padding)
    along = torch.randn_like(expected)
    found = y, *torch.autograd.grad(y, own, along.float())
    wanted = expected, *torch.autograd.grad(expected, exact, along)
    for one, other in zip(found, wanted, strict=True):
        scale = float(other.detach().abs().max())
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5 * scale)
    assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_what_a_compiler_makes_of_odd_sizes(kernel: int, stride: int) -> None:
    """Sizes are constants to it: one was seen to lose a term where places fit in sixteen bits."""
    draw = torch.Generator("cuda").manual_seed(0)
    for side in (5, 6, 9, 11, 16, 29):
        x = torch.randn(3, 20, side, side, generator=draw, device="cuda", requires_grad=True)
        weight = torch.randn(
            24, 20, kernel, kernel, generator=draw, device="cuda", requires_grad=True
        )
        how = (stride, stride), (kernel // 2, kernel // 2)
        y, expected = convolution(x, weight, *how), F.conv2d(x, weight, None, *how)
        along = torch.randn(y.shape, generator=draw, device="cuda")
        found = y, *torch.autograd.grad(y, (x, weight), along)
        wanted = expected, *torch.autograd.grad(expected, (x, weight), along)
        for one, other in zip(found, wanted, strict=True):
            scale = float(other.detach().abs().max())
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * scale)


def test_only_what_is_asked_for_is_computed(device: str) -> None:
    """The first layer's inputs need no gradient, a frozen layer's weight neither."""
    x, weight, *how = some("few channels", device)
    for wanted, computed, left in ((weight, "dw", "dx"), (x, "dx", "dw")):
        x.requires_grad_(wanted is x)
        weight.requires_grad_(wanted is weight)
        called = called_in(
            lambda w=wanted: torch.autograd.grad(convolution(x, weight, *how).sum(), w)
        )
        assert f"trgp.convolution_{computed}.default" in called
        assert f"trgp.convolution_{left}.default" not in called


def test_the_same_bits_every_time(device: str) -> None:
    x, weight, *how = some("sums in parts", device)
    weight.requires_grad_()
    first, second = (
        torch.autograd.grad(convolution(x, weight, *how).square().sum(), weight)[0]
        for _ in range(2)
    )
    assert torch.equal(first, second)


def test_a_tracer_sees_one_operation(device: str) -> None:
    x, weight, *how = some("strided", device)
    traced = make_fx(lambda x, w: convolution(x, w, *how))(x, weight)
    names = [str(node.target) for node in traced.graph.nodes]
    assert names.count("trgp.convolution.default") == 1
    assert not [name for name in names if "convolution" in name and "trgp" not in name]


def called_in(work: object) -> set[str]:
    """The operations that a piece of work comes to."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: set[str] = set()

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.add(str(func))
            return func(*args, **(kwargs or {}))

    with Watching():
        work()  # type: ignore[operator]
    return seen
