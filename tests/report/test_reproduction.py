"""The page of the paper's results: verdicts follow from what is stored, and the rest is not run."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from some_results import a_result, with_all_phases

from trgp.benchmarks.five_datasets import SETS
from trgp.engine.config import defaults
from trgp.results.store import find, run_folder, write_result

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "reproduction.md"


@pytest.fixture(autouse=True)
def records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "records")


def store(
    out: Path,
    accs: Sequence[float],
    method: str = "trgp",
    benchmark: str = "split-cifar100",
    preset: str = "paper",
    bwt: float | Sequence[float] = 0.0,
    first_seed: int = 0,
    tasks: int = 2,
    **fields: Any,
) -> None:
    """Runs, a seed for each ACC in per cent, in which every old task changes by BWT points."""
    changed = fields.pop("changed", {})
    bwts = [bwt] * len(accs) if isinstance(bwt, float) else bwt
    for seed, (acc, change) in enumerate(zip(accs, bwts, strict=True), first_seed):
        last = acc / 100
        matrix = [
            [None if j > i else last - (change / 100 if i < tasks - 1 else 0) for j in range(tasks)]
            for i in range(tasks)
        ]
        matrix[-1] = [last] * tasks
        command = f"trgp run {benchmark} --method {method} --preset {preset} --seed {seed}"
        given: dict[str, Any] = {
            **{"benchmark": benchmark, "method": method, "preset": preset, "command": command},
            **{"accuracy_matrix": matrix, "config": {**changed}, "changed": changed},
        }
        folder = run_folder(out, benchmark, method, preset, changed, seed)
        folder.mkdir(parents=True)
        write_result(folder, a_result(seed, **given | fields))


def made(out: Path, name: str) -> str:
    import reproduction

    found = find(out, defaults)
    assert found.problems == []
    return reproduction.TABLES[name](found.results)


def rows(out: Path, name: str, **wanted: str) -> list[dict[str, str]]:
    """The rows of the only table, by column, that have the wanted texts."""
    lines = [
        [cell.strip().replace("\\", "") for cell in line.strip("|").split(" | ")]
        for line in made(out, name).splitlines()
        if line.startswith("|")
    ]
    every = [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]
    return [row for row in every if wanted.items() <= row.items()]


def evidence(out: Path, claim: str, **wanted: str) -> dict[str, str]:
    (row,) = [row for row in rows(out, "evidence", **wanted) if row["claim"].startswith(claim)]
    return row


# ---- nothing, and what is no cell of the paper's --------------------------------------------


def test_without_records_everything_is_not_run(tmp_path: Path) -> None:
    assert {row["ACC %"] for row in rows(tmp_path, "reproduced")} == {"not run"}
    assert len(rows(tmp_path, "reproduced")) == 8
    assert {row["ACC %"] for row in rows(tmp_path, "others")} == {"not run"}
    assert {row["verdict"] for row in rows(tmp_path, "claims")} == {"not run"}
    assert {row["verdict"] for row in rows(tmp_path, "evidence")} == {"not run"}
    assert {row["training"] for row in rows(tmp_path, "time")} == {"not run"}
    assert {row["ACC %"] for row in rows(tmp_path, "five_datasets")} == {"not run"}
    assert {row["ACC %"] for row in rows(tmp_path, "ablation")} == {"not run"}
    assert {row["within one published std"] for row in rows(tmp_path, "variants")} == {"not run"}
    assert made(tmp_path, "trusted") == "Not run."
    assert made(tmp_path, "overhead") == "Not measured yet."
    assert made(tmp_path, "memory") == made(tmp_path, "index") == "Nothing of it is run."
    assert [row["runs"].split()[0] for row in rows(tmp_path, "coverage")] == ["0", "0", "0"]
    assert made(tmp_path, "transfer").startswith("Not run: pmnist, split-cifar100,")


def test_the_best_is_beside_the_best_that_is_published(tmp_path: Path) -> None:
    """And beside the paper's figures nowhere: it is not to repeat them."""
    store(tmp_path, [97.4, 97.6], benchmark="pmnist", preset="best")
    store(tmp_path, [96.3, 96.4], benchmark="pmnist")
    best, paper, single = rows(tmp_path, "beyond", benchmark="pmnist")
    assert (best["preset"], best["ACC %"], best["ACC - published"]) == (
        *("best", "97.50 ± 0.14", "+0.25"),
    )
    assert (paper["preset"], paper["ACC - published"]) == ("paper", "-0.90")
    assert (single["method"], single["ACC %"]) == ("single", "not run")
    assert {row["ACC %"] for row in rows(tmp_path, "beyond", benchmark="five-datasets")} == {
        "not run"
    }
    (row,) = rows(tmp_path, "variants", benchmark="pmnist", method="trgp")
    assert (row["variants recorded"], row["nearest"]) == ("1", "paper")


