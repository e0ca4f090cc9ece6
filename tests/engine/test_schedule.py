"""When the rate is cut, when a task ends, and which weights it ends with."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from small_runs import (
    Conv,
    WatchedFinetune,
    WatchedGPM,
    WatchedSingle,
    WatchedTRGP,
    run,
    some_tasks,
    watched,
)

from trgp.benchmarks import from_tensors
from trgp.engine.config import Training
from trgp.engine.schedule import Schedule


def published(
    losses: list[float], epochs: int, patience: int, lr: float, factor: float, least: float
) -> tuple[list[float], int | None]:
    """The published loop: the rate of every epoch that is trained, and which weights it ends with.

    The best loss so far renews the patience; when that is used up the rate is divided, and the
    loop ends once it is below the least.
    """
    rates: list[float] = []
    best, best_epoch, left = math.inf, None, patience
    for epoch in range(epochs):
        rates.append(lr)
        if losses[epoch] < best:
            best, best_epoch, left = losses[epoch], epoch, patience
        else:
            left -= 1
            if left <= 0:
                lr /= factor
                if lr < least:
                    break
                left = patience
    return rates, best_epoch


# Few different values, so that ties and long waits are common.
LOSSES = st.lists(
    st.sampled_from([0.1, 0.5, 1.0, 2.0, 3.0, math.inf, math.nan]), min_size=60, max_size=60
)


@given(
    losses=LOSSES,
    epochs=st.integers(1, 60),
    patience=st.integers(1, 6),
    lr=st.sampled_from([0.1, 0.01, 1.0]),
    factor=st.sampled_from([2.0, 3.0, 1.5, 10.0]),
    least=st.sampled_from([1e-5, 1e-3, 0.05, 0.1, 0.5]),
)
@example(losses=[1.0] * 60, epochs=60, patience=1, lr=0.1, factor=2.0, least=0.05)
@example(losses=[1.0] * 60, epochs=60, patience=1, lr=0.01, factor=2.0, least=0.5)
def test_the_plateau_rule_is_the_published_one(
    losses: list[float], epochs: int, patience: int, lr: float, factor: float, least: float
) -> None:
    training = Training(lr=lr, epochs=epochs, patience=patience, lr_factor=factor, lr_min=least)
    schedule = Schedule(lr)
    rates, best = [], None
    while not schedule.over:
        rates.append(schedule.lr)
        if schedule.after_epoch(losses[len(rates) - 1], training):
            best = len(rates) - 1
    assert (rates, best) == published(losses, epochs, patience, lr, factor, least)
    assert schedule.epoch == len(rates)


def test_the_rate_falls_by_the_decay_after_every_epoch_and_by_cuts_too() -> None:
    training = Training(lr=1.0, lr_decay=0.5, epochs=6, patience=2, lr_factor=10.0, lr_min=0.003)
    schedule = Schedule(training.lr)
    rates = []
    while not schedule.over:
        rates.append(schedule.lr)
        schedule.after_epoch(1.0, training)
    assert rates == pytest.approx([1, 0.5, 0.25, 0.0125, 0.00625])


@given(losses=LOSSES, epochs=st.integers(1, 60))
def test_without_patience_the_rate_stays_and_the_last_weights_too(
    losses: list[float], epochs: int
) -> None:
    training = Training(lr=0.1, epochs=epochs)
    schedule = Schedule(0.1)
    while not schedule.over:
        assert schedule.lr == 0.1
        assert not schedule.after_epoch(losses[schedule.epoch], training)
    assert schedule.epoch == epochs


@pytest.mark.parametrize("patience", [0, 2])
@pytest.mark.parametrize("kind", [WatchedFinetune, WatchedSingle, WatchedGPM, WatchedTRGP])
def test_the_best_weights_are_restored(
    kind: type[WatchedFinetune], patience: int, tmp_path: Path
) -> None:
    """Measured once more, the weights a task ends with have the best validation loss, or the last.

    With running statistics, which belong to the weights.
    """
    tasks = some_tasks(3, 4, 4, 4)
    options = {"lr": 0.5, "epochs": 8, "patience": patience, "lr_min": 0.01}
    if kind is WatchedTRGP:
        options |= {"epsilon": 0.0, "threshold": 0.9, "norm": "per_task"}
    result, ends = watched(kind, tasks, tmp_path, Conv, **options)
    benchmark = from_tensors(tasks, Conv)
    differ = False
    for t, end in enumerate(ends):
        losses = result.curves[t]["valid_loss"]
        x, y = benchmark.tasks[t].valid.batch(slice(None))
        loss = F.cross_entropy(end.logits(x, t), y).item()
        assert loss == pytest.approx(min(losses) if patience else losses[-1], rel=1e-5)
        differ |= min(losses) < 0.999 * losses[-1]
        rates, _ = published(losses, 8, patience or 99, 0.5, 2.0, 0.01)
        assert result.curves[t]["lr"] == rates
    assert differ
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("tracked", [True, False])
def test_redrawn_validation_changes_losses_only_where_batches_are_normed_by_themselves(
    tracked: bool, tmp_path: Path
) -> None:
    """The steps are the same ones, as long as no rate is cut by what was measured."""
    tasks = some_tasks(2, 4, 4, 4, samples=200)
    settings = {"epochs": 3, "test_batch": 8, "batch": 20}
    found = []
    for redrawn in (False, True):
        out = tmp_path / str(redrawn)
        result = run(
            tasks,
            "finetune",
            out,
            lambda: Conv(track=tracked),
            redrawn_validation=redrawn,
            **settings,
        )
        found.append(result.curves[0])
    fixed, redrawn = found
    assert fixed["loss"] == redrawn["loss"]
    same = pytest.approx(fixed["valid_loss"], rel=1e-6) == redrawn["valid_loss"]
    assert same == tracked
