"""Notes that several tables share."""

from collections.abc import Iterable

from ...benchmarks import PAPER_DATA

SEEDS = "Figures are means ± standard deviations over seeds; one seed has no deviation."
MARKS = (
    "The highest mean on the same data is marked as best. A mean is marked as near if it is not "
    "significantly different from the best (paired two-sided t-test over common seeds, p >= 0.05, "
    "one test per row, no correction for multiple tests). With fewer than two common seeds there "
    "is no test and no p. The reference points single and multitask are not ranked."
)


def papers_data(benchmarks: Iterable[str]) -> str:
    """Say on which benchmarks the paper's data differs from that of the preset `paper`."""
    return " ".join(
        f"On {name} the paper's own values come from other data: {PAPER_DATA[name]}."
        for name in dict.fromkeys(benchmarks)
        if name in PAPER_DATA
    )


def joined(*sentences: str) -> str:
    return " ".join(filter(None, sentences))
