"""Progressive Neural Networks, PNN (Rusu et al., 2016).

Every task has its own column, a narrow network. Layer l of a new column reads the layer below it
and, through an adapter, the inputs of layer l in all old columns:

    h_l = f(W_l h_{l-1} + U_l relu(V_l [a_1 h_{l-1}^1; ...; a_k h_{l-1}^k]))

with a learnt factor a_j per old column, V_l from all old units to the number of units that the new
column has there, and U_l of the shape of W_l. V mixes units in the same way at each position of a
map (for a convolution it is a 1 x 1 convolution). The heads have adapters too; the first layer has
none. Old columns are frozen, in evaluation mode.

The paper's code does not run on these benchmarks: widths are chosen so that the columns of all
tasks have about the published size, and training uses Adam, as in the other growing methods.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..draws import seed_of
from ..gates import HEADS
from ..options import check_number
from ..tree import level, put, tensors
from ..types import Params, Rate, State
from .adam import ADAM, adam, moments
from .base import About, Batch, Context, Grads, Method, Network, Report
from .capacity import capacity
from .chain import Chain, chain_of
from .task_parts import own_parts

COLUMN = "column "  # name prefix of old columns' tensors, as in 'column 0 fc1.weight'
LATERAL = "lateral "  # name prefix of adapters, as in 'lateral fc1 U'
ALPHA = 0.1  # initial standard deviation of the factors


@dataclass(frozen=True)
class PNN(Method):
    """Train a narrow network per task with lateral inputs from all old ones."""

    about: ClassVar[About] = About(
        family="growing",
        stores="a narrow network and adapters per task",
        paper="Rusu et al., 2016",
        task_id_at_test=True,
        several_heads=True,
        holds_network=True,
    )
    consumes: ClassVar[bool] = True
    moving: ClassVar[tuple[str, ...]] = (ADAM,)
    resizes: ClassVar[bool] = True

    width: float = 0.17
    """Units of a column, as a share of the network's units in every layer."""

    def __post_init__(self) -> None:
        check_number("width", self.width, above=0)

    def bind(self, network: Network) -> Self:
        return super().bind(cast(Network, Columns(network)))

    @cached_property
    def chain(self) -> Chain:
        return chain_of(self.network, "pnn")

    @cached_property
    def widths(self) -> list[int]:
        """Units of a column, layer by layer."""
        return [max(1, round(self.width * units)) for units in self.chain.units]

    def check(self) -> None:
        chain_of(self.network, "pnn")  # raises if the network is no chain

    def stackable(self) -> bool:
        """Return False: a step computes one column per task so far."""
        return False

    def begin_task(self, ctx: Context) -> tuple[Params, State]:
        chain, key = self.chain, (ctx.seed, "column", ctx.task)
        params = chain.drawn(chain.initial, self.widths, *key)
        if ctx.task:
            params |= self.adapters(ctx)
        used = {*chain.weights, *own_parts(self.network, ctx.task)} & self.network.trainable
        trained = [n for n in params if n in used or n.startswith(LATERAL)]
        return params, {**ctx.state, ADAM: moments(params, trained)}

    def adapters(self, ctx: Context) -> dict[str, Tensor]:
        """Draw a task's adapters: for all layers but the first, and for its head."""
        found: dict[str, Tensor] = {}
        names = dict(zip(self.chain.layers[1:], self.chain.weights[1:], strict=True))
        names[HEADS] = f"{HEADS}.{ctx.task}.weight"
        made = self.chain.drawn(names.values(), self.widths, ctx.seed, "adapter", ctx.task)
        for (layer, weight), units in zip(names.items(), self.widths, strict=True):
            U = made[weight]
            draw = torch.Generator().manual_seed(seed_of(ctx.seed, LATERAL + layer, ctx.task))
            old = units * ctx.task
            V = torch.randn(units, old, generator=draw) / old**0.5
            alpha = ALPHA * torch.randn(ctx.task, generator=draw)
            own = {"U": U, "V": V.to(U), "alpha": alpha.to(U)}
            found |= {f"{LATERAL}{layer} {key}": tensor for key, tensor in own.items()}
        return found

    def step(
        self, params: Params, grads: Grads, state: State, batch: Batch, lr: Rate
    ) -> tuple[dict[str, Tensor], State]:
        return adam(params, grads, state, lr)

    def weights_for(self, params: Params, state: State, task: int) -> Params:
        column = column_of(state, task) or dict(params)
        alpha = column.get(f"{LATERAL}{HEADS} alpha")
        old = 0 if alpha is None else len(alpha)
        before = {
            f"{COLUMN}{j} {name}": tensor
            for j in range(old)
            for name, tensor in column_of(state, j).items()
        }
        return {**column, **before}

    def end_task(self, ctx: Context) -> tuple[Params, State]:
        own = own_parts(self.network, ctx.task)
        column = [n for n in ctx.params if n.startswith(LATERAL) or n in self.chain.weights]
        state: State = {key: value for key, value in ctx.state.items() if key != ADAM}
        state = put(state, {n: ctx.params[n] for n in column}, "columns", str(ctx.task))
        state = put(state, {n: ctx.params[n] for n in own}, "own", str(ctx.task))
        return ctx.params, state

    def report(self, state: State) -> Report:
        return Report(figures=capacity(self.network, state))


