"""What repeats a configuration, all its seeds by one command."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ..results.layout import shown
from ..results.result import Results
from .naming import clean


def commands_of(*several: Results) -> tuple[str, ...]:
    """What repeats all that a number comes from, in this order."""
    return tuple(dict.fromkeys(clean(each) for results in several for each in _of(results)))


def command_for(
    benchmark: str, method: str, preset: str = "paper", changes: Mapping[str, Any] | None = None
) -> str:
    """What runs a cell that is not run yet."""
    words = ["trgp", "run", benchmark, "--method", method]
    words += [] if preset == "paper" else ["--preset", preset]
    for name, value in (changes or {}).items():
        words += _option(name.replace("_", "-"), value)
    return shlex.join([*words, "--seeds", "5"])


def _of(results: Results) -> list[str]:
    """The command that was typed for all seeds, or those for one seed each as one for all."""
    typed = list(dict.fromkeys(run.command for run in results))
    bare = {_without_seeds(command) for command in typed}
    rest = next(iter(bare))
    if len(typed) == 1 or len(bare) > 1 or rest is None:
        return typed
    return [shlex.join([*rest, "--seeds", _seeds([run.seed for run in results])])]


def _option(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    # A list that is empty is the option without a word after it.
    return [f"--{name}"] if value in ((), []) else [f"--{name}", shown(value)]


def _without_seeds(command: str) -> tuple[str, ...] | None:
    """The words of a `trgp run` without its seeds; None of anything else, as a call in Python."""
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
