"""The fields of a configuration: what is said about each, and a parser of them all."""

import ast
import inspect
import textwrap
from dataclasses import field, fields, make_dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

import tyro

from ..engine.config import Config
from ..engine.errors import InputError
from .parsing import Argument, arguments, type_of

PARTS = ("training", "method", "data")


def docs(kind: type) -> dict[str, str]:
    """The text below each field of a dataclass, in one line."""
    found = {}
    for owner in reversed(kind.__mro__):
        try:
            source = inspect.getsource(owner)
        except (OSError, TypeError):  # built in, or typed at a prompt
            continue
        (made,) = ast.parse(textwrap.dedent(source)).body
        for each, below in pairwise(made.body if isinstance(made, ast.ClassDef) else []):
            match each, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[name] = " ".join(text.split())
    return found


def parser_of(config: Config, running: type) -> type:
    """A parser of everything about a run, with the configuration's values as defaults.

    The classes are copies without checks: values are checked together, when the run begins.
    """
    place = tyro.conf.arg(metavar="BENCHMARK", help="Its name, or the path of an npz file.")
    groups: list[tuple[str, Any]] = [
        ("benchmark", Annotated[str, place, tyro.conf.Positional]),
        ("running", Annotated[running, tyro.conf.OmitArgPrefixes]),
    ]
    for part in PARTS:
        if fields(values := getattr(config, part)):
            groups.append((part, Annotated[_copy(values), tyro.conf.OmitArgPrefixes]))
    about = (
        f"Learn {config.benchmark} by {config.method_name}, as the preset {config.preset} has it."
    )
    parser = make_dataclass("Run", groups, namespace={"__doc__": about})
    _check_names(config, list(arguments(parser)))
    return parser


def settings(parts: Any) -> dict[str, Any]:
    """The fields of a configuration, or of what was parsed, by their names."""
    groups = [getattr(parts, part) for part in PARTS if hasattr(parts, part)]
    return {each.name: getattr(group, each.name) for group in groups for each in fields(group)}


def _copy(values: Any) -> type:
    kind = type(values)
    said = docs(kind)
    copied: list[tuple[str, Any, Any]] = []
    for each in fields(kind):
        about = tyro.conf.arg(help=said.get(each.name, ""))
        # From a factory, since no list is allowed as a default.
        default = field(default_factory=partial(getattr, values, each.name))
        copied.append((each.name, Annotated[type_of(each, kind), about], default))
    doc = inspect.getdoc(kind) or ""
    return make_dataclass(kind.__name__, copied, namespace={"__doc__": doc.partition("\n")[0]})


def _check_names(config: Config, known: list[Argument]) -> None:
    """A user's own method may not call a field as something else is called."""
    names = [argument.name for argument in known]
    for name in names:
        if names.count(name) > 1:
            raise InputError(
                f"{config.method_name} has a field '{name}', which means something else here "
                "already; rename it."
            )
