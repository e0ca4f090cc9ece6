"""Every figure of docs/forms.md is one of its record."""

import json
import re
from pathlib import Path
from statistics import mean, stdev

TREE = Path(__file__).parent.parent.parent
SEARCH_SEED = 100
ROW = re.compile(r"\| (adamw|sgd) \| (\w+) \| ([\d.]+) ± ([\d.]+) \| ([\d.]+) \|")


def test_the_table_is_that_of_the_record() -> None:
    lines = (TREE / "experiments/forms/results.jsonl").read_text().splitlines()
    runs = [json.loads(line) for line in lines]
    rows = ROW.findall((TREE / "docs/forms.md").read_text())
    assert len(rows) == 11
    for optimizer, form, *figures in rows:
        found = [
            run
            for run in runs
            if (run["optimizer"], run["form"]) == (optimizer, form) and run["seed"] != SEARCH_SEED
        ]
        accuracies = [run["acc"] for run in found if run["acc"] is not None]
        held = [run["kib"] for run in found if run["acc"] is not None]
        assert len(found) == 5
        shown = [f"{value:.1f}" for value in (mean(accuracies), stdev(accuracies), mean(held))]
        assert shown == figures, (optimizer, form)
