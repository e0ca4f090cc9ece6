"""`--tensorboard`: scalars in the folder of the run."""

import importlib.util
from pathlib import Path

import pytest
from cli_calls import SMALL, Trgp, scalars

from trgp.engine.config import defaults
from trgp.results.store import read


def test_the_curves_of_a_run(trgp: Trgp, here: Path) -> None:
    command = ("run", *SMALL, "--quiet", "--tensorboard", "--epochs", "2")
    assert trgp(*command).code == 0
    (folder,) = here.rglob("tensorboard")
    (result,) = read(folder.parent, defaults)
    found = scalars(folder)
    assert [step for step, _ in found["loss/task 2"]] == [1, 2]
    assert found["valid_accuracy/task 1"][1][1] == pytest.approx(
        result.curves[0]["valid_accuracy"][1]
    )
    row = result.accuracy_matrix[1]
    assert [found[f"accuracy/task {j + 1}"][-1] for j in range(2)] == [
        (2, pytest.approx(accuracy)) for accuracy in row
    ]
    assert found["acc"] == [(1, pytest.approx(result.acc))]
    assert found["bwt"] == [(1, pytest.approx(result.bwt))]
    assert "valid_loss/task 1" in found
    # A stored run adds nothing, one that is started over takes the place of the old curves.
    for more in ((), ("--fresh",)):
        assert trgp(*command, *more).code == 0
        assert scalars(folder).keys() == found.keys()
        assert len(scalars(folder)["acc"]) == 1


def test_a_file_of_ones_own_has_them_too(trgp: Trgp, own: Path) -> None:
    code, _, _ = trgp("run", str(own), "--tasks", "2", "--epochs", "1", "--tensorboard")
    assert code == 0
    (result,) = Path().rglob("result.json")
    (folder,) = Path().rglob("tensorboard")
    assert folder.parent == result.parent


def test_a_missing_package(trgp: Trgp, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, err = trgp("run", *SMALL, "--tensorboard")
    assert code == 2
    assert "pip install 'trgp[tensorboard]'" in err
    assert not list(here.iterdir())
