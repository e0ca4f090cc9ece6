"""Work that would be lost silently is refused: several ranks, and a learner left half-way."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trgp.core.guard as guard
from helpers import classification, cross_entropy, learn, mlp, train

from trgp import GPM, TRGP

RANK = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from trgp import TRGP

rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
learner = TRGP(nn.Sequential(nn.Linear(4, 3)))
batch = (torch.randn(6, 4), torch.arange(6) % 3)
try:
    learner.begin_task(0, [batch], lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]))
except RuntimeError as error:
    assert "single process" in str(error), error
    sys.exit(7)
"""


def test_a_group_of_two_ranks_is_refused() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(r), str(port)]) for r in range(2)]
    assert [rank.wait(60) for rank in ranks] == [7, 7]


@pytest.mark.parametrize("interrupted", ["begin_task", "end_task"])
def test_a_learner_left_half_way_is_not_saved(
    interrupted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = TRGP(mlp(6, 8, 4), threshold=0.9, epsilon=0.0)
    for task in range(2):
        learn(learner, task, [classification(task, 6)])
    path = tmp_path / "good.safetensors"
    learner.save(path, include_model=True)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    if interrupted == "begin_task":
        monkeypatch.setattr(guard.Pin, "of", full)
        with pytest.raises(torch.OutOfMemoryError):
            learner.begin_task(2, [classification(2, 6)], cross_entropy)
    else:
        learner.begin_task(2, [classification(2, 6)], cross_entropy)
        train(learner, [classification(2, 6)], steps=3)
        monkeypatch.setattr(GPM, "_hold", full)
        with pytest.raises(torch.OutOfMemoryError):
            learner.end_task([classification(2, 6)])
    with pytest.raises(RuntimeError):
        learner.save(path, include_model=True)
    TRGP.load(path, mlp(6, 8, 4))
