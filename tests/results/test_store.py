"""Results on disk: they come back as written, and what cannot be used gets a sentence."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from some_results import a_result

from trgp.engine.config import defaults
from trgp.results import metrics
from trgp.results.result import Result, Results
from trgp.results.several import find_in
from trgp.results.store import Found, find, locked, read, read_result, run_folder, write_result

names = st.text(max_size=12) | st.sampled_from(["lr", "fc1", "[bold]", "\x1b[31m", "ä"])
numbers = st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
configs = st.dictionaries(names, values, max_size=4)
counts = st.integers(0, 2**40)


@st.composite
def results(draw: st.DrawFn) -> Result:
    """Any result that a run can have."""
    T = draw(st.integers(1, 5))
    full = draw(st.booleans())
    R: list[list[float | None]] = [
        [draw(st.floats(0, 1)) if full or j <= i else None for j in range(T)] for i in range(T)
    ]
    small = st.floats(0, 1e9)
    per_task = st.lists(st.dictionaries(names, small, max_size=3), min_size=T, max_size=T)
    return Result(
        schema_version=1,
        command=draw(names),
        benchmark=draw(names),
        method=draw(names),
        preset=draw(names),
        seed=draw(st.integers(0, 2**32 - 1)),
        config=draw(configs),
        versions=draw(st.dictionaries(names, names, max_size=2)),
        device=draw(names),
        accuracy_matrix=R,
        acc=min(1.0, metrics.acc(R)),
        bwt=metrics.bwt(R),
        curves=draw(st.lists(st.dictionaries(names, st.lists(small, max_size=3)), max_size=2)),
        selected=[draw(st.dictionaries(names, st.lists(counts, max_size=2), max_size=2))] * T,
        ranks=draw(st.dictionaries(names, st.lists(counts, max_size=T), max_size=2)),
        seconds=draw(per_task),
        peak_memory_bytes=draw(counts),
        state_bytes=draw(counts),
        network_bytes=1 + draw(counts),
        form=draw(st.none() | names),
        changed=draw(configs),
        untrained=draw(st.lists(st.floats(0, 1), min_size=T, max_size=T)) if full else None,
        digest=draw(names),
    )


def stored(out: Path, result: Result) -> Path:
    """The result's run folder, with the result in it."""
    folder = run_folder(
        out, result.benchmark, result.method, result.preset, result.changed, result.seed
    )
    folder.mkdir(parents=True)
    write_result(folder, result)
    return folder


def sentence(error: object, *said: object) -> None:
    text = str(error)
    assert text.endswith(".")
    assert ";" in text  # the fix comes after it
    assert "\n" not in text
    for part in said:
        assert str(part) in text


# ---- round trip -----------------------------------------------------------------------------


@settings(max_examples=150)
@given(result=results())
def test_what_was_written_is_read(result: Result) -> None:
    with tempfile.TemporaryDirectory() as folder:
        written = write_result(folder, result)
        again = read_result(Path(folder, "result.json"))
        assert again == written == result
        assert os.listdir(folder) == ["result.json"]
        fields = [field.name for field in dataclasses.fields(Result)]
        assert list(json.loads(Path(folder, "result.json").read_text())) == fields


def test_tuples_and_other_mappings_are_given_back_as_they_are_read(tmp_path: Path) -> None:
    result = a_result(config=MappingProxyType({"threshold": (0.95, (1, 2)), 3: None}))
    written = write_result(tmp_path, result)
    assert written.config == {"threshold": [0.95, [1, 2]], "3": None}
    assert read_result(tmp_path / "result.json") == written


