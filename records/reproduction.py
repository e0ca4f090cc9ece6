"""The tables of docs/reproduction.md: the paper's figures beside those of the records.

Each is made of the results alone, and what has none is shown as not run.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePosixPath

import claims
from beyond import beyond, tuned
from five_datasets import five_datasets, trusted
from overhead import overhead
from recorded import Found, Wanted, changes_of, of_sweep, percent, recorded
from same_weights import against_later, another_engine, passes, same_ends
from table_parts import figure, noted, papers_acc, texts, with_missing, without
from trust_regions import gate, latest

from trgp.benchmarks import PAPER
from trgp.benchmarks.common import Published
from trgp.engine.sweeps.lists import BOTH
from trgp.report import cells
from trgp.report.commands import commands_of
from trgp.report.devices import device_of
from trgp.report.groups import by_benchmark, varied
from trgp.report.markdown import escaped, rows_markdown
from trgp.report.model import Cell, Row, Table
from trgp.report.paired_marks import LEVEL
from trgp.report.published import CAPACITY, TIME
from trgp.report.tables.ablation import Changed, ablation, is_ablation
from trgp.report.tables.main import papers_and_gaps
from trgp.report.tables.memory import memory
from trgp.report.tables.quirks import is_quirk, quirks
from trgp.report.tables.superclass import NAME as SUPERCLASS
from trgp.report.tables.superclass import superclass
from trgp.report.tables.training_time import training_time
from trgp.report.tables.transfer import transfer
from trgp.results.layout import NONE, chance, duration, settings, shown, spread
from trgp.results.paired import unpaired
from trgp.results.render import paper_of, preset_of
from trgp.results.result import Result, Results
from trgp.results.store import run_folder

RUNS = PurePosixPath("../records/runs")  # as the page links to it
SWEEPS = ("paper", "quirks", "ablation")
PROJECTION = ("gpm", "trgp")
PUBLISHED = 5  # runs that a published figure is the mean of, as the paper says of its own
FAR = 2.0  # points from the published ACC beyond which a difference asks for an experiment
NOTHING = "Nothing of it is run."

Flag = Callable[[Published, float], str]
"""What to say of an ACC in per cent beside the published one."""


# ---- what is recorded -----------------------------------------------------------------------


def coverage(found: Found) -> str:
    """How much of each sweep is recorded, and the time that it took."""
    rows = []
    for name in SWEEPS:
        cells_of = list(of_sweep(name))
        runs = [[r for r in recorded(found, w) or () if r.seed < n] for w, n in cells_of]
        whole = sum(len(here) == n for here, (_, n) in zip(runs, cells_of, strict=True))
        every = [run for here in runs for run in here]
        rows.append(
            (
                f"trgp sweep {name}",
                f"{whole} of {len(cells_of)}",
                f"{len(every)} of {sum(n for _, n in cells_of)}",
                duration(sum(map(_seconds, every))) if every else NONE,
                "; ".join(sorted({device_of(run) for run in every})) or NONE,
            )
        )
    header = ("command", "configurations with all seeds", "runs", "time of the runs", "device")
    return texts(header, rows)


# ---- beside the published figures -----------------------------------------------------------


def reproduced(found: Found) -> str:
    """GPM and TRGP with both presets: is the mean within one published standard deviation?"""
    wanted = [w for w, _ in of_sweep("paper") if w.benchmark in BOTH and w.method in PROJECTION]
    return rows_markdown(_beside(found, wanted, "within one published std", _within))


def others(found: Found) -> str:
    """All other methods, and which are far from the published figure."""
    wanted = [w for w, _ in of_sweep("paper") if w.benchmark in BOTH and w.method not in PROJECTION]
    return rows_markdown(_beside(found, wanted, f"more than {FAR:g} points off", _far))


def variants(found: Found) -> str:
    """Of presets and single quirks, which come to the published figure."""
    rows = []
    for benchmark in BOTH:
        for method in PROJECTION:
            paper = PAPER[benchmark][method]
            here = {
                _name(results[0]): percent(results)
                for results in found
                if _is_variant(results[0], benchmark, method)
            }
            inside = [name for name, acc in here.items() if _within(paper, acc) == "yes"]
            nearest = min(here, key=lambda name: abs(here[name] - paper.acc), default=None)
            rows.append(
                (
                    benchmark,
                    method,
                    cells.percent(paper.acc, paper.std).text,
                    str(len(here)),
                    "; ".join(inside) or ("none" if here else "not run"),
                    nearest or NONE,
                    NONE if nearest is None else f"{here[nearest] - paper.acc:+.2f}",
                )
            )
    header = (
        *("benchmark", "method", "paper's ACC", "variants recorded"),
        *("within one published std", "nearest", "ACC - paper"),
    )
    return texts(header, rows)


def samples(found: Found) -> str:
    """GPM on PMNIST as published, by how many samples a task's bases are computed from."""
    return _by_setting(found, "pmnist", "samples")


def thresholds(found: Found) -> str:
    """GPM on CIFAR-100 as published, by the share of energy that a first task's bases hold."""
    return _by_setting(found, "split-cifar100", "threshold")


