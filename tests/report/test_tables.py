"""The tables of a report: the right numbers in the right cells, and nothing claimed untested."""

import shlex
import statistics
from pathlib import Path
from typing import Any

import pytest
from some_found import a_configuration, matrix, some_found
from some_results import a_result, some_results, with_all_phases

from trgp.benchmarks import PAPER
from trgp.cli import run as command_line
from trgp.methods import METHODS, capacity
from trgp.report.build import build
from trgp.report.model import Cell, Row, Table
from trgp.report.paired_marks import difference, verdicts
from trgp.results.paired import p_value
from trgp.results.result import Results
from trgp.results.store import Found, write_result


def tables(found: Found) -> dict[str, Table]:
    made = build(found).tables
    assert len({table.name for table in made}) == len(made)
    for table in made:
        assert all(len(row.cells) == len(table.columns) for row in table.rows)
    return {table.name: table for table in made}


def cells(table: Table, row: Row) -> dict[str, Cell]:
    return dict(zip(table.columns, row.cells, strict=True))


def rows(table: Table, **names: str) -> list[dict[str, Cell]]:
    """The rows of a benchmark, method or preset, their cells by column."""
    return [
        cells(table, row)
        for row in table.rows
        if all(getattr(row, key) == name for key, name in names.items())
    ]


# ---- the main table -------------------------------------------------------------------------


def test_the_main_table_stands_beside_the_papers() -> None:
    found = some_found()
    main = tables(found)["main"]
    (gpm,) = rows(main, benchmark="split-cifar100", method="gpm")
    accs = [100 * run.acc for run in found.results[0]]
    mean = statistics.mean(accs)
    paper = PAPER["split-cifar100"]["gpm"]
    assert gpm["seeds"].text == "3"
    assert gpm["ACC %"].text == f"{mean:.2f} ± {statistics.stdev(accs):.2f}"
    assert gpm["ACC %"].value == pytest.approx(mean)
    assert gpm["paper's ACC"].text == f"{paper.acc:.2f} ± {paper.std:.2f}"
    assert gpm["ACC - paper"].text == f"{mean - paper.acc:+.2f}"
    assert gpm["paper's BWT"].text == "-0.9"
    assert gpm["BWT - paper"].value == pytest.approx((gpm["BWT %"].value or 0) + 0.9)


def test_the_best_come_first_and_changed_settings_are_not_among_them() -> None:
    main = tables(some_found())["main"]
    here = [row for row in rows(main, benchmark="split-cifar100") if row["ACC %"].value]
    values = [row["ACC %"].value for row in here]
    assert values == sorted(values, reverse=True)
    assert [row["preset"].text for row in here].count("paper") == len(here) - 1
    assert {row["preset"].text for row in here} == {"paper", "official"}


def test_what_of_the_papers_table_is_not_run_is_said() -> None:
    """With what runs it, and what the paper has."""
    main = tables(some_found())["main"]
    (owm,) = rows(main, benchmark="pmnist", method="owm")
    assert owm["ACC %"].text == "not run"
    assert owm["ACC %"].commands == ("trgp run pmnist --method owm --seeds 5",)
    assert owm["paper's ACC"].text == "90.71 ± 0.11"
    papers = {(b, m) for b, methods in PAPER.items() for m in methods if m in METHODS}
    assert {(row.benchmark, row.method) for row in main.rows} >= papers
    ran = {(row.benchmark, row.method) for row in main.rows if cells(main, row)["ACC %"].value}
    lacking = {(r.benchmark, r.method) for r in main.rows} - ran
    assert lacking == papers - ran


def test_only_unchanged_settings_are_compared_with_the_paper() -> None:
    found = Found([a_configuration("gpm", changed={"tasks": 3})], [])
    (row,) = [r for r in rows(tables(found)["main"], method="gpm") if r["ACC %"].value]
    assert row["preset"].text == "paper (tasks=3)"
    assert row["paper's ACC"].text == row["ACC - paper"].text == "–"


# ---- marks and tests ------------------------------------------------------------------------


