"""PNN: columns and adapters by hand, old columns that stay, and networks it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close
from method_parts import (
    ConvHeads,
    bound,
    context,
    easy_tasks,
    mlp_heads,
    residual,
    some_samples,
)
from small_runs import Gated, Make, Watched, run, watched
from torch import Tensor, nn

from trgp.benchmarks.models import MLP, AlexNet, LeNet
from trgp.engine.errors import InputError
from trgp.engine.train import train_step, trained_names
from trgp.methods import Batch
from trgp.methods.capacity import PUBLISHED, WHOLE
from trgp.methods.chain import chain_of
from trgp.methods.pnn import COLUMN, LATERAL, PNN

Columns = list[dict[str, Tensor]]


class WatchedPNN(Watched, PNN):
    pass


def at_task(
    make: Make, shape: tuple[int, ...], task: int, **options: Any
) -> tuple[PNN, dict[str, Tensor], Any, Batch, Columns]:
    """The method in a task, with its columns as the network names their tensors."""
    method, begun = bound(PNN(**{"width": 0.4} | options), make, True)
    params: Any = begun
    state: Any = {}
    columns = []
    for t in range(task + 1):
        samples = some_samples(12, *shape, seed=t)
        params, state = method.begin_task(context(method, params, samples, t, state))
        draw = torch.Generator().manual_seed(t)
        for name in trained_names(method, params, t):
            noise = torch.randn(params[name].shape, generator=draw, dtype=torch.float64)
            params[name] = params[name] + 0.3 * noise
        columns.append(dict(params))
        if t < task:
            params, state = method.end_task(context(method, params, samples, t, state))
    method.train_mode(task)
    return method, params, state, Batch(*samples, task, task), columns


def adapted(column: dict[str, Tensor], layer: str, below: list[Tensor]) -> Tensor:
    """relu(V [a_1 h^1; ...]) of the last two formulas of the paper's adapters, as a 1 x 1
    convolution of maps, or of units with several inputs each."""
    V, alpha = column[f"{LATERAL}{layer} V"], column[f"{LATERAL}{layer} alpha"]
    units = V.shape[1] // len(below)
    maps = [a * h.reshape(len(h), units, -1, 1) for a, h in zip(alpha, below, strict=True)]
    reduced = F.conv2d(torch.cat(maps, 1), V[:, :, None, None]).relu()
    return reduced.reshape(len(reduced), -1, *below[0].shape[2:])


def perceptron_by_hand(columns: Columns, x: Tensor) -> Tensor:
    """The newest column's logits."""
    seen: list[list[Tensor]] = []
    for k, own in enumerate(columns):
        h = [(x @ own["layers.0.weight"].T).relu()]
        for layer, weight in (("layers.1", "layers.1.weight"), ("heads", f"heads.{k}.weight")):
            z = h[-1] @ own[weight].T
            if k:
                below = [old[len(h) - 1] for old in seen]
                z = z + adapted(own, layer, below) @ own[f"{LATERAL}{layer} U"].T
            h.append(z.relu() if layer != "heads" else z)
        seen.append(h)
    return seen[-1][-1]


def normed(z: Tensor, own: dict[str, Tensor], name: str) -> Tensor:
    """BatchNorm by running averages, then ReLU."""
    mean, var = own[f"{name}.running_mean"], own[f"{name}.running_var"]
    weight, bias = own[f"{name}.weight"], own[f"{name}.bias"]
    return F.batch_norm(z, mean, var, weight, bias).relu()


def convolutions_by_hand(columns: Columns, x: Tensor) -> Tensor:
    """The same of ConvHeads in evaluation mode."""
    seen: list[dict[str, Tensor]] = []
    for k, own in enumerate(columns):
        h: dict[str, Tensor] = {}

        def beside(layer: str, k: int = k, own: dict[str, Tensor] = own) -> Tensor | None:
            return adapted(own, layer, [old[layer] for old in seen]) if k else None

        z = F.conv2d(x, own["conv1.weight"], own["conv1.bias"], padding=1)
        h["conv2"] = F.max_pool2d(normed(z, own, "bn1"), 2)
        z = F.conv2d(h["conv2"], own["conv2.weight"], own["conv2.bias"], padding=1)
        side = beside("conv2")
        if side is not None:
            z = z + F.conv2d(side, own[f"{LATERAL}conv2 U"], padding=1)
        h["fc1"] = F.max_pool2d(normed(z, own, "bn2"), 2).flatten(1)
        z = F.linear(h["fc1"], own["fc1.weight"], own["fc1.bias"])
        side = beside("fc1")
        if side is not None:
            z = z + side @ own[f"{LATERAL}fc1 U"].T
        z = F.batch_norm(
            z,
            own["bn3.running_mean"],
            own["bn3.running_var"],
            own["bn3.weight"],
            own["bn3.bias"],
        )
        h["heads"] = z.relu()
        logits = F.linear(h["heads"], own[f"heads.{k}.weight"], own[f"heads.{k}.bias"])
        side = beside("heads")
        if side is not None:
            logits = logits + side @ own[f"{LATERAL}heads U"].T
        seen.append(h)
    return logits


