"""Options given as a number, as a number per layer, or as a schedule over layers and tasks."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from .core.trust_region import TaskId

Option = float | Mapping[str, float] | Callable[[str, TaskId], float]


def check_option(name: str, option: Option, *, zero: bool) -> None:
    """Refuse what is wrong for every layer and task; a function's values are checked when used."""
    if isinstance(option, Mapping):
        for pattern, value in option.items():
            _check_value(f"{name} for '{pattern}'", value, zero=zero)
    elif not callable(option):
        _check_value(name, option, zero=zero)


def value_of(name: str, option: Option, layer: str, task: TaskId, *, zero: bool) -> float:
    """The option's value for one layer in one task; the first matching pattern decides."""
    if isinstance(option, Mapping):
        for pattern, value in option.items():
            if fnmatchcase(layer, pattern):
                return value
        raise ValueError(
            f"{name} gives no value for layer '{layer}'; add a pattern that matches it, "
            "for instance '*'."
        )
    if callable(option):
        value = option(layer, task)
        _check_value(f"{name}({layer!r}, {task!r})", value, zero=zero)
        return float(value)
    return option


def _check_value(name: str, value: object, *, zero: bool) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (0 <= value <= 1) or (value == 0 and not zero):  # type: ignore[operator]
        interval = "[0, 1]" if zero else "(0, 1]"
        raise ValueError(f"{name} must be a number in {interval}, not {value!r}.")


def check_count(name: str, value: int | None) -> None:
    """Refuse what is no number of things."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}.")


def check_patterns(name: str, patterns: Sequence[str]) -> list[str]:
    """Refuse a bare string, whose letters would each be a pattern."""
    if isinstance(patterns, str):
        raise TypeError(f"{name} must be a list of patterns, for instance {name}=[{patterns!r}].")
    return list(patterns)
