"""What is there and what each benchmark lacks."""

from pathlib import Path

import numpy as np

from trgp.benchmarks.data import BENCHMARKS, SETS, SOURCES, present


def test_an_empty_or_absent_root_lacks_everything(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "absent"):
        found = present(root)
        assert found.root == root
        assert found.present == found.damaged == found.others == ()
        assert found.missing == BENCHMARKS


def test_what_is_there_is_not_missing(tmp_path: Path) -> None:
    for name in ("mnist", "cifar100", "my_own"):
        np.savez(tmp_path / f"{name}.npz", nothing=0)
    (tmp_path / "svhn.npz").write_bytes(b"PK cut short")
    (tmp_path / "cifar10.npz").mkdir()
    found = present(tmp_path)
    assert found.present == ("mnist", "cifar100")
    assert found.damaged == ("svhn",)
    assert found.others == ("my_own",)
    assert found.missing == {
        "pmnist": (),
        "split-cifar100": (),
        "cifar100-superclass": (),
        "five-datasets": ("cifar10", "svhn", "fashion_mnist", "notmnist"),
        "split-miniimagenet": ("miniimagenet",),
        "permuted-digits": (),
        "split-digits": (),
    }


def test_every_needed_set_is_known_and_all_but_one_have_a_source() -> None:
    assert {name for needed in BENCHMARKS.values() for name in needed} == set(SETS)
    assert set(SETS) - set(SOURCES) == {"miniimagenet"}
