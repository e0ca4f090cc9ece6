"""The preset `best`: beside the best that is published, and beside other methods as well tuned."""

import statistics
from collections.abc import Iterator, Mapping

from recorded import Found, Wanted, pairs, percent, recorded
from table_parts import texts

from trgp.engine.config import configure
from trgp.methods import METHODS
from trgp.report.tables.superclass import NAME as SUPERCLASS
from trgp.results.layout import NONE, chance, points, spread
from trgp.results.paired import p_value
from trgp.results.result import Results

PUBLISHED_BEST: Mapping[str, tuple[str, float]] = {
    "pmnist": ("CUBER, NeurIPS 2022", 97.25),
    "split-cifar100": ("Dual-Stage GP, withdrawn from ICLR 2026", 78.05),
    SUPERCLASS: ("API, CVPR 2023", 60.2),
    "five-datasets": ("API, CVPR 2023", 91.1),
}
"""The best that is published with the same data and network, and no stored samples."""


def beyond(found: Found) -> str:
    """TRGP's preset `best` beside `paper`, networks of their own and the best that is published."""
    rows = []
    for benchmark, (who, best) in PUBLISHED_BEST.items():
        # What is published on the superclasses is of scrambled pixels, as that preset's data.
        usual = "official" if benchmark == SUPERCLASS else "paper"
        for method, preset in (("trgp", "best"), ("trgp", usual), ("single", usual)):
            results = recorded(found, Wanted(benchmark, method, preset))
            if results is None:
                figures = (NONE, "not run", NONE, NONE, NONE)
            else:
                run = results[0]
                figures = (
                    str(len(results)),
                    spread(results.acc),
                    f"{percent(results) - best:+.2f}",
                    spread(results.bwt),
                    f"{run.state_bytes / run.network_bytes:.1f}",
                )
            rows.append(
                (benchmark, method, preset, *figures[:2], f"{best:.2f} ({who})", *figures[2:])
            )
    header = (
        *("benchmark", "method", "preset", "seeds", "ACC %", "best published", "ACC - published"),
        *("BWT %", "held, in networks"),
    )
    return texts(header, rows)


def tuned(found: Found) -> str:
    """TRGP's preset `best` against the better of every other method's `paper` and `best`."""
    header = (
        *("benchmark", "method", "ACC %, paper", "ACC %, best", "BWT %, paper", "BWT %, best"),
        *("common seeds", "TRGP's best - the better", "p"),
    )
    rows: list[tuple[str, ...]] = []
    for benchmark in PUBLISHED_BEST:
        trgp = recorded(found, Wanted(benchmark, "trgp", "best"))
        if trgp is not None and _others_were_searched(benchmark):
            rows += _against_others(found, benchmark, trgp)
    return texts(header, rows)


def _others_were_searched(benchmark: str) -> bool:
    """Whether their `best` is another than `paper`: else nothing is as well tuned as TRGP."""
    return any(
        configure(benchmark, method, "best").settings != configure(benchmark, method).settings
        for method in METHODS
        if method != "trgp"
    )


def _against_others(found: Found, benchmark: str, trgp: Results) -> Iterator[tuple[str, ...]]:
    for method in METHODS:
        sides = [recorded(found, Wanted(benchmark, method, each)) for each in ("paper", "best")]
        there = [side for side in sides if side is not None]
        if method == "trgp" or not there:
            continue
        both = pairs(max(there, key=percent), trgp)
        gap = statistics.fmean(after - before for before, after in both) if both else None
        p = p_value([before for before, _ in both], [after for _, after in both])
        yield (
            *(benchmark, method),
            *("not run" if side is None else spread(side.acc) for side in sides),
            *(NONE if side is None else spread(side.bwt) for side in sides),
            *(str(len(both)), points(gap, "+"), chance(p)),
        )
