"""A network as it is written comes to our kernels where they fit, and to torch's where not."""

from typing import Any

import pytest
import torch
from test_convolution import called_in
from torch import Tensor, nn

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from trgp.benchmarks.models.parts import norm_relu
from trgp.fast import kernels
from trgp.fast.kernels import own_kernels
from trgp.fast.kernels.mode import OwnKernels

OWN = {"trgp.convolution.default", "trgp.batch_norm.default", "trgp.max_pool2d.default"}


def block(**changes: object) -> nn.Sequential:
    """What the papers' networks are made of."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, **changes.get("conv", {})),  # type: ignore[arg-type]
        nn.BatchNorm2d(16, track_running_stats=False),
        nn.ReLU(),
        nn.MaxPool2d(2, **changes.get("pool", {})),  # type: ignore[arg-type]
    )


def images(device: str) -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(device)


def own_operations(network: nn.Module, x: Tensor) -> set[str]:
    def work() -> None:
        with OwnKernels():
            network(x)

    return {name for name in called_in(work) if name.startswith("trgp.")}


def test_values_and_gradients_are_the_networks(device: str) -> None:
    # Without a bias, whose gradient before a norm is nothing but rounding.
    network, x = block(conv={"bias": False}).to(device), images(device)
    with OwnKernels():
        own = network(x)
    torch.testing.assert_close(own, network(x), rtol=1e-3, atol=1e-3)
    found = torch.autograd.grad(own.square().sum(), list(network.parameters()))
    wanted = torch.autograd.grad(network(x).square().sum(), list(network.parameters()))
    for one, other in zip(found, wanted, strict=True):
        scale = float(other.abs().max()) + 1e-3
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2 * scale)


def test_what_fits_is_taken(device: str) -> None:
    assert own_operations(block().to(device), images(device)) == OWN


@pytest.mark.parametrize(
    ("network", "left"),
    [
        (block(conv={"dilation": 2}), "convolution"),
        (block(conv={"padding": "same"}), "convolution"),
        (block(pool={"ceil_mode": True}), "max_pool2d"),
        (block(pool={"dilation": 2}), "max_pool2d"),
        (nn.Sequential(*block()[:1], nn.BatchNorm2d(16), *block()[2:]), "batch_norm"),
    ],
    ids=["dilated", "padded by a word", "ceiled", "dilated pool", "running statistics"],
)
def test_what_does_not_fit_is_torchs(network: nn.Module, left: str, device: str) -> None:
    assert own_operations(network.to(device), images(device)) == OWN - {f"trgp.{left}.default"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_numbers_are_torchs(dtype: torch.dtype, device: str) -> None:
    assert not own_operations(block().to(device, dtype), images(device).to(dtype))


def test_grouped_convolutions_and_other_dimensions_are_torchs(device: str) -> None:
    grouped = nn.Conv2d(4, 4, 3, groups=2).to(device)
    assert not own_operations(grouped, torch.randn(2, 4, 8, 8, device=device))
    assert not own_operations(nn.Conv1d(3, 4, 3).to(device), torch.randn(2, 3, 8, device=device))
    assert not own_operations(nn.Conv2d(3, 4, 3).to(device), torch.randn(3, 8, 8, device=device))


def test_a_norm_and_its_relu_are_one_operation(device: str) -> None:
    """Where batches are normalised by their own statistics, as told by the norm layer."""
    maps = torch.randn(3, 4, 5, 5, device=device)
    norm = nn.BatchNorm2d(4, track_running_stats=False).to(device)
    tracking = nn.BatchNorm2d(4).to(device)
    called = called_in(lambda: own_rectified(maps, norm))
    assert "trgp.batch_norm.default" in called
    assert not [name for name in called if "relu" in name]
    torch.testing.assert_close(own_rectified(maps, norm), norm(maps).relu())
    assert "trgp.batch_norm.default" not in called_in(lambda: own_rectified(maps, tracking))
    with pytest.raises(ValueError, match="expected 4D input"):
        own_rectified(maps[:, :, 0, 0], norm)


class Doubled(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_a_norm_that_is_another_or_is_watched_is_called(device: str) -> None:
    maps = torch.randn(3, 4, 5, 5, device=device)
    for norm in (Doubled(4, track_running_stats=False), nn.Identity(), nn.GroupNorm(2, 4)):
        norm = norm.to(device)
        torch.testing.assert_close(own_rectified(maps, norm), norm(maps).relu())
    seen = []
    watched = nn.BatchNorm2d(4, track_running_stats=False).to(device)
    watched.register_forward_hook(lambda module, args, output: seen.append(output.min()))
    own_rectified(maps, watched)
    assert len(seen) == 1
    assert seen[0] < 0


def test_maps_can_be_flattened_by_view(device: str) -> None:
    """As many networks do, whose maps torch would have left as they need."""
    network, x = block(conv={"bias": False}).to(device), images(device)
    with OwnKernels():
        maps = network(x)
        flat = maps.view(maps.size(0), -1)
        torch.testing.assert_close(flat, network(x).reshape(2, -1))
        assert maps.view(2, 16, -1).shape == (2, 16, 9)
        assert maps.view(torch.int32).dtype == torch.int32
    torch.testing.assert_close(flat, network(x).view(2, -1), rtol=1e-3, atol=1e-3)


def test_rounding_goes_by_torchs_newer_setting_too(device: str) -> None:
    """After which torch refuses to tell of the older one."""
    setting = torch.backends.cudnn.conv
    before = setting.fp32_precision
    try:
        setting.fp32_precision = "ieee"
        assert own_operations(block().to(device), images(device)) == OWN
    finally:
        setting.fp32_precision = before
    assert torch.backends.cudnn.allow_tf32


def test_they_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRGP_KERNELS", "0")
    assert not kernels._usable.__wrapped__(torch.device("cuda"))


def test_where_triton_cannot_begin_it_is_told_once_and_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.zeros", lambda *shape, device: 1 / 0)  # no GPU, no compiler
    with pytest.warns(UserWarning, match=r"Triton cannot be used here.*torch's kernels"):
        assert not kernels._usable.__wrapped__(torch.device("cuda"))


def own_rectified(x: Tensor, norm: nn.Module, **more: Any) -> Tensor:
    with OwnKernels():
        return norm_relu(x, norm, **more)


def test_a_sum_and_dropout_go_along_with_the_norm(device: str) -> None:
    """In evaluation nothing is dropped; in training about the share that is asked for."""
    norm = nn.BatchNorm2d(3, track_running_stats=False).to(device)
    x, plus = images(device), torch.randn(2, 3, 8, 8).to(device)
    dropout = nn.Dropout(0.3)
    dropout.eval()
    rectified = norm_relu(x, norm, plus)
    torch.testing.assert_close(own_rectified(x, norm, plus=plus, dropout=dropout), rectified)
    dropout.train()
    torch.manual_seed(0)
    found = own_rectified(x, norm, plus=plus, dropout=dropout)
    torch.manual_seed(0)
    assert torch.equal(own_rectified(x, norm, plus=plus, dropout=dropout), found)
    above = rectified > 0
    kept = found > 0
    torch.testing.assert_close(found[kept], rectified[kept] / 0.7)
    assert not found[~kept].any()
    assert 0.55 < float(kept.sum() / above.sum()) < 0.85


def fits_not(kind: str, device: str) -> dict[str, Any]:
    watched = nn.Dropout(0.3)
    watched.register_forward_hook(lambda module, args, output: None)
    other = torch.randn(2, 3, 1, 1).to(device)
    return {
        "another dropout": {"dropout": nn.Dropout2d(0.3)},
        "a watched dropout": {"dropout": watched},
        "everything dropped": {"dropout": nn.Dropout(1.0)},
        "a sum of another shape": {"plus": other},
        "a sum in other digits": {"plus": other.expand(2, 3, 8, 8).double()},
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "another dropout",
        "a watched dropout",
        "everything dropped",
        "a sum of another shape",
        "a sum in other digits",
    ],
)
def test_what_follows_a_norm_and_does_not_fit_is_torchs(kind: str, device: str) -> None:
    """With the norm: the kernel is one for all of it."""
    norm = nn.BatchNorm2d(3, track_running_stats=False).to(device)
    more = fits_not(kind, device)
    x = images(device)
    torch.manual_seed(0)
    wanted = norm_relu(x, norm, **more)
    torch.manual_seed(0)
    torch.testing.assert_close(own_rectified(x, norm, **more), wanted, rtol=1e-4, atol=1e-5)
    called = called_in(lambda: own_rectified(x, norm, **more))
    assert "trgp.batch_norm.default" not in called


def test_a_bias_is_added(device: str) -> None:
    layer, x = nn.Conv2d(3, 16, 3, padding=1, stride=2).to(device), images(device)
    with OwnKernels():
        own = layer(x)
    torch.testing.assert_close(own, layer(x), rtol=1e-3, atol=1e-3)


def test_runs_under_vmap_are_torchs(device: str) -> None:
    layer, x = nn.Conv2d(3, 4, 3).to(device), images(device)

    def under_vmap(weight: Tensor) -> Tensor:
        with OwnKernels():
            return torch.func.functional_call(layer, {"weight": weight}, (x,))

    found = torch.vmap(under_vmap)(torch.stack([layer.weight.detach()] * 2))
    torch.testing.assert_close(found[1], layer(x), rtol=1e-3, atol=1e-3)


def test_on_a_cpu_a_network_is_torchs() -> None:
    with own_kernels(torch.device("cpu")):
        assert torch.overrides._get_current_function_mode() is None


@pytest.mark.parametrize(
    ("layer", "shape", "told"),
    [
        (nn.BatchNorm1d(4, track_running_stats=False), (1, 4), "more than 1 value"),
        (nn.BatchNorm1d(4, track_running_stats=False), (3, 5), "contain 5 elements"),
        (nn.Conv2d(3, 4, 3), (2, 4, 8, 8), "to have 3 channels, but got 4"),
        (nn.Conv2d(3, 4, 5), (2, 3, 4, 4), "can't be greater than actual input size"),
        (nn.MaxPool2d(5), (2, 3, 4, 4), "Output size is too small"),
        (nn.MaxPool2d(2, padding=2), (2, 3, 4, 4), "at most half of"),
        (nn.MaxPool2d(2, stride=0), (2, 3, 4, 4), "stride"),
        (nn.Conv2d(3, 4, 3, stride=0), (2, 3, 4, 4), "non-positive stride"),
        (nn.Conv2d(3, 4, 3, padding=-1), (2, 3, 8, 8), "negative padding"),
    ],
    ids=[
        "one value",
        "other channels",
        "channels",
        "small",
        "small for a pool",
        "padding",
        "no stride of a pool",
        "no stride",
        "negative padding",
    ],
)
def test_what_torch_refuses_it_refuses_in_its_own_words(
    layer: nn.Module, shape: tuple[int, ...], told: str, device: str
) -> None:
    with OwnKernels(), pytest.raises((RuntimeError, ValueError), match=told):
        layer.to(device)(torch.randn(shape, device=device))
