"""Data and networks of a user's own: npz files, tensors, and classes by their names."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import trgp
from trgp.benchmarks import from_tensors, load
from trgp.benchmarks.own import statistics
from trgp.engine.errors import InputError
from trgp.results.result import Result

Arrays = dict[str, NDArray[Any]]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own to work in, and no module of it left behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    yield tmp_path
    for name in ("mine", "nets"):
        sys.modules.pop(name, None)


def arrays(classes: int = 6, train: int = 20, test: int = 4, *shape: int) -> Arrays:
    """Images that show their class: another pixel of each is bright."""
    draw = np.random.default_rng(0)
    made: Arrays = {}
    for split, each in (("train", train), ("test", test)):
        labels = draw.permutation(np.repeat(np.arange(classes), each))
        images = draw.integers(0, 60, (len(labels), *(shape or (3, 4, 2))), np.uint8)
        images.reshape(len(labels), -1)[np.arange(len(labels)), labels] = 250
        made[f"{split}_images"] = images
        made[f"{split}_labels"] = labels
    return made


def write(content: Arrays, name: str = "mine.npz") -> None:
    np.savez(name, **content)


def learnt(benchmark: Any, method: str = "trgp", **changes: Any) -> Result:
    usual = {"out": "runs", "device": "cpu", "epochs": 2, "patience": 0, "lr": 0.1}
    return trgp.run(benchmark, method, **(usual | changes))[0]


# ---- files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tasks", [1, 2, 3])
def test_the_classes_of_a_file_are_shared_out_in_order(tasks: int) -> None:
    content = arrays()
    write(content)
    benchmark = load("mine.npz", tasks=tasks)
    each = 6 // tasks
    assert len(benchmark.tasks) == tasks
    assert benchmark.separate_heads == (tasks > 1)
    for t, task in enumerate(benchmark.tasks):
        assert task.classes == each
        assert task.name == f"classes {', '.join(str(each * t + c) for c in range(each))}"
        assert (len(task.train), len(task.valid)) == (18 * each, 2 * each)
        for label in range(each):
            ours = task.test.x[task.test.y == label].permute(0, 2, 3, 1).numpy()
            theirs = content["test_images"][content["test_labels"] == each * t + label]
            np.testing.assert_array_equal(ours, theirs)
        both = torch.cat([task.train.x, task.valid.x])
        assert len(both.flatten(1).unique(dim=0)) == 20 * each
    network = benchmark.make_network()
    x, _ = benchmark.tasks[-1].train.batch(slice(0, 5))
    assert network(x, head=tasks - 1).shape == (5, each)


def test_pixels_are_brought_to_mean_0_and_deviation_1_by_channel() -> None:
    write(arrays())
    benchmark = load("mine.npz", tasks=1)
    task = benchmark.tasks[0]
    x = torch.cat([part.batch(slice(None))[0] for part in (task.train, task.valid)])
    assert x.mean((0, 2, 3)).tolist() == pytest.approx([0, 0], abs=1e-5)
    assert x.std((0, 2, 3), correction=0).tolist() == pytest.approx([1, 1], abs=1e-5)


def test_statistics_are_those_of_the_pixels() -> None:
    images = np.random.default_rng(1).integers(0, 256, (7, 5, 4, 3), np.uint8)
    images[..., 2] = 9  # a channel that says nothing
    found = statistics(images)
    pixels = images.reshape(-1, 3) / 255
    assert found.mean == pytest.approx(pixels.mean(0))
    assert found.std[:2] == pytest.approx(pixels.std(0)[:2])
    assert found.std[2] == 1


@pytest.mark.parametrize("method", ["finetune", "single", "multitask", "gpm", "trgp"])
def test_a_file_can_be_learnt(method: str) -> None:
    write(arrays())
    result = learnt("mine.npz", method, tasks=3, epochs=5)
    assert result.benchmark == "mine.npz"
    assert len(result.accuracy_matrix) == 3
    assert result.acc > 0.8  # its classes are easy to tell apart
    assert result.changed["tasks"] == 3
    assert len(result.changed["data_source"]) == 16


def test_another_content_is_another_run_and_the_same_one_is_stored() -> None:
    content = arrays()
    write(content)
    first = learnt("mine.npz", tasks=2)
    assert learnt("mine.npz", tasks=2) == first
    content["train_images"][0] += 1
    write(content)
    second = learnt("mine.npz", tasks=2)
    assert second.changed["data_source"] != first.changed["data_source"]
    assert len(list(Path("runs").glob("**/result.json"))) == 2


def test_the_path_may_be_a_path(here: Path) -> None:
    write(arrays())
    whole = learnt(str(here / "mine.npz"), tasks=2)
    assert learnt(here / "mine.npz", tasks=2) == whole


@pytest.mark.parametrize(
    ("tasks", "classes", "possible"),
    [(4, 6, [1, 2, 3]), (6, 6, [1, 2, 3]), (3, 5, [1]), (5, 5, [1])],
)
def test_a_number_of_tasks_that_cannot_be_is_told_which_can(
    tasks: int, classes: int, possible: list[int]
) -> None:
    """Whatever is recommended must be possible."""
    write(arrays(classes))
    with pytest.raises(InputError, match=f"has {classes} classes") as caught:
        learnt("mine.npz", tasks=tasks)
    said = str(caught.value).partition("--tasks ")[2]
    numbers = [int(word.strip(".,")) for word in said.split() if word.strip(".,").isdigit()]
    assert numbers
    assert set(numbers) <= set(possible)
    for number in numbers:
        load("mine.npz", tasks=number)
    assert not Path("runs").exists()


def mangled() -> dict[str, tuple[Callable[[Arrays], Arrays], str]]:
    """Everything that can be wrong with a file."""

    def without(key: str) -> Callable[[Arrays], Arrays]:
        return lambda a: {k: v for k, v in a.items() if k != key}

    def changed(key: str, change: Callable[[Any], Any]) -> Callable[[Arrays], Arrays]:
        return lambda a: a | {key: change(a[key])}

    return {
        "no images": (without("train_images"), "has no array train_images"),
        "no labels": (without("test_labels"), "has no array test_labels"),
        "floats": (changed("train_images", lambda x: x / 255), "of type float64"),
        "three axes": (changed("train_images", lambda x: x[..., 0]), "has 3 axes"),
        "channels first": (
            changed("test_images", lambda x: np.zeros((len(x), 1, 8, 8), np.uint8)),
            "looks like channels first",
        ),
        "empty": (changed("test_images", lambda x: x[:0]), "is empty"),
        "other sizes": (changed("test_images", lambda x: x[:, :2]), "bring both to one size"),
        "labels as floats": (changed("train_labels", lambda y: y * 1.0), "of type float64"),
        "labels as text": (changed("train_labels", lambda y: y.astype(str)), "store integers"),
        "too few labels": (changed("train_labels", lambda y: y[:-1]), "for 120 images"),
        "negative": (changed("test_labels", lambda y: y - 1), "the label -1"),
        "a gap": (changed("train_labels", lambda y: y + (y > 2)), "without a gap"),
        "unknown in test": (changed("test_labels", lambda y: y + 1), "which no train image has"),
        "a class without test": (
            changed("test_labels", lambda y: np.where(y == 4, 3, y)),
            "no test image of class 4",
        ),
        "one class": (
            lambda a: a | {key: 0 * a[key] for key in ("train_labels", "test_labels")},
            "holds one class only",
        ),
        "objects": (
            changed("train_labels", lambda y: np.array([object()] * len(y))),
            "holds Python objects",
        ),
        "nothing to hold out": (
            lambda a: arrays(6, 2, 2),
            "has no sample for its valid part",
        ),
    }


@pytest.mark.parametrize("name", mangled())
def test_a_mangled_file_is_a_sentence_and_nothing_is_written(name: str) -> None:
    change, sentence = mangled()[name]
    write(change(arrays()))
    with pytest.raises(InputError, match=sentence):
        learnt("mine.npz", tasks=3)
    assert [path.name for path in Path().iterdir()] == ["mine.npz"]


def test_a_damaged_or_missing_file_is_a_sentence_and_nothing_is_written() -> None:
    write(arrays())
    content = Path("mine.npz").read_bytes()
    for bad in (b"", content[:10], content[: len(content) // 2], content[:-9], b"P" * 99):
        Path("mine.npz").write_bytes(bad)
        with pytest.raises(InputError, match=r"is no npz file|is damaged"):
            learnt("mine.npz", tasks=3)
    for name in ("other.npz", "no/folder/mine.npz", ".npz"):
        with pytest.raises(InputError, match="There is no file"):
            learnt(name, tasks=2)
    Path("folder.npz").mkdir()
    with pytest.raises(InputError, match="is a folder"):
        learnt("folder.npz", tasks=2)
    Path("mine.npz").write_bytes(content)
    with pytest.raises(InputError, match=r"tasks of mine\.npz is open; give --tasks"):
        learnt("mine.npz")
    assert not Path("runs").exists()


# ---- tensors ---------------------------------------------------------------------------------


def pair(n: int = 30, classes: int = 3, *shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, *(shape or (4,))), torch.arange(n) % classes


class Plain(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.heads = nn.ModuleList(nn.Linear(5, 3) for _ in range(2))

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](self.body(x).relu())


def test_tensors_are_taken_as_they_are() -> None:
    train, test = pair(), pair(9)
    benchmark = from_tensors([(train, test)] * 2, Plain, seed=3)
    for task in benchmark.tasks:
        assert (len(task.train), len(task.valid), len(task.test)) == (27, 3, 9)
        x, y = task.test.batch(slice(None))
        assert torch.equal(x, test[0])
        assert torch.equal(y, test[1])
        both = torch.cat([task.train.x, task.valid.x])
        assert sorted(both.tolist()) == sorted(train[0].tolist())
    other = from_tensors([(train, test)], Plain, seed=4)
    assert not torch.equal(other.tasks[0].valid.x, benchmark.tasks[0].valid.x)
    assert not benchmark.separate_heads
    assert from_tensors([(train, test)] * 2, Heads).separate_heads


def test_pixels_given_as_uint8_are_divided_by_255() -> None:
    x = torch.tensor([[0, 51, 255, 102]] * 30, dtype=torch.uint8)
    y = torch.arange(30) % 3
    benchmark = from_tensors([((x, y), (x, y))], Plain)
    found, _ = benchmark.tasks[0].test.batch(slice(0, 1))
    assert found.tolist()[0] == pytest.approx([0, 0.2, 1, 0.4])


def test_pixels_and_floats_do_not_mix() -> None:
    """Joined for multitask learning, one of the two would be 255 times too large."""
    pixels = torch.randint(0, 256, (30, 4), dtype=torch.uint8), torch.arange(30) % 3
    floats = torch.rand(30, 4), torch.arange(30) % 3
    with pytest.raises(InputError, match="uint8"):
        learnt([(pixels, pixels), (floats, floats)], "multitask", network=Plain)


def test_the_callers_tensors_are_not_changed() -> None:
    train, test = pair(), pair()
    before = [t.clone() for t in (*train, *test)]
    learnt([(train, test)] * 2, network=Plain)
    assert all(torch.equal(a, b) for a, b in zip((*train, *test), before, strict=True))


Wrong = list[tuple[Any, str]]


def wrong_tasks() -> Wrong:
    x, y = pair()
    good = (x, y)
    return [
        ([], "There are no tasks; give at least one"),
        ([(x, y, x, y)], r"\(\(train x, train y\), \(test x, test y\)\)|four tensors"),
        ([(x, y)], "four tensors"),
        ([good], "four tensors"),
        ([None], "four tensors|Task 0"),
        ([3], "four tensors|Task 0"),
        (None, "benchmark|[Tt]ask"),
        ([((x.numpy(), y), good)], "four tensors"),
        ([((x, y.float()), good)], "give labels as int64"),
        ([((x, y[:, None]), good)], "give labels as int64 in one axis"),
        ([((x, y[:-1]), good)], "one label per sample"),
        ([((x.long(), y), good)], "give pixels as uint8 or floats"),
        ([((x, -y), good)], "negative label"),
        ([((x[:0], y[:0]), good)], "no train or no test sample"),
        ([(good, (x[:0], y[:0]))], "no train or no test sample"),
        ([((x[:5], y[:5]), good)], "no sample for its valid part"),
        ([((x, y + 1), good)], "which has 4 classes"),
        ([((x[:, :3], y), (x[:, :3], y))], "cannot compute samples of shape"),
        ([((x, y), (x[:, :3], y))], "shape"),
        ([(good, good), ((torch.tensor(3.0), y), good)], "one label per sample|shape"),
    ]


@pytest.mark.parametrize("k", range(len(wrong_tasks())))
def test_wrong_tensors_are_a_sentence_and_nothing_is_written(k: int) -> None:
    tasks, sentence = wrong_tasks()[k]
    with pytest.raises(InputError, match=sentence) as caught:
        learnt(tasks, network=Plain)
    assert str(caught.value).rstrip()[-1] in ".?)"
    assert not Path("runs").exists()


class Scores(nn.Module):
    """No module would take a head that is not there."""

    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        return x[:, :3]


def test_wrong_networks_are_a_sentence_and_nothing_is_written() -> None:
    tasks = [(pair(), pair())] * 2
    cases: Wrong = [
        (None, "need a network"),
        (Plain(), "class or (a )?function|call"),
        (nn.Linear, "network|Linear"),
        (lambda: 3, "Module"),
        (Scores, "keep one per task in self.heads"),
        (lambda: nn.Sequential(nn.Linear(4, 2)), "which has 3 classes"),
        (lambda: nn.Sequential(nn.Linear(5, 3)), "cannot compute samples of shape"),
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.Flatten(0)), "a row of as many logits"),
    ]
    for network, sentence in cases:
        with pytest.raises(InputError, match=sentence):
            learnt(tasks, network=network)
    with pytest.raises(InputError, match="no layer that can be protected"):
        learnt(tasks, network=lambda: Frozen(requires=False))
    assert not Path("runs").exists()


class Frozen(nn.Module):
    def __init__(self, requires: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).requires_grad_(requires)
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.shift


def test_tasks_of_tensors_are_counted_by_themselves() -> None:
    tasks = [(pair(), pair())] * 2
    for option in ({"tasks": 1}, {"model": "torch.nn:Linear"}):
        with pytest.raises(InputError, match="leave"):
            learnt(tasks, network=Plain, **option)


# ---- networks by name ------------------------------------------------------------------------

NETS = """
import torch
from torch import nn


