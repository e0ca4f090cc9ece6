"""Writes the tables of README and docs from the records, between their markers.

Run it after new records; with --check it changes nothing and fails where a table is out of date.
"""

import argparse
import itertools
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from trgp.results.metrics import Spread
from trgp.results.result import Results
from trgp.results.store import find

RECORDS = Path(__file__).parent
PAGES = [RECORDS.parent / "README.md", RECORDS.parent / "docs" / "native-form.md"]


def embedded() -> str:
    """Every method on the two benchmarks that need no download."""
    rows = []
    for results in sorted(find(RECORDS / "runs").results, key=_place):
        run = results[0]
        held = statistics.mean(r.state_bytes / r.network_bytes for r in results)
        figures = [_spread(spread) for spread in (results.acc, results.bwt)]
        rows.append([run.benchmark, run.method, str(len(results)), *figures, f"{held:.1f}"])
    header = ["benchmark", "method", "seeds", "ACC %", "BWT %", "held, in copies of the network"]
    return _table(header, rows)


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


TABLES = {"embedded": embedded, "steps": steps, "bases": bases}


def _bench(wanted: Callable[[str], bool]) -> dict[str, dict[str, float]]:
    lines = json.loads((RECORDS / "bench-core.json").read_text())["lines"]
    groups = itertools.groupby(lines, lambda line: line["setting"])
    found = {s: {line["contender"]: line["relative"] for line in group} for s, group in groups}
    return {setting: relative for setting, relative in found.items() if wanted(setting)}


def _place(results: Results) -> tuple[str, float]:
    return results[0].benchmark, -(results.acc.mean or 0)


def _spread(figure: Spread) -> str:
    if figure.mean is None or figure.std is None:
        return "–"
    return f"{100 * figure.mean:.1f} ± {100 * figure.std:.1f}"


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether all are up to date")
    args = parser.parse_args()
    for page in PAGES:
        text = page.read_text()
        if args.check and filled(text) != text:
            sys.exit(f"{page.name} is not what the records say; run python records/tables.py.")
        page.write_text(filled(text))


if __name__ == "__main__":
    main()