def test_the_best_is_against_the_better_of_others_presets(tmp_path: Path) -> None:
    """Over the seeds that both have, where others were searched too."""
    store(tmp_path, [97.4, 97.7, 97.6], benchmark="pmnist", preset="best")
    store(tmp_path, [93.2], benchmark="split-cifar100", preset="best")
    store(tmp_path, [93.2], benchmark="split-cifar100", method="gpm", preset="best")
    store(tmp_path, [93.2, 93.5], benchmark="pmnist", method="gpm")
    store(tmp_path, [94.2, 94.4], benchmark="pmnist", method="gpm", preset="best")
    store(tmp_path, [95.3], benchmark="pmnist", method="owm")
    assert {row["benchmark"] for row in rows(tmp_path, "tuned")} == {"pmnist"}
    gpm, owm = rows(tmp_path, "tuned")[::-1]
    assert (gpm["method"], gpm["ACC %, paper"], gpm["ACC %, best"]) == (
        *("gpm", "93.35 ± 0.21", "94.30 ± 0.14"),
    )
    assert (gpm["common seeds"], gpm["TRGP's best - the better"]) == ("2", "+3.25")
    assert float(gpm["p"]) < 0.05
    assert (owm["method"], owm["ACC %, best"], owm["common seeds"]) == ("owm", "not run", "1")
    assert (owm["TRGP's best - the better"], owm["p"]) == ("+2.10", "–")


def test_every_cell_of_a_superclass_table_is_there_once(tmp_path: Path) -> None:
    store(tmp_path, [58.0, 58.2], benchmark="cifar100-superclass", preset="official")
    here = [(row["method"], row["preset"]) for row in rows(tmp_path, "superclass")]
    methods = ("gpm", "trgp", "single", "multitask", "finetune")
    assert {(method, preset) for method in methods for preset in ("paper", "official")} <= {*here}
    assert len(here) == len({*here})
    (official,) = rows(tmp_path, "superclass", method="trgp", preset="official")
    (paper,) = rows(tmp_path, "superclass", method="trgp", preset="paper")
    assert official["ACC - paper"] == "-0.15"
    assert (paper["ACC %"], paper["paper's ACC"]) == ("not run", "58.25")


def test_other_settings_are_not_the_presets(tmp_path: Path) -> None:
    store(tmp_path, [74.4, 74.5], changed={"lr": 0.1})
    assert {row["ACC %"] for row in rows(tmp_path, "reproduced")} == {"not run"}
    assert {row["variants recorded"] for row in rows(tmp_path, "variants")} == {"0"}
    assert len(rows(tmp_path, "index")) == 1


def test_what_changes_no_figure_is_the_presets(tmp_path: Path) -> None:
    store(tmp_path, [74.4, 74.5], changed={"form": "literal"})
    (row,) = rows(tmp_path, "reproduced", benchmark="split-cifar100", method="trgp", preset="paper")
    assert row["ACC %"].startswith("74.45")


# ---- beside the published figures -----------------------------------------------------------


