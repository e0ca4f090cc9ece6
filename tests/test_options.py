"""Options as a number, per layer, or as a schedule over layers and tasks."""

import copy
import logging
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_close, classification, cross_entropy, learn, mlp
from hypothesis import given
from hypothesis import strategies as st
from support import inside
from torch import nn

from trgp import GPM, TRGP
from trgp.options import check_option, value_of

anything = st.floats(allow_nan=True, allow_infinity=True) | st.integers(-3, 3)


def checked(option: Any, *, zero: bool) -> float:
    check_option("threshold", option, zero=zero)
    return value_of("threshold", option, "fc", 0, zero=zero)


@given(anything, st.booleans())
def test_a_number_is_accepted_exactly_inside_its_interval(value: float, zero: bool) -> None:
    fine = 0 < value <= 1 or (zero and value == 0)
    ways: list[Any] = [value, {"*": value}, lambda layer, task: value]
    for option in ways:
        if fine:
            assert checked(option, zero=zero) == value
            continue
        message = f"in {'[' if zero else '('}0, 1], not {value!r}."
        with pytest.raises(ValueError, match=f"threshold.* a number {re.escape(message)}"):
            checked(option, zero=zero)


@pytest.mark.parametrize("value", [True, "0.9", None, [0.9], 0.9 + 0j])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"threshold must be a number in \(0, 1\]"):
        GPM(mlp(4, 3), threshold=value)
    with pytest.raises(ValueError, match=r"threshold for '\*' must be a number"):
        GPM(mlp(4, 3), threshold={"*": value})


def test_the_first_matching_pattern_decides() -> None:
    option = {"body.0": 0.1, "body.[12]": 0.2, "*": 0.3}
    layers = ["body.0", "body.1", "body.2", "body.3", "head", "Body.0"]
    found = [value_of("epsilon", option, layer, "a", zero=True) for layer in layers]
    assert found == [0.1, 0.2, 0.2, 0.3, 0.3, 0.3]


def test_a_mapping_that_leaves_a_layer_out_names_it() -> None:
    learner = GPM(mlp(4, 3, 2), threshold={"0": 0.9})
    batch = classification(0, 4, classes=2)
    with pytest.raises(ValueError, match=r"threshold gives no value for layer '2'; add a pattern"):
        learner.begin_task(0, [batch], cross_entropy)


def test_thresholds_per_layer_reach_their_layers() -> None:
    """A layer's memory is the one it would have if all had its threshold."""
    ranks = {}
    mapping = MappingProxyType({"0": 0.5, "2": 0.999})
    for name, threshold in {"low": 0.5, "high": 0.999, "each": mapping}.items():
        torch.manual_seed(0)
        learner = GPM(mlp(10, 10, 4), threshold=threshold)
        learn(learner, 0, [classification(0, 10, samples=30)])
        ranks[name] = learner.ranks
    assert ranks["each"] == {"0": ranks["low"]["0"], "2": ranks["high"]["2"]}
    assert ranks["low"]["0"] != ranks["high"]["0"]
    assert ranks["low"]["2"] != ranks["high"]["2"]


def test_a_schedule_is_asked_with_layer_and_task() -> None:
    asked = []

    def schedule(layer: str, task: int | str) -> float:
        asked.append((layer, task))
        return {"a": 0.5, 7: 0.999}[task]

    learner = GPM(mlp(10, 10, 4), threshold=schedule)
    batch = classification(0, 10, samples=30)
    learn(learner, "a", [batch], steps=0)
    low = learner.ranks
    learn(learner, 7, [batch], steps=0)
    assert asked == [("0", "a"), ("2", "a"), ("0", 7), ("2", 7)]
    high = learner.ranks
    assert all(low[name][0] < high[name][0] for name in low)


@pytest.mark.parametrize("value", [0.0, 1.2, -0.1, float("nan"), float("inf"), "0.9", None])
def test_a_schedules_wrong_value_names_layer_and_task(value: Any) -> None:
    learner = GPM(mlp(10, 10, 4), threshold=lambda layer, task: value if task == "b" else 0.9)
    batch = classification(0, 10)
    learn(learner, "a", [batch])
    before = {key: t.clone() for key, t in learner.model.state_dict().items()}
    with pytest.raises(ValueError, match=r"threshold\('0', 'b'\) must be a number in \(0, 1\]"):
        learner.begin_task("b", [batch], cross_entropy)
    for key, tensor in learner.model.state_dict().items():
        assert torch.equal(tensor, before[key])
    learn(learner, "c", [batch])
    assert list(learner.selected) == ["a", "c"]


@pytest.mark.parametrize("value", [-0.1, 1.2, float("nan")])
def test_epsilon_is_checked_as_well(value: float) -> None:
    with pytest.raises(ValueError, match=r"epsilon must be a number in \[0, 1\]"):
        TRGP(mlp(4, 3), epsilon=value)
    learner = TRGP(mlp(10, 10, 4), epsilon=lambda layer, task: value)
    with pytest.raises(ValueError, match=r"epsilon\('0', 0\) must be a number in \[0, 1\]"):
        learner.begin_task(0, [classification(0, 10)], cross_entropy)


def two_tasks(**options: Any) -> TRGP:
    torch.manual_seed(0)
    learner = TRGP(mlp(10, 10, 4), threshold=0.9, **options)
    for task in range(2):
        learn(learner, task, [classification(task, 10)])
    return learner


