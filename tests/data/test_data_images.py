"""Pixels as tensors: layout, padding, resizing, normalisation, batches by index."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trgp.benchmarks.data import NORMALISATION, Normalisation, Tensors, as_rgb32, to_tensors
from trgp.benchmarks.data.images import resize


def pixels(n: int = 5, side: int = 28, channels: int = 1) -> Tensor:
    return torch.randint(0, 256, (n, channels, side, side), dtype=torch.uint8)


def test_the_stores_layout_becomes_channels_first() -> None:
    images = np.random.RandomState(0).randint(0, 256, (6, 4, 5, 3), np.uint8)
    tensors = to_tensors(images, np.arange(6))
    assert tensors.x.dtype == torch.uint8
    assert tensors.x.is_contiguous()
    np.testing.assert_array_equal(tensors.x.numpy(), images.transpose(0, 3, 1, 2))
    assert len(tensors) == 6


def test_a_batch_is_normalised_and_follows_the_index() -> None:
    norm = NORMALISATION["svhn"]
    tensors = Tensors(pixels(7, 8, 3), torch.arange(7), norm)
    index = torch.tensor([4, 0, 4])
    x, y = tensors.batch(index)
    mean, std = torch.tensor(norm.mean), torch.tensor(norm.std)
    expected = (tensors.x[index] / 255 - mean[:, None, None]) / std[:, None, None]
    torch.testing.assert_close(x, expected, rtol=0, atol=0)
    assert y.tolist() == [4, 0, 4]
    torch.testing.assert_close(tensors.batch(slice(1, 3))[0], tensors.batch(torch.arange(1, 3))[0])
    assert tensors.x.dtype == torch.uint8  # left as it was


def test_without_normalisation_pixels_are_divided_by_255() -> None:
    tensors = Tensors(torch.tensor([[0, 51, 255]], dtype=torch.uint8), torch.tensor([0]))
    torch.testing.assert_close(tensors.batch(slice(None))[0], torch.tensor([[0.0, 0.2, 1.0]]))


def test_floats_are_taken_as_they_are() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    got, _ = Tensors(x, torch.arange(3)).batch(torch.tensor([2, 1]))
    torch.testing.assert_close(got, x[[2, 1]], rtol=0, atol=0)


def test_a_subset_keeps_its_normalisation() -> None:
    tensors = Tensors(pixels(9), torch.arange(9), NORMALISATION["mnist"])
    part = tensors.subset(torch.tensor([8, 3])).to("cpu")
    torch.testing.assert_close(part.batch(slice(None))[0], tensors.batch(torch.tensor([8, 3]))[0])
    assert part.x.dtype == torch.uint8


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_grey_digits_are_padded_and_repeated(name: str) -> None:
    x = pixels()
    wide = as_rgb32(name, x)
    assert wide.shape == (5, 3, 32, 32)
    assert wide.dtype == torch.uint8
    for channel in range(3):
        assert torch.equal(wide[:, channel, 2:-2, 2:-2], x[:, 0])
    assert int(wide.sum()) == 3 * int(x.sum())  # the border is black
    batch, _ = Tensors(wide, torch.arange(5), NORMALISATION["mnist_padded"]).batch(
        torch.tensor([1, 1])
    )
    assert batch.is_contiguous()


def test_letters_are_resized_by_an_antialiased_cubic() -> None:
    x = pixels(3)
    wide = as_rgb32("notmnist", x)
    exact = torch.nn.functional.interpolate(
        x.double(), (32, 32), mode="bicubic", antialias=True
    ).clamp(0, 255)
    assert wide.shape == (3, 3, 32, 32)
    assert float((wide[:, :1].double() - exact).abs().max()) <= 0.501
    assert torch.equal(resize(x, 32, chunk=2), resize(x, 32))
    flat = torch.full((1, 1, 28, 28), 200, dtype=torch.uint8)
    assert as_rgb32("notmnist", flat).unique().tolist() == [200]


def test_a_resized_edge_does_not_wrap_around() -> None:
    x = torch.zeros(1, 1, 28, 28, dtype=torch.uint8)
    x[..., 14:] = 255
    row = as_rgb32("notmnist", x)[0, 0, 16].int()
    assert bool((row.diff() >= 0)[12:20].all())
    assert (int(row[0]), int(row[-1])) == (0, 255)


def test_images_of_the_right_form_pass_unchanged() -> None:
    x = pixels(2, 32, 3)
    assert torch.equal(as_rgb32("cifar10", x), x)


def test_the_constants_fit_their_sets() -> None:
    for name, norm in NORMALISATION.items():
        channels = 1 if "mnist" in name else 3
        assert len(norm.mean) == len(norm.std) == channels
        assert all(0 < value < 1 for value in (*norm.mean, *norm.std))


@pytest.mark.parametrize(
    ("x", "y", "norm", "says"),
    [
        (torch.zeros(2, 3, dtype=torch.int64), torch.arange(2), None, "uint8 or floats"),
        (torch.zeros(2, 3), torch.zeros(2), None, "labels as int64"),
        (torch.zeros(2, 3), torch.zeros(2, 1, dtype=torch.int64), None, "one axis"),
        (torch.zeros(3, 3), torch.arange(2), None, "one label per sample"),
        (torch.tensor(1.0), torch.arange(1), None, "one label per sample"),
        (torch.zeros(2, 3), torch.arange(2), NORMALISATION["mnist"], "float already"),
        (pixels(2), torch.arange(2), NORMALISATION["svhn"], "3 channels"),
        (pixels(2, 4, 3), torch.arange(2), Normalisation((0.1,) * 3, (0.1,) * 2), "channels"),
    ],
)
def test_tensors_that_do_not_fit_get_a_sentence(x: Any, y: Any, norm: Any, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        Tensors(x, y, norm)


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (torch.zeros(2, 1, 28, 28), "give uint8"),
        (pixels(2, 28, 2), "give uint8"),
        (pixels(2, 20), "20 x 20"),
    ],
)
def test_images_that_cannot_become_rgb32_get_a_sentence(x: Tensor, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        as_rgb32("mnist", x)
