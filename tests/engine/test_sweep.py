"""Sweeps: the cells of grids and named lists, and processes that take no other with them."""

import multiprocessing
import os
import resource
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from small_runs import in_a_new_process

from trgp.engine import sweep
from trgp.engine.config import configure
from trgp.engine.pool import forget_peak, in_processes
from trgp.engine.run import run
from trgp.engine.sweep import CPU, Place, carry_out, companies, plan, together
from trgp.engine.sweeps import SWEEPS, Cell, Grid, cells
from trgp.methods import METHODS, About
from trgp.methods.finetune import Finetune
from trgp.results.store import read_result

NEEDY = f"{__name__}:Needy"
SICK = """
import os, signal
from trgp.methods.finetune import Finetune

class Killed(Finetune):
    def begin_task(self, ctx):
        os.kill(os.getpid(), signal.SIGKILL)

class Leaving(Finetune):
    def begin_task(self, ctx):
        raise SystemExit(7)

class Broken(Finetune):
    def begin_task(self, ctx):
        return 1 / 0
"""


class Needy(Finetune):
    """Needs a head for every task."""

    about: ClassVar[About] = replace(Finetune.about, several_heads=True)


@pytest.fixture
def sick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module of methods that fail in every way there is."""
    name = "sick_methods"
    (tmp_path / f"{name}.py").write_text(SICK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def changed(cell: Cell) -> tuple[str, str, str, dict[str, Any]]:
    config = cell.config
    return config.benchmark, config.method_name, config.preset, dict(cell.changes)


@pytest.mark.parametrize("name", SWEEPS)
def test_every_cell_of_a_named_list_is_a_configuration(name: str) -> None:
    found = cells(SWEEPS[name]())
    assert len({cell.folder("") for cell in found}) == len(found)
    for cell in found:
        config = cell.config
        assert config == configure(
            config.benchmark, config.method_name, config.preset, **cell.changes
        )


def test_the_embedded_list_has_all_methods() -> None:
    """On the benchmark with one head, all that can do without a head per task."""
    found = {changed(cell)[:3] for cell in cells(SWEEPS["embedded"]())}
    for name, method in METHODS.items():
        assert ("split-digits", name, "paper") in found
        one_head = ("permuted-digits", name, "paper") in found
        assert one_head != method.about.several_heads


def test_the_paper_list() -> None:
    found = [changed(cell) for cell in cells(SWEEPS["paper"]())]
    assert not any(changes for *_, changes in found)
    growing = [name for name, kind in METHODS.items() if kind.about.family == "growing"]
    for benchmark in ("pmnist", "split-cifar100"):
        for method in ("gpm", "trgp"):
            for preset in ("paper", "official"):
                assert found.count((benchmark, method, preset, {})) == 5
        for method in METHODS:
            if method not in ("gpm", "trgp"):
                left_out = method in growing
                assert found.count((benchmark, method, "paper", {})) == (0 if left_out else 3)
    superclass = [cell for cell in found if cell[0] == "cifar100-superclass"]
    assert {cell[1] for cell in superclass} == {
        "gpm",
        "trgp",
        "single",
        "multitask",
        "finetune",
    } | {*growing}
    assert len(superclass) == (5 + len(growing)) * 2 * 3
    assert len(found) == 2 * 2 * 2 * 5 + (9 + 9) * 3 + len(superclass)


def test_the_quirks_are_what_separates_the_presets_one_at_a_time() -> None:
    found = cells(SWEEPS["quirks"]())
    for benchmark in ("pmnist", "split-cifar100"):
        paper, official = (
            configure(benchmark, "trgp", preset).settings for preset in ("paper", "official")
        )
        apart = {key for key in paper if paper[key] != official[key]} - {"test_batch"}
        for preset, others in (("paper", official), ("official", paper)):
            here = [c for c in found if changed(c)[:3] == (benchmark, "trgp", preset)]
            assert all(len(cell.changes) == 1 for cell in here)
            assert [cell.seed for cell in here] == [0, 1, 2] * len(apart)
            assert {key for cell in here for key in cell.changes} == apart
            for cell in here:
                ((key, value),) = cell.changes.items()
                assert value == others[key]


def test_the_ablation_has_the_papers_setting_once() -> None:
    found = [changed(cell) for cell in cells(SWEEPS["ablation"]())]
    for benchmark, seeds in (("split-cifar100", 3), ("five-datasets", 1)):
        here = [changes for b, *_, changes in found if b == benchmark]
        wanted: list[dict[str, Any]] = [{}, {"epsilon": 0.2}, {"epsilon": 0.7}, {"scope": "task"}]
        wanted += [{"top_k": k} for k in (1, 3, 4)]
        assert len(here) == seeds * len(wanted)
        assert all(here.count(changes) == seeds for changes in wanted)


def test_a_grid_is_every_combination_and_a_cell_is_named_once() -> None:
    grid = Grid(
        ["split-digits"],
        ["gpm", "trgp"],
        ["paper", "official"],
        seeds=[3, 1],
        options={"lr": [1, 1.0, 2], "threshold": [1, [0.9, 1]]},
        own={"trgp": {"lr": [0.5], "no_scaling": [["a", "b"], []]}},
    )
    found = [changed(cell) for cell in cells([grid, grid])]
    for preset in ("paper", "official"):
        gpm = [changes for _, m, p, changes in found if (m, p) == ("gpm", preset)]
        expected = [
            {"lr": lr, "threshold": threshold}
            for lr in (1.0, 2.0)
            for threshold in ((1.0,), (0.9, 1.0))
        ]
        assert [changes for changes in gpm if gpm.count(changes) == 2][::2] == expected
        # As the command line reads them: fractions, so that both come to the same folder.
        assert all(type(changes["lr"]) is float for changes in gpm)
        trgp = [changes for _, m, p, changes in found if (m, p) == ("trgp", preset)]
        assert len(trgp) == 2 * 2 * 2
        assert all(changes["lr"] == 0.5 for changes in trgp)
    assert {cell.seed for cell in cells([grid], seeds=[7])} == {7}


def test_grids_that_come_to_nothing_or_to_something_else() -> None:
    for grid, says in (
        (Grid(["permuted-digits"], [NEEDY]), "needs a head for every task"),
        (Grid(["split-digits"], ["gpm"], options={"seeds": [1]}), "'seeds' is not a setting of"),
        (Grid(["split-digits"], ["gpm"], options={"epsilon": [1]}), "no setting 'epsilon' for gpm"),
        (Grid(["split-digits"], ["gpm"], options={"lr": [10**400]}), "lr must be a finite number"),
        (Grid(["split-digits"], ["gpm"], seeds=[1, 1]), "A seed is given twice"),
        (Grid(["split-digits"], ["gmp"]), "did you mean 'gpm'"),
    ):
        with pytest.raises(ValueError, match=says):
            cells([grid])


def test_a_cell_that_its_network_refuses_is_refused_before_the_start(tmp_path: Path) -> None:
    for method, options, says in (
        ("gpm", {"threshold": [[0.9, 0.9, 0.9]]}, "threshold has 3 values for 2 layers"),
        ("gpm", {"tasks": [6]}, "split-digits has 5 tasks"),
    ):
        found = cells([Grid(["split-digits"], [method], options=options)])
        with pytest.raises(ValueError, match=f"gpm on split-digits, preset paper, .*: {says}"):
            plan(found, Place("cpu", tmp_path))
    # Heads of a user's own file are known when it is read.
    images = np.random.RandomState(0).randint(0, 256, (40, 3, 3, 1), np.uint8)
    labels = np.arange(40) % 4
    own = tmp_path / "own.npz"
    np.savez(own, train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    found = cells([Grid([str(own)], [NEEDY], options={"tasks": [1, 2]})])
    with pytest.raises(ValueError, match="tasks=1: The method needs a head for every task"):
        plan(found, Place("cpu", tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["own.npz"]


def test_only_cells_whose_data_is_missing_are_left_out(tmp_path: Path) -> None:
    found = cells([Grid(["split-digits", "pmnist"], ["gpm"], options={"tasks": [2]})])
    planned = plan(found, Place("cpu", tmp_path, tmp_path / "none"))
    assert [cell.config.benchmark for cell in planned.left] == ["split-digits"]
    ((lacking, sentence),) = planned.lacking.items()
    assert lacking.config.benchmark == "pmnist"
    assert "get it with `trgp data prepare mnist`" in sentence


def test_only_a_whole_result_of_the_same_settings_is_finished(tmp_path: Path) -> None:
    options: dict[str, Any] = {"tasks": 1, "epochs": 1, "threshold": (0.9, 1.0)}
    run("split-digits", "gpm", seeds=2, out=tmp_path, device="cpu", **options)
    listed = {key: [value] for key, value in options.items()}
    found = cells([Grid(["split-digits"], ["gpm"], seeds=3, options=listed)])
    place = Place("cpu", tmp_path)
    assert [cell.seed for cell in plan(found, place).left] == [2]
    for before, after in (('"batch": 32', '"batch": 64'), ("{", "")):
        path = found[0].folder(tmp_path) / "result.json"
        text = path.read_text()
        assert before in text
        path.write_text(text.replace(before, after, 1))
        assert [cell.seed for cell in plan(found, place).left] == [0, 2]
        path.write_text(text)


def test_no_failure_takes_another_run_with_it(tmp_path: Path, sick: str) -> None:
    small = {"out": tmp_path / "out", "device": "cpu", "tasks": 1, "epochs": 1, "seeds": [0]}
    methods = [f"{sick}:Killed", f"{sick}:Leaving", f"{sick}:Broken", "finetune", "nobody"]
    jobs = [{**small, "benchmark": "split-digits", "method": method} for method in methods]
    jobs.insert(1, {**jobs[3], "lr": 1e30})
    jobs.append({**jobs[4], "seeds": [1]})
    failures = dict(in_processes(jobs, 1))  # one after another, so that each follows a failure
    assert list(failures) == list(range(len(jobs)))
    killed, diverged, leaving, broken, fine, unknown, last = failures.values()
    assert "killed by SIGKILL" in str(killed)
    assert "diverged" in str(diverged)
    assert "exit code 7" in str(leaving)
    assert broken == "ZeroDivisionError: division by zero"
    assert (fine, last) == (None, None)
    assert "There is no method 'nobody'" in str(unknown)
    paths = sorted((tmp_path / "out").rglob("result.json"))
    found = [read_result(path) for path in paths]
    assert [run.seed for run in found] == [0, 1]
    assert all(run.device.endswith("1 threads)") for run in found)
    mine = cells([Grid(["split-digits"], ["finetune"], seeds=2, options={"tasks": [1]})])
    (results,) = together(zip(reversed(mine), reversed(found), strict=True)).results
    assert [run.seed for run in results] == [0, 1]
    assert not multiprocessing.active_children()


def test_closed_early_it_ends_all_processes(tmp_path: Path) -> None:
    long = {"benchmark": "permuted-digits", "method": "finetune", "device": "cpu", "epochs": 10**6}
    short = {**long, "epochs": 1, "tasks": 1}
    jobs = [{**job, "out": tmp_path, "seeds": [0]} for job in (short, long)]
    going = in_processes(jobs, 2)
    assert next(going) == (0, None)
    processes = multiprocessing.active_children()
    assert len(processes) == 2
    going.close()
    assert not multiprocessing.active_children()
    # One that is still starting has nothing to save, and ends when it is asked to.
    ends = {-signal.SIGKILL, -signal.SIGTERM}
    assert all(process.exitcode in ends for process in processes)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="only Linux can")
def test_the_peak_of_memory_is_that_of_what_comes() -> None:
    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    array = np.ones(1 << 27, np.uint8)
    before = peak()
    del array
    forget_peak()
    assert peak() < before - (1 << 16)  # kilobytes


# ---- on a GPU, in company --------------------------------------------------------------------


def some_cells(*rates: float, seeds: Sequence[int] = (0, 1, 2)) -> list[Cell]:
    small = {"tasks": 2, "epochs": 1}
    configs = [configure("permuted-digits", "gpm", lr=lr, **small) for lr in rates]
    return [Cell(config, seed) for config in configs for seed in seeds]


def test_the_seeds_of_a_configuration_are_in_one_company_if_they_fit() -> None:
    cells = some_cells(0.1, 0.2, 0.3)
    for width, sizes in ((9, [9]), (7, [6, 3]), (3, [3, 3, 3]), (2, [2, 1, 2, 1, 2, 1])):
        found = companies(cells, width)
        assert [len(company) for company in found] == sizes
        assert [cell for company in found for cell in company] == cells
    assert companies([], 3) == []


def test_another_benchmark_in_between_begins_another_company() -> None:
    """So that a sweep that goes on stacks as it did, whatever is left of it."""
    others = [Cell(configure("split-digits", "gpm", tasks=2, epochs=1), 0)]
    cells = [*some_cells(0.1), *others, *some_cells(0.2)]
    assert [len(company) for company in companies(cells, 10)] == [3, 1, 3]


def test_a_company_ends_as_the_processes_do_and_leaves_out_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very work that a GPU gets, done on the CPU."""
    cells = some_cells(0.1, 1e6)
    apart, place = Place("cpu", tmp_path / "a"), Place("cpu", tmp_path / "b")
    expected = {e.cell: e for e in carry_out(plan(cells, apart), apart, 2, str)}
    (first, *_) = cells
    stored = first.folder(place.out)
    shutil.copytree(first.folder(apart.out), stored)
    monkeypatch.setattr(sweep, "resolve", lambda device: torch.device("cuda"))
    learn = sweep.learn
    monkeypatch.setattr(
        sweep, "learn", lambda asked, device, **options: learn(asked, CPU, **options)
    )
    planned = plan(cells, place)
    assert planned.left == cells[1:]
    found = {e.cell: e for e in carry_out(planned, place, 6, str)}
    assert set(found) == set(cells[1:])
    for cell, ended in found.items():
        before = expected[cell]
        assert (ended.result is None) == (before.result is None)
        if ended.result is not None and before.result is not None:
            assert ended.result.acc == pytest.approx(before.result.acc, abs=0.01)
        else:
            assert "diverged" in ended.failure


