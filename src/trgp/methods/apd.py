"""Additive Parameter Decomposition, APD (Yoon et al., ICLR 2020).

A layer's weights in task t are S sigmoid(v_t) + T_t: shared weights under a mask, one number per
output, and task-specific sparse weights. Old tasks keep their masks; their T_j continue to train,
so that their weights stay constant while S moves. After every few tasks, the common part of
the T_j of a cluster of tasks is stored once, as a locally shared part L.

Differences from the published code: T_j are cut to their large entries when they are stored, not
only in evaluation, so that the counted entries are the stored ones; the best weights are those of
the lowest validation loss of any epoch; norm layers, which its network lacks, are per task, as
biases are.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from ..draws import order, seed_of
from ..options import check_count, check_number
from ..tree import level, put, tensors
from ..types import Params, Rate, State
from .adam import ADAM, adam, moments
from .base import About, Batch, Context, Grads, Method, Report
from .capacity import capacity
from .consolidation import clusters, shared_part
from .loss import cross_entropy
from .task_parts import layer_weights, own_parts

ADAPTIVE, MASK = "adaptive ", "mask "  # name prefixes of T (tasks, o, ...) and v_t (o,)


@dataclass(frozen=True)
class APD(Method):
    """Shared weights under per-task masks, plus sparse weights per task."""

    about: ClassVar[About] = About(
        family="growing",
        stores="shared weights; a mask, sparse weights and a head per task",
        paper="Yoon et al., ICLR 2020",
        task_id_at_test=True,
        several_heads=True,
        holds_network=True,
    )
    consumes: ClassVar[bool] = True
    moving: ClassVar[tuple[str, ...]] = (ADAM,)

    l1: float = 6e-4
    """Weight of the l1 penalty, the sum of all |T_j|."""
    cut: float = 6e-4
    """Magnitude up to which entries of T_j and L are set to 0."""
    decay: float = 1e-4
    """Weight decay of T_t and v_t, and of S in the first task: weight of half the squares."""
    drift: float = 100.0
    """Weight of half the squared distance of old tasks' weights from their stored values."""
    consolidate_every: int = 5
    """Number of tasks between consolidations, each of which adds clusters."""
    clusters: int = 2
    """Number of clusters that a consolidation adds."""
    spread: float = 0.01
    """Largest difference between a cluster's T_j at which an entry is stored once for all."""

    def __post_init__(self) -> None:
        for name in ("l1", "cut", "decay", "drift", "spread"):
            if getattr(self, name) != 0:
                check_number(name, getattr(self, name), above=0)
        check_count("consolidate_every", self.consolidate_every)
        check_count("clusters", self.clusters)

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The weights that are decomposed."""
        return layer_weights(self.network)

    def check(self) -> None:
        if not self.layers:
            raise ValueError(
                f"{type(self.network.module).__name__} has no layer before its heads whose "
                "weights apd could share; take a network with one."
            )

    def stackable(self) -> bool:
        """Return False: memory bandwidth bounds the steps, and vmapped runs save only overhead."""
        return False

    def begin_task(self, ctx: Context) -> tuple[Params, State]:
        params = dict(ctx.params)
        adaptive = tensors(level(ctx.state, "adaptive"))
        for name in self.layers:
            S = params[name]
            before = adaptive.get(name, S.new_empty(0, *S.shape))
            params[ADAPTIVE + name] = torch.cat([before, S.unsqueeze(0)])
            draw = torch.Generator().manual_seed(seed_of(ctx.seed, MASK + name, ctx.task))
            v, size = torch.empty(len(S)), 1 / math.sqrt(len(S))
            torch.nn.init.trunc_normal_(v, 0.0, size, -2 * size, 2 * size, generator=draw)
            params[MASK + name] = v.to(S)
        # Everything that stays constant while the task is learnt.
        kept = {key: ctx.state[key] for key in ctx.state if key not in ("adaptive", "shared")}
        if adaptive:
            masks = tensors(level(ctx.state, "masks"))
            kept["targets"] = {n: masked(params[n], masks[n]) + adaptive[n] for n in self.layers}
        trained = {*self.layers, *own_parts(self.network, ctx.task)} & self.network.trainable
        trained |= params.keys() - self.network.names
        return params, {**kept, ADAM: moments(params, trained)}

    def loss(self, params: Params, state: State, batch: Batch) -> Tensor:
        weights = self.composed(params, 0.0)
        fit = cross_entropy(self.network(weights, batch.x, batch.head), batch.y)
        return fit + torch.stack([self.penalty(n, params, state) for n in self.layers]).sum()

    def penalty(self, name: str, params: Params, state: State) -> Tensor:
        """Penalty on a layer's task-specific weights and on moving the weights of old tasks."""
        S, T, v = (params[prefix + name] for prefix in ("", ADAPTIVE, MASK))
        squares = T[-1].square().sum() + v.square().sum()
        targets = tensors(level(state, "targets"))
        if not targets:
            return self.l1 * T.abs().sum() + self.decay / 2 * (squares + S.square().sum())
        moved = masked(S, tensors(level(state, "masks"))[name]) + T[:-1] - targets[name]
        drift = self.drift / 2 * moved.square().sum()
        return self.l1 * T.abs().sum() + self.decay / 2 * squares + drift

    def step(
        self, params: Params, grads: Grads, state: State, batch: Batch, lr: Rate
    ) -> tuple[dict[str, Tensor], State]:
        return adam(params, grads, state, lr)

    def composed(self, params: Params, cut: float) -> dict[str, Tensor]:
        """The newest task's weights by their names in the network, from large entries of T only."""
        plain = {name: p for name, p in params.items() if name in self.network.names}
        for name in self.layers:
            own = large(params[ADAPTIVE + name][-1], cut)
            plain[name] = masked(params[name], params[MASK + name].unsqueeze(0))[0] + own
        return plain

    def weights_for(self, params: Params, state: State, task: int) -> Params:
        own = tensors(level(state, "own", str(task)))
        if own:
            return {**own, **{name: self.weight(name, state, task) for name in self.layers}}
        return self.composed(params, self.cut) if MASK + self.layers[0] in params else params

    def weight(self, name: str, state: State, task: int) -> Tensor:
        """Compute a finished task's weight from the stored parts."""
        S, masks, T = (tensors(level(state, key))[name] for key in ("shared", "masks", "adaptive"))
        found = masked(S, masks[task : task + 1])[0] + T[task]
        cluster = cluster_of(state, name, task)
        return found if cluster < 0 else found + tensors(level(state, "local"))[name][cluster]

    def end_task(self, ctx: Context) -> tuple[Params, State]:
        params = {name: p for name, p in ctx.params.items() if name in self.network.names}
        masks = tensors(level(ctx.state, "masks"))
        adaptive, every = {}, {}
        for name in self.layers:
            adaptive[name] = large(ctx.params[ADAPTIVE + name], self.cut)
            new = ctx.params[MASK + name].unsqueeze(0)
            every[name] = torch.cat([masks[name], new]) if masks else new
        own = {name: params[name].clone() for name in own_parts(self.network, ctx.task)}
        state: State = {
            **{key: ctx.state[key] for key in ctx.state if key not in (ADAM, "targets")},
            "shared": {name: params[name] for name in self.layers},
            "masks": every,
            "adaptive": adaptive,
        }
        state = put(state, own, "own", str(ctx.task))
        if (ctx.task + 1) % self.consolidate_every == 0:
            state = self.consolidated(state, ctx)
        return params, state

    def consolidated(self, state: State, ctx: Context) -> State:
        """Cluster the tasks of every layer again and return the new state."""
        count = ctx.task + 1
        most = self.clusters * count // self.consolidate_every
        found: dict[str, dict[str, Tensor]] = {"adaptive": {}, "local": {}, "member": {}}
        for name in self.layers:
            T = tensors(level(state, "adaptive"))[name].clone()
            before = [cluster_of(state, name, j) for j in range(count)]
            for j in range(count):
                if before[j] >= 0:
                    T[j] += tensors(level(state, "local"))[name][before[j]]
            known = len(tensors(level(state, "member")).get(name, ()))
            starts = [[j for j in range(known) if before[j] == c] for c in range(max(before) + 1)]
            starts += [[j] for j in range(known) if before[j] < 0]
            random = order(count, ctx.seed, f"clusters of {name}", ctx.task).tolist()
            starts += [[j] for j in random if [j] not in starts][: max(0, most - len(starts))]
            nearest = clusters(T, starts)
            local: list[Tensor] = []
            member = torch.full((count,), -1)
            for k in sorted(set(nearest)):
                own = [j for j in range(count) if nearest[j] == k]
                if len(own) > 1:
                    common, T[own] = shared_part(T[own], self.spread)
                    member[own] = len(local)
                    local.append(large(common, self.cut))
            found["adaptive"][name], found["member"][name] = T, member.to(T.device)
            found["local"][name] = torch.stack(local) if local else T[:0]
        return {**state, **found}

    def report(self, state: State) -> Report:
        return Report(figures=capacity(self.network, state))


def masked(S: Tensor, masks: Tensor) -> Tensor:
    """Apply masks (k, o) to S (o, ...), giving (k, o, ...)."""
    return S * torch.sigmoid(masks).view(*masks.shape, *[1] * (S.dim() - 1))


def large(T: Tensor, cut: float) -> Tensor:
    """Set the small entries of T to 0."""
    return torch.where(T.abs() > cut, T, torch.zeros_like(T)) if cut else T


def cluster_of(state: State, name: str, task: int) -> int:
    """A task's cluster in a layer, or -1 if it shares with no other task."""
    member: Mapping[str, Tensor] = tensors(level(state, "member"))
    return int(member[name][task]) if name in member and task < len(member[name]) else -1
