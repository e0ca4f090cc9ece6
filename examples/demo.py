"""Ten permuted-digit tasks, one after another: fine-tuning, GPM and TRGP.

Prints how well the first task is still known after each further one, and a sentence. Results are
stored, so that a second call only reads them: `trgp report runs/demo` makes tables and figures.
"""

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

import trgp
from trgp.results.result import Results

METHODS = {"finetune": "fine-tuning", "gpm": "GPM", "trgp": "TRGP"}
SEEDS = 3
BARS = " ▁▂▃▄▅▆▇█"


def first_task(results: Results) -> list[float]:
    """Accuracy on the first task after each task, in the mean over seeds."""
    tasks = len(results[0].accuracy_matrix)
    return [
        sum(run.accuracy_matrix[t][0] or 0.0 for run in results) / len(results)
        for t in range(tasks)
    ]


def mean_accuracy(results: Results) -> float:
    """Mean accuracy over all tasks at the end."""
    return sum(run.acc for run in results) / len(results)


def main(out: Path) -> None:
    """Learn, then show what is left of the first task."""
    console = Console()
    found = {}
    for method, name in METHODS.items():
        with console.status(f"Learning ten tasks with {name}, {SEEDS} seeds"):
            found[method] = trgp.run("permuted-digits", method, seeds=SEEDS, out=out)
    table = Table("", "first task after 1 to 10 tasks", "at the end", "mean of all ten", box=None)
    for method, name in METHODS.items():
        kept = first_task(found[method])
        bars = " ".join(BARS[round(a * (len(BARS) - 1))] * 2 for a in kept)
        table.add_row(name, bars, f"{kept[-1]:.0%}", f"{mean_accuracy(found[method]):.0%}")
    console.print(table)
    acc = {method: mean_accuracy(results) for method, results in found.items()}
    console.print(
        f"After ten tasks fine-tuning still classifies {acc['finetune']:.0%} of all digits "
        f"correctly, GPM {acc['gpm']:.0%}, TRGP {acc['trgp']:.0%}. "
        f"For tables and figures: trgp report {out}",
        highlight=False,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo"))
