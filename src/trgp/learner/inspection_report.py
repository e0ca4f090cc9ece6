"""A model as a learner would see it, part by part, and the text of that."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from ..tree import in_units
from .parameter_fates import Verdict


@dataclass(frozen=True)
class Row:
    """A layer, or another part of a model, and what becomes of it."""

    name: str
    kind: str
    verdict: Verdict
    parameters: int
    share: float  # of all parameters
    why: str
    fix: str  # how to have it otherwise
    directions: int = 0  # that the memory of a protected layer can hold
    bytes_tenth: int = 0  # of that memory after one task, with 10 % of them
    bytes_full: int = 0
    ranks: Mapping[float, int] = field(default_factory=dict)  # of a first task, by threshold
    bytes_at: Mapping[float, int] = field(default_factory=dict)  # of its memory, by threshold


@dataclass(frozen=True)
class Inspection:
    """A model as a learner would see it; print it."""

    model: str
    parameters: int
    nbytes: int  # of all parameters
    rows: tuple[Row, ...]
    unmatched: tuple[str, ...]  # patterns that name nothing
    task_bytes: int  # of the copies that each task keeps for itself
    end_task_bytes: int  # that end_task takes for a while

    @property
    def refused(self) -> list[Row]:
        """The parts for which no learner can be made."""
        return [row for row in self.rows if row.verdict == "refused"]

    @property
    def shares(self) -> dict[Verdict, float]:
        """The share of all parameters by what becomes of them."""
        return {
            verdict: sum(row.share for row in self.rows if row.verdict == verdict)
            for verdict in get_args(Verdict)
        }

    def __str__(self) -> str:
        """Tell all of it: a table, its notes, and the sums."""
        notes: dict[str, int] = {}
        for row in self.rows:
            if row.verdict != "protected":
                notes.setdefault(_note(row), len(notes) + 1)
        numbered = [f"{number}  {note}" for note, number in notes.items()]
        blocks = [_table(self.rows, notes), numbered, [*self._sums()]]
        return "\n\n".join("\n".join(block) for block in blocks if block)

    def _sums(self) -> Iterator[str]:
        shares = ", ".join(
            f"{share:.1%} {verdict}" for verdict, share in self.shares.items() if share
        )
        size = f"{self.parameters:,} parameters, {in_units(self.nbytes)}"
        yield f"{self.model}: {size}; {shares}"
        rows = [row for row in self.rows if row.verdict == "protected"]
        if rows:
            tenth = in_units(sum(row.bytes_tenth for row in rows))
            full = in_units(sum(row.bytes_full for row in rows))
            yield f"memory: {tenth} at 10 % of all directions, {full} at full rank"
            directions = sum(row.directions for row in rows)
            for threshold in rows[0].ranks:
                held = in_units(sum(row.bytes_at[threshold] for row in rows))
                rank = sum(row.ranks[threshold] for row in rows) / directions
                yield f"memory of these samples at threshold {threshold:g}: {held}, rank {rank:.1%}"
            yield f"end_task: {in_units(self.end_task_bytes)} for a while"
        else:
            yield (
                "Nothing to protect: a learner needs a trainable linear, convolution, "
                "attention or recurrent layer outside exclude=[...] and per_task=[...]."
            )
        if self.task_bytes:
            yield f"each task: {in_units(self.task_bytes)} of copies"
        if self.unmatched:
            yield f"No module has a name that matches {_quoted(self.unmatched)} (yet)."
        if self.refused:
            yield f"A learner would refuse the model for {_quoted(map(_name, self.refused))}."


def _name(row: Row) -> str:
    return row.name or "(the model)"


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _note(row: Row) -> str:
    return "; ".join(filter(None, [row.why, row.fix]))


def _table(rows: Sequence[Row], notes: Mapping[str, int]) -> list[str]:
    """The rows as lines, with heads over the columns."""
    thresholds = next((list(row.ranks) for row in rows if row.ranks), [])
    heads = ["part", "kind", "becomes", "share", "10 %", "full", "directions"]
    cells = [heads + [f"at {threshold:g}" for threshold in thresholds] + ["note"]]
    for row in rows:
        memory = [in_units(row.bytes_tenth), in_units(row.bytes_full), str(row.directions)]
        cells.append(
            [
                *(_name(row), row.kind, row.verdict, f"{row.share:.1%}"),
                *(memory if row.verdict == "protected" else [""] * len(memory)),
                *(str(row.ranks.get(threshold, "")) for threshold in thresholds),
                str(notes.get(_note(row), "")),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    words = 3  # columns that begin on the left
    return [
        "  ".join(
            cell.ljust(width) if i < words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
