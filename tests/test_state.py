"""Saving, loading, copying and detaching a learner (point 9)."""

import copy
import json
import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from helpers import assert_close, classification, cross_entropy, learn, mlp, train
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from support import inside
from torch import Tensor, nn

from trgp import GPM, TRGP
from trgp.files import checksum


class Net(nn.Module):
    """Grouped convolution, norms, a frozen scale and a head of each task's own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.norm = nn.BatchNorm2d(8)
        self.scale = nn.Parameter(torch.ones(8, 1, 1))
        self.fc = nn.Linear(8, 10)
        self.last = nn.LayerNorm(10)
        self.head = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = (self.norm(self.conv(x)) * self.scale).relu().mean((2, 3))
        return self.head(self.last(self.fc(x)).tanh())


def a_batch(task: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x, y = classification(task, 8, 3, 3, rank=1)
    return x.to(dtype), y


IDS: list[int | str] = [7, "seven", -1]


def a_learner(cls: type[GPM] = TRGP, **options: Any) -> GPM:
    options = {"threshold": 0.95, "per_task": ["head"]} | options
    if cls is TRGP:
        options = {"epsilon": 0.1} | options
    return cls(Net(), **options)


def learnt(cls: type[GPM] = TRGP, **options: Any) -> GPM:
    torch.manual_seed(0)
    learner = a_learner(cls, **options)
    for i, task in enumerate(IDS):
        learn(learner, task, [a_batch(i)], make=torch.optim.AdamW, lr=1e-2, steps=6)
    return learner


def another_model() -> Net:
    torch.manual_seed(99)
    return Net()


def continued(learner: GPM) -> None:
    """One more task, with the same random numbers every time."""
    torch.manual_seed(5)
    learn(learner, "next", [a_batch(8)], make=torch.optim.AdamW, lr=1e-2, steps=6)


def assert_equal_learners(a: GPM, b: GPM) -> None:
    """The same bits in the model under every task, and the same answers."""
    assert type(a) is type(b)
    assert a.selected == b.selected
    assert list(a.selected) == list(b.selected)
    assert a.ranks == b.ranks
    assert a.summary() == b.summary()
    assert_equal_models(a.model, b.model)
    for task in a.selected:
        with a.task(task), b.task(task):
            assert_equal_models(a.model, b.model)


def assert_equal_models(a: nn.Module, b: nn.Module) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert value.dtype == theirs[key].dtype
        assert torch.equal(value, theirs[key]), key
    grads = {name: p.requires_grad for name, p in a.named_parameters()}
    assert grads == {name: p.requires_grad for name, p in b.named_parameters()}


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Whatever happens inside leaves no trace in the model."""
    before = copy.deepcopy(model)
    yield
    assert_equal_models(model, before)
    for a, b in zip(model.modules(), before.modules(), strict=True):
        assert type(a) is type(b)
        assert a.training == b.training
        assert "train" not in vars(a)
        assert not a._forward_pre_hooks


# ---- loading then continuing equals never having stopped ------------------------------------


