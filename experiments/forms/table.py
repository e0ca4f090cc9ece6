"""Prints the tables of results.jsonl in Markdown, and which forms do best.

python experiments/forms/table.py [results.jsonl]
"""

import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from run import HERE, read, search_cells
from settings import BENCHMARKS, FORMS, SEARCH_SEED, Cell

NAMES = {
    "gpm": "GPM",
    "q": "Q in the optimizer",
    "paper": "paper",
    "range": "range",
    "union": "union",
    "full": "full",
}
Records = Mapping[Cell, Mapping[str, Any]]
ADAPTIVE = ("paper", "range", "union", "full")  # the forms to choose from


def name_of(optimizer: str, form: str) -> str:
    """A form as the tables call it; under SGD Q and paper are one row."""
    return "paper = Q" if (optimizer, form) == ("sgd", "paper") else NAMES[form]


def final(records: Records, benchmark: str, optimizer: str, form: str) -> list[Mapping[str, Any]]:
    """The runs on test data, seed by seed."""
    wanted = (benchmark, optimizer, form)
    return sorted(
        (r for c, r in records.items() if c[:3] == wanted and c.seed != SEARCH_SEED),
        key=lambda r: int(r["seed"]),
    )


def _row(records: Records, benchmark: str, optimizer: str, form: str) -> str:
    runs = final(records, benchmark, optimizer, form)
    ended = [r for r in runs if r["acc"] is not None]
    name = name_of(optimizer, form)
    search = search_cells(benchmark, optimizer, form)
    lost = sum(records[c]["acc"] is None for c in search if c in records)
    if not ended:
        missing = sum(c not in records for c in search)
        return f"| {name} | {missing} of {len(search)} rates missing, {lost} diverged | | | | | | |"
    acc, learnt, bwt, kib, ranks = (
        [r[key] if key != "ranks" else sum(r[key]) for r in ended]
        for key in ("acc", "learnt", "bwt", "kib", "ranks")
    )
    spread = f" ± {stdev(acc):.1f}" if len(acc) > 1 else ""
    lrs = BENCHMARKS[benchmark].rates[optimizer]
    lr = ended[0]["lr"]
    edge = "*" if lr in (lrs[0], lrs[-1]) else ""
    rate = f" × {ended[0]['scale_rate']:g}" if form in ("q", "paper") else ""
    seeds = f"{len(ended)} of {len(runs)}" if len(ended) < len(runs) else f"{len(ended)}"
    return (
        f"| {name} | {mean(acc):.1f}{spread} | {mean(learnt):.1f} | {mean(bwt):+.1f} | "
        f"{mean(kib):.1f} | {mean(ranks):.0f} | {lr:g}{edge}{rate} | {seeds}, {lost} |"
    )


def table(records: Records, benchmark: str, optimizer: str) -> str:
    """One benchmark under one optimizer."""
    head = "| form | ACC % | A_ii | BWT | KiB per task | ranks | rate (× Q's) | seeds, diverged |"
    rows = [_row(records, benchmark, optimizer, form) for form in FORMS[optimizer]]
    return "\n".join([f"### {benchmark}, {optimizer}", "", head, "|---" * 8 + "|", *rows])


def differences(records: Records, optimizer: str) -> str:
    """Every form's ACC less that of range, seed by seed: mean, and its standard error."""
    head = ["| form less range |", *(f" {name} |" for name in BENCHMARKS)]
    lines = ["".join(head), "|---" * (len(BENCHMARKS) + 1) + "|"]
    for form in FORMS[optimizer]:
        if form == "range":
            continue
        cells = []
        for benchmark in BENCHMARKS:
            runs: defaultdict[int, dict[str, float]] = defaultdict(dict)
            for each in (form, "range"):
                for r in final(records, benchmark, optimizer, each):
                    if r["acc"] is not None:
                        runs[r["seed"]][each] = r["acc"]
            both = [by[form] - by["range"] for by in runs.values() if len(by) == 2]
            error = f" ± {stdev(both) / len(both) ** 0.5:.1f}" if len(both) > 1 else ""
            cells.append(f"{mean(both):+.1f}{error}" if both else "")
        lines.append(f"| {name_of(optimizer, form)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def sentence(records: Records, optimizer: str) -> str:
    """Which form has the best mean over benchmarks, and by how much over the next."""
    means: dict[str, float] = {}
    measured = [b for b in BENCHMARKS if final(records, b, optimizer, "range")]
    for form in ADAPTIVE:
        by_benchmark = [
            [r["acc"] for r in final(records, b, optimizer, form) if r["acc"] is not None]
            for b in measured
        ]
        if measured and all(by_benchmark):
            means[form] = mean(mean(accs) for accs in by_benchmark)
    if not means:
        return f"Under {optimizer} no form has been measured to its end."
    order = sorted(means, key=lambda form: -means[form])
    listed = ", ".join(f"{name_of(optimizer, form)} {means[form]:.1f}" for form in order)
    best = name_of(optimizer, order[0])
    return (
        f"Under {optimizer}, over {', '.join(measured)}, mean ACC is: {listed}. "
        f"The default is [{best}?], because [...]; it holds [...] KiB per task beside [...]."
    )


def main() -> None:
    records = read(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results.jsonl")
    for benchmark in BENCHMARKS:
        for optimizer in FORMS:
            print(table(records, benchmark, optimizer), end="\n\n")
    for optimizer in FORMS:
        print(f"### {optimizer}: difference to range\n\n{differences(records, optimizer)}\n")
        print(sentence(records, optimizer), end="\n\n")
    cells = [c for c in records if c.seed == SEARCH_SEED]
    print(f"{len(cells)} runs of the search, {len(records) - len(cells)} on test data; * marks a")
    print("rate at the end of its grid. Seconds are those of processes that shared a machine.")


if __name__ == "__main__":
    main()
