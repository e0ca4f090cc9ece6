"""Settings: presets, names, values, and what makes another configuration."""

import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_runs import run, some_tasks
from torch import nn

import trgp
from trgp.benchmarks import NAMES, entry
from trgp.benchmarks.models import ResNet18
from trgp.engine.config import Training, configure
from trgp.engine.errors import InputError
from trgp.engine.events import Event
from trgp.engine.run import check_seeds
from trgp.methods import METHODS
from trgp.methods.trgp import TRGPMethod
from trgp.results.store import run_folder

PAIRS = [(name, method) for name in NAMES for method in METHODS]


# ---- presets ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_of_every_method_is_a_configuration(name: str) -> None:
    first, second, *others = entry(name).presets
    assert (first, second) == ("paper", "official")
    assert others == (["best"] if name in ("pmnist", "split-cifar100") else [])
    for preset in entry(name).presets:
        for method in METHODS:
            config = configure(name, method, preset)
            assert config.changed == {}
            assert json.dumps(config.settings)
            assert (config.benchmark, config.method_name, config.preset) == (name, method, preset)


QUIRKS = {
    "first_task_short": True,
    "strongest_unprotected": True,
    "unscaled_inputs": True,
    "first_layer_gate": True,
}
THIRD = {"third_task_trusts_second": True}
SUPERCLASS = {"scrambled": True, "fixed_split": True, "test_batch": 64}
FIVE = {"epochs": 100, "mnist_for_fashion": True, "fixed_split": True}
CIFAR_IMAGES = (24, 100, 100, 125, 125)
LENET_IMAGES = (24, 100, 125, 125)


def residual_images() -> tuple[int, ...]:
    """Of the 3 x 3 convolutions 8 times 10, 3 times 50, 6 times 100; a shortcut as its block's."""
    counts = iter([10] * 8 + [50] * 3 + [100] * 6)
    found: dict[str, int] = {}
    for name, module in ResNet18().named_modules():
        if isinstance(module, nn.Conv2d):
            block = name.partition(".shortcut")[0]
            found[name] = found[f"{block}.conv1"] if "shortcut" in name else next(counts)
    return tuple(found.values())


SHORTCUTS = {"images_per_layer": residual_images(), "no_scaling": ("*.shortcut",), **THIRD}
# What the published code does otherwise than the paper says: for all methods, for GPM, for TRGP.
DIFFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "pmnist": ({"test_batch": 64}, {}, {"epsilon": 0.2, **THIRD}),
    "split-cifar100": (
        {},
        {"images_per_layer": CIFAR_IMAGES},
        {"images_per_layer": CIFAR_IMAGES, "norm": "shared", "test_passes": 10},
    ),
    "cifar100-superclass": (
        SUPERCLASS,
        {"images_per_layer": LENET_IMAGES},
        {"images_per_layer": LENET_IMAGES, "no_scaling": ("fc1", "fc2")},
    ),
    "five-datasets": (
        FIVE,
        {"images_per_layer": residual_images()},
        {**SHORTCUTS, "test_passes": 5},
    ),
    "split-miniimagenet": (
        {"epochs": 200, "fixed_classes": True},
        {"images_per_layer": residual_images(), "threshold_growth": 0.0},
        {**SHORTCUTS, "test_passes": 5, "threshold_growth": 0.0},
    ),
    "permuted-digits": ({}, {}, THIRD),
    "split-digits": ({}, {}, {}),
}


@pytest.mark.parametrize(("name", "method"), PAIRS)
def test_official_is_paper_and_the_published_codes_own_ways(name: str, method: str) -> None:
    everyone, gpm, trgp_only = DIFFERENCES[name]
    expected = dict(everyone)
    if method == "gpm":
        expected |= {"first_task_short": True, **gpm}
    if method == "trgp":
        expected |= {**QUIRKS, **trgp_only}
    paper, official = (configure(name, method, p).settings for p in ("paper", "official"))
    assert {k: v for k, v in official.items() if v != paper[k]} == expected
    assert paper.keys() == official.keys()


def test_the_paper_has_no_quirk() -> None:
    switches = [f.name for f in dataclasses.fields(TRGPMethod) if f.type in (bool, "bool")]
    assert set(switches) == {*QUIRKS, *THIRD}
    for name, method in PAIRS:
        config = configure(name, method)
        assert not any(config.settings.get(switch) for switch in switches)
        assert config.settings.get("epsilon", 0.5) == 0.5
        assert config.settings.get("top_k", 2) == 2
        assert config.settings.get("norm", "freeze") == "freeze"
        assert config.settings.get("no_scaling", ()) == ()
        assert config.settings.get("images_per_layer", ()) == ()


