"""Runs that end with the same weights to the bit.

Which settings change nothing, what it is worth to measure more often, and what it is worth that the
last digits of a sum are others.
"""

import statistics

from recorded import Found, Wanted, changes_of, pairs, recorded
from table_parts import texts

from trgp.report.groups import by_benchmark
from trgp.results.layout import chance, points, settings
from trgp.results.paired import p_value
from trgp.results.result import Results

PRESETS = {"paper": 10, "official": 1}
"""On CIFAR-100 Split, with as many test passes as the other has."""
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
        if len(alike) > 1 and alike[0] is results:
            names = [settings(changes_of(each[0])) or "as it is" for each in alike]
            seeds = set.intersection(*({run.seed for run in each} for each in alike))
            rows.append((*_named(results), "; ".join(names), str(len(seeds))))
    header = ("benchmark", "method", "preset", "settings that end alike", "seeds in common")
    return texts(header, rows) if rows else NONE_YET


def passes(found: Found) -> str:
    """Seed by seed, ACC of the same weights in one pass over the test set and in several."""
    rows = []
    for preset in PRESETS:
        once, often = sorted(_twice(found, preset), key=_passes) or (None, None)
        for one, several in pairs(once, often):
            rows.append((preset, points(one), points(several), points(several - one, "+")))
    header = ("preset", "ACC %, one pass", "ACC %, ten passes", "change of ACC")
    return texts(header, rows) if rows else NONE_YET


def rounding(found: Found) -> str:
    """ACC of the presets, and of the same steps whose sums are taken in another order."""
    rows = []
    for preset in PRESETS:
        again = next(iter(_twice(found, preset)), None)
        both = pairs(recorded(found, _preset(preset)), again)
        if both:
            gaps = [after - before for before, after in both]
            means = [points(statistics.fmean(side)) for side in zip(*both, strict=True)]
            changes = ", ".join(points(gap, "+") for gap in gaps)
            p = chance(p_value([0.0] * len(gaps), gaps))
            mean = points(statistics.fmean(gaps), "+")
            rows.append((preset, str(len(both)), *means, changes, mean, p))
    header = (
        *("preset", "seeds", "ACC %, as recorded", "ACC %, later kernels", "changes by seed"),
        *("mean change", "p"),
    )
    return texts(header, rows) if rows else NONE_YET


def against_later(found: Found) -> str:
    """What one changed setting is worth against the preset's steps by later kernels."""
    rows = []
    for preset in PRESETS:
        again = next(iter(_twice(found, preset)), None)
        for results in found:
            changes = changes_of(results[0])
            varied = _named(results) == _preset(preset)[:3] and len(changes) == 1
            if again is not None and varied and not same_weights(again, results):
                gaps = [after - before for before, after in pairs(again, results)]
                told = f"{preset} with {settings(changes)}"
                p = chance(p_value([0.0] * len(gaps), gaps))
                rows.append((told, str(len(gaps)), points(statistics.fmean(gaps), "+"), p))
    return texts(("setting", "seeds", "change of ACC", "p"), rows) if rows else NONE_YET


def _twice(found: Found, preset: str) -> list[Results]:
    """A preset's steps measured in as many passes as it has, and in as many as the other has.

    The latter are its steps by what was asked; the former are what ended with the same weights.
    """
    other = recorded(found, _preset(preset)._replace(changes={"test_passes": PRESETS[preset]}))
    if other is None:
        return []
    alike = [results for results in _alike(found, other) if _passes(results) != _passes(other)]
    return [max(alike, key=len), other] if alike else []


def _alike(found: Found, one: Results) -> list[Results]:
    """What comes to its weights with the same preset, itself among them."""
    return [other for other in found if _named(other) == _named(one) and same_weights(one, other)]


def _named(results: Results) -> tuple[str, str, str]:
    return results[0].benchmark, results[0].method, results[0].preset


def _preset(name: str) -> Wanted:
    return Wanted("split-cifar100", "trgp", name)


def _passes(results: Results) -> int:
    count: int = results[0].config.get("test_passes", 1)
    return count
