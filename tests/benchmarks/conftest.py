"""Image sets for the benchmarks: small random ones, and the real ones where they are at hand."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from small_sets import SMALL, write_small

from trgp.benchmarks.data import data_root

UNPACK = Path(__file__).parents[3] / "shared" / "data" / "unpack.py"


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a small set of every kind."""
    root = tmp_path_factory.mktemp("small")
    for name in SMALL:
        write_small(root, name)
    return root


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The root of a real set: TRGP_DATA, else a folder it is unpacked into, else a skip."""
    unpacked = tmp_path_factory.mktemp("real")

    def find(name: str) -> Path:
        if os.environ.get("TRGP_DATA") and (data_root() / f"{name}.npz").is_file():
            return data_root()
        if not UNPACK.is_file():
            pytest.skip(f"there is no {name}.npz under TRGP_DATA, and no packs beside the checkout")
        if not (unpacked / f"{name}.npz").is_file():
            command = [sys.executable, str(UNPACK), str(unpacked), "--only", name]
            subprocess.run(command, check=True, capture_output=True)
        return unpacked

    return find