def test_epsilon_decides_layer_by_layer() -> None:
    """0 trusts every old task that the gradient touches; 1 none, for a gradient not inside it."""
    assert two_tasks(epsilon=0.0).selected[1] == {"0": [0], "2": [0]}
    assert two_tasks(epsilon=1.0).selected[1] == {"0": [], "2": []}
    assert two_tasks(epsilon={"0": 0.0, "*": 1.0}).selected[1] == {"0": [0], "2": []}
    assert two_tasks(epsilon=lambda layer, task: float(layer == "0")).selected[1] == {
        "0": [],
        "2": [0],
    }


def test_the_task_wise_epsilon_is_asked_once_for_all_layers() -> None:
    asked = []

    def epsilon(layer: str, task: int | str) -> float:
        asked.append((layer, task))
        return 0.0

    learner = two_tasks(epsilon=epsilon, scope="task")
    assert asked == [("*", 0), ("*", 1)]
    assert learner.selected[1] == {"0": [0], "2": [0]}
    with pytest.raises(ValueError, match=r"epsilon gives no value for layer '\*'"):
        two_tasks(epsilon={"0": 0.5, "2": 0.5}, scope="task")


def test_top_k_limits_the_trust_region_to_its_strongest() -> None:
    chosen = {}
    for top_k in (1, 2, 3):
        torch.manual_seed(0)
        learner = TRGP(mlp(10, 10, 4), threshold=0.9, epsilon=0.0, top_k=top_k)
        batches = [classification(task, 10) for task in range(4)]
        for task in range(3):
            learn(learner, task, [batches[task]], steps=0)  # so that top_k changes nothing before
        learner.begin_task(3, [batches[3]], cross_entropy)
        chosen[top_k] = learner.selected[3]
    for layer in ("0", "2"):
        assert [len(chosen[k][layer]) for k in (1, 2, 3)] == [1, 2, 3]
        assert chosen[3][layer][:2] == chosen[2][layer]
        assert chosen[2][layer][:1] == chosen[1][layer]


@pytest.mark.parametrize(
    ("max_rank", "expected"),
    [
        (3, (3, 3)),
        (np.int64(3), (3, 3)),
        (0.5, (5, 5)),
        (np.float32(0.5), (5, 5)),
        (1e-6, (1, 1)),
        ({"0": 2, "*": 0.5}, (2, 5)),
        ({"0": None, "2": 1}, (11, 1)),
        ({"2": 1}, (11, 1)),
    ],
)
def test_a_memory_grows_to_its_limit_and_no_further(
    max_rank: Any, expected: tuple[int, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the strongest directions; what is left out is told. Both layers have eleven inputs."""
    torch.manual_seed(0)
    model = mlp(10, 10, 4)
    free = GPM(copy.deepcopy(model), threshold=1.0)
    learner = GPM(model, threshold=1.0, max_rank=max_rank)
    batches = [[classification(task, 10, samples=30)] for task in range(2)]
    with caplog.at_level(logging.WARNING, logger="trgp"):
        learn(learner, 0, batches[0], steps=0)
    learn(free, 0, batches[0], steps=0)
    assert tuple(rank for rank, _ in learner.ranks.values()) == expected
    for name, (rank, _) in learner.ranks.items():
        limited = inside.bases(learner)[name].M
        assert_close(limited, inside.bases(free)[name].M[:, :, :rank], 1e-5)
        left = free.ranks[name][0] - rank
        told = f"max_rank leaves {left} directions of layer '{name}' out of task 0's memory"
        assert (told in caplog.text) == bool(left)
    learn(learner, 1, batches[1])
    assert tuple(rank for rank, _ in learner.ranks.values()) == expected
    learner.save(tmp_path / "a")
    assert GPM.load(tmp_path / "a", mlp(10, 10, 4)).max_rank == max_rank


@pytest.mark.parametrize("value", [0, -1, 0.0, 1.5, True, "3", float("nan"), {"*": 0}])
def test_a_limit_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="max_rank must be a whole number of at least 1, a share"):
        GPM(mlp(4, 3), max_rank=value)


@pytest.mark.parametrize("name", ["memory_samples", "top_k", "selection_samples"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
def test_counts_are_whole_numbers_of_at_least_one(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1"):
        TRGP(mlp(4, 3), **{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "batch"}, "norm must be 'freeze', 'per_task' or 'shared', not 'batch'"),
        ({"form": "best"}, "form must be 'auto', 'paper' or 'range', not 'best'"),
        ({"scale_rate": 0.0}, "scale_rate must be a finite number above 0"),
        ({"scale_rate": float("nan")}, "scale_rate must be a finite number above 0"),
        ({"scale_rate": True}, "scale_rate must be a finite number above 0"),
        ({"scope": "model"}, "scope must be 'layer' or 'task', not 'model'"),
    ],
)
def test_choices_are_named(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TRGP(mlp(4, 3), **options)


@pytest.mark.parametrize("name", ["exclude", "per_task"])
def test_a_pattern_given_as_a_plain_string_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name} must be a list.*{name}=\['head'\]"):
        GPM(nn.Sequential(nn.Linear(3, 3)), **{name: "head"})
