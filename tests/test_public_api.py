"""docs/api.md lists the public names, and the package has exactly these."""

import inspect
import re
from pathlib import Path

import pytest
from torch import nn

import trgp
import trgp.methods
from trgp.cli import COMMANDS

PAGE = (Path(__file__).parent.parent / "docs/api.md").read_text()
ROW = re.compile(r"^\| `(\w+)(\(.*?\))?` \| (.*?) \|$", flags=re.MULTILINE)
INTERNAL = {"functions", "plain", "pooled", "param_groups"}


def section(title: str) -> str:
    """The text of a section of the page."""
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)
    return str(found)


def names(title: str) -> set[str]:
    """The names that the tables of a section list."""
    return {name for name, _, _ in ROW.findall(section(title))}


def public(learner: trgp.GPM) -> set[str]:
    """The names of a learner without an underscore, on its class and on itself."""
    own = {*dir(type(learner)), *vars(learner)}
    return {name for name in own if not name.startswith("_")}


def test_the_page_lists_the_names_of_the_package() -> None:
    assert names("The module `trgp`") == {*trgp.__all__}
    assert all(getattr(trgp, name) is not None for name in trgp.__all__)


@pytest.mark.parametrize("kind", [trgp.GPM, trgp.TRGP])
def test_the_page_lists_the_names_of_the_learners(kind: type[trgp.GPM]) -> None:
    rows = ROW.findall(section("The learners"))
    listed = {name for name, _, on in rows if on != "TRGP" or kind is trgp.TRGP}
    assert public(kind(nn.Linear(3, 2))) - INTERNAL == listed
    for name in INTERNAL:
        assert f"`{name}`" in section("The learners")
        assert hasattr(kind, name)


def test_the_page_has_the_arguments_of_the_methods() -> None:
    called = [(name, args) for name, args, _ in ROW.findall(section("The learners")) if args]
    assert len(called) > 10
    for name, args in called:
        expected = [*inspect.signature(getattr(trgp.GPM, name)).parameters]
        assert re.findall(r"\w+", args) == [each for each in expected if each != "self"]


@pytest.mark.parametrize("kind", [trgp.GPM, trgp.TRGP])
def test_every_option_is_an_attribute(kind: type[trgp.GPM]) -> None:
    options = {*inspect.signature(kind).parameters}
    assert options == {*vars(kind(nn.Linear(3, 2)))} - {"_state"} | {"model"}


def test_the_page_lists_the_commands_and_the_names_for_methods() -> None:
    for name in COMMANDS:
        assert f"`{name}`" in section("The command `trgp`")
    assert names("Methods of your own") == {*trgp.methods.__all__}