@pytest.mark.parametrize("include_model", [True, False])
@pytest.mark.parametrize("norm", ["freeze", "per_task", "shared"])
@pytest.mark.parametrize("cls", [GPM, TRGP])
def test_loading_then_continuing_equals_never_having_stopped(
    cls: type[GPM], norm: Any, include_model: bool, tmp_path: Path
) -> None:
    learner = learnt(cls, norm=norm)
    learner.save(tmp_path / "a", include_model=include_model)
    model = another_model()
    if not include_model:
        model.load_state_dict(learner.model.state_dict())
    loaded = cls.load(tmp_path / "a", model)
    assert loaded.model is model
    assert_equal_learners(learner, loaded)
    if cls is TRGP:
        assert any(any(chosen.values()) for chosen in learner.selected.values())
    for one in (learner, loaded):
        continued(one)
    assert_equal_learners(learner, loaded)
    model.train()
    assert model.norm.training == (norm != "freeze")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_bit_is_the_same_also_in_wide_layers(dtype: torch.dtype, tmp_path: Path) -> None:
    """There the last bits of a product depend on how its factors lie in memory."""
    batches = []
    for task in range(4):
        x, y = classification(task, 100, samples=40, rank=20, dtype=torch.float64)
        batches.append((x.to(dtype), y))
    learner = TRGP(mlp(100, 200, 150, 4).to(dtype), threshold=0.95, epsilon=0.0, exclude=["4"])
    for task in range(3):
        learn(learner, task, [batches[task]], steps=3)
    learner.save(tmp_path / "a", include_model=True)
    loaded = TRGP.load(tmp_path / "a", mlp(100, 200, 150, 4).to(dtype))
    for one in (learner, loaded):
        learn(one, "next", [batches[3]], steps=4, make=torch.optim.AdamW, lr=1e-2)
    assert_equal_learners(learner, loaded)


@pytest.mark.parametrize("scope", ["layer", "task"])
def test_every_option_comes_back(scope: Any, tmp_path: Path) -> None:
    options = {
        "threshold": MappingProxyType({"conv": 0.9, "*": 0.8}),
        "epsilon": {"*": 0.25},
        "top_k": 3,
        "scope": scope,
        "selection_samples": 17,
        "memory_samples": 5,
        "exclude": ["head"],
        "per_task": ["scale"],
        "norm": "shared",
        "max_rank": {"fc": 4, "*": 0.5},
        "scale_rate": 0.25,
        "form": "range",
    }
    TRGP(Net(), **options).save(tmp_path / "a")
    loaded = TRGP.load(tmp_path / "a", Net())
    for name, value in options.items():
        assert getattr(loaded, name) == value


def test_a_learner_without_tasks_can_be_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    learner = a_learner()
    learner.save(tmp_path / "a", include_model=True)
    loaded = TRGP.load(tmp_path / "a", another_model())
    assert all(p.requires_grad for p in loaded.model.parameters())
    for one in (learner, loaded):
        continued(one)
    assert_equal_learners(learner, loaded)


def test_what_a_task_keeps_comes_back_in_either_form(tmp_path: Path) -> None:
    """A narrow layer keeps K - C itself, a wide one its parts in the range of trusted columns."""
    torch.manual_seed(0)
    learner = TRGP(mlp(8, 40, 2), epsilon=0.0, threshold=0.95)
    for task in range(3):
        batch = classification(task, 8, rank=2, classes=2)
        learn(learner, task, [batch])
    kinds = {name: change.shift is None for name, change in inside.changes(learner, 2).items()}
    assert kinds == {"0": True, "2": False}
    learner.save(tmp_path / "a", include_model=True)
    loaded = TRGP.load(tmp_path / "a", mlp(8, 40, 2))
    assert_equal_learners(learner, loaded)


def test_the_models_weights_are_in_the_file_only_if_asked_for(tmp_path: Path) -> None:
    learner = learnt()
    names = {}
    for include in (False, True):
        learner.save(tmp_path / "a", include_model=include)
        with safe_open(tmp_path / "a", framework="pt") as file:
            names[include] = set(file.keys())
    own = {f"model/{key}" for key in learner.model.state_dict()}
    assert names[True] - names[False] == own
    assert names[False] < names[True]


def test_weights_may_be_loaded_before_or_after_the_learner(tmp_path: Path) -> None:
    learner = learnt()
    learner.save(tmp_path / "a")
    weights = copy.deepcopy(learner.model.state_dict())
    before, after = another_model(), another_model()
    before.load_state_dict(weights)
    learners = [TRGP.load(tmp_path / "a", before), TRGP.load(tmp_path / "a", after)]
    after.load_state_dict(weights)
    for loaded in learners:
        assert_equal_learners(learner, loaded)


