"""Check the content of a result.json: fields of the right kinds that agree with each other."""

import hashlib
import json
import math
import os
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from ..files import (
    SETTINGS,
    Kind,
    check_fields,
    dict_of,
    is_number,
    is_text,
    is_whole,
    list_of,
    or_none,
)
from . import metrics
from .result import SCHEMA_VERSION, Result

ROUNDING = 1e-9  # by which means computed with another Python may differ


def checksum(content: Mapping[str, Any]) -> str:
    """Return the sha256 of a result.json without its checksum, whatever its layout."""
    held = {name: value for name, value in content.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()


def checked(content: Any, path: str | os.PathLike[str]) -> Result:
    """Return the result, or raise a sentence about the first thing wrong."""
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no fields of a result; delete it and repeat the run.")
    version = content.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema_version {reprlib.repr(version)}, this package reads "
            f"{SCHEMA_VERSION}; repeat the run, or update the package if a newer one wrote it."
        )
    check_fields(content, FIELDS, path, "repeat the run")
    known = [field.name for field in fields(Result)]
    if unknown := [*(content.keys() - {*known})]:
        raise ValueError(f"{path} has the unknown field {unknown[0]!r}; repeat the run.")
    said = content.get("checksum")  # None in results of 0.1
    if said is not None and said != checksum(content):
        raise ValueError(
            f"{path} is damaged or was changed by hand: its checksum does not match; restore it, "
            "or delete it and repeat the run."
        )
    result = Result(**{name: content[name] for name in known if name in content})
    _check_figures(result, path)
    return result


def _check_figures(result: Result, path: str | os.PathLike[str]) -> None:
    """Refuse a result in which ACC or BWT differs from that of the accuracy matrix."""
    matrix = result.accuracy_matrix
    try:
        # Figures that the run defines must be computable from the matrix.
        own: dict[str, float | None] = {"acc": metrics.acc(matrix)}
        _ = result.mean_diagonal, result.forgetting, result.fwt
        if result.mean_diagonal is not None:  # tasks learnt jointly have no BWT
            own["bwt"] = metrics.bwt(matrix)
    except ValueError as error:
        raise ValueError(
            f"{path} holds no usable accuracies ({str(error).rstrip('.')}); repeat the run."
        ) from None
    for name, value in own.items():
        said: float | None = getattr(result, name)
        if said is None or value is None:
            alike = said is value
        else:
            alike = math.isclose(said, value, abs_tol=ROUNDING)
        if not alike:
            raise ValueError(
                f"{path} contradicts itself: its {name} is {said}, but its accuracy matrix gives "
                f"{value}; restore it, or delete it and repeat the run."
            )


def _within(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: is_number(value) and low <= value <= high


_TEXT = Kind(is_text, "a text")
_BYTES = Kind(is_whole, "a number of bytes")

FIELDS = {
    "command": _TEXT,
    "benchmark": _TEXT,
    "method": _TEXT,
    "preset": _TEXT,
    "seed": Kind(is_whole, "a whole number from 0 on"),
    "config": SETTINGS,
    "versions": Kind(dict_of(is_text), "texts by name"),
    "device": _TEXT,
    "accuracy_matrix": Kind(list_of(list_of(or_none(is_number))), "rows of numbers or null"),
    "acc": Kind(_within(0, 1), "a fraction in [0, 1]"),
    "bwt": Kind(or_none(_within(-1, 1)), "a difference in [-1, 1] or null"),
    "curves": Kind(list_of(dict_of(list_of(is_number))), "lists of numbers by task and name"),
    "selected": Kind(list_of(dict_of(list_of(is_whole))), "lists of tasks by task and layer"),
    "ranks": Kind(dict_of(list_of(is_whole)), "lists of whole numbers by layer"),
    "seconds": Kind(list_of(dict_of(is_number)), "numbers by task and phase"),
    "peak_memory_bytes": _BYTES,
    "state_bytes": _BYTES,
    "network_bytes": Kind(lambda value: is_whole(value) and value > 0, "a number of bytes above 0"),
    "form": Kind(or_none(is_text), "a text or null"),
    "changed": SETTINGS,
    "untrained": Kind(or_none(list_of(_within(0, 1))), "fractions in [0, 1] or null"),
    "figures": Kind(dict_of(is_number), "numbers by name"),
    "digest": _TEXT,
}
