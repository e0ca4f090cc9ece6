"""`learner.evaluate` measures every task with its own weights, and keeps what it measured."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ConvNet, classification, cross_entropy, learn, mlp
from torch import Tensor, nn

from trgp import GPM, TRGP
from trgp.learner.evaluation import Scores
from trgp.results import metrics

IDS: list[int | str] = [3, "second", 0]
Loaders = dict[int | str, list[tuple[Tensor, Tensor]]]


def accuracy(model: nn.Module, batch: tuple[Tensor, Tensor], task: int | str) -> Tensor:
    x, y = batch
    return (model(x).argmax(1) == y).float().mean()


def loaders() -> Loaders:
    return {
        task: [classification(i, 6, rank=2, samples=n) for n in (12, 20)]
        for i, task in enumerate(IDS)
    }


def learnt(cls: type[GPM] = TRGP) -> tuple[GPM, list[Scores]]:
    """Three tasks, evaluated after each."""
    learner, scores = cls(mlp(6, 12, 4), threshold=0.9), []
    for task, batches in loaders().items():
        learn(learner, task, batches, steps=40, lr=0.3)
        scores.append(learner.evaluate(loaders(), accuracy))
    return learner, scores


def assert_same_model(model: nn.Module, before: nn.Module) -> None:
    for key, value in before.state_dict().items():
        assert torch.equal(model.state_dict()[key], value)
    for ours, theirs in zip(model.modules(), before.modules(), strict=True):
        assert ours.training == theirs.training


# ---- what is measured ---------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [GPM, TRGP])
def test_every_row_is_measured_with_each_task_s_own_weights(cls: type[GPM]) -> None:
    learner = cls(mlp(6, 12, 4), threshold=0.9)
    rows = []
    for task, batches in loaders().items():
        learn(learner, task, batches, steps=40, lr=0.3)
        scores = learner.evaluate(loaders(), accuracy)
        row = []
        for old in learner.tasks:
            x, y = (torch.cat(parts) for parts in zip(*loaders()[old], strict=True))
            with learner.task(old), torch.no_grad():
                row.append(float((learner.model(x).argmax(1) == y).double().mean()))
        assert scores.row == pytest.approx(dict(zip(learner.tasks, row, strict=True)))
        rows.append(row)
    assert [list(row) for row in scores.rows] == [pytest.approx(row) for row in rows]
    assert len({score for row in rows for score in row}) > 3  # or it would tell nothing


def test_figures_are_those_of_the_suite() -> None:
    _, (first, _, last) = learnt()
    assert last.acc == metrics.acc(last.matrix)
    assert last.bwt == metrics.bwt(last.matrix)
    assert last.forgetting == metrics.forgetting(last.matrix)
    assert first.acc == first.rows[0][0]
    assert first.bwt is first.forgetting is None


def test_scores_by_hand() -> None:
    scores = Scores(("a", "b", "c"), ((-2.0,), (-1.0, 5.0), (-4.0, 2.0, 0.5)))
    assert scores.matrix == [[-2.0, None, None], [-1.0, 5.0, None], [-4.0, 2.0, 0.5]]
    assert scores.row == {"a": -4.0, "b": 2.0, "c": 0.5}
    assert scores.acc == -0.5
    assert scores.bwt == -2.5
    assert scores.forgetting == 3.0
    assert str(scores).splitlines() == [
        "after       a       b       c",
        "a      -2.000",
        "b      -1.000   5.000",
        "c      -4.000   2.000   0.500",
        "ACC -0.500, BWT -2.500, forgetting 3.000",
    ]


def test_batches_weigh_by_their_samples() -> None:
    learner = GPM(mlp(3, 3))
    batch = classification(0, 3, classes=3)
    learn(learner, 0, [batch])
    uneven = [torch.zeros(1, 3), torch.ones(3, 3)]
    assert learner.evaluate({0: uneven}, lambda m, b, t: b.mean()).row == {0: 0.75}
    assert learner.evaluate({0: uneven}, lambda m, b, t: float(b.mean())).row == {0: 0.75}


def test_the_metric_is_told_the_task() -> None:
    learner, _ = learnt()
    numbers = {task: float(i) for i, task in enumerate(IDS)}
    assert learner.evaluate(loaders(), lambda m, b, task: numbers[task]).row == numbers


def test_loaders_of_later_tasks_are_not_read() -> None:
    learner = GPM(mlp(6, 4))
    learn(learner, 3, loaders()[3])
    assert learner.evaluate({**loaders(), "second": None}, accuracy).tasks == (3,)  # type: ignore[dict-item]


def test_a_row_that_was_not_measured() -> None:
    learner = GPM(mlp(6, 12, 4), threshold=0.9)
    for task, batches in loaders().items():
        learn(learner, task, batches)
    scores = learner.evaluate(loaders(), accuracy)
    assert [len(row) for row in scores.rows] == [0, 0, 3]
    assert scores.matrix[0] == [None, None, None]
    assert scores.bwt is scores.forgetting is None
    assert "BWT" not in str(scores)
    assert str(scores).splitlines()[1] == "3"


def test_measuring_again_replaces_the_row() -> None:
    learner, _ = learnt()
    scores = learner.evaluate(loaders(), lambda m, b, t: 0.25)
    assert scores.rows[-1] == (0.25, 0.25, 0.25)
    assert scores.rows[0] != (0.25,)


# ---- what is left behind ------------------------------------------------------------------------


def test_model_and_random_states_are_as_before() -> None:
    torch.manual_seed(0)
    model = ConvNet()
    learner = TRGP(model, threshold=0.9, per_task=["head"])
    batches = {t: [classification(t, 16, 4, 4)] for t in range(2)}
    for task in batches:
        learn(learner, task, batches[task], steps=3)
    model.train()
    before, states = copy.deepcopy(model), (torch.get_rng_state(), random.getstate())

    def metric(model: nn.Module, batch: Any, task: int | str) -> float:
        assert not model.training
        assert not torch.is_grad_enabled()
        random.random()
        return float(cross_entropy(model, batch) + 0 * torch.rand(()))

    learner.evaluate(batches, metric)
    assert_same_model(model, before)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_a_metric_that_fails_leaves_all_as_before() -> None:
    learner, scores = learnt()
    before = copy.deepcopy(learner.model)
    with pytest.raises(ZeroDivisionError):
        learner.evaluate(loaders(), lambda m, b, t: 1 / 0)
    assert_same_model(learner.model, before)
    assert learner.evaluate(loaders(), accuracy) == scores[-1]


def test_scores_stay_with_the_learner(tmp_path: Path) -> None:
    learner, scores = learnt()
    learner.save(tmp_path / "a", include_model=True)
    loaded = TRGP.load(tmp_path / "a", mlp(6, 12, 4))
    resumed = TRGP(copy.deepcopy(learner.model), threshold=0.9)
    resumed.load_state_dict(learner.state_dict())
    for other in (loaded, resumed, copy.deepcopy(learner)):
        assert other.evaluate(loaders(), accuracy) == scores[-1]


def test_a_state_from_before_scores_were_kept() -> None:
    learner, _ = learnt()
    state = learner.state_dict()
    del state["meta"]["scores"]
    learner.load_state_dict(state)
    assert [len(row) for row in learner.evaluate(loaders(), accuracy).rows] == [0, 0, 3]


# ---- misuse -------------------------------------------------------------------------------------


def test_evaluate_before_anything_is_learnt() -> None:
    with pytest.raises(RuntimeError, match="before any task was learnt; call end_task first"):
        GPM(mlp(6, 4)).evaluate(loaders(), accuracy)


def test_evaluate_while_a_task_is_open() -> None:
    learner = GPM(mlp(6, 4))
    learner.begin_task(0, loaders()[0], cross_entropy)
    with pytest.raises(RuntimeError, match="evaluate cannot be called while task 0 is being"):
        learner.evaluate(loaders(), accuracy)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "needs a mapping from task ids to loaders, not list"),
        ({0: [], "3": []}, "a loader for every learnt task; add one for 3, 'second'."),
    ],
)
def test_loaders_that_do_not_fit(given: Any, message: str) -> None:
    learner, _ = learnt()
    with pytest.raises((TypeError, ValueError), match=message):
        learner.evaluate(given, accuracy)


@pytest.mark.parametrize(
    ("score", "found"), [(None, "NoneType"), ("good", "str"), (torch.ones(3), "3 numbers")]
)
def test_a_metric_that_returns_no_number(score: Any, found: str) -> None:
    learner, _ = learnt()
    with pytest.raises(TypeError, match=f"mean score as a number, not {found}"):
        learner.evaluate(loaders(), lambda m, b, t: score)