@pytest.mark.parametrize("cls", [GPM, TRGP])
def test_a_model_with_other_weights_gets_a_sentence_at_first_use(
    cls: type[GPM], tmp_path: Path
) -> None:
    learner = learnt(cls)
    learner.save(tmp_path / "a")
    loaded = cls.load(tmp_path / "a", another_model())
    uses: list[Callable[[], Any]] = [
        lambda: loaded.begin_task("next", [a_batch(3)], cross_entropy),
        lambda: loaded.task(7).__enter__(),
        lambda: loaded.detach(7),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match=r"Layer '(conv|fc)' no longer holds the weights of"):
            use()
    loaded.model.load_state_dict(learner.model.state_dict())
    assert_equal_learners(learner, loaded)


def test_functions_are_given_again(tmp_path: Path) -> None:
    def threshold(layer: str, task: int | str) -> float:
        return 0.9 if layer == "fc" else 0.95

    def epsilon(layer: str, task: int | str) -> float:
        return 0.2

    learner = learnt(threshold=threshold, epsilon=epsilon)
    learner.save(tmp_path / "a", include_model=True)
    model = another_model()
    with untouched(model):
        with pytest.raises(ValueError, match="threshold as a function; give it to load again"):
            TRGP.load(tmp_path / "a", model)
        with pytest.raises(ValueError, match="epsilon as a function; give it to load again"):
            TRGP.load(tmp_path / "a", model, threshold=threshold)
    loaded = TRGP.load(tmp_path / "a", model, threshold=threshold, epsilon=epsilon)
    for one in (learner, loaded):
        continued(one)
    assert_equal_learners(learner, loaded)


def test_any_other_threshold_may_be_replaced(tmp_path: Path) -> None:
    learnt().save(tmp_path / "a", include_model=True)
    loaded = TRGP.load(tmp_path / "a", another_model(), threshold=0.5, epsilon=0.0)
    assert (loaded.threshold, loaded.epsilon) == (0.5, 0.0)
    with pytest.raises(ValueError, match=r"threshold must be a number in \(0, 1\]"):
        TRGP.load(tmp_path / "a", another_model(), threshold=1.5)


def test_a_file_goes_onto_a_model_of_another_dtype(tmp_path: Path) -> None:
    learner = learnt()
    learner.save(tmp_path / "a", include_model=True)
    loaded = TRGP.load(tmp_path / "a", another_model().double())
    x = a_batch(4)[0]
    for task in IDS:
        with learner.task(task), loaded.task(task), torch.no_grad():
            y = loaded.model.eval()(x.double())
            assert_close(y.float(), learner.model.eval()(x), 1e-5)
    learn(loaded, "next", [a_batch(4, torch.float64)])


def test_tied_weights_can_be_saved_with_the_model(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).tanh())

    learner = GPM(Tied())
    learn(learner, 0, [classification(0, 6, classes=6)])
    learner.save(tmp_path / "a", include_model=True)
    loaded = GPM.load(tmp_path / "a", Tied())
    assert_equal_learners(learner, loaded)
    assert loaded.model.a.weight is loaded.model.b.weight


OLD_FILE = Path(__file__).parent / "fixtures" / "learner-0.1.safetensors"


