"""HAT: what gates close off, what they hold in place, and how they are learnt."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close
from method_parts import (
    ConvHeads,
    OneHead,
    SaturatedHAT,
    WatchedHAT,
    bound,
    context,
    eager,
    gradients,
    mlp_heads,
    moved_at_random,
    residual,
    some_samples,
)
from small_runs import CLASSES, Conv, Gated, Heads, Make, run, some_tasks, watched
from torch import Tensor, nn

import trgp.benchmarks.models
from trgp.benchmarks.models import MLP, AlexNet, LeNet
from trgp.engine.errors import InputError
from trgp.engine.network import Network
from trgp.engine.train import train_step
from trgp.gates import HEADS, Gate
from trgp.methods import Batch
from trgp.methods.hat import HAT, OWN

UNDECIDED = "share of gates between 0.05 and 0.95"


def conv_heads() -> nn.Module:
    """With the statistics of the batch at hand, as all networks of the papers have them."""
    return ConvHeads(track=False)


class Grouped(Gated):
    """One of its convolutions is grouped; without dropout, and with the batch's statistics."""

    def __init__(self) -> None:
        super().__init__(track=False)

    def features(self, x: Tensor) -> Tensor:
        return Conv.features(self, x)


SMALL: dict[str, tuple[Make, tuple[int, ...]]] = {
    "mlp": (mlp_heads, (8,)),
    "conv": (conv_heads, (3, 8, 8)),
    "grouped": (Grouped, (4, 4, 4)),
    "residual": (residual, (3, 16, 16)),
}


def random_gates(method: HAT, seed: int = 0, *, hard: bool = False) -> dict[str, Tensor]:
    """A number from 0 to 1 for every unit, or one of the two."""
    draw = torch.Generator().manual_seed(seed)
    shape = {gate.name: gate.units for gate in method.gates}
    found = {n: torch.rand(k, generator=draw, dtype=torch.float64) for n, k in shape.items()}
    return {n: (a > 0.5).double() for n, a in found.items()} if hard else found