@pytest.mark.parametrize(
    ("accs", "within", "gap"),
    [
        ([74.30, 74.60], "yes", "-0.01"),
        ([74.77, 74.79], "yes", "+0.32"),  # on the edge
        ([74.78, 74.80], "no", "+0.33"),
        ([70.00], "no", "-4.46"),
    ],
)
def test_within_one_published_deviation(
    tmp_path: Path, accs: list[float], within: str, gap: str
) -> None:
    store(tmp_path, accs, preset="official", bwt=-0.5)
    (row,) = rows(
        tmp_path, "reproduced", benchmark="split-cifar100", method="trgp", preset="official"
    )
    assert (row["within one published std"], row["ACC - paper"]) == (within, gap)
    assert (row["paper's ACC"], row["seeds"]) == ("74.46 ± 0.32", str(len(accs)))
    assert (row["p"] == "–") == (len(accs) == 1)
    assert (row["BWT %"].split()[0], row["BWT - paper"]) == ("-0.50", "+0.40")


def test_samples_of_bases_are_told_by_their_number(tmp_path: Path) -> None:
    official: dict[str, Any] = {"method": "gpm", "benchmark": "pmnist", "preset": "official"}
    store(tmp_path, [93.8, 94.0], **official, changed={"samples": 1000}, bwt=-3.0)
    store(tmp_path, [93.0, 93.4], **official, config={"samples": 300}, first_seed=3)
    store(tmp_path, [80.0], **official, changed={"threshold": 0.5})
    store(tmp_path, [80.0], **official | {"preset": "paper"})
    few, many = rows(tmp_path, "samples")
    assert (few["samples"], few["seeds"], few["ACC - paper"]) == ("300", "3 to 4", "-0.71")
    assert (many["samples"], many["seeds"], many["ACC - paper"]) == ("1000", "0 to 1", "-0.01")
    assert [row["within one published std"] for row in (few, many)] == ["no", "yes"]
    assert (many["BWT %"].split()[0], many["paper's BWT"]) == ("-3.00", "-3")


def test_thresholds_are_told_by_their_value(tmp_path: Path) -> None:
    official: dict[str, Any] = {"method": "gpm", "benchmark": "split-cifar100"}
    official |= {"preset": "official"}
    store(tmp_path, [71.8, 72.0], **official, config={"threshold": [0.97]})
    store(tmp_path, [72.4, 72.6], **official, changed={"threshold": [0.95]})
    store(tmp_path, [80.0], **official, changed={"norm": "shared"})
    low, high = rows(tmp_path, "thresholds")
    assert [row["threshold"] for row in (low, high)] == ["0.95", "0.97"]
    assert [row["within one published std"] for row in (low, high)] == ["yes", "no"]


def test_passes_are_compared_where_the_weights_are_the_same(tmp_path: Path) -> None:
    """And what else came to them is what the preset's steps come to now."""
    store(tmp_path, [74.0, 74.4], digest="a")
    often = {"test_passes": 10}
    store(tmp_path, [74.5, 74.5], changed=often, config=often, digest="b")
    assert "|" not in made(tmp_path, "passes")
    assert "|" not in made(tmp_path, "another_engine")
    store(tmp_path, [60.0, 60.0], changed={"epsilon": 0.7}, digest="c")
    store(tmp_path, [74.1], changed={"epsilon": 0.2}, digest="b", first_seed=1)
    (row,) = rows(tmp_path, "passes")
    assert list(row.values()) == ["paper", "74.10", "74.50", "+0.40"]
    store(tmp_path, [74.9], changed={"epsilon": 0.2}, digest="b", first_seed=2)  # none shows it
    (row,) = rows(tmp_path, "another_engine")
    assert list(row.values()) == ["paper", "1", "74.40", "74.10", "-0.30", "-0.30", "–"]
    store(tmp_path, [74.4], changed={"epsilon": 0.7, "top_k": 3}, digest="d", first_seed=1)
    (row,) = rows(tmp_path, "against_later")
    assert list(row.values()) == ["paper with epsilon=0.7", "1", "-14.10", "–", "-0.16", "–"]


