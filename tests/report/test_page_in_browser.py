"""The page as a reader has it: by mouse, by keyboard, in the dark and on paper."""

import base64
from collections.abc import Callable
from typing import Any

import pytest
from page_driver import PageDriver
from some_found import a_configuration
from some_reports import (
    BENCHMARKS,
    HOSTILE,
    METHODS,
    a_hostile_report,
    a_large_report,
    a_report,
    a_report_of_some_cells,
)

from trgp.report.build import build
from trgp.report.model import Report
from trgp.results.store import Found

pytest.importorskip("selenium")
from selenium.webdriver.common.keys import Keys

pytestmark = pytest.mark.slow

Opened = Callable[[Report], PageDriver]


def test_it_opens_from_the_disk(opened: Opened) -> None:
    report = a_report()
    page = opened(report)
    assert page.driver.title == report.title == page.text("h1")
    for sentence in (*report.summary, *report.problems):
        assert sentence in page.text("#summary")
    assert not page.one("#progress").is_displayed()
    for chart in report.charts:
        if chart.name != "matrix-trgp":  # which shares a place with another
            assert page.figure(chart.title).find_elements("css selector", "svg")
    assert page.requests() == [page.origin]


def test_headings_sort(opened: Opened) -> None:
    page = opened(a_report())
    came = page.column("main", 3)
    heading = 'th:nth-child(4) [data-key="main by 3"]'
    ordered = sorted(came, key=lambda text: float(text.split()[0]))
    for sort, expected in (
        ("descending", ordered[::-1]),
        ("ascending", ordered),
        ("none", came),
    ):
        page.one(heading).click()
        assert page.column("main", 3) == expected
        assert page.one("th:nth-child(4)").get_attribute("aria-sort") == sort
    page.one('[data-key="main by 1"]').click()
    assert page.column("main", 1) == sorted(page.column("main", 1))


def test_headings_sort_by_keyboard(opened: Opened) -> None:
    page = opened(a_report())
    page.focus('[data-key="main by 3"]')
    page.press(Keys.ENTER)
    assert page.one("th:nth-child(4)").get_attribute("aria-sort") == "descending"
    assert page.focused().get_attribute("data-key") == "main by 3"
    page.press(Keys.SPACE)
    assert page.one("th:nth-child(4)").get_attribute("aria-sort") == "ascending"
    page.press(Keys.TAB)
    assert page.focused().get_attribute("data-key") == "main by 4"


def test_tables_and_figures_show_what_is_chosen(opened: Opened) -> None:
    page = opened(a_report())
    page.choose("select[name=benchmark]", BENCHMARKS[1])
    assert set(page.column("main", 0)) == {BENCHMARKS[1]}
    assert "6 of 12 rows are shown." in page.text("#tables")
    assert [f.get_attribute("aria-label") for f in page.all("figure:not([hidden])")] == [
        "A line with a gap"
    ]
    page.choose("select[name=preset]", "official")
    assert page.column("main", 1) == list(METHODS)
    page.one('[data-key="choice of gpm"]').send_keys(Keys.SPACE)
    assert page.column("main", 1) == ["finetune", "trgp"]
    page.one('[data-key="main by 3"]').click()
    assert page.column("main", 1) == ["trgp", "finetune"]
    for select in ("benchmark", "preset"):
        page.choose(f"select[name={select}]", "")
    assert len(page.column("main", 0)) == 8
    lines = page.figure("Accuracy while learning")
    assert len(strokes(lines)) == 2
    page.one('[data-key="all methods"]').click()
    assert len(page.column("main", 0)) == 12


def test_series_are_switched_off_and_on(opened: Opened) -> None:
    page = opened(a_report())
    before = strokes(page.figure("Accuracy while learning"))
    assert len(set(before)) == 3
    chip = '[data-key="lines / gpm"]'
    page.focus(chip)
    page.press(Keys.ENTER)
    assert page.one(chip).get_attribute("aria-pressed") == "false"
    assert page.focused().get_attribute("data-key") == "lines / gpm"
    left = strokes(page.figure("Accuracy while learning"))
    assert len(left) == 2
    assert set(left) < set(before)  # the others keep their colours
    page.press(Keys.ENTER)
    assert strokes(page.figure("Accuracy while learning")) == before


def test_figures_of_one_method_each_are_switched(opened: Opened) -> None:
    page = opened(a_report())
    page.figure("Accuracy matrix of gpm")
    page.choose('figure[aria-label="Accuracy matrix of gpm"] select', "matrix-trgp")
    switched = page.figure("Accuracy matrix of trgp")
    assert page.focused().get_attribute("aria-label") == "Method"
    assert switched.find_elements("css selector", "svg")
    page.one('[data-key="choice of trgp"]').send_keys(Keys.SPACE)
    page.figure("Accuracy matrix of gpm")