def with_embeddings(method: HAT, params: Any, size: float = 1.0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(5)
    own = {
        OWN + g.name: size * torch.randn(g.units, generator=draw, dtype=torch.float64)
        for g in method.gates
    }
    return {**params, **own}


def held_in_layer(gates: list[Gate], name: str, used: Any, shape: torch.Size) -> Tensor:
    """min of what is used after and before each weight, by hand; a vector's is that after it."""
    (after,) = [gate for gate in gates if name in gate.producers]
    before = [gate for gate in gates if name in gate.consumers]
    if len(shape) == 1 or not before:
        return used[after.name].view(-1, *[1] * (len(shape) - 1)).expand(shape)
    groups = max(1, before[0].units // shape[1])
    group = torch.arange(shape[0]) // (shape[0] // groups)
    channel = group[:, None] * shape[1] + torch.arange(shape[1])
    unit = channel // (groups * shape[1] // before[0].units)  # that an input comes from
    held = torch.minimum(used[after.name][:, None], used[before[0].name][unit])
    return held.view(*held.shape, *[1] * (len(shape) - 2)).expand(shape)


# ---- old tasks stay --------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_with_saturated_masks_old_weights_and_logits_stay(name: str, tmp_path: Path) -> None:
    """Weights between used units to the bit, and logits within 1e-6 in float32."""
    make, shape = SMALL[name]
    tasks = some_tasks(3, *shape, samples=24)
    result, ends = watched(SaturatedHAT, tasks, tmp_path, make)
    assert result.figures[UNDECIDED] == 0
    gates = ends[0].method.gates
    weights = {n for g in gates for p in g.producers for n in (f"{p}.weight", f"{p}.bias")}
    weights &= ends[0].params.keys()
    for t, end in enumerate(ends):
        open_ = end.state["gates"][str(t)]
        assert all(set(a.tolist()) <= {0.0, 1.0} for a in open_.values())
        x = tasks[t][1][0]
        then = end.logits(x, t)
        assert then.abs().max() > 0.01
        for later in ends[t + 1 :]:
            moved = 0
            for key in weights:
                before, after = end.params[key], later.params[key]
                layer = key.rpartition(".")[0]
                held = held_in_layer(gates, layer, end.state["used"], before.shape) == 1
                assert torch.equal(before[held], after[held]), key
                moved += int((before != after).sum())
            assert moved > 0
            assert torch.equal(end.params[f"heads.{t}.weight"], later.params[f"heads.{t}.weight"])
            torch.testing.assert_close(later.logits(x, t), then, rtol=0, atol=1e-6)
    rows = result.accuracy_matrix
    assert all(rows[i][j] == rows[j][j] for i in range(3) for j in range(i))


def test_of_a_head_that_tasks_share_only_what_new_units_feed_moves(tmp_path: Path) -> None:
    """So that old tasks stay there as well."""
    tasks = some_tasks(3)
    result, ends = watched(SaturatedHAT, tasks, tmp_path, OneHead)
    for t, end in enumerate(ends):
        held = end.state["used"][HEADS] == 1
        then = end.logits(tasks[t][1][0], t)
        assert then.abs().max() > 0.01
        for later in ends[t + 1 :]:
            before, after = end.params["heads.0.weight"], later.params["heads.0.weight"]
            assert torch.equal(before[:, held], after[:, held])
            assert not torch.equal(before[:, ~held], after[:, ~held])
            assert torch.equal(end.params["heads.0.bias"], later.params["heads.0.bias"])
            now = later.logits(tasks[t][1][0], t)
            torch.testing.assert_close(now, then, rtol=0, atol=1e-6)
    rows = result.accuracy_matrix
    assert all(rows[i][j] == rows[j][j] for i in range(3) for j in range(i))


def test_running_statistics_of_old_tasks_stay(tmp_path: Path) -> None:
    tasks = some_tasks(2, 3, 8, 8, samples=24)
    _, ends = watched(SaturatedHAT, tasks, tmp_path, ConvHeads)
    x = tasks[0][1][0]
    torch.testing.assert_close(ends[1].logits(x, 0), ends[0].logits(x, 0), rtol=0, atol=1e-6)


LARGE: dict[str, tuple[Make, tuple[int, ...]]] = {
    "mlp": (mlp_heads, (8,)),
    "conv": (conv_heads, (3, 8, 8)),
    "grouped": (Grouped, (4, 4, 4)),
    "residual": (residual, (3, 16, 16)),
    "AlexNet": (lambda: AlexNet(2, CLASSES), (3, 32, 32)),
    "LeNet": (lambda: LeNet(2, CLASSES), (3, 32, 32)),  # whose norm mixes channels
}


@pytest.mark.parametrize("name", LARGE)
def test_only_weights_between_open_units_count(name: str) -> None:
    """So that a task which finds these unchanged computes what it did: also through additions."""
    make, shape = LARGE[name]
    method, params = bound(HAT(), make, True)
    open_ = random_gates(method, hard=True)
    changed = moved_at_random(params, 3)
    among = dict(params)
    for key, param in changed.items():
        layer = key.rpartition(".")[0]
        if layer == "heads.1":
            wide = open_[HEADS].repeat_interleave(param.shape[-1] // len(open_[HEADS]))
            held = wide.expand_as(param) if param.dim() > 1 else torch.ones_like(param)
        elif layer.startswith("heads."):
            held = torch.zeros_like(param)
        else:
            held = held_in_layer(method.gates, layer, open_, param.shape)
        among[key] = torch.where(held == 1, params[key], param)
    x, _ = some_samples(4, *shape)
    method.network.module.eval()
    with torch.no_grad():
        then, now, without = (
            method.network(weights, x, 1)
            for weights in (
                method.gated(params, open_, 1),
                method.gated(among, open_, 1),
                among,
            )
        )
    assert then.abs().max() > 1e-3
    assert (now - then).abs().max() <= 1e-10 * then.abs().max()
    assert (without - then).abs().max() > 0.1 * then.abs().max()


@pytest.mark.parametrize("name", trgp.benchmarks.models.__all__)
def test_gates_of_every_network_name_its_layers_and_their_units(name: str) -> None:
    kind = getattr(trgp.benchmarks.models, name)
    module = kind(filters=4) if name == "ResNet18" else kind()
    modules = dict(module.named_modules())
    gates = module.gates()
    layers = [
        key
        for key, layer in modules.items()
        if isinstance(layer, (nn.Linear, nn.Conv2d)) and not key.startswith("heads.")
    ]
    norms = [
        key for key, layer in modules.items() if isinstance(layer, nn.modules.batchnorm._NormBase)
    ]
    produced = [producer for gate in gates for producer in gate.producers]
    consumed = [consumer for gate in gates for consumer in gate.consumers]
    assert sorted(produced) == sorted(layers + norms)
    assert sorted(consumed) == sorted(layers[1:])
    assert len({gate.name for gate in gates}) == len(gates)
    assert [gate.name for gate in gates if gate.name == HEADS] == [HEADS]
    for gate in gates:
        for producer in gate.producers:
            assert len(modules[producer].weight) == gate.units
        assert gate.module(0) in modules
        inside = (gate.module(0), f"{gate.module(0)}.")
        if list(modules[gate.module(0)].parameters()):
            assert all(key == inside[0] or key.startswith(inside[1]) for key in gate.consumers)
        for consumer in gate.consumers or ("heads.0",):
            assert modules[consumer].weight.shape[1] % gate.units == 0


# ---- a step ----------------------------------------------------------------------------------


@contextmanager
def gated_by_hand(module: nn.Module, a: Any, head: int) -> Iterator[None]:
    """A plain module whose layers see their inputs times the gates, also where flattened."""

    def hook(gate: Tensor) -> Any:
        def multiply(layer: nn.Module, args: tuple[Tensor]) -> Tensor:
            (x,) = args
            units = x.reshape(len(x), len(gate), -1)
            return (units * gate[None, :, None]).reshape(x.shape)

        return multiply

    handles = [
        module.get_submodule(f"heads.{head}" if name == HEADS else name).register_forward_pre_hook(
            hook(gate)
        )
        for name, gate in a.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("progress", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("task", [0, 1])
@pytest.mark.parametrize("name", SMALL)
def test_a_step_is_that_of_a_plain_module_and_the_papers_formulas(
    name: str, task: int, progress: float
) -> None:
    make, shape = SMALL[name]
    method, plain = bound(HAT(s_max=20.0, sparsity=0.6), make, True)
    params = with_embeddings(method, plain, 0.2)
    used = random_gates(method, 1)
    state: Any = {"used": used} if task else {}
    batch = Batch(*some_samples(8, *shape), task, task, progress=progress)
    method.train_mode(task)
    s = 1 / 20 + (20 - 1 / 20) * progress
    # By hand: the embeddings through gates that are leaves of the graph.
    module = eager(method, params)
    e = {gate.name: params[OWN + gate.name] for gate in method.gates}
    a = {key: (1 / (1 + torch.exp(-s * value))).requires_grad_() for key, value in e.items()}
    free = {key: 1 - used[key] if task else torch.ones_like(gate) for key, gate in a.items()}
    with gated_by_hand(module, a, task):
        loss = F.cross_entropy(module(batch.x, task), batch.y)
    opened = sum((a[key] * free[key]).sum() for key in a)
    loss = loss + 0.6 * opened / sum(gate.sum() for gate in free.values())
    slopes = torch.autograd.grad(loss, list(a.values()), retain_graph=True)
    weights = gradients(loss, module)

    after, changed, found = train_step(method, params, state, batch, 0.05, list(params), [])
    assert_close(found, loss.detach())
    assert changed == state
    for key, slope in zip(a, slopes, strict=True):
        at_one = torch.sigmoid(e[key])
        expected = e[key] - 0.05 * 20 * slope * at_one * (1 - at_one)
        assert_close(after[OWN + key], expected.clamp(-6, 6), 1e-9)
    for key, g in weights.items():
        layer = key.rpartition(".")[0]
        if task and not layer.startswith("heads."):
            g = g * (1 - held_in_layer(method.gates, layer, used, g.shape))
        assert_close(after[key], params[key] - 0.05 * g)


@pytest.mark.parametrize("s", [0.0025, 1.0, 30.0])
def test_the_compensation_is_the_derivative_at_steepness_one_times_the_largest(s: float) -> None:
    """It takes out a'(s e) and puts in s_max a'(e), whatever the loss makes of the gates."""
    method, _ = bound(HAT(s_max=400.0), mlp_heads, True)
    size = min(3.0, 10 / s)  # where a' can be computed to ten digits
    e = torch.linspace(-size, size, 31, dtype=torch.float64, requires_grad=True)
    steep = torch.sigmoid(s * e)
    slope = torch.linspace(-1, 2, 31, dtype=torch.float64)
    (g,) = torch.autograd.grad((slope * steep).sum(), e)
    (at_one,) = torch.autograd.grad((slope * torch.sigmoid(e)).sum(), e)
    found = method.compensated({OWN + "x": e.detach()}, {OWN + "x": g, "w": g}, s)
    assert list(found) == [OWN + "x"]
    assert_close(found[OWN + "x"], 400.0 * at_one, 1e-7)


def test_the_compensation_of_gates_that_are_shut_is_finite() -> None:
    """cosh(400 * 6) is more than a number can be."""
    method, _ = bound(HAT(), mlp_heads, True)
    for dtype in (torch.float32, torch.float64):
        e = torch.tensor([-6.0, -0.3, 0.0, 0.3, 6.0], dtype=dtype, requires_grad=True)
        (g,) = torch.autograd.grad(torch.sigmoid(400.0 * e).sum(), e)
        found = method.compensated({OWN + "x": e.detach()}, {OWN + "x": g}, 400.0)[OWN + "x"]
        assert found.isfinite().all()
        assert found[2] == 400.0 / 4


def test_embeddings_are_clamped_at_six_and_the_gradients_norm_at_ten_thousand() -> None:
    method, plain = bound(HAT(), mlp_heads, True)
    params = with_embeddings(method, plain)
    batch = Batch(*some_samples(8, 8), 0, 0)
    draw = torch.Generator().manual_seed(0)
    grads = {key: torch.randn(p.shape, generator=draw).double() for key, p in plain.items()}
    norm = torch.cat([g.flatten() for g in grads.values()]).norm()
    for size, expected in ((1e4, 1e4), (0.999 * 1e4, 0.999 * 1e4), (5e4, 1e4)):
        given = {key: g * size / norm for key, g in grads.items()}
        after, _ = method.step(params, given, {}, batch, 1.0)
        for key, g in grads.items():
            assert_close(after[key], params[key] - g * expected / norm, 1e-8)
    for sign in (1, -1):
        pushed = {OWN + g.name: torch.full((g.units,), sign * 10.0) for g in method.gates}
        after, _ = method.step(params, pushed, {}, batch, 100.0)
        assert all(set(after[key].tolist()) == {-6.0 * sign} for key in pushed)


def test_the_regulariser_is_the_share_of_unused_capacity_that_opens() -> None:
    method, _ = bound(HAT(), conv_heads, True)
    a, used = random_gates(method, 1), random_gates(method, 2)
    numerator = denominator = 0.0
    for gate in method.gates:
        for unit in range(gate.units):
            free = 1 - used[gate.name][unit].item()
            numerator += a[gate.name][unit].item() * free
            denominator += free
    assert float(method.taken(a, {"used": used})) == pytest.approx(numerator / denominator)
    mean = torch.cat(list(a.values())).mean()
    assert float(method.taken(a, {})) == pytest.approx(float(mean))
    full = {name: torch.ones_like(gate) for name, gate in used.items()}
    assert method.taken(a, {"used": full}) == 0


def test_gates_grow_steep_within_every_epoch() -> None:
    method = HAT(s_max=80.0)
    values = [float(method.steepness(k / 4)) for k in range(5)]
    assert values[0] == pytest.approx(1 / 80)
    assert values[-1] == pytest.approx(80)
    steps = [b - a for a, b in itertools.pairwise(values)]
    assert steps == pytest.approx([steps[0]] * 4)


# ---- what it keeps and says ------------------------------------------------------------------


def test_what_tasks_opened_is_kept_as_their_gates_and_the_largest_of_all() -> None:
    method, params = bound(HAT(s_max=10.0), conv_heads, True)
    state: Any = {}
    each: list[dict[str, Tensor]] = []
    for t in range(3):
        ctx = context(method, params, some_samples(6, 3, 8, 8), t, state)
        begun, state = method.begin_task(ctx)
        own = {key: e for key, e in begun.items() if key.startswith(OWN)}
        assert own.keys() == {OWN + gate.name for gate in method.gates}
        each.append({key.removeprefix(OWN): torch.sigmoid(10.0 * e) for key, e in own.items()})
        while_learning = method.weights_for(begun, state, t)
        ended, state = method.end_task(context(method, begun, ctx.samples(6, "x")[:2], t, state))
        assert ended.keys() == params.keys()
        for old in range(t + 1):
            weights = method.weights_for(ended, state, old)
            assert_same_gates(weights, each[old], old)
        assert_same_gates(while_learning, each[t], t)
        for key, used in state["used"].items():
            assert_close(used, torch.stack([gates[key] for gates in each]).amax(0))
    assert not torch.equal(each[0][HEADS], each[1][HEADS])
    every = torch.cat([a for gates in each for a in gates.values()])
    whole = torch.cat(list(state["used"].values()))
    assert method.report(state).figures == {
        UNDECIDED: pytest.approx(float(((every > 0.05) & (every < 0.95)).double().mean())),
        "share of units that some task uses": pytest.approx(float((whole > 0.5).double().mean())),
    }
    assert method.report({}).figures is None


def assert_same_gates(weights: Any, gates: dict[str, Tensor], task: int) -> None:
    found = {key.removeprefix("gate "): a for key, a in weights.items() if key.startswith("gate ")}
    expected = {f"heads.{task}" if key == HEADS else key: a for key, a in gates.items()}
    assert found.keys() == expected.keys()
    assert not any(key.startswith(OWN) for key in weights)
    for key, a in expected.items():
        assert_close(found[key], a)


def test_a_run_says_how_many_gates_are_undecided(tmp_path: Path) -> None:
    """And as steep gates as are usual are more decided than flat ones."""
    tasks = some_tasks(2)
    shares = []
    for s_max in (400.0, 2.0):
        result, ends = watched(WatchedHAT, tasks, tmp_path, mlp_heads, s_max=s_max)
        kept = torch.cat([a for t in ("0", "1") for a in ends[1].state["gates"][t].values()])
        shares.append(result.figures[UNDECIDED])
        assert shares[-1] == pytest.approx(float(((kept > 0.05) & (kept < 0.95)).double().mean()))
        assert result.state_bytes == 3 * 4 * (12 + 10)
    assert shares[0] < 0.2 < 0.8 < shares[1]


def test_more_sparsity_takes_less_capacity(tmp_path: Path) -> None:
    taken = []
    for sparsity in (0.0, 10.0):
        options = {"sparsity": sparsity, "epochs": 6, "s_max": 50.0}
        result = run(some_tasks(1), "hat", tmp_path, mlp_heads, **options)
        taken.append(result.figures["share of units that some task uses"])
    assert taken[1] < 0.6 * taken[0]


# ---- refusals --------------------------------------------------------------------------------


def test_gates_of_a_module_that_is_not_there_are_refused_in_a_sentence(tmp_path: Path) -> None:
    """Such as a single head by another name."""

    class Named(MLP):
        def __init__(self) -> None:
            super().__init__(8, (12,), CLASSES)
            self.only = self.heads[0]
            del self.heads

        def forward(self, x: Tensor, head: int = 0) -> Tensor:
            return self.only(self.features(x))

    class Single(Named):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    with pytest.raises(InputError) as caught:
        run(some_tasks(2), "hat", tmp_path / "runs", Single)
    assert str(caught.value) == (
        "Single has no module 'heads.0', whose input its gates() list; give the module that name, "
        "a single head too."
    )
    assert not (tmp_path / "runs").exists()


def test_a_network_that_does_not_name_its_units_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        run(some_tasks(2), "hat", tmp_path / "runs", Heads)
    assert str(caught.value) == (
        "Heads does not declare its units, which hat needs; give it a method gates(), as the "
        "networks in trgp.benchmarks.models have."
    )
    assert not (tmp_path / "runs").exists()


def test_a_network_without_units_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        run(some_tasks(2), "hat", tmp_path, lambda: MLP(8, (), CLASSES, heads=2))


@pytest.mark.parametrize("options", [{"s_max": 0.0}, {"sparsity": -1.0}], ids=str)
def test_wrong_options_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"^{next(iter(options))} must be"):
        run(some_tasks(1), "hat", tmp_path, mlp_heads, **options)


def test_the_networks_hooks_are_taken_off_again() -> None:
    network = Network(mlp_heads, True, torch.device("cpu"), 0)
    method = HAT().bind(network)
    gates = {name: a.float() for name, a in random_gates(method).items()}
    weights = method.gated(network.initial_params(), gates, 0)
    network(weights, torch.ones(2, 8), 0)
    with pytest.raises(RuntimeError):
        network(weights, torch.ones(2, 9), 0)
    assert not any(module._forward_pre_hooks for module in network.module.modules())


def test_a_network_may_have_buffers_of_whole_numbers(tmp_path: Path) -> None:
    def make() -> nn.Module:
        network = mlp_heads()
        network.register_buffer("allowed", torch.arange(3))
        return network

    assert run(some_tasks(2), "hat", tmp_path, make, s_max=20.0).acc > 0
