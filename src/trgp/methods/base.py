"""What a method is: the places where it differs from plain SGD.

A method is a frozen dataclass: its fields are its options, and the command line is made from them.
What runs in every step (`loss`, `step`, `weights_for`) is pure functions of explicit tensors and
depends on shapes alone; what runs once a task (`begin_task`, `end_task`) is ordinary Python.
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
"""Begins the names, among the weights a network is given, of factors (channels,) on a module's
input."""
EARLY = "early inputs"
"""Where in the state `step` finds, by the name of a weight, what `early` has made of its input."""
BENT = "bent "
"""Begins the names of two tensors B (n, r) and S (r, r), as in 'bent fc1/B', that make a module's
input x (..., n) into x + x B S' B'."""


class Batch(NamedTuple):
    """Samples of one task."""

    x: Tensor
    y: Tensor
    task: int
    head: int  # of the network, 0 where all tasks share one
    u: Tensor | None = None  # as many uniform random numbers as the method asks for
    first: bool = False  # whether it is the task's first epoch: the samples are new
    progress: Rate = 0.0  # from 0 at the epoch's first batch to 1 at its last


class Factors(NamedTuple):
    """A linear layer's weight gradient as the factors it is made of: G = delta' x."""

    delta: Tensor  # (b, o), the gradient of the layer's output
    x: Tensor  # (b, n), its input


Grads = Mapping[str, Tensor | Factors]


class Network(Protocol):
    """The network of one run as a function of parameters, which are always given."""

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
    """Some samples, once the tasks have been seen."""

    def __call__(self, params: Params, x: Tensor, head: int) -> Tensor:
        """The logits of one head."""

    def every_head(self, params: Params, x: Tensor) -> Tensor:
        """The logits of all heads, (heads, samples, classes)."""

    def rounding(self) -> AbstractContextManager[None]:
        """While this is open, passes forward and backward are rounded as the run asks."""

    def exact(self) -> AbstractContextManager[None]:
        """While this is open, nothing is rounded."""

    def initial_params(self, task: int = 0) -> dict[str, Tensor]:
        """Parameters and buffers as initialised for a task."""


class Samples(Protocol):
    """The samples of one task."""

    def __len__(self) -> int: ...

    def batch(self, index: Tensor | slice) -> tuple[Tensor, Tensor]:
        """The samples of an index: x float, y int64."""

    @property
    def scale(self) -> tuple[Tensor, Tensor] | None:
        """Mean and standard deviation that pixels are normalised by; None of samples as floats."""


class Child(NamedTuple):
    """A network to train: where it starts, and the method whose loss and step train it.

    Its tensors may have other shapes than the benchmark's network, as long as they fit each other.
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
        """So many random train samples of the task (all, if it has fewer)."""

    def batches(self, size: int, purpose: str) -> Iterator[Batch]:
        """All train samples of the task once, in a random order."""

    def add_up(
        self,
        totals: Mapping[str, Tensor],
        of: Callable[[Batch], Mapping[str, Tensor]],
        size: int,
        purpose: str,
    ) -> None:
        """Add to totals, by name, what is computed of every batch of the train samples."""

    def gradients(self, method: "Method", batch: Batch) -> Grads:
        """Of the loss at `params`, without dropout and in full precision."""

    def train_children(
        self, children: Sequence[Child], epochs: int, purpose: str
    ) -> list[TrainedChild]:
        """Children trained on the task's samples as the task itself is, for so many epochs at most.

        Each comes back with its loss and accuracy on the task's validation samples.
        """

    def initial_params(self) -> Params:
        """A network freshly initialised for this task."""


@dataclass(frozen=True)
class About:
    """What `trgp list methods` says, and what the runner must know beforehand."""

    family: str
    stores: str
    paper: str
    task_id_at_test: bool
    """Whether an old task must be named to be evaluated, heads apart."""
    several_heads: bool = False
    """Whether it needs a head for every task."""
    joint: bool = False
    """Whether all tasks are learnt at once, not one after another."""
    holds_network: bool = False
    """Whether its state holds all that is kept in the end, the network's weights among it."""


@dataclass(frozen=True)
class Report:
    """What a method tells about a finished run, beside its accuracies."""

    form: str | None = None
    """Which of several equivalent computations it used."""
    selected: Mapping[int, Mapping[str, list[int]]] | None = None
    """By task and layer the old tasks it trusts, strongest first."""
    ranks: Mapping[str, list[int]] | None = None
    """By layer the protected directions after every task."""
    figures: Mapping[str, float] | None = None
    """Whatever else is worth a number, by its name."""