@pytest.mark.parametrize(
    ("title", "mark", "says"),
    [
        ("Accuracy by method", "[aria-label=bar] rect", ["finetune", "ACC, %: 35.10 ± 1"]),
        ("Final accuracy", "[aria-label=bar] rect", ["finetune", "ACC, %: 35.10 ± 1"]),
        ("Time by phase", "[aria-label=bar] rect", ["training", "time, s: 1"]),
        ("Accuracy while learning", "[aria-label=dot] circle", ["finetune", "tasks learnt: 1"]),
        ("Accuracy against memory", "[aria-label=dot] circle", ["finetune", "35.10 ± 1"]),
        ("Accuracy matrix of gpm", "[aria-label=cell] rect", ["after 1", "task 1", "99"]),
        ("Trusted tasks", "[aria-label=cell] rect", ["layer 0", "task 2", "1"]),
    ],
)
def test_the_mouse_reads_values(opened: Opened, title: str, mark: str, says: list[str]) -> None:
    page = opened(a_report())
    figure = page.figure(title)
    page.hover(figure.find_elements("css selector", mark)[0])
    tip = "return arguments[0].querySelector('[aria-label=tip]').textContent"
    page.until(lambda: bool(page.js(tip, figure)), title)
    for part in says:
        assert part in page.js(tip, figure)
    page.hover(page.one("h1"))
    page.until(lambda: not page.js(tip, figure), title)


def test_values_are_there_without_a_mouse(opened: Opened) -> None:
    page = opened(a_report())
    page.figure("Accuracy while learning")
    page.focus('[data-key="values of lines"]')
    page.press(Keys.ENTER)
    table = page.one('table[aria-label="Values of Accuracy while learning"]')
    assert table.text.splitlines()[:2] == [
        "tasks learnt finetune gpm trgp",
        "1 87 ± 0.50 88 ± 0.50 89 ± 0.50",
    ]
    page.one('[data-key="lines / gpm"]').click()
    table = page.one('table[aria-label="Values of Accuracy while learning"]')
    assert table.text.splitlines()[0] == "tasks learnt finetune trgp"
    assert page.figure("A line with a gap").find_elements("css selector", "svg[aria-label]")


def test_a_number_tells_what_repeats_it(opened: Opened) -> None:
    page = opened(a_report())
    number = page.focus('[aria-labelledby="table-main"] td:nth-child(4) button')
    page.press(Keys.ENTER)
    assert page.one("dialog").is_displayed()
    assert "finetune on permuted-digits (paper)" in page.text("#command-title")
    command = "trgp run permuted-digits --method finetune --preset paper --seeds 5"
    assert page.text("#command-text") == command
    assert page.text("#command-says") == "This command repeats it:"
    assert page.focused().get_attribute("id") == "command-copy"
    page.press(Keys.ENTER)
    page.until(lambda: page.text("#command-copied") != "", "copied")
    page.press(Keys.ESCAPE)
    assert not page.one("dialog").is_displayed()
    assert page.focused() == number
    page.one('[aria-labelledby="table-tests"] td button').click()
    assert page.text("#command-note") == "A paired test."
    assert not page.one("#command-text").is_displayed()
    page.one("#command-close").click()
    assert not page.one("dialog").is_displayed()


def test_what_is_not_run_is_shown_when_asked_for(opened: Opened) -> None:
    page = opened(a_report_of_some_cells())
    assert page.column("main", 1) == ["gpm"]
    assert "1 of 3 rows are shown." in page.text("#tables")
    assert page.column("other", 3) == ["not run"] * 2  # where there is nothing else
    assert page.all('[data-key="choice of pnn"]') == []
    box = '[data-key="main, what is not run"]'
    page.focus(box)
    page.press(Keys.SPACE)
    assert page.column("main", 1) == ["gpm", "trgp", "pnn"]
    assert page.focused().get_attribute("data-key") == "main, what is not run"
    page.one('[aria-labelledby="table-main"] tr:nth-child(2) td:nth-child(4) button').click()
    assert page.text("#command-says") == "This command runs it:"
    assert page.text("#command-text") == "trgp run x"
    page.press(Keys.ESCAPE)
    page.one(box).click()
    assert page.column("main", 1) == ["gpm"]
    # Of a benchmark that has nothing else there is no choice to make.
    page.choose("select[name=benchmark]", BENCHMARKS[1])
    assert page.column("main", 1) == ["pnn"]
    assert page.all(box) == []


def test_every_control_is_reached_and_seen_by_keyboard(opened: Opened) -> None:
    page = opened(a_report(charts=()))
    visited = []
    for _ in range(60):
        page.press(Keys.TAB)
        at = page.focused()
        if at.tag_name == "body":
            break
        name = at.get_attribute("id") or at.get_attribute("data-key") or at.get_attribute("href")
        visited.append(str(name))
        around = at.find_element("xpath", "..") if at.tag_name == "input" else at
        assert around.value_of_css_property("outline-style") != "none", name
    assert visited[0].endswith("#content")
    expected = ["theme", "choice of benchmark", "choice of preset", "choice of finetune"]
    expected += ["all methods", "main by 0", "main by 5", "tests by 1"]
    assert [name for name in visited if name in expected] == expected
    assert sum(name.startswith("main / ") for name in visited) == 12


