"""A network as a pure function of its parameters."""

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..benchmarks import Task
from ..methods.base import Params
from .draws import seed_of


class Network:
    """The modules of one run on its device; what they compute with is always given."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        separate_heads: bool,
        device: torch.device,
        seed: int,
    ) -> None:
        self._make = make
        self._seed = seed
        self.device = device
        self.separate_heads = separate_heads
        self.module = self._initialised(0)
        takes_head = "head" in inspect.signature(self.module.forward).parameters
        if separate_heads and not (takes_head and hasattr(self.module, "heads")):
            raise ValueError(
                f"{type(self.module).__name__} has one head, but every task here has its own; keep "
                "one a task in self.heads, and let forward(x, head) compute that of a task."
            )
        params = dict(self.module.named_parameters())
        self.trainable = frozenset(name for name, p in params.items() if p.requires_grad)
        self.buffers = tuple(name for name, _ in self.module.named_buffers())
        self.names = frozenset([*params, *self.buffers])
        self.nbytes = sum(p.nbytes for p in params.values())

    def __call__(self, params: Params, x: Tensor, head: int) -> Tensor:
        """The logits of one head."""
        chosen = {"head": head} if self.separate_heads else {}
        logits: Tensor = functional_call(self.module, dict(params), (x,), chosen)
        return logits

    def check(self, tasks: Sequence[Task]) -> None:
        """Refuse tasks that the network cannot compute."""
        params = self.initial_params()
        self.module.eval()
        for t, task in enumerate(tasks):
            x, _ = task.train.batch(slice(0, 2))
            try:
                with torch.no_grad():
                    logits = self(params, x, t if self.separate_heads else 0)
            except Exception as error:  # a user's network can fail in any way
                raise ValueError(
                    f"{type(self.module).__name__} cannot compute samples of shape "
                    f"{tuple(x.shape[1:])} of task {t}: {error}"
                ) from error
            shape = tuple(getattr(logits, "shape", ()))
            if len(shape) != 2 or shape[0] != len(x) or shape[1] < task.classes:
                raise ValueError(
                    f"{type(self.module).__name__} gives {shape or type(logits).__name__} for "
                    f"{len(x)} samples of task {t}, which has {task.classes} classes; let it give "
                    "a row of as many logits for every sample."
                )

    def initial_params(self, task: int = 0) -> dict[str, Tensor]:
        """Parameters and buffers as initialised: always the same for a seed and task."""
        return _tensors(self._initialised(task))

    def _initialised(self, task: int) -> nn.Module:
        torch.manual_seed(seed_of(self._seed, "init", task))
        return self._make().to(self.device)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: tensor.detach() for name, tensor in named}
