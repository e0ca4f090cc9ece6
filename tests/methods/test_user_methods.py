"""A method of a user's own: fifteen lines run, resume and are refused like the built-in ones."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from companies import company, one_head
from small_runs import measured_apart, run, some_tasks

from trgp.engine.errors import InputError, RunError
from trgp.engine.events import EpochFinished, Event

ANCHOR = '''
from dataclasses import dataclass
from typing import ClassVar

from trgp.methods import About, Method


@dataclass(frozen=True)
class Anchor(Method):
    """Pulls every weight back to where the last task left it."""

    about: ClassVar[About] = About("regularisation", "a copy of the network", "-", False)
    strength: float = 1.0
    """How hard it pulls."""

    def loss(self, params, state, batch):
        kept = state.get("kept", {})
        pull = sum(((params[name] - old) ** 2).sum() for name, old in kept.items())
        return super().loss(params, state, batch) + 0.5 * self.strength * pull

    def end_task(self, ctx):
        return ctx.params, {"kept": dict(ctx.params)}
'''


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own to work in, and no module of it left behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def written(folder: Path, text: str, name: str = "mine") -> None:
    (folder / f"{name}.py").write_text(text)


def test_fifteen_lines_are_a_method(here: Path) -> None:
    written(here, ANCHOR)
    tasks = some_tasks(2)
    free = run(tasks, "finetune", here / "runs", lr=0.05)
    loose = run(tasks, "mine:Anchor", here / "runs", lr=0.05, strength=1e-30)
    tight = run(tasks, "mine:Anchor", here / "runs", lr=0.05, strength=10.0)
    assert loose.accuracy_matrix == free.accuracy_matrix
    assert loose.curves == free.curves
    assert tight.curves[0] == free.curves[0]
    assert tight.curves[1] != free.curves[1]
    assert tight.config["strength"] == 10.0
    assert tight.changed["strength"] == 10.0
    assert tight.state_bytes == tight.network_bytes
    assert "strength=10.0" in tight.command


def test_an_option_may_be_made_anew_for_every_instance(here: Path) -> None:
    made = "    layers: tuple = field(default_factory=tuple)\n"
    text = ANCHOR.replace("    strength:", made + "    strength:")
    written(here, text.replace("import dataclass", "import dataclass, field"))
    result = run(some_tasks(1), "mine:Anchor", here / "runs", layers=(1, 2))
    assert result.config["layers"] == [1, 2]


def test_it_holds_weights_in_place(here: Path) -> None:
    """With the strongest pull that a rate of 0.05 allows, nothing moves after the first task."""
    written(here, ANCHOR)
    tasks = some_tasks(3)
    gentle, strong = (
        run(tasks, "mine:Anchor", here / "runs", lr=0.05, strength=s) for s in (0.0, 19.0)
    )
    assert strong.curves[2]["loss"][-1] > gentle.curves[2]["loss"][-1]


def test_it_resumes_after_every_epoch(here: Path) -> None:
    written(here, ANCHOR)
    options: dict[str, Any] = {"strength": 0.5, "patience": 1, "epochs": 3}
    whole = run(some_tasks(2), "mine:Anchor", here / "whole", **options)
    seen: set[tuple[int, int]] = set()

    def stop(event: Event) -> None:
        if isinstance(event, EpochFinished) and (event.task, event.epoch) not in seen:
            seen.add((event.task, event.epoch))
            raise EOFError

    parts = None
    for _ in range(20):
        try:
            parts = run(some_tasks(2), "mine:Anchor", here / "parts", observer=stop, **options)
            break
        except EOFError:
            continue
    assert len(seen) > 2
    assert parts is not None
    assert measured_apart(parts) == measured_apart(whole)


def test_another_text_of_the_module_is_another_run(here: Path) -> None:
    """In new processes, as it is with the command line; here by forgetting the module."""
    folders = []
    for text in (ANCHOR, ANCHOR.replace("0.5 *", "0.25 *")):
        written(here, text)
        sys.modules.pop("mine", None)
        run(some_tasks(2), "mine:Anchor", here / "runs", epochs=1)
        folders.append({path.parent for path in here.glob("runs/**/result.json")})
    assert len(folders[0]) == 1
    assert len(folders[1]) == 2


def test_a_state_may_be_named_like_the_parameters(here: Path) -> None:
    """The shortest way to keep a copy of the network, and the first that comes to mind."""
    copies = "{name: p.clone() for name, p in ctx.params.items()}"
    text = ANCHOR.replace('{"kept": dict(ctx.params)}', copies)
    written(here, text.replace('state.get("kept", {})', "state"))
    result = run(some_tasks(2), "mine:Anchor", here / "runs")
    assert result.state_bytes == result.network_bytes
    assert result.digest != run(some_tasks(2), "finetune", here / "runs").digest


COUNTING = """
import torch
from dataclasses import dataclass
from typing import ClassVar
from trgp.methods import About, Method


