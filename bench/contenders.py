"""One training step of the same net and the same task, the way each contender does it.

All of them see a net that is a plain sequence of named modules, and for every protected layer the
same memory: M, and which of its columns make the bases of two old tasks.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trgp
from trgp.core import native
from trgp.core.keep import with_coordinates
from trgp.core.memory import Memory
from trgp.core.subspace import columns_of
from trgp.learner.learner_state import Known, TaskRecord
from trgp.types import TaskId

LR = 0.01
OLD_TASKS = 2

Batch = tuple[Tensor, Tensor]


class Net(NamedTuple):
    """A net of the paper with its batch size; every layer with a weight matrix but the head."""

    name: str
    make: Callable[[], nn.Sequential]
    batch: int
    shape: tuple[int, ...]


class Old(NamedTuple):
    """What a layer holds of old tasks."""

    M: Tensor  # (1, n, m)
    masks: list[Tensor]  # (1, m) each

    @property
    def bases(self) -> list[Tensor]:
        return [columns_of(self.M, mask) for mask in self.masks]


def mlp() -> nn.Sequential:
    """784-100-100-10 of permuted MNIST; its classifier is protected like any other layer."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["fc1"] = nn.Linear(784, 100, bias=False)
    layers["relu1"] = nn.ReLU()
    layers["fc2"] = nn.Linear(100, 100, bias=False)
    layers["relu2"] = nn.ReLU()
    layers["fc3"] = nn.Linear(100, 10, bias=False)
    return nn.Sequential(layers)


