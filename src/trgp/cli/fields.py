"""The fields of a configuration: their documentation and a parser for all of them."""

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
    """Return the docstring below each field of a dataclass, in one line."""
    found = {}
    for owner in reversed(kind.__mro__):
        try:
            source = inspect.getsource(owner)
        except (OSError, TypeError):  # without source: built in, or typed at a prompt
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
    """Build a parser for all options of a run, with the configuration's values as defaults.

    Its classes are copies without checks: values are checked together when the run begins.
    """
    place = tyro.conf.arg(metavar="BENCHMARK", help="Its name, or the path of an npz file.")
    groups: list[tuple[str, Any]] = [
        ("benchmark", Annotated[str, place, tyro.conf.Positional]),
        ("running", Annotated[running, tyro.conf.OmitArgPrefixes]),
    ]
    for part in PARTS:
        if fields(values := getattr(config, part)):
            groups.append((part, Annotated[_copy(values), tyro.conf.OmitArgPrefixes]))
    about = f"Learn {config.benchmark} with {config.method_name}, preset {config.preset}."
    parser = make_dataclass("Run", groups, namespace={"__doc__": about})
    _check_names(config, list(arguments(parser)))
    return parser


def settings(parts: Any) -> dict[str, Any]:
    """Return the fields of a configuration, or of parsed arguments, by name."""
    groups = [getattr(parts, part) for part in PARTS if hasattr(parts, part)]
    return {each.name: getattr(group, each.name) for group in groups for each in fields(group)}


def _copy(values: Any) -> type:
    kind = type(values)
    said = docs(kind)
    copied: list[tuple[str, Any, Any]] = []
    for each in fields(kind):
        about = tyro.conf.arg(help=said.get(each.name, ""))
        # A factory, because dataclasses refuse lists as defaults.
        default = field(default_factory=partial(getattr, values, each.name))
        copied.append((each.name, Annotated[type_of(each, kind), about], default))
    doc = inspect.getdoc(kind) or ""
    return make_dataclass(kind.__name__, copied, namespace={"__doc__": doc.partition("\n")[0]})


def _check_names(config: Config, known: list[Argument]) -> None:
    """Refuse a user's method with a field whose name another option has already."""
    names = [argument.name for argument in known]
    for name in names:
        if names.count(name) > 1:
            raise InputError(
                f"{config.method_name} has a field '{name}', which is the name of another option; "
                "rename it."
            )
