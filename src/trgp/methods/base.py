"""The interface of a method: the hooks where it can differ from plain SGD.

A method is a frozen dataclass: its fields are its options, and the command line is made from them.
The functions of every step (`loss`, `step`, `weights_for`) are pure functions of explicit tensors
and depend on shapes alone; those called once per task (`begin_task`, `end_task`) are ordinary
Python.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from ..core.donation import descend, writable
from ..core.vmapped import is_batchedtensor
from ..types import Params, Rate, State
from .loss import cross_entropy

GATE = "gate "
"""Name prefix, among the weights passed to a network, of factors (channels,) on a module's
input."""
EARLY = "early inputs"
"""Key of the state under which `step` finds the results of `early`, by the name of a weight."""
BENT = "bent "
"""Name prefix of the tensors B (n, r) and S (r, r), as in 'bent fc1/B', of a low-rank input
correction: the module's input x (..., n) becomes x + x B S' B'."""


class Batch(NamedTuple):
    """Samples of one task."""

    x: Tensor
    y: Tensor
    task: int
    head: int  # index of the network's head; 0 if all tasks share one
    u: Tensor | None = None  # uniform random numbers, as many as `random_numbers` says
    first: bool = False  # whether this is the task's first epoch, with new samples
    progress: Rate = 0.0  # from 0 at the epoch's first batch to 1 at its last


class Factors(NamedTuple):
    """The factors of a linear layer's weight gradient, G = delta' x."""

    delta: Tensor  # (b, o), the gradient of the layer's output
    x: Tensor  # (b, n), its input


Grads = Mapping[str, Tensor | Factors]


class Network(Protocol):
    """The network of one run, as a function of explicit parameters."""

    module: nn.Module
    device: torch.device
    separate_heads: bool
    heads: int
    trainable: frozenset[str]
    buffers: tuple[str, ...]
    names: frozenset[str]
    nbytes: int
    weights: int
    example: Tensor | None
    """Some samples, available once the tasks are known."""

    def __call__(self, params: Params, x: Tensor, head: int) -> Tensor:
        """The logits of one head."""

    def every_head(self, params: Params, x: Tensor) -> Tensor:
        """The logits of all heads, (heads, samples, classes)."""

    def rounding(self) -> AbstractContextManager[None]:
        """Round forward and backward passes within the context, as the run configures."""

    def exact(self) -> AbstractContextManager[None]:
        """Disable rounding within the context."""

    def initial_params(self, task: int = 0) -> dict[str, Tensor]:
        """Parameters and buffers as initialised for a task."""


class Samples(Protocol):
    """The samples of one task."""

    def __len__(self) -> int: ...

    def batch(self, index: Tensor | slice) -> tuple[Tensor, Tensor]:
        """The indexed samples: x float, y int64."""

    @property
    def scale(self) -> tuple[Tensor, Tensor] | None:
        """Mean and standard deviation that normalise pixels; None for float samples."""


class Child(NamedTuple):
    """A network to train: its initial tensors, and the method whose loss and step train it.

    Its tensors may differ in shape from the benchmark's network, as long as they fit each other.
    """

    method: "Method"
    params: Params
    state: State


class TrainedChild(NamedTuple):
    """A child after its epochs, with its loss and accuracy on the task's validation samples."""

    params: Params
    state: State
    loss: float
    accuracy: float


class Context(Protocol):
    """A task about to begin or just learnt, and the run it belongs to."""

    @property
    def network(self) -> Network: ...
    @property
    def task(self) -> int: ...
    @property
    def tasks(self) -> int: ...
    @property
    def head(self) -> int: ...
    @property
    def train(self) -> Samples: ...
    @property
    def params(self) -> Params: ...
    @property
    def state(self) -> State: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def seed(self) -> int: ...

    def samples(self, count: int, purpose: str) -> Batch:
        """Draw `count` random train samples of the task (all, if it has fewer)."""

    def batches(self, size: int, purpose: str) -> Iterator[Batch]:
        """All train samples of the task once, in a random order."""

    def add_up(
        self,
        totals: Mapping[str, Tensor],
        of: Callable[[Batch], Mapping[str, Tensor]],
        size: int,
        purpose: str,
    ) -> None:
        """Add `of(batch)` of every batch of the train samples to the totals, by name."""

    def gradients(self, method: "Method", batch: Batch) -> Grads:
        """Gradients of the loss at `params`, without dropout and in full precision."""

    def train_children(
        self, children: Sequence[Child], epochs: int, purpose: str
    ) -> list[TrainedChild]:
        """Train children on the task's samples with the task's schedule, for at most `epochs`.

        Each returns with its loss and accuracy on the task's validation samples.
        """

    def initial_params(self) -> Params:
        """Parameters of a network freshly initialised for this task."""


@dataclass(frozen=True)
class About:
    """Description for `trgp list methods`, and facts that a run needs in advance."""

    family: str
    stores: str
    paper: str
    task_id_at_test: bool
    """Whether evaluating an old task needs its id, even apart from its head."""
    several_heads: bool = False
    """Whether the method needs a head per task."""
    joint: bool = False
    """Whether all tasks are learnt at once, not one after another."""
    holds_network: bool = False
    """Whether the final state contains everything stored, including the network's weights."""


