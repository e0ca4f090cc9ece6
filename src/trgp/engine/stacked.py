"""One step of several vmapped runs: every tensor has the runs as its first axis.

A run's loss does not depend on the other runs' parameters, so the gradient of the summed loss holds
the gradient of each.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, maybe_get_bdim
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..core.branches import aside, join
from ..methods.base import EARLY, Batch, Factors, Method, Network
from ..types import Params, State
from .gradients import factors_of, watched


class Output(NamedTuple):
    """The autograd edge of a layer's output, and the axis of the runs in it."""

    edge: GradientEdge
    axis: int


def stacked_step(
    method: Method,
    params: Params,
    state: State,
    batch: Batch,
    lr: Tensor,
    trained: Collection[str],
    factored: Collection[str],
) -> tuple[dict[str, Tensor], State, Tensor]:
    """Return the changed parameters, the changes of the state, and every run's loss."""
    # Factored weights get no gradient, but put their layers' outputs into autograd's graph.
    free = {n: params[n].detach().requires_grad_() for n in trained}
    held = {name: tensor for name, tensor in params.items() if name not in free}
    given = _tensors(batch)
    outputs: dict[str, list[Output]] = {}

    def loss_of(
        free: Params, params: Params, state: State, given: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, list[Tensor]], dict[str, State]]:
        inputs: dict[str, list[Tensor]] = {}
        early: dict[str, State] = {}

        def see(name: str, x: Tensor, output: Tensor) -> None:
            of_all = get_unwrapped(output)
            if of_all.requires_grad:
                # The edge, not the tensor, which later operations may change in place.
                where = Output(get_gradient_edge(of_all), maybe_get_bdim(output))
                outputs.setdefault(name, []).append(where)
                inputs.setdefault(name, []).append(x)
                prepare(name, x.detach())

        def prepare(name: str, x: Tensor) -> None:
            if len(inputs[name]) > 1:  # the first call's result does not cover all
                early.pop(name, None)
                return
            with torch.no_grad(), method.network.exact(), aside(len(early)):
                # Flattened in the branch, which keeps a copy for as long as it is read.
                early[name] = method.early(name, x.flatten(0, -2), {**params, **free}, state)

        with watched(method.network.module, factored, see):
            loss = method.loss({**params, **free}, state, _batch_of(batch, given))
        return loss, inputs, early

    plain = [name for name in free if name not in factored]
    try:
        with method.network.rounding():
            losses, inputs, early = torch.vmap(loss_of)(free, held, state, given)
            wanted: list[Any] = [free[name] for name in plain]
            wanted += [output.edge for calls in outputs.values() for output in calls]
            ones = torch.ones_like(losses)
            found = iter(torch.autograd.grad(losses, wanted, ones, allow_unused=True))
    finally:  # also on failure: a capture cannot end while a branch is open
        join()
    gradients = {name: next(found) for name in plain}
    grads: dict[str, Tensor | Factors] = {n: g for n, g in gradients.items() if g is not None}
    for name, calls in outputs.items():
        deltas = [(next(found), output.axis) for output in calls]
        moved = [None if delta is None else delta.movedim(axis, 0) for delta, axis in deltas]
        pairs = list(zip(moved, inputs[name], strict=True))
        factors = factors_of(pairs, params[name].dtype, axis=1)
        if factors is not None:
            grads[name] = factors

    def step_of(
        params: Params, grads: Any, state: State, given: dict[str, Tensor], lr: Tensor
    ) -> tuple[dict[str, Tensor], State]:
        new, changes = method.step(params, grads, state, _batch_of(batch, given), lr)
        return {name: tensor for name, tensor in new.items() if tensor is not params[name]}, changes

    with torch.no_grad():
        seen = {**state, EARLY: early}
        new, changes = torch.vmap(step_of)(dict(params), grads, seen, given, lr)
    return new, changes, losses.detach()


def _tensors(batch: Batch) -> dict[str, Tensor]:
    """Return the tensors of a batch that differ from run to run."""
    given = {"x": batch.x, "y": batch.y}
    return given if batch.u is None else {**given, "u": batch.u}


def _batch_of(batch: Batch, given: dict[str, Tensor]) -> Batch:
    return batch._replace(x=given["x"], y=given["y"], u=given.get("u"))


def draws(network: Network, x: Tensor) -> bool:
    """Whether a training pass of the network draws random numbers, such as dropout's."""
    params = network.initial_params()
    network.module.train()
    before = _random_state(network.device)
    with torch.no_grad():
        network(params, x, 0)
    return not before.equal(_random_state(network.device))


def vmaps(network: Network, x: Tensor) -> bool:
    """Whether torch can vmap the network over several sets of parameters."""
    params = {n: torch.stack([p, p]) for n, p in network.initial_params().items()}
    try:
        with torch.no_grad():
            torch.vmap(lambda own: network(own, x, 0))(params)
    except Exception:  # a user's network can fail in any way
        return False
    return True


def _random_state(device: torch.device) -> Tensor:
    on_gpu = device.type == "cuda"
    return torch.cuda.get_rng_state(device) if on_gpu else torch.get_rng_state()
