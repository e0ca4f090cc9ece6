"""Where float64 is computed, and that bases come back to where the weights are."""

import pytest
import torch

from trgp.core.capture import Gram
from trgp.core.precision import doubled, home_of_float64
from trgp.core.subspace import extend


@pytest.mark.parametrize(
    ("device", "home"), [("mps", "cpu"), ("mps:0", "cpu"), ("cpu", "cpu"), ("cuda:1", "cuda:1")]
)
def test_a_device_without_float64_leaves_it_to_the_cpu(device: str, home: str) -> None:
    assert home_of_float64(torch.device(device)) == torch.device(home)


def test_float64_where_a_device_has_it_stays_where_it_is() -> None:
    wide = torch.randn(2, 3, dtype=torch.float64)
    assert doubled(wide) is wide
    narrow = torch.randn(2, 3)
    assert torch.equal(doubled(narrow), narrow.double())


def test_a_basis_comes_back_in_the_precision_of_the_memory() -> None:
    gram = Gram(torch.zeros(1, 5, 5, dtype=torch.float64))
    gram.add(torch.randn(1, 2, 5))
    extension = extend(torch.zeros(1, 5, 0), torch.zeros(1, dtype=torch.long), gram, threshold=1.0)
    assert extension.M.dtype == torch.float32
    assert extension.M.shape == (1, 5, 2)
