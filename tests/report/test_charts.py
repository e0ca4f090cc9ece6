"""The figures of a report: what each shows, and that it is drawn with every label."""

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from some_found import a_configuration, matrix, some_found
from some_results import a_result, some_results, with_all_phases
from torch import nn

from trgp.benchmarks import NAMES, load
from trgp.report import drawing
from trgp.report.build import build
from trgp.report.charts.layers import in_order
from trgp.report.draw import drawn
from trgp.report.model import Chart, Series
from trgp.report.styles import METHODS, styles
from trgp.report.widths import NETWORKS, widths
from trgp.results.result import Results
from trgp.results.store import Found


def charts(found: Found) -> dict[str, Chart]:
    made = build(found).charts
    assert len({chart.name for chart in made}) == len(made)
    for chart in made:
        for each in chart.series:
            assert len(each.x) == len(each.y)
            assert len(each.error) in (0, len(each.y))
    return {chart.name: chart for chart in made}


def texts(chart: Chart) -> list[str]:
    """What can be read in the figure's SVG."""
    root = ET.fromstring(drawn(chart)["svg"])
    return ["".join(each.itertext()) for each in root.iter("{http://www.w3.org/2000/svg}text")]


def test_final_accuracy_by_method() -> None:
    chart = charts(some_found())["final-accuracy-split-cifar100-paper"]
    by_name = {each.name: each for each in chart.series}
    assert list(by_name) == ["finetune", "multitask", "ewc", "gpm", "trgp"]
    assert chart.kind == "bars"
    assert by_name["trgp"].x == ("1", "2", "3")
    assert by_name["trgp"].y == pytest.approx((62, 67, 97))
    assert by_name["trgp"].error == pytest.approx((1, 1, 1))
    assert by_name["ewc"].error == ()  # one seed
    assert {each.method for each in chart.series} == set(by_name)
    assert (chart.benchmark, chart.method, chart.preset) == ("split-cifar100", "", "paper")
    many = Found([some_results(2, 20, method=method) for method in ("gpm", "trgp")], [])
    assert charts(many)["final-accuracy-split-cifar100-paper"].kind == "lines"


def test_chosen_tasks_over_the_sequence() -> None:
    made = charts(some_found())
    first = made["evolution-task-1-split-cifar100-paper"]
    gpm = next(each for each in first.series if each.name == "gpm")
    assert gpm.x == ("1", "2", "3")
    assert gpm.y == pytest.approx((91, 81, 61))
    joint = next(each for each in first.series if each.name == "multitask")
    assert joint.y == (None, None, 90.0)
    second = made["evolution-task-2-split-cifar100-paper"]
    assert second.series[0].x == ("2", "3")
    assert "evolution-task-3-split-cifar100-paper" not in made  # nothing comes after it


def test_the_matrix_has_nothing_where_nothing_was_evaluated() -> None:
    chart = charts(some_found())["matrix-split-cifar100-gpm-paper"]
    assert chart.kind == "heat"
    assert [each.name for each in chart.series] == ["1", "2", "3"]
    assert chart.series[0].y == (pytest.approx(91), None, None)
    assert (chart.benchmark, chart.method, chart.preset) == ("split-cifar100", "gpm", "paper")


def test_curves_have_a_gap_and_a_boundary_after_every_task() -> None:
    """Two seeds, of which one stops the second task early."""
    curves = [
        [{"valid_accuracy": [0.5, 0.6]}, {"valid_accuracy": [0.7, 0.8, 0.9]}],
        [{"valid_accuracy": [0.7, 0.8]}, {"valid_accuracy": [0.9]}],
    ]
    R = [row[:2] for row in matrix()[:2]]
    runs = tuple(a_result(seed, accuracy_matrix=R, curves=each) for seed, each in enumerate(curves))
    chart = charts(Found([Results(runs)], []))["curves-split-cifar100-trgp-paper"]
    (line,) = chart.series
    assert line.x == (1, 2, 2.5, 3, 4, 5)
    assert line.y == pytest.approx((60, 70, None, 80, 80, 90))
    assert chart.boundaries == ((2.5, "task 1"), (5.5, "task 2"))
    shown = texts(chart)
    assert {"task 1", "task 2", "epoch", "validation accuracy, %"} <= set(shown)


