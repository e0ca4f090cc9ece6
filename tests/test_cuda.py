"""On a GPU: the same properties, and no waiting for the device inside a step."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import ConvNet, Vit
from torch import Tensor, nn

import trgp
from trgp import GPM, TRGP
from trgp.methods import METHODS
from trgp.models import AlexNet

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

Batch = tuple[Tensor, Tensor]


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    x, y = (t.cuda() for t in batch)
    return F.cross_entropy(model(x), y)


def tasks(count: int, dtype: torch.dtype) -> list[list[Batch]]:
    y = torch.arange(4)
    return [[(torch.randn(4, 16, 4, 4, dtype=dtype), y)] for _ in range(count)]


def learn(learner: GPM, task: int, loader: list[Batch], *, adam: bool, steps: int = 30) -> None:
    learner.begin_task(task, loader, loss_fn)
    groups = learner.param_groups(lr=1e-3)
    optimizer = learner.attach(torch.optim.AdamW(groups) if adam else torch.optim.SGD(groups))
    learner.model.train()
    batch = tuple(t.cuda() for t in loader[0])
    loss_fn(learner.model, batch).backward()  # libraries set themselves up on their first call
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(learner.model(batch[0]), batch[1]).backward()
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    learner.end_task(loader)


@pytest.mark.parametrize("kind", [ConvNet, Vit])
@pytest.mark.parametrize("method", [GPM, TRGP])
@pytest.mark.parametrize("adam", [False, True])
def test_nothing_is_forgotten_and_no_step_waits(
    kind: type[nn.Module], method: type[GPM], adam: bool
) -> None:
    model = kind().double().cuda()
    learner = method(model, threshold=1.0, per_task=["head"])
    loaders = tasks(3, torch.float64)
    logits = []
    for t, loader in enumerate(loaders):
        learn(learner, t, loader, adam=adam)
        model.eval()
        with torch.no_grad():
            logits.append(model(loader[0][0].cuda()))
    for t, loader in enumerate(loaders):
        with learner.task(t), torch.no_grad():
            assert (model(loader[0][0].cuda()) - logits[t]).abs().max() < 1e-7


def test_the_memory_follows_the_model_between_devices(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = ConvNet().cuda()
    learner = TRGP(model, threshold=0.95, per_task=["head"])
    loaders = tasks(3, torch.float32)
    for t in range(2):
        learn(learner, t, loaders[t], adam=False)
    model.eval()
    with torch.no_grad(), learner.task(0):
        on_device = model(loaders[0][0][0].cuda()).cpu()
    model.cpu()
    with torch.no_grad(), learner.task(0):
        torch.testing.assert_close(model(loaders[0][0][0]), on_device, rtol=1e-3, atol=1e-4)
    learner.save(tmp_path / "memory.safetensors", include_model=True)
    again = ConvNet().cuda()
    loaded = TRGP.load(tmp_path / "memory.safetensors", again)
    again.eval()
    with torch.no_grad(), loaded.task(0):
        found = again(loaders[0][0][0].cuda()).cpu()
    torch.testing.assert_close(found, on_device, rtol=1e-3, atol=1e-4)
    learn(loaded, 2, loaders[2], adam=True)


def test_half_precision_training_with_a_grad_scaler_protects_the_memory() -> None:
    model = ConvNet().cuda()
    learner = TRGP(model, threshold=0.95, per_task=["head"])
    loaders = tasks(2, torch.float32)
    learn(learner, 0, loaders[0], adam=False)
    learner.begin_task(1, loaders[1], loss_fn)
    optimizer = learner.attach(torch.optim.AdamW(learner.parameters(), lr=1e-3))
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)  # the first steps overflow
    x, y = (t.cuda() for t in loaders[1][0])
    scales = []
    for _ in range(40):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales[-1] < scales[0]  # steps were skipped
    for pin in learner._guard.pins:
        coordinates = pin._inner(pin.params, pin.M)
        torch.testing.assert_close(coordinates, pin.C, rtol=1e-4, atol=1e-5)
    learner.end_task(loaders[1])


@pytest.mark.parametrize("method", [m for m in METHODS if m != "hat"])
@pytest.mark.parametrize("preset", ["paper", "official"])
def test_captured_steps_end_with_the_bits_of_eager_ones(
    method: str, preset: str, tmp_path: Path
) -> None:
    """One head and no dropout here; the next test has heads, BatchNorm and dropout."""
    digests = {
        trgp.run(
            "permuted-digits", method, preset=preset, tasks=3, epochs=2, device="cuda",
            engine=engine, out=tmp_path / engine,
        )[0].digest
        for engine in ("eager", "captured")
    }  # fmt: skip
    assert len(digests) == 1


@pytest.mark.parametrize("method", METHODS)
def test_captured_steps_end_with_the_same_bits_also_with_dropout(
    method: str, tmp_path: Path
) -> None:
    draw = torch.Generator().manual_seed(0)
    sequence = [
        tuple((torch.randn(n, 3, 32, 32, generator=draw), torch.arange(n) % 4) for n in (150, 20))
        for _ in range(3)
    ]
    digests = {
        trgp.run(
            sequence, method, network=lambda: AlexNet(3, 4), batch=32, epochs=2, device="cuda",
            engine=engine, out=tmp_path / engine,
        )[0].digest
        for engine in ("eager", "captured")
    }  # fmt: skip
    assert len(digests) == 1