@pytest.mark.parametrize("fails", ["os.fsync", "os.replace"])
def test_a_full_disk_leaves_the_old_result(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    old = write_result(tmp_path, a_result())
    monkeypatch.setattr(fails, full)
    with pytest.raises(OSError, match="No space"):
        write_result(tmp_path, a_result(seed=1))
    assert os.listdir(tmp_path) == ["result.json"]
    assert read_result(tmp_path / "result.json") == old


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {"lr": float("nan")}},
        {"curves": [{"loss": [float("inf")]}]},
        {"config": {"model": object()}},
        {"accuracy_matrix": [[0.5, None]]},
        {"state_bytes": 2.5},
    ],
)
def test_what_could_not_be_read_is_not_written(changes: dict[str, Any], tmp_path: Path) -> None:
    result = dataclasses.replace(a_result(), **changes)
    with pytest.raises(ValueError, match=r"result\.json") as caught:
        write_result(tmp_path, result)
    sentence(caught.value)
    assert os.listdir(tmp_path) == []


# ---- what is no result ----------------------------------------------------------------------

FIELDS = [f.name for f in dataclasses.fields(Result) if f.name != "checksum"]
GOOD = json.dumps({name: getattr(a_result(), name) for name in FIELDS})  # as of trgp 0.1


def refusal(content: bytes | str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result.json")
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        with pytest.raises(ValueError, match=r"result\.json") as caught:
            read_result(path)
        assert type(caught.value) is ValueError
        sentence(caught.value, path)
        return str(caught.value)


def changed(**changes: Any) -> str:
    return json.dumps(json.loads(GOOD) | changes)


def test_the_example_is_good(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(GOOD)
    assert read_result(tmp_path / "result.json") == a_result()


@settings(max_examples=100)
@given(st.integers(0, len(GOOD) - 1))
def test_a_result_cut_short_gets_a_sentence(length: int) -> None:
    assert "is not JSON or was cut short" in refusal(GOOD[:length])


@given(st.binary(max_size=60))
def test_other_bytes_get_a_sentence(content: bytes) -> None:
    refusal(content)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.binary(min_size=1)), min_size=1))
def test_any_bytes_in_any_place_are_read_or_get_a_sentence(
    changes: list[tuple[int, bytes]],
) -> None:
    content = bytearray(GOOD.encode())
    for at, new in changes:
        content[at : at + len(new)] = new
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result.json")
        path.write_bytes(content)
        try:
            read_result(path)
        except ValueError as error:
            sentence(error, path)


fields = st.sampled_from(sorted(json.loads(GOOD)))
anything = values | st.lists(st.lists(values, max_size=2), max_size=2)


