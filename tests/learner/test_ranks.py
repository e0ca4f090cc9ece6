"""Data parallel training protects the data of all ranks, and every rank holds the same memory."""

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_close

from trgp import TRGP

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "ranks_program.py"


def run_ranks(folder: Path, world: int, *words: str, program: Path = PROGRAM) -> list[Any]:
    """What each of the ranks wrote."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(program)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(world), port, str(folder), *words])
        for rank in range(world)
    ]
    assert [rank.wait(300) for rank in ranks] == [0] * world
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(world)]


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
    ranks = run_ranks(tmp_path, world, method, wrap)
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


@pytest.mark.parametrize("method", ["GPM", "TRGP"])
def test_the_memory_is_that_of_one_process_with_all_data(method: str, tmp_path: Path) -> None:
    (alone,) = run_ranks(tmp_path / "one", 1, method, "untrained")
    many = run_ranks(tmp_path / "three", 3, method, "untrained")
    assert many[0]["ranks"] == alone["ranks"]
    assert many[0]["selected"] == alone["selected"]
    for key, projector in projectors(many[2]).items():
        assert_close(projector, projectors(alone)[key], 1e-9)


def test_a_file_of_two_ranks_is_loaded_by_one(tmp_path: Path) -> None:
    sys.path.insert(0, str(PROGRAM.parent))
    import ranks_program

    first, _ = run_ranks(tmp_path, 2, "TRGP", "once")
    model = ranks_program.Net().double()
    learner = TRGP.load(tmp_path / "learner.safetensors", model)
    for task, logits in first["now"].items():
        with learner.task(int(task)), torch.no_grad():
            assert_close(model.eval()(ranks_program.samples(int(task))[0], int(task)), logits)
