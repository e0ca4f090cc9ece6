"""Commands that repeat a configuration, one for all its seeds where possible."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ..results.layout import shown
from ..results.result import Results
from .naming import clean


def commands_of(*several: Results) -> tuple[str, ...]:
    """Return the commands that repeat all results behind a number, in this order."""
    return tuple(dict.fromkeys(clean(each) for results in several for each in _of(results)))


def command_for(
    benchmark: str, method: str, preset: str = "paper", changes: Mapping[str, Any] | None = None
) -> str:
    """Return the command for a cell that has not been run."""
    words = ["trgp", "run", benchmark, "--method", method]
    words += [] if preset == "paper" else ["--preset", preset]
    for name, value in (changes or {}).items():
        words += _option(name.replace("_", "-"), value)
    return shlex.join([*words, "--seeds", "5"])


def _of(results: Results) -> list[str]:
    """Return the command typed for all seeds; commands for one seed each become one for all."""
    typed = list(dict.fromkeys(run.command for run in results))
    bare = {_without_seeds(command) for command in typed}
    rest = next(iter(bare))
    if len(typed) == 1 or len(bare) > 1 or rest is None:
        return typed
    return [shlex.join([*rest, "--seeds", _seeds([run.seed for run in results])])]


def _option(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    # An empty list is the option without a value.
    return [f"--{name}"] if value in ((), []) else [f"--{name}", shown(value)]


def _without_seeds(command: str) -> tuple[str, ...] | None:
    """Return the words of a `trgp run` without its seeds; None for others, like a Python call."""
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    if words[:2] != ["trgp", "run"]:
        return None
    kept = []
    left = iter(words)
    for word in left:
        if word in ("--seed", "--seeds"):
            next(left, None)
        elif not word.startswith(("--seed=", "--seeds=")):
            kept.append(word)
    return tuple(kept)


def _seeds(seeds: Sequence[int]) -> str:
    return str(len(seeds)) if list(seeds) == list(range(len(seeds))) else ",".join(map(str, seeds))
