"""Options given as a number, as a number per layer, or as a schedule over layers and tasks."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real

from .types import Norm, TaskId, matches

Option = float | Mapping[str, float] | Callable[[str, TaskId], float]
RankOption = float | Mapping[str, float | None] | None


def check_option(name: str, option: Option, *, zero: bool) -> Option:
    """Check an option and convert its numbers; a function's values are checked when used."""
    if isinstance(option, Mapping):
        return {p: _value(f"{name} for '{p}'", v, zero=zero) for p, v in option.items()}
    return option if callable(option) else _value(name, option, zero=zero)


def value_of(name: str, option: Option, layer: str, task: TaskId, *, zero: bool) -> float:
    """Return the option's value for a layer in a task; the first matching pattern decides."""
    if callable(option):
        return _value(f"{name}({layer!r}, {task!r})", option(layer, task), zero=zero)
    if not isinstance(option, Mapping):
        return option
    for pattern, value in option.items():
        if matches(layer, [pattern]):
            return value
    raise ValueError(
        f"{name} gives no value for layer '{layer}'; add a pattern that matches it, for instance "
        "'*'."
    )


def _value(name: str, value: object, *, zero: bool) -> float:
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else -1.0
    if not 0 <= number <= 1 or (number == 0 and not zero):
        interval = "[0, 1]" if zero else "(0, 1]"
        raise ValueError(f"{name} must be a number in {interval}, not {value!r}.")
    return number


def check_rank(option: RankOption) -> RankOption:
    """Check an upper bound on ranks: a whole number, a share in (0, 1], or these by pattern."""
    if isinstance(option, Mapping):
        return {pattern: _rank(value) for pattern, value in option.items()}
    return _rank(option)


def _rank(value: float | None) -> float | None:
    """Convert to a plain int or float, which a file can store, from any library's number."""
    if value is None:
        return None
    if isinstance(value, Integral) and not isinstance(value, bool) and value >= 1:
        return int(value)
    if isinstance(value, Real) and not isinstance(value, Integral) and 0 < value <= 1:
        return float(value)
    raise ValueError(
        "max_rank must be a whole number of at least 1, a share in (0, 1], a mapping from "
        f"patterns to either, or None, not {value!r}."
    )


def rank_of(option: RankOption, layer: str, inputs: int) -> int | None:
    """Return the upper bound on a layer's rank; the first matching pattern decides."""
    if isinstance(option, Mapping):
        option = next((v for p, v in option.items() if matches(layer, [p])), None)
    if option is None or isinstance(option, Integral):
        return option
    return max(1, int(option * inputs))


def check_count(name: str, value: int) -> int:
    """Check a count and convert it to a plain int, which a file can store."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}.")
    return int(value)


def check_number(name: str, value: float, *, above: float) -> float:
    """Check that the value is a finite number above a bound."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not above < value <= sys.float_info.max:
        raise ValueError(f"{name} must be a finite number above {above:g}, not {value!r}.")
    return float(value)


def check_norm(norm: Norm) -> Norm:
    """Check the option `norm`, the handling of norm layers."""
    if norm not in ("freeze", "per_task", "shared"):
        raise ValueError(f"norm must be 'freeze', 'per_task' or 'shared', not {norm!r}.")
    return norm


def check_patterns(name: str, patterns: Sequence[str]) -> list[str]:
    """Reject entries that are no strings, and a bare string, which would split into letters."""
    listed = isinstance(patterns, Iterable) and not isinstance(patterns, str)
    if not listed or not all(isinstance(p, str) for p in patterns):
        example = [patterns] if isinstance(patterns, str) else ["heads.*"]
        raise TypeError(f"{name} must be a list of patterns, for instance {name}={example}.")
    return list(patterns)