class OldNet(nn.Module):
    """The model of the file that version 0.1 wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 12), nn.LayerNorm(12), nn.Linear(12, 3), nn.Tanh())
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def test_a_file_of_version_0_1_loads(tmp_path: Path) -> None:
    """With its old logits; then it goes on, and is saved in the format of today."""
    told = json.loads(OLD_FILE.with_suffix(".json").read_text())
    learner = TRGP.load(OLD_FILE, OldNet().double())
    assert [[task, chosen] for task, chosen in learner.selected.items()] == told["selected"]
    assert {name: list(pair) for name, pair in learner.ranks.items()} == told["ranks"]
    kept = inside.changes(learner, "c")
    assert (bool(kept["body.0"].scalings), kept["body.2"].shift is None) == (True, False)
    x = torch.sin(torch.arange(20.0)).reshape(5, 4).double()

    def check(loaded: GPM) -> None:
        for task, logits in zip(told["selected"], told["logits"], strict=True):
            with loaded.task(task[0]), torch.no_grad():
                found = loaded.model.eval()(x)
            assert_close(found, torch.tensor(logits, dtype=torch.float64), 1e-12)

    check(learner)
    learn(learner, "next", [(x, torch.arange(5) % 2)], lr=0.01)
    learner.save(tmp_path / "a", include_model=True)
    again = TRGP.load(tmp_path / "a", OldNet().double())
    assert_equal_learners(learner, again)


# ---- what does not fit ----------------------------------------------------------------------


class Renamed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.fc2 = self.fc
        del self.fc

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def changed_model(**modules: nn.Module) -> Net:
    model = another_model()
    for name, module in modules.items():
        setattr(model, name, module)
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Renamed, "does not fit the model: 'fc2?' is"),
        (lambda: changed_model(fc=nn.Linear(8, 12)), "does not fit the model: 'fc' is"),
        (lambda: changed_model(fc=nn.Linear(8, 10, bias=False)), "'fc' is .1, 10, 9. in the file"),
        (lambda: changed_model(conv=nn.Conv2d(8, 8, 3, groups=4)), "'conv' is .2, 4, 37."),
        (lambda: changed_model(head=nn.Linear(10, 5)), "'head.(weight|bias)'"),
        (lambda: changed_model(head=nn.Identity()), "'head.(weight|bias)'"),
        (lambda: changed_model(extra=nn.Linear(2, 2)), "'extra' is absent in the file"),
        (lambda: nn.Sequential(nn.ReLU()), "The model has nothing to protect"),
    ],
    ids=["name", "width", "bias", "groups", "head", "no head", "extra", "nothing"],
)
@pytest.mark.parametrize("include_model", [True, False])
def test_a_model_that_does_not_fit_is_refused(
    make: Callable[[], nn.Module], message: str, include_model: bool, tmp_path: Path
) -> None:
    learnt().save(tmp_path / "a", include_model=include_model)
    model = make()
    with untouched(model), pytest.raises(ValueError, match=message):
        TRGP.load(tmp_path / "a", model)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """All protected layers fit here; only an excluded one does not."""
    learner = TRGP(mlp(6, 5, 4), exclude=["2"])
    learn(learner, 0, [classification(0, 6)])
    learner.save(tmp_path / "a", include_model=True)
    for model in (mlp(6, 5, 3), mlp(6, 5, 4, bias=False), mlp(6, 5, 4, 2)):
        with untouched(model), pytest.raises(ValueError, match="does not fit the model: '"):
            TRGP.load(tmp_path / "a", model)
    TRGP.load(tmp_path / "a", mlp(6, 5, 4))


@pytest.mark.parametrize(("saved", "cls"), [(GPM, TRGP), (TRGP, GPM)])
def test_the_wrong_class_is_refused(saved: type[GPM], cls: type[GPM], tmp_path: Path) -> None:
    learnt(saved).save(tmp_path / "a", include_model=True)
    model = another_model()
    with untouched(model), pytest.raises(ValueError, match=f"holds a {saved.__name__} learner"):
        cls.load(tmp_path / "a", model)


def test_other_safetensors_files_are_refused(tmp_path: Path) -> None:
    model = another_model()
    for metadata in (None, {}, {"format": "pt"}):
        save_file({"a": torch.ones(3)}, tmp_path / "a", metadata=metadata)
        with untouched(model), pytest.raises(ValueError, match=r"was not written by learner\.save"):
            TRGP.load(tmp_path / "a", model)


@pytest.mark.parametrize("content", [b"", b"x", b"not a safetensors file" * 100, b"\0" * 64])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match="no safetensors file"):
        TRGP.load(tmp_path / "a", another_model())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "a", tmp_path):
        with pytest.raises(FileNotFoundError, match=str(path)):
            TRGP.load(path, another_model())


@pytest.mark.parametrize("version", [0, 3, "2", None])
def test_other_format_versions_are_refused(version: Any, tmp_path: Path) -> None:
    learnt().save(tmp_path / "a")
    with safe_open(tmp_path / "a", framework="pt") as file:
        meta = json.loads(file.metadata()["trgp"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert meta["format"] == 2
    text = json.dumps(meta | {"format": version})
    metadata = {"trgp": text, "sha256": checksum(text, tensors)}
    save_file(tensors, tmp_path / "b", metadata=metadata)
    model = another_model()
    with untouched(model), pytest.raises(ValueError, match=f"has format {version}, this version"):
        TRGP.load(tmp_path / "b", model)


# ---- damage ---------------------------------------------------------------------------------


@cache
def a_file() -> bytes:
    """A small learner with everything in it that a file can hold."""
    torch.manual_seed(0)
    learner = TRGP(mlp(4, 6, 2), threshold=0.8, epsilon=0.0, per_task=["2"])
    for task in (0, "b"):
        learn(learner, task, [classification(0, 4, samples=4, rank=1, classes=2)], steps=2)
    with tempfile.TemporaryDirectory() as folder:
        learner.save(f"{folder}/a", include_model=True)
        return Path(folder, "a").read_bytes()


def load_bytes(content: bytes) -> TRGP:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a")
        path.write_bytes(content)
        return TRGP.load(path, mlp(4, 6, 2))


def test_the_file_is_sound_as_it_is() -> None:
    assert list(load_bytes(a_file()).selected) == [0, "b"]


@settings(max_examples=150)
@given(st.data())
def test_a_truncated_file_is_refused(data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(a_file()) - 1))
    with pytest.raises(ValueError, match=r"\S+/a is truncated, damaged or no safetensors file"):
        load_bytes(a_file()[:cut])


@settings(max_examples=50)
@given(st.binary(min_size=1, max_size=20))
def test_a_file_with_something_behind_it_is_refused(tail: bytes) -> None:
    with pytest.raises(ValueError, match="damaged"):
        load_bytes(a_file() + tail)


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_file_is_refused(data: st.DataObject) -> None:
    """Any byte changed to any other, in the header (where most of the meaning is) or anywhere."""
    content = bytearray(a_file())
    header = 8 + int.from_bytes(content[:8], "little")
    last = data.draw(st.sampled_from([7, header - 1, len(content) - 1]))
    place = data.draw(st.integers(0, last))
    old = content[place]
    content[place] = data.draw(st.integers(0, 255).filter(lambda byte: byte != old))
    if old == ord(" ") and chr(content[place]) in "\t\n\r":
        return  # the header's padding, in which these mean the same
    with pytest.raises(ValueError, match=r"\S+/a (is .*damaged|was not written by learner)"):
        load_bytes(bytes(content))


# ---- writing --------------------------------------------------------------------------------


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """As on a full disk: no file of this process can grow beyond some bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 100, 4096])
def test_a_save_that_fails_leaves_the_old_file(size: int, tmp_path: Path) -> None:
    learner = learnt()
    learner.save(tmp_path / "a")
    before = (tmp_path / "a").read_bytes()
    assert len(before) > 4096
    continued(learner)
    with pytest.raises(Exception, match=r"(?i)file too large|i/o"), files_limited_to(size):
        learner.save(tmp_path / "a", include_model=True)
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == before
    learner.save(tmp_path / "a", include_model=True)
    assert_equal_learners(learner, TRGP.load(tmp_path / "a", another_model()))
    assert os.listdir(tmp_path) == ["a"]