def test_a_damaged_result_fails_its_own_cell_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells, place = some_cells(0.1), Place("cpu", tmp_path)
    folder = cells[1].folder(tmp_path)
    folder.mkdir(parents=True)
    (folder / "result.json").write_text("{")
    monkeypatch.setattr(sweep, "resolve", lambda device: torch.device("cuda"))
    learn = sweep.learn
    monkeypatch.setattr(
        sweep, "learn", lambda asked, device, **options: learn(asked, CPU, **options)
    )
    found = {e.cell.seed: e for e in carry_out(plan(cells, place), place, 3, str)}
    assert found[0].result is not None
    assert found[2].result is not None
    assert "not JSON or was cut short" in found[1].failure


TOLD_WHILE_TIDYING = """
import os, signal, time
from trgp.engine import pool

class Tidied:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)

def run(**job):
    tidied = Tidied()
    del tidied
    time.sleep(20)

pool.run = run
print(pool._done({}, pool.nobody).error)
"""


def test_whoever_is_told_to_end_while_python_tidies_up_ends_as_well() -> None:
    """Python passes on nothing from there: the word would be lost, and a traceback printed."""
    done = in_a_new_process("-c", TOLD_WHILE_TIDYING)
    assert (done.stdout, done.stderr) == (
        "Its process was terminated; every finished epoch is saved.\n",
        "",
    )