def test_light_and_dark(opened: Opened) -> None:
    page = opened(a_report())
    figure = page.figure("Accuracy while learning")

    def brightness() -> tuple[float, float]:
        line = figure.find_elements("css selector", "[aria-label=line] path")[0]
        colours = [
            page.one("body").value_of_css_property("background-color"),
            line.value_of_css_property("stroke"),
        ]
        canvas = (
            "const c = document.createElement('canvas').getContext('2d');"
            "c.fillStyle = arguments[0]; c.fillRect(0, 0, 1, 1);"
            "const [r, g, b] = c.getImageData(0, 0, 1, 1).data; return (r + g + b) / 765"
        )
        return page.js(canvas, colours[0]), page.js(canvas, colours[1])

    page.media(prefers_color_scheme="light")
    light = brightness()
    page.media(prefers_color_scheme="dark")
    dark = brightness()
    assert light[0] > 0.9
    assert dark[0] < 0.2
    assert dark[1] > light[1]
    page.choose("#theme", "light")
    assert brightness() == light
    page.media(prefers_color_scheme="light")
    page.choose("#theme", "dark")
    assert brightness() == dark
    page.media(media="print")
    assert brightness()[0] == 1


def test_on_paper_everything_is_drawn(opened: Opened) -> None:
    page = opened(a_report())
    printed = page.driver.execute_cdp_cmd("Page.printToPDF", {})
    assert base64.b64decode(printed["data"]).startswith(b"%PDF")
    assert len(page.all("figure svg")) == len(page.all("figure")) == 8
    page.media(media="print")
    for selector in ("#choices", "nav", "#theme", "figure details"):
        assert not page.one(selector).is_displayed()


def test_a_narrow_window_scrolls_tables_alone(opened: Opened) -> None:
    page = opened(a_report())
    page.driver.set_window_size(500, 800)
    page.figure("Accuracy while learning")
    page.until(
        lambda: page.js(
            "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        ),
        "no wider than the window",
    )


def test_hostile_names_stay_text(opened: Opened) -> None:
    page = opened(a_hostile_report())
    for figure in page.all("figure"):
        page.js("arguments[0].scrollIntoView({block: 'center'})", figure)
        page.until(lambda f=figure: bool(f.find_elements("css selector", "svg")))
        marks = figure.find_elements("css selector", "svg rect, svg circle")
        if marks:
            page.hover(marks[0])
        page.js("arguments[0].querySelector('summary').click()", figure)
    for button in page.all("td button"):
        page.js("arguments[0].click()", button)
        assert page.text("#command-text") == HOSTILE
        page.press(Keys.ESCAPE)
    assert page.driver.title == HOSTILE
    assert page.text("h1") == HOSTILE
    assert HOSTILE in page.text("#summary")
    assert "{{data}}" in page.text("#summary")
    assert page.all("img") == []
    assert len(page.all("script")) == 4


def test_odd_results_are_shown(opened: Opened) -> None:
    """Hostile names, very long ones, a user's own data, one task, one seed, and nothing held."""
    one: Any = {"accuracy_matrix": [[0.5]], "selected": [{}], "seeds": 1}
    found = Found(
        [
            a_configuration(HOSTILE, benchmark=HOSTILE, preset=HOSTILE, command=HOSTILE),
            a_configuration("n" * 300, benchmark="/data/my set.npz", device="d" * 300),
            a_configuration("gone", benchmark="old", state_bytes=0, ranks={}, **one),
            a_configuration("gpm", benchmark="my.npz", ranks={HOSTILE: [1, 2, 3]}, seconds=[]),
            a_configuration("trgp", benchmark="my.npz", selected=[], curves=[]),
        ],
        [HOSTILE],
    )
    page = opened(build(found))
    for figure in page.all("figure"):
        page.js("arguments[0].scrollIntoView({block: 'center'})", figure)
        page.until(lambda f=figure: bool(f.find_elements("css selector", "svg")))
    assert HOSTILE in page.text("#summary")
    assert HOSTILE in page.column("memory", 0)
    assert page.all("img") == []
    assert page.driver.title == build(found).title
    page.driver.set_window_size(500, 800)
    width = "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    page.until(lambda: page.js(width), "no wider than the window")


def test_many_runs_are_shown_quickly(opened: Opened) -> None:
    page = opened(a_large_report(500))
    page.until(lambda: len(page.all("tbody tr")) == 600, "unpacked")
    timing = "const t = performance.timing; return t.domContentLoadedEventEnd - t.navigationStart"
    assert page.js(timing) < 10_000  # milliseconds, on a slow machine
    assert len(page.all("figure svg")) < 20  # the others wait until they come into view


def test_nothing_at_all(opened: Opened) -> None:
    page = opened(Report("Nothing", ("No run is finished.",)))
    assert page.text("#summary") == "No run is finished."
    assert not page.one("#tables").is_displayed()
    assert not page.one("#figures").is_displayed()


def strokes(figure: Any) -> list[str]:
    """The colours of a figure's lines."""
    paths = figure.find_elements("css selector", "[aria-label=line] path")
    return [path.value_of_css_property("stroke") for path in paths]
