"""A network as a chain of layers with adjustable widths.

The chain is read from the network's `gates()`: units between layers, each produced by one linear
layer or convolution and read by the next, the last by the heads. A weight is opened as (outputs,
input units, inputs per unit and kernel), where each input unit is one column: a flattened map gives
its unit one input per position.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..draws import seed_of
from ..gates import HEADS, Gate
from ..types import Params
from .base import Network

Widths = Sequence[int]


@dataclass(frozen=True)
class Chain:
    """The layers of a network, first to last, and their widths."""

    layers: tuple[str, ...]
    """Names of the modules."""
    units: tuple[int, ...]
    """Outputs of each layer in the benchmark's network."""
    initial: Params
    """Initial parameters of the benchmark's network; new weights are drawn with their spread."""
    places: Mapping[str, int]
    """By name: the index of the layer whose units a weight, bias or norm layer's tensor belongs to.
    Heads come after the last layer; tensors without units are absent."""

    @property
    def weights(self) -> list[str]:
        """Names of the layers' weights."""
        return [f"{name}.weight" for name in self.layers]

    def shape(self, name: str, widths: Widths) -> tuple[int, ...]:
        """A tensor's shape for layers of these widths."""
        shape = tuple(self.initial[name].shape)
        place = self.places.get(name)
        if place is None:
            return shape
        after = place == len(self.layers)
        if len(shape) == 1:
            return shape if after else (widths[place],)
        outputs = shape[0] if after else widths[place]
        if place == 0:
            return outputs, *shape[1:]
        return outputs, shape[1] // self.units[place - 1] * widths[place - 1], *shape[2:]

    def seen(self, name: str, widths: Widths) -> int:
        """Number of input units of a weight: the previous layer's, or the input channels."""
        place = self.places[name]
        return widths[place - 1] if place else int(self.initial[name].shape[1])

    def opened(self, name: str, weight: Tensor, widths: Widths) -> Tensor:
        """Reshape a weight to (outputs, input units, inputs per unit); keep a vector unchanged."""
        if weight.dim() == 1:
            return weight
        return weight.reshape(len(weight), self.seen(name, widths), -1)

    def part(self, params: Params, widths: Widths) -> dict[str, Tensor]:
        """Cut the tensors to the first units of every layer."""
        return {
            name: tensor[tuple(slice(0, n) for n in self.shape(name, widths))].clone()
            for name, tensor in params.items()
        }

    def chosen(
        self, params: Params, widths: Widths, units: Sequence[Sequence[int]]
    ) -> dict[str, Tensor]:
        """Select units of every layer, in the order given; a unit may be repeated."""
        found = {}
        counts = [len(own) for own in units]
        for name, tensor in params.items():
            place = self.places.get(name)
            if place is None or (tensor.dim() == 1 and place == len(self.layers)):
                found[name] = tensor.clone()
                continue
            picked = self.opened(name, tensor, widths)
            if place < len(self.layers):
                picked = picked[list(units[place])]
            if place and tensor.dim() > 1:
                picked = picked[:, list(units[place - 1])]
            found[name] = picked.reshape(self.shape(name, counts)).clone()
        return found

    def drawn(self, names: Iterable[str], widths: Widths, *key: int | str) -> dict[str, Tensor]:
        """Draw tensors for these widths: normal weights with the spread of the initial ones.

        A weight with fewer inputs has a larger spread, by the root of the ratio. Biases and norm
        layers start from the network's initial values, repeated where there are more units.
        """
        found = {}
        for name in names:
            like, shape = self.initial[name], self.shape(name, widths)
            if len(shape) < 2:
                found[name] = like[torch.arange(*shape) % len(like)] if shape else like.clone()
                continue
            draw = torch.Generator().manual_seed(seed_of(*key, name))
            spread = float(like.std()) * math.sqrt(like[0].numel() / math.prod(shape[1:]))
            found[name] = (spread * torch.randn(shape, generator=draw)).to(like)
        return found


def chain_of(network: Network, method: str) -> Chain:
    """Read the network as a chain, or raise a ValueError that says why it is none."""
    module = network.module
    if not hasattr(module, "gates"):
        raise ValueError(
            f"{type(module).__name__} does not declare its units, which {method} needs; give it a "
            "method gates(), as the networks in trgp.benchmarks.models have."
        )
    gates: list[Gate] = module.gates()  # type: ignore[operator]
    try:
        chain = _chained(network, gates)
        _require_any_width(network, chain)
        return chain
    except _NoChainError as error:
        raise ValueError(
            f"{method} widens chains of linear layers and convolutions, and "
            f"{type(module).__name__} is none: {error}. Take an MLP, LeNet or AlexNet of "
            "trgp.benchmarks.models, or a chain of your own."
        ) from None


class _NoChainError(Exception):
    """The reason why a network is no chain."""


def _chained(network: Network, gates: Sequence[Gate]) -> Chain:
    module = network.module
    initial = network.initial_params()
    if not gates or gates[-1].name != HEADS:
        raise _NoChainError("its last units are not seen by the heads alone")
    layers = [_layer_of(module, gate) for gate in gates]
    for gate, after in zip(gates, layers[1:], strict=False):
        if gate.consumers != (after,):
            seen = ", ".join(gate.consumers)
            raise _NoChainError(f"the units of {gate.producers[0]} are read by {seen}")
    places = {
        name: place
        for place, gate in enumerate(gates)
        for producer in gate.producers
        for name in initial
        if name.startswith(f"{producer}.") and initial[name].dim()
    }
    for name in initial:
        if name.startswith(f"{HEADS}."):
            places[name] = len(gates)
        elif name not in places and initial[name].dim():
            raise _NoChainError(f"{name} belongs to no layer of it")
    units = tuple(gate.units for gate in gates)
    for layer, before in zip([*layers[1:], f"{HEADS}.0"], units, strict=True):
        if initial[f"{layer}.weight"].shape[1] % before:
            raise _NoChainError(f"{layer} does not see all units before it alike")
    return Chain(tuple(layers), units, initial, places)


def _require_any_width(network: Network, chain: Chain) -> None:
    """Raise an error if the network computes only with its original widths."""
    if network.example is None:
        return
    params = chain.drawn(chain.initial, [n + 1 for n in chain.units], 0)
    network.module.eval()
    try:
        with torch.no_grad():
            network(params, network.example, 0)
    except Exception as error:  # a user's network can fail in any way
        raise _NoChainError(f"with a unit more in every layer it fails ({error})") from error


def _layer_of(module: nn.Module, gate: Gate) -> str:
    """Name of the only layer with a weight matrix that produces a gate's units."""
    made = [(name, module.get_submodule(name)) for name in gate.producers]
    layers = [(name, part) for name, part in made if any(p.dim() > 1 for p in part.parameters())]
    if len(layers) != 1:
        raise _NoChainError(f"several layers produce the input of {gate.name}")
    name, part = layers[0]
    if not isinstance(part, (nn.Linear, nn.Conv2d)) or getattr(part, "groups", 1) > 1:
        raise _NoChainError(f"{name} is no linear layer and no convolution without groups")
    return name
