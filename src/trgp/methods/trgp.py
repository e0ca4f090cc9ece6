"""Trust Region Gradient Projection (Lin, Yang, Fan and Zhang, ICLR 2022).

In every layer a new task selects trusted tasks: the old tasks whose bases hold the largest share of
its first gradient. It reuses their frozen weights through its own scaling matrices:
W_eff = W + sum_j W B_j (Q_j - I) B_j', where W moves orthogonally to M as in GPM.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core import drifting, native
from ..core.branches import side_by_side
from ..core.capture import Gram
from ..core.trust_region import projections, total_over, trust_region
from ..options import check_count
from ..tree import level, put, tensors
from ..types import Params, Rate, Selected, State, matches
from .base import BENT, EARLY, About, Batch, Context, Grads, Report, sgd
from .gpm import GPMMethod
from .layerwise import Along, between, several
from .loss import cross_entropy
from .protected import Directions, Protected
from .quirks import strongest_unprotected
from .scaling_forms import Form, LiteralForm, NativeForm, Parts, masked

STEPPING = ("loss", "step", "drifted", "along", "early", "ahead", "shared", "weights_for")
OWN = "Q "  # name prefix of the scalings among the parameters
BESIDE = "beside "  # name prefix of tensors that move with a layer's weight in vmapped runs


@dataclass(frozen=True)
class TRGPMethod(GPMMethod):
    """Extend GPM: reuse trusted tasks' weights through learnt scaling matrices."""

    about: ClassVar[About] = About(
        family="gradient projection",
        stores="a basis of each layer's inputs, scaling matrices a task",
        paper="Lin et al., ICLR 2022",
        task_id_at_test=True,
    )
    consumes: ClassVar[bool] = True
    pooled: ClassVar[bool] = True
    between_tasks: ClassVar[tuple[str, ...]] = (
        *GPMMethod.between_tasks,
        "epsilon",
        "scope",
        "selection_samples",
        "unscaled_inputs",
        "first_layer_gate",
        "third_task_trusts_second",
    )

    epsilon: float = 0.5
    """Minimum share of the gradient's norm that an old task's basis must hold to be trusted."""
    top_k: int = 2
    """Upper bound on the number of trusted tasks per layer."""
    scope: Literal["layer", "task"] = "layer"
    """layer: every layer selects its own trusted tasks; task: all layers share one selection."""
    selection_samples: int = 125
    """Number of random train samples for the first gradient (all, if the task has fewer)."""
    scale_rate: float = 1.0
    """Learning rate of Q, as a multiple of the network's learning rate."""
    scaling_over: Literal["bases", "union"] = "bases"
    """bases: one scaling matrix per trusted task; union: one over the bases of all trusted tasks
    together. With epsilon 0 and top_k the number of tasks, the union is the whole memory."""
    no_scaling: tuple[str, ...] = ()
    """Patterns of layer names that are protected but have no Q. The published code has no Q in the
    linear layers of LeNet and the shortcuts of ResNet18."""
    strongest_unprotected: bool = False
    """Quirk: the strongest new direction of every task after the first stays out of M and is never
    protected. The published code compares an index with > instead of >=."""
    unscaled_inputs: bool = False
    """Quirk: bases are computed from the inputs under W without Q. The published code does not pass
    the scaling on there."""
    first_layer_gate: bool = False
    """Quirk: no layer uses its Q if the first layer has no trusted task, and no layer of a block if
    the block's first layer has none. The published code checks the first layer only."""
    third_task_trusts_second: bool = False
    """Quirk: the third task can only trust the second, which the published code hard-codes."""
    form: Literal["auto", "literal"] = "auto"
    """How W_eff is computed. literal: from W and Q in every pass; auto: the native form, with W_eff
    itself as the parameter, where it is exact, else the literal form."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "no_scaling", several(self.no_scaling))
        if not between(self.epsilon, 0, 1):
            raise ValueError(f"epsilon must be a number in [0, 1], not {self.epsilon!r}.")
        check_count("top_k", self.top_k)
        check_count("selection_samples", self.selection_samples)
        if self.scope not in ("layer", "task"):
            raise ValueError(f"scope must be layer or task, not {self.scope!r}.")
        if self.form not in ("auto", "literal"):
            raise ValueError(f"form must be auto or literal, not {self.form!r}.")
        if not between(self.scale_rate, 0, float("inf")) or not 0 < self.scale_rate < 1e6:
            raise ValueError(f"scale_rate must be a number above 0, not {self.scale_rate!r}.")
        if self.scaling_over not in ("bases", "union"):
            raise ValueError(f"scaling_over must be bases or union, not {self.scaling_over!r}.")
        if self.scaling_over == "union" and self.strongest_unprotected:
            raise ValueError(
                "scaling_over=union needs all bases inside the memory, but strongest_unprotected "
                "keeps directions out of it; give one of the two."
            )
        if not all(isinstance(pattern, str) for pattern in self.no_scaling):
            raise ValueError(f"no_scaling must be names of layers, not {self.no_scaling!r}.")

    @cached_property
    def scaling(self) -> Form:
        """Native, unless some B_j leaves span(M): then W B_j drifts and must be recomputed."""
        if self.form == "literal" or self.strongest_unprotected:
            return LiteralForm(self.scale_rate, self.own_steps)
        return NativeForm(self.scale_rate)

    @property
    def own_steps(self) -> bool:
        """Whether no subclass overrides the step functions."""
        return all(getattr(type(self), name) is getattr(TRGPMethod, name) for name in STEPPING)

    def begin_task(self, ctx: Context) -> tuple[Params, State]:
        """Select the trusted tasks by the first gradient, and start from Q = I."""
        params, state = super().begin_task(ctx)
        if ctx.task == 0:
            return params, state
        selected = self.select(ctx)
        for name, trusted in selected.items():
            if trusted:
                each = self.layers[name]
                picked = torch.tensor(trusted, device=ctx.network.device)
                state = put(state, picked, "selected", str(ctx.task), name)
                W = each.pack(params)
                scaled = self.scaled(Directions.read(state, each.layer), trusted)
                parts = self.scaling.begin(each, W, *scaled, ctx.batch_size)
                params, state = with_parts(params, state, name, parts)
        return params, state

    def select(self, ctx: Context) -> Selected[int]:
        """Select the trusted tasks of each layer, strongest first (paper, section 4.1)."""
        squared, totals = self.held(ctx)
        if self.scope == "task":
            together = total_over(list(squared.values()))
            shared = trust_region(together, sum(totals.values()), self.epsilon, self.top_k)
            selected = dict.fromkeys(squared, shared)
        else:
            selected = {
                n: trust_region(squared[n], totals[n], self.epsilon, self.top_k) for n in squared
            }
        selected = {n: [] if matches(n, self.no_scaling) else s for n, s in selected.items()}
        return self.gated(selected) if self.first_layer_gate else selected

    def held(self, ctx: Context) -> tuple[dict[str, dict[int, float]], dict[str, float]]:
        """By layer: the energy of the first gradient in old tasks' bases, and its total energy."""
        grads = ctx.gradients(self, ctx.samples(self.selection_samples, "selection"))
        squared: dict[str, dict[int, float]] = {}
        totals: dict[str, float] = {}
        for name, each in self.layers.items():
            G = each.gradient(grads) if each.names[0] in grads else None
            if G is None:
                squared[name], totals[name] = {}, 0.0
                continue
            old = Directions.read(ctx.state, each.layer)
            masks = {t: mask for t, mask in old.masks.items() if t in self.candidates(ctx.task)}
            found = projections(G, old.M, masks)
            for t, u in old.loose.items():
                if t in found:
                    found[t] += float((G @ u).double().square().sum())
            squared[name], totals[name] = found, float(G.double().square().sum())
        return squared, totals

    def candidates(self, task: int) -> range:
        return range(1, 2) if task == 2 and self.third_task_trusts_second else range(task)

    def gated(self, selected: Selected[int]) -> Selected[int]:
        """Apply `first_layer_gate`: the first layer, and a block's first, decide for the others."""
        first = next(iter(selected))
        blocks: dict[str, str] = {}
        for name in selected:
            blocks.setdefault(name.rpartition(".")[0], name)
        return {
            name: trusted if selected[first] and selected[blocks[name.rpartition(".")[0]]] else []
            for name, trusted in selected.items()
        }

    def scaled(self, old: Directions, trusted: list[int]) -> tuple[Directions, list[int]]:
        """Directions on which the scaling matrices act, and each matrix's key in their masks."""
        if self.scaling_over == "bases":
            return old, trusted
        bases = [old.masks[t] for t in trusted]
        width = max(mask.shape[1] for mask in bases)
        wide = [pad(mask, (0, width - mask.shape[1])) for mask in bases]
        return replace(old, masks={0: torch.stack(wide).any(0)}), [0]

    def factored(self, state: State, batch_size: int) -> frozenset[str]:
        """Exclude layers with W_eff computed from W: their gradient is more than the factors."""
        made = {
            each.names[0]
            for name, each in self.layers.items()
            if "B" in level(state, "task", name) and not each.bendable
        }
        return super().factored(state, batch_size) - made

    def factors_pay(self, each: Protected, held: Mapping[str, Tensor], batch_size: int) -> bool:
        g, o, n = each.layer.shape
        if "gains" in held:
            counted = native.dense_costs(batch_size, held["gains"].shape[2] // o - 1, g, o, n)
            return counted["factored"] < counted["gradient"]
        if "signs" in held:
            trusted = held["signs"].shape[1] - 1
            sizes = (batch_size, trusted, g, o, n, held["M"].shape[2])
            return native.cheaper_form(*sizes) == "factored"
        return super().factors_pay(each, held, batch_size)

    def loss(self, params: Params, state: State, batch: Batch) -> Tensor:
        """Mean loss; the literal form gives linear layers a low-rank input correction.

        W_eff x = W (x + B S B' x) is cheaper than W_eff: a batch has fewer rows than W.
        """
        bent: dict[str, Tensor] = {}
        plain = dict(params)
        for name, each in self.layers.items():
            if OWN + name in params and each.bendable:
                held = tensors(level(state, "task", name))
                module = each.names[0].removesuffix(".weight")
                S = masked(plain.pop(OWN + name), held)
                bent |= {f"{BENT}{module}/B": held["B"][0], f"{BENT}{module}/S": S[0]}
        weights = {**self.weights_for(plain, state, batch.task), **bent}
        return cross_entropy(self.network(weights, batch.x, batch.head), batch.y)

    def stackable(self) -> bool:
        """In the literal form, vmap only if no subclass overrides the steps and layers are direct.

        Vmapped runs then have no Q that another loss or step could read, and the effective weight
        needs the precision of the tensors that move with it.
        """
        if not super().stackable():
            return False
        apart = self.own_steps and all(each.direct for each in self.layers.values())
        return apart or isinstance(self.scaling, NativeForm)

    def layer_padded(self, name: str, state: State) -> State:
        """Pad the layer's constants to the largest number of scalings."""
        each = self.scalable(state).get(name)
        if each is None:
            return super().layer_padded(name, state)
        M, held = Directions.read(state, each.layer).M, tensors(level(state, "task", name))
        return {**self.scaling.padded(each, M, held, self.most_scalings)}

    def to_stack(self, params: Params, state: State) -> Params:
        new = {n: p for n, p in params.items() if not n.startswith(OWN)}
        for name, each in self.scalable(state).items():
            own, held = params.get(OWN + name), tensors(level(state, "task", name))
            changed, beside = self.scaling.to_stack(each, params, own, held, self.most_scalings)
            new |= {**changed, **{f"{BESIDE}{name} {key}": part for key, part in beside.items()}}
        return new

    def from_stack(self, stacked: Params, params: Params, state: State) -> Params:
        new = {n: p for n, p in stacked.items() if not n.startswith(BESIDE)}
        for name, each in self.scalable(state).items():
            own, held = params.get(OWN + name), tensors(level(state, "task", name))
            moved = beside_of(name, stacked)
            changed, S = self.scaling.from_stack(each, params, moved, own, held)
            new |= {**changed, **({} if S is None else {OWN + name: S})}
        return new

    def scalable(self, state: State) -> dict[str, Protected]:
        """The layers that may have trusted tasks."""
        if not level(state, "memory"):
            return {}
        return {n: each for n, each in self.layers.items() if not matches(n, self.no_scaling)}

    @property
    def most_scalings(self) -> int:
        """Upper bound on the scaling matrices per layer."""
        return 1 if self.scaling_over == "union" else self.top_k

    def step(
        self, params: Params, grads: Grads, state: State, batch: Batch, lr: Rate
    ) -> tuple[dict[str, Tensor], State]:
        """Take GPM's step; the scalings step with their own learning rate."""
        drifted = self.drifted(params, grads, state, lr)
        own = {name: g for name, g in grads.items() if name.startswith(OWN)}
        others = {n: g for n, g in grads.items() if n not in own and n not in drifted}
        new, moved = super().step(params, others, state, batch, lr)
        if own:
            new = sgd(new, own, lr if self.scale_rate == 1 else lr * self.scale_rate)
        return {**new, **drifted}, moved

    def drifted(self, params: Params, grads: Grads, state: State, lr: Rate) -> dict[str, Tensor]:
        """Step the layers that vmapped runs keep in the literal form."""
        new: dict[str, Tensor] = {}
        task = {name: tensors(level(state, "task", name)) for name in self.layers}
        literal = [n for n, e in self.layers.items() if "U" in task[n] and e.names[0] in grads]
        for name in side_by_side(literal):
            each = self.layers[name]
            delta, x = each.some_factors(grads)
            found = level(state, EARLY, each.names[0]) or self.ahead(name, x, params, state)
            W, moving = drifting.step(
                drifting.Fixed(**task[name]),
                drifting.Moving(**beside_of(name, params)),
                each.pack(params),
                delta,
                drifting.Ahead(**tensors(found)),
                lr,
                self.scale_rate,
            )
            new |= each.unpack(W, params)
            new |= {f"{BESIDE}{name} {key}": part for key, part in moving._asdict().items()}
        return new

    def ahead(self, name: str, x: Tensor, params: Params, state: State) -> State:
        held = tensors(level(state, "task", name))
        if "U" not in held:
            return super().ahead(name, x, params, state)
        s = beside_of(name, params)["s"]
        return {**drifting.ahead(drifting.Fixed(**held), s, x)._asdict()}

    def along(self, name: str, grads: Grads, state: State) -> Along:
        held = tensors(level(state, "task", name))
        whole = "gains" in held
        if not whole and "signs" not in held:
            return super().along(name, grads, state)
        each = self.layers[name]
        factors = each.factors(grads)
        if factors is not None:
            if whole:
                xP = self.projected(name, held["P"], factors.x, state)
                return Along(False, native.dense_factors(dense_of(held), factors.delta, xP))
            return Along(False, native.scaled_factors(native.Task(**held), *factors))
        G = each.gradient(grads)
        if whole:
            return Along(False, native.dense_gradient(dense_of(held), G))
        return Along(True, native.scaled_excess(native.Task(**held), G))

    def end_task(self, ctx: Context) -> tuple[Params, State]:
        """Store the scalings, then extend the memory."""
        kept: dict[str, State] = {}
        for name, picked in tensors(level(ctx.state, "selected", str(ctx.task))).items():
            trusted = picked.tolist()
            kept[name] = self.scaling.finish(
                ctx.params.get(OWN + name),
                tensors(level(ctx.state, "task", name)),
                # Back to the parameter's own dtype: `pack` may return a wider one.
                self.layers[name].pack(ctx.params).to(ctx.params[self.layers[name].names[0]].dtype),
                *self.scaled(Directions.read(ctx.state, self.layers[name].layer), trusted),
            )
        params, state = super().end_task(ctx)
        return params, put(state, kept, "changes", str(ctx.task)) if kept else state

    def shared(self, params: Params, state: State) -> dict[str, Tensor]:
        return {n: p for n, p in super().shared(params, state).items() if not n.startswith(OWN)}

    def seen_by(self, ctx: Context, shared: Params) -> Params:
        return shared if self.unscaled_inputs else self.weights_for(ctx.params, ctx.state, ctx.task)

    def extended(self, old: Directions, gram: Gram, threshold: float, task: int) -> Directions:
        choice = self.choice(old, gram, threshold, task)
        loose = old.loose
        if self.strongest_unprotected and task:
            choice, apart = strongest_unprotected(choice, old.ranks)
            loose = {**loose, task: apart}
        return Directions(choice.M, choice.ranks, {**old.masks, task: choice.mask}, loose)

    def weights_for(self, params: Params, state: State, task: int) -> Params:
        """W_eff: from Q for the current task, from the stored scalings for a finished one."""
        weights = dict(super().weights_for(params, state, task))
        kept = level(state, "changes", str(task))
        for name, each in self.layers.items():
            if name in kept:
                picked = tensors(level(state, "selected", str(task)))[name].tolist()
                scaled = self.scaled(Directions.read(state, each.layer), picked)
                W = self.scaling.effective(each.pack(params), tensors(level(kept, name)), *scaled)
                weights |= each.unpack(W, params)
            elif not kept and OWN + name in params:
                assert isinstance(self.scaling, LiteralForm)  # only this form has a Q
                held = tensors(level(state, "task", name))
                W = self.scaling.learning(each.joined(params), params[OWN + name], held)
                weights |= each.unpack(W, params)
        return {n: w for n, w in weights.items() if not n.startswith((OWN, BESIDE))}

    def report(self, state: State) -> Report:
        selected = {
            int(t): {
                n: picked.tolist() for n, picked in tensors(level(state, "selected", t)).items()
            }
            for t in level(state, "selected")
        }
        return Report(self.scaling.name, selected, super().report(state).ranks)


def with_parts(params: Params, state: State, name: str, parts: Parts) -> tuple[Params, State]:
    """Add the tensors of a layer's scaling to the parameters and the state."""
    own, constants = parts
    state = put(state, {**level(state, "task", name), **constants}, "task", name)
    return params if own is None else {**params, OWN + name: own}, state


def beside_of(name: str, params: Params) -> dict[str, Tensor]:
    """Tensors that move with a layer's weight in vmapped runs."""
    prefix = f"{BESIDE}{name} "
    return {n.removeprefix(prefix): p for n, p in params.items() if n.startswith(prefix)}


def dense_of(held: Mapping[str, Tensor]) -> native.Dense:
    return native.Dense(held["P"], held["gains"])
