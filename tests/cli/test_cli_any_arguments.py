"""Whatever is typed: a run, or a sentence and exit code 2 with nothing on the disk."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_calls import SMALL, Trgp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trgp.cli import main
from trgp.cli.fields import settings as fields_of
from trgp.engine.config import configure, defaults
from trgp.engine.events import Event
from trgp.engine.run import run
from trgp.methods import METHODS
from trgp.results.result import Results
from trgp.results.store import read

FIELDS = sorted(
    {
        name
        for benchmark in ("permuted-digits", "cifar100-superclass", "five-datasets")
        for method in METHODS
        for name in fields_of(configure(benchmark, method))
    }
)
OTHERS = ["method", "preset", "seed", "seeds", "device", "data-root", "fresh", "help", "x"]
OTHERS += ["jobs", "together"]
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=6)


@st.composite
def misspelt(draw: st.DrawFn, words: list[str]) -> str:
    word = draw(st.sampled_from(words))
    place = draw(st.integers(0, len(word)))
    return word[:place] + draw(st.sampled_from(["", "x", "-", "_", "é"])) + word[place + 1 :]


VALUES = st.one_of(
    st.integers(-3, 12).map(str),
    st.floats(width=32).map(str),
    st.sampled_from(["", "None", "True", "no", "0.9,0.8,0.7", "1,2", "cpu", "trgp", "gpm", "a:b"]),
    st.sampled_from(["freeze", "layer", "auto", "official", "paper", "-", "-1", "1e9", "٣", "[x]"]),
    TEXT.filter(lambda text: not text.startswith("--")),
)


@st.composite
def option(draw: st.DrawFn) -> list[str]:
    known = st.sampled_from(FIELDS + OTHERS)
    name = draw(known | st.sampled_from(FIELDS).map(lambda name: f"no-{name}") | misspelt(FIELDS))
    name = draw(st.sampled_from([name, name.replace("_", "-")]))
    values = draw(st.lists(VALUES, max_size=2))
    if values and draw(st.booleans()):
        return [f"--{name}={values[0]}", *values[1:]]
    return [f"--{name}", *values]


FITTING = (
    "--lr 0.1",
    "--epochs=2",
    "--test_batch 10",
    "--tasks 1",
    "--threshold 0.9",
    "--threshold 0.9,0.8,0.7",
    "--no-scaling",
    "--no-scaling fc1 fc2",
    "--evaluate-unseen",
    "--no-first-task-short",
    "--preset official",
    "--seed 3",
    "--seeds 1,2",
    "--device cpu",
    "--quiet",
    "--log-json log",
)
ARGUMENTS = st.builds(
    lambda benchmark, options: [benchmark, *(arg for each in options for arg in each)],
    st.sampled_from(["permuted-digits", "split-digits"]),
    st.lists(st.sampled_from(FITTING).map(str.split), max_size=4)
    | st.lists(st.sampled_from(FITTING).map(str.split) | option(), max_size=4),
)
WORDS = st.lists(TEXT | misspelt(["permuted-digits", "--quiet", "--method"]), max_size=4)


class BegunError(Exception):
    """A run was accepted; whether it learns anything is not asked here."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Results:
    out = tmp_path_factory.mktemp("finished")
    assert main(["run", *SMALL, "--quiet", "--out", str(out)]) == 0
    (path,) = out.rglob("result.json")
    return read(path, defaults)


@pytest.fixture
def until_begun(finished: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run ends where it would begin to learn."""

    def stop(event: Event) -> None:
        raise BegunError

    def only_begun(*args: Any, observer: Callable[[Event], None], **options: Any) -> Results:
        try:
            return run(*args, observer=stop, **options)
        except BegunError:
            return finished

    monkeypatch.setattr("trgp.cli.parallel.run", only_begun)


@pytest.mark.usefixtures("until_begun")
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments=ARGUMENTS | WORDS)
def test_run(trgp: Trgp, here: Path, arguments: list[str]) -> None:
    before = sorted(here.rglob("*"))
    code, _, err = trgp("run", *arguments)
    assert code in (0, 2)
    if code == 2:
        assert err.startswith("trgp: ")
        assert sorted(here.rglob("*")) == before


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    command=st.sampled_from(["list", "table", "show", "compare", "data", "data list", "", "tabel"]),
    words=st.lists(TEXT | st.sampled_from(["--help", "--data-root", "methods", "."]), max_size=3),
)
def test_other_commands(trgp: Trgp, here: Path, command: str, words: list[str]) -> None:
    code, _, err = trgp(*command.split(), *words)
    assert code in (0, 2)
    assert (code == 2) == err.startswith("trgp: ")
    assert not list(here.iterdir())
