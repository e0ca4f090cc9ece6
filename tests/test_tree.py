"""A state is a tree of tensors, which goes through a flat file and back."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trgp.tree import from_leaves, leaves, level, nbytes, put, tensors

NAMES = st.text(st.characters(exclude_characters="/"), max_size=4)
LEAVES = st.integers(0, 3).map(lambda n: torch.arange(n, dtype=torch.float64))
TREES = st.dictionaries(
    NAMES,
    st.recursive(
        LEAVES, lambda below: st.dictionaries(NAMES, below, min_size=1, max_size=3), max_leaves=6
    ),
    max_size=4,
)


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a is b
    return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)


@given(TREES)
def test_a_tree_comes_back_from_its_leaves(tree: Any) -> None:
    flat = dict(leaves(tree))
    assert alike(from_leaves(flat), tree)
    assert nbytes(tree) == sum(8 * tensor.numel() for tensor in flat.values())


@given(TREES, st.lists(NAMES, min_size=1, max_size=3))
def test_putting_changes_one_place_and_not_the_old_tree(tree: Any, path: list[str]) -> None:
    before = dict(leaves(tree))
    value = torch.ones(1)
    try:
        new = put(tree, value, *path)
    except TypeError:  # on the way lies a tensor
        assert any(isinstance(_at(tree, path[:k]), torch.Tensor) for k in range(1, len(path)))
        return
    *way, last = path
    assert tensors(level(new, *way))[last] is value
    assert dict(leaves(tree)).keys() == before.keys()
    place = "/".join(path)
    for key, tensor in before.items():
        if key != place and not key.startswith(f"{place}/"):
            assert dict(leaves(new))[key] is tensor


def _at(tree: Any, path: list[str]) -> Any:
    for key in path:
        tree = tree.get(key, {}) if isinstance(tree, dict) else {}
    return tree


def test_what_is_not_there_is_empty() -> None:
    tree = {"a": {"b": torch.ones(2)}}
    assert level(tree, "a", "c", "d") == {}
    assert tensors(tree) == {}
    with pytest.raises(TypeError, match="a/b/c is a tensor, not a level"):
        level(tree, "a", "b", "c")


def test_a_name_with_the_separator_is_refused() -> None:
    with pytest.raises(ValueError, match="holds a '/'"):
        dict(leaves({"a": {"b/c": torch.ones(1)}}))


def test_a_tensor_below_a_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="'a/b' of a state lies below a tensor"):
        from_leaves({"a": torch.ones(1), "a/b": torch.ones(1)})
