"""The program as a process of its own: signals, pipes, terminals and what is imported."""

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_calls import LONG, SMALL, start, wait_for


def test_importing_the_package_imports_no_command_line() -> None:
    code = (
        "import sys, trgp; print([m for m in ('tyro', 'rich', 'tensorboard') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_importing_the_package_imports_no_torch_until_it_is_used() -> None:
    """Or the program could not look after Ctrl-C before."""
    code = (
        "import sys, trgp, trgp.cli; print('torch' in sys.modules);"
        "from trgp import GPM, TRGP, UnknownTaskError, run;"
        "print(TRGP.__module__, trgp.run is run);"
        "print(hasattr(trgp, 'nothing'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\ntrgp.learner.trgp_learner True\nFalse\n"


def test_ctrl_c_and_the_command_that_goes_on(here: Path) -> None:
    command = (*LONG, "--log-json", "log")
    process = start(*command, "--fresh")
    wait_for(here / "log", "epoch_finished")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    says, again = err.strip().split("Resume with: ")
    assert says.startswith("trgp: Interrupted; every finished epoch is saved in runs/")
    assert shlex.split(again) == ["trgp", *command]
    process = start(*shlex.split(again)[1:])
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "ACC" in out
    events = [json.loads(line) for line in (here / "log").read_text().splitlines()]
    first, second = (event for event in events if event["event"] == "run_started")
    assert first["done_epochs"] == 0
    assert second["done_tasks"] or second["done_epochs"]
    epochs = [(e["task"], e["epoch"]) for e in events if e["event"] == "epoch_finished"]
    assert epochs == [(task, epoch) for task in range(2) for epoch in range(1, 41)]


@pytest.mark.slow
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("ignored", [False, True])
def test_ctrl_c_while_torch_is_imported(ignored: bool) -> None:
    """A background job, which ignores it, goes on."""
    if not Path("/proc/self/maps").exists():
        pytest.skip("this system does not tell which libraries a process has loaded")
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.SIG_DFL)
    process = start("list", "methods")
    signal.signal(signal.SIGINT, before)
    maps = Path(f"/proc/{process.pid}/maps")
    while "libtorch" not in maps.read_text():
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    if ignored:
        assert (process.returncode, err) == (0, "")
        assert "trgp" in out
    else:
        assert (process.returncode, out, err) == (130, "", "trgp: Interrupted.\n")


@pytest.mark.usefixtures("here")
def test_a_reader_that_has_seen_enough() -> None:
    for command in (("list", "presets"), ("--help",), ("run", "pmnist", "--help")):
        process = start(*command)
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
        process.stderr.close()
        assert process.wait(timeout=60) == 1


def test_a_mistake_in_a_users_method_shows_where(here: Path) -> None:
    (here / "broken_method.py").write_text(
        "from trgp.methods import METHODS\n\n\n"
        "class Broken(METHODS['finetune']):\n"
        "    def step(self, *args):\n"
        "        raise ValueError('a slip')\n"
    )
    process = start("run", *SMALL, "--method", "broken_method:Broken")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert err.startswith("Traceback")
    assert err.endswith("ValueError: a slip\n")


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_bar_where_there_is_a_terminal() -> None:
    for more in ((), ("--quiet",)):
        terminal, end = pty.openpty()
        process = start(*LONG, "--seeds", "2", *more, stderr=end)
        os.close(end)
        shown = read_all(terminal)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "ACC" in out
        if more:  # and stored by now
            assert shown == ""
        else:
            assert re.search(r"seed 1 \(2/2\) task 2/2 epoch \d+/40 .*loss 0\.\d+ val \d+", shown)
            assert "seed 1: ACC" in shown


def read_all(terminal: int) -> str:
    content = b""
    try:
        while block := os.read(terminal, 1 << 16):
            content += block
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(terminal)
    return re.sub(r"\x1b\[[0-9;?]*\w", "", content.decode())  # without colours and movements


@pytest.mark.usefixtures("here")
def test_a_terminal_that_lacks_letters() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    process = start("list", "benchmarks", env=environment)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "96.34 \\xb1 0.11" in out
