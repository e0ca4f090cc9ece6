"""What trust regions are chosen from: what the watched method tells, and what is recorded."""

import json
from pathlib import Path
from typing import Any

import pytest

import trgp
from trgp import benchmarks

RECORDS = Path(__file__).parents[2] / "records"


@pytest.fixture
def overlaps(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(RECORDS)
    import overlaps

    return overlaps


def check(layer: dict[str, list[list[Any]]], ranks: list[int] | None, epsilon: float) -> None:
    """Of one layer: bases lie within M, and those are trusted that hold most."""
    sizes = [row[-1] for row in layer["common"]]
    for task, row in enumerate(layer["common"]):
        assert all(0 <= both <= min(sizes[old], sizes[task]) for old, both in enumerate(row))
        assert ranks is None or max(row) <= ranks[task]
    for shares, trusted in zip(layer["shares"], layer["trusted"], strict=True):
        assert all(0 <= share <= 1 + 1e-5 for share in shares)
        held = [shares[old] for old in trusted]
        assert held == sorted(held, reverse=True)
        assert all(share >= epsilon**2 for share in held)
        others = [share for old, share in enumerate(shares) if old not in trusted]
        assert not held or not others or held[-1] >= max(others)


def test_it_is_trgp_and_tells_what_it_chooses_from(overlaps: Any, tmp_path: Path) -> None:
    asked = {"tasks": 4, "epochs": 2, "epsilon": 0.4, "top_k": 2, "lr": 0.4}
    asked |= {"scale_rate": 0.01, "samples": 100, "selection_samples": 100}
    (plain,) = trgp.run("split-digits", "trgp", out=tmp_path, device="cpu", **asked)
    (own,) = trgp.run("split-digits", "watched:Watched", out=tmp_path, device="cpu", **asked)
    assert (own.curves, own.accuracy_matrix) == (plain.curves, plain.accuracy_matrix)
    assert (own.selected, own.ranks) == (plain.selected, plain.ranks)
    network = benchmarks.load("split-digits", seed=0, tasks=4).make_network()
    layers = overlaps.told(own, network, {})["layers"]
    assert [*layers] == [*(plain.ranks or {})]
    for name, layer in layers.items():
        check(layer, (plain.ranks or {})[name], 0.4)
        assert len(list(overlaps.choices(layer, 2))) == 1
    assert any(len(set(row)) > 1 for layer in layers.values() for row in layer["common"])


def test_every_record_is_of_its_run(overlaps: Any) -> None:
    runs = json.loads(overlaps.RECORD.read_text())["runs"]
    told = ("versions", "device", "layers")
    asked = [{key: value for key, value in run.items() if key not in told} for run in runs]
    assert asked == [{"benchmark": name, **changes} for name, changes in overlaps.RUNS]
    for run in runs:
        for layer in run["layers"].values():
            check(layer, None, 0.5)


def test_settings_are_those_of_the_preset(overlaps: Any) -> None:
    """Presets do not know a method that is made of TRGP."""
    for benchmark, changes in overlaps.RUNS:
        paper = trgp.engine.config.configure(benchmark, "trgp").settings
        watched = overlaps.cell(benchmark, changes).config.settings
        wanted = {**paper, **changes, "score_on": "validation"}
        assert {key: watched[key] for key in paper} == wanted


@pytest.mark.parametrize(
    ("trusted", "latest", "largest", "densest"),
    [([2, 1], True, False, True), ([0, 2], False, True, False), ([1, 2], True, False, True)],
)
def test_choices_are_told_by_what_they_are_of(
    overlaps: Any, trusted: list[int], latest: bool, largest: bool, densest: bool
) -> None:
    choice = overlaps.Choice(trusted, [0.9, 0.3, 0.5], [0.5, 0.4, 0.6])
    assert choice.is_of_latest() == latest
    assert choice.is_of_largest() == largest
    assert choice.is_of_densest() == densest
    assert choice.times_chance() == pytest.approx([5 / 9, 4 / 3, 1.2])


def test_the_table_counts_choices_layer_by_layer(
    overlaps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks with two old ones had no choice, nor had a layer that trusts one alone."""
    layer = {
        "width": 10,
        "common": [[4], [4, 5], [2, 5, 6], [3, 5, 6, 7], [3, 5, 6, 7, 8]],
        "shares": [[0.5], [0.5, 0.6], [0.4, 0.7, 0.9], [0.8, 0.9, 0.6, 0.3]],
        "trusted": [[0], [1, 0], [2, 1], [1, 0]],
    }
    lone = {**layer, "trusted": [[0], [1], [2], [1]]}
    runs = [{"benchmark": "pmnist", "threshold_growth": 0.0, "layers": {"a": layer, "b": lone}}]
    monkeypatch.setattr(overlaps, "RECORD", tmp_path / "some.json")
    overlaps.RECORD.write_text(json.dumps({"runs": runs}))
    # Nested by 4 of 4, 5 of 5, 6 of 6 and 7 of 7; held are 0.9/0.6, 0.7/0.5, 0.9/0.5 and 0.8/0.4.
    assert overlaps.overlaps().splitlines()[2:] == [
        "| pmnist | 0 | a | 4 to 8 of 10 | 100 % | 2 | 1 | 1 | 2 | 1.68 |",
        "| pmnist | 0 | b | 4 to 8 of 10 | 100 % | 0 | 0 | 0 | 0 | – |",
    ]
