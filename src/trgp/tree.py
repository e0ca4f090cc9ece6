"""A method's state: tensors in nested dictionaries, which a file can store directly."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from .types import State


def leaves(tree: State, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with its path, such as 'memory/fc1/M'."""
    for key, value in tree.items():
        if "/" in key:
            raise ValueError(f"The key {key!r} of a state holds a '/', which separates its levels.")
        if isinstance(value, Tensor):
            yield prefix + key, value
        elif isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}/")
        else:
            raise _misfit(prefix + key, value)


def from_leaves(tensors: Mapping[str, Tensor]) -> State:
    """Invert `leaves`; empty levels are lost."""
    tree: dict[str, Tensor | State] = {}
    for path, tensor in tensors.items():
        *levels, last = path.split("/")
        level = tree
        for key in levels:
            level = level.setdefault(key, {})  # type: ignore[assignment]
            if isinstance(level, Tensor):
                raise ValueError(f"'{path}' of a state lies below a tensor; give it another name.")
        level[last] = tensor
    return tree


def level(tree: State, *keys: str) -> State:
    """Return the level at a path; empty if there is no such path."""
    for key in keys:
        below = tree.get(key, {})
        if isinstance(below, Tensor):
            raise TypeError(f"{'/'.join(keys)} is a tensor, not a level of the state.")
        tree = below
    return tree


def tensors(tree: State) -> dict[str, Tensor]:
    """Return the tensors of a level, without those of deeper levels."""
    return {key: value for key, value in tree.items() if isinstance(value, Tensor)}


def put(tree: State, value: "Tensor | State", *keys: str) -> State:
    """Return the tree with a value at a path; all other parts are shared with the old tree."""
    first, *rest = keys
    return {**tree, first: put(level(tree, first), value, *rest) if rest else value}


def nbytes(tree: State) -> int:
    """Return the size of a tree's tensors in bytes."""
    return sum(tensor.nbytes for _, tensor in leaves(tree))


def in_units(count: int) -> str:
    """Format a number of bytes with a unit."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _misfit(path: str, value: object) -> TypeError:
    return TypeError(
        f"'{path}' of a state is a {type(value).__name__}; keep tensors, in nested dictionaries."
    )
