"""Trust Region Gradient Projection (Lin, Yang, Fan and Zhang, ICLR 2022).

A new task picks in every layer the old tasks it has most in common with, by the share of its first
gradient that their bases hold, and uses their frozen weights through scaling matrices of its own:
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
OWN = "Q "  # begins the names of the scalings among the parameters
BESIDE = "beside "  # and of what moves beside a layer's weight in a stack


@dataclass(frozen=True)
class TRGPMethod(GPMMethod):
    """GPM that reuses related old tasks' weights through learnt scaling matrices."""

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
    """Least share of the gradient's norm that an old task's basis must hold to be trusted."""
    top_k: int = 2
    """Most old tasks that a layer trusts."""
    scope: Literal["layer", "task"] = "layer"
    """Whether every layer has a trust region of its own, or all layers share one."""
    selection_samples: int = 125
    """Random train samples that the first gradient is the mean over (all, if a task has fewer)."""
    scale_rate: float = 1.0
    """Learning rate of Q, in multiples of the network's."""
    scaling_over: Literal["bases", "union"] = "bases"
    """What a layer's scaling matrices are over: bases (one for each it trusts) or union (one for
    all of them: with epsilon 0 and top_k the number of tasks, for the whole memory)."""
    no_scaling: tuple[str, ...] = ()
    """Layers, by patterns of their names, that are protected but have no Q; the published code has
    none in the linear layers of LeNet and the shortcuts of ResNet18."""
    strongest_unprotected: bool = False
    """Quirk: of a later task's new directions the strongest stays out of M and is never protected,
    because the published code compares an index with > instead of >=."""
    unscaled_inputs: bool = False
    """Quirk: bases are computed from the inputs under W without Q, because the published code does
    not pass the scaling on there."""
    first_layer_gate: bool = False
    """Quirk: no layer uses its Q if the first one trusts nobody (in a block: if the block's first
    does not), because the published code asks the first layer only."""
    third_task_trusts_second: bool = False
    """Quirk: the third task can only trust the second, because the published code names it."""
    form: Literal["auto", "literal"] = "auto"
    """How W_eff is computed: auto takes the native form, W_eff itself being the parameter, where
    that is exact, else the literal one."""

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
                "A union needs bases inside the memory, which strongest_unprotected keeps some "
                "directions out of; give one of the two."
            )
        if not all(isinstance(pattern, str) for pattern in self.no_scaling):
            raise ValueError(f"no_scaling must be names of layers, not {self.no_scaling!r}.")

    @cached_property
    def scaling(self) -> Form:
        """Native unless some B_j leaves span(M): then W B_j drifts and must be computed anew."""
        if self.form == "literal" or self.strongest_unprotected:
            return LiteralForm(self.scale_rate, self.own_steps)
        return NativeForm(self.scale_rate)

    @property
    def own_steps(self) -> bool:
        """Whether no subclass takes other steps than these."""
        return all(getattr(type(self), name) is getattr(TRGPMethod, name) for name in STEPPING)

    def begin_task(self, ctx: Context) -> tuple[Params, State]:
        """Choose the trust region by the first gradient, and start from Q = I."""
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
        """The old tasks that each layer trusts, strongest first (paper, section 4.1)."""
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
        """By layer the energy of the first gradient that old tasks' bases hold, and all of it."""
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
        """Only what is left when the first layer, and a block's first, decide for the others."""
        first = next(iter(selected))
        blocks: dict[str, str] = {}
        for name in selected:
            blocks.setdefault(name.rpartition(".")[0], name)
        return {
            name: trusted if selected[first] and selected[blocks[name.rpartition(".")[0]]] else []
            for name, trusted in selected.items()
        }

    def scaled(self, old: Directions, trusted: list[int]) -> tuple[Directions, list[int]]:
        """Where in M the scaling matrices act, and the names there of what each of them is over."""
        if self.scaling_over == "bases":
            return old, trusted
        bases = [old.masks[t] for t in trusted]
        width = max(mask.shape[1] for mask in bases)
        wide = [pad(mask, (0, width - mask.shape[1])) for mask in bases]
        return replace(old, masks={0: torch.stack(wide).any(0)}), [0]

    def factored(self, state: State, batch_size: int) -> frozenset[str]:
        """Not where W_eff is made from W, whose gradient is then more than these factors."""
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
        """In the literal form linear layers get bent inputs instead of their effective weight.

        W_eff x = W (x + B S B' x), and a batch has fewer rows than W.
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
        """In the literal form a stack has no Q that somebody else's loss or step could look at, and
        its effective weight needs the digits of what moves beside it."""
        if not super().stackable():
            return False
        apart = self.own_steps and all(each.direct for each in self.layers.values())
        return apart or isinstance(self.scaling, NativeForm)

    def layer_padded(self, name: str, state: State) -> State:
        """As if a layer that may trust somebody trusted as many tasks as it may."""
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
        """The layers that may trust somebody."""
        if not level(state, "memory"):
            return {}
        return {n: each for n, each in self.layers.items() if not matches(n, self.no_scaling)}

    @property
    def most_scalings(self) -> int:
        """Of a layer."""
        return 1 if self.scaling_over == "union" else self.top_k

    def step(
        self, params: Params, grads: Grads, state: State, batch: Batch, lr: Rate
    ) -> tuple[dict[str, Tensor], State]:
        """GPM's step; the scalings have a rate of their own."""
        drifted = self.drifted(params, grads, state, lr)
        own = {name: g for name, g in grads.items() if name.startswith(OWN)}
        others = {n: g for n, g in grads.items() if n not in own and n not in drifted}
        new, moved = super().step(params, others, state, batch, lr)
        if own:
            new = sgd(new, own, lr if self.scale_rate == 1 else lr * self.scale_rate)
        return {**new, **drifted}, moved

    def drifted(self, params: Params, grads: Grads, state: State, lr: Rate) -> dict[str, Tensor]:
        """What becomes of the layers that a stack keeps in the literal form."""
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
        """Keep the scalings, then extend the memory."""
        kept: dict[str, State] = {}
        for name, picked in tensors(level(ctx.state, "selected", str(ctx.task))).items():
            trusted = picked.tolist()
            kept[name] = self.scaling.finish(
                ctx.params.get(OWN + name),
                tensors(level(ctx.state, "task", name)),
                # In the digits that it has: packed it may seem to have more.
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
        """W_eff: of the task being learnt from its Q, of a finished one from what it kept."""
        weights = dict(super().weights_for(params, state, task))
        kept = level(state, "changes", str(task))
        for name, each in self.layers.items():
            if name in kept:
                picked = tensors(level(state, "selected", str(task)))[name].tolist()
                scaled = self.scaled(Directions.read(state, each.layer), picked)
                W = self.scaling.effective(each.pack(params), tensors(level(kept, name)), *scaled)
                weights |= each.unpack(W, params)
            elif not kept and OWN + name in params:
                assert isinstance(self.scaling, LiteralForm)  # nobody else has any
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
    """The parameters and the state with what a layer's scaling adds to them."""
    own, constants = parts
    state = put(state, {**level(state, "task", name), **constants}, "task", name)
    return params if own is None else {**params, OWN + name: own}, state


def beside_of(name: str, params: Params) -> dict[str, Tensor]:
    """What moves beside a layer's weight in a stack."""
    prefix = f"{BESIDE}{name} "
    return {n.removeprefix(prefix): p for n, p in params.items() if n.startswith(prefix)}


def dense_of(held: Mapping[str, Tensor]) -> native.Dense:
    return native.Dense(held["P"], held["gains"])