def test_settings_that_end_with_the_same_weights_are_named(tmp_path: Path) -> None:
    assert "|" not in made(tmp_path, "same_ends")
    store(tmp_path, [74.0, 74.4], digest="a")
    store(tmp_path, [74.0, 74.4], changed={"epsilon": 0.2}, digest="b")
    store(tmp_path, [74.0, 74.4], preset="official", digest="b")
    store(tmp_path, [74.0, 74.4], changed={"top_k": 3}, digest="")  # of a version without it
    store(tmp_path, [74.0, 74.4], changed={"top_k": 4}, digest="")
    assert "|" not in made(tmp_path, "same_ends")
    store(tmp_path, [74.4], changed={"scope": "task"}, digest="a", first_seed=1)
    (row,) = rows(tmp_path, "same_ends")
    assert list(row.values()) == ["split-cifar100", "trgp", "paper", "as it is; scope=task", "1"]


def test_the_variant_that_reproduces_is_named(tmp_path: Path) -> None:
    store(tmp_path, [76.0, 76.2])
    store(tmp_path, [73.0, 73.2], preset="official")
    store(tmp_path, [74.4, 74.5], changed={"strongest_unprotected": True})
    (row,) = rows(tmp_path, "variants", benchmark="split-cifar100", method="trgp")
    assert row["variants recorded"] == "3"
    assert row["within one published std"] == "paper with strongest_unprotected=True"
    assert (row["nearest"], row["ACC - paper"]) == (
        "paper with strongest_unprotected=True",
        "-0.01",
    )


@pytest.mark.parametrize(("acc", "far"), [(74.1, "yes"), (70.2, "no"), (50.0, "yes")])
def test_differences_of_more_than_two_points_are_marked(
    tmp_path: Path, acc: float, far: str
) -> None:
    store(tmp_path, [acc, acc], method="hat")
    store(tmp_path, [acc, acc], method="lwf")
    (hat,) = rows(tmp_path, "others", method="hat", benchmark="split-cifar100")
    (lwf,) = rows(tmp_path, "others", method="lwf", benchmark="split-cifar100")
    assert hat["more than 2 points off"] == far
    assert lwf["more than 2 points off"] == lwf["paper's ACC"] == "–"


# ---- claims ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpm", "trgp", "verdict"),
    [
        ([72.0, 72.5, 73.0], [74.1, 74.5, 75.2], "holds"),
        ([74.1, 74.5, 75.2], [72.0, 72.5, 73.0], "does not hold"),
        ([72.0, 75.0, 73.0], [74.0, 73.5, 74.0], "undecided"),
        ([72.0], [75.0], "undecided"),
        ([72.0, 72.5], [72.0, 72.5], "undecided"),
    ],
)
def test_trgp_above_gpm(tmp_path: Path, gpm: list[float], trgp: list[float], verdict: str) -> None:
    store(tmp_path, gpm, method="gpm")
    store(tmp_path, trgp)
    row = evidence(tmp_path, "TRGP is above", benchmark="split-cifar100", preset="paper")
    assert row["verdict"] == verdict
    assert row["paper's"] == "+1.98"
    assert row["means %"] == f"{sum(trgp) / len(trgp):.2f} and {sum(gpm) / len(gpm):.2f}"
    together = rows(tmp_path, "claims", claim=row["claim"], preset="paper")[0]
    assert together["verdict"] == ("holds where run" if verdict == "holds" else verdict)
    assert together["tests: not run"] == "4"


def test_a_claim_is_tested_over_common_seeds(tmp_path: Path) -> None:
    store(tmp_path, [72.0, 72.5], method="gpm")
    store(tmp_path, [75.0, 75.5], first_seed=1)
    row = evidence(tmp_path, "TRGP is above", benchmark="split-cifar100", preset="paper")
    assert (row["seeds"], row["difference"], row["verdict"]) == ("1", "+2.50", "undecided")


def test_seeds_apart_tell_nothing(tmp_path: Path) -> None:
    store(tmp_path, [72.0, 72.5], method="gpm")
    store(tmp_path, [75.0, 75.5], first_seed=2)
    row = evidence(tmp_path, "TRGP is above", benchmark="split-cifar100", preset="paper")
    assert (row["seeds"], row["difference"], row["verdict"]) == ("0", "–", "undecided")