@dataclass(frozen=True)
class Method:
    """Plain SGD, of which every method is a change."""

    about: ClassVar[About]
    moving: ClassVar[tuple[str, ...]] = ()
    """The keys of the state that a step changes: they are restored with the best weights."""

    needs: ClassVar[tuple[str, ...]] = ()
    """Which of a batch's `first` and `progress` its functions read; others are not kept up."""

    between_tasks: ClassVar[tuple[str, ...]] = ()
    """Options with defaults that neither `loss` nor `step` reads: runs that differ in them can
    share steps. A subclass whose steps do read one leaves it out."""

    consumes: ClassVar[bool] = True
    """Whether `step` reads nothing of `params` once it has called `sgd` or its parent's step, which
    may then write into them. Holds for the class that says it and defines `step`, no other."""

    resizes: ClassVar[bool] = False
    """Whether its parameters have other names or shapes than the network's own."""

    network: ClassVar[Network]  # of the one run it is bound to

    def bind(self, network: Network) -> Self:
        """The method for one network, which its functions find as `self.network`."""
        bound = copy(self)
        vars(bound)["network"] = network  # no option, so no field, and the fields are frozen
        return bound

    def check(self) -> None:
        """Refuse a network that the options do not fit, before anything is learnt."""

    def begin_task(self, ctx: Context) -> tuple[Params, State]:
        """Before a task: the parameters to train and the state, in place of those in ctx."""
        return ctx.params, ctx.state

    def frozen(self, task: int) -> frozenset[str]:
        """Names of what is not trained in a task."""
        return frozenset()

    def train_mode(self, task: int) -> None:
        """Put the network in the mode it is trained in."""
        self.network.module.train()

    def factored(self, state: State, batch_size: int) -> frozenset[str]:
        """Names of linear weights whose gradients `step` wants as factors."""
        return frozenset()

    def early(self, weight: str, x: Tensor, params: Params, state: State) -> State:
        """What `step` needs of the input x (b, n) of a factored weight, and of no gradient.

        Asked for in a stack, where it is computed while the pass goes on.
        """
        return {}

    def random_numbers(self, batch_size: int) -> int:
        """How many uniform random numbers a step needs, as `batch.u`: it must not draw itself."""
        return 0

    def stackable(self) -> bool:
        """Whether `loss` and `step` can be vmapped over runs from several seeds."""
        return True

    def padded(self, state: State) -> State:
        """What `loss` and `step` need of it, in a stack, by the same names and in the same shapes
        for every seed.

        What moves stays as it is. The rest may be in any form that `loss` and `step` know.
        """
        return state

    def to_stack(self, params: Params, state: State) -> Params:
        """The parameters in a stack, by the same names and in the same shapes for every seed.

        Called when an epoch begins, with a run's own parameters and state. Those that a run alone
        does not have get no gradient: if they change, `step` changes them.
        """
        return params

    def from_stack(self, stacked: Params, params: Params, state: State) -> Params:
        """A run's own parameters when the epoch has ended with those of a stack.

        It began with `params` and `state`, from which these come by the same names and shapes.
        """
        return stacked

    def loss(self, params: Params, state: State, batch: Batch) -> Tensor:
        """The mean loss over a batch."""
        weights = self.weights_for(params, state, batch.task)
        return cross_entropy(self.network(weights, batch.x, batch.head), batch.y)

    def step(
        self, params: Params, grads: Grads, state: State, batch: Batch, lr: Rate
    ) -> tuple[dict[str, Tensor], State]:
        """The parameters after a step, and those entries of the state that it changes.

        `grads` holds what the loss depends on; everything else stays as it is.
        """
        return sgd(params, grads, lr), {}

    def may_consume(self) -> bool:
        """Whether the parameters can be given away to a step."""
        owner = next(kind for kind in type(self).__mro__ if "step" in vars(kind))
        return bool(vars(owner).get("consumes", False))

    def end_task(self, ctx: Context) -> tuple[Params, State]:
        """After a task: the parameters to go on from and the state."""
        return ctx.params, ctx.state

    def weights_for(self, params: Params, state: State, task: int) -> Params:
        """The parameters that the network computes with in a task, by their names in it.

        While a task is learnt it is called for that task alone, between tasks for any.
        """
        return params

    def report(self, state: State) -> Report:
        return Report()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """The network in eval mode, in the middle of a step that trains it."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def sgd(params: Params, grads: Grads, lr: Rate) -> dict[str, Tensor]:
    """A plain step along all gradients that are no factors."""
    along = {name: grad for name, grad in grads.items() if isinstance(grad, Tensor)}
    if any(map(is_batchedtensor, along.values())):  # vmap has no rule for what follows
        return {**params, **{name: params[name] - lr * grad for name, grad in along.items()}}
    new = {name: writable(params[name]) for name in along}
    # A network may have parameters of several.
    for kind in {tensor.dtype for tensor in new.values()}:
        names = [name for name, tensor in new.items() if tensor.dtype == kind]
        descend([new[name] for name in names], [along[name] for name in names], lr)
    return {**params, **new}
