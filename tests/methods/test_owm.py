"""OWM: the projector of all batch means at once, one by one, and what it does to a gradient."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, mlp
from method_parts import (
    ConvHeads,
    WatchedOWM,
    bound,
    context,
    eager,
    gradients,
    logits_of,
    mlp_heads,
    moved_at_random,
    some_samples,
)
from small_runs import CLASSES, Conv, Make, WatchedFinetune, run, some_tasks, watched
from torch import Tensor, nn

from trgp.engine.errors import InputError
from trgp.engine.network import Network
from trgp.engine.train import train_step
from trgp.methods import Batch
from trgp.methods.owm import OWM, fewer_columns, narrowed, narrowed_one_by_one

NETWORKS: dict[str, tuple[Make, bool, tuple[int, ...]]] = {
    "linear": (lambda: mlp(8, 12, CLASSES, bias=False), False, (8,)),
    "with bias": (lambda: mlp(8, 12, CLASSES), False, (8,)),
    "heads": (mlp_heads, True, (8,)),
    "convolutions, one of them grouped": (Conv, False, (4, 4, 4)),
    "convolutions and a linear layer": (ConvHeads, True, (3, 8, 8)),
    "the statistics of every batch": (lambda: ConvHeads(track=False), True, (3, 8, 8)),
}
Means = dict[str, list[Tensor]]  # by layer and group the columns (n, k) of a batch


def batch_means(module: nn.Module, batch: Batch, heads: bool) -> Means:
    """By layer and group what it sees at every position in the mean of the samples, a 1 for a bias.

    Heads of their own tasks are left out.
    """
    found: Means = {}

    def look(name: str) -> Any:
        def hook(layer: Any, args: tuple[Tensor]) -> None:
            (x,) = args
            if isinstance(layer, nn.Linear):
                patches = x.unsqueeze(2)
            else:
                patches = F.unfold(x, layer.kernel_size, 1, layer.padding, layer.stride)
            columns = patches.mean(0)  # (all groups' n, k)
            parts = columns.chunk(getattr(layer, "groups", 1))
            if layer.bias is not None:
                parts = [torch.cat([part, torch.ones(1, part.shape[1])]) for part in parts]
            found[name] = [part.detach() for part in parts]

        return hook

    handles = [
        layer.register_forward_pre_hook(look(name))
        for name, layer in module.named_modules()
        if isinstance(layer, (nn.Linear, nn.Conv2d)) and not name.startswith("heads.")
    ]
    logits_of(module, batch, heads)
    for handle in handles:
        handle.remove()
    return found


def two_tasks(
    name: str, alpha: float, alpha_end: float
) -> tuple[OWM, dict[str, Tensor], Any, list[list[Means]]]:
    """A method after two tasks of several batches, and the means of every batch of each."""
    make, heads, shape = NETWORKS[name]
    torch.set_default_dtype(torch.float64)
    method, params = bound(OWM(alpha=alpha, alpha_end=alpha_end), make, heads)
    state: Any = {}
    seen = []
    for t in range(2):
        params = moved_at_random(params, t)
        ctx = context(method, params, some_samples(20, *shape, seed=t), t, state)
        method.network.module.eval()
        module = eager(method, params)
        batches = ctx.batches(8, "projectors")
        seen.append([batch_means(module, batch, heads) for batch in batches])
        kept, state = method.end_task(ctx)
        assert kept is ctx.params
    assert [len(task) for task in seen] == [3, 3]
    return method, params, state, seen


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("alpha", [1.0, 0.01])
def test_at_constant_alpha_the_projector_is_the_batch_formula(alpha: float, name: str) -> None:
    """P = I - A (A'A + alpha I)^-1 A' with the means of all batches of both tasks as A."""
    method, _, state, seen = two_tasks(name, alpha, alpha)
    assert state["projectors"].keys() == method.layers.keys() == seen[0][0].keys()
    for layer, P in state["projectors"].items():
        groups = range(len(P))
        assert len(seen[0][0][layer]) == len(P)
        for g in groups:
            A = torch.cat([means[layer][g] for task in seen for means in task], 1)
            n, k = A.shape
            inner = A.T @ A + alpha * torch.eye(k)
            assert_close(P[g], torch.eye(n) - A @ torch.linalg.inv(inner) @ A.T, 1e-9)
            assert_close(P[g], P[g].T)
            values = torch.linalg.eigvalsh(P[g])
            assert values.min() > -1e-10
            assert values.max() < 1 + 1e-10


@pytest.mark.parametrize("name", NETWORKS)
def test_it_is_the_recursion_one_by_one_with_alpha_falling_in_every_task(name: str) -> None:
    """Geometrically, from the first batch of a task to its last."""
    _, _, state, seen = two_tasks(name, 1.0, 0.01)
    for layer, P in state["projectors"].items():
        for g in range(len(P)):
            expected = torch.eye(P.shape[1])
            for task in seen:
                for alpha, means in zip((1.0, 0.1, 0.01), task, strict=True):
                    for r in means[layer][g].unbind(1):
                        k = expected @ r
                        expected = expected - torch.outer(k, k) / (alpha + r @ k)
            assert_close(P[g], expected, 1e-9)


def test_a_task_of_one_batch_has_the_first_alpha() -> None:
    method, params = bound(OWM(alpha=2.0, alpha_end=0.001), lambda: mlp(8, CLASSES, bias=False))
    x, y = some_samples(5, 8)
    _, state = method.end_task(context(method, params, (x, y)))
    r = x.mean(0)
    (P,) = state["projectors"]["0"]
    assert_close(P, torch.eye(8).double() - torch.outer(r, r) / (2.0 + r @ r))


def test_many_columns_at_once_are_each_after_the_other() -> None:
    draw = torch.Generator().manual_seed(0)
    R = torch.randn(2, 6, 9, generator=draw, dtype=torch.float64)
    P = torch.eye(6, dtype=torch.float64).expand(2, 6, 6)
    alpha = torch.logspace(0, -3, 9, dtype=torch.float64)
    S = R / alpha.sqrt()
    in_two, at_once = narrowed(narrowed(P, S[:, :, :4]), S[:, :, 4:]), narrowed(P, S)
    for r, a in zip(R.unbind(2), alpha, strict=True):
        k = (P @ r.unsqueeze(2)).squeeze(2)
        inner = (r * k).sum(1) + a
        P = P - k.unsqueeze(2) * k.unsqueeze(1) / inner.view(2, 1, 1)
    assert_close(in_two, P)
    assert_close(at_once, P)


class Counting(nn.Module):
    """Counts its passes."""

    passes = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        Counting.passes += 1
        return self.layer(x)


def test_many_batches_pass_the_network_at_once() -> None:
    method, params = bound(OWM(), Counting)
    ctx = context(method, params, some_samples(6001, 8))
    Counting.passes = 0
    _, state = method.end_task(ctx)
    assert 0 < Counting.passes <= 8
    (P,) = state["projectors"]["layer"]
    expected = torch.eye(9).double()
    batches = list(ctx.batches(8, "projectors"))
    for i, batch in enumerate(batches):
        r = torch.cat([batch.x.mean(0), torch.ones(1).double()])
        k = expected @ r
        alpha = 0.001 ** (i / (len(batches) - 1))
        expected = expected - torch.outer(k, k) / (alpha + r @ k)
    assert_close(P, expected, 1e-9)


def test_in_few_digits_a_projector_takes_nothing_below_nothing() -> None:
    """Again and again by inputs along one direction, of which soon less is left than rounding."""
    network = Network(lambda: nn.Linear(50, CLASSES, bias=False), False, torch.device("cpu"), 0)
    method, params = OWM().bind(network), network.initial_params()
    draw = torch.Generator().manual_seed(0)
    u = 3 + torch.randn(50, generator=draw)
    state: Any = {}
    for t in range(8):
        x = 100 * u + 0.001 * torch.randn(400, 50, generator=draw)
        samples = x, torch.zeros(400, dtype=torch.long)
        _, state = method.end_task(context(method, params, samples, t, state))
        (P,) = state["projectors"][""].double()
        values = torch.linalg.eigvalsh(P)
        assert values.min() > -1e-6
        assert values.max() < 1 + 1e-5
        assert values[1] > 0.9
        assert (P @ u.double()).norm() < 1e-6 * u.norm()


@pytest.mark.parametrize("by_factors", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_later_step_goes_along_the_gradient_times_the_projector(
    name: str, by_factors: bool
) -> None:
    _, heads, shape = NETWORKS[name]
    method, params, state, _ = two_tasks(name, 1.0, 0.01)
    batch = Batch(*some_samples(8, *shape, seed=9), 2, 2 if heads else 0)
    trained = method.network.trainable - method.frozen(2)
    method.train_mode(2)
    module = eager(method, params)
    G = gradients(F.cross_entropy(logits_of(module, batch, heads), batch.y), module)
    buffers = {key: params[key].clone() for key in method.network.buffers}
    factored = method.factored(state, 8) if by_factors else frozenset()
    after, changed, _ = train_step(method, params, state, batch, 0.3, sorted(trained), factored)
    assert changed == state
    apart = 0.0
    for layer, each in method.layers.items():
        P = state["projectors"][layer]
        g, o, _ = each.layer.shape
        parts = [G[key].reshape(g, o, -1) for key in each.names]
        step = torch.cat(parts, 2) @ P
        new = torch.cat([after[key].reshape(g, o, -1) for key in each.names], 2)
        old = torch.cat([params[key].reshape(g, o, -1) for key in each.names], 2)
        assert_close(new, old - 0.3 * step)
        apart = max(apart, float((step - torch.cat(parts, 2)).abs().max()))
    assert apart > 1e-3  # the projector does something
    packed = {key for each in method.layers.values() for key in each.names}
    for key in method.network.trainable - packed:
        if key.startswith("heads."):
            assert_close(after[key], params[key] - 0.3 * G[key])
        else:
            assert torch.equal(after[key], params[key]), "a norm layer moved"
    for key, tensor in buffers.items():
        assert torch.equal(after[key], tensor), key


def test_factors_are_asked_for_where_a_batch_has_fewer_rows_than_the_gradient() -> None:
    method, _, state, _ = two_tasks("with bias", 1.0, 0.01)
    assert method.factored({}, 8) == frozenset()
    wide, narrow = (each.names[0] for each in method.layers.values())
    assert method.factored(state, 1) == {wide, narrow}
    assert method.factored(state, 8) == {wide}
    assert method.factored(state, 12) == frozenset()


@pytest.mark.parametrize("make", [Conv, mlp_heads])
def test_the_first_task_is_fine_tuning(make: Make, tmp_path: Path) -> None:
    tasks = some_tasks(1, 4, 4, 4) if make is Conv else some_tasks(1)
    _, plain = watched(WatchedFinetune, tasks, tmp_path, make)
    _, ours = watched(WatchedOWM, tasks, tmp_path, make)
    for key, tensor in plain[0].params.items():
        torch.testing.assert_close(ours[0].params[key], tensor, rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", ["linear", "with bias"])
def test_with_a_small_alpha_old_means_keep_their_outputs(name: str) -> None:
    method, begun, state, seen = two_tasks(name, 1e-9, 1e-9)
    params: Any = begun
    for k in range(5):
        batch = Batch(*some_samples(8, 8, seed=9 + k), 2, 0)
        params, _, _ = train_step(method, params, state, batch, 0.3, list(params), [])
    for layer, each in method.layers.items():
        (change,) = each.pack(params) - each.pack(begun)
        A = torch.cat([means[layer][0] for task in seen for means in task], 1)
        assert change.norm() > 0.01
        assert (change @ A).abs().max() < 1e-6


# ---- narrowed in every batch -----------------------------------------------------------------


@pytest.mark.parametrize("task", [0, 1])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_goes_along_a_projector_that_its_own_batch_has_narrowed(
    name: str, task: int
) -> None:
    """Position by position, by alphas of every layer's own, and without dropout."""
    make, heads, shape = NETWORKS[name]
    torch.set_default_dtype(torch.float64)
    plain, begun = bound(OWM(), make, heads)
    ends = tuple(0.1**k for k in range(1, len(plain.layers) + 1))
    kind = OWM(alpha=0.5, narrowing="batch", alpha_end_per_layer=ends)
    method, params = kind.bind(plain.network), moved_at_random(begun)
    samples = some_samples(8, *shape)
    _, state = method.begin_task(context(method, params, samples, task))
    expected = {layer: list(P) for layer, P in state["projectors"].items()}
    after: Any = params
    for progress in (0.0, 0.5, 1.0):
        batch = Batch(*samples, task, task if heads else 0, progress=progress)
        method.train_mode(task)
        module = eager(method, after)
        G = gradients(F.cross_entropy(logits_of(module, batch, heads), batch.y), module)
        trained = sorted(method.network.trainable - method.frozen(task))
        before = after
        factored = method.factored(state, 8)
        after, state, _ = train_step(method, before, state, batch, 0.3, trained, factored)
        # With the running averages that this batch has moved.
        means = batch_means(eager(method, before).eval(), batch, heads)
        for (layer, each), end in zip(method.layers.items(), ends, strict=True):
            g, o, _ = each.layer.shape
            for k in range(g):
                for r in means[layer][k].unbind(1):
                    along = expected[layer][k] @ r
                    alpha = 0.5 * (end / 0.5) ** progress
                    expected[layer][k] = expected[layer][k] - torch.outer(along, along) / (
                        alpha + r @ along
                    )
            P = torch.stack(expected[layer])
            assert_close(state["projectors"][layer], P, 1e-8)
            slope = torch.cat([G[key].reshape(g, o, -1) for key in each.names], 2)
            old, new = (
                torch.cat([weights[key].reshape(g, o, -1) for key in each.names], 2)
                for weights in (before, after)
            )
            assert_close(new, old - 0.3 * slope @ P, 1e-8)
    assert all(torch.equal(P, state["projectors"][key]) for key, P in _ended(method, after, state))


def _ended(method: OWM, params: Any, state: Any) -> Any:
    """The projectors after the task, which takes nothing more away."""
    ctx = context(method, params, some_samples(8, 8), 0, state)
    return method.end_task(ctx)[1]["projectors"].items()


def test_columns_are_made_fewer_by_what_they_come_to_alone() -> None:
    """Also where they span less than there is room for."""
    draw = torch.Generator().manual_seed(0)
    S = torch.randn(2, 6, 40, generator=draw, dtype=torch.float64)
    S[1] = S[1, :, :3] @ torch.randn(3, 40, generator=draw, dtype=torch.float64)
    fewer = fewer_columns(S)
    assert fewer.shape == (2, 6, 6)
    assert_close(fewer @ fewer.mT, S @ S.mT, 1e-10)
    P = torch.eye(6, dtype=torch.float64).expand(2, 6, 6)
    assert_close(narrowed_one_by_one(P, fewer), narrowed(P, S), 1e-10)
    assert fewer_columns(S[:, :, :6]).data_ptr() == S.data_ptr()


@pytest.mark.parametrize("make", [Conv, mlp_heads])
def test_captured_or_not_a_run_that_narrows_in_batches_ends_the_same(
    make: Make, tmp_path: Path
) -> None:
    """Also where it is restored from its best epoch; and tasks are held back from the first on."""
    tasks = some_tasks(2, 4, 4, 4) if make is Conv else some_tasks(2)
    options: dict[str, Any] = {"narrowing": "batch", "epochs": 5, "patience": 1}
    eagerly = run(tasks, "owm", tmp_path / "a", make, engine="eager", **options)
    captured = run(tasks, "owm", tmp_path / "b", make, engine="captured", **options)
    plain = run(tasks, "owm", tmp_path / "c", make, epochs=5, patience=1)
    assert captured.digest == eagerly.digest
    assert captured.state_bytes == plain.state_bytes
    assert captured.curves[0]["loss"][-1] > plain.curves[0]["loss"][-1]


def test_an_alpha_for_each_layer_of_the_network(tmp_path: Path) -> None:
    alike = run(some_tasks(2), "owm", tmp_path, alpha_end=0.01)
    listed = run(some_tasks(2), "owm", tmp_path, alpha_end_per_layer=(0.01, 0.01, 0.01))
    assert listed.digest == alike.digest
    with pytest.raises(InputError) as caught:
        run(some_tasks(2), "owm", tmp_path, alpha_end_per_layer=(0.01, 0.01))
    assert str(caught.value) == (
        "alpha_end_per_layer has 2 values for 3 layers; give one for each of 0, 2, 4."
    )


def test_the_projectors_are_counted_in_the_memory(tmp_path: Path) -> None:
    result = run(some_tasks(2), "owm", tmp_path)
    assert result.state_bytes == 4 * (9**2 + 13**2 + 11**2)


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": 0.0},
        {"alpha_end": -1.0},
        {"norm": "thaw"},
        {"narrowing": "epoch"},
        {"alpha_end_per_layer": (0.1, 0.0, 0.1)},
    ],
    ids=str,
)
def test_wrong_options_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"^{next(iter(options))} must be"):
        run(some_tasks(1), "owm", tmp_path, **options)