def _by_setting(found: Found, benchmark: str, setting: str) -> str:
    """GPM as published, by one of its settings."""
    paper = PAPER[benchmark]["gpm"]
    here = [
        results
        for results in found
        if _place(results[0]) == (benchmark, "gpm", "official")
        and changes_of(results[0]).keys() <= {setting}
    ]
    rows = []
    for results in sorted(here, key=lambda r: (r[0].config[setting], r[0].seed)):
        acc, acc_gap, bwt, _ = papers_and_gaps(paper, results)
        rows.append(
            Row(
                (
                    cells.text(shown(results[0].config[setting])),
                    cells.text(f"{results[0].seed} to {results[-1].seed}"),
                    *(cells.share(results.acc), acc, acc_gap, _by_chance(paper, results)),
                    Cell(_within(paper, percent(results))),
                    *(cells.share(results.bwt), bwt, cells.share(results.mean_diagonal)),
                )
            )
        )
    columns = (
        *(setting, "seeds", "ACC %", "paper's ACC", "ACC - paper", "p"),
        *("within one published std", "BWT %", "paper's BWT", "average A_ii %"),
    )
    return rows_markdown(Table("", "", columns, tuple(rows)))


def _beside(found: Found, wanted: Iterable[Wanted], title: str, flag: Flag) -> Table:
    columns = (
        *("benchmark", "method", "preset", "seeds", "ACC %", "paper's ACC", "ACC - paper", "p"),
        *(title, "BWT %", "paper's BWT", "BWT - paper"),
    )
    return Table("", "", columns, tuple(_row(found, each, flag) for each in wanted))


def _row(found: Found, wanted: Wanted, flag: Flag) -> Row:
    names = [cells.text(text) for text in wanted[:3]]
    paper = PAPER[wanted.benchmark].get(wanted.method)
    results = recorded(found, wanted)
    if results is None:
        printed = (None, None, None) if paper is None else paper
        figures = (
            *(cells.EMPTY, cells.not_run(*wanted), cells.percent(*printed[:2])),
            *(cells.EMPTY, cells.EMPTY, cells.EMPTY, cells.EMPTY),
            *(cells.rounded(printed[2]), cells.EMPTY),
        )
        return Row((*names, *figures), *wanted[:3], not_run=True)
    acc, acc_gap, bwt, bwt_gap = papers_and_gaps(paper, results)
    said = cells.EMPTY if paper is None else Cell(flag(paper, percent(results)))
    figures = (
        *(cells.seeds(results), cells.share(results.acc), acc, acc_gap, _by_chance(paper, results)),
        *(said, cells.share(results.bwt), bwt, bwt_gap),
    )
    return Row((*names, *figures), *wanted[:3])


def _by_chance(paper: Published | None, results: Results) -> Cell:
    """How often two groups of runs of one and the same thing would lie so far apart."""
    own = results.acc
    if paper is None or paper.std is None or own.std is None:
        return cells.EMPTY
    p = unpaired(percent(results), 100 * own.std, len(results), paper.acc, paper.std, PUBLISHED)
    return cells.number(p, chance(p))


def _within(paper: Published, acc: float) -> str:
    if paper.std is None:
        return NONE
    # Rounded, so that an ACC on the edge is not outside by a float's last bit.
    return "yes" if round(abs(acc - paper.acc) - paper.std, 9) <= 0 else "no"


def _far(paper: Published, acc: float) -> str:
    return "yes" if abs(acc - paper.acc) > FAR else "no"


def _is_variant(run: Result, benchmark: str, method: str) -> bool:
    named = (run.benchmark, run.method) == (benchmark, method)
    return named and (paper_of(run) is not None or is_quirk(run))


def _name(run: Result) -> str:
    changes = changes_of(run)
    return f"{run.preset} with {settings(changes)}" if changes else run.preset


# ---- quirks and ablations -------------------------------------------------------------------


def quirk_tables(found: Found) -> str:
    """Every quirk alone and every one removed, by benchmark, and which are told from no change.

    Data has tables of its own: it alone makes no table here.
    """
    always = [(benchmark, "trgp") for benchmark in BOTH]
    changed = [r[0] for r in found if is_quirk(r[0]) and varied(r[0])]
    shown = {*always, *((run.benchmark, run.method) for run in changed)}
    parts = []
    for benchmark in PAPER:
        here = [r for r in found if r[0].benchmark == benchmark and _place(r[0])[:2] in shown]
        table = quirks(here, [names for names in always if names[0] == benchmark])
        if table.rows:
            told = [_told(table, side) for side in ("paper with it alone", "official without it")]
            parts += [f"### {benchmark}", rows_markdown(without(table, "benchmark")), *told]
    return "\n\n".join(parts)