# ---- names -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "changes", "sentence"),
    [
        (("permuted-digit", "trgp"), {}, "no benchmark 'permuted-digit'; did you mean 'permuted"),
        (("split-digits", "tgrp"), {}, "no method 'tgrp'; did you mean 'trgp'"),
        (("split-digits", "zzz"), {}, "known are finetune, single, multitask"),
        (("split-digits", "trgp", "papr"), {}, "no preset 'papr'; did you mean 'paper'"),
        (("split-digits", "trgp"), {"epoch": 1}, "no setting 'epoch' for trgp.*'epochs'"),
        (("split-digits", "trgp"), {"treshold": 1}, "did you mean 'threshold'"),
        (("split-digits", "finetune"), {"threshold": 1}, "no setting 'threshold' for finetune"),
        (("split-digits", "gpm"), {"epsilon": 1}, "no setting 'epsilon' for gpm on split-digits"),
        (("split-digits", "gpm"), {"order": "A"}, "no setting 'order' for gpm on split-digits"),
        (("mine.npz", "gpm", "official"), {}, "mine.npz has no preset 'official'"),
    ],
)
def test_unknown_names_suggest_known_ones(
    arguments: tuple[str, ...], changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=sentence):
        configure(*arguments, **changes)
    name, method, preset = (*arguments, "paper")[:3]
    with pytest.raises(InputError, match=sentence):
        trgp.run(name, method, preset=preset, out=tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


# ---- values ----------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"lr": 0}, "lr must be a finite number above 0, not 0"),
    ({"lr": -1.0}, "lr must be"),
    ({"lr": math.nan}, "lr must be"),
    ({"lr": math.inf}, "lr must be"),
    ({"lr": "0.1"}, "lr must be"),
    ({"lr": True}, "lr must be"),
    ({"lr": 10**400}, "lr must be"),
    ({"lr_factor": 1}, "lr_factor must be a finite number above 1"),
    ({"scaling_over": "tasks"}, "scaling_over must be bases or union"),
    (
        {"scaling_over": "union", "strongest_unprotected": True},
        "scaling_over=union needs .* strongest_unprotected .*; give one of the two",
    ),
    ({"lr_decay": 0}, "lr_decay must be a finite number above 0"),
    ({"lr_decay": 1.5}, "lr_decay must be at most 1"),
    ({"lr_min": 0.0}, "lr_min must be"),
    ({"batch": 0}, "batch must be a whole number of at least 1"),
    ({"batch": 8.0}, "batch must be"),
    ({"epochs": -1}, "epochs must be"),
    ({"epochs": True}, "epochs must be"),
    ({"patience": -1}, "patience must be"),
    ({"patience": 1.5}, "patience must be"),
    ({"patience": False}, "patience must be"),
    ({"test_batch": None}, "test_batch must be"),
    ({"test_passes": "2"}, "test_passes must be"),
    ({"score_on": "train"}, "score_on must be"),
    ({"evaluate_unseen": "no"}, "evaluate_unseen must be True or False"),
    ({"evaluate_unseen": 1}, "evaluate_unseen must be True or False"),
    ({"threshold": 0.0}, "threshold must be numbers above 0 and up to 1"),
    ({"threshold": 1.01}, "threshold must be"),
    ({"threshold": ()}, "threshold must be"),
    ({"threshold": (0.9, math.nan, 0.9)}, "threshold must be"),
    ({"threshold": "0.9"}, "threshold must be"),
    ({"threshold": None}, "threshold must be"),
    ({"threshold": True}, "threshold must be"),
    ({"threshold_growth": -0.1}, "threshold_growth must be"),
    ({"samples": 0}, "samples must be"),
    ({"images_per_layer": (1, 0, 1)}, "images_per_layer must be"),
    ({"images_per_layer": "10"}, "images_per_layer must be"),
    ({"norm": "batch"}, "norm must be freeze, shared or per_task, not 'batch'"),
    ({"norm": ["freeze"]}, "norm must be"),
    ({"first_task_short": "no"}, "first_task_short must be True or False"),
    ({"strongest_unprotected": None}, "strongest_unprotected must be True or False"),
    ({"unscaled_inputs": 0}, "unscaled_inputs must be True or False"),
    ({"first_layer_gate": []}, "first_layer_gate must be True or False"),
    ({"third_task_trusts_second": 2}, "third_task_trusts_second must be True or False"),
    ({"epsilon": 1.5}, "epsilon must be"),
    ({"epsilon": None}, "epsilon must be"),
    ({"top_k": 0}, "top_k must be"),
    ({"scope": "all"}, "scope must be layer or task"),
    ({"selection_samples": 0}, "selection_samples must be"),
    ({"scale_rate": 0}, "scale_rate must be"),
    ({"scale_rate": math.inf}, "scale_rate must be"),
    ({"no_scaling": 3}, "no_scaling must be names of layers"),
    ({"form": "native"}, "form must be auto or literal"),
    ({"tasks": 0}, "tasks must be a whole number of at least 1"),
    ({"tasks": 99}, "tasks, not 99; give fewer"),
    ({"tasks": True}, "tasks must be"),
    ({"model": 3}, "model"),
    ({"model": "nowhere"}, "'nowhere' is no model; write it as module:Class"),
    ({"model": "nowhere:Net"}, "cannot be imported: ModuleNotFoundError"),
    ({"model": "torch.nn:Nett"}, "torch.nn has no 'Nett'"),
    ({"model": "math:pi"}, "cannot be called"),
    ({"model": "math:floor"}, "could not be made with"),
    ({"model": "builtins:dict"}, "made a dict; return an nn.Module"),
    ({"model": "torch.nn:Identity"}, "Identity .* which has 10 classes"),
    ({"threshold": (0.9, 0.9)}, "threshold has 2 values for 3 layers; give one for each of"),
    ({"images_per_layer": (1,)}, "images_per_layer has 1 values for 3 layers"),
    ({"seeds": 0}, "seed"),
    ({"seeds": []}, "There is no seed to run"),
    ({"seeds": True}, "seed"),
    ({"seeds": None}, "seed"),
    ({"seeds": [1, 1]}, "A seed is given twice"),
    ({"seeds": [-1]}, "A seed must be a whole number from 0"),
    ({"seeds": [2**32]}, "A seed must be"),
    ({"seeds": ["1"]}, "A seed must be"),
    ({"seeds": "12"}, "A seed must be"),
    ({"seeds": 2**60}, "seed"),
    ({"device": "gpu"}, "There is no device 'gpu'; give auto, cpu, cuda or cuda:0"),
    ({"device": "meta"}, "meta is not supported"),
    ({"device": 3}, "device"),
    ({"network": nn.Linear}, "another network as model='module:Class'"),
    ({"preset": None}, "preset"),
]


