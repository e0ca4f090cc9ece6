"""Gradient-projection continual learning: TRGP, GPM and their family, on any PyTorch model."""

__version__ = "0.1.0"

from .engine.run import run as run
from .learner import GPM as GPM
from .learner import TRGP as TRGP
from .learner import UnknownTaskError as UnknownTaskError

__all__ = ["GPM", "TRGP", "UnknownTaskError", "run"]
