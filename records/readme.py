"""Writes the tables and figures of README and docs from the records.

Tables stand between their markers, figures in docs/figures. Run it after new records; with --check
it changes nothing and fails where something is out of date.
"""

import argparse
import itertools
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import reproduction
from overlaps import overlaps
from recorded import Wanted, changes_of, recorded

from trgp.benchmarks import entry
from trgp.engine.config import defaults
from trgp.files import write_text
from trgp.methods import find as find_method
from trgp.report import cells as report_cells
from trgp.report.charts import charts
from trgp.report.checksum import checksum
from trgp.report.devices import device_of
from trgp.report.markdown import rows_markdown
from trgp.report.model import Cell, Chart, Mark, Row, Table
from trgp.report.paired_marks import verdicts
from trgp.results.metrics import Spread
from trgp.results.render import paper_of
from trgp.results.result import Result, Results
from trgp.results.store import find

RECORDS = Path(__file__).parent
DOCS = RECORDS.parent / "docs"
PAGES = [
    RECORDS.parent / "README.md",
    RECORDS.parent / "docs" / "results.md",
    *(DOCS / f"{name}.md" for name in ("native-form", "engine", "reproduction")),
]
FIGURES = {
    DOCS / "figures" / "forgetting.svg": "evolution-task-1-permuted-digits-paper",
    DOCS / "figures" / "memory.svg": "accuracy-memory-permuted-digits-paper",
}
"""By their file what they are called in a report."""
EMBEDDED = ("permuted-digits", "split-digits")
TOLD = "task known in the test"
HELD = "held, in copies of the network"


def embedded() -> str:
    """Every method on the two benchmarks that need no download."""
    rows = []
    found = sorted((r for r in _found() if r[0].benchmark in EMBEDDED), key=_place)
    for _, grouped in itertools.groupby(found, lambda results: results[0].benchmark):
        group = list(grouped)
        for results, verdict in zip(group, verdicts(group, lambda run: run.acc), strict=True):
            run = results[0]
            held = statistics.mean(r.state_bytes / r.network_bytes for r in results)
            made = (
                Cell(run.benchmark),
                Cell(run.method),
                _told(run),
                Cell(str(len(results)), len(results)),
                _spread(results.acc, verdict.mark),
                _spread(results.bwt),
                Cell(f"{held:.1f}", held),
            )
            rows.append(Row(made))
    header = ("benchmark", "method", TOLD, "seeds", "ACC %", "BWT %", HELD)
    return rows_markdown(Table("embedded", "", header, tuple(rows)))


def front() -> str:
    """A few methods on one benchmark, for the first page."""
    shown = ("trgp", "gpm", "er", "ewc", "finetune")
    rows = []
    for method in shown:
        (results,) = (
            r for r in _found() if (r[0].benchmark, r[0].method) == ("permuted-digits", method)
        )
        held = statistics.mean(run.state_bytes / run.network_bytes for run in results)
        cells = (_spread(results.acc), _spread(results.bwt), Cell(f"{held:.1f}", held))
        rows.append(Row((Cell(method), _told(results[0]), *cells)))
    return rows_markdown(Table("front", "", ("method", TOLD, "ACC %", "BWT %", HELD), tuple(rows)))


def papers() -> str:
    """The presets on the papers' own benchmarks, beside what the TRGP paper prints.

    What other methods' `best` scores stands beside TRGP's, on the page of the record.
    """
    rows = []
    for results in sorted((r for r in _found() if _is_papers(r[0])), key=_place):
        run, printed = results[0], paper_of(results[0])
        cells = [_spread(figure, digits=2) for figure in (results.acc, results.bwt)]
        if printed is not None:
            cells += [_printed(printed.acc, printed.std), _printed(printed.bwt, None)]
        else:
            cells += [Cell("–"), Cell("–")]
        names = [Cell(text) for text in (run.benchmark, run.method, run.preset)]
        rows.append(Row((*names, _told(run), Cell(str(len(results))), *cells)))
    header = ("benchmark", "method", "preset", TOLD, "seeds")
    figures = ("ACC %", "BWT %", "paper's ACC", "BWT")
    return rows_markdown(Table("papers", "", (*header, *figures), tuple(rows)))


