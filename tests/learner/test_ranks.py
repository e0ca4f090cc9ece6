"""Data parallel training protects the data of all ranks, and every rank holds the same memory."""

import signal
from pathlib import Path
from typing import Any

import pytest
import ranks_program
import torch
from helpers import assert_close
from rank_processes import outcomes, start

from trgp import TRGP

pytestmark = pytest.mark.slow

PROGRAM = "ranks_program.py"


def projectors(rank: Any) -> dict[str, torch.Tensor]:
    """M M' by layer."""
    tensors = rank["tensors"].items()
    return {k: M @ M.mT for k, M in tensors if k.startswith("memory/") and k.endswith("/M")}


@pytest.mark.parametrize(
    ("world", "method", "wrap"),
    [(2, "TRGP", "task"), (2, "GPM", "once"), (3, "TRGP", "once")],
)
def test_ranks_hold_the_same_and_forget_nothing(
    world: int, method: str, wrap: str, tmp_path: Path
) -> None:
    (ranks,) = outcomes(PROGRAM, tmp_path, world, f"train_all:{method}:{wrap}")
    first = ranks[0]
    for rank in ranks[1:]:
        assert rank["selected"] == first["selected"]
        assert rank["tensors"].keys() == first["tensors"].keys()
        for part in ("tensors", "model"):
            for key, tensor in first[part].items():
                assert torch.equal(rank[part][key], tensor), key
    for task, logits in first["then"].items():
        assert_close(first["now"][task], logits)
    if method == "TRGP":
        assert any(trusted for chosen in first["selected"].values() for trusted in chosen.values())


def test_the_memory_is_that_of_one_process_with_all_data(tmp_path: Path) -> None:
    actions = [f"train_all:{method}:untrained" for method in ("GPM", "TRGP")]
    alone = outcomes(PROGRAM, tmp_path / "one", 1, *actions)
    many = outcomes(PROGRAM, tmp_path / "three", 3, *actions)
    for (one,), ranks in zip(alone, many, strict=True):
        assert ranks[0]["ranks"] == one["ranks"]
        assert ranks[0]["selected"] == one["selected"]
        for key, projector in projectors(ranks[2]).items():
            assert_close(projector, projectors(one)[key], 1e-9)


def test_a_file_of_two_ranks_is_loaded_by_one(tmp_path: Path) -> None:
    ((first, _),) = outcomes(PROGRAM, tmp_path, 2, "train_all:TRGP:once")
    model = ranks_program.Net().double()
    learner = TRGP.load(tmp_path / "learner.safetensors", model)
    for task, logits in first["now"].items():
        with learner.task(int(task)), torch.no_grad():
            assert_close(model.eval()(ranks_program.samples(int(task))[0], int(task)), logits)


def test_an_error_on_one_rank_is_one_on_all_and_changes_nothing(tmp_path: Path) -> None:
    """Samples are shared out in equal parts, rounded up."""
    failing, counted = outcomes(PROGRAM, tmp_path, 2, "fail_on_last", "count_samples:7")
    (said, ranks), (own, ranks_of_last) = failing
    assert own == ["no loss"] * 4
    assert all("Another rank failed in this call" in each for each in said)
    assert len(said) == 4
    assert ranks == ranks_of_last
    assert counted == [[5, 4, 4, 4]] * 2  # begin_task of a first task reads one batch


def test_a_rank_killed_in_save_leaves_the_old_file(tmp_path: Path) -> None:
    first, second = start(PROGRAM, tmp_path, 2, "die_saving")
    for rank in (first, second):
        rank.communicate(timeout=300)
    assert first.returncode == -signal.SIGKILL
    learner = TRGP.load(tmp_path / "learner.safetensors", ranks_program.Net().double())
    assert learner.tasks == [0]
