"""Reports made by hand, a hostile one and a large one among them, for the tests of the page."""

import random
from dataclasses import replace
from typing import Any

from trgp.report.model import Cell, Chart, Report, Row, Series, Table

BENCHMARKS = ("permuted-digits", "split-digits")
METHODS = ("finetune", "gpm", "trgp")
HOSTILE = (
    "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='t'\">"
)


def a_row(benchmark: str, method: str, preset: str, acc: float, **marks: Any) -> Row:
    command = f"trgp run {benchmark} --method {method} --preset {preset} --seeds 5"
    names = (Cell(benchmark), Cell(method), Cell(preset))
    numbers = (
        Cell(f"{acc:.2f} ± 0.50", acc, commands=(command,), **marks),
        Cell("–"),
        Cell(f"{acc / 4:.1f} s", acc / 4),
    )
    return Row(names + numbers, benchmark, method, preset)


def a_table(rows: tuple[Row, ...], name: str = "main", **more: Any) -> Table:
    columns = ("benchmark", "method", "preset", "ACC %", "BWT %", "time")
    return Table(name, f"Table {name}", columns, rows, **more)


def charts() -> tuple[Chart, ...]:
    """One of every kind."""
    tasks = tuple(range(1, 6))
    fall = {m: tuple(90.0 - (3 - i) * t for t in tasks) for i, m in enumerate(METHODS)}
    places = dict(zip(METHODS, (35.1, 69.2, 94.9), strict=True))
    of = BENCHMARKS[0]
    return (
        Chart(
            "final",
            "Final accuracy",
            "bars",
            "",
            "ACC, %",
            tuple(Series(m, ("ACC", "A_ii"), (v, v / 2), (1.0, 2.0), m) for m, v in places.items()),
            of,
        ),
        Chart(
            "bars-alone",
            "Accuracy by method",
            "bars",
            "method",
            "ACC, %",
            tuple(Series(m, (m,), (v,), (1.0,), m) for m, v in places.items()),
            of,
        ),
        Chart(
            "lines",
            "Accuracy while learning",
            "lines",
            "tasks learnt",
            "accuracy, %",
            tuple(Series(m, tasks, y, (0.5,) * 5, m) for m, y in fall.items()),
            of,
            boundaries=((2.5, "task 1"), (4.5, "task 2")),
            note="A note on the lines.",
        ),
        Chart(
            "gaps",
            "A line with a gap",
            "lines",
            "epoch",
            "accuracy, %",
            (Series("trgp", (1, 2, 3, 4), (10.0, None, 30.0, 40.0), method="trgp"),),
            BENCHMARKS[1],
        ),
        *(
            Chart(
                f"matrix-{m}",
                f"Accuracy matrix of {m}",
                "heat",
                "task",
                "accuracy, %",
                tuple(
                    Series(
                        f"after {i}",
                        tasks,
                        tuple(99.0 - 3 * (i - j) if j <= i else None for j in tasks),
                    )
                    for i in tasks
                ),
                of,
                method=m,
            )
            for m in METHODS[1:]
        ),
        Chart(
            "chosen",
            "Trusted tasks",
            "grid",
            "task",
            "",
            tuple(Series(f"layer {i}", (1, 2, 3), (None, 1.0, 2.0)) for i in range(3)),
            of,
            method="trgp",
            texts=(("", "1", "1, 2"),) * 3,
        ),
        Chart(
            "time",
            "Time by phase",
            "stacked",
            "method",
            "time, s",
            tuple(
                Series(p, METHODS, (3.0 * k + 1, 2.0, 4.0))
                for k, p in enumerate(("training", "bases"))
            ),
            of,
        ),
        Chart(
            "memory",
            "Accuracy against memory",
            "points",
            "memory, copies",
            "ACC, %",
            tuple(
                Series(m, (0.4 * i,), (v,), (1.0,), m) for i, (m, v) in enumerate(places.items())
            ),
            of,
        ),
    )