@pytest.mark.parametrize(
    ("changes", "sentence"), WRONG, ids=[str(changes)[:60] for changes, _ in WRONG]
)
def test_wrong_values_are_sentences_and_nothing_is_written(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    given = {"seeds": 1, "device": "cpu"} | changes
    with pytest.raises(InputError, match=sentence) as caught:
        trgp.run("permuted-digits", "trgp", out=tmp_path / "out", observer=begun, **given)
    assert str(caught.value).rstrip()[-1] in ".?)"
    assert not (tmp_path / "out").exists()


class BegunError(Exception):
    """A run got as far as to begin."""


def begun(event: Event) -> None:
    raise BegunError


JUNK = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=2)
    | st.complex_numbers()
    | st.lists(st.integers(-1, 2) | st.floats(), max_size=3)
    | st.dictionaries(st.text(max_size=1), st.integers(), max_size=1)
    | st.just(object())
    | st.sampled_from([np.float32(0.5), np.int64(2), np.array([1.0, 2.0]), torch.ones(2)])
)
FIELDS = [
    field.name
    for kind in (Training, TRGPMethod, entry("cifar100-superclass").options)
    for field in dataclasses.fields(kind)
]


@settings(max_examples=150)
@given(field=st.sampled_from(FIELDS), value=JUNK)
@example(field="lr", value=10**400)
@example(field="batch", value=np.int64(8))
@example(field="model", value=b":")
def test_any_value_is_taken_or_refused_with_a_sentence(field: str, value: Any) -> None:
    """As an InputError, before anything is written or read."""
    try:
        config = configure("cifar100-superclass", "trgp", "paper", **{field: value})
        run_folder("out", config.benchmark, "trgp", "paper", config.changed, 0)
    except (ValueError, TypeError):
        with pytest.raises(InputError) as caught:
            trgp.run("cifar100-superclass", "trgp", out="/dev/null/out", **{field: value})
        assert str(caught.value)[-1] in ".?)"
        return
    kept = config.settings[field]
    default = configure("cifar100-superclass", "trgp").settings[field]
    if isinstance(default, bool):
        assert isinstance(kept, bool)
    assert json.loads(json.dumps(kept)) == (list(kept) if isinstance(kept, tuple) else kept)


@pytest.mark.parametrize("seeds", [3, range(3), (0, 1, 2), np.arange(3), np.int64(3), {0, 1, 2}])
def test_seeds_are_a_count_or_a_list(seeds: Any) -> None:
    found = check_seeds(seeds)
    assert found == [0, 1, 2]
    assert all(type(seed) is int for seed in found)


