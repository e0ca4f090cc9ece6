"""What is said before and while something goes wrong: warnings, refusals, and the progress bar."""

import contextlib
import io
import logging
import re
import threading
from collections.abc import Callable

import pytest
import torch
from helpers import classification, cross_entropy, learn, mlp, train
from torch import Tensor, nn

from trgp import GPM, TRGP
from trgp.learner import progress

both = pytest.mark.parametrize("cls", [GPM, TRGP])


def a_batch(task: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return classification(task, 12, rank=2, samples=40, dtype=dtype)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, logger="trgp")
    return caplog


# ---- a full layer -------------------------------------------------------------------------------


@both
def test_a_full_layer_is_told_once_with_the_fix(
    cls: type[GPM], told: pytest.LogCaptureFixture
) -> None:
    learner = cls(mlp(12, 6, 4), threshold={"0": 0.9, "*": 1.0})
    learn(learner, "a", [a_batch(0)], steps=2)
    (message,) = told.messages
    assert message.startswith("The memory of '2' is full after task 'a'")
    assert "lower threshold or with max_rank" in message
    told.clear()
    learn(learner, "b", [a_batch(1)], steps=2)
    assert not told.messages


def test_a_limit_keeps_a_layer_from_filling(told: pytest.LogCaptureFixture) -> None:
    learner = GPM(mlp(12, 6, 4), threshold={"0": 0.9, "*": 1.0}, max_rank={"2": 5})
    learn(learner, 0, [a_batch(0)], steps=2)
    assert "is full" not in told.text
    assert "max_rank leaves 2 directions of layer '2' out" in told.text


# ---- an embedding with more rows ----------------------------------------------------------------


