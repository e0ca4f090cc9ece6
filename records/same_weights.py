"""Runs that end with the same weights to the bit.

Which settings change nothing, what it is worth to measure more often, and what another engine is,
whose sums and masks of dropout are others.
"""

import statistics
from collections.abc import Sequence

from claims import printed_change
from recorded import Found, Wanted, changes_of, pairs, recorded
from table_parts import texts

from trgp.report.groups import by_benchmark
from trgp.results.layout import NONE, chance, points, settings
from trgp.results.paired import p_value
from trgp.results.result import Results

BENCHMARK = "split-cifar100"
PRESETS = {"paper": 10, "official": 1}
"""There, with as many test passes as the other has."""
NONE_YET = "None are recorded."


def same_weights(one: Results, other: Results) -> bool:
    """Whether their runs from the same seeds, of which there are some, end with the same bits."""
    ends = {run.seed: run.digest for run in one}
    both = [(ends[run.seed], run.digest) for run in other if run.seed in ends]
    return bool(both) and all(a == b != "" for a, b in both)


def same_ends(found: Found) -> str:
    """The configurations of a preset that come to the same weights, where there are several."""
    rows = []
    for results in by_benchmark(found):
        alike = _alike(found, results)
        seeds = set.intersection(*({run.seed for run in each} for each in alike or [results]))
        if len(alike) > 1 and alike[0] is results and seeds:
            names = [settings(changes_of(each[0])) or "as it is" for each in alike]
            rows.append((*_named(results), "; ".join(names), str(len(seeds))))
    header = ("benchmark", "method", "preset", "settings that end alike", "seeds in common")
    return texts(header, rows) if rows else NONE_YET


def passes(found: Found) -> str:
    """Seed by seed, ACC of the same weights in one pass over the test set and in several."""
    rows = []
    for preset in PRESETS:
        again, other = _later(found, preset)
        once, often = (again, other) if PRESETS[preset] > 1 else (other, again)
        for one, several in pairs(once, often):
            rows.append((preset, points(one), points(several), points(several - one, "+")))
    header = ("preset", "ACC %, one pass", "ACC %, ten passes", "change of ACC")
    return texts(header, rows) if rows else NONE_YET


def another_engine(found: Found) -> str:
    """ACC of the presets, and of the same steps by a later engine."""
    rows = []
    for preset in PRESETS:
        again, _ = _later(found, preset)
        both = pairs(recorded(found, _preset(preset)), again)
        if both:
            gaps = [after - before for before, after in both]
            means = [points(statistics.fmean(side)) for side in zip(*both, strict=True)]
            changes = ", ".join(points(gap, "+") for gap in gaps)
            mean = points(statistics.fmean(gaps), "+")
            rows.append((preset, str(len(both)), *means, changes, mean, _chance(gaps, 0.0)))
    header = (
        *("preset", "seeds", "ACC %, as recorded", "ACC %, later engine", "changes by seed"),
        *("mean change", "p"),
    )
    return texts(header, rows) if rows else NONE_YET


def against_later(found: Found) -> str:
    """What one changed setting is worth against the preset's steps by a later engine."""
    rows = []
    for preset in PRESETS:
        again, _ = _later(found, preset)
        for results in found:
            changes = changes_of(results[0])
            varied = _named(results) == _preset(preset)[:3] and len(changes) == 1
            if again is None or not varied or same_weights(again, results):
                continue
            gaps = [after - before for before, after in pairs(again, results)]
            told = f"{preset} with {settings(changes)}"
            mean = points(statistics.fmean(gaps), "+")
            (change,) = changes.items()
            paper = printed_change(BENCHMARK, change) if preset == "paper" else None
            beside = (NONE, NONE)
            if paper is not None:
                beside = f"{paper:+.2f}", _chance(gaps, paper / 100)
            rows.append((told, str(len(gaps)), mean, _chance(gaps, 0.0), *beside))
    header = ("setting", "seeds", "change of ACC", "p", "paper's change", "p against that")
    return texts(header, rows) if rows else NONE_YET


def _chance(gaps: Sequence[float], bound: float) -> str:
    return chance(p_value([bound] * len(gaps), gaps))


def _later(found: Found, preset: str) -> tuple[Results, Results] | tuple[None, None]:
    """A preset's steps by the engine of the runs that measure as often as the other preset does.

    These take the same steps by what they were asked. Beside them what ended with the same weights
    and measures as the preset does, from the seeds that show it: a setting that was changed alone,
    and changed nothing.
    """
    other = recorded(found, _preset(preset)._replace(changes={"test_passes": PRESETS[preset]}))
    if other is None:
        return None, None
    seeds = {run.seed for run in other}
    for results in _alike(found, other):
        if results[0].config.get("test_passes", 1) != PRESETS[preset]:
            return Results(tuple(run for run in results if run.seed in seeds)), other
    return None, None


def _alike(found: Found, one: Results) -> list[Results]:
    """What comes to its weights with the same preset, itself among them."""
    return [other for other in found if _named(other) == _named(one) and same_weights(one, other)]


def _named(results: Results) -> tuple[str, str, str]:
    return results[0].benchmark, results[0].method, results[0].preset


def _preset(name: str) -> Wanted:
    return Wanted(BENCHMARK, "trgp", name)