def alexnet() -> nn.Sequential:
    """The AlexNet of split CIFAR-100, whose BN always uses the statistics of the batch."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels = 3
    for i, (out, kernel, drop) in enumerate([(64, 4, 0.2), (128, 3, 0.2), (256, 2, 0.5)], 1):
        layers[f"conv{i}"] = nn.Conv2d(channels, out, kernel, bias=False)
        layers[f"bn{i}"] = nn.BatchNorm2d(out, track_running_stats=False)
        layers[f"relu{i}"] = nn.ReLU()
        layers[f"drop{i}"] = nn.Dropout(drop)
        layers[f"pool{i}"] = nn.MaxPool2d(2)
        channels = out
    layers["flatten"] = nn.Flatten()
    width = 1024
    for i in (1, 2):
        layers[f"fc{i}"] = nn.Linear(width, 2048, bias=False)
        layers[f"fbn{i}"] = nn.BatchNorm1d(2048, track_running_stats=False)
        layers[f"frelu{i}"] = nn.ReLU()
        layers[f"fdrop{i}"] = nn.Dropout(0.5)
        width = 2048
    layers["head"] = nn.Linear(width, 10, bias=False)
    return nn.Sequential(layers)


MLP = Net("MLP", mlp, 10, (784,))
ALEXNET = Net("AlexNet", alexnet, 64, (3, 32, 32))


def protected(net: nn.Sequential) -> dict[str, nn.Linear | nn.Conv2d]:
    return {
        name: module
        for name, module in net.named_children()
        if isinstance(module, nn.Linear | nn.Conv2d) and name != "head"
    }


def matrix(module: nn.Linear | nn.Conv2d) -> Tensor:
    """W as (1, o, n)."""
    return module.weight.flatten(1).unsqueeze(0)


def random_memory(net: nn.Sequential, share: float, seed: int) -> dict[str, Old]:
    """M fills a share of each layer's width; each old task has a random half of its columns."""
    draw = torch.Generator().manual_seed(seed)
    olds = {}
    for name, module in protected(net).items():
        W = matrix(module)
        n = W.shape[2]
        m = round(share * n)
        M = torch.linalg.qr(torch.randn(1, n, m, generator=draw, dtype=torch.float64)).Q
        halves = [torch.randperm(m, generator=draw) < m // 2 for _ in range(OLD_TASKS)]
        olds[name] = Old(M.to(W.dtype), [half.unsqueeze(0) for half in halves])
    return olds


class Contender(ABC):
    """Trains a net of its own; the weights are read only to compare contenders."""

    def __init__(self, net: nn.Sequential, olds: dict[str, Old], batch: Batch) -> None:
        self.net = net
        self.olds = olds
        self.layers = protected(net)

    @abstractmethod
    def step(self, batch: Batch) -> None: ...

    @abstractmethod
    def weights(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Per protected layer the effective and the shared weight, (1, o, n)."""


class PlainSGD(Contender):
    """Fine-tuning: what every other step is measured by."""

    def __init__(self, net: nn.Sequential, olds: dict[str, Old], batch: Batch) -> None:
        super().__init__(net, olds, batch)
        self.optimizer = self.make_optimizer(batch)

    def make_optimizer(self, batch: Batch) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=LR)

    def step(self, batch: Batch) -> None:
        x, y = batch
        self.optimizer.zero_grad()
        F.cross_entropy(self.net(x), y).backward()
        self.optimizer.step()

    def weights(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {name: (matrix(m), matrix(m)) for name, m in self.layers.items()}


class DropInGPM(PlainSGD):
    """`trgp.GPM` around the loop of plain SGD."""

    def make_optimizer(self, batch: Batch) -> torch.optim.Optimizer:
        exclude = ["head"] if "head" in dict(self.net.named_children()) else []
        self.learner = learner = self.make_learner(exclude)  # it guards as long as it is there
        # The memory of two tasks that were never learnt: its size is what matters here.
        memory = {
            name: Memory(
                M=old.M,
                C=matrix(self.layers[name]).detach() @ old.M,
                ranks=torch.tensor([old.M.shape[2]]),
                masks=dict(enumerate(old.masks)),
            )
            for name, old in self.olds.items()
        }
        tasks: dict[TaskId, TaskRecord] = {j: TaskRecord({}, {}, {}) for j in range(OLD_TASKS)}
        learner._state.known = Known(memory, tasks)
        self.memory = memory
        learner.begin_task(OLD_TASKS, [batch], lambda net, b: F.cross_entropy(net(b[0]), b[1]))
        optimizer = torch.optim.SGD(learner.parameters(), lr=LR)
        learner.attach(optimizer)
        return optimizer

    def make_learner(self, exclude: list[str]) -> trgp.GPM:
        return trgp.GPM(self.net, exclude=exclude, norm="shared")


class DropInTRGP(DropInGPM):
    """`trgp.TRGP`: the parameter is the effective weight, corrected before and after a step."""

    def make_learner(self, exclude: list[str]) -> trgp.GPM:
        return trgp.TRGP(self.net, epsilon=0.0, top_k=OLD_TASKS, exclude=exclude, norm="shared")

    def weights(self) -> dict[str, tuple[Tensor, Tensor]]:
        effective = {name: matrix(module).detach() for name, module in self.layers.items()}
        return {
            name: (W, with_coordinates(W, self.memory[name].M, self.memory[name].C))
            for name, W in effective.items()
        }


class NativeTRGP(Contender):
    """The native form, every layer in the cheaper of its exact forms."""

    def __init__(self, net: nn.Sequential, olds: dict[str, Old], batch: Batch) -> None:
        super().__init__(net, olds, batch)
        self.tasks: dict[str, native.Task] = {}
        self.W: dict[str, Tensor] = {}
        self.factored: set[str] = set()
        for name, module in self.layers.items():
            W, (M, masks) = matrix(module).detach(), olds[name]
            g, o, n = W.shape
            form: native.Form = "gradient"
            if isinstance(module, nn.Linear):
                form = native.cheaper_form(len(batch[0]), len(masks), g, o, n, M.shape[2])
            self.tasks[name], self.W[name] = native.begin(W, M, masks, form), W
            if form == "factored":
                self.factored.add(name)
            module.weight.requires_grad_(False)
        self.others = [p for p in net.parameters() if p.requires_grad]

    def step(self, batch: Batch) -> None:
        """Backward stops at the outputs of factored layers: their gradients are never formed."""
        h, y = batch
        factors: dict[str, tuple[Tensor, Tensor]] = {}
        weights: dict[str, Tensor] = {}
        for name, module in self.net.named_children():
            if name in self.factored:
                x, h = h, F.linear(h, self.W[name][0])
                if not h.requires_grad:
                    h.requires_grad_()
                factors[name] = h, x.detach()
            elif name in self.W:
                weights[name] = self.W[name].requires_grad_()
                h = apply(module, h, weights[name])
            else:
                h = module(h)
        wanted = [*(h for h, _ in factors.values()), *weights.values(), *self.others]
        grads = iter(torch.autograd.grad(F.cross_entropy(h, y), wanted))
        with torch.no_grad():
            for name, (_, x) in factors.items():
                along = native.scaled_factors(self.tasks[name], next(grads), x)
                taken_off(self.W[name], along)
            for name in weights:
                G = next(grads)
                back = native.scaled_excess(self.tasks[name], G)
                W = self.W[name].detach().sub_(G, alpha=LR)
                self.W[name] = taken_off(W, back._replace(left=-back.left))
            for p in self.others:
                p.sub_(next(grads), alpha=LR)

    def weights(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {
            name: (W, with_coordinates(W, self.tasks[name].M, self.tasks[name].C))
            for name, W in self.W.items()
        }


class DenseTRGP(Contender):
    """TRGP in full n x n matrices, as the published code has it.

    B Q B' and B B' are formed in every forward pass and differentiated through, Q is a full n x n
    parameter of which a corner is used, and gradients are projected by the dense P = M M'.
    """

    def __init__(self, net: nn.Sequential, olds: dict[str, Old], batch: Batch) -> None:
        super().__init__(net, olds, batch)
        self.P = {name: old.M[0] @ old.M[0].mT for name, old in olds.items()}
        self.bases = {name: [B[0] for B in old.bases] for name, old in olds.items()}
        self.Q = {
            name: [nn.Parameter(torch.eye(len(B), dtype=B.dtype)) for B in bases]
            for name, bases in self.bases.items()
        }
        scalings = [Q for layer in self.Q.values() for Q in layer]
        self.optimizer = torch.optim.SGD([*net.parameters(), *scalings], lr=LR)

    def step(self, batch: Batch) -> None:
        h, y = batch
        self.optimizer.zero_grad()
        for name, module in self.net.named_children():
            h = apply(module, h, self.effective(name)) if name in self.Q else module(h)
        F.cross_entropy(h, y).backward()
        with torch.no_grad():
            for name, module in self.layers.items():
                assert module.weight.grad is not None
                G = module.weight.grad.flatten(1)
                module.weight.grad = (G - G @ self.P[name]).view_as(module.weight)
        self.optimizer.step()

    def effective(self, name: str) -> Tensor:
        W = self.layers[name].weight.flatten(1)
        total = W
        for B, Q in zip(self.bases[name], self.Q[name], strict=True):
            r = B.shape[1]
            total = total + W @ (B @ Q[:r, :r] @ B.mT) - W @ (B @ B.mT)
        return total

    def weights(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {
            name: (self.effective(name)[None], matrix(module))
            for name, module in self.layers.items()
        }


def taken_off(W: Tensor, along: native.Product) -> Tensor:
    """A step of W along it, in its memory."""
    return native.taken_off(W, along._replace(left=LR * along.left))


def apply(module: nn.Module, x: Tensor, W: Tensor) -> Tensor:
    """A protected layer with another weight than its own."""
    if isinstance(module, nn.Conv2d):
        return F.conv2d(x, W.view(module.weight.shape))
    return F.linear(x, W.flatten(0, -2))


CONTENDERS: dict[str, type[Contender]] = {
    "plain SGD": PlainSGD,
    "GPM, drop-in": DropInGPM,
    "TRGP, drop-in": DropInTRGP,
    "TRGP, native": NativeTRGP,
    "TRGP, dense (as published)": DenseTRGP,
}
# These three claim to compute the same thing.
EQUAL = [name for name in CONTENDERS if name.startswith("TRGP")]
