"""One step of several runs at once: every tensor has the runs as its first axis.

The runs' losses do not depend on each other's parameters, so the gradient of their sum holds the
gradient of each.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from ..methods.base import Batch, Factors, Method, Params
from ..tree import State
from .gradients import factors_of, probed

Probes = dict[str, list[Tensor]]  # by weight: a zero for every call of its layer


def probes_for(
    method: Method, params: Params, state: State, batch: Batch, factored: Collection[str]
) -> Probes:
    """Zeros of the shapes that the factored layers' outputs have, for all runs."""
    if not factored:
        return {}
    runs = len(batch.y)
    with torch.no_grad(), probed(method.network.module, dict.fromkeys(factored)) as seen:
        own = _of_run(0, {"params": dict(params), "state": state, "given": _tensors(batch)})
        method.loss(own["params"], own["state"], _batch_of(batch, own["given"]))
    return {
        name: [probe.new_zeros(runs, *probe.shape).requires_grad_() for _, probe in calls]
        for name, calls in seen.items()
    }


def stacked_step(
    method: Method,
    params: Params,
    state: State,
    batch: Batch,
    lr: Tensor,
    trained: Collection[str],
    probes: Probes,
) -> tuple[dict[str, Tensor], State, Tensor]:
    """The parameters that change, what a step changes of the state, and every run's loss."""
    free = {n: params[n].detach().requires_grad_() for n in trained if n not in probes}

    def loss_of(
        free: Params, params: Params, state: State, given: dict[str, Tensor], probes: Probes
    ) -> tuple[Tensor, dict[str, list[Tensor]]]:
        with probed(method.network.module, probes) as seen:
            loss = method.loss({**params, **free}, state, _batch_of(batch, given))
        return loss, {name: [x for x, _ in calls] for name, calls in seen.items()}

    held = {name: tensor for name, tensor in params.items() if name not in free}
    given = _tensors(batch)
    wanted = [*free.values(), *(probe for calls in probes.values() for probe in calls)]
    with method.network.rounding():
        losses, inputs = torch.vmap(loss_of)(free, held, state, given, probes)
        ones = torch.ones_like(losses)
        found = iter(torch.autograd.grad(losses, wanted, ones, allow_unused=True))
    gradients = {name: next(found) for name in free}
    grads: dict[str, Tensor | Factors] = {n: g for n, g in gradients.items() if g is not None}
    for name in probes:
        calls = [(next(found), x) for x in inputs[name]]
        factors = factors_of(calls, params[name].dtype, axis=1)
        if factors is not None:
            grads[name] = factors

    def step_of(
        params: Params, grads: Any, state: State, given: dict[str, Tensor], lr: Tensor
    ) -> tuple[dict[str, Tensor], State]:
        new, changes = method.step(params, grads, state, _batch_of(batch, given), lr)
        return {name: tensor for name, tensor in new.items() if tensor is not params[name]}, changes

    with torch.no_grad():
        new, changes = torch.vmap(step_of)(dict(params), grads, state, given, lr)
    return new, changes, losses.detach()


def _tensors(batch: Batch) -> dict[str, Tensor]:
    """What of a batch differs from run to run."""
    given = {"x": batch.x, "y": batch.y}
    return given if batch.u is None else {**given, "u": batch.u}


def _batch_of(batch: Batch, given: dict[str, Tensor]) -> Batch:
    return batch._replace(x=given["x"], y=given["y"], u=given.get("u"))


def _of_run(k: int, tree: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda tensor: tensor[k], tree)
