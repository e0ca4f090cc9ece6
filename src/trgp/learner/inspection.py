"""A report of how a learner would treat a model, before anything is learnt."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..core.layers import Layer
from ..core.plan import bare, sorted_parts, unmatched
from ..core.subspace import first_ranks
from ..options import check_norm, check_patterns, rank_of
from ..types import Norm
from . import model_checks
from .inspection_report import Inspection, Row
from .layer_gradients import LossFn, layer_gradients, require_called
from .layer_inputs import gram_bytes, layer_inputs, passes
from .loader_batches import first_samples
from .model_snapshot import undisturbed
from .parameter_fates import Fate, parts
from .progress import watched
from .sharding import require_whole

THRESHOLDS = (0.9, 0.95, 0.99, 1.0)

Ranks = Mapping[float, Tensor]
"""By threshold the directions that each group (g,) of a layer keeps of some samples."""


def inspect(
    model: nn.Module,
    loader: Iterable[Any] | None = None,
    loss_fn: LossFn | None = None,
    *,
    exclude: Sequence[str] = (),
    per_task: Sequence[str] = (),
    norm: Norm = "freeze",
) -> Inspection:
    """Tell what a learner with these options would protect, freeze, copy, leave alone or refuse.

    With a loader and a loss_fn, as begin_task takes them, also how many directions the loader's
    samples fill in every layer by threshold, under the weights that the model has now. Nothing in
    the model changes.
    """
    model_checks.module(model)
    exclude, per_task = check_patterns("exclude", exclude), check_patterns("per_task", per_task)
    if (loader is None) != (loss_fn is None):
        raise TypeError("inspect needs a loader and a loss_fn to tell ranks; give both or neither.")
    model = bare(model)
    require_whole(model)
    plan = sorted_parts(model, exclude, per_task, check_norm(norm))
    ranks: dict[str, Ranks] = {}
    if loader is not None and loss_fn is not None and plan.layers:
        ranks = _ranks(model, plan.layers, loader, loss_fn)
    modules = dict(model.named_modules(remove_duplicate=False))
    whole = sum(map(_size, model.parameters()))
    rows = []
    for (name, fate), params in parts(model, plan, exclude, norm).items():
        row = _row(name, fate, params, modules.get(name), whole)
        if fate.verdict == "protected":
            row = _with_memory(row, plan.layers[name], ranks.get(name, {}))
        rows.append(row)
    return Inspection(
        model=type(model).__name__,
        parameters=whole,
        nbytes=sum(map(_nbytes, model.parameters())),
        rows=tuple(rows),
        unmatched=tuple(unmatched(model, [*exclude, *per_task])),
        task_bytes=sum(_nbytes(slot.param) for slot in plan.per_task.values()),
        end_task_bytes=max(
            (sum(map(gram_bytes, part)) for part in passes(plan.layers.values())), default=0
        ),
    )


def _ranks(
    model: nn.Module, layers: Mapping[str, Layer], loader: Iterable[Any], loss_fn: LossFn
) -> dict[str, Ranks]:
    """The ranks that a first task with these samples has, by layer."""
    with undisturbed(model, loader):  # as begin_task tries loss_fn, and refuses
        layer_gradients(model, layers, [next(first_samples(loader, None))], loss_fn, {})
    found: dict[str, Ranks] = {}
    called: list[str] = []
    for part in passes(layers.values()):
        batches = first_samples(loader, None)
        with undisturbed(model, loader), watched(batches, "inspect: batches read", loader) as seen:
            capture = layer_inputs(model, part, seen, loss_fn)
        capture.finite()
        called += [name for name, gram in capture.grams.items() if gram.columns]
        with watched(capture.grams.items(), "inspect: layers decomposed") as grams:
            for name, gram in grams:
                found[name] = dict(zip(THRESHOLDS, first_ranks(gram, THRESHOLDS), strict=True))
    require_called(called)
    return found


def _row(
    name: str,
    fate: Fate,
    params: Sequence[nn.Parameter],
    module: nn.Module | None,
    whole: int,
) -> Row:
    kind = "Parameter" if module is None else type(module).__name__
    size = sum(map(_size, params))
    return Row(name, kind, fate.verdict, size, size / max(1, whole), fate.why, fate.fix)


def _with_memory(row: Row, layer: Layer, ranks: Ranks) -> Row:
    """A protected layer's row, with what its memory may hold."""
    groups, _, inputs = layer.shape
    return replace(
        row,
        kind=type(layer.sites[0].module).__name__,
        directions=groups * inputs,
        bytes_tenth=_memory_bytes(layer, rank_of(0.1, row.name, inputs) or inputs),
        bytes_full=_memory_bytes(layer, inputs),
        ranks={threshold: int(rank.sum()) for threshold, rank in ranks.items()},
        bytes_at={t: _memory_bytes(layer, int(rank.max())) for t, rank in ranks.items()},
    )


def _memory_bytes(layer: Layer, rank: int) -> int:
    """Bytes of a layer's memory after one task, with so many columns in every group."""
    groups, outputs, inputs = layer.shape
    basis_and_coordinates = (inputs + outputs) * layer.dtype.itemsize
    return groups * rank * (basis_and_coordinates + 1)  # a byte in the task's mask


def _size(tensor: Tensor) -> int:
    """Numbers in a tensor; a lazy one has none yet."""
    return 0 if is_lazy(tensor) else tensor.numel()


def _nbytes(tensor: Tensor) -> int:
    return _size(tensor) * tensor.dtype.itemsize
