"""Layer-wise against task-wise trust regions: the final accuracy on every task."""

from collections.abc import Iterator, Sequence

from ...results.result import Results
from ..groups import as_presets, by_benchmark, data_of, varied
from ..model import Chart
from ..naming import clean, described, file_name
from .means import over_seeds, series, tasks


def scopes(found: Sequence[Results]) -> Iterator[Chart]:
    """Yield a figure for each pair of layer-wise and task-wise results, with GPM if stored."""
    usual = {_key(results): results for results in as_presets(found)}
    for other in by_benchmark(found):
        run = other[0]
        data, method, preset = _key(other)
        own = usual.get((data, method, preset))
        if varied(run).keys() != {"scope"} or own is None:
            continue
        ways = [(f"{method}, {r[0].config['scope']}-wise", r) for r in (own, other)]
        gpm = usual.get((data, "gpm", preset))
        named = [("gpm", gpm)] * (gpm is not None) + ways
        T = tasks(other)
        x = [str(t + 1) for t in range(T)]
        places = [(T - 1, t) for t in range(T)]
        yield Chart(
            file_name("scopes", run.benchmark, run.method, run.preset),
            "Layer-wise against task-wise: " + described(run.benchmark, run.preset, {}),
            "lines",
            "task",
            "accuracy after the last task, %",
            tuple(series(r, name, x, places) for name, r in named if r is not None),
            clean(run.benchmark),
            preset=clean(run.preset),
            note=over_seeds(other),
        )


def _key(results: Results) -> tuple[str, str, str]:
    run = results[0]
    return data_of(run), run.method, run.preset
