"""TRGP as an object beside a model and a training loop: GPM, and the trust region (4.1, 4.2)."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal, Self

from torch import nn

from ..core.keep import Form
from ..core.trust_region import projections, squared_norm, total_over, trust_region
from ..options import Option, RankOption, check_count, check_number, check_option, value_of
from ..types import Norm, PathLike, TaskId
from . import ranks
from .gpm_learner import GPM
from .layer_gradients import LossFn
from .loader_batches import first_samples
from .progress import watched

Scope = Literal["layer", "task"]


class TRGP(GPM):
    """Trust region gradient projection: GPM, and trusted old tasks' weights reused through Q.

    For every layer the old tasks most related to the new one are selected, and their frozen part of
    the weight is scaled by small matrices Q learnt with the new task.
    """

    functions: ClassVar[tuple[str, ...]] = (*GPM.functions, "epsilon")
    plain: ClassVar[tuple[str, ...]] = (
        *GPM.plain,
        "top_k",
        "scope",
        "selection_samples",
        "scale_rate",
        "form",
    )
    pooled: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        *,
        threshold: Option = 0.97,
        epsilon: Option = 0.5,
        top_k: int = 2,
        scope: Scope = "layer",
        selection_samples: int = 300,
        scale_rate: float = 1.0,
        form: Literal["auto", "paper", "range"] = "auto",
        max_rank: RankOption = None,
        memory_samples: int | None = None,
        exclude: Sequence[str] = (),
        per_task: Sequence[str] = (),
        norm: Norm = "freeze",
    ) -> None:
        """Prepare to protect a model; the options of GPM, and those of the trust region.

        Args:
            model: see GPM, as for all that is not listed here.
            threshold: see GPM.
            epsilon: an old task is trusted if the gradient's projection onto its inputs has at
                least this share of the gradient's norm, in [0, 1]; given as the threshold may be.
            top_k: how many old tasks are trusted at most.
            scope: "layer" chooses for every layer by its own gradient, "task" once by the whole
                gradient (a function or mapping is then asked for the layer '*').
            selection_samples: how many samples that gradient is taken over.
            scale_rate: learning rate of Q, as a multiple of the weights' (form "paper").
            form: "paper" takes the paper's joint step of W and Q, right for SGD; "range" shows the
                optimizer all that any Q could do, for optimizers that rescale gradients; "auto"
                chooses by the optimizer.
            max_rank: see GPM.
            memory_samples: see GPM.
            exclude: see GPM.
            per_task: see GPM.
            norm: see GPM.
        """
        self.epsilon = check_option("epsilon", epsilon, zero=True)
        if scope not in ("layer", "task"):
            raise ValueError(f"scope must be 'layer' or 'task', not {scope!r}.")
        if form not in ("auto", "paper", "range"):
            raise ValueError(f"form must be 'auto', 'paper' or 'range', not {form!r}.")
        self.top_k = check_count("top_k", top_k)
        self.scope: Scope = scope
        self.selection_samples = check_count("selection_samples", selection_samples)
        self.scale_rate = check_number("scale_rate", scale_rate, above=0)
        self.form = form
        super().__init__(
            model,
            threshold=threshold,
            max_rank=max_rank,
            memory_samples=memory_samples,
            exclude=exclude,
            per_task=per_task,
            norm=norm,
        )

    @classmethod
    def load(
        cls,
        path: PathLike,
        model: nn.Module,
        *,
        threshold: Option | None = None,
        epsilon: Option | None = None,
    ) -> Self:
        """Continue from a saved learner with a model that holds the weights it had then.

        An option that was a function is given again; any other may be replaced.
        """
        return cls._load(path, model, {"threshold": threshold, "epsilon": epsilon})

    @property
    def _form(self) -> tuple[Form | None, float]:
        return (None if self.form == "auto" else self.form), self.scale_rate

    def _select(
        self, task: TaskId, loader: Iterable[Any], loss_fn: LossFn
    ) -> tuple[dict[str, list[TaskId]], list[str]]:
        """Choose the trust region of every layer, from one pass over a part of the loader."""
        layers, memory = self._state.plan.layers, self._state.known.memory
        names = layers if self.scope == "layer" else ["*"]
        epsilon = {n: value_of("epsilon", self.epsilon, n, task, zero=True) for n in names}
        if not self._state.known.tasks:
            return super()._select(task, loader, loss_fn)
        batches = first_samples(loader, ranks.share_of(self.selection_samples))
        with watched(batches, "begin_task: batches read") as seen:
            gradients, used = self._gradients(seen, loss_fn)
        sum_rows = self._state.spread.sum_rows
        squared = {
            name: projections(G, memory[name].M, memory[name].masks, sum_rows)
            for name, G in gradients.items()
        }
        totals = {name: squared_norm(G, sum_rows) for name, G in gradients.items()}

        def choose() -> dict[str, list[TaskId]]:
            if self.scope == "layer":
                return {
                    name: trust_region(squared[name], totals[name], epsilon[name], self.top_k)
                    for name in layers
                }
            whole = total_over(list(squared.values()))
            trusted = trust_region(whole, sum(totals.values()), epsilon["*"], self.top_k)
            return {
                name: [j for j in trusted if totals[name] and memory[name].masks[j].any()]
                for name in layers
            }

        return ranks.from_first(choose, self._device), used