def test_the_selection_is_that_of_one_seed_counted_from_one() -> None:
    found = some_found()
    made = charts(found)
    chart = made["selection-split-cifar100-trgp-paper"]
    assert chart.kind == "grid"
    assert [each.name for each in chart.series] == ["conv1", "fc1"]
    assert chart.series[0].x == ("2", "3")
    assert chart.texts == (("1", "1, 2"), ("", ""))
    assert chart.series[0].y == (3, 3)  # seeds, which all trust the same
    assert chart.series[1].y == (None, None)
    assert chart.z_label == "seeds that trust the same"
    assert "seed 0" in chart.title
    assert chart.note.startswith("Layer-wise")
    (task_wise,) = [
        c for name, c in made.items() if name.startswith("selection") and "scope" in name
    ]
    assert task_wise.note.startswith("Task-wise")
    assert "scope=task" in task_wise.title
    assert not any(name.startswith("selection-split-cifar100-gpm") for name in made)
    assert {"conv1", "fc1", "1, 2", "2", "3"} <= set(texts(chart))


def test_the_selection_tells_how_many_seeds_agree() -> None:
    """In whatever order."""
    chosen = [[0, 1], [1, 0], [1], []]
    runs = tuple(
        a_result(seed, T=3, selected=[{}, {"fc1": [0]}, {"fc1": old}])
        for seed, old in enumerate(chosen)
    )
    chart = charts(Found([Results(runs)], []))["selection-split-cifar100-trgp-paper"]
    assert chart.texts == (("1", "1, 2"),)
    assert chart.series[0].y == (4, 2)
    assert "the more of the 4 seeds trust the same" in chart.note
    assert chart.z_label in texts(chart)


def test_layer_wise_against_task_wise() -> None:
    chart = charts(some_found())["scopes-split-cifar100-trgp-paper"]
    assert [each.name for each in chart.series] == ["gpm", "trgp, layer-wise", "trgp, task-wise"]


def test_ranks_are_means_over_seeds() -> None:
    """In per cent of a layer's width where the network is known."""
    found = Found([some_results(2, T=3), some_results(2, T=3, benchmark="my.npz")], [])
    chart = charts(found)["ranks-split-cifar100-trgp-paper"]
    by_name = {each.name: each.y for each in chart.series}
    assert by_name["conv1 (of 48)"] == pytest.approx((1000 / 48, 2000 / 48, 3000 / 48))
    assert by_name["fc1 (of 1024)"] == pytest.approx((700 / 1024,) * 3)
    assert chart.y_label == "directions, % of all"
    chart = charts(found)["ranks-my.npz-trgp-paper"]
    assert {each.name: each.y for each in chart.series} == {
        "conv1": (10, 20, 30),
        "fc1": (7, 7, 7),
    }
    assert chart.y_label == "directions"


@pytest.mark.parametrize("benchmark", ["permuted-digits", "split-digits"])
def test_widths_are_those_of_the_benchmarks_network(benchmark: str) -> None:
    network = load(benchmark).make_network()
    known = widths(a_result(benchmark=benchmark))
    assert (
        known.items()
        <= {
            name: module.weight.shape[1]
            for name, module in network.named_modules()
            if layer(module)
        }.items()
    )
    assert NETWORKS.keys() == {*NAMES}
    assert widths(a_result(benchmark=benchmark, config={"model": "my:Net"})) == {}


def layer(module: object) -> bool:
    return isinstance(module, nn.Linear)


def test_layers_are_in_the_order_of_a_network() -> None:
    names = ["heads.0", "layers.10.conv1", "layers.2.conv2", "layers.2.conv1", "conv1"]
    assert in_order(names) == [
        "conv1",
        "layers.2.conv1",
        "layers.2.conv2",
        "layers.10.conv1",
        "heads.0",
    ]


def test_time_by_phase() -> None:
    found = Found([some_results(3, T=3)], [])
    chart = charts(found)["time-split-cifar100-trgp-paper"]
    assert chart.kind == "stacked"
    assert {each.name: each.y for each in chart.series} == {
        "training": (31, 31, 31),
        "bases": (2, 2, 2),
        "selection": (1, 1, 1),
        "evaluation": (0.5, 0.5, 0.5),
    }