def acc(run: object) -> float | None:
    return getattr(run, "acc", None)


def with_accs(method: str, accs: list[float]) -> Results:
    return Results(
        tuple(a_result(i, method=method, accuracy_matrix=[[a]]) for i, a in enumerate(accs))
    )


def test_best_near_and_worse() -> None:
    best = with_accs("trgp", [0.90, 0.91, 0.92])
    near = with_accs("gpm", [0.91, 0.89, 0.92])
    worse = with_accs("ewc", [0.80, 0.81, 0.825])
    bound = with_accs("single", [0.99, 0.99, 0.99])
    judged = verdicts([near, bound, best, worse], acc)
    assert [v.mark for v in judged] == ["near", "", "best", ""]
    p = p_value([0.90, 0.91, 0.92], [0.91, 0.89, 0.92])
    assert judged[0].p == pytest.approx(p)
    assert (judged[3].p or 1) < 0.05
    assert judged[1].p is judged[2].p is None


def test_nothing_is_claimed_of_seeds_that_are_not_shared() -> None:
    one, other = with_accs("trgp", [0.9]), with_accs("gpm", [0.5, 0.6, 0.7])
    first, second = verdicts([one, other], acc)
    assert (first.mark, first.note) == ("best", "highest mean (of one seed)")
    assert (second.mark, second.p) == ("", None)
    assert second.note.startswith("no test")
    apart = Results(tuple(a_result(seed, method="ewc") for seed in (7, 8)))
    assert difference(one, apart, acc) is None


def test_the_same_in_every_seed_is_near() -> None:
    a, b = with_accs("trgp", [0.9, 0.8]), with_accs("gpm", [0.9, 0.8])
    marks = {v.mark for v in verdicts([a, b], acc)}
    assert marks == {"best", "near"}


def test_nobody_is_best_alone() -> None:
    assert [v.mark for v in verdicts([with_accs("trgp", [0.9])], acc)] == [""]
    bounds = [with_accs("single", [0.9, 0.8]), with_accs("trgp", [0.7, 0.6])]
    assert {v.mark for v in verdicts(bounds, acc)} == {""}


def test_other_data_is_another_group() -> None:
    """Accuracies on scrambled and on right pixels are not compared."""
    right, wrong = (
        a_configuration(
            method, benchmark="cifar100-superclass", config={"scrambled": scrambled}, shift=shift
        )
        for method, scrambled, shift in (("trgp", False, 0.0), ("gpm", True, 0.02))
    )
    main = tables(Found([right, wrong], []))["main"]
    assert {cell.mark for row in main.rows for cell in row.cells} == {""}


def test_a_difference_is_over_common_seeds() -> None:
    a, b = with_accs("gpm", [0.5, 0.6, 0.7, 0.1]), with_accs("trgp", [0.6, 0.65, 0.9])
    gap = difference(a, b, acc)
    assert gap is not None
    assert gap.seeds == 3
    assert gap.mean == pytest.approx((0.1 + 0.05 + 0.2) / 3)
    assert gap.p == p_value([0.5, 0.6, 0.7], [0.6, 0.65, 0.9])


# ---- the others -----------------------------------------------------------------------------


def test_superclass_counts_capacity_as_the_paper_and_what_is_kept() -> None:
    table = tables(some_found())["superclass"]
    (single,) = rows(table, method="single")
    assert single["capacity %"].text == "300"  # three tasks here
    assert single["paper's capacity %"].text == "2000"
    assert single["kept in all, % of the network"].text == "300"
    (trgp,) = rows(table, method="trgp")
    assert trgp["capacity %"].text == trgp["paper's capacity %"].text == "100"
    assert trgp["kept in all, % of the network"].text == "350"
    assert trgp["held beside the network"].text == "5.0 MiB"
    (pnn,) = rows(table, method="pnn")
    assert pnn["ACC %"].text == "not run"
    assert pnn["ACC %"].commands
    assert "Bases" in table.note


