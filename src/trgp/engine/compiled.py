"""Loss and gradient of a batch as one function compiled by torch.

Forward and backward pass are traced into one graph of tensor operations, anew for every task, and
torch's compiler fuses them. Equal graphs are compiled once per process, even if they belong to
different runs, tasks or heads. Graphs that read more than the network's parameters and the batch,
such as bases that grow, are not compiled. Dropout draws the same numbers as in eager steps.
"""

import warnings
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass

import torch
import torch._inductor.config
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from ..methods.base import Batch, Factors, Grads, Method, Network
from ..types import Params, State
from .gradients import loss_and_gradients
from .outside import LeavingTorch

_COMPILED: dict[Hashable, Callable[..., Sequence[Tensor]]] = {}


class Compiler:
    """Compiled gradients of one task of a run, called like `loss_and_gradients`."""

    def __init__(self, batch_size: int) -> None:
        """Compile for this batch size; other sizes, such as an epoch's last, are not worth it."""
        self._size = batch_size
        self._made: dict[Hashable, _Compiled | None] = {}

    def __call__(
        self,
        method: Method,
        params: Params,
        state: State,
        batch: Batch,
        trained: Collection[str],
        factored: Collection[str] = (),
    ) -> tuple[Tensor, Grads]:
        found = None
        # Running statistics would be updated as a side effect.
        if len(batch.y) == self._size and not method.network.buffers:
            key = batch.task, batch.head, batch.first, frozenset(trained), frozenset(factored)
            if key not in self._made:
                self._made[key] = _compiled(method, params, state, batch, trained, factored)
            found = self._made[key]
        if found is None:
            return loss_and_gradients(method, params, state, batch, trained, factored)
        return found(method.network, params, batch)


@dataclass(frozen=True)
class _Compiled:
    function: Callable[..., Sequence[Tensor]]
    reads: tuple[str, ...]
    """Names of the parameters it takes, after the samples and their labels."""
    gives: tuple[tuple[str, int], ...]
    """Gradients it returns after the loss: the name of each and its number of tensors."""

    def __call__(self, network: Network, params: Params, batch: Batch) -> tuple[Tensor, Grads]:
        given = [batch.x, batch.y, *(params[name] for name in self.reads)]
        # The graph contains the casts to a lower precision, but not how products round.
        plain = torch.autocast(network.device.type, enabled=False)
        with torch.no_grad(), network.rounding(), plain:
            loss, *parts = self.function(*given)
        grads: dict[str, Tensor | Factors] = {}
        left = iter(parts)
        for name, count in self.gives:
            own = [next(left) for _ in range(count)]
            grads[name] = Factors(*own) if count > 1 else own[0]
        return loss, grads


def _compiled(
    method: Method,
    params: Params,
    state: State,
    batch: Batch,
    trained: Collection[str],
    factored: Collection[str],
) -> _Compiled | None:
    """Compile a task; None if that fails, or if the loss reads more than parameters and batch."""
    gives: list[tuple[str, int]] = []

    def compute(x: Tensor, y: Tensor, *tensors: Tensor) -> list[Tensor]:
        own = dict(zip(params, tensors, strict=True))
        now = batch._replace(x=x, y=y)
        loss, grads = loss_and_gradients(method, own, state, now, trained, factored)
        parts = {n: g if isinstance(g, Factors) else (g,) for n, g in grads.items()}
        gives[:] = [(name, len(each)) for name, each in parts.items()]
        return [loss, *(tensor for each in parts.values() for tensor in each)]

    try:
        with LeavingTorch():
            traced = make_fx(compute)(batch.x, batch.y, *params.values()).graph
        traced.eliminate_dead_code()
        places = [node for node in traced.nodes if node.op == "placeholder"]
        read = [n for n, place in zip(params, places[2:], strict=True) if place.users]
        others = any(node.op == "get_attr" or _in_place(node) for node in traced.nodes)
        if others or not method.network.names.issuperset(read):
            return None
        given = [batch.x, batch.y, *(params[name] for name in read)]
        with method.network.rounding():
            function = _once_compiled(_without_unused(traced), given)
    except Exception as error:  # on any error, the steps run uncompiled
        warnings.warn(
            f"The network cannot be compiled ({type(error).__name__}: {error}) and runs "
            "uncompiled; give --engine captured to skip compilation.",
            stacklevel=2,
        )
        return None
    return _Compiled(function, tuple(read), tuple(gives))


def _in_place(node: fx.Node) -> bool:
    """Whether a node changes a tensor: dropout on a CPU does, and would be compiled wrongly."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _without_unused(traced: fx.Graph) -> fx.GraphModule:
    """Drop unused inputs and rename the others by place, so that equal graphs have equal code."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for k, node in enumerate(traced.nodes):
        if node.op != "placeholder":
            args = fx.map_arg(node.args, copies.__getitem__)
            kwargs = fx.map_arg(node.kwargs, copies.__getitem__)
            copies[node] = graph.create_node(node.op, node.target, args, kwargs)
        elif node.users or k < 2:  # the samples and labels stay
            copies[node] = graph.placeholder(f"given_{len(copies)}")
    return fx.GraphModule(nn.Module(), graph)


def _once_compiled(
    module: fx.GraphModule, given: Sequence[Tensor]
) -> Callable[..., Sequence[Tensor]]:
    shapes = tuple((t.shape, t.stride(), t.dtype, t.device) for t in given)
    key = module.code, shapes, torch.get_float32_matmul_precision()
    if key not in _COMPILED:
        # Dropout draws in memory order; with the layout kept, this is the order of eager steps.
        options = {"fallback_random": True, "layout_optimization": False}
        # Kernels chosen by timing would make the bits vary from process to process.
        if hasattr(torch._inductor.config, "deterministic"):
            options["deterministic"] = True
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about its own parts
            _COMPILED[key] = torch._inductor.compile(module, list(given), options=options)
    return _COMPILED[key]
