"""Examples stored as pixels: a byte each, and the same numbers to the bit as stored floats."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from method_parts import ConvHeads
from small_runs import CLASSES, Make, run
from torch import Tensor, nn

from trgp.benchmarks.data import NORMALISATION, Normalisation, Tensors
from trgp.engine.batches import Part
from trgp.engine.context import Context
from trgp.engine.network import Network
from trgp.engine.train import Epoch, train_step
from trgp.methods import Batch
from trgp.methods.agem import AGEM
from trgp.methods.er import ER
from trgp.pixels import floats_of, pixels_of
from trgp.tree import leaves

SHAPE = (3, 8, 8)


def some_pixels(seed: int, count: int = 24) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, *SHAPE), generator=draw, dtype=torch.uint8)


def some_labels(count: int = 24) -> Tensor:
    return torch.arange(count) % CLASSES


@pytest.mark.parametrize("name", NORMALISATION)
def test_every_pixel_comes_back_from_its_float(name: str) -> None:
    norm = NORMALISATION[name]
    pixels = torch.arange(256, dtype=torch.uint8).view(-1, 1, 1, 1).repeat(1, len(norm.mean), 1, 1)
    samples = Tensors(pixels, torch.zeros(256).long(), norm)
    x, _ = samples.batch(slice(None))
    assert samples.scale is not None
    assert torch.equal(pixels_of(x, *samples.scale), pixels)
    assert torch.equal(floats_of(pixels, *samples.scale), x)


def learnt(method: Any, parts: list[Tensors]) -> tuple[Any, Any, list[Tensor]]:
    """Weights, state and losses after an epoch of every task, each with a head of its own."""
    network = Network(lambda: ConvHeads(track=False), True, torch.device("cpu"), 0)
    bound = method.bind(network)
    params: Any = network.initial_params()
    state: Any = {}
    losses = []
    for t, part in enumerate(parts):
        ctx = Context(network, t, t, part, params, state, 8, 0, len(parts))
        params, state = bound.begin_task(ctx)
        epoch = Epoch(0, t, 0, [Part(t, t, part)], 8, 0.1, sorted(network.trainable))
        for batch in epoch.batches(bound):
            params, state, loss = train_step(bound, params, state, batch, 0.1, epoch.trained, [])
            losses.append(loss)
        params, state = bound.end_task(replace(ctx, params=params, state=state))
    return params, state, losses


@pytest.mark.parametrize("method", [ER(memory_size=20), AGEM(memory_size=20)])
def test_tasks_normalised_in_their_own_ways_are_learnt_as_from_floats(method: Any) -> None:
    """The third has one mean for all channels."""
    norms = [
        NORMALISATION["svhn"],
        NORMALISATION["cifar10"],
        Normalisation((0.1,), (0.2752,)),
    ]
    pixels = [Tensors(some_pixels(t), some_labels(), norm) for t, norm in enumerate(norms)]
    floats = [Tensors(*part.batch(slice(None))) for part in pixels]
    params, state, losses = learnt(method, pixels)
    expected, whole, same = learnt(method, floats)
    assert losses == same
    assert all(torch.equal(tensor, expected[name]) for name, tensor in params.items())
    held, theirs = state["memory"], whole["memory"]
    assert held["x"].dtype == torch.uint8
    for key in ("y", "head"):
        assert torch.equal(held[key], theirs[key])
    assert {int(h) for h in held["head"]} == {0, 1, 2}
    bytes_ = {path: t.nbytes for path, t in leaves(state)}
    assert 4 * bytes_["memory/x"] == theirs["x"].nbytes
    assert bytes_["scale/mean"] == bytes_["scale/std"] == 3 * 3 * 4


NETWORKS: dict[str, Make] = {
    "heads": lambda: ConvHeads(track=False),
    "one head": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, CLASSES)),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("method", ["er", "agem"])
def test_a_run_on_pixels_is_that_on_their_floats(method: str, name: str, tmp_path: Path) -> None:
    """With captured steps, and with weights restored from an earlier epoch."""
    pixels, floats = [], []
    for t in range(3):
        x, y = some_pixels(t, 60), some_labels(60)
        pixels.append(((x[:40], y[:40]), (x[40:], y[40:])))
        floats.append(((floats_of(x[:40]), y[:40]), (floats_of(x[40:]), y[40:])))
    options: dict[str, Any] = {"memory_size": 12, "epochs": 3, "patience": 1}
    ours = run(pixels, method, tmp_path / "a", NETWORKS[name], **options)
    theirs = run(floats, method, tmp_path / "b", NETWORKS[name], **options)
    assert ours.accuracy_matrix == theirs.accuracy_matrix
    assert ours.curves == theirs.curves
    heads = 3 if name == "heads" else 1
    assert theirs.state_bytes - ours.state_bytes == 12 * 192 * 3 - 2 * 4 * heads


def test_several_runs_at_once_read_their_own_pixels() -> None:
    """In a stack every tensor has the runs as its first axis."""
    runs = []
    for seed in range(2):
        part = Tensors(some_pixels(seed), some_labels(), NORMALISATION["svhn"])
        params, state, _ = learnt(ER(memory_size=20), [part])
        runs.append((params, state["memory"], state["scale"]))
    network = Network(NETWORKS["heads"], True, torch.device("cpu"), 0)
    method = ER(memory_size=20).bind(network)
    network.module.train()
    draw = torch.Generator().manual_seed(0)
    u = torch.rand(18, generator=draw)
    x = torch.randn(8, *SHAPE, generator=draw)

    def after(params: Any, memory: Any, scale: Any) -> tuple[Tensor, Tensor]:
        state = {"memory": memory, "scale": scale, "seen": torch.tensor(24)}
        batch = Batch(x, some_labels(8), 0, 0, u=u, first=True)
        loss = method.loss(params, state, batch)
        _, changes = method.step(params, {}, state, batch, 0.1)
        return loss, changes["memory"]["x"]

    together = torch.vmap(after)(*(stacked(each) for each in zip(*runs, strict=True)))
    for k, each in enumerate(runs):
        loss, memory = after(*each)
        torch.testing.assert_close(together[0][k], loss)
        assert torch.equal(together[1][k], memory)


def stacked(trees: Any) -> Any:
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}
