"""Whether what a result.json holds is a result: the right fields of the right kinds."""

import os
import reprlib
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

from .metrics import as_matrix
from .result import SCHEMA_VERSION, Result

LARGEST = 1e300  # numbers beyond it overflow in sums, and whole ones do not become floats at all


def checked(content: Any, path: str | os.PathLike[str]) -> Result:
    """The result, or a sentence about the first thing wrong."""
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no fields of a result; delete it and repeat the run.")
    version = content.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema_version {reprlib.repr(version)}, this package knows "
            f"{SCHEMA_VERSION}; repeat the run, or update the package if that wrote it."
        )
    for name, kind in FIELDS.items():
        if name not in content:
            raise ValueError(f"{path} lacks the field '{name}'; repeat the run.")
        if not kind.holds(content[name]):
            raise ValueError(
                f"{path} has {reprlib.repr(content[name])} as its {name}, which must be "
                f"{kind.says}; repeat the run."
            )
    result = Result(**{field.name: content[field.name] for field in fields(Result)})
    try:
        as_matrix(result.accuracy_matrix)
        # What is read off the matrix must be there wherever the run says that it is defined.
        _ = result.mean_diagonal, result.forgetting, result.fwt
    except ValueError as error:
        raise ValueError(
            f"{path} holds no usable accuracies ({str(error).rstrip('.')}); repeat the run."
        ) from None
    return result


class Kind(NamedTuple):
    """What a field must be, as a test and in words."""

    holds: Callable[[Any], bool]
    says: str


def _number(value: Any) -> bool:
    return type(value) in (float, int) and -LARGEST < value < LARGEST


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _within(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: _number(value) and low <= value <= high


def _or_none(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or holds(value)


def _list_of(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(holds, value))


def _dict_of(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(holds, value.values()))


_TEXT = Kind(_text, "a text")
_BYTES = Kind(_whole, "a number of bytes")
_SETTINGS = Kind(_dict_of(lambda value: True), "settings by name")

FIELDS = {
    "command": _TEXT,
    "benchmark": _TEXT,
    "method": _TEXT,
    "preset": _TEXT,
    "seed": Kind(_whole, "a whole number from 0 on"),
    "config": _SETTINGS,
    "versions": Kind(_dict_of(_text), "texts by name"),
    "device": _TEXT,
    "accuracy_matrix": Kind(_list_of(_list_of(_or_none(_number))), "rows of numbers or null"),
    "acc": Kind(_within(0, 1), "a fraction in [0, 1]"),
    "bwt": Kind(_or_none(_within(-1, 1)), "a difference in [-1, 1] or null"),
    "curves": Kind(_list_of(_dict_of(_list_of(_number))), "lists of numbers by task and name"),
    "selected": Kind(_list_of(_dict_of(_list_of(_whole))), "lists of tasks by task and layer"),
    "ranks": Kind(_dict_of(_list_of(_whole)), "lists of whole numbers by layer"),
    "seconds": Kind(_list_of(_dict_of(_number)), "numbers by task and phase"),
    "peak_memory_bytes": _BYTES,
    "state_bytes": _BYTES,
    "network_bytes": Kind(lambda value: _whole(value) and value > 0, "a number of bytes above 0"),
    "form": Kind(_or_none(_text), "a text or null"),
    "changed": _SETTINGS,
    "untrained": Kind(_or_none(_list_of(_within(0, 1))), "fractions in [0, 1] or null"),
    "figures": Kind(_dict_of(_number), "numbers by name"),
    "digest": _TEXT,
}