class Told(nn.Module):
    def __init__(self, inputs, classes, heads, width=7):
        super().__init__()
        self.told = inputs, classes, heads
        n = torch.Size(inputs).numel()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(n, width), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(width, classes) for _ in range(heads))

    def forward(self, x, head=0):
        return self.heads[head](self.body(x))


def made(classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))


def plain():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def needs(depth):
    return plain()


def broken():
    return [][0]


class OneHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 2)

    def forward(self, x):
        return self.layer(x.flatten(1))
"""


def test_a_network_is_told_what_it_asks_for() -> None:
    Path("nets.py").write_text(NETS)
    split = load("split-digits", tasks=3, model="nets:Told").make_network()
    assert split.told == ((1, 8, 8), 2, 3)
    assert len(split.heads) == 3
    permuted = load("permuted-digits", tasks=3, model="nets:Told").make_network()
    assert permuted.told == ((1, 8, 8), 10, 1)
    write(arrays(6, 20, 4, 3, 4, 2))
    assert load("mine.npz", tasks=2, model="nets:Told").make_network().told == ((2, 3, 4), 3, 2)
    result = learnt("split-digits", tasks=2, model="nets:Told", epochs=1)
    assert result.network_bytes == 4 * (64 * 7 + 7 + 2 * (7 * 2 + 2))
    assert result.changed.keys() >= {"model", "model_source"}


def test_a_function_makes_a_network_as_well() -> None:
    Path("nets.py").write_text(NETS)
    result = learnt("permuted-digits", "gpm", tasks=2, model="nets:plain", epochs=1)
    assert result.network_bytes == 4 * 650
    assert result.ranks.keys() == {"1"}


@pytest.mark.parametrize("model", ["trgp.benchmarks.models:MLP", "trgp.benchmarks.models:ResNet18"])
def test_the_papers_networks_can_be_named(model: str) -> None:
    if model.endswith("ResNet18"):
        write(arrays(4, 20, 4, 32, 32, 3))
        load("mine.npz", tasks=2, model=model).make_network()(torch.zeros(2, 3, 32, 32), head=1)
    else:
        network = load("permuted-digits", model=model).make_network()
        assert network(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_networks_that_do_not_fit_are_a_sentence_and_nothing_is_written() -> None:
    Path("nets.py").write_text(NETS)
    cases = [
        (
            "nets:needs",
            "could not be made with {}: .*'depth'.*only inputs, classes and heads are passed",
        ),
        ("nets:OneHead", "OneHead has one head, but every task here has its own"),
        ("nets:NETS", "nets has no 'NETS'"),
        ("nets:torch", "cannot be called"),
        ("nets:broken", "broken"),
        ("nets:plain", "has one head"),
        ("nets", "write it as module:Class"),
        (":plain", "write it as module:Class"),
    ]
    for model, sentence in cases:
        with pytest.raises(InputError, match=sentence):
            learnt("split-digits", "gpm", tasks=2, model=model)
    assert not Path("runs").exists()