@settings(max_examples=200)
@given(st.dictionaries(fields, anything, min_size=1, max_size=2))
def test_any_values_are_read_or_get_a_sentence(changes: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result.json")
        path.write_text(changed(**changes))
        try:
            result = read_result(path)
        except ValueError as error:
            sentence(error, path)
        else:
            _ = result.mean_diagonal, result.forgetting, result.fwt  # all are defined, or None


@pytest.mark.parametrize("name", sorted(json.loads(GOOD)))
def test_a_missing_field_is_named(name: str) -> None:
    content = json.loads(GOOD)
    del content[name]
    assert name in refusal(json.dumps(content))


@pytest.mark.parametrize("version", [0, 2, 1.0, True, "1", None])
def test_other_schemas_are_refused(version: Any) -> None:
    text = refusal(changed(schema_version=version))
    assert f"schema_version {version!r}, this package reads 1" in text
    assert "repeat the run, or update the package" in text


SQUARE = [[0.5, None], [0.5, 0.5]]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seed": -1}, "-1 as its seed"),
        ({"seed": True}, "True as its seed"),
        ({"benchmark": 3}, "3 as its benchmark, which must be a text"),
        ({"config": [1]}, "settings by name"),
        ({"versions": {"torch": 2}}, "texts by name"),
        ({"acc": 97.0}, r"97.0 as its acc, which must be a fraction in [0, 1]"),
        ({"acc": None}, "None as its acc"),
        ({"bwt": -2}, "-2 as its bwt"),
        ({"accuracy_matrix": []}, "empty"),
        ({"accuracy_matrix": [[0.5, 0.5]]}, "square, tasks by tasks, not 1x2"),
        ({"accuracy_matrix": [[0.5], [0.5, 0.5]]}, "same length"),
        ({"accuracy_matrix": [[1.5]]}, "R[0, 0] is 1.5"),
        ({"accuracy_matrix": [["0.5"]]}, "rows of numbers or null"),
        ({"accuracy_matrix": [[10**400]]}, "rows of numbers or null"),
        ({"accuracy_matrix": [[None, None], [0.5, 0.5]]}, "R[0, 0] is missing"),
        ({"accuracy_matrix": SQUARE, "untrained": [0.1, 0.1]}, "R[0, 1] is missing"),
        ({"accuracy_matrix": [[0.5, 0.5], [0.5, 0.5]], "untrained": [0.1]}, "1 accuracies for 2"),
        ({"untrained": [2]}, "fractions in [0, 1] or null"),
        ({"network_bytes": 0}, "0 as its network_bytes"),
        ({"curves": [{"loss": ["x"]}]}, "numbers by task and name"),
        ({"selected": [{"fc1": [0.5]}]}, "lists of tasks by task and layer"),
        ({"ranks": {"fc1": 3}}, "lists of whole numbers by layer"),
        ({"seconds": {"training": 1}}, "numbers by task and phase"),
        ({"form": 1}, "a text or null"),
        ({"config": {"a": json.loads("[" * 500 + "]" * 500)}}, "settings by name"),
        ({"digets": ""}, "the unknown field 'digets'"),
        ({"acc": 0.999}, "contradicts itself: its acc is 0.999, but its accuracy matrix gives 0."),
        ({"bwt": 0.5}, "contradicts itself: its bwt is 0.5, but its"),
        ({"bwt": None}, "contradicts itself: its bwt is None, but its"),
    ],
)
def test_wrong_fields_are_named(changes: dict[str, Any], says: str) -> None:
    assert says in refusal(changed(**changes))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[]", "holds no fields of a result"),
        ("null", "holds no fields of a result"),
        (GOOD.replace("0.875", "NaN"), "NaN is no number"),
        (GOOD.replace("0.875", "1e999"), "lists of numbers by task and name"),
        ("[" * 100_000, "is not JSON"),
        ("\ud800".encode(errors="surrogatepass"), "is not JSON"),
        ("1" * 5000, "is not JSON"),
    ],
    ids=["list", "null", "NaN", "infinite", "deep", "surrogate", "long"],
)
def test_other_json_gets_a_sentence(content: bytes | str, says: str) -> None:
    assert says in refusal(content)


def test_what_is_not_there_or_no_file_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="There is no file") as caught:
        read_result(tmp_path / "result.json")
    sentence(caught.value, tmp_path)
    for path in (tmp_path, "a\0b"):
        with pytest.raises(ValueError, match="cannot be read") as wrong:
            read_result(path)
        sentence(wrong.value)


# ---- the checksum ---------------------------------------------------------------------------


def test_a_result_carries_a_checksum_however_it_is_laid_out(tmp_path: Path) -> None:
    written = write_result(tmp_path, a_result())
    path = tmp_path / "result.json"
    content = json.loads(path.read_text())
    assert written.checksum == content["checksum"] == read_result(path).checksum
    path.write_text(json.dumps(content, sort_keys=True))
    assert read_result(path).checksum == written.checksum
    assert write_result(tmp_path, written) == written  # also of one that was read
    path.write_text(GOOD)
    assert read_result(path).checksum is None


@pytest.mark.parametrize(
    "changes",
    [
        {"digest": "0123abce"},
        {"config": {"lr": 0.1}},
        {"curves": []},
        {"seconds": [{}] * 4},
        {"checksum": "0" * 64},
        {"checksum": ""},
        {"checksum": 3},
    ],
)
def test_what_was_changed_by_hand_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    write_result(tmp_path, a_result())
    content = json.loads((tmp_path / "result.json").read_text())
    assert "its checksum does not match" in refusal(json.dumps(content | changes))


def test_every_flipped_bit_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    small = a_result(
        T=2,
        curves=[{"loss": [0.5, 1e-7]}],
        selected=[{"fc1": []}, {"fc1": [0]}],
        ranks={"fc1": [3]},
    )
    expected = write_result(tmp_path, small)
    path = tmp_path / "result.json"
    good = path.read_bytes()
    refusals = []
    for place in range(8 * len(good)):
        flipped = bytearray(good)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        try:
            assert read_result(path) == expected
        except ValueError as error:
            refusals.append(str(error))
    assert len(refusals) > 7 * len(good)
    assert all(said.startswith(str(path)) for said in refusals)