def _is_papers(run: Result) -> bool:
    of_others = run.preset == "best" and run.method != "trgp"
    return run.benchmark not in EMBEDDED and not changes_of(run) and not of_others


def _told(run: Result) -> Cell:
    """Whether the network is told in the test which task a sample is of: by a head of the task's
    own, or because the method computes each task by weights of its own."""
    own = find_method(run.method).about.task_id_at_test
    return Cell("yes" if own or entry(run.benchmark).separate_heads else "no")


def _printed(value: float | None, std: float | None) -> Cell:
    if value is None:
        return Cell("–")
    return Cell(f"{value:g}" if std is None else f"{value:g} ± {std:g}", value)


def steps() -> str:
    """A training step relative to plain SGD, and what the native form saves."""
    by_setting = _bench(lambda setting: "bases" not in setting)
    names = [name for name in next(iter(by_setting.values())) if name != "plain SGD"]
    rows = []
    for setting, relative in by_setting.items():
        saved = relative["TRGP, dense (as published)"] / relative["TRGP, native"]
        rows.append([setting, *(f"{relative[name]:.1f}" for name in names), f"{saved:.0f}"])
    return _table(["step time / plain SGD", *names, "dense / native"], rows)


def bases() -> str:
    """A task's bases from the Gram matrix against the SVD of R."""
    by_setting = _bench(lambda setting: "bases" in setting)
    rows = [[s.partition(", ")[2], f"{r['SVD of R']:.1f}"] for s, r in by_setting.items()]
    return _table(["AlexNet layer", "time of the SVD / time of Gram + eigh"], rows)


def engine() -> str:
    """Milliseconds per run-step on a GPU."""
    record = json.loads((RECORDS / "bench-engine.json").read_text())
    runs = record["runs"]
    rows = []
    for net, row in record["nets"].items():
        ms = {m: row[f"{m}, {runs}"]["ms"] for m in ("SGD", "GPM", "TRGP", "TRGP literal")}
        ratios = [ms[m] / ms["SGD"] for m in ("GPM", "TRGP")]
        alone = row["TRGP, 1"]["ms"]
        times = [row["published"], row["target"], *ms.values(), alone, row["dense"]]
        bases_and_selection = row["bases, s"] + row["selection, s"]
        cells = [f"{t:.3g}" for t in times] + [f"{r:.2f}" for r in ratios]
        rows.append([net, *cells, f"{bases_and_selection:.2f}"])
    header = ["ms per run-step", "published TRGP", "target", "SGD", "GPM", "TRGP", "TRGP literal"]
    header += ["TRGP, one run", "dense, eager", "GPM / SGD", "TRGP / SGD", "bases and selection, s"]
    return _table(header, rows)


def _of_records(make: Callable[[list[Results]], str]) -> Callable[[], str]:
    return lambda: make(_found())


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _explained(experiment: str) -> str:
    """What moves the methods that miss their published figures."""
    record = json.loads((RECORDS / f"explain-{experiment}.json").read_text())
    rows = []
    for cell in record["cells"]:
        told = ("method", "acc", "bwt", "a_ii")
        own = [f"{key} {_shown(value)}" for key, value in cell.items() if key not in told]
        found = [cell[key] for key in ("acc", "bwt", "a_ii")]
        figures = ["diverged" if value is None else f"{100 * value:.2f}" for value in found]
        rows.append([cell["method"], ", ".join(own), *figures])
    return _table(["method", "setting", "ACC %", "BWT %", "average A\\_ii %"], rows)


def _with(folder: str, make: Callable[[list[Results]], str]) -> Callable[[], str]:
    """Also of results that no sweep asks for: `more` settings and seeds, whole `jobs` for time."""
    return lambda: make([*_found(), *find(RECORDS / folder, defaults).results])


