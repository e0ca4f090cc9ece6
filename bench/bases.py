"""A task's bases for the layers of AlexNet: from the streamed Gram matrix, and by SVD of R."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from contenders import ALEXNET, Old, random_memory
from torch import Tensor

from trgp.core.capture import GramCapture, observing
from trgp.core.layers import Layer, Site
from trgp.core.plan import make_plan
from trgp.core.subspace import extend

# How many images the published code unfolds for each layer's R.
IMAGES = {"conv1": 24, "conv2": 100, "conv3": 100, "fc1": 125, "fc2": 125}
THRESHOLD = 0.97


class Case(NamedTuple):
    """One layer with the inputs of a task and the memory it has so far."""

    layer: Layer
    x: Tensor
    old: Old

    @property
    def site(self) -> Site:
        return self.layer.sites[0]


def cases(share: float, seed: int) -> Iterator[tuple[str, Case]]:
    torch.manual_seed(seed)
    net = ALEXNET.make().eval()
    olds = random_memory(net, share, seed)
    inputs: dict[str, Tensor] = {}

    def keep(layer: Layer, site: Site, x: Tensor) -> None:
        inputs[layer.name] = x

    layers = make_plan(net, ["head"], [], "shared").layers
    with torch.no_grad(), observing(layers.values(), keep):
        net(torch.randn(max(IMAGES.values()), *ALEXNET.shape))
    for name, layer in layers.items():
        yield name, Case(layer, inputs[name][: IMAGES[name]], olds[name])


def by_gram(case: Case) -> tuple[Tensor, Tensor]:
    """M extended, and which of its columns make the task's basis."""
    capture = GramCapture([case.layer])
    capture(case.layer, case.site, case.x)
    gram = capture.grams[case.layer.name]
    ranks = torch.tensor([case.old.M.shape[2]])
    found = extend(case.old.M, ranks, gram, threshold=THRESHOLD)
    return found.M[0], found.mask[0]


def by_svd(case: Case) -> tuple[Tensor, Tensor]:
    """The same from R itself: singular vectors of what M does not explain, pooled with M's own."""
    R = case.layer.columns(case.site, case.x)[0].mT.double()
    M = case.old.M[0].double()
    inside = M.mT @ R
    U, sigma, _ = torch.linalg.svd(R - M @ inside, full_matrices=False)
    held = torch.cat([inside.square().sum(1), sigma.square()])
    ranked, by_rank = held.sort(descending=True)
    count = int((ranked.cumsum(0) < THRESHOLD * R.square().sum()).sum()) + 1
    chosen = torch.zeros_like(held, dtype=torch.bool)
    chosen[by_rank[:count]] = True
    m = M.shape[1]
    fresh = U[:, chosen[m:]]
    mask = torch.cat([chosen[:m], chosen.new_ones(fresh.shape[1])])
    return torch.cat([M, fresh], 1).to(case.old.M.dtype), mask


WAYS: dict[str, Callable[[Case], tuple[Tensor, Tensor]]] = {
    "Gram + eigh": by_gram,
    "SVD of R": by_svd,
}


def check(name: str, case: Case) -> None:
    """Both must choose the same old columns and add the same directions."""
    (M, mask), (N, other) = by_gram(case), by_svd(case)
    same = M.shape == N.shape and bool((mask == other).all())
    if not same or float((N - M @ (M.mT @ N)).norm()) > 1e-3:
        raise SystemExit(f"{name}: Gram + eigh and SVD do not give the same bases.")
