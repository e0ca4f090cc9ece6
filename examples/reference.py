"""TRGP and GPM in one file, straight from the papers, for reading.

TRGP: Lin, Yang, Fan and Zhang, ICLR 2022 (arXiv:2202.02931). GPM: Saha, Garg and Roy, ICLR 2021.
Sections, equation numbers and symbols are those of the TRGP paper; its layer index l is left out:

    W    (o, n)      weight of a layer; a kernel is flattened, a bias is one more column
    R    (n, N)      representations: the layer's inputs, or their patches, with a 1 for the bias
    M    (n, m)      bases of all old tasks, orthonormal
    B_j  (n, r_j)    bases of task j, which span S_j
    Q_j  (r_j, r_j)  scaling matrix: how a new task scales W inside S_j

Everything is dense and float64, and autograd passes through W_eff as it is written. The package
computes the same in cheaper ways, and its tests hold it to this file within 1e-10.
"""

import copy
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import SGD

Batch = tuple[Tensor, Tensor]
MakeSGD = Callable[[list[Tensor], list[Tensor]], SGD]  # of all W and all Q


# ---- 4.1 Trust region --------------------------------------------------------------------------


def proj(A: Tensor, B: Tensor) -> Tensor:
    """Proj_S(A) = A B B', the projection onto S = span(B) (2)."""
    return A @ B @ B.T


def trust_region(G: Tensor, bases: list[Tensor], epsilon: float, K: int) -> list[int]:
    """The K tasks with the largest ||Proj_Sj(G)|| among those where it is >= epsilon ||G|| (3)."""
    norms = [proj(G, B).norm() for B in bases]
    passing = [j for j, norm in enumerate(norms) if norm >= epsilon * G.norm()]
    return sorted(passing, key=lambda j: norms[j], reverse=True)[:K]


# ---- 4.2 Scaled weight projection --------------------------------------------------------------


def scaled_proj(W: Tensor, B: Tensor, Q: Tensor) -> Tensor:
    """Proj^Q_S(W) = W B Q B' (6)."""
    return W @ B @ Q @ B.T


# ---- 4.3 Task subspace construction ------------------------------------------------------------


def subspace(R: Tensor, M: Tensor, threshold: float, old_first: bool) -> tuple[Tensor, Tensor]:
    """The bases B of a task with representations R, and M with the new ones among them.

    B is the shortest choice that holds threshold ||R||_F^2 (7): the strongest bases, old and new,
    or with `old_first`, as in GPM, all old ones before any new one. The paper prints the residual
    as R - R M M'; its dimensions ask for R - M M' R.
    """
    delta = (M.T @ R).square().sum(1)  # old bases: delta_i = u_i' R R' u_i
    U, sigma, _ = torch.linalg.svd(R - M @ M.T @ R, full_matrices=False)  # new bases
    energies, total = torch.cat([delta, sigma.square()]), R.square().sum()
    order = torch.arange(len(energies)) if old_first else energies.argsort(descending=True)
    ranked = energies[order]
    before = ranked.cumsum(0) - ranked
    chosen = order[(before < threshold * total) & (ranked > 1e-14 * total)]  # less is rounding
    bases, new = torch.cat([M, U], dim=1), chosen[chosen >= M.shape[1]]
    return bases[:, chosen], torch.cat([M, bases[:, new]], dim=1)


# ---- 4.4 Continual learning --------------------------------------------------------------------


class Layer:
    """A linear layer or a convolution as a matrix W, and what is kept of every task."""

    def __init__(self, module: nn.Linear | nn.Conv2d) -> None:
        self.module = module
        self.shapes = {name: p.shape for name, p in module.named_parameters()}
        columns = [p.detach().double().reshape(len(p), -1) for p in module.parameters()]
        self.W = torch.cat(columns, dim=1).requires_grad_()
        self.M = torch.zeros(self.W.shape[1], 0).double()
        self.B: list[Tensor] = []
        self.Q: list[dict[int, Tensor]] = []  # of every task, Q_j by the tasks j that it trusts
        self.x: Tensor  # the module's input at its last call
        module.register_forward_pre_hook(lambda _, inputs: setattr(self, "x", inputs[0]))

    def effective_weight(self, t: int) -> Tensor:
        """W_eff = W + sum_j [Proj^Q_Sj(W) - Proj_Sj(W)] over the trust region of task t (9)."""
        W_eff = self.W
        for j, Q in self.Q[t].items():
            W_eff = W_eff + scaled_proj(self.W, self.B[j], Q) - proj(self.W, self.B[j])
        return W_eff

    def parameters(self, t: int) -> dict[str, Tensor]:
        """W_eff as the module's weight and bias."""
        widths = [shape[1:].numel() for shape in self.shapes.values()]
        parts = self.effective_weight(t).split(widths, dim=1)
        return {key: parts[i].reshape(shape) for i, (key, shape) in enumerate(self.shapes.items())}

    def representations(self) -> Tensor:
        """R of the last call: the columns that W was multiplied with."""
        x, module = self.x, self.module
        if isinstance(module, nn.Conv2d):
            assert not isinstance(module.padding, str)
            x = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride).mT
        R = x.flatten(0, -2).T
        return R if module.bias is None else torch.cat([R, torch.ones_like(R[:1])])


