"""The paper's claims, each tested over seeds wherever the record has what it takes."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from recorded import Found, Wanted, pairs, recorded

from trgp.benchmarks import PAPER
from trgp.report import cells
from trgp.report.model import Row, Table
from trgp.report.paired_marks import LEVEL
from trgp.report.published import ABLATION
from trgp.results.layout import NONE, chance, points
from trgp.results.paired import p_value

Verdict = Literal["holds", "does not hold", "undecided", "not run"]
VERDICTS: tuple[Verdict, ...] = ("holds", "does not hold", "undecided", "not run")
NEAR = 0.01
"""BWT above minus this counts as near zero, and a change of ACC below it as none."""
PRESETS = ("paper", "official")
ABLATED = ("pmnist", *ABLATION)
"""The benchmarks that the paper varies the trust region on, and before them one that is cheap."""

ABOVE_GPM = "TRGP is above GPM on every benchmark"
LAYER_WISE = "layer-wise trust regions are above task-wise ones"
TOP_2 = "K = 2 is above K = 1"
EPSILON = "ACC hardly depends on epsilon"
BWT = "TRGP's BWT is near zero"


class Outcome(NamedTuple):
    """A difference over seeds against the bound that decides."""

    bound: float
    p: float | None
    """Of a two-sided t-test of the differences against the bound; None without a test."""
    verdict: Verdict


class Evidence(NamedTuple):
    """One claim on one benchmark with one preset."""

    claim: str
    benchmark: str
    preset: str
    compared: str
    means: tuple[float, ...]
    """Of what is compared, over the seeds that both have."""
    gaps: Sequence[float]
    """By seed: the differences that the claim is about."""
    paper: float | None
    """The paper's difference, in points."""
    outcome: Outcome | None
    """None where the record lacks a side."""

    @property
    def verdict(self) -> Verdict:
        return "not run" if self.outcome is None else self.outcome.verdict


Judge = Callable[[Sequence[float]], Outcome]


def above(gaps: Sequence[float]) -> Outcome:
    """Holds where the differences are above zero."""
    return _outcome(gaps, 0.0, lambda mean: mean > 0)


def near_zero(gaps: Sequence[float]) -> Outcome:
    """Holds where they are above -NEAR."""
    return _outcome(gaps, -NEAR, lambda mean: mean > -NEAR)


def unchanged(gaps: Sequence[float]) -> Outcome:
    """Holds where they are shown to lie within NEAR of zero, on the side where they are."""
    bound = math.copysign(NEAR, statistics.fmean(gaps)) if gaps else NEAR
    return _outcome(gaps, bound, lambda mean: abs(mean) < NEAR)


def _outcome(gaps: Sequence[float], bound: float, holds: Callable[[float], bool]) -> Outcome:
    p = p_value([bound] * len(gaps), gaps)
    if p is None or p >= LEVEL:
        return Outcome(bound, p, "undecided")
    return Outcome(bound, p, "holds" if holds(statistics.fmean(gaps)) else "does not hold")


def evidence(found: Found) -> Iterator[Evidence]:
    """All of them, also those that the record cannot decide yet."""
    for preset in PRESETS:
        for benchmark, paper in PAPER.items():
            gpm, trgp = (Wanted(benchmark, method, preset) for method in ("gpm", "trgp"))
            gap = paper["trgp"].acc - paper["gpm"].acc
            yield _test(found, ABOVE_GPM, gpm, trgp, "trgp - gpm", gap, above)
    for benchmark in ABLATED:
        other = ("scope", "task")
        yield _ablation(found, LAYER_WISE, benchmark, other, "layer-wise - task-wise")
    for benchmark in ABLATED:
        yield _ablation(found, TOP_2, benchmark, ("top_k", 1), "top 2 - top 1")
    for benchmark in ABLATED:
        for epsilon in (0.2, 0.7):
            usual = Wanted(benchmark, "trgp")
            changed = usual._replace(changes={"epsilon": epsilon})
            printed = printed_change(benchmark, ("epsilon", epsilon))
            compared = f"epsilon {epsilon} - 0.5"
            yield _test(found, EPSILON, usual, changed, compared, printed, unchanged)
    for preset in PRESETS:
        for benchmark, paper in PAPER.items():
            yield _bwt(found, benchmark, preset, paper["trgp"].bwt)