def a_report(**changes: Any) -> Report:
    """Two benchmarks, three methods and two presets, with one of every figure."""
    rows = tuple(
        a_row(b, m, preset, 30.0 + 10 * i + 3 * j + k, mark="best" if m == "trgp" else "")
        for i, b in enumerate(BENCHMARKS)
        for j, m in enumerate(METHODS)
        for k, preset in enumerate(("paper", "official"))
    )
    noted = Row((Cell("p", note="A paired test."), Cell("0.01", 0.01)))
    other = Table("tests", "Paired tests", ("what", "p"), (noted,), note="Over five seeds.")
    fields: dict[str, Any] = {
        "title": "What the runs came to",
        "summary": ("Twelve configurations of 60 runs.", "TRGP is the best."),
        "tables": (a_table(rows, note="The best is bold."), other),
        "charts": charts(),
        "problems": ("runs/a/result.json is damaged; repeat the run.",),
    }
    return Report(**fields | changes)


def a_report_of_some_cells() -> Report:
    """A table of which most is not run, and one of which nothing is."""
    run = a_row(BENCHMARKS[0], "gpm", "paper", 50.0)
    missing = tuple(
        Row((*(Cell(name) for name in names), Cell("not run", commands=("trgp run x",))), *names)
        for names in ((BENCHMARKS[0], "trgp", "paper"), (BENCHMARKS[1], "pnn", "paper"))
    )
    lacking = tuple(
        replace(row, cells=(*row.cells, Cell("–"), Cell("–")), not_run=True) for row in missing
    )
    return a_report(tables=(a_table((run, *lacking)), a_table(lacking, "other")), charts=())


def a_hostile_report() -> Report:
    """Every text is one that a careless page would run."""
    row = Row(
        tuple(Cell(HOSTILE, commands=(HOSTILE,), note=HOSTILE) for _ in range(2)),
        *(HOSTILE,) * 3,
    )
    table = Table(HOSTILE, HOSTILE, (HOSTILE, HOSTILE), (row,), HOSTILE)
    series = (Series(HOSTILE, (HOSTILE, "\ud800"), (1.0, float("nan")), (0.5, 0.5), HOSTILE),)
    drawn = tuple(
        Chart(
            f"{HOSTILE}{kind}",
            HOSTILE,
            kind,
            HOSTILE,
            HOSTILE,
            series,
            HOSTILE,
            preset=HOSTILE,
            texts=((HOSTILE, HOSTILE),),
            note=HOSTILE,
            boundaries=((1.0, HOSTILE),) if kind == "heat" else (),
        )
        for kind in ("bars", "lines", "heat", "grid", "stacked", "points")
    )
    return Report(HOSTILE, (HOSTILE, "{{data}}"), (table,), drawn, (HOSTILE,))


def a_large_report(runs: int = 500, seeds: int = 5, epochs: int = 1000) -> Report:
    """As large as that of so many runs: tables, curves and a matrix of every configuration."""
    draw = random.Random(0)
    configurations = runs // seeds
    rows, drawn = [], []
    for c in range(configurations):
        benchmark, method = f"benchmark-{c % 5}", f"method-{c // 5}"
        rows.append(a_row(benchmark, method, "paper", draw.uniform(0, 100)))
        x = tuple(range(1, epochs + 1))
        curve = tuple(draw.uniform(0, 100) for _ in x)
        drawn.append(
            Chart(
                f"curve-{c}",
                "Validation",
                "lines",
                "epoch",
                "accuracy, %",
                (Series(method, x, curve),),
                benchmark,
                method,
                boundaries=((epochs + 0.5, "task 1"),),
            )
        )
        tasks = tuple(range(1, 21))
        drawn.append(
            Chart(
                f"matrix-{c}",
                "Matrix",
                "heat",
                "task",
                "accuracy, %",
                tuple(
                    Series(str(i), tasks, tuple(draw.uniform(0, 100) for _ in tasks)) for i in tasks
                ),
                benchmark,
                method,
            )
        )
    single = tuple(
        a_row(f"benchmark-{r % 5}", f"method-{r // 25}", "paper", draw.uniform(0, 100))
        for r in range(runs)
    )
    tables = (a_table(tuple(rows)), a_table(single, "runs"))
    return Report("Many runs", (f"{runs} runs.",), tables, tuple(drawn))
