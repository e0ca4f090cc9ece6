"""What is shown of results: the right numbers, readable, and stored texts as nothing but text."""

import io
import statistics
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console, RenderableType
from some_results import a_matrix, a_result, some_results, with_all_phases

from trgp.benchmarks import PAPER
from trgp.benchmarks.common import Published
from trgp.results import metrics
from trgp.results.layout import duration, points, spread
from trgp.results.metrics import Spread
from trgp.results.paired import p_value
from trgp.results.render import comparison, details, main_table, summary
from trgp.results.result import Result, Results
from trgp.results.store import Found


def rendered(renderable: RenderableType, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def line(text: str, start: str) -> str:
    """The rest of the line that starts so, one space between its words."""
    found = [row for row in text.splitlines() if row.startswith(start)]
    assert len(found) == 1, f"{start!r} starts {len(found)} lines of\n{text}"
    return " ".join(found[0].removeprefix(start).split())


def block(text: str, title: str) -> list[str]:
    """The lines under a title, up to the next empty one."""
    lines = text.splitlines()
    start = next(i for i, row in enumerate(lines) if row.startswith(title)) + 1
    end = next(i for i in range(start, len(lines)) if not lines[i].strip())
    return lines[start:end]


def by_task(lines: list[str]) -> dict[tuple[str, int], str]:
    """The cells of a grid by row and task; a line of tasks begins with a space."""
    cells = {}
    tasks: list[int] = []
    for row in lines:
        words = row.split()
        if row.startswith(" "):
            tasks = list(map(int, words))
        else:
            cells |= {(words[0], t): cell for t, cell in zip(tasks, words[1:], strict=False)}
    return cells


def mean_and_std(values: list[float]) -> str:
    return f"{100 * statistics.mean(values):.2f} ± {100 * statistics.stdev(values):.2f}"


# ---- the summary ----------------------------------------------------------------------------


@pytest.mark.parametrize("T", [1, 2, 12, 13, 20, 40])
@pytest.mark.parametrize("width", [60, 100])
def test_the_matrix_is_whole_at_any_size(T: int, width: int) -> None:
    """Every mean over the seeds, in the place its row and column say."""
    results = some_results(3, T)
    text = rendered(summary(results, None), width)
    assert max(map(cell_len, text.splitlines())) <= width
    shown = by_task(block(text, "Accuracy on every task"))
    assert len(shown) == T * (T + 1) // 2
    for i in range(T):
        for j in range(i + 1):
            cell = shown[str(i + 1), j + 1]
            mean = statistics.mean(100 * run.accuracy_matrix[i][j] for run in results)
            assert float(cell) == pytest.approx(mean, abs=0.0501 if T <= 12 else 0.501)
            assert ("." in cell) == (T <= 12)


def test_tasks_learnt_at_once_have_one_row_and_dashes() -> None:
    R: list[list[float | None]] = [[None, None], [0.25, 0.75]]
    text = rendered(summary(Results((a_result(accuracy_matrix=R, acc=0.5, bwt=None),)), None))
    assert by_task(block(text, "Accuracy")) == {("2", 1): "25.0", ("2", 2): "75.0"}
    assert line(text, "ACC") == "50.00"
    for name in ("BWT", "mean A_ii", "forgetting"):
        assert line(text, name) == "–"
    assert "FWT" not in text


def test_figures_are_those_of_the_seeds_beside_the_papers() -> None:
    results = some_results(3)
    text = rendered(summary(results, Published(74.46, 0.32, -0.9)))
    matrices = [run.accuracy_matrix for run in results]
    accs, bwts = [list(map(f, matrices)) for f in (metrics.acc, metrics.bwt)]
    gained = 100 * statistics.mean(accs) - 74.46
    assert line(text, "ACC") == f"{mean_and_std(accs)} 74.46 ± 0.32 {gained:+.2f}"
    moved = 100 * statistics.mean(bwts) + 0.9
    assert line(text, "BWT") == f"{mean_and_std(bwts)} -0.90 {moved:+.2f}"
    learnt = [metrics.mean_diagonal(R) for R in matrices]
    assert line(text, "mean A_ii") == f"{mean_and_std(learnt)} – –"
    lost = [metrics.forgetting(R) or 0 for R in matrices]
    assert line(text, "forgetting") == f"{mean_and_std(lost)} – –"


def test_without_the_paper_or_other_seeds_there_are_no_such_columns() -> None:
    run = a_result()
    text = rendered(summary(Results((run,)), None))
    assert line(text, "ACC") == f"{100 * run.acc:.2f}"
    assert "paper" not in text.replace("preset paper", "")
    without = rendered(summary(Results((run,)), Published(80.0)))
    assert line(without, "BWT").endswith(" – –")


def test_forward_transfer_is_shown_where_it_is_defined() -> None:
    R: list[list[float | None]] = [[0.9, 0.3], [0.8, 0.7]]
    text = rendered(summary(Results((a_result(accuracy_matrix=R, untrained=[0.1, 0.1]),)), None))
    assert line(text, "FWT") == "20.00"


def test_time_is_split_and_summed() -> None:
    """30, 31 and 32 seconds of training by seed: 31 in the mean, of four tasks."""
    text = rendered(summary(some_results(3), None))
    assert line(text, "task") == "training bases selection evaluation all"
    rows = block(text, "Time")
    assert " ".join(rows[1].split()) == "1 31.0 s 2.0 s 1.0 s 0.5 s 34.5 s"
    assert " ".join(rows[-1].split()) == "all 2 min 04 s 8.0 s 4.0 s 2.0 s 2 min 18 s"


def test_validation_and_checkpoints_are_shown_where_all_results_tell_them() -> None:
    old = some_results(3)
    new = [replace(run, seconds=with_all_phases(run.seconds)) for run in old]
    text = rendered(summary(Results(tuple(new)), None), width=80)
    assert line(text, "task") == "training validation bases selection evaluation checkpoints all"
    assert " ".join(block(text, "Time")[1].split()) == (
        "1 26.0 s 5.0 s 2.0 s 1.0 s 0.5 s 0.2 s 34.8 s"
    )
    mixed = Results((new[0], *old[1:]))
    assert block(rendered(summary(mixed, None)), "Time") == block(
        rendered(summary(old, None)), "Time"
    )


def test_phases_of_other_methods_are_shown_too() -> None:
    seconds = [{"training": 1.0, "replay": 2.0}] * 4
    text = rendered(summary(Results((a_result(seconds=seconds),)), None))
    assert line(text, "task") == "training replay all"
    assert line(text, "all") == "4.0 s 8.0 s 12.0 s"


def test_memory_form_and_changes_are_told() -> None:
    text = rendered(summary(some_results(2, changed={"lr": 0.1, "threshold": [0.9, 0.8]}), None))
    assert line(text, "memory held") == "5.0 MiB, 2.50 copies of the network"
    assert line(text, "peak memory") == "3.0 GiB"
    assert line(text, "form") == "native"
    assert line(text, "changed") == "lr=0.1, threshold=0.9,0.8"
    plain = rendered(summary(some_results(2, form=None), None))
    assert "\nform" not in plain
    assert "\nchanged" not in plain


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (360_000, "100 h 00 min"),
    ],
)
def test_times_carry_over(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_there_is_no_negative_zero() -> None:
    assert points(-1e-9) == "0.00"
    assert points(-1e-9, "+") == "+0.00"
    assert spread(Spread(None, None, 2)) == "–"


# ---- the main table -------------------------------------------------------------------------


def several() -> Found:
    return Found(
        [
            some_results(2, method="gpm", accuracy_matrix=[[0.5]], bwt=None),
            some_results(3, method="trgp", changed={"lr": 0.1}),
            some_results(1, method="my_module:Mine", accuracy_matrix=[[0.9]], bwt=None),
            some_results(1, benchmark="pmnist", method="other"),
        ],
        [],
    )


def cells(found: Found) -> list[list[str]]:
    """The header of the main table, then its rows."""
    columns = main_table(found).columns
    return [
        list(row)
        for row in zip(*([str(c.header), *map(str, c.cells)] for c in columns), strict=True)
    ]


def test_the_main_table_is_sorted_and_holds_every_figure() -> None:
    found = several()
    header, *rows = cells(found)
    assert header[:3] == ["benchmark", "method", "preset"]
    assert {len(row) for row in (header, *rows)} == {10}
    trgp = found.results[1]
    seconds = round(statistics.mean(4 * (33.5 + run.seed) for run in trgp))
    time = f"{seconds // 60} min {seconds % 60:02d} s"
    acc, bwt = (mean_and_std([getattr(r, k) for r in trgp]) for k in ("acc", "bwt"))
    learnt = 100 * statistics.mean(metrics.mean_diagonal(r.accuracy_matrix) for r in trgp)
    assert [row[0] for row in rows] == ["pmnist"] + ["split-cifar100"] * 3
    by_acc = sorted(found.results[:3], key=lambda results: -(results.acc.mean or 0))
    assert [row[1] for row in rows[1:]] == [r[0].method for r in by_acc]
    acc, bwt = acc.replace(" ", ""), bwt.replace(" ", "")
    expected = ["3", acc, bwt, f"{learnt:.2f}", "5.0 MiB", time, "–"]  # no paper has lr=0.1
    assert ["split-cifar100", "trgp", "paper (lr=0.1)", *expected] in rows
    gpm = next(row for row in rows if row[1] == "gpm")
    assert gpm[3:6] == ["2", "50.00±0.00", "–"]
    assert gpm[-1] == f"{PAPER['split-cifar100']['gpm'].acc:.2f}"
    assert rows[0][-1] == "–"


def test_the_screen_shows_every_cell() -> None:
    found = several()
    words = set(rendered(main_table(found), 140).split())
    for row in cells(found):
        for cell in row:
            assert set(cell.split()) <= words
    narrow = rendered(main_table(found))
    assert max(map(cell_len, narrow.splitlines())) <= 100
    assert "…" not in narrow


def test_many_changes_are_shortened() -> None:
    changes = {f"setting{i}": i for i in range(50)}
    found = Found([some_results(1, changed=changes)], [])
    preset = cells(found)[1][2]
    assert preset.startswith("paper (setting0=0, setting1=1,")
    assert preset.endswith("…)")
    assert len(preset) < 75


def test_nothing_found_is_an_empty_table() -> None:
    assert rendered(main_table(Found([], []))).split()[:2] == ["benchmark", "method"]


# ---- one run --------------------------------------------------------------------------------


def test_details_tell_everything() -> None:
    run = a_result(3, changed={"lr": 0.01})
    text = rendered(details(run))
    assert line(text, "command") == run.command
    assert line(text, "device") == "cpu"
    assert line(text, "versions") == "trgp 0.1.0, torch 2.11.0"
    assert line(text, "digest") == "0123abcd"
    assert line(text, "checksum") == "none (written by trgp 0.1; damage may go unnoticed)"
    assert line(text, "lr") == "0.01 changed from the preset"
    assert line(text, "threshold") == "0.97,0.99"
    assert line(text, "model") == "None"
    assert line(text, "ACC") == f"{100 * run.acc:.2f}"
    trusted = block(text, "task  old tasks in the trust region")
    assert [row.split(maxsplit=1)[1].strip() for row in trusted] == [
        "–",
        "conv1: 1",
        "conv1: 1, 2",
        "conv1: 1, 2",
    ]
    ranks = block(text, "Protected directions")
    assert [row.split() for row in ranks] == [
        ["layer", "1", "2", "3", "4"],
        ["conv1", "10", "20", "30", "40"],
        ["fc1", "7", "7", "7", "7"],
    ]
    validation = by_task(block(text, "Validation"))
    assert [validation["epochs", t] for t in (1, 2, 3, 4)] == ["1", "2", "3", "4"]
    assert {validation["accuracy", t] for t in (1, 2, 3, 4)} == {"87.5"}


def test_the_validation_accuracy_is_that_of_the_weights_kept() -> None:
    """With a patience the best ones by loss, else the last ones."""
    curve = {"valid_loss": [0.5, 0.3, 0.3, 0.4], "valid_accuracy": [0.6, 0.7, 0.8, 0.9]}
    for patience, expected in ((6, "70.0"), (0, "90.0")):
        run = a_result(T=2, curves=[curve, {}], config={"patience": patience})
        validation = by_task(block(rendered(details(run)), "Validation"))
        assert validation == {
            ("accuracy", 1): expected,
            ("accuracy", 2): "–",
            ("epochs", 1): "4",
            ("epochs", 2): "0",
        }


def test_details_of_a_method_without_bases_have_none() -> None:
    run = a_result(selected=[{}] * 4, ranks={}, form=None, digest="", curves=[])
    text = rendered(details(run))
    for absent in ("trust region", "Protected", "Validation"):
        assert absent not in text
    assert line(text, "form") == line(text, "digest") == "–"


# ---- two configurations ---------------------------------------------------------------------


def shifted(run: Result, by: float, **changes: Any) -> Result:
    R = [[None if x is None else x * by for x in row] for row in run.accuracy_matrix]
    return a_result(run.seed, accuracy_matrix=R, **changes)


def test_a_comparison_holds_both_and_their_difference() -> None:
    a = some_results(3)
    b = Results(
        tuple(
            shifted(
                run,
                0.9 - run.seed / 20,
                method="gpm",
                config={"lr": 0.1, "new": 1},
                state_bytes=2**20,
            )
            for run in (a_result(1), a_result(2), a_result(7), a_result(0))
        )
    )
    text = rendered(comparison(a, b))
    assert line(text, "method") == "trgp gpm"
    assert line(text, "lr") == "0.01 0.1"
    assert line(text, "threshold") == "0.97,0.99 –"
    assert line(text, "new") == "– 1"
    assert "benchmark" not in text
    theirs = {run.seed: run for run in b}
    for name in ("ACC", "BWT"):
        x, y = ([getattr(run, name.lower()) for run in side] for side in (a, b))
        paired = [getattr(theirs[seed], name.lower()) for seed in range(3)]
        p = p_value(x, paired)
        assert p is not None
        difference = 100 * (statistics.mean(y) - statistics.mean(x))
        expected = f"{mean_and_std(x)} {mean_and_std(y)} {difference:+.2f} {p:.3f}"
        assert line(text, name) == expected
    assert line(text, "memory held") == "5.0 MiB 1.0 MiB -4.0 MiB"
    assert line(text, "time") == "2 min 18 s 2 min 24 s +6.0 s"
    assert "over the seeds 0, 1, 2" in text
    assert "Warning" not in text


def test_one_common_seed_makes_no_test() -> None:
    text = rendered(comparison(some_results(3), Results((a_result(2), a_result(5)))))
    assert "t-test" not in text
    assert "The settings are the same." in text


def test_figures_that_one_side_lacks_are_dashes() -> None:
    b = Results(tuple(a_result(seed, bwt=None) for seed in range(3)))
    text = rendered(comparison(some_results(3), b))
    assert line(text, "BWT").endswith(" – – –")
    assert line(text, "ACC").endswith(" +0.00 –")  # equal runs have no t


def test_other_benchmarks_are_warned_of_and_not_tested() -> None:
    text = rendered(comparison(some_results(3), some_results(3, T=6, benchmark="pmnist")))
    assert "Warning: the benchmarks differ" in text
    assert line(text, "benchmark") == "split-cifar100 pmnist"
    assert "t-test" not in text


# ---- stored texts ---------------------------------------------------------------------------

ODD = ["[bold]", "[/]", "[red]x[/red]", ":smile:", "\\[x]", "[link=http://x]y"]


def everywhere(text: str) -> Result:
    """A result with the text in every place that can hold one."""
    return a_result(
        command=text,
        benchmark=text,
        method=text,
        preset=text,
        device=text,
        form=text,
        digest=text,
        config={text: text, "lr": [text]},
        changed={text: text},
        versions={text: text},
        selected=[{text: [0]}] * 4,
        ranks={text: [1, 2, 3, 4]},
        seconds=[{text: 1.0}] * 4,
    )


def all_of(run: Result) -> str:
    results = Results((run,))
    parts = (
        summary(results, None),
        main_table(Found([results], [])),
        details(run),
        comparison(results, some_results(1)),
    )
    return "".join(rendered(part, 200) for part in parts)


@pytest.mark.parametrize("text", ODD)
def test_markup_stays_text(text: str) -> None:
    run = everywhere(text)
    results = Results((run,))
    assert f"{text} on {text}, preset {text}" in rendered(summary(results, None))
    assert line(rendered(details(run)), "command") == text
    assert text in rendered(main_table(Found([results], [])))
    assert text in rendered(comparison(results, some_results(1)))


@settings(max_examples=60)
@given(st.text(st.characters(), max_size=20))
def test_any_text_can_be_shown(text: str) -> None:
    """Without control characters, which could make a terminal do anything."""
    run = everywhere(text)
    shown = all_of(run)
    assert all(c.isprintable() or c == "\n" for c in shown)
    shown.encode()


@pytest.mark.parametrize("T", [1, 3])
def test_any_matrix_that_is_stored_can_be_shown(T: int) -> None:
    all_of(a_result(accuracy_matrix=a_matrix(T, 0)))
