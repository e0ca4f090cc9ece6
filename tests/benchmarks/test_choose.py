"""The search of settings: its grids, what it keeps, and what it writes."""

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

import trgp
from trgp.benchmarks import entry
from trgp.engine.sweep import Place
from trgp.methods import METHODS

RECORDS = Path(__file__).parents[2] / "records"


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program as a module, with one small search."""
    monkeypatch.syspath_prepend(RECORDS)
    import choose

    grids = {"finetune": {"lr": (0.1, 1e6)}, "ewc": {"lr": (0.05,), "strength": (10.0, 1e3)}}
    monkeypatch.setattr(choose, "SMALL", choose.Search("split-digits", grids, (100, 101), 2), False)
    return choose


def place(runs: Path) -> Place:
    return Place("cpu", runs)


def test_every_setting_is_a_configuration_of_its_own(choose: Any) -> None:
    for search in choose.SEARCHES.values():
        found = list(choose.settings(search, search.grids))
        folders = {cell.folder("") for setting in found for cell in setting.cells}
        assert len(folders) == len(found) * len(search.seeds)
        kinds = {setting.method for setting in found}
        for method in search.grids:
            fits = entry(search.benchmark).separate_heads or not METHODS[method].about.several_heads
            assert (method in kinds) == fits
        for setting in found:
            settings = setting.cells[0].config.settings
            assert settings["score_on"] == "validation"
            assert settings["tasks"] == search.tasks
            for key, value in setting.values.items():
                assert settings[key] in (value, (value,))


def test_a_score_is_the_mean_on_validation_data_and_learnt_once(
    choose: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What diverges has none; what is written down is not learnt again."""
    here = place(tmp_path / "a")
    found = choose.scored(choose.settings(choose.SMALL, ["finetune"]), {}, here, 1)
    options = {"seeds": [100, 101], "tasks": 2, "score_on": "validation", "device": "cpu"}
    results = trgp.run("split-digits", "finetune", lr=0.1, out=tmp_path / "b", **options)
    means = {
        "acc": pytest.approx(statistics.fmean(r.acc for r in results), abs=1e-5),
        "bwt": pytest.approx(statistics.fmean(r.bwt for r in results), abs=1e-5),
    }
    assert found == [
        {"method": "finetune", "lr": 0.1, **means},
        {"method": "finetune", "lr": 1e6, "acc": None, "bwt": None},
    ]
    assert len(capsys.readouterr().out.splitlines()) == 4
    path = tmp_path / "choose-split-digits.json"
    assert choose.known(path, choose.SMALL, "finetune") == {}
    choose.write(path, choose.SMALL, found)
    before = choose.known(path, choose.SMALL, "finetune")
    longer = dataclasses.replace(choose.SMALL, tasks=3)
    assert choose.known(path, longer, "finetune") == {}  # which that one does not tell
    elsewhere = place(tmp_path / "c")
    again = choose.scored(choose.settings(choose.SMALL, ["finetune"]), before, elsewhere, 1)
    assert again == found
    assert capsys.readouterr().out == ""
    grown = dataclasses.replace(choose.SMALL, grids={"finetune": {"lr": (0.1, 0.2, 1e6)}})
    more = choose.scored(choose.settings(grown, ["finetune"]), before, elsewhere, 1)
    assert [more[0], more[2]] == found
    assert len(capsys.readouterr().out.splitlines()) == 2  # of the new one, from two seeds


def test_scores_are_found_again_by_search_and_version(
    choose: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a value is several numbers."""
    path = tmp_path / "choose-split-digits.json"
    grids = {"gpm": {"threshold": ((0.9, 0.95), (0.97,)), "lr": (0.1,)}}
    search = dataclasses.replace(choose.SMALL, grids=grids)
    every = list(choose.settings(search, ["gpm"]))
    scores = [{"method": "gpm", **s.values, "acc": k, "bwt": None} for k, s in enumerate(every)]
    choose.write(path, search, scores)
    before = choose.known(path, search, "gpm")
    assert choose.scored(every, before, place(tmp_path / "none"), 1) == scores
    other_seeds = dataclasses.replace(search, seeds=(100,))
    assert choose.known(path, other_seeds, "gpm") == {}
    monkeypatch.setattr(trgp, "__version__", "0.0.1")
    assert choose.known(path, search, "gpm") == {}


def test_only_finished_grids_are_written_and_others_stay(choose: Any, tmp_path: Path) -> None:
    path = tmp_path / "choose-split-digits.json"

    def scored(method: str, *accuracies: float | None) -> list[dict[str, Any]]:
        pairs = zip(choose.settings(choose.SMALL, [method]), accuracies, strict=False)
        return [{"method": method, **each.values, "acc": acc, "bwt": None} for each, acc in pairs]

    def written() -> list[tuple[str, float | None]]:
        grids = json.loads(path.read_text())["grids"]
        return [(method, cell["acc"]) for method, grid in grids.items() for cell in grid["cells"]]

    choose.write(path, choose.SMALL, scored("ewc", 0.5))
    assert written() == []
    choose.write(path, choose.SMALL, scored("ewc", 0.5, 0.7) + scored("finetune", 0.1))
    assert written() == [("ewc", 0.7), ("ewc", 0.5)]
    longer = dataclasses.replace(choose.SMALL, tasks=3, epochs=1)
    choose.write(path, longer, scored("finetune", None, 0.3))
    assert written() == [("ewc", 0.7), ("ewc", 0.5), ("finetune", 0.3), ("finetune", None)]
    choose.write(path, choose.SMALL, scored("ewc", 0.9))
    assert written()[0] == ("ewc", 0.7)
    grids = json.loads(path.read_text())["grids"]
    assert {m: (g["seeds"], g["tasks"], g["epochs"]) for m, g in grids.items()} == {
        "ewc": ([100, 101], 2, None),
        "finetune": ([100, 101], 3, 1),
    }
