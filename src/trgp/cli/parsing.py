"""Parse command lines with tyro, and turn each mistake into one sentence."""

import dataclasses
import io
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import tyro

from ..engine.errors import InputError
from ..lookup import meant

T = TypeVar("T")
Given = list[tuple[str, list[str]]]
"""Options in the order typed: names without leading hyphens, and their values."""
KINDS = {int: ("a whole number", "whole numbers"), float: ("a number", "numbers")}


@dataclass(frozen=True)
class Argument:
    """One argument that a parser takes."""

    name: str
    """The name as typed, with hyphens inside."""
    kind: Any
    required: bool
    positional: bool
    pair: bool
    """Whether --no-name switches this flag off."""

    @property
    def room(self) -> float:
        """The largest number of values it takes."""
        if self.kind is bool:
            return 0
        return math.inf if get_origin(self.kind) in (tuple, list, dict) else 1

    @property
    def takes(self) -> str:
        """The kind of value it takes, in words."""
        if get_origin(self.kind) is Literal:
            return "one of " + ", ".join(map(str, get_args(self.kind)))
        one, many = KINDS.get(next(iter(get_args(self.kind)), self.kind), ("", ""))
        return many if self.room > 1 else one


def arguments(parser: type) -> Iterator[Argument]:
    """Yield all arguments of a parser, those in groups included."""
    for field in dataclasses.fields(parser):
        kind, *marks = _unmarked(type_of(field, parser))
        if dataclasses.is_dataclass(kind):
            yield from arguments(kind)  # type: ignore[arg-type]
            continue
        none = dataclasses.MISSING
        yield Argument(
            field.name.rstrip("_").replace("_", "-"),  # from_ is typed --from
            kind,
            required=field.default is none and field.default_factory is none,
            positional=tyro.conf.Positional in marks,
            pair=kind is bool and tyro.conf.FlagCreatePairsOff not in marks,
        )


def type_of(each: dataclasses.Field[Any], kind: type) -> Any:
    """Return a field's type, also if a user's module postpones its annotations."""
    if not isinstance(each.type, str):
        return each.type
    owner = next(c for c in kind.__mro__ if each.name in vars(c).get("__annotations__", {}))
    try:
        return eval(each.type, vars(sys.modules[owner.__module__]))
    except NameError as error:
        raise InputError(
            f"The type {each.type} of {owner.__name__}.{each.name} is not known at run time "
            f"({error}); import it outside `if TYPE_CHECKING`."
        ) from error


def _unmarked(kind: Any) -> tuple[Any, ...]:
    """Return a type without None, then its annotations."""
    marks: tuple[Any, ...] = ()
    if get_origin(kind) is Annotated:
        kind, *rest = get_args(kind)
        marks = tuple(rest)
    if get_origin(kind) in (Union, UnionType):
        kinds = [each for each in get_args(kind) if each is not NoneType]
        kind = kinds[0] if len(kinds) == 1 else kind
    return kind, *marks


def split(argv: Iterable[str], room: Mapping[str, float]) -> tuple[list[str], Given]:
    """Split a command line into words and options with their values.

    An unknown option takes all that follows, so that none of it is mistaken for a word.
    """
    words: list[str] = []
    options: Given = []
    left = 0.0
    for arg in argv:
        if arg.startswith("--"):
            name, equals, value = arg[2:].partition("=")
            name = name.replace("_", "-")
            options.append((name, [value] if equals else []))
            left = room.get(name, math.inf) - len(options[-1][1])
        elif left > 0:
            options[-1][1].append(arg)
            left -= 1
        else:
            words.append(arg)
    return words, options


def rooms(known: Iterable[Argument]) -> dict[str, float]:
    """Return the largest number of values per option, by name."""
    options = [argument for argument in known if not argument.positional]
    pairs = {f"no-{argument.name}": 0.0 for argument in options if argument.pair}
    return pairs | {argument.name: argument.room for argument in options}


def wants_help(argv: Iterable[str]) -> bool:
    return any(arg in ("-h", "--help") for arg in argv)


def parse(
    parser: type[T],
    argv: Sequence[str],
    prog: str,
    unknown: Callable[[str, Iterable[str]], str] | None = None,
) -> T:
    """Parse the arguments into the parser's dataclass; --help ends in SystemExit.

    unknown: makes the sentence about an unknown option from its name and the known ones.
    """
    if wants_help(argv):
        return tyro.cli(parser, args=["--help"], prog=prog)
    known = {argument.name: argument for argument in arguments(parser)}
    room = rooms(known.values())
    words, options = split(argv, room)
    for name, values in options:
        if name not in room:
            says = unknown or partial(_unknown, prog)
            raise InputError(says(name, room))
        if room[name] == 0 and values:
            raise InputError(f"--{name} takes no value; leave '{values[0]}' out.")
        if room[name] == 1 and not values:
            raise InputError(f"--{name} needs a value; see `{prog} --help`.")
    _check_words(words, [a for a in known.values() if a.positional], prog)
    typed = [_typed(name, values, room[name]) for name, values in options]
    try:
        return _quietly(parser, [*words, *(arg for option in typed for arg in option)])
    except InputError:
        for (name, values), option in zip(options, typed, strict=True):
            if room[name]:
                _check_value(parser, known[name], values, [*words, *option], prog)
        raise


def _unknown(prog: str, name: str, known: Iterable[str]) -> str:
    return f"{prog} has no option --{name}; {meant(name, known)}"


def _check_words(words: Sequence[str], places: Sequence[Argument], prog: str) -> None:
    for word in words:
        if word.startswith("-"):
            raise InputError(f"{prog} has no option {word}; options begin with two hyphens.")
    needed = [place for place in places if place.required]
    if len(words) < len(needed):
        missing = needed[len(words)].name.upper()
        raise InputError(f"{prog} needs {missing}; see `{prog} --help`.")
    most = sum(place.room for place in places)
    if len(words) > most:
        extra = words[int(most)]
        raise InputError(f"'{extra}' is one argument too many; see `{prog} --help`.")


def _typed(name: str, values: Sequence[str], room: float) -> list[str]:
    """Return an option in the form that tyro reads."""
    if room == 1:  # joined by =, because the value may begin with a hyphen
        return [f"--{name}={values[0]}"]
    # Lists are shown with commas, and may be typed that way.
    return [f"--{name}", *(part for value in values for part in value.split(","))]


def _quietly(parser: type[T], args: Sequence[str]) -> T:
    """Parse with tyro; raise the text it would print as the error."""
    with redirect_stderr(io.StringIO()) as said:
        try:
            return tyro.cli(parser, args=args)
        except SystemExit:
            raise InputError(said.getvalue()) from None


def _check_value(
    parser: type, argument: Argument, values: Sequence[str], args: Sequence[str], prog: str
) -> None:
    """Refuse an option that fails to parse even alone."""
    try:
        _quietly(parser, args)
    except InputError:
        takes = argument.takes or f"something else (see `{prog} --help`)"
        raise InputError(f"--{argument.name} takes {takes}, not '{' '.join(values)}'.") from None
