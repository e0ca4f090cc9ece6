"""Look up names that users type: the nearest known one, or a class by module:Class."""

import importlib
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


def meant(given: object, known: Iterable[str]) -> str:
    """End a sentence about an unknown name with the nearest known one, or all of them."""
    listed = list(known)
    near = get_close_matches(str(given), listed, 1)
    return f"did you mean '{near[0]}'?" if near else f"known are {', '.join(listed)}."


def imported(path: str, what: str) -> Any:
    """Import `module:name` from the current folder or the Python path."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ValueError(f"{path!r} is no {what}; write it as module:Class.")
    if "" not in sys.path:
        sys.path.insert(0, "")  # the current folder, which a console script's path lacks
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        # A user's file can fail in any way; the sentence repeats the error.
        raise ValueError(
            f"The module of --{what} {path} cannot be imported: {type(error).__name__}: {error}; "
            "start in the folder that holds it, and check that it runs by itself."
        ) from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise ValueError(
            f"{module_name} has no '{name}'; check the spelling of --{what} {path}."
        ) from None