class TRGP:
    """A network that learns task after task; call it with inputs and their task for the logits."""

    old_first = False

    def __init__(
        self, network: nn.Module, threshold: float, epsilon: float = 0.5, K: int = 2
    ) -> None:
        self.network = copy.deepcopy(network)
        self.threshold, self.epsilon, self.K = threshold, epsilon, K
        self.layers = {
            name: Layer(module)
            for name, module in self.network.named_modules()
            if isinstance(module, nn.Linear | nn.Conv2d)
        }

    def __call__(self, x: Tensor, t: int) -> Tensor:
        weights = {
            f"{name}.{key}": tensor
            for name, layer in self.layers.items()
            for key, tensor in layer.parameters(t).items()
        }
        logits: Tensor = functional_call(self.network, weights, (x,))
        return logits

    def learn(self, batches: Iterable[Batch], first: Batch, samples: Tensor, sgd: MakeSGD) -> None:
        """Learn a task from its batches; `first` is the batch of (3), and R that of `samples`."""
        layers = list(self.layers.values())
        W = [layer.W for layer in layers]
        for layer in layers:
            layer.Q.append({})  # so W_eff = W, the model that (3) asks for
        t = len(layers[0].Q) - 1
        gradients = torch.autograd.grad(F.cross_entropy(self(first[0], t), first[1]), W)
        for layer, G in zip(layers, gradients, strict=True):
            for j in trust_region(G, layer.B, self.epsilon, self.K):
                layer.Q[t][j] = torch.eye(layer.B[j].shape[1]).double().requires_grad_()

        optimizer = sgd(W, [Q for layer in layers for Q in layer.Q[t].values()])
        for x, y in batches:  # (8), where the gradient of W is projected
            optimizer.zero_grad()
            F.cross_entropy(self(x, t), y).backward()
            for layer in layers:
                if layer.W.grad is not None:
                    layer.W.grad -= proj(layer.W.grad, layer.M)
            optimizer.step()

        with torch.no_grad():
            self(samples, t)
        for layer in layers:
            B, layer.M = subspace(layer.representations(), layer.M, self.threshold, self.old_first)
            layer.B.append(B)


class GPM(TRGP):
    """TRGP that trusts no task, and counts old bases before new ones."""

    old_first = True

    def __init__(self, network: nn.Module, threshold: float) -> None:
        super().__init__(network, threshold, K=0)


# ---- Six small tasks ---------------------------------------------------------------------------


def run() -> dict[str, float]:
    """The test accuracy on the first five of six tasks after all are learnt, by method.

    All have the same ten noisy patterns to tell apart, with the features in an order of their own.
    """
    torch.manual_seed(0)
    patterns, orders = torch.randn(10, 64).double(), [torch.randperm(64) for _ in range(6)]

    def draw(order: Tensor) -> Batch:
        y = torch.randint(10, (500,))
        return (patterns[y] + 0.8 * torch.randn(500, 64))[:, order], y

    train, test = [draw(order) for order in orders], [draw(order) for order in orders]
    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    learners = {
        "fine-tuning": TRGP(network, threshold=0),
        "GPM": GPM(network, threshold=0.7),
        "TRGP": TRGP(network, threshold=0.7),
    }
    accuracies = {}
    for name, learner in learners.items():
        for x, y in train:
            batches = [(x[i], y[i]) for _ in range(5) for i in torch.randperm(500).split(20)]
            learner.learn(batches, (x, y), x, lambda W, Q: SGD(W + Q, lr=0.1))
        with torch.no_grad():
            hits = [learner(x, t).argmax(1) == y for t, (x, y) in enumerate(test[:-1])]
        accuracies[name] = torch.cat(hits).double().mean().item()
    return accuracies


if __name__ == "__main__":
    found = ", ".join(f"{accuracy:.0%} with {name}" for name, accuracy in run().items())
    print(f"Accuracy on five tasks after learning a sixth: {found}.")
