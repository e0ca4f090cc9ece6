"""What repeats a configuration, all its seeds by one command."""

import shlex
from collections.abc import Sequence

from ..results.result import Results
from .naming import clean


def command_of(results: Results) -> str:
    """The command that was typed for all seeds, or those for one seed each as one for all."""
    typed = list(dict.fromkeys(run.command for run in results))
    if len(typed) == 1:
        return clean(typed[0])
    bare = {_without_seeds(command) for command in typed}
    rest = next(iter(bare))
    if len(bare) > 1 or rest is None:
        return clean("; ".join(typed))
    return clean(shlex.join([*rest, "--seeds", _seeds([run.seed for run in results])]))


def command_for(benchmark: str, method: str) -> str:
    """What runs a cell of the paper's tables."""
    return shlex.join(["trgp", "run", benchmark, "--method", method, "--seeds", "5"])


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