def _told(table: Table, side: str) -> str:
    """A sentence on the quirks of one side."""
    shown: dict[str, list[str]] = {"told": [], "not told": [], "without a test": []}
    for row in table.rows:
        by_column = dict(zip(table.columns, row.cells, strict=True))
        change, p = by_column[f"{side}: change of ACC"], by_column[f"{side}: p"].value
        if change.value is not None:
            kind = "without a test" if p is None else "told" if p < LEVEL else "not told"
            shown[kind].append(f"{row.method}'s {by_column['quirk'].text} ({change.text})")
    if not any(shown.values()):
        return f"{side.capitalize()}: no quirk can be judged yet."
    told = "; ".join(shown.pop("told")) or "none"
    rest = "".join(
        f" {kind.capitalize()}: {'; '.join(each)}." for kind, each in shown.items() if each
    )
    return escaped(f"{side.capitalize()}, told from no change at 5 %: {told}.{rest}")


def ablations(found: Found) -> str:
    """Of the preset paper, and of others where something of them is ablated."""
    ablated = {_place(results[0]) for results in found if is_ablation(results[0])}
    wanted: dict[str, list[Changed]] = {}
    for each, _ in of_sweep("ablation"):
        wanted.setdefault(each.benchmark, []).extend(each.changes.items())
    here = [
        results
        for results in _on_papers(found)
        if results[0].preset == "paper" or _place(results[0]) in ablated
    ]
    return noted(ablation(here, wanted))


def _place(run: Result) -> tuple[str, str, str]:
    return run.benchmark, run.method, run.preset


# ---- superclasses ---------------------------------------------------------------------------


def superclasses(found: Found) -> str:
    """With both presets, accuracy beside what is kept for it."""
    wanted = [each for each, _ in of_sweep("paper") if each.benchmark == SUPERCLASS]
    printed: Mapping[str, Callable[[Wanted], Cell]] = {
        "ACC %": lambda each: cells.not_run(*each),
        "paper's ACC": papers_acc,
        "paper's capacity %": lambda each: figure(CAPACITY.get(each.method), ".0f"),
    }
    return noted(with_missing(superclass(found), found, wanted, printed))


# ---- transfer, time and memory --------------------------------------------------------------


def transfers(found: Found) -> str:
    """A_ii by benchmark."""
    made = list(transfer(_on_papers(found)))
    parts = [
        part for table in made for part in (f"### {escaped(table.title)}", rows_markdown(table))
    ]
    ran = {row.benchmark for table in made for row in table.rows}
    lacking = [benchmark for benchmark in PAPER if benchmark not in ran]
    if lacking:
        parts.append(f"Not run: {', '.join(lacking)}.")
    return "\n\n".join(parts)


def times(found: Found) -> str:
    """Training time, also of what the paper gives one for and is not run."""
    wanted = [Wanted(benchmark, method) for benchmark in TIME for method in TIME[benchmark]]
    printed: Mapping[str, Callable[[Wanted], Cell]] = {
        "training": lambda each: cells.not_run(*each),
        "paper's": lambda each: figure(TIME[each.benchmark][each.method], ".2f"),
    }
    table = training_time(_on_papers(found))
    return noted(with_missing(table, found, wanted, printed))


def held(found: Found) -> str:
    """What methods hold beside the network."""
    table = memory(_on_papers(found))
    return noted(table) if table.rows else NOTHING


# ---- every cell -----------------------------------------------------------------------------


def index(found: Found) -> str:
    """Every recorded configuration: what repeats it, where it lies, what it took."""
    header = ("benchmark", "method", "preset", "seeds", "ACC %", "time", "device", "repeated by")
    lines = [header, ("---",) * 3 + ("---:",) * 3 + ("---",) * 2]
    for results in by_benchmark(found):
        run = results[0]
        folder = run_folder("", run.benchmark, run.method, run.preset, run.changed, 0).parent
        lines.append(
            (
                escaped(run.benchmark),
                escaped(run.method),
                f"[{escaped(preset_of(run))}]({RUNS / folder.as_posix()})",
                str(len(results)),
                spread(results.acc),
                duration(sum(map(_seconds, results))),
                escaped("; ".join(sorted({run.device for run in results}))),
                "<br>".join(map(_code, commands_of(results))),
            )
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if found else NOTHING


def _code(command: str) -> str:
    barred = command.replace("|", r"\|")
    return f"`{barred}`"


TABLES: Mapping[str, Callable[[Found], str]] = {
    "coverage": coverage,
    "reproduced": reproduced,
    "samples": samples,
    "thresholds": thresholds,
    "variants": variants,
    "claims": lambda found: rows_markdown(claims.claim_table(found)),
    "evidence": lambda found: rows_markdown(claims.evidence_table(found)),
    "quirks": quirk_tables,
    "same_ends": same_ends,
    "passes": passes,
    "another_engine": another_engine,
    "against_later": against_later,
    "others": others,
    "superclass": superclasses,
    "five_datasets": five_datasets,
    "ablation": ablations,
    "beyond": beyond,
    "tuned": tuned,
    "transfer": transfers,
    "time": times,
    "overhead": overhead,
    "memory": held,
    "latest": latest,
    "gate": gate,
    "trusted": trusted,
    "index": index,
}


def _on_papers(found: Found) -> list[Results]:
    return [results for results in found if results[0].benchmark in PAPER]


def _seconds(run: Result) -> float:
    return sum(sum(task.values()) for task in run.seconds)