# ---- what is another configuration -----------------------------------------------------------


def folder(name: str = "permuted-digits", method: str = "trgp", **changes: Any) -> Path:
    config = configure(name, method, **changes)
    return run_folder("out", name, method, "paper", config.changed, 0)


def test_changes_are_what_differs_from_the_preset() -> None:
    preset = configure("permuted-digits", "trgp").settings
    same = configure("permuted-digits", "trgp", lr=preset["lr"], threshold=[0.99], tasks=None)
    assert same.changed == {}
    assert folder(threshold=0.99) == folder()
    changed = configure("permuted-digits", "trgp", lr=3.0, tasks=2, no_scaling="layers.0")
    assert changed.changed == {"lr": 3.0, "tasks": 2, "no_scaling": ("layers.0",)}
    assert changed.settings == preset | changed.changed


def test_every_single_change_is_another_folder_and_equal_ones_are_one() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"lr": 0.5},
        {"lr": 0.25},
        {"batch": 5},
        {"epochs": 5},
        {"tasks": 5},
        {"patience": 1},
        {"threshold": 0.5},
        {"threshold": (0.5, 0.5, 0.5)},
        {"first_task_short": True},
        {"unscaled_inputs": True},
        {"form": "literal"},
        {"model": "torch.nn:Linear"},
    ]
    folders = [folder(**change) for change in changes]
    assert len(set(folders)) == len(changes)
    assert folder(lr=0.5, batch=5) == folder(batch=5, lr=0.5)
    assert folder(threshold=[0.5]) == folder(threshold=0.5) == folder(threshold=(0.5,))


def test_a_result_from_before_a_setting_existed_had_its_default() -> None:
    config = configure("permuted-digits", "trgp", lr=0.3)
    assert config.is_of(config.stored)
    older = {key: value for key, value in config.stored.items() if key != "lr_decay"}
    assert config.is_of(older)
    assert not configure("permuted-digits", "trgp", lr=0.3, lr_decay=0.5).is_of(older)
    assert not configure("permuted-digits", "trgp").is_of(older)  # lr is not at its default
    assert not config.is_of({**older, "gone": 1})


def test_a_result_that_does_not_name_its_network_is_of_another(here: Path) -> None:
    (here / "my_net.py").write_text(NET)
    config = configure("permuted-digits", "trgp", model="my_net:Net")
    assert config.is_of(config.stored)
    unnamed = {key: value for key, value in config.stored.items() if key != "model_source"}
    assert not config.is_of(unnamed)


NET = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    yield tmp_path
    sys.modules.pop("my_net", None)


def test_another_text_of_a_users_network_is_another_run(here: Path) -> None:
    folders = []
    for text in (NET, NET, NET + "# another\n"):
        sys.modules.pop("my_net", None)
        (here / "my_net.py").write_text(text)
        folders.append(folder(model="my_net:Net"))
    assert folders[0] == folders[1] != folders[2]
    assert configure("permuted-digits", "gpm", model="my_net:Net").changed.keys() == {
        "model",
        "model_source",
    }


def test_a_network_changed_while_python_runs_is_not_said_to_be_the_new_one(here: Path) -> None:
    """Python keeps the module that it has; so must the name of the run, or take the new one."""
    (here / "my_net.py").write_text(NET)
    options = {"tasks": 1, "epochs": 1, "out": here / "runs", "device": "cpu"}
    first = trgp.run("permuted-digits", "finetune", model="my_net:Net", **options)[0]
    (here / "my_net.py").write_text(NET.replace("nn.Linear(64, 10)", "nn.Linear(64, 12)"))
    second = trgp.run("permuted-digits", "finetune", model="my_net:Net", **options)[0]
    renamed = first.changed["model_source"] != second.changed["model_source"]
    assert renamed == (first.network_bytes != second.network_bytes)


def test_the_command_repeats_the_run(tmp_path: Path) -> None:
    result = trgp.run(
        "split-digits", "trgp", tasks=2, epochs=1, threshold=0.9, device="cpu", out=tmp_path / "a"
    )[0]
    call = result.command.replace("trgp.run(", "trgp.run(device='cpu', out=out, *[", 1)
    call = call.replace("'trgp', ", "'trgp'], ", 1)
    again = eval(call, {"trgp": trgp, "out": tmp_path / "b"})[0]
    assert again.digest == result.digest
    assert again.command == result.command


def test_what_is_given_as_the_command_is_written_down(tmp_path: Path) -> None:
    assert run(some_tasks(1), "finetune", tmp_path, command="trgp run me").command == "trgp run me"
