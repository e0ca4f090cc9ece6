"""A user's own sweep: a TOML file with lists to combine, and with single cells."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...lookup import meant
from ...types import PathLike
from ..sweep_grid import ONE_HEAD_ONLY, Grid

KEYS = ("benchmarks", "methods", "presets", "seeds", "options", "cells")
Table = Mapping[str, Any]


def read(path: PathLike) -> list[Grid]:
    """Read the grids of a file, or raise a sentence about its first error."""
    try:
        content = tomllib.loads(Path(path).read_bytes().decode())
    except FileNotFoundError:
        raise FileNotFoundError(f"There is no file {path}; give a sweep file.") from None
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"{path} cannot be read: {reason}; give a readable file.") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML ({error}); see docs/sweeps.md.") from None
    for key in content:
        if key not in KEYS:
            raise ValueError(f"A sweep has no '{key}'; {meant(key, KEYS)}")
    seeds = content.get("seeds", 1)
    if not isinstance(seeds, (int, list)):
        raise ValueError("seeds must be a count, as in 5, or a list, as in [1, 2, 37].")
    benchmarks, methods = _names(content, "benchmarks"), _names(content, "methods")
    presets = _names(content, "presets") if "presets" in content else ["paper"]
    grids = _explicit(content.get("cells", []), seeds)
    if benchmarks and methods and presets:
        options, own = _options(content.get("options", {}), methods)
        grids.insert(0, Grid(benchmarks, methods, presets, seeds, options, own))
    elif not grids or any(key in content for key in ("benchmarks", "methods", "options")):
        raise ValueError("There is nothing to combine; list benchmarks and methods.")
    return grids


def _names(content: Table, key: str) -> list[str]:
    names = content.get(key, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f'{key} must be a list of names, as in {key} = ["..."].')
    return _each_once(key, names)


def _options(content: Any, methods: list[str]) -> tuple[Table, dict[str, Table]]:
    """Split the options into those of all methods and those of one."""
    if not isinstance(content, dict):
        raise ValueError("options must be a table of settings, under [options].")
    own = {key: value for key, value in content.items() if isinstance(value, dict)}
    for method in own:
        if method not in methods:
            raise ValueError(
                f"[options.{method}] names none of the methods; {meant(method, methods)}"
            )
    shared = {key: value for key, value in content.items() if key not in own}
    return _dimensions(shared), {method: _dimensions(table) for method, table in own.items()}


def _dimensions(table: Table) -> dict[str, list[Any]]:
    """Return the list of values of each setting."""
    found = {}
    for key, value in table.items():
        values = value if isinstance(value, list) else [value]
        if not values:
            raise ValueError(f"{key} has no value; give one, or leave it out.")
        for each in values:
            _check_plain(key, each)
        found[key] = _each_once(key, values)
    return found


def _explicit(content: Any, seeds: int | list[int]) -> list[Grid]:
    """Return single cells as grids; in a cell, a list is the value of a setting."""
    if not isinstance(content, list) or not all(isinstance(cell, dict) for cell in content):
        raise ValueError("cells must be tables, each under [[cells]].")
    grids = []
    for cell in content:
        for key in ("benchmark", "method"):
            if not isinstance(cell.get(key), str):
                raise ValueError(f'A cell needs a {key}, as in {key} = "...".')
        benchmark, method, preset = cell["benchmark"], cell["method"], cell.get("preset", "paper")
        if not isinstance(preset, str):
            raise ValueError('The preset of a cell must be its name, as in preset = "paper".')
        own = {k: v for k, v in cell.items() if k not in ("benchmark", "method", "preset")}
        for key, value in own.items():
            _check_plain(key, value)
        options = {key: [value] for key, value in own.items()}
        grids.append(Grid([benchmark], [method], [preset], seeds, options))
        if grids[-1].left_out:
            raise ValueError(f"{method} on {benchmark}: {ONE_HEAD_ONLY}")
    return grids


def _check_plain(key: str, value: Any) -> None:
    """Refuse a value that is no number, text, true or false, or a list of them."""
    for each in value if isinstance(value, list) else [value]:
        if not isinstance(each, (bool, int, float, str)):
            raise ValueError(f"{key} is {each!r}; give a number, a text, or a list of them.")


def _each_once(key: str, values: list[Any]) -> list[Any]:
    for i, value in enumerate(values):
        # 1 and true are equal, but not the same value.
        if any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values[:i]):
            nested = "" if key in KEYS else f"; put a list value in a list, {key} = [[...]]"
            raise ValueError(f"{key} has {value!r} twice; give each once{nested}.")
    return values
