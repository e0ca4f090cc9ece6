"""What gradient projection is measured against: fine-tuning, single-task and multitask learning."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import mlp
from small_runs import (
    CLASSES,
    Conv,
    Heads,
    WatchedFinetune,
    WatchedGPM,
    WatchedMultitask,
    WatchedSingle,
    WatchedTRGP,
    run,
    some_tasks,
    watched,
)
from torch import nn

from trgp.benchmarks import from_tensors
from trgp.engine.batches import Part, epoch_batches
from trgp.engine.network import Network
from trgp.methods.base import sgd

SEED = 1


def trained_alone(
    make: Any, tasks: Any, separate: bool, which: list[int], *, renewed: bool
) -> nn.Module:
    """A plain loop of torch's own SGD over the batches that a run takes."""
    network = Network(make, separate, torch.device("cpu"), SEED)
    benchmark = from_tensors(tasks, make, seed=SEED)
    model = make()
    model.load_state_dict(network.initial_params())
    for t in which:
        if renewed:
            model.load_state_dict(network.initial_params(t))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        part = Part(t, t if separate else 0, benchmark.tasks[t].train)
        for epoch in range(2):
            model.train()
            for x, y, _, head, *_ in epoch_batches([part], 8, SEED, "order", t, epoch):
                optimizer.zero_grad()
                logits = model(x, head) if separate else model(x)
                F.cross_entropy(logits, y).backward()
                optimizer.step()
    return model


