"""Gradient-projection continual learning: TRGP, GPM and their family, on any PyTorch model."""

from typing import TYPE_CHECKING

from .learner import GPM as GPM
from .learner import TRGP as TRGP
from .learner import UnknownTaskError as UnknownTaskError
from .types import VERSION

__all__ = ["GPM", "TRGP", "UnknownTaskError", "inspect", "run"]
__version__ = VERSION

if TYPE_CHECKING:
    from .engine.run import run as run
    from .learner.inspection import inspect as inspect
else:  # out of sight of type checkers, which would take any name for an attribute

    def __getattr__(name: str) -> object:
        """Import `run` and `inspect` when they are first used: the learners need neither."""
        if name == "run":
            from .engine.run import run

            return run
        if name == "inspect":
            from .learner.inspection import inspect

            return inspect
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
