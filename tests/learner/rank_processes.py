"""Processes that are the ranks of one group: a test starts them, and a program joins them."""

import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Action = Callable[..., Any]  # of a rank, the number of ranks, a folder, and words


def start(program: str, folder: Path, world: int, *actions: str) -> list[subprocess.Popen[str]]:
    """Start every rank with actions such as "learn:GPM:0.9"."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    folder.mkdir(exist_ok=True)
    path = str(Path(__file__).parent / program)
    return [
        subprocess.Popen(
            [sys.executable, path, str(rank), str(world), port, str(folder), *actions],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]


def outcomes(program: str, folder: Path, world: int, *actions: str) -> list[list[Any]]:
    """Run the actions to their end; returns by action what every rank found."""
    ranks = start(program, folder, world, *actions)
    errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(errors)
    found = [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(world)]
    return [list(each) for each in zip(*found, strict=True)]


def take_part(actions: Mapping[str, Action]) -> None:
    """Be the rank that the command line says, and write what its actions have found."""
    rank, world, port, folder, *wanted = sys.argv[1:]
    torch.set_num_threads(1)
    if int(world) > 1:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", address, rank=int(rank), world_size=int(world))
    found = []
    for each in wanted:
        name, *words = each.split(":")
        found.append(actions[name](int(rank), int(world), Path(folder), *words))
    torch.save(found, Path(folder) / f"rank-{rank}.pt")
    if int(world) > 1:
        dist.destroy_process_group()
