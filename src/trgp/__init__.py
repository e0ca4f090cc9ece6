"""Gradient-projection continual learning: TRGP, GPM and their family, on any PyTorch model."""

from .learner import GPM as GPM
from .learner import TRGP as TRGP
from .learner import UnknownTaskError as UnknownTaskError

__all__ = ["GPM", "TRGP", "UnknownTaskError"]
__version__ = "0.1.0"
