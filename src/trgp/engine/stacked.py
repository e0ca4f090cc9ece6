"""One step of several runs at once: every tensor has the runs as its first axis.

The runs' losses do not depend on each other's parameters, so the gradient of their sum holds the
gradient of each.
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
    """Where the gradient of a layer's output passes by, and which of its axes is the runs'."""

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
    """The parameters that change, what a step changes of the state, and every run's loss."""
    # Factored weights too, whose gradients nobody asks for: so their outputs depend on something.
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
                # The place, not the tensor, which what follows may change.
                where = Output(get_gradient_edge(of_all), maybe_get_bdim(output))
                outputs.setdefault(name, []).append(where)
                inputs.setdefault(name, []).append(x)
                prepare(name, x.detach())

        def prepare(name: str, x: Tensor) -> None:
            if len(inputs[name]) > 1:  # what was made of the first call's is not of all
                early.pop(name, None)
                return
            with torch.no_grad(), method.network.exact(), aside(len(early)):
                # Flattened there, where a copy is kept for as long as it is read.
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
    finally:  # also where it failed: a capture cannot end while a branch is open
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
    """What of a batch differs from run to run."""
    given = {"x": batch.x, "y": batch.y}
    return given if batch.u is None else {**given, "u": batch.u}


def _batch_of(batch: Batch, given: dict[str, Tensor]) -> Batch:
    return batch._replace(x=given["x"], y=given["y"], u=given.get("u"))


def draws(network: Network, x: Tensor) -> bool:
    """Whether a pass of the network in training draws random numbers, as for dropout."""
    params = network.initial_params()
    network.module.train()
    before = _random_state(network.device)
    with torch.no_grad():
        network(params, x, 0)
    return not before.equal(_random_state(network.device))


def vmaps(network: Network, x: Tensor) -> bool:
    """Whether torch can compute the network for several sets of parameters at once."""
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