def precision() -> str:
    """What rounding the network's own products does to TRGP, against the same seeds in float32."""
    columns = (
        *("benchmark", "precision", "device", "float32's device", "seeds", "ACC %", "change", "p"),
        "BWT %",
    )
    rows = []
    for results in find(RECORDS / "precision", defaults).results:
        run = results[0]
        plain = recorded(_found(), Wanted(run.benchmark, run.method, run.preset))
        made = (
            Cell(run.benchmark),
            Cell(run.config["precision"]),
            Cell(device_of(run)),
            Cell("–" if plain is None else device_of(plain[0])),
            Cell(str(len(results))),
            report_cells.share(results.acc),
            *report_cells.gap_and_p(plain, results, lambda run: run.acc),
            report_cells.share(results.bwt),
        )
        rows.append(Row(made, run.benchmark, run.method))
    return rows_markdown(Table("", "", columns, tuple(rows)))


TABLES = {
    "front": front,
    "embedded": embedded,
    "papers": papers,
    "steps": steps,
    "bases": bases,
    "engine": engine,
}
TABLES |= {name: _of_records(make) for name, make in reproduction.TABLES.items()}
TABLES |= {
    "samples": _with("more", reproduction.samples),
    "thresholds": _with("more", reproduction.thresholds),
    "overhead": _with("jobs", reproduction.TABLES["overhead"]),
    "explained_pmnist": lambda: _explained("pmnist"),
    "explained_cifar": lambda: _explained("split-cifar100"),
    "explained_short": lambda: _explained("split-cifar100-short"),
    "overlaps": overlaps,
    "precision": precision,
}


def _bench(wanted: Callable[[str], bool]) -> dict[str, dict[str, float]]:
    lines = json.loads((RECORDS / "bench-core.json").read_text())["lines"]
    groups = itertools.groupby(lines, lambda line: line["setting"])
    found = {s: {line["contender"]: line["relative"] for line in group} for s, group in groups}
    return {setting: relative for setting, relative in found.items() if wanted(setting)}


@cache
def _found() -> list[Results]:
    return find(RECORDS / "runs", defaults).results


def _place(results: Results) -> tuple[str, float]:
    return results[0].benchmark, -(results.acc.mean or 0)


def _spread(figure: Spread, mark: Mark = "", digits: int = 1) -> Cell:
    if figure.mean is None:
        return Cell("–")
    mean = round(100 * figure.mean, digits) + 0.0  # no -0
    spread = "" if figure.std is None else f" ± {100 * figure.std:.{digits}f}"
    return Cell(f"{mean:.{digits}f}{spread}", mean, mark)


def _table(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def filled(text: str) -> str:
    """The page with a fresh table between every `<!-- table NAME -->` and `<!-- end -->`."""
    return re.sub(
        r"(<!-- table (\w+) -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}",
        text,
        flags=re.DOTALL,
    )


def figures() -> Iterator[tuple[Path, Chart]]:
    """Every figure's file, and what it is to show."""
    by_name = {chart.name: chart for chart in charts(_found())}
    for path, name in FIGURES.items():
        yield path, by_name[name]


def out_of_date() -> list[str]:
    """The names of pages and figures that the records have left behind.

    A figure is asked for the checksum of its data, since another matplotlib draws other bytes.
    """
    pages = [page.name for page in PAGES if filled(page.read_text()) != page.read_text()]
    return pages + [
        path.name
        for path, chart in figures()
        if not path.exists() or checksum(chart) not in path.read_text()
    ]


def write() -> None:
    from trgp.report.draw import drawn

    for page in PAGES:
        write_text(page, filled(page.read_text()))
    for path, chart in figures():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(drawn(chart)["svg"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether all are up to date")
    if not parser.parse_args().check:
        write()
    elif stale := out_of_date():
        sys.exit(f"Not what the records say: {', '.join(stale)}; run make readme.")


if __name__ == "__main__":
    main()