@pytest.mark.parametrize(
    ("change", "claim"), [({"scope": "task"}, "layer-wise"), ({"top_k": 1}, "K = 2")]
)
def test_ablated_claims(tmp_path: Path, change: dict[str, Any], claim: str) -> None:
    store(tmp_path, [74.1, 74.5, 75.2])
    store(tmp_path, [73.0, 73.6, 74.1], changed=change)
    row = evidence(tmp_path, claim, benchmark="split-cifar100")
    assert (row["verdict"], row["difference"]) == ("holds", "+1.03")
    assert evidence(tmp_path, claim, benchmark="five-datasets")["verdict"] == "not run"


@pytest.mark.parametrize(
    ("accs", "verdict", "against"),
    [
        ([74.2, 74.5, 75.0], "holds", "1"),
        ([71.0, 71.4, 72.2], "does not hold", "-1"),
        ([73.0, 75.9, 74.5], "undecided", "-1"),  # no change, but it could be one of points
    ],
)
def test_insensitive_has_to_be_shown(
    tmp_path: Path, accs: list[float], verdict: str, against: str
) -> None:
    """That a test against no change says nothing is not enough."""
    store(tmp_path, [74.1, 74.5, 75.0])
    store(tmp_path, accs, changed={"epsilon": 0.2})
    claim = "ACC hardly"
    row = evidence(tmp_path, claim, benchmark="split-cifar100", compared="epsilon 0.2 - 0.5")
    assert (row["verdict"], row["tested against"]) == (verdict, against)
    other = evidence(tmp_path, claim, benchmark="split-cifar100", compared="epsilon 0.7 - 0.5")
    assert other["verdict"] == "not run"


@pytest.mark.parametrize(
    ("bwts", "verdict"),
    [
        ([-0.2, -0.3, 0.1], "holds"),
        ([-3.0, -3.3, -2.8], "does not hold"),
        ([-0.9, -1.2, -0.7], "undecided"),
        ([-0.2], "undecided"),
    ],
)
def test_bwt_near_zero(tmp_path: Path, bwts: list[float], verdict: str) -> None:
    store(tmp_path, [90.0] * len(bwts), benchmark="pmnist", bwt=bwts)
    row = evidence(tmp_path, "TRGP's BWT", benchmark="pmnist", preset="paper")
    assert (row["verdict"], row["tested against"]) == (verdict, "-1")
    assert row["difference"] == f"{sum(bwts) / len(bwts):+.2f}"


def test_one_failure_is_enough_against_a_claim() -> None:
    import claims

    assert claims.together(["holds", "holds"]) == "holds"
    assert claims.together(["holds", "not run"]) == "holds where run"
    assert claims.together(["holds", "undecided", "not run"]) == "undecided"
    assert claims.together(["undecided", "does not hold", "holds"]) == "does not hold"


# ---- quirks, 5-Datasets and the rest --------------------------------------------------------


def test_quirks_that_are_told_from_no_change(tmp_path: Path) -> None:
    store(tmp_path, [74.1, 74.5, 75.2])
    store(tmp_path, [73.0, 73.6, 74.1], changed={"first_layer_gate": True})
    store(tmp_path, [74.2, 74.3, 75.4], changed={"unscaled_inputs": True})
    text = made(tmp_path, "quirks").replace("\\", "")
    assert (
        "Paper with it alone, told from no change at 5 %: trgp's first_layer_gate True (-1.03). "
        "Not told: trgp's unscaled_inputs True (+0.03)."
    ) in text
    assert "Official without it: no quirk can be judged yet." in text
    assert "### pmnist" in text
    assert "### five-datasets" not in text


def test_only_methods_with_a_quirk_changed_have_a_table(tmp_path: Path) -> None:
    """Both presets alone are no reason, nor is other data."""
    name = "five-datasets"
    for preset in ("paper", "official"):
        store(tmp_path, [90.0, 91.0], benchmark=name, preset=preset)
        store(tmp_path, [90.0, 91.0], method="gpm", preset=preset)
    store(tmp_path, [90.0, 91.0], benchmark=name, changed={"mnist_for_fashion": True})
    assert f"### {name}" not in made(tmp_path, "quirks")
    assert "| gpm |" not in made(tmp_path, "quirks")
    store(tmp_path, [90.0, 91.5], benchmark=name, changed={"first_layer_gate": True})
    assert f"### {name}" in made(tmp_path, "quirks")


