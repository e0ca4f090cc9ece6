"""Learners to put beside a model and a training loop of one's own."""

from .gpm_learner import GPM as GPM
from .learner_state import UnknownTaskError as UnknownTaskError
from .trgp_learner import TRGP as TRGP

__all__ = ["GPM", "TRGP", "UnknownTaskError"]