def test_time_by_phase_where_some_results_tell_more_of_them() -> None:
    """A mean over seeds is of what all of them tell apart."""
    old = some_results(3, T=3)
    new = [replace(run, seconds=with_all_phases(run.seconds)) for run in old]
    shown = [
        {each.name: each.y[0] for each in made["time-split-cifar100-trgp-paper"].series}
        for runs in (old, new, [new[0], *old[1:]])
        for made in [charts(Found([Results(tuple(runs))], []))]
    ]
    assert shown[1] == {**shown[0], "training": 26, "validation": 5, "checkpoints": 0.25}
    assert shown[2] == shown[0]


def test_accuracy_against_bytes() -> None:
    chart = charts(some_found())["accuracy-memory-cifar100-superclass-paper"]
    assert chart.kind == "points"
    assert chart.x_label == "held beside the network, KiB"
    assert {each.name: each.x for each in chart.series} == {"single": (6144,), "trgp": (5120,)}


def test_changed_settings_that_several_methods_share_are_compared() -> None:
    short = {"changed": {"epochs": 1}}
    found = Found([a_configuration("gpm", **short), a_configuration("trgp", **short)], [])
    compared = [name for name in charts(found) if name.startswith("final-accuracy")]
    assert len(compared) == 1
    assert "epochs=1" in charts(found)[compared[0]].title
    alone = Found([a_configuration("gpm", **short)], [])
    assert not any(name.startswith("final-accuracy") for name in charts(alone))


def test_names_are_safe_and_apart_whatever_the_methods_are_called() -> None:
    odd = ["a/b:C", "a-b-C", "ä" * 90, "..", "A"]
    made = charts(Found([a_configuration(name) for name in odd], []))
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789._-") for name in made)
    assert max(map(len, made)) < 200
    # Of two versions of the package, with other settings of the same preset.
    twice = [a_configuration("gpm", config={"new": n}) for n in (1, 2)]
    assert "matrix-split-cifar100-gpm-paper-again-2" in charts(Found(twice, []))


@pytest.mark.parametrize("T", [1, 2, 20])
def test_every_figure_is_drawn_at_any_size(T: int) -> None:
    names = [f"layers.{i}.conv" for i in range(20)]
    selected = [{name: list(range(min(t, 3))) for name in names} for t in range(T)]
    ranks = {name: [10] * T for name in names}
    found = Found([some_results(2, T, selected=selected, ranks=ranks)], [])
    for chart in charts(found).values():
        files = drawn(chart)
        assert files["png"].startswith(b"\x89PNG")
        ET.fromstring(files["svg"])


def test_every_label_is_in_the_figure() -> None:
    found = some_found()
    for name in ("final-accuracy-split-cifar100-paper", "time-split-cifar100-trgp-paper"):
        chart = charts(found)[name]
        shown = texts(chart)
        assert {chart.x_label, chart.y_label} <= set(shown)
        assert {each.name for each in chart.series} <= set(shown)


def test_odd_names_are_drawn_as_they_are() -> None:
    """No mathematics, no markup, and letters that no font has."""
    odd = ["$x^2$", "<script>", "\u4e2d", "_hidden", "a&b"]
    series = tuple(Series(name, ("1",), (1.0,)) for name in odd)
    chart = Chart("odd", "$a$ <b> & %", "lines", "x", "y", series)
    shown = texts(chart)
    assert set(odd) <= set(shown)
    assert "$a$ <b> & %" in shown


def test_methods_are_told_apart_and_keep_their_style() -> None:
    everyone = [Series(name, (), (), method=name) for name in METHODS]
    whole = list(styles(everyone))
    assert len({(s.colour, s.dashes, s.marker) for s in whole}) == len(METHODS)
    assert len({s.marker for s in whole}) == len(METHODS)  # in black and white too
    assert list(styles(everyone[:2])) == whole[:2]
    assert next(styles(everyone[3:4])) == whole[3]
    others = [Series(f"layer {i}", (), ()) for i in range(20)]
    assert len({(s.colour, s.dashes, s.marker) for s in styles(others)}) == 20


def test_the_same_data_gives_the_same_bytes() -> None:
    chart = charts(some_found())["final-accuracy-split-cifar100-paper"]
    assert drawn(chart) == drawn(chart)


def test_several_processes_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    some = list(charts(some_found()).values())[:4]
    alone = list(drawing.all_drawn(some))
    assert alone == [drawn(chart) for chart in some]
    monkeypatch.setattr(drawing, "EACH", 2)
    monkeypatch.setattr(drawing, "_cores", lambda: 2)
    assert list(drawing.all_drawn(some)) == alone