@pytest.mark.parametrize("task", [0, 1, 2])
def test_a_new_column_sees_the_old_ones_through_adapters(task: int) -> None:
    method, params, state, batch, columns = at_task(mlp_heads, (8,), task)
    assert params["layers.1.weight"].shape == (4, 5)  # 0.4 of 12 and 10 units
    weights = method.weights_for(params, state, task)
    assert_close(method.network(weights, batch.x, task), perceptron_by_hand(columns, batch.x))
    for j in range(task):  # and each of the old ones those before it
        own = method.weights_for(params, state, j)
        expected = perceptron_by_hand(columns[: j + 1], batch.x)
        assert_close(method.network(own, batch.x, j), expected)


def test_adapters_mix_maps_place_by_place() -> None:
    method, params, state, batch, columns = at_task(ConvHeads, (3, 8, 8), 2)
    assert params["fc1.weight"].shape == (4, 3 * 4)  # three maps of 2 x 2
    assert params[f"{LATERAL}fc1 V"].shape == (3, 2 * 3)
    assert params[f"{LATERAL}heads U"].shape == (3, 4)
    method.network.module.eval()
    found = method.network(method.weights_for(params, state, 2), batch.x, 2)
    assert_close(found, convolutions_by_hand(columns, batch.x))


def test_the_first_step_is_adam_on_the_new_column_alone() -> None:
    method, params, state, batch, columns = at_task(mlp_heads, (8,), 2)
    names = trained_names(method, params, 2)
    free = {n: params[n].clone().requires_grad_() for n in names}
    logits = perceptron_by_hand([*columns[:2], {**params, **free}], batch.x)
    loss = F.cross_entropy(logits, batch.y)
    found = torch.autograd.grad(loss, list(free.values()), allow_unused=True)
    grads = {n: g for n, g in zip(names, found, strict=True) if g is not None}
    assert {n for n in grads if not n.startswith(LATERAL)} == {
        *("layers.0.weight", "layers.1.weight", "heads.2.weight")
    }
    assert sum(n.startswith(LATERAL) for n in grads) == 6
    after, changes, value = train_step(method, params, state, batch, 0.01, names, [])
    assert_close(value, loss.detach())
    assert set(changes) - {"adam"} == {*state} - {"adam"}
    for name in names:
        g = grads.get(name)
        step = 0 if g is None else 0.01 * g / (g.abs() + 1e-8)
        assert_close(after[name], params[name] - step, 1e-7)


@pytest.mark.parametrize("make", [mlp_heads, lambda: ConvHeads(dropout=0.3)])
def test_old_tasks_stay_to_the_bit(make: Make, tmp_path: Path) -> None:
    """Their running averages too, while new columns train beside them."""
    shape = (8,) if make is mlp_heads else (3, 8, 8)
    tasks = easy_tasks(3, *shape)
    result, ends = watched(WatchedPNN, tasks, tmp_path, make, width=0.6, lr=0.02, epochs=4)
    assert result.bwt == 0
    for j, (_, (x, _)) in enumerate(tasks):
        for end in ends[j:]:
            assert torch.equal(end.logits(x, j), ends[j].logits(x, j))
    names = [n for n in ends[2].weights(2) if n.startswith(f"{COLUMN}1 ")]
    assert any("U" in n for n in names)
    for name in names:
        mine = ends[1].weights(1)[name.removeprefix(f"{COLUMN}1 ")]
        assert torch.equal(ends[2].weights(2)[name], mine)