def test_a_save_that_cannot_take_its_place_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError, match="director"):
        learnt().save(tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"]
    assert os.listdir(tmp_path / "a") == []


def test_saving_changes_nothing(tmp_path: Path) -> None:
    learner, twin = learnt(), learnt()
    learner.save(tmp_path / "a", include_model=True)
    learner.save(str(tmp_path / "b"), include_model=True)
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    for one in (learner, twin):
        continued(one)
    assert_equal_learners(learner, twin)


# ---- deepcopy -------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [GPM, TRGP])
def test_a_copy_between_tasks_is_independent_and_equal(cls: type[GPM]) -> None:
    learner = learnt(cls)
    twin = copy.deepcopy(learner)
    assert twin.model is not learner.model
    mine = {p.data_ptr() for p in learner.model.parameters()}
    assert not mine & {p.data_ptr() for p in twin.model.parameters()}
    assert_equal_learners(learner, twin)
    frozen = copy.deepcopy(twin)
    continued(learner)
    assert_equal_learners(twin, frozen)
    continued(twin)
    assert_equal_learners(learner, twin)
    twin.model.train()
    assert not twin.model.norm.training


@pytest.mark.parametrize("first", ["original", "copy"])
@pytest.mark.parametrize("cls", [GPM, TRGP])
def test_a_copy_while_learning_is_independent_and_equal(cls: type[GPM], first: str) -> None:
    """Whichever of the two goes on first, neither notices the other."""
    learner = learnt(cls)
    learner.begin_task("next", [a_batch(8)], cross_entropy)
    optimizer = learner.attach(torch.optim.SGD(learner.parameters(), lr=0.1))
    train(learner, [a_batch(8)], steps=2)
    twin = copy.deepcopy(learner)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert not held & {id(p) for p in twin.parameters()}
    assert [p.shape for p in learner.parameters()] == [p.shape for p in twin.parameters()]
    order = [learner, twin] if first == "original" else [twin, learner]
    for one in order:
        torch.manual_seed(5)
        train(one, [a_batch(8)], steps=4, make=torch.optim.AdamW, lr=1e-2)
        one.end_task([a_batch(8)])
    assert_equal_learners(learner, twin)
    for one in reversed(order):
        learn(one, "more", [a_batch(9)], steps=3)
    assert_equal_learners(learner, twin)


# ---- detach ---------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["freeze", "per_task"])
@pytest.mark.parametrize("task", IDS)
def test_detach_leaves_the_plain_model_of_a_task(task: int | str, norm: Any) -> None:
    learner = learnt(norm=norm)
    learner.model.fc.bias.requires_grad_(False)  # its user's choice, not the learner's
    with learner.task(task):
        expected = {key: value.clone() for key, value in learner.model.state_dict().items()}
    model = learner.detach(task)
    assert model is learner.model
    plain = Net()
    assert model.state_dict().keys() == plain.state_dict().keys() == expected.keys()
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected[key]), key
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == {"fc.bias"}
    model.train()
    for a, b in zip(model.modules(), plain.modules(), strict=True):
        assert type(a) is type(b)
        assert a.training
        assert not a._forward_hooks
        assert not a._forward_pre_hooks
        assert vars(a).keys() == vars(b).keys()
    mean = model.norm.running_mean.clone()
    model(a_batch(0)[0])
    assert not torch.equal(model.norm.running_mean, mean)


def test_after_detach_an_optimizer_is_free_and_a_new_learner_can_be_made() -> None:
    learner = learnt()
    optimizer = learner.attach(torch.optim.SGD(learner.parameters(), lr=0.1))
    model = learner.detach("seven")
    twin = copy.deepcopy(model)
    free = torch.optim.SGD(twin.parameters(), lr=0.1)
    for net, each in ((model, optimizer), (twin, free)):
        each.zero_grad()
        cross_entropy(net, a_batch(8)).backward()
        each.step()
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q) or id(p) not in held
    again = TRGP(model, per_task=["head"])
    learn(again, 0, [a_batch(0)])
    learn(again, 1, [a_batch(1)])