# ---- folders --------------------------------------------------------------------------------

texts = st.text(st.characters(), max_size=80) | st.sampled_from(
    [
        "pmnist",
        "PMNIST",
        "my.npz",
        "./my.npz",
        "a/b",
        "a-b",
        "a:b",
        ".",
        "..",
        "",
        "a.",
        "paper-12345678",
    ]
)
identities = st.tuples(texts, texts, texts, configs, st.integers(0, 99))


@settings(max_examples=400)
@given(one=identities, other=identities)
def test_different_runs_have_different_folders(one: Any, other: Any) -> None:
    a, b = (run_folder("out", *identity) for identity in (one, other))
    assert run_folder("out", *one) == a
    assert (a == b) == (json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True))
    # Some file systems do not tell capitals from small letters.
    assert (str(a).lower() == str(b).lower()) == (a == b)


@settings(max_examples=200)
@given(identity=identities)
def test_a_folder_is_safe_and_at_its_depth(identity: Any) -> None:
    folder = run_folder("out", *identity)
    parts = folder.parts
    assert len(parts) == 5
    for part in parts:
        assert part.isascii()
        assert part.isprintable()
        assert not set(part) & set('/\\:*?"<>| ')
        assert not part.startswith((".", "-"))
        assert not part.endswith(".")
        assert len(part) < 100


def test_plain_names_stay_as_they_are() -> None:
    assert run_folder("out", "split-cifar100", "trgp", "paper", {}, 3) == Path(
        "out/split-cifar100/trgp/paper/seed-3"
    )
    parts = run_folder("out", "data/my.npz", "my_module:MyMethod", "paper", {"lr": 0.1}, 0).parts
    assert parts[1].startswith("data-my.npz-")
    assert parts[2].startswith("my_module-MyMethod-")
    assert parts[3].startswith("paper-")


def test_the_order_of_changes_does_not_matter() -> None:
    folders = {
        run_folder("out", "b", "m", "paper", changes, 0)
        for changes in ({"lr": 0.1, "t": (1, 2)}, {"t": [1, 2], "lr": 0.1})
    }
    assert len(folders) == 1


@pytest.mark.parametrize(
    ("place", "good"),
    [
        ("split-cifar100/trgp/paper/seed-3", True),
        ("split-cifar100/trgp/paper-old/seed-3", True),
        ("kept/of/march/seed-3", True),  # somebody's own folders
        ("anywhere", True),
        ("split-cifar100/trgp/paper/seed-7", False),
        ("split-cifar100/trgp/paper/seed-03", False),
        ("split-cifar100/gpm/paper/seed-3", False),
        ("pmnist/trgp/paper/seed-3", False),
        ("kept/of/march/seed-7", False),
    ],
)
def test_a_result_is_of_the_folder_that_it_lies_in(
    place: str, good: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / place).mkdir(parents=True)
    write_result(tmp_path / place, a_result(3))
    monkeypatch.chdir(tmp_path / place)
    for path in (tmp_path / place / "result.json", "result.json"):
        if good:
            assert read_result(path) == a_result(3)
        else:
            with pytest.raises(ValueError, match=r"of trgp on split-cifar100, seed 3; ") as caught:
                read_result(path)
            sentence(caught.value, path, "contradicts its folder")


# ---- reading several ------------------------------------------------------------------------


def test_a_configuration_a_seed_and_a_file_are_read(tmp_path: Path) -> None:
    seeds = [10, 9, 0, 100]
    folders = [stored(tmp_path, a_result(seed)) for seed in seeds]
    configuration = folders[0].parent
    (configuration / "seed-7").mkdir()  # not finished
    (configuration / "notes").mkdir()
    (configuration / "notes" / "result.json").write_text("{}")
    assert read(configuration, defaults) == Results(tuple(a_result(seed) for seed in sorted(seeds)))
    assert (
        read(folders[0], defaults)
        == read(folders[0] / "result.json", defaults)
        == Results((a_result(10),))
    )


