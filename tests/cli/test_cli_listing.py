"""`trgp list`."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from cli_calls import Trgp

from trgp.benchmarks import NAMES
from trgp.methods import METHODS


def rows(text: str) -> dict[str, str]:
    return {line.split()[0]: line for line in text.splitlines() if line.strip()}


def test_benchmarks(trgp: Trgp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "mnist.npz", nothing=0)
    monkeypatch.setenv("TRGP_DATA", str(tmp_path))
    code, out, err = trgp("list", "benchmarks")
    assert (code, err) == (0, "")
    found = rows(out)
    assert set(NAMES) <= found.keys()
    assert " 10 " in found["pmnist"]
    assert "present" in found["pmnist"]
    assert "96.34 ± 0.11" in found["pmnist"]
    assert "trgp data prepare cifar10 svhn fashion_mnist notmnist " in found["five-datasets"]
    assert "present" in found["split-digits"]
    assert all(line == line.rstrip() for line in out.splitlines())


def test_digits_without_their_package(trgp: Trgp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'trgp[digits]'" in rows(trgp("list", "benchmarks").out)["split-digits"]


def test_methods(trgp: Trgp) -> None:
    code, out, _ = trgp("list", "methods")
    assert code == 0
    found = rows(out)
    assert set(METHODS) <= found.keys()
    assert "the task's name at test time" in found["trgp"]
    assert "all tasks at once" in found["multitask"]
    assert "Saha et al., ICLR 2021" in found["gpm"]


def test_presets(trgp: Trgp) -> None:
    code, out, _ = trgp("list", "presets")
    assert code == 0
    for name in NAMES:
        assert f"\n{name} " in out
    assert "scrambled                 all" in out
    assert re.search(r"\n +epsilon +trgp +0\.5 +0\.2\n", out)  # on pmnist
    assert re.search(r"\npmnist +best +lr ", out)
    assert re.search(r"\n +lr +gpm, trgp +0\.01 +0\.03\n", out)  # of the best on pmnist
    assert "use MNIST again in place of Fashion-MNIST" in out
