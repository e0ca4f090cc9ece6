"""Under fully_shard (FSDP2) ranks hold rows of weights, and learn what one process does."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import sharded_program
import torch
from helpers import assert_close
from rank_processes import outcomes, start

from trgp import TRGP

pytestmark = pytest.mark.slow

PROGRAM = "sharded_program.py"
OLD_FILE = Path(__file__).parents[1] / "fixtures" / "learner-0.1.safetensors"
RUNS = (
    "learn:plain:TRGP:0.95:SGD",
    "learn:gpm:GPM:0.95:SGD",
    "learn:adam:TRGP:0.95:AdamW",
    "learn:exact:TRGP:1.0:kept",
)


def assert_alike(found: Any, expected: Any, tolerance: float, *parts: str) -> None:
    for part in parts:
        assert found[part].keys() == expected[part].keys()
        for key, value in expected[part].items():
            assert_close(found[part][key], value, tolerance)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_learn_what_one_process_learns(world: int, tmp_path: Path) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    alone = outcomes(PROGRAM, one, 1, *RUNS)
    *found, resumed = outcomes(PROGRAM, many, world, *RUNS, f"resume:{one}/plain")
    ((back,),) = outcomes(PROGRAM, tmp_path / "back", 1, f"resume:{many}/plain")
    for (expected,), ranks in zip(alone, found, strict=True):
        for rank in ranks:
            assert rank["ranks"] == expected["ranks"]
            assert rank["selected"] == expected["selected"]
            assert_alike(rank, expected, 1e-12, "then", "now", "weights", "end", "last")
            for name, scalings in expected["scalings"].items():
                for Q, own in zip(scalings, rank["scalings"][name], strict=True):
                    assert_close(own.norm(), Q.norm(), 1e-9)
    plain = alone[0][0]
    for learner in (back, *resumed):
        assert_alike(learner, plain, 1e-12, "now", "end", "last")
        assert_close(learner["plain"]["0"], plain["last"]["0"], 1e-12)
    for rank in found[-1]:  # at threshold 1 nothing is forgotten
        assert_alike(rank, {"last": rank["then"] | {"3": rank["last"]["3"]}}, 1e-10, "last")
    trusted = [j for chosen in plain["selected"].values() for each in chosen.values() for j in each]
    assert trusted
    assert all(rank < width for rank, width in plain["ranks"].values())


def test_what_cannot_be_followed_is_told_on_all_ranks(tmp_path: Path) -> None:
    """And a file of version 0.1 is cut into rows."""
    actions = ("unequal", "failing", "foreign_rows", "refused", f"load_old:{OLD_FILE}")
    unequal, failing, unsaved, _, old = outcomes(PROGRAM, tmp_path, 2, *actions)
    told = json.loads(OLD_FILE.with_suffix(".json").read_text())["logits"]
    for rank in old:
        for found, logits in zip(rank, told, strict=True):
            assert_close(found, torch.tensor(logits, dtype=torch.float64), 1e-12)
    assert unequal[0] == unequal[1]
    assert failing[0] == failing[1]
    assert unsaved == [True, True]


def test_a_rank_killed_in_save_leaves_the_old_file(tmp_path: Path) -> None:
    ranks = start(PROGRAM, tmp_path, 2, "die_saving")
    for rank in ranks:
        rank.communicate(timeout=300)
    assert ranks[0].returncode == -signal.SIGKILL
    learner = TRGP.load(tmp_path / "learner.safetensors", sharded_program.Net().double())
    assert learner.tasks == [0]