def test_nothing_to_read_gets_a_sentence(tmp_path: Path) -> None:
    stored(tmp_path / "out", a_result())
    (tmp_path / "seed-1").mkdir()
    for path in (tmp_path, tmp_path / "missing", tmp_path / "out", tmp_path / "seed-1"):
        with pytest.raises(FileNotFoundError, match="There is no finished run in") as caught:
            read(path, defaults)
        sentence(caught.value, path)


def test_a_broken_seed_is_not_left_out_silently(tmp_path: Path) -> None:
    configuration = stored(tmp_path, a_result(0)).parent
    (stored(tmp_path, a_result(1)) / "result.json").write_text("{")
    with pytest.raises(ValueError, match=r"seed-1.result\.json is not JSON"):
        read(configuration, defaults)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (a_result(0), "contradicts its folder"),
        (a_result(5, method="gpm"), "contradicts its folder"),
        (a_result(5, T=3), "is of another configuration than"),
        (a_result(5, changed={"lr": 0.1}), "is of another configuration than"),
        (
            a_result(5, accuracy_matrix=[*[[None] * 4] * 3, [0.5] * 4], bwt=None),
            "is of another configuration than",
        ),
    ],
    ids=["seed", "method", "tasks", "changed", "bwt"],
)
def test_runs_that_have_no_mean_are_kept_apart(other: Result, says: str, tmp_path: Path) -> None:
    folder = stored(tmp_path, a_result(0))
    (folder.parent / "seed-5").mkdir()
    write_result(folder.parent / "seed-5", other)
    with pytest.raises(ValueError, match=says) as caught:
        read(folder.parent, defaults)
    sentence(caught.value, folder.parent / "seed-5")
    found = find(tmp_path, defaults)
    assert found.results == [Results((a_result(0),))]
    assert found.problems == [str(caught.value)]


@pytest.mark.parametrize("older", [0, 1])
def test_a_result_that_is_too_old_to_name_a_setting_is_not_kept_apart(
    older: int, tmp_path: Path
) -> None:
    """It is at its default then, which another value is not, whoever names it."""
    named = {**a_result().config, "lr_decay": 1.0}
    runs = [a_result(seed) if seed == older else a_result(seed, config=named) for seed in (0, 1)]
    for run in runs:
        stored(tmp_path, run)
    assert find(tmp_path, defaults) == Found([Results(tuple(runs))], [])
    for seed, other in enumerate(({"lr": 0.5}, {"lr_decay": 0.5}, {"of another version": 1}), 2):
        stored(tmp_path, a_result(seed, config={**named, **other}))
    found = find(tmp_path, defaults)
    assert [len(results) for results in found.results] == [2]
    assert len(found.problems) == 3
    apart = [tmp_path / "one", tmp_path / "other"]
    for out, run in zip(apart, runs, strict=True):
        stored(out, run)
    assert [len(results) for results in find_in([*map(str, apart)], defaults).results] == [2]


def test_results_of_a_method_that_is_not_at_hand_are_found(tmp_path: Path) -> None:
    """Its defaults are not asked for: whoever looks at results need not have its module."""
    own = [a_result(seed, method="nowhere.to_be:Found") for seed in (0, 1)]
    for run in own:
        stored(tmp_path, run)
    assert find(tmp_path, defaults) == Found([Results(tuple(own))], [])
    stored(tmp_path, a_result(2, method="nowhere.to_be:Found", config={"lr": 0.01}))
    assert [len(results) for results in find(tmp_path, defaults).results] == [2]


