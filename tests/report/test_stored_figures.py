"""The figures of stored runs: their series, labels and counts are those of a stored list.

`python tests/report/test_stored_figures.py` writes the list anew, to be read before it is kept.
"""

import json
from pathlib import Path
from typing import Any

from trgp.engine.config import defaults
from trgp.report.charts import charts
from trgp.results.store import find

HERE = Path(__file__).parent
LIST = HERE / "stored_figures.json"
RUNS = HERE.parent.parent / "records" / "runs"
METHODS = ("gpm", "multitask", "trgp")


def structure() -> dict[str, Any]:
    """What every figure of some methods on the smaller benchmark is made of."""
    some = [
        results
        for results in find(RUNS, defaults).results
        if results[0].benchmark == "split-digits" and results[0].method in METHODS
    ]
    return {
        chart.name: {
            "kind": chart.kind,
            "title": chart.title,
            "labels": [chart.x_label, chart.y_label, chart.z_label],
            "series": {
                each.name: [len(each.x), sum(y is not None for y in each.y), len(each.error)]
                for each in chart.series
            },
            "texts": [len(row) for row in chart.texts],
            "boundaries": len(chart.boundaries),
        }
        for chart in charts(some)
    }


def test_figures_are_made_of_the_same_parts() -> None:
    assert structure() == json.loads(LIST.read_text())


if __name__ == "__main__":
    LIST.write_text(json.dumps(structure(), indent=1) + "\n")
