"""Build the tables of the report from stored results."""

from collections.abc import Sequence

from ...results.result import Results
from ..model import Table
from .ablation import ablation
from .main import main
from .memory import memory
from .other import other
from .quirks import quirks
from .superclass import superclass
from .training_time import training_time
from .transfer import transfer


def tables(found: Sequence[Results]) -> tuple[Table, ...]:
    """Return the tables with rows; those without any run come last."""
    made = [
        main(found),
        superclass(found),
        ablation(found),
        *transfer(found),
        training_time(found),
        memory(found),
        quirks(found),
        other(found),
    ]
    shown = [table for table in made if table.rows]
    return tuple(sorted(shown, key=lambda table: all(row.not_run for row in table.rows)))