def five(tmp_path: Path, accs: list[float], **fields: Any) -> None:
    store(tmp_path, accs, benchmark="five-datasets", tasks=5, **fields)


def test_what_the_right_data_costs(tmp_path: Path) -> None:
    five(tmp_path, [91.0, 91.2, 91.1])
    five(tmp_path, [93.4, 94.2, 93.4], changed={"mnist_for_fashion": True})
    five(tmp_path, [93.6], preset="official")
    right, twice, right_official, official = rows(tmp_path, "five_datasets", method="trgp")
    assert [row["fourth task"] for row in (right, twice)] == ["Fashion-MNIST", "MNIST again"]
    assert (right["ACC - paper"], twice["ACC - paper"]) == ("-2.46", "+0.11")
    assert (right["Fashion-MNIST - MNIST"], right["p"]) == ("-2.57", "0.007")
    assert twice["Fashion-MNIST - MNIST"] == "–"
    assert right["A_44 %"] == "91.10"
    assert right_official["ACC %"] == "not run"
    assert (official["fourth task"], official["seeds"]) == ("MNIST again", "1")


def test_what_fashion_mnist_trusts(tmp_path: Path) -> None:
    assert [*SETS][:4] == ["cifar10", "mnist", "svhn", "fashion_mnist"]
    none: list[dict[str, list[int]]] = [{"conv2": [], "conv10": []}] * 3
    for seed, fourth in enumerate(({"conv2": [1, 2]}, {"conv2": [1], "conv10": [0]})):
        whole = {"conv2": [], "conv10": [], **fourth}
        last: dict[str, list[int]] = {"conv2": [3], "conv10": [3]}
        five(tmp_path, [91.0], first_seed=seed, selected=[*none, whole, last])
    title = "paper, Fashion-MNIST, seeds: 2"
    assert rows(tmp_path, "trusted") == [
        {"layer": "conv2", title: "mnist 2, svhn 1"},
        {"layer": "conv10", title: "cifar10 1"},
        {"layer": "all layers", title: "mnist 2, cifar10 1, svhn 1"},
    ]


def test_how_often_the_latest_tasks_are_trusted(tmp_path: Path) -> None:
    """Tasks with no more old ones than may be trusted had no choice."""
    chosen = [{}, {"a": [0]}, {"a": [1, 0]}, {"a": [1, 2], "b": [0, 2]}, {"a": [3, 2], "b": [3]}]
    store(tmp_path, [70.0], tasks=5, selected=chosen, config={"top_k": 2})
    whole: dict[str, Any] = {"config": {"top_k": 2}, "changed": {"scope": "task"}}
    store(tmp_path, [70.0], tasks=4, selected=[*chosen[:3], {"a": [1, 2]}], **whole)
    assert made(tmp_path, "latest").splitlines()[2:] == [
        "| split-cifar100 | paper | layer-wise | 1 | 2 | 4 | 50 % | 25 % | 25 % |",
        "| split-cifar100 | paper | task-wise | 1 | 2 | 1 | 100 % | 0 % | 0 % |",
    ]


def test_how_often_the_first_layer_trusts_somebody(tmp_path: Path) -> None:
    """By the network's order, whatever that of the result is; a first task has nobody to trust."""
    chosen = [{}, {"bn": [], "conv1": [0], "fc1": []}, {"conv1": [], "fc1": [1]}, {"fc1": [2]}]
    store(tmp_path, [70.0], tasks=4, selected=chosen)
    store(tmp_path, [70.0], tasks=4, selected=chosen[:2] * 2, preset="official")
    without, with_gate = made(tmp_path, "gate").splitlines()[2:]
    assert without == "| split-cifar100 | paper (without the gate) | 1 | 3 | 1 |"
    assert with_gate == "| split-cifar100 | official (with the gate) | 1 | 3 | 2 |"