def test_superclass_shows_a_growing_networks_capacity_by_both_rules() -> None:
    """As counted in its runs; what it holds has the network within."""
    figures = {capacity.PUBLISHED: 130.4, capacity.WHOLE: 132.6}
    sizes = {"state_bytes": 6 * 2**20, "network_bytes": 4 * 2**20}
    grown = a_configuration("apd", benchmark="cifar100-superclass", figures=figures, **sizes)
    table = tables(Found([grown], []))["superclass"]
    (apd,) = [row for row in rows(table, method="apd") if row["ACC %"].text != "not run"]
    assert apd["capacity %"].text == apd["paper's capacity %"].text == "130"
    assert apd["capacity %"].note == "133 with every task's head"
    assert apd["kept in all, % of the network"].text == "150"


def test_ablations_stand_below_the_preset() -> None:
    table = tables(some_found())["ablation"]
    here = rows(table, benchmark="split-cifar100", preset="paper")
    assert [row["trust region"].text for row in here] == [
        "as the preset: epsilon 0.5, layer-wise, top 2",
        "epsilon 0.2",
        "task-wise",
        "epsilon 0.7",
        "top 1",
    ]
    assert [row["ACC %"].text == "not run" for row in here] == [False] * 3 + [True] * 2
    assert [row["paper's ACC"].value for row in here] == [74.46, 74.52, 73.25, 74.30, 74.00]
    assert [row["change of ACC"].text for row in here[:3]] == ["–", "-1.00", "-2.00"]
    five = rows(table, benchmark="five-datasets")
    assert {row["ACC %"].text for row in five} == {"not run"}
    assert "MNIST in place of Fashion-MNIST" in table.note


def test_transfer_by_task_with_the_gain_over_gpm() -> None:
    found = some_found()
    table = tables(found)["transfer-split-cifar100-3-tasks"]
    (trgp,) = rows(table, method="trgp", preset="paper")
    assert [trgp[f"task {t}"].text for t in (1, 2, 3)] == ["92.00", "72.00", "97.00"]
    assert trgp["average A_ii %"].text == "87.00 ± 1.00"
    gain = difference(found.results[0], found.results[1], lambda run: run.mean_diagonal)
    assert gain is not None
    assert trgp["gain over GPM"].text == f"{100 * gain.mean:+.2f}"
    (gpm,) = rows(table, method="gpm", preset="paper")
    assert gpm["gain over GPM"].text == "–"
    assert not rows(table, method="multitask")
    (official,) = rows(table, preset="official")
    assert official["gain over GPM"].text == "–"  # whose GPM is not stored
    papers = [row for row in rows(table) if "in the paper" in row["method"].text]
    assert papers == []  # of ten tasks, where these have three


def test_transfer_has_the_papers_rows_where_all_tasks_are_learnt() -> None:
    found = Found([some_results(2, T=10, method="gpm"), some_results(2, T=10)], [])
    table = tables(found)["transfer-split-cifar100"]
    papers = [row for row in rows(table) if "in the paper" in row["method"].text]
    assert [row["average A_ii %"].text for row in papers] == ["72.52", "74.53"]
    assert papers[1]["gain over GPM"].text == "+2.01"


def test_time_is_relative_to_gpm_on_the_same_device() -> None:
    slow = [{"training": 60.0, "bases": 6.0, "evaluation": 100.0}] * 3
    quick = [{"training": 30.0, "selection": 3.0, "evaluation": 1.0}] * 3
    found = Found(
        [
            a_configuration("gpm", seconds=quick),
            a_configuration("trgp", seconds=slow),
            a_configuration("ewc", seconds=slow, device="another"),
        ],
        [],
    )
    table = tables(found)["time"]
    gpm, trgp, ewc = (rows(table, method=method)[0] for method in ("gpm", "trgp", "ewc"))
    column = "in multiples of GPM's"
    assert (gpm[column].text, trgp[column].text, ewc[column].text) == ("1.00", "2.00", "–")
    assert trgp["paper's"].text == "1.65"
    assert trgp["training"].value == 198
    assert trgp["evaluation"].value == 300