@dataclass(frozen=True)
class Report:
    """Facts about a finished run that a method reports in addition to accuracies."""

    form: str | None = None
    """The name of the computation used, where several are equivalent."""
    selected: Mapping[int, Mapping[str, list[int]]] | None = None
    """By task and layer: the trusted tasks, strongest first."""
    ranks: Mapping[str, list[int]] | None = None
    """By layer: the number of protected directions after every task."""
    figures: Mapping[str, float] | None = None
    """Further figures by name."""


@dataclass(frozen=True)
class Method:
    """Plain SGD, which every method changes."""

    about: ClassVar[About]
    moving: ClassVar[tuple[str, ...]] = ()
    """Keys of the state that a step changes; they are restored with the best weights."""

    needs: ClassVar[tuple[str, ...]] = ()
    """The batch fields `first` and `progress` that the functions read; others are not updated."""

    between_tasks: ClassVar[tuple[str, ...]] = ()
    """Options with defaults that neither `loss` nor `step` reads: runs that differ only in them
    share steps. A subclass whose steps read one leaves it out."""

    consumes: ClassVar[bool] = True
    """Whether `step` stops reading `params` after calling `sgd` or its parent's step, so that these
    may update them in place. Applies only to the class that sets it and defines `step`."""

    resizes: ClassVar[bool] = False
    """Whether parameters differ in name or shape from the network's own."""

    network: ClassVar[Network]  # of the run that the method is bound to

    def bind(self, network: Network) -> Self:
        """Bind the method to a network, available as `self.network`."""
        bound = copy(self)
        vars(bound)["network"] = network  # not an option, hence no field; fields are frozen
        return bound

    def check(self) -> None:
        """Raise an error before training if the options do not fit the network."""

    def begin_task(self, ctx: Context) -> tuple[Params, State]:
        """Start a task: return the parameters to train and the state, replacing those in ctx."""
        return ctx.params, ctx.state

    def frozen(self, task: int) -> frozenset[str]:
        """Names of the parameters that a task does not train."""
        return frozenset()

    def train_mode(self, task: int) -> None:
        """Put the network in training mode."""
        self.network.module.train()

    def factored(self, state: State, batch_size: int) -> frozenset[str]:
        """Names of linear weights whose gradients `step` takes as factors."""
        return frozenset()

    def early(self, weight: str, x: Tensor, params: Params, state: State) -> State:
        """Precompute what `step` needs from the input x (b, n) of a factored weight alone.

        Called for vmapped runs only, during the forward pass.
        """
        return {}

    def random_numbers(self, batch_size: int) -> int:
        """Number of uniform random numbers in `batch.u` per step; a step must not draw itself."""
        return 0

    def stackable(self) -> bool:
        """Whether `loss` and `step` can be vmapped over runs with several seeds."""
        return True

    def padded(self, state: State) -> State:
        """Bring the state to the same names and shapes for every seed, for vmapped runs.

        Entries in `moving` stay unchanged. The others may take any form that `loss` and `step`
        accept.
        """
        return state

    def to_stack(self, params: Params, state: State) -> Params:
        """Bring the parameters to the same names and shapes for every seed, for vmapped runs.

        Called when an epoch begins, with a run's own parameters and state. Added parameters get no
        gradient: only `step` can change them.
        """
        return params

    def from_stack(self, stacked: Params, params: Params, state: State) -> Params:
        """Convert parameters of vmapped runs back to a run's own after an epoch.

        `params` and `state` are the run's own from the start of the epoch; the result has their
        names and shapes.
        """
        return stacked

    def loss(self, params: Params, state: State, batch: Batch) -> Tensor:
        """The mean loss over a batch."""
        weights = self.weights_for(params, state, batch.task)
        return cross_entropy(self.network(weights, batch.x, batch.head), batch.y)

    def step(
        self, params: Params, grads: Grads, state: State, batch: Batch, lr: Rate
    ) -> tuple[dict[str, Tensor], State]:
        """Return the parameters after a step, and the entries of the state that it changes.

        `grads` has the parameters that the loss depends on; all others stay unchanged.
        """
        return sgd(params, grads, lr), {}

    def may_consume(self) -> bool:
        """Whether a step may update the parameters in place."""
        owner = next(kind for kind in type(self).__mro__ if "step" in vars(kind))
        return bool(vars(owner).get("consumes", False))

    def end_task(self, ctx: Context) -> tuple[Params, State]:
        """Finish a task: return the parameters for the next one and the state."""
        return ctx.params, ctx.state

    def weights_for(self, params: Params, state: State, task: int) -> Params:
        """The parameters that the network computes with in a task, by their names in the network.

        During training it is called for the current task only; between tasks, for any task.
        """
        return params

    def report(self, state: State) -> Report:
        return Report()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put the network in eval mode within the context, for use inside a training step."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def sgd(params: Params, grads: Grads, lr: Rate) -> dict[str, Tensor]:
    """Take a plain step along all gradients except factors."""
    along = {name: grad for name, grad in grads.items() if isinstance(grad, Tensor)}
    if any(map(is_batchedtensor, along.values())):  # vmap has no rule for the in-place update below
        return {**params, **{name: params[name] - lr * grad for name, grad in along.items()}}
    new = {name: writable(params[name]) for name in along}
    # A network may have parameters of several dtypes.
    for kind in {tensor.dtype for tensor in new.values()}:
        names = [name for name, tensor in new.items() if tensor.dtype == kind]
        descend([new[name] for name in names], [along[name] for name in names], lr)
    return {**params, **new}