def test_thousands_are_found_and_broken_ones_are_told(tmp_path: Path) -> None:
    """3000 runs of ten tasks: 15 methods, 20 configurations each, ten seeds."""
    broken = set()
    for m in range(15):
        method = f"m{m:02}"
        for c in range(20):
            changes = {"epochs": c} if c else {}
            result = a_result(T=10, method=method, changed=changes)
            content = {name: getattr(result, name) for name in FIELDS}
            for seed in range(10):
                folder = run_folder(tmp_path, "split-cifar100", method, "paper", changes, seed)
                folder.mkdir(parents=True)
                text = json.dumps(content | {"seed": seed})
                if (m, c, seed) in {(0, 0, 3), (4, 7, 9)}:
                    text = text[:1000]
                    broken.add(folder / "result.json")
                (folder / "result.json").write_text(text)
    (folder.parent / "seed-99").mkdir()  # not finished
    (tmp_path / "notes.txt").write_text("none of it")
    found = find(tmp_path, defaults)
    assert len(found.results) == 300
    assert sum(map(len, found.results)) == 2998
    assert [len(found.results[0]), len(found.results[1])] == [9, 10]
    methods = [results[0].method for results in found.results]
    assert methods == sorted(methods)
    for problem, path in zip(found.problems, sorted(broken), strict=True):
        sentence(problem, path)


def test_configurations_are_sorted_by_benchmark_method_and_preset(tmp_path: Path) -> None:
    keys = [("b", "m", "p"), ("a", "Z", "p"), ("a", "m", "q"), ("a", "m", "p")]
    for benchmark, method, preset in keys:
        stored(tmp_path, a_result(benchmark=benchmark, method=method, preset=preset))
    found = find(tmp_path, defaults)
    got = [(r.benchmark, r.method, r.preset) for results in found.results for r in results]
    assert got == sorted(keys)
    assert found.problems == []


def test_a_missing_folder_is_a_problem(tmp_path: Path) -> None:
    found = find(tmp_path / "missing", defaults)
    assert found.results == []
    sentence(found.problems[0], tmp_path / "missing", "--out")


def test_a_folder_in_a_files_place_is_a_problem(tmp_path: Path) -> None:
    folder = stored(tmp_path, a_result())
    (folder.parent / "seed-1" / "result.json").mkdir(parents=True)
    found = find(tmp_path, defaults)
    assert found.results == [Results((a_result(),))]
    sentence(found.problems[0], "seed-1")


@pytest.mark.parametrize("kind", ["pipe", "device", "large"])
def test_only_files_of_a_results_size_are_read(kind: str, tmp_path: Path) -> None:
    """In a process of its own, which can be ended where it waits for ever."""
    folder = stored(tmp_path, a_result(0)).parent / "seed-1"
    folder.mkdir()
    path = folder / "result.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with open(path, "wb") as file:
            file.truncate(2**40)
    code = "import sys; from trgp.cli import main; sys.exit(main(['table', sys.argv[1]]))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "split-cifar100" in done.stdout
    (said,) = done.stderr.splitlines()
    sentence(said, path, "more than 64 MiB" if kind == "large" else "a folder, a pipe or a device")


# ---- the lock -------------------------------------------------------------------------------

HOLD = """
import sys, time
from trgp.results.store import locked
with locked(sys.argv[1]):
    print("locked", flush=True)
    time.sleep(600)
"""


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "out" / "seed-0"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "locked\n"
            with pytest.raises(BlockingIOError, match="Another process is working") as caught:
                locked(folder).__enter__()
            sentence(caught.value, folder, "--out")
            with locked(tmp_path / "out" / "seed-1"):
                pass
        finally:
            holder.send_signal(signal.SIGKILL)
    with locked(folder):
        pass


def test_a_lock_ends_with_its_block(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    with locked(folder), pytest.raises(BlockingIOError):
        locked(folder).__enter__()
    with pytest.raises(KeyboardInterrupt), locked(folder):
        raise KeyboardInterrupt
    with locked(folder):
        write_result(folder, a_result())
    assert read(folder, defaults)[0] == a_result()


def test_without_locks_nothing_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", missing)
    with locked(tmp_path), locked(tmp_path):
        pass
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with locked(tmp_path), locked(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", tmp_path / "file" / "seed-0"):
        with pytest.raises(OSError, match="cannot be written to") as caught:
            locked(folder).__enter__()
        sentence(caught.value, folder, "--out")
