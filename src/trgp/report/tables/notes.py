"""What is said below several tables."""

from collections.abc import Iterable

from ...benchmarks import PAPER_DATA

SEEDS = "Figures are means ± standard deviations over seeds; one seed has no deviation."
MARKS = (
    "Marked as best is the highest mean on the same data, and as near what a paired two-sided "
    "t-test over common seeds does not tell from it at 5 % (one test a row, no correction for "
    "their number). Without two common seeds there is no test, and no p. The bounds single and "
    "multitask take no part."
)


def papers_data(benchmarks: Iterable[str]) -> str:
    """Where the paper's data is not that of the preset paper."""
    return " ".join(
        f"On {name} the paper's own values come from other data: {PAPER_DATA[name]}."
        for name in dict.fromkeys(benchmarks)
        if name in PAPER_DATA
    )


def joined(*sentences: str) -> str:
    return " ".join(filter(None, sentences))
