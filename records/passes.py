"""What it changes to measure in several shuffled passes over the test set."""

from recorded import Found, Wanted, pairs, recorded
from table_parts import texts

from trgp.results.layout import points

PASSES = 10  # as the published code has it on CIFAR-100
# Learnt for a short time: what the steps came to is the same, however often it is measured.
ONCE = Wanted("split-cifar100", "trgp", "paper", {"tasks": 5, "epochs": 2})


def passes(found: Found) -> str:
    """Seed by seed, ACC of the same weights in one pass and in several."""
    several = ONCE._replace(changes={**ONCE.changes, "test_passes": PASSES})
    both = pairs(recorded(found, ONCE), recorded(found, several))
    rows = [(points(one), points(ten), points(ten - one, "+")) for one, ten in both]
    return texts(("ACC %, one pass", f"ACC %, {PASSES} passes", "change of ACC"), rows)
