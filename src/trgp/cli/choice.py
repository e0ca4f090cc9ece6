"""Benchmark, method and preset: the choices that decide which options a run has."""

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
presets:    paper, official, or best where the benchmark has it

`trgp list benchmarks`, `methods` and `presets` describe them. The other options depend on these
three; `trgp run pmnist --method gpm --help` shows all options of one choice.
"""


def preset(argv: Sequence[str], running: type) -> Config | None:
    """Return the configuration a command line starts from; None if it only asks for help.

    running: the options that every benchmark has.
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
    """Print the help for a command line without a benchmark."""
    with suppress(SystemExit):
        tyro.cli(running, args=["--help"], prog="trgp run BENCHMARK")
    print(CHOICES, end="")


def missing(config: Config, name: str, known: Iterable[str]) -> str:
    """Explain an unknown option: name the methods or benchmarks that have it, or a near match."""
    here = f"{config.method_name} on {config.benchmark} has no option --{name}"
    kinds: dict[str, type] = {**METHODS, **{n: benchmarks.entry(n).options for n in NAMES}}
    owners = [owner for owner, kind in kinds.items() if name in rooms(arguments(kind))]
    if owners:
        return f"{here}; {' and '.join(owners)} {'have' if len(owners) > 1 else 'has'} it."
    near = get_close_matches(name, list(known), 1)
    if near:
        return f"{here}; did you mean --{near[0]}?"
    return f"{here}; see `trgp run {config.benchmark} --method {config.method_name} --help`."
