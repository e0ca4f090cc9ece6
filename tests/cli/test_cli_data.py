"""`trgp data`, with sources on this disk."""

from pathlib import Path

import numpy as np
import pytest
from cli_calls import Trgp
from PIL import Image

from trgp.benchmarks.data import SOURCES, Remote, Source, load
from trgp.benchmarks.data.folders import Size, images_in


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that svhn is made of, in place of those on the net."""
    file = tmp_path / "svhn.bin"
    file.write_bytes(b"content")

    def convert(files: object) -> dict[str, np.ndarray]:
        images = np.zeros((4, 2, 2, 1), np.uint8)
        labels = np.arange(4) % 2
        return {
            f"{split}_{key}": value
            for split in ("train", "test")
            for key, value in (("images", images), ("labels", labels))
        }

    remote = Remote("svhn.bin", (file.as_uri(),))
    made = Source((remote,), convert, train=4, test=4, shape=(2, 2, 1))
    monkeypatch.setitem(SOURCES, "svhn", made)
    return file


@pytest.mark.usefixtures("source")
def test_prepare_and_list(trgp: Trgp, tmp_path: Path) -> None:
    root = tmp_path / "root"
    code, out, err = trgp("data", "prepare", "svhn", "--data-root", str(root))
    assert (code, out, err) == (0, f"svhn: {root / 'svhn.npz'}\n", "")
    assert load("svhn", root).classes == 2
    (root / "mine.npz").write_bytes(b"")
    (root / "mnist.npz").write_bytes(b"")
    code, out, err = trgp("data", "list", "--data-root", str(root))
    assert (code, err) == (0, "")
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert lines["five-datasets"].split(maxsplit=1)[1] == "cifar10, mnist, fashion_mnist, notmnist"
    assert lines["permuted-digits"].split() == ["permuted-digits", "nothing"]
    assert "present" in lines["svhn"]
    assert "five-datasets" in lines["svhn"]
    assert "damaged: trgp data prepare mnist" in lines["mnist"]
    assert "missing: trgp data prepare cifar10 " in lines["cifar10"]
    assert "your own" in lines["mine"]


@pytest.mark.usefixtures("source")
def test_a_bar_where_there_is_a_terminal(trgp: Trgp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    code, _, err = trgp("data", "prepare", "svhn")
    assert code == 0
    assert "svhn.bin" in err


def test_a_failed_download(trgp: Trgp, source: Path, tmp_path: Path) -> None:
    source.unlink()
    code, out, err = trgp("data", "prepare", "svhn", "--data-root", str(tmp_path / "root"))
    assert (code, out) == (1, "")
    assert err.startswith("trgp: svhn: svhn.bin could not be downloaded")
    assert err.count("\n") == 1


@pytest.mark.usefixtures("source")
def test_ctrl_c(trgp: Trgp, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trgp.cli.data.prepare", interrupted)
    code, _, err = trgp("data", "prepare", "svhn")
    assert code == 130
    assert "the same command resumes the download" in err


def test_images_of_ones_own(trgp: Trgp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a folder, with a bar that counts them."""
    monkeypatch.setattr(images_in, "__defaults__", (None, Size(2, 6, 4)))
    for name in ("cat", "dog"):
        (tmp_path / "mine" / name).mkdir(parents=True)
        for k in range(6):
            Image.new("L", (5, 5), 40 * k).save(tmp_path / "mine" / name / f"{k}.png")
    root = tmp_path / "root"
    command = ("data", "prepare", "miniimagenet", "--data-root", str(root), "--from")
    code, out, err = trgp(*command, str(tmp_path / "none"))
    assert (code, out) == (2, "")
    assert err.startswith("trgp: There is no folder")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    code, out, err = trgp(*command, str(tmp_path / "mine"))
    assert (code, out) == (0, f"miniimagenet: {root / 'miniimagenet.npz'}\n")
    assert "12/12" in err
    assert load("miniimagenet", root).train_images.shape == (10, 4, 4, 3)


def test_what_is_downloaded_is_not_given(trgp: Trgp) -> None:
    code, _, err = trgp("data", "prepare", "mnist", "--from", ".")
    assert code == 2
    assert err == "trgp: mnist is downloaded; leave --from out, or prepare it alone.\n"


def test_a_root_that_is_nowhere(trgp: Trgp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRGP_DATA", "~no-such-user/sets")
    for command in (("data", "list"), ("list", "benchmarks"), ("run", "pmnist")):
        code, out, err = trgp(*command)
        assert (code, out) == (2, "")
        assert "unknown home" in err