def test_new_columns_differ_and_depend_on_the_seed_alone() -> None:
    first, second = (at_task(mlp_heads, (8,), 1)[4] for _ in range(2))
    assert all(torch.equal(t, second[1][n]) for n, t in first[1].items())
    assert not torch.equal(first[0]["layers.0.weight"], first[1]["layers.0.weight"])


def test_capacity_is_that_of_all_columns(tmp_path: Path) -> None:
    result, _ = watched(WatchedPNN, easy_tasks(3, 8), tmp_path, mlp_heads, width=0.4)
    column, head = 8 * 5 + 5 * 4, 4 * 3
    adapters = sum(5 * 4 + head + t * (5 * 5 + 4 * 4) + 2 * t for t in (1, 2))
    network = 8 * 12 + 12 * 10 + 3 * 10 * 3
    assert result.figures[PUBLISHED] == pytest.approx(
        100 * (3 * column + adapters + head) / network
    )
    assert result.figures[WHOLE] == pytest.approx(
        100 * (3 * column + adapters + 3 * head) / network
    )


# ---- chains ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "units"),
    [
        (lambda: MLP(8, (12, 10), 3, heads=2), (12, 10)),
        (lambda: LeNet(2, 5), (20, 50, 800, 500)),
        (lambda: AlexNet(2, 5), (64, 128, 256, 2048, 2048)),
    ],
)
def test_the_papers_chains_compute_at_any_width(make: Make, units: tuple[int, ...]) -> None:
    method, _ = bound(PNN(width=0.1), make, True)
    chain = method.chain
    assert chain.units == units
    x = torch.randn(2, *((8,) if len(units) == 2 else (3, 32, 32)), dtype=torch.float64)
    for widths in (units, [3 + k for k in range(len(units))], [n + 2 for n in units]):
        params = chain.drawn(chain.initial, widths, 0)
        assert {n: t.shape for n, t in params.items()} == {
            n: chain.shape(n, widths) for n in params
        }
        assert method.network(params, x, 1).shape == (2, make().heads[1].weight.shape[0])
        W = params[chain.weights[1]]
        opened = chain.opened(chain.weights[1], W, widths)
        assert opened.shape[:2] == (widths[1], widths[0])
        spread = chain.initial[chain.weights[1]].std()
        ratio = (W[0].numel() / chain.initial[chain.weights[1]][0].numel()) ** 0.5
        assert float(W.std() * ratio) == pytest.approx(float(spread), rel=0.5)


class Ungated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(2))

    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        return self.heads[head](x.flatten(1))


class Scaled(MLP):
    """With a parameter that is in no layer."""

    def __init__(self) -> None:
        super().__init__(8, (12,), 3, heads=2)
        self.scale = nn.Parameter(torch.ones(3))


class Stiff(MLP):
    """With a size in its code."""

    def __init__(self) -> None:
        super().__init__(8, (12,), 3, heads=2)

    def features(self, x: Tensor) -> Tensor:
        return super().features(x).view(-1, 12)


def test_a_network_of_one_width_is_refused_before_anything_is_learnt(tmp_path: Path) -> None:
    for method in ("pnn", "den", "rcl"):
        with pytest.raises(InputError, match=f"{method} widens .* Stiff is none: with a unit more"):
            run(easy_tasks(2, 8), method, tmp_path / "runs", Stiff)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (Ungated, "does not declare its units, which pnn needs; give it a method gates"),
        (residual, r"ResNet18 is none: .* Take an MLP, LeNet or AlexNet"),
        (Gated, "grouped is no linear layer and no convolution without groups"),
        (Scaled, "scale belongs to no layer of it"),
    ],
)
def test_what_is_no_chain_is_refused_in_a_sentence(make: Make, sentence: str) -> None:
    method, _ = bound(PNN(), make, True)
    with pytest.raises(ValueError, match=sentence):
        method.check()


@pytest.mark.parametrize("width", [0, -1.0, "x"])
def test_a_wrong_width_is_a_sentence(width: Any) -> None:
    with pytest.raises(ValueError, match="width must be"):
        PNN(width=width)


def test_the_perceptrons_chain_is_its_layers() -> None:
    chain = chain_of(bound(PNN(), mlp_heads, True)[0].network, "pnn")
    assert chain.layers == ("layers.0", "layers.1")
    assert chain.places["heads.1.weight"] == 2