@dataclass(frozen=True)
class Counting(Method):
    about: ClassVar[About] = About("a", "b", "c", False)
    moving: ClassVar[tuple[str, ...]] = ("count",)

    def begin_task(self, ctx):
        return ctx.params, {"count": torch.zeros(())}

    def step(self, params, grads, state, batch, lr):
        new, _ = super().step(params, grads, state, batch, lr)
        return new, {"count": state["count"] + 1}
"""


def test_what_a_step_changes_in_the_state_survives_an_interruption(here: Path) -> None:
    written(here, COUNTING)
    whole = run(some_tasks(1), "mine:Counting", here / "whole")
    with pytest.raises(EOFError):
        run(some_tasks(1), "mine:Counting", here / "parts", observer=stop_at_an_epoch)
    assert run(some_tasks(1), "mine:Counting", here / "parts").digest == whole.digest


def test_a_step_that_changes_what_it_does_not_name_is_refused(here: Path) -> None:
    """It would be lost in an interruption, and the run would not be the same."""
    written(here, COUNTING.replace('("count",)', "()"))
    with pytest.raises((ValueError, RunError), match="count"):
        run(some_tasks(1), "mine:Counting", here / "runs")


def stop_at_an_epoch(event: Event) -> None:
    if isinstance(event, EpochFinished):
        raise EOFError


HEAD = """
from dataclasses import dataclass
from typing import ClassVar
import torch
from trgp.methods import About, Method
ABOUT = About("a", "b", "c", False)
"""
FLAWED = {
    "no about": ("@dataclass(frozen=True)\nclass Mine(Method):\n    pass", "has no `about`"),
    "no method": ("class Mine:\n    about = ABOUT", "is no method; derive it from"),
    "no class": ("Mine = 3", "is no method; derive it from"),
    "not there": ("", "has no 'Mine'"),
    "no import": ("import nowhere_to_be_found", "cannot be imported: ModuleNotFoundError"),
    "no Python": ("def", "cannot be imported: SyntaxError"),
    "not frozen": (
        "@dataclass\nclass Mine(Method):\n    about: ClassVar[About] = ABOUT",
        "cannot inherit non-frozen",
    ),
    "no default": (
        "@dataclass(frozen=True)\nclass Mine(Method):\n    about: ClassVar[About] = ABOUT\n"
        "    strength: float",
        "strength",
    ),
    "no About": ("@dataclass(frozen=True)\nclass Mine(Method):\n    about = 'best'", "about"),
    "a field of the training": (
        "@dataclass(frozen=True)\nclass Mine(Method):\n    about: ClassVar[About] = ABOUT\n"
        "    lr: float = 3.0",
        "lr",
    ),
}


@pytest.mark.parametrize("name", FLAWED)
def test_a_flawed_method_is_a_sentence(name: str, here: Path) -> None:
    text, sentence = FLAWED[name]
    written(here, HEAD + text)
    with pytest.raises(InputError, match=sentence):
        run(some_tasks(1), "mine:Mine", here / "runs")
    assert not (here / "runs").exists()


STATES = {
    "a number": ('{"count": 3}', "count"),
    "a list": ('{"kept": [torch.ones(2)]}', "kept"),
    "a slash": ('{"a/b": torch.ones(2)}', "a/b"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_no_file_can_hold_is_a_sentence(name: str, here: Path) -> None:
    state, sentence = STATES[name]
    written(
        here,
        HEAD
        + "@dataclass(frozen=True)\nclass Mine(Method):\n    about: ClassVar[About] = ABOUT\n"
        + f"    def begin_task(self, ctx):\n        return ctx.params, {state}\n",
    )
    with pytest.raises((ValueError, TypeError, RunError), match=sentence):
        run(some_tasks(1), "mine:Mine", here / "runs")


def test_a_method_for_several_heads_is_refused_where_there_is_one(here: Path) -> None:
    written(here, ANCHOR.replace('"-", False)', '"-", False, several_heads=True)'))
    with pytest.raises(InputError, match="mine:Anchor needs a head for every task"):
        run(some_tasks(1), "mine:Anchor", here / "runs")
    assert not (here / "runs").exists()


def test_its_wrong_settings_are_sentences(here: Path) -> None:
    written(here, ANCHOR)
    with pytest.raises(InputError, match=r"no setting 'strenght' for mine:Anchor.*'strength'"):
        run(some_tasks(1), "mine:Anchor", here / "runs", strenght=1.0)
    with pytest.raises(InputError, match="is no method; write it as module:Class"):
        run(some_tasks(1), "mine:", here / "runs")
    assert not (here / "runs").exists()


DECAYED = '''
from dataclasses import dataclass

from trgp.methods.trgp import OWN, TRGPMethod


@dataclass(frozen=True)
class Decayed(TRGPMethod):
    """Pulls the scalings towards the identity."""

    decay: float = 3.0
    """How hard it pulls."""

    def loss(self, params, state, batch):
        pull = sum((p**2).sum() for name, p in params.items() if name.startswith(OWN))
        return super().loss(params, state, batch) + 0.5 * self.decay * pull
'''


def test_a_loss_that_looks_at_scalings_finds_them_whoever_else_learns(here: Path) -> None:
    """In the literal form, whose stacks have none."""
    written(here, DECAYED)
    options: dict[str, Any] = {"form": "literal", "epsilon": 0.0, "threshold": 0.9, "epochs": 4}
    tasks = some_tasks(3)
    together = company(tasks, "mine:Decayed", here / "together", one_head, **options)
    for seed, result in together.items():
        alone = company(tasks, "mine:Decayed", here / "alone", one_head, [seed], **options)
        assert result.curves == alone[seed].curves
    free = company(tasks, "mine:Decayed", here / "free", one_head, decay=0.0, **options)
    assert free[0].curves != together[0].curves


COUNTED = '''
from dataclasses import dataclass
from typing import ClassVar

import torch

from trgp.methods.gpm import GPMMethod


@dataclass(frozen=True)
class Counted(GPMMethod):
    """Counts its steps."""

    moving: ClassVar[tuple[str, ...]] = ("count",)

    def begin_task(self, ctx):
        params, state = super().begin_task(ctx)
        return params, {**state, "count": {"n": torch.zeros(())}}

    def step(self, params, grads, state, batch, lr):
        new, changes = super().step(params, grads, state, batch, lr)
        return new, {**changes, "count": {"n": state["count"]["n"] + 1}}
'''


def test_what_moves_also_moves_in_a_stack(here: Path) -> None:
    written(here, COUNTED)
    together = company(some_tasks(2), "mine:Counted", here / "runs", one_head, threshold=0.9)
    assert len({result.digest for result in together.values()}) == len(together) == 3
