"""What jobs take beside their training steps."""

from recorded import Found
from table_parts import figure

from trgp.report import cells
from trgp.report.groups import by_benchmark
from trgp.report.markdown import rows_markdown
from trgp.report.model import Row, Table
from trgp.results.phases import tells_all
from trgp.results.result import Results

PARTS = ("validation", "evaluation", "selection", "bases", "checkpoints")
MOST = 15  # per cent of a job that is asked for


def overhead(found: Found) -> str:
    """Every configuration whose results tell these phases apart, and whether they are few."""
    columns = (
        *("benchmark", "method", "preset", "seeds", "a run's time"),
        *(f"{part} %" for part in PARTS),
        *("together %", f"at most {MOST} %", "device"),
    )
    told = [results for results in found if all(tells_all(run.seconds) for run in results)]
    if not told:
        return "Not measured yet."
    return rows_markdown(Table("", "", columns, tuple(map(_row, by_benchmark(told)))))


def _row(results: Results) -> Row:
    run = results[0]
    tasks = [task for each in results for task in each.seconds]
    whole = sum(sum(task.values()) for task in tasks)
    shares = [100 * sum(task.get(part, 0.0) for task in tasks) / whole for part in PARTS]
    return cells.row(
        run,
        cells.text(run.benchmark),
        cells.text(run.method),
        cells.preset(run),
        cells.seeds(results),
        cells.lasting(whole / len(results)),
        *(figure(share, ".1f") for share in shares),
        figure(sum(shares), ".1f"),
        cells.text("yes" if sum(shares) <= MOST else "no"),
        cells.text("; ".join(sorted({each.device for each in results}))),
    )
