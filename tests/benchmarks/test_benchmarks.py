"""Task sequences: sizes, labels, disjointness, seeds, the published quirks, networks, refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_sets import SMALL, write_small
from torch import Tensor

from trgp.benchmarks import NAMES, PAPER, Benchmark, Task, data, entry, load
from trgp.benchmarks.cifar100_superclass import ORDERS, scramble
from trgp.benchmarks.common import Request, shuffled
from trgp.benchmarks.data import NORMALISATION, ImageSet, Tensors
from trgp.engine.config import configure

RECORDS = Path(__file__).parents[2] / "records"
TASKS = dict(zip(NAMES, (10, 10, 20, 5, 20, 10, 5), strict=True))
CLASSES = dict(zip(NAMES, (10, 10, 5, 10, 5, 10, 2), strict=True))
PARTS = ("train", "valid", "test")


def sizes(task: Task) -> tuple[int, ...]:
    return tuple(len(getattr(task, part)) for part in PARTS)


def rows(samples: Tensors) -> set[bytes]:
    return {x.numpy().tobytes() for x in samples.x}


def everything(benchmark: Benchmark) -> list[Tensor]:
    parts = [getattr(task, part) for task in benchmark.tasks for part in PARTS]
    return [tensor for part in parts for tensor in (part.x, part.y)]


def same(a: Benchmark, b: Benchmark) -> bool:
    pairs = zip(everything(a), everything(b), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def test_the_real_cifar100_has_the_published_sizes(real: Callable[[str], Path]) -> None:
    """One test for both benchmarks, and the first of all: unpacking the set takes longest."""
    root = real("cifar100")
    for name, expected in (
        ("split-cifar100", (4750, 250, 1000)),
        ("cifar100-superclass", (2375, 125, 500)),
    ):
        benchmark = load(name, root=root)
        for task in benchmark.tasks:
            assert sizes(task) == expected
            assert task.test.y.bincount().tolist() == [expected[2] // task.classes] * task.classes
    people = benchmark.tasks[14]  # baby, boy, girl, man, woman
    assert people.name == "classes 2, 11, 35, 46, 98"


def test_the_real_mnist_has_the_published_sizes(real: Callable[[str], Path]) -> None:
    root = real("mnist")
    for task in load("pmnist", root=root, tasks=2).tasks:
        assert sizes(task) == (54000, 6000, 10000)


def test_every_benchmark_of_the_catalogue_is_there() -> None:
    assert tuple(data.BENCHMARKS) == NAMES


def test_the_papers_numbers_are_complete() -> None:
    assert list(PAPER) == [name for name in NAMES if "digits" not in name]
    for name, methods in PAPER.items():
        for method in ("gpm", "trgp"):
            acc, std, bwt = methods[method]
            assert 50 < acc < 100
            if name == "cifar100-superclass":  # whose table has accuracies alone
                assert (std, bwt) == (None, None)
            else:
                assert std is not None
                assert bwt is not None
                assert 0 < std < 1
                assert -3 <= bwt < 0
        assert methods["trgp"].acc == max(
            v.acc for k, v in methods.items() if k not in ("multitask", "single")
        )


@pytest.mark.parametrize("name", NAMES)
def test_tasks_have_their_labels_disjoint_parts_and_a_network(name: str, small: Path) -> None:
    benchmark = load(name, root=small)
    assert benchmark.name == name
    assert len(benchmark.tasks) == TASKS[name]
    assert len({task.name for task in benchmark.tasks}) == TASKS[name]
    assert benchmark.separate_heads == (name not in ("pmnist", "permuted-digits"))
    assert benchmark.separate_heads == entry(name).separate_heads
    network = benchmark.make_network()
    heads = TASKS[name] if benchmark.separate_heads else 1
    assert len(network.get_submodule("heads").state_dict()) == heads
    for t, task in enumerate(benchmark.tasks):
        assert task.classes == CLASSES[name]
        both = torch.cat([task.train.y, task.valid.y])
        assert both.unique().tolist() == task.test.y.unique().tolist() == list(range(task.classes))
        if "digits" not in name:  # where a few digits look alike to the last pixel
            assert sum(len(rows(getattr(task, part))) for part in PARTS) == sum(sizes(task))
            assert len(rows(task.train) | rows(task.valid) | rows(task.test)) == sum(sizes(task))
        if t in (0, TASKS[name] - 1):
            x, _ = task.train.batch(slice(0, 4))
            logits = network(x, head=t if benchmark.separate_heads else 0)
            assert logits.shape == (4, task.classes)
            assert logits.isfinite().all()


@pytest.mark.parametrize("name", ["split-cifar100", "cifar100-superclass", "split-miniimagenet"])
def test_tasks_share_no_image_and_leave_none_out(name: str, small: Path) -> None:
    benchmark = load(name, root=small)
    whole = data.load(*data.BENCHMARKS[name], root=small)
    for parts, length in ((("train", "valid"), len(whole.train_labels)), (("test",), None)):
        images = [rows(getattr(task, p)) for task in benchmark.tasks for p in parts]
        assert sum(map(len, images)) == (length or len(whole.test_labels))
        assert len(set().union(*images)) == (length or len(whole.test_labels))


@pytest.mark.parametrize("name", NAMES)
def test_equal_seeds_agree_bit_for_bit_and_others_differ(name: str, small: Path) -> None:
    first, again, other = (load(name, seed=s, root=small, tasks=2) for s in (3, 3, 4))
    assert same(first, again)
    assert not same(first, other)
    if name in ("split-cifar100", "cifar100-superclass", "five-datasets", "split-digits"):
        for a, b in zip(first.tasks, other.tasks, strict=True):
            assert torch.equal(a.test.x, b.test.x)
            assert torch.equal(a.test.y, b.test.y)
            # The same images on the whole, held out differently.
            assert sizes(a) == sizes(b)
            assert rows(a.train) | rows(a.valid) == rows(b.train) | rows(b.valid)


@pytest.mark.parametrize("name", NAMES)
def test_fewer_tasks_are_the_first_of_all(name: str, small: Path) -> None:
    few, whole = load(name, root=small, tasks=2), load(name, root=small)
    assert len(few.tasks) == 2
    assert same(few, Benchmark(name, whole.tasks[:2], whole.make_network, False))
    heads = few.make_network().get_submodule("heads").state_dict()
    assert len(heads) == (2 if few.separate_heads else 1)


@pytest.mark.parametrize("name", ["pmnist", "permuted-digits"])
def test_permuted_tasks_are_permutations_of_the_same_images(name: str, small: Path) -> None:
    benchmark = load(name, seed=2, root=small)
    r = [4, 1, 5, 0, 7, 2, 3, 6, 9, 8]  # as scikit-learn shuffles 0 to 9 with seed 2
    images = []
    for i, task in enumerate(benchmark.tasks):
        x = task.train.x.flatten(1)
        restored = torch.empty_like(x)
        restored[:, shuffled(x.shape[1], 100 * r[i] + i)] = x
        images.append(restored)
        assert not torch.equal(x, restored)
        assert torch.equal(task.train.y, benchmark.tasks[0].train.y)
    assert all(torch.equal(image, images[0]) for image in images)


def test_shuffles_are_those_of_scikit_learn() -> None:
    utils = pytest.importorskip("sklearn.utils")
    for seed in (0, 1, 401):
        expected = utils.shuffle(np.arange(784), random_state=seed)
        np.testing.assert_array_equal(shuffled(784, seed).numpy(), expected)


def test_pmnist_holds_out_the_first_tenth(small: Path) -> None:
    whole = data.load("mnist", small)
    for seed in (0, 1):
        task = load("pmnist", seed=seed, root=small, tasks=1).tasks[0]
        assert sizes(task) == (108, 12, 30)
        labels = torch.cat([task.valid.y, task.train.y]).numpy()
        np.testing.assert_array_equal(labels, whole.train_labels)
        assert task.train.x.dtype == torch.uint8
        assert task.train.normalisation == NORMALISATION["mnist"]


def test_orders_of_the_superclasses() -> None:
    assert list(ORDERS) == list("ABCDE")
    assert len(set(ORDERS.values())) == 5
    assert all(sorted(order) == list(range(20)) for order in ORDERS.values())


def test_an_order_moves_whole_tasks(small: Path) -> None:
    name = "cifar100-superclass"
    natural, moved = load(name, root=small), load(name, root=small, order="C")
    expected = Benchmark(
        name, tuple(natural.tasks[c] for c in ORDERS["C"]), natural.make_network, True
    )
    assert same(moved, expected)
    assert natural.tasks[3].name == "classes 3, 23, 43, 63, 83"


def test_scrambling_is_an_invertible_permutation_of_pixels(small: Path) -> None:
    positions = torch.arange(3 * 32 * 32).view(1, 3, 32, 32)
    order = scramble(positions).flatten()
    assert sorted(order.tolist()) == list(range(3 * 32 * 32))
    assert order[1] == 3  # the second pixel of a row comes from three places further on
    plain = load("cifar100-superclass", root=small, tasks=2)
    scrambled = load("cifar100-superclass", root=small, tasks=2, scrambled=True)
    for a, b in zip(plain.tasks, scrambled.tasks, strict=True):
        for part in PARTS:
            x, y = getattr(a, part).x, getattr(b, part).x
            assert not torch.equal(x, y)
            assert torch.equal(x.flatten(1)[:, order], y.flatten(1))
            assert torch.equal(y.flatten(1)[:, order.argsort()], x.flatten(1))
            assert torch.equal(getattr(a, part).y, getattr(b, part).y)


def test_five_datasets_come_in_the_published_order_and_size(small: Path) -> None:
    benchmark = load("five-datasets", root=small)
    names = [task.name for task in benchmark.tasks]
    assert names == ["cifar10", "mnist", "svhn", "fashion_mnist", "notmnist"]
    for task in benchmark.tasks:
        _, train, test, _ = SMALL[task.name]
        held = 10 * train * 5 // 100
        assert sizes(task) == (10 * train - held, held, 10 * test)
        assert task.train.x.shape[1:] == (3, 32, 32)
        assert task.train.x.dtype == torch.uint8
        key = "mnist_padded" if task.name == "mnist" else task.name
        assert task.train.normalisation == NORMALISATION[key]


def test_mnist_can_stand_in_for_fashion(small: Path, tmp_path: Path) -> None:
    for name in ("cifar10", "mnist", "svhn"):
        (tmp_path / f"{name}.npz").symlink_to(small / f"{name}.npz")
    with pytest.raises(FileNotFoundError, match="trgp data prepare fashion_mnist"):
        load("five-datasets", root=tmp_path, tasks=4)
    _, mnist, _, again = load("five-datasets", root=tmp_path, tasks=4, mnist_for_fashion=True).tasks
    assert torch.equal(mnist.test.x, again.test.x)
    assert again.name == "mnist for fashion_mnist"
    assert again.test.normalisation == NORMALISATION["fashion_mnist"]


@pytest.mark.parametrize(("name", "published"), [("cifar100-superclass", 0), ("five-datasets", 1)])
def test_the_published_split_can_be_kept_whatever_the_seed(
    name: str, published: int, small: Path
) -> None:
    a, b = (load(name, root=small, tasks=2, seed=s, fixed_split=True) for s in (5, 6))
    assert same(a, b)
    assert same(a, load(name, root=small, tasks=2, seed=published))


def test_the_published_classes_of_miniimagenet_are_those_of_seed_37(small: Path) -> None:
    names = [task.name for task in load("split-miniimagenet", seed=37, root=small).tasks]
    assert names[0] == "classes 61, 49, 86, 78, 5"
    assert names[19] == "classes 22, 53, 92, 76, 15"
    whole = data.load("miniimagenet", small)
    fixed = [load("split-miniimagenet", seed=s, root=small, fixed_classes=True) for s in (5, 6)]
    for benchmark in fixed:
        assert [task.name for task in benchmark.tasks] == names
    held = [benchmark.tasks[0].valid.x for benchmark in fixed]
    assert not torch.equal(*held)  # which the seed still chooses
    task = load("split-miniimagenet", seed=37, root=small, tasks=1).tasks[0]
    for label, fine in enumerate((61, 49, 86, 78, 5)):
        x = task.test.x[task.test.y == label].permute(0, 2, 3, 1)
        np.testing.assert_array_equal(x.numpy(), whole.test_images[whole.test_labels == fine])


def test_digits_have_their_documented_sizes() -> None:
    for task in load("permuted-digits", tasks=3).tasks:
        assert sizes(task) == (1294, 143, 360)
        assert float(task.train.x.min()) == 0
        assert float(task.train.x.max()) == 1
    totals = np.sum([sizes(task) for task in load("split-digits").tasks], axis=0)
    assert totals.sum() == 1797
    assert totals[2] == 360
    test = load("split-digits", tasks=1).tasks[0].test
    assert not rows(test) & rows(load("split-digits", tasks=1).tasks[0].train)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("pmnits", {}), "no benchmark 'pmnits'; did you mean 'pmnist'"),
        (("imagenet", {}), "did you mean 'split-miniimagenet'"),
        (("zzz", {}), "known are pmnist, split-cifar100"),
        (("five-datasets", {"mnist_for_fasion": True}), "did you mean 'mnist_for_fashion'"),
        (("five-datasets", {"mnist_for_fashion": 1}), "must be True or False, not 1"),
        (("cifar100-superclass", {"order": "F"}), "one of A, B, C, D, E, not 'F'"),
        (("cifar100-superclass", {"order": ["A"]}), "one of A, B, C, D, E"),
        (("cifar100-superclass", {"zzz": 1}), "known are tasks, model, order, scrambled"),
        (("pmnist", {"order": "A"}), "pmnist has no option 'order'; did you mean 'model'"),
        (
            ("split-digits", {"tasks": 6}),
            "split-digits has 5 tasks, not 6",
        ),
        (("split-digits", {"tasks": 0}), "tasks must be a whole number of at least 1"),
        (("split-digits", {"tasks": "2"}), "tasks must be a whole number"),
        (("split-digits", {"seed": -1}), "seed must be a whole number from 0"),
        (("split-digits", {"seed": 1.5}), "seed must be a whole number from 0"),
    ],
)
def test_wrong_requests_are_a_sentence(
    arguments: tuple[str, dict[str, Any]], sentence: str
) -> None:
    name, options = arguments
    with pytest.raises(ValueError, match=sentence.replace("(", "\\(")):
        load(name, **options)


def test_missing_and_wrong_sets_are_a_sentence(small: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"get it with `trgp data prepare mnist`"):
        load("pmnist", root=tmp_path)
    (tmp_path / "cifar100.npz").symlink_to(small / "cifar10.npz")
    with pytest.raises(ValueError, match="holds 10 classes of 32 x 32 x 3 images, but split-cifar"):
        load("split-cifar100", root=tmp_path)


def test_superclasses_must_be_there_and_whole(small: Path, tmp_path: Path) -> None:
    write_small(tmp_path, "cifar100")
    path = tmp_path / "cifar100.npz"
    with np.load(path) as content:
        arrays = dict(content)
    arrays["train_coarse_labels"][arrays["train_labels"] == 0] = 1
    data.save(path, arrays)
    with pytest.raises(ValueError, match="not twenty of five classes each"):
        load("cifar100-superclass", root=tmp_path)
    data.save(path, {key: a for key, a in arrays.items() if "coarse" not in key})
    with pytest.raises(ValueError, match="no superclasses"):
        load("cifar100-superclass", root=tmp_path)


def test_a_set_too_small_to_hold_out_from_is_a_sentence(tmp_path: Path) -> None:
    data.save(
        tmp_path / "cifar10.npz",
        {
            f"{split}_{key}": value
            for split in ("train", "test")
            for key, value in (
                ("images", np.zeros((10, 32, 32, 3), np.uint8)),
                ("labels", np.arange(10)),
            )
        },
    )
    with pytest.raises(ValueError, match="'cifar10' has no sample for its valid part"):
        load("five-datasets", root=tmp_path, tasks=1)


def test_without_scikit_learn_the_sentence_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install 'trgp\\[digits\\]'"):
        load("permuted-digits")


def test_digits_are_those_that_scikit_learn_loads() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    content = datasets.load_digits()
    found = []
    for t, task in enumerate(load("split-digits").tasks):
        for part in (task.train, task.valid, task.test):
            images, labels = part.batch(slice(None))
            rows = (16 * images).flatten(1).tolist()
            found += [(row, 2 * t + y) for row, y in zip(rows, labels.tolist(), strict=True)]
    expected = zip(content.data.tolist(), content.target.tolist(), strict=True)
    assert sorted(found) == sorted(expected)


# Train and test images of each set, and the parts that a task of the benchmark has.
PUBLISHED = {
    "pmnist": [((60000, 10000), (54000, 6000, 10000))],
    "split-cifar100": [((50000, 10000), (4750, 250, 1000))],
    "cifar100-superclass": [((50000, 10000), (2375, 125, 500))],
    "five-datasets": [
        ((50000, 10000), (47500, 2500, 10000)),
        ((60000, 10000), (57000, 3000, 10000)),
        ((73257, 26032), (69595, 3662, 26032)),
        ((60000, 10000), (57000, 3000, 10000)),
        ((16853, 1873), (16011, 842, 1873)),
    ],
    "split-miniimagenet": [((50000, 10000), (2450, 50, 500))],
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sets_of_the_real_length_give_the_published_sizes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = iter(lengths for lengths, _ in PUBLISHED[name])
    side = 32 if name == "five-datasets" else 1

    def blank(_: Request, source: str, classes: int, *shapes: tuple[int, int, int]) -> ImageSet:
        images = [np.zeros((n, side, side, 1), np.uint8) for n in next(lengths)]
        labels = [np.arange(len(part)) % classes for part in images]
        train, test = zip(images, labels, strict=True)
        return ImageSet(source, *train, *test, *(part % 20 for part in labels))

    monkeypatch.setattr(Request, "read", blank)
    normalised = ("cifar100", "miniimagenet")
    monkeypatch.setattr("trgp.benchmarks.split_cifar100.NORMALISATION", dict.fromkeys(normalised))
    monkeypatch.setattr(
        "trgp.benchmarks.split_miniimagenet.NORMALISATION", dict.fromkeys(normalised)
    )
    found = [sizes(task) for task in load(name).tasks]
    expected = [parts for _, parts in PUBLISHED[name]]
    assert found == (expected if len(expected) > 1 else expected * TASKS[name])


@pytest.mark.parametrize(
    "record", sorted(RECORDS.glob("choose-*.json")), ids=lambda path: path.stem
)
def test_the_presets_are_what_was_chosen_on_validation_data(record: Path) -> None:
    """The best of every method in the record of the choice, which never looked at the test set."""
    found = json.loads(record.read_text())
    for method, grid in found["grids"].items():
        tried = [cell for cell in grid["cells"] if cell["acc"] is not None]
        best = max(tried, key=lambda cell: cell["acc"])
        settings = configure(found["benchmark"], method, found["preset"]).stored
        for key in best.keys() - {"acc", "bwt"}:
            assert settings[key] in (best[key], [best[key]]), (method, key)
