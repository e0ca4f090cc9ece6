"""A folder to start commands in, and what they say."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_calls import Said, Trgp

from trgp.cli import main


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which the test is in, and which has no image sets."""
    monkeypatch.setenv("TRGP_DATA", str(tmp_path / "no data"))
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def trgp(here: Path, capsys: pytest.CaptureFixture[str]) -> Trgp:
    """Runs a command in this process."""

    def call(*argv: str) -> Said:
        capsys.readouterr()
        code = main(argv)
        return Said(code, *capsys.readouterr())

    return call


@pytest.fixture
def whole() -> dict[str, Any]:
    """The arrays of a small image set of four classes."""
    random = np.random.RandomState(0)
    arrays = {}
    for split in ("train", "test"):
        arrays[f"{split}_images"] = random.randint(0, 256, (80, 6, 5, 1), np.uint8)
        arrays[f"{split}_labels"] = np.arange(80) % 4
    return arrays


@pytest.fixture
def own(tmp_path: Path, whole: dict[str, Any]) -> Path:
    """A file of them."""
    np.savez(tmp_path / "own.npz", **whole)
    return tmp_path / "own.npz"
