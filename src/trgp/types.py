"""Types shared by all parts of the package, and patterns over module names."""

import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias, TypeVar, Union

from torch import Tensor

VERSION = "0.1.0"

PathLike = str | os.PathLike[str]

TaskId = int | str
J = TypeVar("J", bound=TaskId)
Selected = dict[str, list[J]]
"""By layer: the trusted tasks of a task, strongest first."""

Norm = Literal["freeze", "per_task", "shared"]
"""Handling of norm layers, whose parameters no projection can protect."""

Params = Mapping[str, Tensor]
"""All tensors that a network computes with, by their names in it, including buffers; and a method's
own trainable tensors."""

Rate = float | Tensor
"""A learning rate: a number, or a tensor in a captured step."""

State: TypeAlias = Mapping[str, Union[Tensor, "State"]]
"""A method's state: tensors in nested dictionaries, which a file can store directly."""


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches this module (or parameter) or a module that contains it."""
    parts = name.split(".")
    prefixes = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return any(fnmatchcase(p, pattern) for p in prefixes for pattern in patterns)