def _ablation(
    found: Found, claim: str, benchmark: str, other: tuple[str, Any], compared: str
) -> Evidence:
    usual = Wanted(benchmark, "trgp")
    changed = usual._replace(changes=dict([other]))
    printed = printed_change(benchmark, other)
    gap = None if printed is None else -printed
    return _test(found, claim, changed, usual, compared, gap, above)


def printed_change(benchmark: str, other: tuple[str, Any]) -> float | None:
    """What a changed setting is worth by the paper, where it prints that."""
    printed = ABLATION.get(benchmark, {})
    # Compared, not looked up: a value may be a list.
    return next((acc - printed[None] for key, acc in printed.items() if key == other), None)


def _test(
    found: Found,
    claim: str,
    before: Wanted,
    after: Wanted,
    compared: str,
    paper: float | None,
    judge: Judge,
) -> Evidence:
    sides = recorded(found, before), recorded(found, after)
    both = pairs(*sides)
    gaps = [y - x for x, y in both]
    means = tuple(statistics.fmean(side) for side in zip(*both, strict=True))[::-1]
    outcome = None if None in sides else judge(gaps)
    return Evidence(claim, after.benchmark, after.preset, compared, means, gaps, paper, outcome)


def _bwt(found: Found, benchmark: str, preset: str, paper: float | None) -> Evidence:
    results = recorded(found, Wanted(benchmark, "trgp", preset))
    gaps = [run.bwt for run in results or () if run.bwt is not None]
    means = (statistics.fmean(gaps),) if gaps else ()
    outcome = None if results is None else near_zero(gaps)
    return Evidence(BWT, benchmark, preset, "BWT", means, gaps, paper, outcome)


def evidence_table(found: Found) -> Table:
    """Every test with its numbers."""
    columns = (
        *("claim", "benchmark", "preset", "compared", "seeds", "means %", "difference"),
        *("paper's", "tested against", "p", "verdict"),
    )
    return Table("evidence", "", columns, tuple(_row(test) for test in evidence(found)))


def _row(test: Evidence) -> Row:
    names = (test.claim, test.benchmark, test.preset, test.compared)
    paper = NONE if test.paper is None else f"{test.paper:+.2f}"
    if test.outcome is None:
        figures = (NONE, NONE, NONE, paper, NONE, NONE)
    else:
        figures = (
            str(len(test.gaps)),
            " and ".join(map(points, test.means)) or NONE,
            points(statistics.fmean(test.gaps), "+") if test.gaps else NONE,
            paper,
            f"{100 * test.outcome.bound:g}",
            chance(test.outcome.p),
        )
    return Row(tuple(map(cells.text, (*names, *figures, test.verdict))))


def claim_table(found: Found) -> Table:
    """Every claim with each preset, and how many of its tests came out how."""
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for test in evidence(found):
        groups.setdefault((test.claim, test.preset), []).append(test.verdict)
    rows = []
    for names, came_out in groups.items():
        counts = [came_out.count(verdict) for verdict in VERDICTS]
        shown = (cells.number(count, str(count)) for count in counts)
        rows.append(Row((*map(cells.text, (*names, together(came_out))), *shown)))
    columns = ("claim", "preset", "verdict", *(f"tests: {verdict}" for verdict in VERDICTS))
    return Table("claims", "", columns, tuple(rows))


def together(verdicts: Sequence[Verdict]) -> str:
    """What several tests say: one that fails is enough against a claim, none is enough for it."""
    run = [verdict for verdict in verdicts if verdict != "not run"]
    if not run:
        return "not run"
    for verdict in ("does not hold", "undecided"):
        if verdict in run:
            return verdict
    return "holds" if len(run) == len(verdicts) else "holds where run"