class Words(nn.Module):
    """Word vectors, their mean, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 12)
        self.layer = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.embed(x).mean(1))


def some_words(task: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(task)
    return torch.randint(10, (16, 5), generator=draw), torch.arange(16) % 4


def more_rows(model: Words, *, trainable: bool) -> None:
    """As a library grows an embedding: a new module with the old rows and the old mode."""
    grown = nn.Embedding(13, 12).requires_grad_(trainable)
    with torch.no_grad():
        grown.weight[:10] = model.embed.weight
    model.embed = grown


def test_rows_added_to_a_frozen_embedding_are_told_once(told: pytest.LogCaptureFixture) -> None:
    learner = GPM(Words(), threshold=0.9)
    learn(learner, 0, [some_words(0)], steps=3)
    more_rows(learner.model, trainable=False)  # type: ignore[arg-type]
    told.clear()
    learn(learner, 1, [some_words(1)], steps=3)
    (message,) = told.messages
    assert "'embed.weight' was frozen" in message
    assert "(10, 12) and has shape (13, 12) now" in message
    assert "exclude=['embed.weight']" in message
    told.clear()
    learn(learner, 2, [some_words(2)], steps=3)
    assert not told.messages
    assert learner.detach(2).embed.weight.requires_grad  # type: ignore[union-attr]


def test_rows_that_would_train_are_refused() -> None:
    learner = GPM(Words(), threshold=0.9)
    learn(learner, 0, [some_words(0)], steps=3)
    more_rows(learner.model, trainable=True)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"'embed\.weight' became trainable .* exclude="):
        learner.begin_task(1, [some_words(1)], cross_entropy)


# ---- a task that feeds no layer -----------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank that can be switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(12, 4).requires_grad_(False)
        self.down, self.up = nn.Linear(12, 3, bias=False), nn.Linear(3, 4, bias=False)
        self.shift = nn.Parameter(torch.zeros(4))
        self.enabled = True

    def forward(self, x: Tensor) -> Tensor:
        adapted = self.up(self.down(x)) if self.enabled else 0.0
        return self.base(x) + adapted + self.shift


@both
def test_adapters_that_are_switched_off(cls: type[GPM]) -> None:
    model = Adapted()
    learner = cls(model, threshold=0.9)
    message = "called no protected layer of the model.*with adapters enabled"
    model.enabled = False
    with pytest.raises(ValueError, match=message):
        learner.begin_task(0, [a_batch(0)], cross_entropy)
    model.enabled = True
    learner.begin_task(0, [a_batch(0)], cross_entropy)
    train(learner, [a_batch(0)], steps=3)
    model.enabled = False
    with pytest.raises(ValueError, match=message):
        learner.end_task([a_batch(0)])
    model.enabled = True
    learner.end_task([a_batch(0)])
    assert learner.tasks == [0]
    assert learner.ranks["down"][0]


@both
def test_a_loss_of_another_model(cls: type[GPM]) -> None:
    learner, other = cls(mlp(12, 4)), mlp(12, 4)
    with pytest.raises(ValueError, match="compute the loss with the model that loss_fn is given"):
        learner.begin_task(0, [a_batch(0)], lambda _, batch: cross_entropy(other, batch))


# ---- two threads --------------------------------------------------------------------------------


def test_two_threads_in_two_tasks() -> None:
    learner = TRGP(mlp(12, 8, 4), threshold=0.9, per_task=["2"])
    for task in range(2):
        learn(learner, task, [a_batch(task)], steps=5)
    inside, leave = threading.Event(), threading.Event()

    def visit() -> None:
        with learner.task(0):
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=visit)
    thread.start()
    try:
        assert inside.wait(60)
        weights = [p.detach().clone() for p in learner.model.parameters()]
        sentence = "task was called while another thread uses this learner.*copy.deepcopy"
        with pytest.raises(RuntimeError, match=sentence), learner.task(1):
            pass
        for p, weight in zip(learner.model.parameters(), weights, strict=True):
            assert torch.equal(p, weight)
    finally:
        leave.set()
        thread.join()
    with learner.task(1), learner.task(0):  # one thread may nest them
        pass


# ---- more data for a finished task --------------------------------------------------------------


@both
def test_more_data_for_a_finished_task(cls: type[GPM]) -> None:
    """A known id is refused with the recipe; the recipe learns the new data and keeps the old."""
    learner = cls(mlp(12, 64, 4).double(), threshold=1.0)
    old, new = (a_batch(i, torch.float64) for i in range(2))
    learn(learner, "cats", [old], steps=100, lr=0.3)
    with pytest.raises(ValueError, match=r"'cats' has been learnt already; .* a new id"):
        learner.begin_task("cats", [new], cross_entropy)
    with learner.task("cats"), torch.no_grad():
        before = learner.model(old[0])
        untaught = float(cross_entropy(learner.model, new))
    learn(learner, "more cats", [old, new], steps=200, lr=0.3)
    with learner.task("cats"), torch.no_grad():
        torch.testing.assert_close(learner.model(old[0]), before, rtol=0, atol=1e-6)
    with learner.task("more cats"), torch.no_grad():
        assert float(cross_entropy(learner.model, new)) < 0.9 * untaught


# ---- progress -----------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[], object],
    *,
    patience: float = 0.0,
    screen: io.StringIO | None = None,
) -> str:
    """What a call writes to stderr, a terminal unless another is given."""
    screen = Terminal() if screen is None else screen
    monkeypatch.setattr(progress, "PATIENCE", patience)
    monkeypatch.setattr(progress, "PAUSE", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with contextlib.redirect_stderr(screen):
        call()
    return screen.getvalue()


def a_task() -> None:
    learner = TRGP(mlp(12, 6, 4), threshold=0.9)
    for task in range(2):
        learn(learner, task, [a_batch(task), a_batch(task)], steps=1)


def test_a_long_call_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    text = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", shown(monkeypatch, a_task))
    assert re.search(r"begin_task: batches read.* 1/\?", text)  # as many as it takes
    assert re.search(r"end_task: batches read.* 1/2", text)
    assert re.search(r"end_task: layers decomposed.* 1/2", text)


def test_a_short_call_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not shown(monkeypatch, a_task, patience=3600.0)


def test_the_bar_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(progress.SWITCH, "0")
    assert not shown(monkeypatch, a_task)


def test_nothing_is_shown_where_stderr_is_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not shown(monkeypatch, a_task, screen=io.StringIO())


def test_an_error_takes_the_bar_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        with progress.watched([1, 2], "counting") as numbers:
            for number in numbers:
                if number == 2:
                    raise ZeroDivisionError

    def failing() -> None:
        with pytest.raises(ZeroDivisionError):
            fail()

    text = shown(monkeypatch, failing)
    assert "counting" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is back


def test_a_loader_whose_length_is_no_number() -> None:
    class Endless(list[int]):
        def __len__(self) -> int:
            raise NotImplementedError

    with progress.watched(Endless([1, 2]), "counting") as numbers:
        assert [*numbers] == [1, 2]
