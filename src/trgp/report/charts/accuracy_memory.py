"""ACC against the memory of a method, the network not counted."""

import statistics

from ..groups import Group
from ..model import Chart, Series
from ..naming import clean, described, file_name
from .means import deviation, mean

UNITS = ("B", "KiB", "MiB", "GiB")


def accuracy_memory(group: Group) -> Chart:
    """Describe one point per method, in the unit that suits the largest."""
    held = [statistics.fmean(run.state_bytes for run in results) for results in group.members]
    power = 0
    while power + 1 < len(UNITS) and max(held) >= 10 * 1024 ** (power + 1):
        power += 1
    points = []
    for results, count in zip(group.members, held, strict=True):
        accs = [run.acc for run in results]
        error = (deviation(accs),) if len(accs) > 1 else ()
        method = clean(results[0].method)
        points.append(Series(method, (count / 1024**power,), (mean(accs),), error, method))
    return Chart(
        file_name("accuracy-memory", group.benchmark, group.preset, group.label),
        "ACC against memory held: " + described(group.benchmark, group.preset, group.changes),
        "points",
        f"held beside the network, {UNITS[power]}",
        "ACC, %",
        tuple(points),
        clean(group.benchmark),
        preset=clean(group.preset),
        note="Memory after the last task; the network itself is not counted.",
    )
