"""Dynamically Expandable Networks, DEN (Yoon et al., ICLR 2018).

The first task learns sparse weights, by l1. Each later one goes through four phases:

- selection: its head learns on the frozen network, under l1; units that a path of nonzero weights
  connects to the head are selected,
- selective retraining, for the task's own epochs: weights between selected units learn,
- expansion, if the training loss is still above tau: every layer gets new units, whose weights
  learn under a group lasso; units whose incoming weights are all 0 are removed again,
- splitting: units whose incoming weights moved farther than sigma get their old weights back, and a
  copy of each keeps the new ones; then the network learns again under a penalty that holds it near
  its weights before the task.

A task uses the units that exist at its end. A proximal step after each Adam step makes zeros.
Differences from the published code, which is for perceptrons with one-vs-rest outputs: the loss is
cross-entropy, filters are units, selection follows all outputs, and proximal steps are scaled by
the learning rate. Splitting takes at most as many units as expansion adds, those that moved
farthest; the published code splits ten, those that moved least, and only after an expansion.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..gates import HEADS
from ..options import check_count, check_number
from ..tree import level, tensors
from ..types import Params, Rate, State
from .base import About, Batch, Child, Context, Grads
from .growing import FREE, Growing, block, widened, with_copies

SPARSE, GROUPED, ANCHOR = "sparse", "grouped", "anchor"
"""Keys of the state that a phase reads: the weights under l1 with its strength, the new rows under
the group lasso, and the weights before the task, which anchor the penalty."""


@dataclass(frozen=True)
class DEN(Growing):
    """Retrain the units that a task needs, add units, and split units that drift."""

    about: ClassVar[About] = About(
        family="growing",
        stores="a network that grows, and a head per task",
        paper="Yoon et al., ICLR 2018",
        task_id_at_test=True,
        several_heads=True,
        holds_network=True,
    )
    consumes: ClassVar[bool] = True
    name: ClassVar[str] = "den"

    l1: float = 0.01
    """Weight of the l1 penalty in the first task and in the selection phase of a new head."""
    group: float = 1.0
    """Weight of the group lasso: the sum of the norms of new units' incoming weights."""
    growth: float = 0.02
    """New units per expansion, as a share of the layer's initial units; at least one."""
    tau: float = 0.01
    """Training loss above which a task expands the network."""
    sigma: float = 0.05
    """Distance that a unit's incoming weights may move before the unit is split."""
    drift: float = 0.5
    """Weight of half the squared distance from the weights before the task, used after a split."""
    phase_epochs: int = 10
    """Upper bound on the epochs of each phase; selective retraining uses the task's epochs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("l1", "group", "tau", "sigma", "drift"):
            if getattr(self, name) != 0:
                check_number(name, getattr(self, name), above=0)
        check_number("growth", self.growth, above=0)
        check_count("phase_epochs", self.phase_epochs)

    @property
    def more(self) -> list[int]:
        """Number of units that an expansion adds to each layer."""
        return [max(1, round(self.growth * units)) for units in self.chain.units]

    def loss(self, params: Params, state: State, batch: Batch) -> Tensor:
        loss, anchor = super().loss(params, state, batch), tensors(level(state, ANCHOR))
        if not anchor:
            return loss
        moved = [(params[n][block(old.shape)] - old).square().sum() for n, old in anchor.items()]
        return loss + self.drift / 2 * torch.stack(moved).sum()

    def step(
        self, params: Params, grads: Grads, state: State, batch: Batch, lr: Rate
    ) -> tuple[dict[str, Tensor], State]:
        new, changes = super().step(params, grads, state, batch, lr)
        for name, strength in tensors(level(state, SPARSE)).items():
            # Expanded: a rate on the device times a scalar there rounds differently.
            threshold = lr * strength.expand_as(new[name])
            new[name] = F.relu(new[name].abs() - threshold) * new[name].sign()
        for name, rows in tensors(level(state, GROUPED)).items():
            length = new[name].flatten(1).norm(dim=1).clamp(min=1e-30)
            kept = 1 - (lr * self.group * rows / length).clamp(max=1)
            new[name] = new[name] * kept.view(-1, *[1] * (new[name].dim() - 1))
        return new, changes

    def begin_task(self, ctx: Context) -> tuple[Params, State]:
        chain, params = self.chain, dict(ctx.params)
        if ctx.task == 0:
            return params, self.phase(
                params, ctx.state, 0, {}, **self.sparse(params, *self.weights(0))
            )
        head = f"{HEADS}.{ctx.task}.weight"
        still = {n: torch.zeros_like(params[n]) for n in chain.places if not n.startswith(HEADS)}
        state = self.phase(params, ctx.state, ctx.task, still, **self.sparse(params, head))
        (found,) = ctx.train_children([Child(self, params, state)], self.phase_epochs, "selection")
        params = dict(found.params)
        return params, self.phase(params, ctx.state, ctx.task, self.selected(params, ctx))

    def sparse(self, params: Params, *names: str) -> dict[str, dict[str, Tensor]]:
        """Entry of the state that puts the named weights under l1."""
        return {SPARSE: {name: params[name].new_full((), self.l1) for name in names}}

    def weights(self, task: int) -> list[str]:
        """Names of all weights that a task computes with."""
        return [*self.chain.weights, f"{HEADS}.{task}.weight"]

    def selected(self, params: Params, ctx: Context) -> dict[str, Tensor]:
        """Masks of the weights between units that are connected to the task's head."""
        widths, masks = self.widths(ctx.state), {}
        names = self.weights(ctx.task)
        after = torch.ones(
            len(params[names[-1]]), dtype=torch.bool, device=params[names[-1]].device
        )
        for name in reversed(names):
            W = self.chain.opened(name, params[name], widths)
            before = (W[after] != 0).any(2).any(0)
            if self.chain.places[name] == 0:
                before = torch.ones_like(before)
            if name != names[-1]:
                mask = (after[:, None] & before)[:, :, None].expand(W.shape)
                masks[name] = mask.reshape(params[name].shape).to(params[name])
            after = before
        return masks

    def end_task(self, ctx: Context) -> tuple[Params, State]:
        widths, own = self.widths(ctx.state), f"{HEADS}.{ctx.task}."
        params = {
            n: p for n, p in ctx.params.items() if n.startswith(own) or not n.startswith(HEADS)
        }
        if ctx.task:
            if self.train_loss(ctx) > self.tau:
                params, widths = self.expanded(ctx, params, widths)
            params, widths = self.split(ctx, params, widths)
        return self.recorded(ctx, params, widths)

    def train_loss(self, ctx: Context) -> float:
        """Mean cross-entropy over the task's train samples."""
        self.network.module.eval()
        start = torch.zeros((), dtype=torch.float64, device=ctx.network.device)
        total = {"loss": start}

        def of(batch: Batch) -> dict[str, Tensor]:
            with torch.no_grad():
                logits = self.network(ctx.params, batch.x, batch.head)
                return {"loss": F.cross_entropy(logits, batch.y, reduction="sum").double()}

        ctx.add_up(total, of, ctx.batch_size, "loss")
        return float(total["loss"]) / len(ctx.train)

    def expanded(
        self, ctx: Context, params: dict[str, Tensor], widths: list[int]
    ) -> tuple[dict[str, Tensor], list[int]]:
        """Expand the network and keep the new units that survive the group lasso."""
        chain = self.chain
        wider = [n + k for n, k in zip(widths, self.more, strict=True)]
        grown, fresh = widened(chain, params, wider, ctx.seed, "units", ctx.task)
        free = {n: mask for n, mask in fresh.items() if not n.startswith(HEADS)}
        rows = {}
        for name, old in zip(chain.weights, widths, strict=True):
            rows[name] = torch.ones_like(grown[name].flatten(1)[:, 0])
            rows[name][:old] = 0
        state = self.phase(grown, ctx.state, ctx.task, free, **{GROUPED: rows})
        (found,) = ctx.train_children([Child(self, grown, state)], self.phase_epochs, "expansion")
        alive = [
            [*range(old), *(i for i in range(old, new) if found.params[name][i].any())]
            for name, old, new in zip(chain.weights, widths, wider, strict=True)
        ]
        return chain.chosen(found.params, wider, alive), [len(units) for units in alive]

    def split(
        self, ctx: Context, params: dict[str, Tensor], widths: list[int]
    ) -> tuple[dict[str, Tensor], list[int]]:
        """Restore the units that drifted, and add copies that keep their new weights."""
        before = tensors(level(ctx.state, "network"))
        moved = [self.drifted(n, params, before, ctx, k) for k, n in enumerate(self.chain.weights)]
        if not any(moved):
            return params, widths
        wider = [n + len(units) for n, units in zip(widths, moved, strict=True)]
        grown = with_copies(self.chain, params, before, moved, self.weights(ctx.task))
        selected = tensors(level(ctx.state, FREE))
        free = {}
        for name, units in zip(self.chain.weights, moved, strict=True):
            free[name] = torch.ones_like(grown[name])
            old = block(before[name].shape)
            free[name][old] = selected[name]
            free[name][units] = 0
        state = self.phase(grown, ctx.state, ctx.task, free, **{ANCHOR: before})
        (found,) = ctx.train_children([Child(self, grown, state)], self.phase_epochs, "splitting")
        return dict(found.params), wider

    def drifted(
        self, name: str, params: Params, before: Params, ctx: Context, place: int
    ) -> list[int]:
        """The at most `more` old units of a layer that moved farthest, and farther than sigma."""
        old = before[name]
        far = (params[name][block(old.shape)] - old).flatten(1).norm(dim=1)
        order = far.argsort(descending=True, stable=True)[: self.more[place]].tolist()
        return sorted(i for i in order if float(far[i]) > self.sigma)