def column_of(state: State, task: int) -> dict[str, Tensor]:
    """Tensors of a finished task's column; empty for any other task."""
    parts = (tensors(level(state, part, str(task))) for part in ("columns", "own"))
    return {name: tensor for part in parts for name, tensor in part.items()}


class Columns:
    """A network that computes with several columns; otherwise the same as the wrapped network.

    Its parameters are the newest column by the network's names, its adapters, and all old columns.
    """

    def __init__(self, network: Network) -> None:
        self._network = network

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def __call__(self, params: Params, x: Tensor, head: int) -> Tensor:
        newest: dict[str, Tensor] = {}
        old: dict[int, dict[str, Tensor]] = {}
        for key, tensor in params.items():
            if key.startswith(COLUMN):
                place, name = key.removeprefix(COLUMN).split(" ", 1)
                old.setdefault(int(place), {})[name] = tensor
            else:
                newest[key] = tensor
        seen: list[Mapping[str, Tensor]] = []
        with torch.no_grad(), self._evaluating():
            for j in sorted(old):
                seen.append(self._inputs_of(old[j], x, j, seen)[1])
        return self._inputs_of(newest, x, head, seen)[0]

    def _inputs_of(
        self, column: Params, x: Tensor, head: int, seen: list[Mapping[str, Tensor]]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """A column's logits and its layers' inputs, from the layers' inputs in older columns."""
        module = self._network.module
        adapters: dict[str, dict[str, Tensor]] = {}
        plain: dict[str, Tensor] = {}
        for key, tensor in column.items():
            if key.startswith(LATERAL):
                layer, which = key.removeprefix(LATERAL).rsplit(" ", 1)
                adapters.setdefault(layer, {})[which] = tensor
            else:
                plain[key] = tensor
        inputs: dict[str, Tensor] = {}

        def see(name: str, layer: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
            inputs[name] = args[0]
            if name not in adapters:
                return output
            return output + lateral(layer, [each[name] for each in seen], **adapters[name])

        layers = {name: name for name in chain_layers(module)} | {HEADS: f"{HEADS}.{head}"}
        handles = [
            module.get_submodule(path).register_forward_hook(partial(see, name))
            for name, path in layers.items()
        ]
        try:
            return self._network(plain, x, head), inputs
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Put the network in evaluation mode within the context."""
        modes = {part: part.training for part in self._network.module.modules()}
        self._network.module.eval()
        try:
            yield
        finally:
            for part, mode in modes.items():
                part.training = mode


def chain_layers(module: nn.Module) -> list[str]:
    """Names of the layers that have adapters: those that read units."""
    return [name for gate in module.gates() for name in gate.consumers]  # type: ignore[operator]


def lateral(layer: nn.Module, inputs: list[Tensor], U: Tensor, V: Tensor, alpha: Tensor) -> Tensor:
    """The adapter's addition to a layer's output, from that layer's inputs in old columns."""
    units = V.shape[1] // len(inputs)
    opened = [x.reshape(len(x), units, -1) * a for x, a in zip(inputs, alpha, strict=True)]
    reduced = (V @ torch.cat(opened, 1)).relu()
    reduced = reduced.reshape(len(reduced), -1, *inputs[0].shape[2:])
    if isinstance(layer, nn.Conv2d):
        found: Tensor = layer._conv_forward(reduced, U, None)
        return found
    return F.linear(reduced, U)
