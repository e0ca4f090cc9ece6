"""Which room of the package may import which; imports for types alone count like any other."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import trgp
from trgp.types import VERSION

SRC = Path(trgp.__file__).parent
# The modules and folders of src/trgp by room; `trgp` itself is what users import.
ROOMS = {
    "shared": "draws files gates lookup matrix_figures options pixels tree types",
    "core": "core",
    "learner": "learner",
    "methods": "methods",
    "benchmarks": "benchmarks",
    "results": "results",
    "engine": "engine",
    "fast": "fast",
    "report": "report",
    "cli": "cli __main__",
    "testing": "testing",
    "trgp": "trgp",
}
# Beside itself and what is shared, by room: other rooms, or single modules of them.
MAY_IMPORT = {
    "shared": "",
    "core": "",
    "learner": "core",
    "methods": "core",
    "benchmarks": "",
    "results": "",
    "engine": "core methods benchmarks results",
    "fast": "core methods benchmarks.models engine",
    "report": "methods benchmarks results engine",
    "cli": "methods benchmarks results engine report",
    "testing": "core learner",
    "trgp": "core.layer_kinds learner engine.run",
}
# What still breaks the contract or closes a cycle. Take edges away from here; add none.
BREAKING = """
core.products -> fast.kernels
engine.network -> fast.kernels
results.render -> benchmarks
results.render -> benchmarks.common
"""
ROOM_OF = {part: room for room, parts in ROOMS.items() for part in parts.split()}
Edges = set[tuple[str, str]]


def part(module: str) -> str:
    """The module or folder of src/trgp that a module lies in."""
    return module.split(".")[0]


def imports() -> Edges:
    """Every import of one module by another, by their names within trgp."""
    paths = {path.relative_to(SRC).with_suffix(""): path for path in SRC.rglob("*.py")}
    names = {p.parent if p.name == "__init__" else p: path for p, path in paths.items()}
    modules = {".".join(p.parts) or "trgp": path for p, path in names.items()}
    found = set()
    for module, path in modules.items():
        package = path.parent.relative_to(SRC.parent).parts
        for node in ast.walk(ast.parse(path.read_text())):
            targets = []
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else ()
                start = ".".join([*base, *filter(None, [node.module])])
                targets = [f"{start}.{alias.name}" for alias in node.names]
            for target in targets:
                if target.split(".")[0] == "trgp":
                    inside = target.removeprefix("trgp").removeprefix(".")
                    known = inside if inside in modules else inside.rpartition(".")[0]
                    found.add((module, known or "trgp"))
    return found


def allowed(edge: tuple[str, str]) -> bool:
    """Whether the room of the importing module may import the other module."""
    here, there = edge
    room = ROOM_OF[part(here)]
    parts = [ROOMS.get(word, word) for word in (room, "shared", *MAY_IMPORT[room].split())]
    return any(f"{there}.".startswith(f"{each}.") for each in " ".join(parts).split())


def cycle(edges: Iterable[tuple[str, str]]) -> list[str]:
    """The modules of one cycle, if there is any."""
    order: TopologicalSorter[str] = TopologicalSorter()
    for here, there in edges:
        if here != there:
            order.add(here, there)
    try:
        order.prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


EDGES = imports()
LISTED = {(here, there) for here, _, there in map(str.split, BREAKING.strip().splitlines())}


def test_rooms_import_what_they_may() -> None:
    assert sorted(edge for edge in EDGES - LISTED if not allowed(edge)) == []


def test_the_list_of_breaking_imports_only_shrinks() -> None:
    assert sorted(LISTED - EDGES) == [], "These are gone: delete them from BREAKING."


@pytest.mark.parametrize("whole", [False, True], ids=["modules", "parts"])
def test_there_is_no_cycle(whole: bool) -> None:
    edges = EDGES - LISTED
    assert cycle({(part(a), part(b)) for a, b in edges} if whole else edges) == []


def test_what_is_private_to_the_learner_is_read_in_one_place() -> None:
    """By tests: all of them but support/inside use what users use."""
    tests = Path(__file__).parent
    allowed = {tests / "support" / "inside.py", Path(__file__)}
    private = re.compile(r"\b(learner|loaded|twin)\._\w+")
    found = {
        str(path.relative_to(tests)): names
        for path in tests.rglob("*.py")
        if path not in allowed and (names := private.findall(path.read_text()))
    }
    assert found == {}


def test_the_learners_alone_load_little() -> None:
    """And `run` is there, once it is asked for."""
    program = """
import sys, trgp
trgp.TRGP
print(sum(name.partition(".")[0] == "trgp" for name in sys.modules))
from trgp import *
assert run is trgp.run is sys.modules["trgp.engine.run"].run
assert not hasattr(trgp, "walk")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    assert int(done.stdout) <= 37


def test_the_version_is_one() -> None:
    """It stands twice, because `trgp` is imported before torch and `types` with it."""
    project = tomllib.loads((SRC.parents[1] / "pyproject.toml").read_text())["project"]
    assert trgp.__version__ == VERSION == project["version"]
