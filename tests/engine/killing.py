"""A run that is killed at random moments and begun again, until it ends by itself.

A program of its own, because it forks: torch is imported once, and every attempt is a process that
can be killed. Usage: killing.py FOLDER KILLS CASE...
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from small_runs import run_case

import trgp.files

Change = Callable[[], None]


def attempt(case: str, out: Path, change: Change | None = None) -> int:
    """Begin or go on in a new process, and say which."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        if change is not None:
            change()
        run_case(case, out)
        code = 0
    finally:
        os._exit(code)


def ended(process: int) -> int:
    """Its exit code, or the negative number of the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("dead by now")


def dying_in_a_write(draw: random.Random) -> Change:
    """Some write from now on is the last: cut short, or whole but not in its place, or in it."""
    left = [draw.randrange(1, 9)]
    share = draw.choice([None, None, 0.0, 0.3, 0.99])
    before = draw.random() < 0.5
    save, replace = trgp.files.save_file, os.replace

    def cut(tensors: Any, path: Path, **options: Any) -> None:
        save(tensors, path, **options)
        if share is not None and left[0] <= 1:
            os.truncate(path, int(share * path.stat().st_size))
            die()

    def place(source: Any, target: Any) -> None:
        left[0] -= 1
        if left[0] == 0 and before:
            die()
        replace(source, target)
        if left[0] == 0:
            die()

    def change() -> None:
        trgp.files.save_file = cut
        os.replace = place

    return change


def main(folder: str, kills: str, *cases: str) -> None:
    torch.set_num_threads(1)  # whoever has more of them must not fork
    for case in cases:
        run_case(case, Path(folder, "warm"))  # the first run imports more, and takes longer
        print(case, killed(case, Path(folder, case), int(kills)))


def killed(case: str, out: Path, kills: int) -> int:
    """Run a case once in peace and once with so many attempts on its life; how many succeeded."""
    draw = random.Random(case)
    start = time.monotonic()
    run_case(case, out / "whole")
    length = time.monotonic() - start
    count = 0
    for k in range(kills):
        if k % 2:
            process = attempt(case, out / "killed", dying_in_a_write(draw))
        else:
            process = attempt(case, out / "killed")
            time.sleep(draw.uniform(0, length / 3))
            os.kill(process, signal.SIGKILL)
        code = ended(process)
        assert code in (0, -signal.SIGKILL), code
        count += code != 0
    assert ended(attempt(case, out / "killed")) == 0
    return count


if __name__ == "__main__":
    main(*sys.argv[1:])