def test_time_is_the_same_however_many_phases_are_told() -> None:
    """Validation is learning, and checkpoints, which older results do not count, are apart."""
    old = [{"training": 60.0, "bases": 6.0, "evaluation": 1.0}] * 3
    configurations = [
        a_configuration("gpm", seconds=old),
        a_configuration("trgp", seconds=with_all_phases(old)),
    ]
    table = tables(Found(configurations, []))["time"]
    for row in rows(table):
        assert (row["training"].value, row["evaluation"].value) == (198, 3)
        assert row["in multiples of GPM's"].text == "1.00"
    assert "checkpoints" in table.note


def test_runs_at_once_are_on_the_same_device() -> None:
    """Their times are shares of the device's, which are compared as they are."""
    configurations = [
        a_configuration("gpm", device="cuda (NVIDIA H200), 5 runs at once"),
        a_configuration("trgp", device="cuda (NVIDIA H200), 3 runs at once"),
        a_configuration("ewc", device="cuda (NVIDIA H200)"),
        a_configuration("er", device="cuda (NVIDIA H100), 5 runs at once"),
    ]
    report = build(Found(configurations, []))
    table = tables(Found(configurations, []))["time"]
    relative = [
        rows(table, method=m)[0]["in multiples of GPM's"].text for m in ("trgp", "ewc", "er")
    ]
    assert relative == ["1.00", "1.00", "–"]
    assert rows(table, method="gpm")[0]["device"].text == "cuda (NVIDIA H200), 5 runs at once"
    assert "share of the device time" in table.note
    assert report.summary[1].endswith("on cuda (NVIDIA H100); cuda (NVIDIA H200).")


def test_results_without_a_checksum_are_counted(tmp_path: Path) -> None:
    """Those of trgp 0.1 have none."""
    found = Found([some_results(2, method=method) for method in ("gpm", "trgp")], [])
    said = "4 results from trgp 0.1 without a checksum; damage there may go unnoticed."
    assert said in build(found).summary
    sealed = [Results(tuple(write_result(tmp_path, r) for r in runs)) for runs in found.results]
    assert not any("checksum" in said for said in build(Found(sealed, [])).summary)


def test_memory_in_bytes_and_copies() -> None:
    (row,) = rows(tables(some_found())["memory"], method="single")
    assert row["network"].text == "2.0 MiB"
    assert row["held beside it"].text == "6.0 MiB"
    assert row["in copies of the network"].text == "3.00"
    assert row["peak"].text == "3.0 GiB"


def test_quirks_alone_and_all_but_one() -> None:
    table = tables(some_found())["quirks"]
    here = {row["quirk"].text: row for row in rows(table, benchmark="split-cifar100")}
    assert here["as they are"]["paper with it alone: ACC %"].value
    assert here["as they are"]["official without it: ACC %"].value
    gate = here["first_layer_gate True"]
    assert gate["paper with it alone: change of ACC"].text == "+0.00"
    assert gate["official without it: ACC %"].text == "not run"
    assert "strongest_unprotected True" in here
    assert not any("test_batch" in quirk for quirk in here)


def test_what_no_other_table_has() -> None:
    table = tables(some_found())["other"]
    (row,) = rows(table)
    assert row["preset"].text == "paper (lr=0.1)"
    assert row["change of ACC"].text == "+0.00"


def test_results_of_unknown_things_are_shown() -> None:
    """Of another version, or of somebody's own files."""
    found = Found(
        [
            a_configuration("my_module:Mine", benchmark="my.npz", changed={"data_source": "ab"}),
            a_configuration("gone", benchmark="old-benchmark", preset="old", config={}),
        ],
        [],
    )
    main = tables(found)["main"]
    assert len([row for row in main.rows if row.benchmark in ("my.npz", "old-benchmark")]) == 2


def test_nothing_at_all() -> None:
    report = build(Found([], ["A problem."]))
    assert report.problems == ("A problem.",)
    assert report.charts == ()
    assert {table.name for table in report.tables} == {"main", "superclass", "ablation"}


# ---- commands -------------------------------------------------------------------------------