def test_ablations_that_the_paper_does_not_print_are_not_run(tmp_path: Path) -> None:
    store(tmp_path, [74.1, 74.5], config={"epsilon": 0.5, "top_k": 2, "scope": "layer"})
    store(tmp_path, [74.0, 74.2], changed={"top_k": 3})
    store(tmp_path, [74.0, 74.2], preset="official")
    here = rows(tmp_path, "ablation", benchmark="split-cifar100")
    shown = {row["trust region"]: row["ACC %"].split(" ±")[0] for row in here}
    assert shown["top 3"] == "74.10"
    assert shown["top 4"] == shown["task-wise"] == "not run"
    assert not any(row["preset"].startswith("official") for row in here)


def test_what_a_job_takes_beside_its_steps_is_told_where_it_is_known(tmp_path: Path) -> None:
    old = [{"training": 90.0, "selection": 1.0, "bases": 2.0, "evaluation": 1.75}] * 2
    store(tmp_path, [74.1, 74.5], seconds=old)
    store(tmp_path, [72.1], method="gpm", seconds=with_all_phases(old))
    store(tmp_path, [72.2], method="gpm", seconds=old, first_seed=1)
    assert made(tmp_path, "overhead") == "Not measured yet."
    store(tmp_path, [70.1, 70.5], method="er", seconds=with_all_phases(old))
    much = [{**task, "checkpoints": 20.0} for task in with_all_phases(old)]
    store(tmp_path, [70.1, 70.5], method="hat", seconds=much, device="cuda (NVIDIA H200)")
    hat, er = rows(tmp_path, "overhead")
    assert (er["method"], er["seeds"], er["a run's time"]) == ("er", "2", "3 min 10 s")
    shares = [er[f"{part} %"] for part in ("validation", "evaluation", "selection", "bases")]
    assert shares == ["5.3", "1.8", "1.1", "2.1"]
    assert (er["checkpoints %"], er["together %"], er["at most 15 %"]) == ("0.3", "10.5", "yes")
    assert (hat["together %"], hat["at most 15 %"]) == ("25.9", "no")
    assert hat["device"] == "cuda (NVIDIA H200)"


def test_the_index_says_what_repeats_every_cell(tmp_path: Path) -> None:
    store(tmp_path, [74.1, 74.5], device="cuda (NVIDIA H200)", changed={"epsilon": 0.2})
    (row,) = rows(tmp_path, "index")
    assert row["repeated by"] == (
        "`trgp run split-cifar100 --method trgp --preset paper --seeds 2`"
    )
    assert (row["seeds"], row["device"]) == ("2", "cuda (NVIDIA H200)")
    assert row["time"] == "2 min 16 s"  # two tasks of 33.5 s and of 34.5 s
    (link,) = re.findall(r"\((\.\./records/runs/.*)\)$", row["preset"])
    folder = tmp_path / Path(link).relative_to("../records/runs")
    assert sorted(path.name for path in folder.iterdir()) == ["seed-0", "seed-1"]


def test_how_much_of_a_sweep_is_recorded(tmp_path: Path) -> None:
    store(tmp_path, [74.1, 74.5])
    store(tmp_path, [70.0] * 4, method="hat")  # one more than the sweep asks for
    paper, quirks, ablation = rows(tmp_path, "coverage")
    assert paper["configurations with all seeds"].startswith("1 of ")
    assert paper["runs"].startswith("5 of ")
    assert quirks["runs"].startswith("0 of ")
    assert ablation["runs"].startswith("2 of ")  # its epsilon 0.5 and top 2 are the preset itself


# ---- the page -------------------------------------------------------------------------------


def test_the_page_has_every_table_once() -> None:
    import reproduction

    explained = ("explained_pmnist", "explained_cifar", "explained_short")
    tables = [*reproduction.TABLES, *explained, "overlaps"]
    assert sorted(re.findall(r"<!-- table (\w+) -->", PAGE.read_text())) == sorted(tables)


def test_links_of_the_page_lead_to_results() -> None:
    links = re.findall(r"\]\((\.\./records/runs/[^)]+)\)", PAGE.read_text())
    assert links
    for link in links:
        results = list((PAGE.parent / link).glob("seed-*/result.json"))
        assert results
        assert all(json.loads(path.read_text())["acc"] > 0 for path in results)
