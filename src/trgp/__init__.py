"""Gradient-projection continual learning: TRGP, GPM and their family, on any PyTorch model."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["GPM", "TRGP", "UnknownTaskError", "inspect", "run"]

if TYPE_CHECKING:
    from .engine.run import run as run
    from .learner import GPM as GPM
    from .learner import TRGP as TRGP
    from .learner import UnknownTaskError as UnknownTaskError
    from .learner.inspection import inspect as inspect
else:  # out of sight of type checkers, which would take any name for an attribute
    _LEARNERS = dict.fromkeys(("GPM", "TRGP", "UnknownTaskError"), "learner")
    _MODULES = {"run": "engine.run", "inspect": "learner.inspection", **_LEARNERS}

    def __getattr__(name: str) -> object:
        """Import on first use: torch takes a second, in which Ctrl-C is to end `trgp`."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