NETWORKS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "mlp": (lambda: mlp(8, 12, 10, CLASSES), (8,)),
    "heads": (Heads, (8,)),
    "conv": (Conv, (4, 4, 4)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_fine_tuning_is_torchs_own_sgd(name: str, tmp_path: Path) -> None:
    make, shape = NETWORKS[name]
    tasks = some_tasks(3, *shape)
    _, ends = watched(WatchedFinetune, tasks, tmp_path, make, seeds=[SEED])
    for t, end in enumerate(ends):
        expected = trained_alone(make, tasks, name == "heads", [*range(t + 1)], renewed=False)
        for key, tensor in expected.state_dict().items():
            torch.testing.assert_close(end.params[key], tensor, rtol=1e-6, atol=1e-6, msg=key)
    assert ends[-1].state == {}


def test_a_rate_in_a_tensor_has_the_digits_of_what_it_moves() -> None:
    """Whichever precision comes first: captured steps read it from the device."""
    params = {str(t): torch.randn(50).to(t) for t in (torch.float32, torch.float64)}
    grads = {name: torch.randn_like(p) for name, p in params.items()}
    by_number = sgd(params, grads, 0.05)
    by_tensor = sgd(params, grads, torch.tensor(0.05, dtype=torch.float64))
    for name, expected in by_number.items():
        assert by_tensor[name].dtype == expected.dtype
        assert by_tensor[name].equal(expected)


@pytest.mark.parametrize("kind", [WatchedGPM, WatchedTRGP])
def test_the_first_task_of_every_method_is_fine_tuning(kind: Any, tmp_path: Path) -> None:
    tasks = some_tasks(1, 4, 4, 4)
    _, plain = watched(WatchedFinetune, tasks, tmp_path, Conv)
    _, ours = watched(kind, tasks, tmp_path, Conv)
    for name, tensor in plain[0].params.items():
        torch.testing.assert_close(ours[0].params[name], tensor, rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", NETWORKS)
def test_single_learns_every_task_with_a_network_of_its_own(name: str, tmp_path: Path) -> None:
    make, shape = NETWORKS[name]
    tasks = some_tasks(3, *shape)
    result, ends = watched(WatchedSingle, tasks, tmp_path, make, seeds=[SEED])
    assert result.bwt == 0
    assert result.forgetting == 0
    for t in range(3):
        assert {row[t] for row in result.accuracy_matrix[t:]} == {result.accuracy_matrix[t][t]}
        expected = trained_alone(make, tasks, name == "heads", [t], renewed=True)
        for end in ends[t:]:
            for key, tensor in expected.state_dict().items():
                torch.testing.assert_close(end.weights(t)[key], tensor, rtol=1e-6, atol=1e-6)


def test_networks_of_single_do_not_depend_on_what_came_before(tmp_path: Path) -> None:
    a, b, c = some_tasks(3)
    (_, first), (_, second) = (
        watched(WatchedSingle, tasks, tmp_path, Heads) for tasks in ([a, b, c], [c, b, a])
    )
    ours, theirs = first[-1].weights(1), second[-1].weights(1)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not all(torch.equal(first[-1].weights(0)[n], second[-1].weights(0)[n]) for n in ours)
    network = Network(Heads, True, torch.device("cpu"), 0)
    one, two = network.initial_params(0), network.initial_params(1)
    assert not any(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("separate", [True, False])
def test_multitask_has_a_last_row_alone(separate: bool, tmp_path: Path) -> None:
    make = Heads if separate else NETWORKS["mlp"][0]
    tasks = some_tasks(3)
    result, ends = watched(WatchedMultitask, tasks, tmp_path, make)
    *earlier, last = result.accuracy_matrix
    assert earlier == [[None] * 3] * 2
    assert all(accuracy is not None for accuracy in last)
    assert result.bwt is None
    assert result.forgetting is None
    assert result.mean_diagonal is None
    assert result.acc == pytest.approx(sum(last) / 3)
    assert len(result.curves) == len(ends) == len(result.seconds) == 1
    assert len(result.curves[0]["loss"]) == 2
    for t in range(3):
        x, y = tasks[t][1]
        right = (ends[0].logits(x, t).argmax(1) == y).double().mean()
        assert last[t] == pytest.approx(float(right))


def test_multitask_learns_from_all_tasks_at_once(tmp_path: Path) -> None:
    """Its loss over all tasks is far below that of one who saw the last task last."""
    tasks = some_tasks(3, 8, rank=None, samples=30)
    options = {"epochs": 40, "lr": 0.2}
    results, losses = {}, {}
    for kind in (WatchedMultitask, WatchedFinetune):
        results[kind], ends = watched(kind, tasks, tmp_path, **options)
        parts = [F.cross_entropy(ends[-1].logits(x, 0), y).item() for (x, y), _ in tasks]
        losses[kind] = sum(parts) / 3
    assert losses[WatchedMultitask] < 0.5 * losses[WatchedFinetune]


@pytest.mark.parametrize("method", ["finetune", "single", "multitask", "gpm", "trgp"])
def test_one_task_alone_can_be_learnt(method: str, tmp_path: Path) -> None:
    result = run(some_tasks(1), method, tmp_path)
    assert len(result.accuracy_matrix) == 1
    assert result.bwt is None
    assert result.acc == result.accuracy_matrix[0][0]


@pytest.mark.parametrize("method", ["finetune", "single", "gpm", "trgp"])
def test_unseen_tasks_are_evaluated_where_asked(method: str, tmp_path: Path) -> None:
    plain = run(some_tasks(3), method, tmp_path)
    whole = run(some_tasks(3), method, tmp_path, evaluate_unseen=True)
    assert whole.digest == plain.digest
    assert plain.untrained is None
    assert plain.fwt is None
    assert whole.untrained is not None
    assert len(whole.untrained) == 3
    assert whole.fwt is not None
    for i, (row, full) in enumerate(zip(plain.accuracy_matrix, whole.accuracy_matrix, strict=True)):
        assert None not in full
        assert row[: i + 1] == full[: i + 1]
        assert row[i + 1 :] == [None] * (2 - i)


def test_old_accuracies_are_measured_on_the_test_or_the_held_out_samples(tmp_path: Path) -> None:
    tasks = some_tasks(2)
    benchmark = from_tensors(tasks, NETWORKS["mlp"][0], seed=0)
    for score_on, part in (("test", "test"), ("validation", "valid")):
        result, ends = watched(WatchedFinetune, tasks, tmp_path, score_on=score_on)
        samples = getattr(benchmark.tasks[0], part)
        x, y = samples.batch(slice(0, len(samples)))
        right = (ends[1].logits(x, 0).argmax(1) == y).double().mean()
        assert result.accuracy_matrix[1][0] == pytest.approx(float(right))


def test_accuracies_are_means_over_as_many_passes_as_asked_for(tmp_path: Path) -> None:
    """Which differ where BatchNorm looks at the batch at hand."""

    def make() -> nn.Module:
        return Conv(track=False)

    tasks = some_tasks(2, 4, 4, 4)
    result, ends = watched(
        WatchedFinetune, tasks, tmp_path, make, test_passes=3, test_batch=2, seeds=[SEED]
    )
    part = Part(0, 0, from_tensors(tasks, make, seed=SEED).tasks[0].test)
    shares = []
    for k in range(3):
        batches = epoch_batches([part], 2, SEED, "test", 0, k)
        right = [(ends[1].logits(x, 0).argmax(1) == y).sum().item() for x, y, *_ in batches]
        shares.append(sum(right) / len(part.samples))
    assert len(set(shares)) > 1
    assert result.accuracy_matrix[1][0] == pytest.approx(sum(shares) / 3)
