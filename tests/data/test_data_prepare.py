"""From sources to npz, with small files in the real formats from a server on this machine."""

import gzip
import hashlib
import io
import lzma
import struct
import subprocess
import sys
import tarfile
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from trgp.benchmarks.data import (
    SOURCES,
    Remote,
    Source,
    as_rgb32,
    formats,
    load,
    prepare,
    to_tensors,
)
from trgp.benchmarks.data import download as download_module

SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_packs = pytest.mark.skipif(
    not (SHARED / "unpack.py").is_file(), reason=f"there are no packed image sets in {SHARED}"
)
RANDOM = np.random.RandomState(0)


class Server(ThreadingHTTPServer):
    """Serves `files`, with Range; each count in `cuts` ends one answer after that many bytes."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.cuts: list[int] = []
        self.ranges = True
        self.asked: list[tuple[str, str | None]] = []

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{path}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.asked.append((self.path, asked))
        content = self.server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        start = 0
        if asked and self.server.ranges:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        body = content[start:]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.cuts.pop(0)] if self.server.cuts else body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(download_module, "PAUSE", 0.0)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def idx_gz(array: NDArray[np.uint8]) -> bytes:
    head = struct.pack(f">2xBB{array.ndim}I", 8, array.ndim, *array.shape)
    return gzip.compress(head + array.tobytes(), mtime=0)


def tar_gz(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def png(image: NDArray[np.uint8], kinds: list[int], colour: int = 0) -> bytes:
    """A grey png whose rows use the given filters in turn, straight from the format's text."""
    height, width = image.shape
    padded = np.zeros((height + 1, width + 1), np.int64)
    padded[1:, 1:] = image
    rows = b""
    for y in range(height):
        kind = kinds[y % len(kinds)]
        line = []
        for x in range(width):
            a, b, c = (int(v) for v in (padded[y + 1, x], padded[y, x + 1], padded[y, x]))
            p = a + b - c
            paeth = sorted((abs(p - v), i, v) for i, v in enumerate((a, b, c)))[0][2]
            line.append((int(image[y, x]) - (0, a, b, (a + b) // 2, paeth)[kind]) % 256)
        rows += bytes([kind, *line])

    def chunk(name: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    packed = zlib.compress(rows)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0))
        + chunk(b"tEXt", b"a\0b")
        + chunk(b"IDAT", packed[:20])
        + chunk(b"IDAT", packed[20:])
        + chunk(b"IEND", b"")
    )


def digits(train: int = 40, test: int = 20) -> dict[str, NDArray[np.uint8]]:
    arrays = {}
    for split, count in (("train", train), ("test", test)):
        arrays[f"{split}_images"] = RANDOM.randint(0, 256, (count, 28, 28), np.uint8)
        arrays[f"{split}_labels"] = (np.arange(count) % 10).astype(np.uint8)
    return arrays


def remote(server: Server, file: str, content: bytes, *mirrors: str, **known: Any) -> Remote:
    """The file on every mirror, with its true md5 unless told otherwise."""
    for mirror in mirrors or ("/a/",):
        server.files[mirror + file] = content
    urls = tuple(server.url(mirror + file) for mirror in mirrors or ("/a/",))
    return Remote(file, urls, **({"md5": hashlib.md5(content).hexdigest()} | known))


def mnist(server: Server, arrays: dict[str, NDArray[np.uint8]], *mirrors: str) -> Source:
    files = tuple(
        remote(server, file, idx_gz(arrays[key]), *mirrors) for key, file in formats.IDX.items()
    )
    return replace(SOURCES["mnist"], files=files, train=40, test=20)


def left(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_a_full_download_becomes_an_npz(server: Server, tmp_path: Path) -> None:
    arrays = digits()
    seen: list[tuple[str, int, int | None]] = []
    sources = {"mnist": mnist(server, arrays)}
    path = prepare("mnist", tmp_path, lambda *args: seen.append(args), sources=sources)
    assert path == tmp_path / "mnist.npz"
    assert [p.name for p in tmp_path.iterdir()] == ["mnist.npz"]
    loaded = load("mnist", tmp_path)
    np.testing.assert_array_equal(loaded.train_images[..., 0], arrays["train_images"])
    np.testing.assert_array_equal(loaded.test_labels, arrays["test_labels"])
    size = len(server.files["/a/train-images-idx3-ubyte.gz"])
    assert ("train-images-idx3-ubyte.gz", size, size) in seen
    asked = len(server.asked)
    prepare("mnist", tmp_path, sources=sources)  # a good file is there: nothing is asked for
    assert len(server.asked) == asked


def test_a_damaged_npz_is_made_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "mnist.npz").write_bytes(b"PK")
    prepare("mnist", tmp_path, sources={"mnist": mnist(server, digits())})
    assert load("mnist", tmp_path).classes == 10


@pytest.mark.parametrize("ranges", [True, False])
def test_a_cut_connection_is_resumed(server: Server, tmp_path: Path, ranges: bool) -> None:
    arrays = digits()
    server.cuts, server.ranges = [5000, 7000], ranges
    source = mnist(server, arrays)
    prepare("mnist", tmp_path, sources={"mnist": source})
    np.testing.assert_array_equal(
        load("mnist", tmp_path).train_images[..., 0], arrays["train_images"]
    )
    first = f"/a/{source.files[0].file}"
    expected = [None, "bytes=5000-", "bytes=12000-" if ranges else "bytes=7000-"]
    assert [asked for path, asked in server.asked if path == first] == expected
    assert left(tmp_path) == ["mnist.npz"]


def test_a_later_call_goes_on_where_an_earlier_one_gave_up(server: Server, tmp_path: Path) -> None:
    sources = {"mnist": mnist(server, digits())}
    file = sources["mnist"].files[0].file
    server.cuts = [100] * download_module.ATTEMPTS
    with pytest.raises(ConnectionError, match=r"`trgp data prepare mnist` again") as caught:
        prepare("mnist", tmp_path, sources=sources)
    assert "ended after" in str(caught.value)
    assert left(tmp_path) == [f"downloads/mnist/{file}.part"]
    server.asked.clear()
    prepare("mnist", tmp_path, sources=sources)
    assert server.asked[0] == (f"/a/{file}", f"bytes={100 * download_module.ATTEMPTS}-")
    assert left(tmp_path) == ["mnist.npz"]


@pytest.mark.parametrize("extra", [0, 10], ids=["whole", "too long"])
def test_a_part_with_nothing_left_to_fetch(server: Server, tmp_path: Path, extra: int) -> None:
    sources = {"mnist": mnist(server, digits())}
    file = sources["mnist"].files[0].file
    part = tmp_path / "downloads" / "mnist" / f"{file}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(server.files[f"/a/{file}"] + b"x" * extra)
    prepare("mnist", tmp_path, sources=sources)
    assert left(tmp_path) == ["mnist.npz"]


def test_a_part_of_another_file_is_thrown_away(server: Server, tmp_path: Path) -> None:
    sources = {"mnist": mnist(server, digits())}
    part = tmp_path / "downloads" / "mnist" / f"{sources['mnist'].files[0].file}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"something else")
    prepare("mnist", tmp_path, sources=sources)
    assert [asked for _, asked in server.asked[:2]] == ["bytes=14-", None]


@pytest.mark.parametrize("known", [{"md5": "0" * 32}, {"sha256": "0" * 64}, {"size": 7}])
def test_a_wrong_file_is_refused_and_not_kept(
    server: Server, tmp_path: Path, known: dict[str, Any]
) -> None:
    source = mnist(server, digits())
    bad = replace(source, files=(replace(source.files[0], **known), *source.files[1:]))
    with pytest.raises(ConnectionError, match="in place of") as caught:
        prepare("mnist", tmp_path, sources={"mnist": bad})
    assert str(caught.value).startswith("mnist: train-images-idx3-ubyte.gz could not be")
    assert left(tmp_path) == []


def test_a_wrong_file_on_the_first_mirror_is_taken_from_the_second(
    server: Server, tmp_path: Path
) -> None:
    source = mnist(server, digits(), "/a/", "/b/")
    server.files[f"/a/{source.files[1].file}"] = b"an error page with status 200"
    prepare("mnist", tmp_path, sources={"mnist": source})
    assert left(tmp_path) == ["mnist.npz"]


def test_a_missing_file_is_taken_from_the_second_mirror(server: Server, tmp_path: Path) -> None:
    source = mnist(server, digits(), "/a/", "/b/")
    for path in [path for path in server.files if path.startswith("/a/")]:
        del server.files[path]
    prepare("mnist", tmp_path, sources={"mnist": source})
    assert [path[:3] for path, _ in server.asked] == ["/a/", "/b/"] * 4


def test_a_mirror_out_of_reach_is_passed_over(server: Server, tmp_path: Path) -> None:
    with Server() as other:  # its port is free again once it is closed
        nowhere = other.url("/")
    source = mnist(server, digits())
    files = tuple(replace(file, urls=(nowhere, *file.urls)) for file in source.files)
    prepare("mnist", tmp_path, sources={"mnist": replace(source, files=files)})
    assert left(tmp_path) == ["mnist.npz"]


def test_no_mirror_has_it(server: Server, tmp_path: Path) -> None:
    source = mnist(server, digits(), "/a/", "/b/")
    server.files.clear()
    with pytest.raises(ConnectionError, match=r"/a/.* answered 404; .*/b/.* answered 404"):
        prepare("mnist", tmp_path, sources={"mnist": source})
    assert left(tmp_path) == []


def test_the_wrong_number_of_images_is_refused(server: Server, tmp_path: Path) -> None:
    source = mnist(server, digits(train=30))
    with pytest.raises(ValueError, match=r"\(30, 28, 28, 1\) in place of \(40, 28, 28, 1\)"):
        prepare("mnist", tmp_path, sources={"mnist": source})
    assert left(tmp_path) == []


NOT_IDX = [b"", b"\0\0\x08", b"\0\0\x0d\x01\0\0\0\1x", b"\0\0\x08\x01\0\0\0\5abc", None]


@pytest.mark.parametrize("content", NOT_IDX)
def test_files_that_do_not_decode_are_refused(
    server: Server, tmp_path: Path, content: bytes | None
) -> None:
    source = mnist(server, digits())
    raw = b"no gzip" if content is None else gzip.compress(content)
    files = (remote(server, source.files[0].file, raw), *source.files[1:])
    with pytest.raises(ValueError, match=r"are not as published.*prepare mnist` again\.$"):
        prepare("mnist", tmp_path, sources={"mnist": replace(source, files=files)})
    assert left(tmp_path) == []


def test_a_folder_that_cannot_be_written_gets_a_sentence(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match=r"could not be written .*TRGP_DATA\.$"):
        prepare("mnist", tmp_path / "file", sources={"mnist": mnist(server, digits())})


def cifar(server: Server, coarse: bool) -> tuple[Source, NDArray[np.uint8]]:
    """An archive of random records; the planes of the images, train then test."""
    labels = np.arange(60) % 10
    heads = np.stack([labels // 5, labels], axis=1) if coarse else labels[:, None]
    planes = RANDOM.randint(0, 256, (60, 3, 32, 32), np.uint8)
    rows = np.concatenate([heads.astype(np.uint8), planes.reshape(60, -1)], axis=1)
    splits = formats.CIFAR100 if coarse else formats.CIFAR10
    names = [f"cifar/{name}" for names in splits.values() for name in names]
    parts = np.split(rows, [50]) if coarse else np.split(rows, 6)
    content = {name: part.tobytes() for name, part in zip(names, parts, strict=True)}
    name = "cifar100" if coarse else "cifar10"
    packed = tar_gz({"cifar/readme.html": b"hello"} | dict(reversed(content.items())))
    file = remote(server, SOURCES[name].files[0].file, packed)
    return replace(SOURCES[name], files=(file,), train=50, test=10), planes


@pytest.mark.parametrize("coarse", [False, True])
def test_cifars_records_are_read_without_pickle(
    server: Server, tmp_path: Path, coarse: bool
) -> None:
    name = "cifar100" if coarse else "cifar10"
    source, planes = cifar(server, coarse)
    server.cuts = [20_000]
    prepare(name, tmp_path, sources={name: source})
    loaded = load(name, tmp_path)
    images = np.concatenate([loaded.train_images, loaded.test_images])
    np.testing.assert_array_equal(images.transpose(0, 3, 1, 2), planes)
    np.testing.assert_array_equal(loaded.train_labels, np.arange(50) % 10)
    if coarse:
        assert loaded.train_coarse_labels is not None
        np.testing.assert_array_equal(loaded.train_coarse_labels, np.arange(50) % 10 // 5)
    else:
        assert loaded.train_coarse_labels is None
    assert left(tmp_path) == [f"{name}.npz"]


@pytest.mark.parametrize(
    "content",
    [tar_gz({"cifar/train.bin": b"x" * 3074}), tar_gz({})[:20], gzip.compress(b"no tar" * 200)],
    ids=["no test", "cut", "no tar"],
)
def test_an_archive_that_is_not_cifar_is_refused(
    server: Server, tmp_path: Path, content: bytes
) -> None:
    source = replace(SOURCES["cifar100"], files=(remote(server, "cifar.tar.gz", content),))
    with pytest.raises(ValueError, match="are not as published"):
        prepare("cifar100", tmp_path, sources={"cifar100": source})
    assert left(tmp_path) == []


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
@pytest.mark.parametrize(("name", "member"), [("cifar100", "train.bin"), ("notmnist", "A/0.png")])
def test_links_in_an_archive_are_not_followed(
    server: Server, tmp_path: Path, name: str, member: str, kind: bytes
) -> None:
    """They may lead nowhere, or in a circle."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for each, target in ((f"set/{member}", "nowhere"), (f"again/{member}", f"again/{member}")):
            link = tarfile.TarInfo(each)
            link.type, link.linkname = kind, target
            archive.addfile(link)
    source = replace(SOURCES[name], files=(remote(server, "a.tar.gz", out.getvalue()),))
    with pytest.raises(ValueError, match="are not as published: no "):
        prepare(name, tmp_path, sources={name: source})
    assert left(tmp_path) == []


def svhn(server: Server, pack: Callable[[dict[str, Any]], bytes]) -> tuple[Source, Any]:
    splits = {
        split: {
            "X": RANDOM.randint(0, 256, (32, 32, 3, count), np.uint8),
            "y": (np.arange(count)[:, None] % 10 + 1).astype(np.uint8),  # 10 stands for 0
        }
        for split, count in (("train", 20), ("test", 10))
    }
    files = [remote(server, f"{split}_32x32.mat", pack(splits[split])) for split in splits]
    return replace(SOURCES["svhn"], files=tuple(files), train=20, test=10), splits


def test_svhns_ten_becomes_zero(server: Server, tmp_path: Path) -> None:
    scipy_io = pytest.importorskip("scipy.io")

    def pack(content: dict[str, Any]) -> bytes:
        out = io.BytesIO()
        scipy_io.savemat(out, content, do_compression=True)
        return out.getvalue()

    source, splits = svhn(server, pack)
    prepare("svhn", tmp_path, sources={"svhn": source})
    loaded = load("svhn", tmp_path)
    np.testing.assert_array_equal(loaded.train_images[3], splits["train"]["X"][..., 3])
    np.testing.assert_array_equal(loaded.test_labels, [1, 2, 3, 4, 5, 6, 7, 8, 9, 0])


def test_svhn_that_is_no_matlab_file_is_refused(server: Server, tmp_path: Path) -> None:
    pytest.importorskip("scipy.io")
    source, _ = svhn(server, lambda _: b"no mat " * 99)
    with pytest.raises(ValueError, match="no MATLAB file"):
        prepare("svhn", tmp_path, sources={"svhn": source})


def test_a_missing_package_is_named_before_anything_is_fetched(
    server: Server, tmp_path: Path
) -> None:
    source = replace(mnist(server, digits()), needs="no_such_package")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'trgp\[data\]'"):
        prepare("mnist", tmp_path, sources={"mnist": source})
    assert server.asked == []


def test_notmnists_letters_are_read(server: Server, tmp_path: Path) -> None:
    letters = RANDOM.randint(0, 256, (10, 6, 28, 28), np.uint8)
    files = {
        f"notMNIST_small/{letter}/{i}.png": png(letters[k, i], [i % 5, (i + k) % 5])
        for k, letter in enumerate("ABCDEFGHIJ")
        for i in range(6)
    }
    files["notMNIST_small/A/empty.png"] = b""
    files["notMNIST_small/F/broken.png"] = files["notMNIST_small/F/0.png"][:60]
    files["notMNIST_small/F/._0.png"] = files["notMNIST_small/F/0.png"]
    file = remote(server, "notMNIST_small.tar.gz", tar_gz(files))
    source = replace(SOURCES["notmnist"], files=(file,), train=54, test=6)
    prepare("notmnist", tmp_path, sources={"notmnist": source})
    loaded = load("notmnist", tmp_path)
    order = np.random.RandomState(42).permutation(60)
    images = np.concatenate([loaded.train_images, loaded.test_images])[..., 0]
    np.testing.assert_array_equal(images, letters.reshape(60, 28, 28)[order])
    labels = np.concatenate([loaded.train_labels, loaded.test_labels])
    np.testing.assert_array_equal(labels, order // 6)


@pytest.mark.parametrize("kind", range(5))
def test_every_filter_of_png(kind: int) -> None:
    image = RANDOM.randint(0, 256, (9, 13), np.uint8)
    decoded = formats.grey_png(png(image, [kind]))
    assert decoded is not None
    np.testing.assert_array_equal(decoded, image)


def test_a_png_that_is_not_grey_or_is_cut_is_none() -> None:
    good = png(np.zeros((4, 4), np.uint8), [0])
    assert formats.grey_png(png(np.zeros((4, 4), np.uint8), [0], colour=2)) is None
    # Up to the last of the pixels; what comes after them carries nothing.
    assert all(formats.grey_png(good[:n]) is None for n in range(good.index(b"IDAT")))
    assert formats.grey_png(good.replace(b"IHDR", b"RDHI")) is None


def test_names_without_a_source_get_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`trgp data prepare miniimagenet --from PATH`"):
        prepare("miniimagenet", tmp_path)
    with pytest.raises(ValueError, match="did you mean 'cifar100'"):
        prepare("cifar_100", tmp_path)
    with pytest.raises(ValueError, match="known are mnist"):
        prepare("zzz", tmp_path)
    assert left(tmp_path) == []


def test_the_table_of_sources_is_sound() -> None:
    for source in SOURCES.values():
        for file in source.files:
            assert len(set(file.urls)) == len(file.urls) > 0
            assert file.urls[0].startswith("https://")
            assert all(url.endswith(f"/{file.file}") for url in file.urls)
            assert file.md5 is not None
            assert len(bytes.fromhex(file.md5)) == 16
            assert file.sha256 is None or len(bytes.fromhex(file.sha256)) == 32


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("unpacked")
    subprocess.run(
        [sys.executable, SHARED / "unpack.py", root, "--only", "mnist,notmnist"], check=True
    )
    return root


@needs_packs
def test_the_real_sets_load_and_have_the_published_statistics(unpacked: Path) -> None:
    """The constants are of MNIST at 28 x 28, of MNIST padded, of letters resized."""
    digits, letters = load("mnist", unpacked), load("notmnist", unpacked)
    for name, loaded in (("mnist", digits), ("notmnist", letters)):
        source = SOURCES[name]
        assert loaded.train_images.shape == (source.train, *source.shape)
        assert loaded.test_images.shape == (source.test, *source.shape)
    x = to_tensors(digits.train_images, digits.train_labels).x
    assert abs(x.float().mean() / 255 - 0.1307) < 1e-4
    assert abs(as_rgb32("mnist", x)[:, 0].float().mean() / 255 - 0.1) < 1e-3
    wide = as_rgb32("notmnist", to_tensors(letters.train_images, letters.train_labels).x)[:, 0]
    assert abs(wide.float().mean() / 255 - 0.4254) < 0.01
    assert abs((wide.float() / 255).std() - 0.4501) < 0.01


@needs_packs
def test_the_real_idx_files_are_read(server: Server, unpacked: Path, tmp_path: Path) -> None:
    """The published files, packed anew: the test split for both, to be quick."""
    read = {
        key: lzma.decompress((SHARED / "packs" / f"mnist_{name}.xz").read_bytes())
        for key, name in (
            ("images", "t10k-images-idx3-ubyte"),
            ("labels", "t10k-labels-idx1-ubyte"),
        )
    }
    pack = partial(gzip.compress, compresslevel=1)
    files = tuple(
        remote(server, file, pack(read[key.partition("_")[2]])) for key, file in formats.IDX.items()
    )
    source = replace(SOURCES["mnist"], files=files, train=10_000)
    prepare("mnist", tmp_path, sources={"mnist": source})
    expected = load("mnist", unpacked)
    loaded = load("mnist", tmp_path)
    np.testing.assert_array_equal(loaded.test_images, expected.test_images)
    np.testing.assert_array_equal(loaded.train_labels, expected.test_labels)
