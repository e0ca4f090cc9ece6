"""What trust regions are chosen from: what the watched method tells, and what is recorded."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import trgp
from trgp import benchmarks
from trgp.benchmarks.models import MLP
from trgp.engine.config import configure
from trgp.engine.network import Network
from trgp.methods.protected import Directions
from trgp.tree import put
from trgp.types import State

RECORDS = Path(__file__).parents[2] / "records"


@pytest.fixture
def overlaps(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(RECORDS)
    import overlaps

    return overlaps


def check(layer: dict[str, Any], epsilon: float) -> None:
    """Of one layer: bases lie within M, and those are trusted that hold most."""
    sizes = [row[-1] for row in layer["common"]]
    for task, row in enumerate(layer["common"]):
        assert all(0 <= both <= min(sizes[old], sizes[task]) for old, both in enumerate(row))
        assert max(row) <= layer["memory"][task] <= layer["width"]
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
        assert layer["memory"] == (plain.ranks or {})[name]
        check(layer, 0.4)
        assert len(list(overlaps.choices(layer, 2))) == 1


def test_every_record_is_of_its_run(overlaps: Any) -> None:
    record = json.loads(overlaps.RECORD.read_text())
    assert record["seed"] == overlaps.SEED
    runs = record["runs"]
    told = ("versions", "device", "layers")
    asked = [{key: value for key, value in run.items() if key not in told} for run in runs]
    assert asked == [{"benchmark": name, **changes} for name, changes in overlaps.RUNS]
    for run in runs:
        for layer in run["layers"].values():
            check(layer, 0.5)


def test_settings_are_those_of_the_preset(overlaps: Any) -> None:
    """Presets do not know a method that is made of TRGP."""
    for benchmark, changes in overlaps.RUNS:
        paper = configure(benchmark, "trgp").settings
        watched = overlaps.cell(benchmark, changes).config.settings
        wanted = {**paper, **changes, "score_on": "validation"}
        assert {key: watched[key] for key in paper} == wanted


def test_what_bases_have_in_common_is_what_their_products_say(overlaps: Any) -> None:
    """Of orthonormal columns of one memory, B_i' B_j has a 1 for each that both have."""
    from watched import Watched

    network = Network(lambda: MLP(12, (8, 6), 2, heads=4), True, torch.device("cpu"), 0)
    method = Watched().bind(network)
    state: State = {}
    kept: dict[str, Directions] = {}
    for name, each in method.layers.items():
        M = torch.linalg.qr(torch.randn(1, each.layer.shape[2], 5))[0]
        masks = {task: torch.rand(1, 3 + task) < 0.6 for task in range(3)}
        kept[name] = Directions(M, torch.tensor([5]), masks)
        state = put(state, kept[name].state(), "memory", name)
    figures = method.report(state).figures or {}
    pairs = list(itertools.combinations_with_replacement(range(3), 2))
    assert len(figures) == len(kept) * len(pairs)
    for (name, old), (j, i) in itertools.product(kept.items(), pairs):
        common = (old.basis(i).mT @ old.basis(j)).square().sum()
        assert figures[f"{name}: {j} in {i}"] == pytest.approx(float(common), abs=1e-4)


def test_a_choice_leads_where_nobody_else_has_as_much(overlaps: Any) -> None:
    choice = overlaps.Choice([2, 1], [0.9, 0.3, 0.5], [0.8, 0.4, 0.6])
    assert choice.lead(range(3)) > 0
    assert choice.lead(choice.sizes) < 0
    assert choice.lead([0.3, 0.3, 0.5]) == 0
    assert choice.above_chance(trusted=True) == pytest.approx([1 / 7, 1 / 5])
    assert choice.above_chance(trusted=False) == pytest.approx([-1])
    whole = overlaps.Choice([0, 1], [1.0, 0.5, 0.5], [1.0, 0.5, 0.5])
    assert whole.above_chance(trusted=True) == [0]


def test_the_table_counts_choices_layer_by_layer(
    overlaps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks with two old ones had no choice, nor had a layer that trusts one alone."""
    layer = {
        "width": 10,
        "memory": [4, 5, 6, 7, 9],
        "common": [[4], [4, 5], [2, 4, 5], [3, 5, 5, 5], [3, 5, 4, 4, 8]],
        "shares": [[0.5], [0.5, 0.6], [0.4, 0.75, 0.9], [0.8, 0.9, 0.6, 0.3]],
        "trusted": [[0], [1, 0], [2, 1], [1, 0]],
    }
    lone = {**layer, "trusted": [[0], [1], [2], [1]]}
    runs = [{"benchmark": "pmnist", "threshold_growth": 0.0, "layers": {"a": layer, "b": lone}}]
    monkeypatch.setattr(overlaps, "RECORD", tmp_path / "some.json")
    overlaps.RECORD.write_text(json.dumps({"runs": runs}))
    # Nested by 4 of 4, 4 of 5, 5 of 5 and 4 of 5; of those in memory before, the next basis has 4
    # of 4, 4 of 5, 4 of 6 and 6 of 7. Above chance are 4 and 2.5 of 5 tenths, 4 of 5 and 4 of 6,
    # of those left out 0 of 6, 1 of 5 and -2 of 5.
    shown = "| 4 to 8 of 10 | 90 % (80 %) | 83 %"
    assert overlaps.overlaps().splitlines()[2:] == [
        f"| pmnist | 0 | a {shown} | 2 | 1 | 1 | 0 | 69 % | -7 % |",
        f"| pmnist | 0 | b {shown} | 0 | 0 | 0 | 0 | – | – |",
    ]
