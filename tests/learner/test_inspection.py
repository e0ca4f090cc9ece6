"""What `inspect` tells is what a learner then does, and nothing in the model changes."""

import copy
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ConvNet, Cross, ResNet, Tied, Vit, classification, cross_entropy, mlp
from support import inside
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import trgp
from trgp import GPM, inspect

IMAGES = (16, 4, 4)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(6, 8, 8, 4), (6,)),
    "tied": (Tied, (6,)),
    "conv": (ConvNet, IMAGES),
    "vit": (Vit, IMAGES),
    "resnet": (ResNet, IMAGES),
    "cross": (Cross, IMAGES),
}
each_model = pytest.mark.parametrize(("make", "shape"), MODELS.values(), ids=MODELS)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"exclude": ["head", "2"], "norm": "shared"},
    {"per_task": ["head", "*bias"], "norm": "per_task"},
]
each_option = pytest.mark.parametrize("options", OPTIONS, ids=["", "shared", "per task"])


class Classifier(nn.Module):
    """An embedding, a recurrent layer of a kind that is refused, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.rnn = nn.LSTM(8, 16, batch_first=True, proj_size=4)
        self.head = nn.Linear(4, 4)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def batches(shape: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    return [classification(i, *shape, samples=24) for i in range(3)]


def verdicts(model: nn.Module, **options: Any) -> dict[str, str]:
    return {row.name: row.verdict for row in inspect(model, **options).rows}


# ---- what is told is what happens ---------------------------------------------------------------


def test_every_verdict_at_once() -> None:
    model = Vit(depth=1)
    model.patches.bias.requires_grad_(False)
    model.recurrent = nn.LSTM(4, 4, proj_size=2)
    found = verdicts(model, exclude=["head"], per_task=["blocks.*.linear2"])
    assert found == {
        "token": "frozen",
        "position": "frozen",
        "patches": "protected",
        "patches.bias": "left alone",
        "blocks.0.self_attn.in_proj_weight": "protected",
        "blocks.0.self_attn.out_proj": "protected",
        "blocks.0.linear1": "protected",
        "blocks.0.linear2": "copied",
        "blocks.0.norm1": "frozen",
        "blocks.0.norm2": "frozen",
        "norm": "frozen",
        "head": "left alone",
        "recurrent": "refused",
    }


@each_option
@each_model
def test_every_parameter_meets_the_fate_that_was_told(
    make: Callable[[], nn.Module], shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    model = make()
    told = inspect(model, **options)
    learner = GPM(model, **options)
    learner.begin_task(0, batches(shape), cross_entropy)
    learner.end_task(batches(shape))
    rows = {row.name: row for row in told.rows}
    protected = {n: row.directions for n, row in rows.items() if row.verdict == "protected"}
    assert protected == {name: whole for name, (_, whole) in learner.ranks.items()}
    names = {p: name for name, p in model.named_parameters()}
    layers = [layer.params for layer in inside.layers(learner).values()]
    now = {
        "protected": {names[p] for params in layers for p in params},
        "frozen": inside.frozen(learner),
        "copied": inside.copies(learner, 0) & set(names.values()),
    }
    for verdict, found in now.items():
        size = sum(model.get_parameter(name).numel() for name in found)
        assert sum(row.parameters for row in told.rows if row.verdict == verdict) == size
        assert told.shares[verdict] == pytest.approx(size / len(_flat(model)))  # type: ignore[index]
    assert told.parameters == len(_flat(model)) == sum(row.parameters for row in told.rows)
    assert sum(row.share for row in told.rows) == pytest.approx(1)
    assert told.task_bytes == learner.task_bytes[0]


@each_model
def test_ranks_and_bytes_are_those_of_a_first_task(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    model = make()
    told = inspect(model, batches(shape), cross_entropy)
    rows = [row for row in told.rows if row.verdict == "protected"]
    assert set(rows[0].ranks) == {0.9, 0.95, 0.99, 1.0}
    for threshold in rows[0].ranks:
        learner = GPM(copy.deepcopy(model), threshold=threshold)
        learner.begin_task(0, batches(shape), cross_entropy)
        learner.end_task(batches(shape))
        used = {name: rank for name, (rank, _) in learner.ranks.items()}
        assert {row.name: row.ranks[threshold] for row in rows} == used
        assert sum(row.bytes_at[threshold] for row in rows) == learner.memory_bytes


@pytest.mark.parametrize("limit", [0.1, None])
def test_bytes_at_a_tenth_and_at_full_rank(limit: float | None) -> None:
    model = mlp(20, 30, 4)
    batch = classification(0, 20, samples=200)
    told = inspect(model)
    learner = GPM(model, threshold=1.0, max_rank=limit)
    learner.begin_task(0, [batch], cross_entropy)
    learner.end_task([batch])
    told_bytes = sum(row.bytes_tenth if limit else row.bytes_full for row in told.rows)
    assert told_bytes == learner.memory_bytes
    assert told.end_task_bytes == 8 * (21**2 + 31**2)


def test_half_precision_is_remembered_in_single() -> None:
    half, single = inspect(mlp(4, 4).bfloat16()), inspect(mlp(4, 4))
    assert [row.bytes_full for row in half.rows] == [row.bytes_full for row in single.rows]
    assert 2 * half.nbytes == single.nbytes


def test_a_wrapped_model_has_the_names_of_the_one_inside() -> None:
    assert verdicts(nn.DataParallel(mlp(3, 3))) == {"0": "protected"}


# ---- what would be refused ----------------------------------------------------------------------


def recurrent() -> nn.Module:
    return nn.ModuleDict({"body": mlp(4, 4), "rnn": nn.LSTM(4, 4, proj_size=2)})


def normed() -> nn.Module:
    return nn.ModuleDict({"body": mlp(4, 4), "odd": parametrizations.weight_norm(nn.Linear(4, 4))})


def subclassed() -> nn.Module:
    return nn.ModuleDict({"body": mlp(4, 4), "odd": Doubled(4, 4)})


def complex_weights() -> nn.Module:
    return nn.ModuleDict({"odd": nn.Linear(4, 4, dtype=torch.complex64), "body": mlp(4, 4)})


def lazy() -> nn.Module:
    return nn.ModuleDict({"body": mlp(4, 4), "odd": nn.LazyLinear(4)})


def lazy_buffers() -> nn.Module:
    return nn.ModuleDict({"body": mlp(4, 4), "odd": nn.LazyBatchNorm1d(affine=False)})


def other_groups() -> nn.Module:
    one, two = nn.Conv1d(4, 4, 1, groups=2), nn.Conv1d(2, 4, 1, groups=1)
    two.weight = one.weight
    return nn.ModuleDict({"body": mlp(4, 4), "one": one, "two": two})


REFUSED = [recurrent, normed, subclassed, complex_weights, lazy, lazy_buffers, other_groups]


@pytest.mark.parametrize("make", REFUSED)
def test_a_refusal_is_the_sentence_of_the_learner(make: Callable[[], nn.Module]) -> None:
    (row,) = inspect(make()).refused
    with pytest.raises((TypeError, ValueError)) as error:
        GPM(make())
    assert f"{row.why}; {row.fix}." == str(error.value)
    assert row.why in str(inspect(make()))
    assert verdicts(make())["body.0"] == "protected"


def test_a_parameter_that_is_named_in_part() -> None:
    model = mlp(4, 4, 4)
    model[2].weight = model[0].weight
    (row,) = inspect(model, exclude=["2"]).refused
    assert (row.name, row.fix) == ("0.weight", "name all of them or none")


def test_all_refusals_are_listed_and_excluding_them_settles_it() -> None:
    model = nn.ModuleDict({make.__name__: make() for make in REFUSED})
    names = [row.name for row in inspect(model).refused]
    assert len(names) == len(REFUSED)
    left = [row.name for row in inspect(model, exclude=[*names, "other_groups.two"]).refused]
    assert left == ["lazy.odd", "lazy_buffers.odd"]  # these want a batch


def test_a_classifier_with_nothing_to_protect() -> None:
    told = inspect(Classifier(), exclude=["head", "heads.*"])
    assert [row.name for row in told.refused] == ["rnn"]
    text = str(told)
    for part in (
        "Layer 'rnn' is a LSTM",
        "a parameter of Embedding, no kind that can be protected",
        "Nothing to protect",
        "A learner would refuse the model for 'rnn'.",
        "matches 'heads.*' (yet)",
    ):
        assert part in text


def test_a_model_that_is_a_refused_layer() -> None:
    assert "(the model)" in str(inspect(nn.LSTM(3, 3, proj_size=2)))


# ---- the text -----------------------------------------------------------------------------------


def test_the_table() -> None:
    batch = classification(0, 4, samples=50, classes=2)
    lines = str(inspect(mlp(4, 2), [batch], cross_entropy)).splitlines()
    heads = "part kind becomes share 10 % full directions at 0.9 at 0.95 at 0.99 at 1 note"
    assert " ".join(lines[0].split()) == heads
    assert lines[1].split()[:5] == ["0", "Linear", "protected", "100.0%", "29"]
    assert lines[3] == "Sequential: 10 parameters, 40 B; 100.0% protected"
    assert lines[4] == "memory: 29 B at 10 % of all directions, 145 B at full rank"
    assert lines[8] == "memory of these samples at threshold 1: 145 B, rank 100.0%"
    assert lines[9] == "end_task: 200 B for a while"


def test_equal_notes_are_told_once() -> None:
    text = str(inspect(ResNet()))
    assert text.count("a norm layer: trained with the first task") == 1


def test_a_part_left_alone_is_one_row() -> None:
    model = nn.ModuleDict({"backbone": mlp(4, 4, 4).requires_grad_(False), "head": mlp(4, 2)})
    assert verdicts(model) == {"backbone": "left alone", "head.0": "protected"}


def test_the_page_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """To the letter, but for ranks: how many directions are no rounding may differ elsewhere."""
    page = (Path(__file__).parents[2] / "docs" / "inspect.md").read_text()
    pairs = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, flags=re.DOTALL)
    assert len(pairs) == page.count("```python")
    names: dict[str, Any] = {}
    for block, text in pairs:
        exec(compile(block, "docs/inspect.md", "exec"), names)
        shown = capsys.readouterr().out
        if "loss_fn" in block:
            shown, text = (re.sub(r"[\d.]+( .?i?B)?| +", " ", each) for each in (shown, text))
        assert shown == text


# ---- nothing changes ----------------------------------------------------------------------------


@each_model
def test_nothing_in_the_model_changes(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    model = make()
    next(model.modules()).train()
    (x, y) = classification(0, *shape, samples=16)
    data = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    before, state = copy.deepcopy(model), torch.get_rng_state()
    inspect(model, loader, cross_entropy, norm="per_task")
    assert torch.equal(torch.get_rng_state(), state)
    for key, value in before.state_dict().items():
        assert torch.equal(model.state_dict()[key], value)
    for ours, theirs in zip(model.modules(), before.modules(), strict=True):
        assert ours.training == theirs.training
        assert not ours._forward_hooks
        assert not ours._forward_pre_hooks
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_it_is_loaded_when_it_is_asked_for() -> None:
    program = """
import sys, trgp
assert "trgp.learner.inspection" not in sys.modules
assert trgp.inspect is sys.modules["trgp.learner.inspection"].inspect
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert not done.returncode, done.stderr


# ---- misuse -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("model",), {}, "must be a torch.nn.Module, not str"),
        ((mlp(3, 3), [torch.ones(1, 3)]), {}, "a loader and a loss_fn to tell ranks"),
        ((mlp(3, 3),), {"exclude": "head"}, "exclude must be a list of patterns"),
        ((mlp(3, 3),), {"norm": "frozen"}, "norm must be 'freeze'"),
    ],
)
def test_odd_arguments(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        trgp.inspect(*arguments, **options)


def test_a_loss_that_begin_task_would_refuse() -> None:
    model, other = mlp(3, 3), mlp(3, 3)
    with pytest.raises(ValueError, match="called no protected layer of the model"):
        inspect(model, [torch.ones(2, 3)], lambda _, batch: other(batch).sum())


def _flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters())