def test_one_command_repeats_all_seeds() -> None:
    (gpm,) = rows(tables(some_found())["main"], benchmark="split-cifar100", method="gpm")
    expected = "trgp run split-cifar100 --method gpm --device cpu --seeds 3"
    assert gpm["ACC %"].commands == (expected,)


@pytest.mark.parametrize(
    ("typed", "commands"),
    [
        ({1: "trgp run x --seed 1", 7: "trgp run x --seed=7"}, ["trgp run x --seeds 1,7"]),
        ({0: "trgp run x --seeds 2", 1: "trgp run x --seeds 2"}, ["trgp run x --seeds 2"]),
        ({0: "trgp run x", 1: "trgp run x --seed 1"}, ["trgp run x --seeds 2"]),
        ({0: "trgp run x", 1: "trgp run x --lr 1"}, ["trgp run x", "trgp run x --lr 1"]),
        ({0: "f('a", 1: "g()"}, ["f('a", "g()"]),
    ],
)
def test_commands_are_put_together(typed: dict[int, str], commands: list[str]) -> None:
    runs = tuple(
        a_result(seed, command=text, accuracy_matrix=matrix()) for seed, text in typed.items()
    )
    (row,) = rows(tables(Found([Results(runs)], []))["memory"])
    assert row["held beside it"].commands == tuple(commands)


PUBLISHED = ("paper's ACC", "paper's BWT", "paper's capacity %", "paper's")


def test_every_number_of_runs_says_what_repeats_it() -> None:
    for table in tables(some_found()).values():
        for row in table.rows:
            by_column = cells(table, row)
            for column, cell in by_column.items():
                if cell.text == "not run":
                    assert cell.commands
                elif cell.value is not None and column not in PUBLISHED:
                    assert cell.commands, (table.name, column)
                else:
                    assert not cell.commands, (table.name, column)


def test_a_difference_is_repeated_by_both_commands() -> None:
    made = tables(some_found())
    run = "trgp run split-cifar100 --method {} --device cpu --seeds 3"
    both = tuple(run.format(method) for method in ("gpm", "trgp"))
    (trgp,) = rows(made["transfer-split-cifar100-3-tasks"], method="trgp", preset="paper")
    assert trgp["task 1"].commands == both[1:]
    assert trgp["gain over GPM"].commands == trgp["p"].commands == both
    (time,) = rows(made["time"], method="trgp", benchmark="split-cifar100", preset="paper")
    assert time["in multiples of GPM's"].commands == both


def test_what_is_not_run_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the very settings that its row is of."""
    asked: list[Any] = []
    monkeypatch.setattr(command_line, "learn", lambda *given: asked.append(given))
    made = tables(some_found())
    lacking = [
        ("official" if "official" in column + row.preset else "paper", cell.commands[0])
        for name in ("quirks", "ablation")
        for row in made[name].rows
        for column, cell in cells(made[name], row).items()
        if cell.text == "not run" and row.benchmark == "split-cifar100"
    ]
    for preset, command in lacking:
        command_line.main(shlex.split(command)[2:])
        _, running, changes, _ = asked[-1]
        assert (running.method, running.preset, running.seeds) == ("trgp", preset, "5")
        assert len(changes) <= 1
    changed = [changes for _, _, changes, _ in asked]
    assert {"epsilon": 0.7} in changed
    assert {"top_k": 1} in changed
    assert {"first_layer_gate": False} in changed  # of the preset official
    assert {"images_per_layer": ()} in changed


def test_rows_that_are_not_run_are_known_by_it() -> None:
    """And tables of nothing else come last."""
    made = tables(some_found())
    for row in made["main"].rows:
        assert row.not_run == (cells(made["main"], row)["ACC %"].text == "not run")
    for row in made["quirks"].rows:
        seeds = [cell.value for name, cell in cells(made["quirks"], row).items() if "seeds" in name]
        assert row.not_run == (seeds == [None, None])
    small = Found([a_configuration("gpm", benchmark="split-digits")], [])
    assert list(tables(small))[-2:] == ["superclass", "ablation"]
