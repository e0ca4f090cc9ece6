"""Names of the values that every part of the package hands on, and patterns over module names."""

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
"""By layer the old tasks that a task trusts, strongest first."""

Norm = Literal["freeze", "per_task", "shared"]
"""What becomes of norm layers, whose parameters no projection can protect."""

Params = Mapping[str, Tensor]
"""By its name in the network everything it computes with, buffers too, and a method's own
trainable tensors beside them."""

Rate = float | Tensor
"""A learning rate: a number, or a tensor where a step is captured."""

State: TypeAlias = Mapping[str, Union[Tensor, "State"]]
"""A method's state: tensors in nested dictionaries, which a file can hold as they are."""


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern names this module (or parameter) or one of the modules it lies in."""
    parts = name.split(".")
    prefixes = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return any(fnmatchcase(p, pattern) for p in prefixes for pattern in patterns)
