"""A network as a pure function of its parameters."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ..benchmarks import Task
from ..draws import seed_of
from ..fast.kernels import own_kernels
from ..methods.base import BENT, GATE
from ..types import Params


class Network:
    """The modules of one run on its device; their parameters are always passed in."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        separate_heads: bool,
        device: torch.device,
        seed: int,
        precision: str = "float32",
    ) -> None:
        self._make = make
        self._precision = precision
        self._seed = seed
        self.device = device
        self.separate_heads = separate_heads
        self.module = self._initialised(0)
        self.example: Tensor | None = None  # some samples, once `check` has seen the tasks
        takes_head = "head" in inspect.signature(self.module.forward).parameters
        if separate_heads and not (takes_head and hasattr(self.module, "heads")):
            raise ValueError(
                f"{type(self.module).__name__} has one head, but every task here has its own; keep "
                "one per task in self.heads, and let forward(x, head) compute the head it names."
            )
        self.heads = len(self.module.heads) if separate_heads else 1  # type: ignore[arg-type]
        self._all = _EveryHead(self.module)
        params = dict(self.module.named_parameters())
        self.trainable = frozenset(name for name, p in params.items() if p.requires_grad)
        self.buffers = tuple(name for name, _ in self.module.named_buffers())
        self.names = frozenset([*params, *self.buffers])
        self.nbytes = sum(p.nbytes for p in params.values())
        self.weights = sum(p.numel() for p in params.values())

    def __call__(self, params: Params, x: Tensor, head: int) -> Tensor:
        """The logits of one head."""
        chosen = {"head": head} if self.separate_heads else {}
        with self._gated(params) as own, own_kernels(self.device):
            logits: Tensor = functional_call(self.module, own, (x,), chosen)
        return logits

    def every_head(self, params: Params, x: Tensor) -> Tensor:
        """The logits of all heads, (heads, samples, classes), from one pass where possible."""
        if not self.separate_heads:
            return self(params, x, 0).unsqueeze(0)
        if not hasattr(self.module, "features"):
            return torch.stack([self(params, x, t) for t in range(self.heads)])
        with self._gated(params) as own, own_kernels(self.device):
            inside = {f"network.{name}": tensor for name, tensor in own.items()}
            logits: Tensor = functional_call(self._all, inside, (x,))
        return logits

    @contextmanager
    def _gated(self, params: Params) -> Iterator[dict[str, Tensor]]:
        """Yield the network's own parameters; while open, others act on its modules' inputs."""
        own: dict[str, Tensor] = {}
        hooks: dict[str, Callable[..., tuple[Tensor, ...]]] = {}
        bends: dict[str, dict[str, Tensor]] = {}
        for name, tensor in params.items():
            if name.startswith(GATE):
                hooks[name.removeprefix(GATE)] = partial(_gate, tensor)
            elif name.startswith(BENT):
                module, _, which = name.removeprefix(BENT).partition("/")
                bends.setdefault(module, {})[which] = tensor
            else:
                own[name] = tensor
        hooks |= {module: partial(_bend, pair) for module, pair in bends.items()}
        handles = [
            self.module.get_submodule(name).register_forward_pre_hook(hook)
            for name, hook in hooks.items()
        ]
        try:
            yield own
        finally:
            for handle in handles:
                handle.remove()

    def rounding(self) -> AbstractContextManager[None]:
        """Round forward and backward passes to the chosen precision while open."""
        return self._rounded(True)

    def exact(self) -> AbstractContextManager[None]:
        """Round nothing while open, even inside `rounding`."""
        return self._rounded(False)

    @contextmanager
    def _rounded(self, on: bool) -> Iterator[None]:
        if self._precision == "tf32":
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("high" if on else "highest")
            try:
                yield
            finally:
                torch.set_float32_matmul_precision(before)
        elif self._precision == "bfloat16":
            # Without its cache of rounded weights, because a captured graph would outlive it.
            with torch.autocast(self.device.type, torch.bfloat16, on, cache_enabled=False):
                yield
        else:
            yield

    def check(self, tasks: Sequence[Task]) -> None:
        """Refuse tasks that the network cannot compute."""
        params = self.initial_params()
        self.module.eval()
        for t, task in enumerate(tasks):
            x, _ = task.train.batch(slice(0, 2))
            self.example = x if t == 0 else self.example
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
                    f"{type(self.module).__name__} returns {shape or type(logits).__name__} for "
                    f"{len(x)} samples of task {t}, which has {task.classes} classes; let it "
                    "return a row of as many logits per sample."
                )

    def initial_params(self, task: int = 0) -> dict[str, Tensor]:
        """Return initial parameters and buffers, which depend only on the seed and the task."""
        return _tensors(self._initialised(task))

    def _initialised(self, task: int) -> nn.Module:
        torch.manual_seed(seed_of(self._seed, "init", task))
        return self._make().to(self.device)


class _EveryHead(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        features = self.network.features(x)  # type: ignore[operator]
        return torch.stack([head(features) for head in self.network.heads])  # type: ignore[union-attr]


def _gate(factors: Tensor, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Scale the input (N, channels, ...), or its flattened form, by one factor per channel."""
    x, *rest = args
    each = x.shape[1] // len(factors)
    wide = factors.repeat_interleave(each) if each > 1 else factors
    return x * wide.view(1, -1, *[1] * (x.dim() - 2)), *rest


def _bend(
    pair: Mapping[str, Tensor], module: nn.Module, args: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Add the low-rank input correction, x + x B S' B', with the kernels of linear layers."""
    x, *rest = args
    B, S = pair["B"], pair["S"]
    return x + F.linear(F.linear(F.linear(x, B.mT), S), B), *rest


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: tensor.detach() for name, tensor in named}
