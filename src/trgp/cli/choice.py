"""What must be chosen before there are fields: a benchmark, a method and a preset."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches

import tyro

from .. import benchmarks
from ..benchmarks import NAMES
from ..engine.config import Config, configure
from ..engine.errors import InputError
from ..methods import METHODS
from .parsing import arguments, rooms, split, wants_help

CHOICES = f"""
benchmarks: {", ".join(NAMES)}, or the path of an npz file
methods:    {", ".join(METHODS)}, or a class of your own as module:Class
presets:    paper, official

`trgp list benchmarks` says more, and so for methods and presets. What else can be set depends on
these; `trgp run pmnist --method gpm --help` shows all of it for one choice.
"""


def preset(argv: Sequence[str], running: type) -> Config | None:
    """The configuration that a command line starts from; None where it only asks for help.

    running: the options that stand for themselves, whatever the benchmark.
    """
    plain = [arg for arg in argv if not wants_help([arg])]
    words, options = split(plain, rooms(arguments(running)))
    if not words and wants_help(argv):
        return None
    if not words:
        raise InputError(
            "Which benchmark? Name it first, as in `trgp run permuted-digits`; `trgp list "
            "benchmarks` shows them."
        )
    named = {name: values[-1] for name, values in options if values}
    try:
        return configure(words[0], named.get("method", "trgp"), named.get("preset", "paper"))
    except (ValueError, TypeError) as error:
        raise InputError(str(error)) from error


def overview(running: type) -> None:
    """The help where nothing is chosen yet."""
    with suppress(SystemExit):
        tyro.cli(running, args=["--help"], prog="trgp run BENCHMARK")
    print(CHOICES, end="")


def missing(config: Config, name: str, known: Iterable[str]) -> str:
    """The sentence about an option that is not there: whose it is, or what was meant."""
    here = f"{config.method_name} on {config.benchmark} has no option --{name}"
    kinds: dict[str, type] = {**METHODS, **{n: benchmarks.entry(n).options for n in NAMES}}
    owners = [owner for owner, kind in kinds.items() if name in rooms(arguments(kind))]
    if owners:
        return f"{here}; {' and '.join(owners)} {'have' if len(owners) > 1 else 'has'} it."
    near = get_close_matches(name, list(known), 1)
    if near:
        return f"{here}; did you mean --{near[0]}?"
    return f"{here}; see `trgp run {config.benchmark} --method {config.method_name} --help`."
