"""Hard Attention to the Task, HAT (Serra, Suris, Miron and Karatzoglou, ICML 2018).

Every task has a gate a = sigmoid(s e) per unit, learnt with the weights while s grows from 1/s_max
to s_max within an epoch. a^max is the maximum of old tasks' gates; the gradient of a weight from
unit i to unit o is multiplied by 1 - min(a^max_o, a^max_i), so that it stays where an old task uses
both. In a head that all tasks share, every output counts as used.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from ..draws import seed_of
from ..gates import HEADS, Gate
from ..options import check_number
from ..tree import level, put, tensors
from ..types import Params, Rate, State
from .base import GATE, About, Batch, Context, Grads, Method, Report, sgd
from .limited import shortened
from .loss import cross_entropy

OWN = "embedding "  # name prefix of the embeddings among the parameters
LARGEST = 6.0  # bound of an embedding's entries; beyond it a gate no longer learns
CLIP = 10_000.0  # of the gradient's norm, as published
LOGITS = "logits"  # the outputs of a shared head: always in use and never gated


@dataclass(frozen=True)
class HAT(Method):
    """Gate units per task and freeze weights between units that old tasks use."""

    about: ClassVar[About] = About(
        family="masks",
        stores="a gate a unit and task",
        paper="Serra et al., ICML 2018",
        task_id_at_test=True,
    )
    consumes: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("progress",)

    s_max: float = 400.0
    """Steepness of the gates at the end of an epoch and in evaluation."""
    sparsity: float = 0.75
    """Weight c of the sparsity penalty: the share of unused capacity that a task takes."""

    def __post_init__(self) -> None:
        check_number("s_max", self.s_max, above=0)
        if self.sparsity != 0:
            check_number("sparsity", self.sparsity, above=0)

    @cached_property
    def gates(self) -> list[Gate]:
        """The network's units, as it declares them."""
        gates: list[Gate] = self.network.module.gates()  # type: ignore[operator]
        return gates

    def check(self) -> None:
        if not hasattr(self.network.module, "gates"):
            raise ValueError(
                f"{type(self.network.module).__name__} does not declare its units, which hat "
                "needs; give it a method gates(), as the networks in trgp.benchmarks.models have."
            )
        if not self.gates:
            raise ValueError(
                f"{type(self.network.module).__name__} has no hidden units for hat to gate; take "
                "a network with some."
            )
        for gate in self.gates:
            try:
                self.network.module.get_submodule(gate.module(0))
            except AttributeError as error:
                raise ValueError(
                    f"{type(self.network.module).__name__} has no module '{gate.module(0)}', whose "
                    "input its gates() list; give the module that name, a single head too."
                ) from error

    def begin_task(self, ctx: Context) -> tuple[Params, State]:
        draw = torch.Generator().manual_seed(seed_of(ctx.seed, "embeddings", ctx.task))
        like = ctx.params[min(ctx.network.trainable)]
        own = {
            OWN + gate.name: torch.randn(gate.units, generator=draw).to(like) for gate in self.gates
        }
        return {**ctx.params, **own}, ctx.state

    def steepness(self, progress: Rate) -> Rate:
        """s, from 1/s_max at an epoch's first batch to s_max at its last."""
        return 1 / self.s_max + (self.s_max - 1 / self.s_max) * progress

    def opened(self, params: Params, s: Rate) -> dict[str, Tensor]:
        """Gates of the task that is being learnt."""
        return {g.name: torch.sigmoid(s * params[OWN + g.name]) for g in self.gates}

    def gated(self, params: Params, open_: Mapping[str, Tensor], head: int) -> Params:
        """Add the gates to the parameters, under the names that the network reads."""
        plain = {name: p for name, p in params.items() if not name.startswith(OWN)}
        return plain | {GATE + g.module(head): open_[g.name] for g in self.gates}

    def loss(self, params: Params, state: State, batch: Batch) -> Tensor:
        a = self.opened(params, self.steepness(batch.progress))
        logits = self.network(self.gated(params, a, batch.head), batch.x, batch.head)
        return cross_entropy(logits, batch.y) + self.sparsity * self.taken(a, state)

    def taken(self, a: Mapping[str, Tensor], state: State) -> Tensor:
        """Share of the unused capacity that this task opens."""
        used = tensors(level(state, "used"))
        free = {name: 1 - used[name] if used else torch.ones_like(gate) for name, gate in a.items()}
        opened = torch.stack([(a[name] * free[name]).sum() for name in a]).sum()
        # If no capacity is left, there is none to save.
        return opened / torch.stack([f.sum() for f in free.values()]).sum().clamp(min=1e-6)

    def step(
        self, params: Params, grads: Grads, state: State, batch: Batch, lr: Rate
    ) -> tuple[dict[str, Tensor], State]:
        own = {name: g for name, g in grads.items() if isinstance(g, Tensor)}
        own |= self.compensated(params, own, self.steepness(batch.progress))
        used = tensors(level(state, "used"))
        if used:
            own |= self.masked(own, used)
        new = sgd(params, shortened(own, CLIP), lr)
        clamped = {n: p.clamp(-LARGEST, LARGEST) for n, p in new.items() if n.startswith(OWN)}
        return new | clamped, {}

    def compensated(self, params: Params, grads: Params, s: Rate) -> dict[str, Tensor]:
        """Rescale the embeddings' gradients as if s were 1 throughout the annealing."""
        changed = {}
        for name in grads:
            if name.startswith(OWN):
                e = params[name]
                steep = torch.cosh((s * e).clamp(-50, 50)) + 1
                changed[name] = grads[name] * (self.s_max / s) * steep / (torch.cosh(e) + 1)
        return changed

    def masked(self, grads: Params, used: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of weights and norm layers, masked where old tasks use them."""
        changed = {}
        for name, (after, before, groups) in self.units_of.items():
            if name in grads:
                g = grads[name]
                hold = used[after] if after in used else g.new_ones(len(g))
                hold = hold.view(-1, *[1] * (g.dim() - 1))
                if before is not None:
                    each = groups * g.shape[1] // len(used[before])
                    enters = used[before].repeat_interleave(each).view(groups, -1)
                    # A unit sees only the inputs of its own group.
                    enters = enters.repeat_interleave(len(g) // groups, 0)
                    hold = torch.minimum(hold, enters.view(*enters.shape, *[1] * (g.dim() - 2)))
                changed[name] = g * (1 - hold)
        return changed

    @cached_property
    def units_of(self) -> dict[str, tuple[str, str | None, int]]:
        """By parameter: the gate of its output units, the gate of its input units if any, and the
        number of groups of a convolution."""
        feeds = {layer: gate.name for gate in self.gates for layer in gate.producers}
        enters = {layer: gate.name for gate in self.gates for layer in gate.consumers}
        if not self.network.separate_heads:
            feeds[f"{HEADS}.0"], enters[f"{HEADS}.0"] = LOGITS, HEADS
        found: dict[str, tuple[str, str | None, int]] = {}
        for name, param in self.network.module.named_parameters():
            layer = name.rpartition(".")[0]
            if layer in feeds:
                before = enters.get(layer) if param.dim() > 1 else None
                groups = getattr(self.network.module.get_submodule(layer), "groups", 1)
                found[name] = feeds[layer], before, groups
        return found

    def end_task(self, ctx: Context) -> tuple[Params, State]:
        """Fix the task's gates at s_max and add them to the units in use."""
        a = self.opened(ctx.params, self.s_max)
        used = tensors(level(ctx.state, "used"))
        used = {n: torch.maximum(used[n], gate) if used else gate for n, gate in a.items()}
        state = put(put(ctx.state, a, "gates", str(ctx.task)), used, "used")
        averages = {name: ctx.params[name].clone() for name in self.network.buffers}
        if averages:  # of norm layers; they change again in later tasks
            state = put(state, averages, "averages", str(ctx.task))
        return {n: p for n, p in ctx.params.items() if not n.startswith(OWN)}, state

    def weights_for(self, params: Params, state: State, task: int) -> Params:
        kept = tensors(level(state, "gates", str(task)))
        head = task if self.network.separate_heads else 0
        if kept:
            averages = tensors(level(state, "averages", str(task)))
            return self.gated({**params, **averages}, kept, head)
        if OWN + self.gates[0].name in params:
            return self.gated(params, self.opened(params, self.s_max), head)
        return params

    def report(self, state: State) -> Report:
        gates = [
            a for t in level(state, "gates") for a in tensors(level(state, "gates", t)).values()
        ]
        used = list(tensors(level(state, "used")).values())
        if not gates:
            return Report()
        every, whole = torch.cat(gates), torch.cat(used)
        undecided = ((every > 0.05) & (every < 0.95)).double().mean()
        return Report(
            figures={
                "share of gates between 0.05 and 0.95": float(undecided),
                "share of units that some task uses": float((whole > 0.5).double().mean()),
            }
        )
