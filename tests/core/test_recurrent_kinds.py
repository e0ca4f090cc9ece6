"""Recurrent layers: their weights are protected against inputs and hidden states, exactly."""

from typing import Any

import pytest
import torch
from helpers import assert_close, learn
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

from trgp import GPM, TRGP
from trgp.core.capture import observing
from trgp.core.layers import Layer, Site
from trgp.core.plan import make_plan
from trgp.testing import check_layer_kind

CELLS = {nn.RNN: nn.RNNCell, nn.LSTM: nn.LSTMCell, nn.GRU: nn.GRUCell}
SHAPES: list[dict[str, Any]] = [
    {},
    {"num_layers": 2},
    {"bidirectional": True, "batch_first": True},
    {"num_layers": 2, "bidirectional": True, "bias": False},
]


def seen_by(module: nn.Module, *args: Any) -> dict[str, Tensor]:
    """What each weight was applied to in a call, as rows."""
    layers = make_plan(nn.ModuleDict({"it": module}), [], [], "freeze").layers
    seen: dict[str, Tensor] = {}

    def look(layer: Layer, site: Site, x: Tensor) -> None:
        seen[layer.name] = x

    with torch.no_grad(), observing(layers.values(), look):
        module(*args)
    return {name.removeprefix("it."): x.reshape(-1, x.shape[-1]) for name, x in seen.items()}


def stepwise(module: nn.RNNBase, sequence: Tensor, state: Any) -> dict[str, list[Tensor]]:
    """The same of one sequence (T, n), by cells, step by step."""
    found: dict[str, list[Tensor]] = {}
    directions = 2 if module.bidirectional else 1
    options = {"nonlinearity": module.nonlinearity} if isinstance(module, nn.RNN) else {}
    for layer in range(module.num_layers):
        outputs = []
        for direction in range(directions):
            end = f"l{layer}" + "_reverse" * direction
            cell = CELLS[type(module)](
                sequence.shape[1], module.hidden_size, bias=module.bias, **options
            )
            for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")[: 4 if module.bias else 2]:
                setattr(cell, part, getattr(module, f"{part}_{end}"))
            place = layer * directions + direction
            h = state[0][place] if isinstance(state, tuple) else state[place]
            hx: Any = (h, state[1][place]) if isinstance(state, tuple) else h
            answers: list[Tensor] = []
            for x in sequence.flip(0) if direction else sequence:
                found.setdefault(f"weight_ih_{end}", []).append(x)
                found.setdefault(f"weight_hh_{end}", []).append(h)
                hx = cell(x, hx)
                h = hx[0] if isinstance(hx, tuple) else hx
                answers.append(h)
            outputs.append(torch.stack(answers[::-1] if direction else answers))
        sequence = torch.cat(outputs, 1)
    return found


def state_of(module: nn.RNNBase, samples: int) -> Any:
    places = module.num_layers * (2 if module.bidirectional else 1)
    h, c = torch.randn(2, places, samples, module.hidden_size, dtype=torch.float64)
    return (h, c) if isinstance(module, nn.LSTM) else h


def sample_of(state: Any, i: int) -> Any:
    return tuple(s[:, i] for s in state) if isinstance(state, tuple) else state[:, i]


def sorted_rows(x: Tensor) -> Tensor:
    return x[x[:, 0].argsort()]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("packed", [False, True])
def test_what_recurrent_weights_are_applied_to_is_what_the_recurrence_has(
    kind: type[nn.RNNBase], shape: dict[str, Any], packed: bool
) -> None:
    """All hidden states of a layer, though a fused kernel keeps them to itself."""
    module = kind(3, 4, **shape).double()
    lengths = [2, 5, 3] if packed else [4, 4]
    sequences = [torch.randn(t, 3, dtype=torch.float64) for t in lengths]
    state = state_of(module, len(lengths))
    given: Tensor | PackedSequence
    if packed:
        given = pack_sequence(sequences, enforce_sorted=False)
    else:
        given = torch.stack(sequences, 0 if module.batch_first else 1)
    seen = seen_by(module, given, state)
    one_by_one = [stepwise(module, s, sample_of(state, i)) for i, s in enumerate(sequences)]
    assert set(seen) == set(one_by_one[0])
    for name, x in seen.items():
        rows = torch.stack([row for each in one_by_one for row in each[name]])
        assert_close(sorted_rows(x), sorted_rows(rows), 1e-12)


@pytest.mark.parametrize("kind", CELLS)
def test_recurrent_layers_are_protected_exactly(kind: type[nn.RNNBase]) -> None:
    check_layer_kind(kind(9, 12, num_layers=2, bidirectional=True), torch.randn(3, 2, 9))
    check_layer_kind(kind(9, 12, batch_first=True, bias=False), torch.randn(2, 3, 9))
    check_layer_kind(kind(9, 12), torch.randn(4, 9))  # one sequence without a dimension for it


@pytest.mark.parametrize("kind", CELLS.values())
def test_recurrent_cells_are_protected_exactly(kind: type[nn.RNNCellBase]) -> None:
    h = torch.randn(3, 12)
    check_layer_kind(kind(9, 12), torch.randn(3, 9), (h, h.tanh()) if kind is nn.LSTMCell else h)


def test_a_sequence_without_batch_starts_from_the_state_it_is_given() -> None:
    module = nn.LSTM(3, 4).double()
    state = state_of(module, 1)
    x = torch.randn(5, 3, dtype=torch.float64)
    alone = seen_by(module, x, sample_of(state, 0))
    together = seen_by(module, x[:, None], state)
    for name, rows in together.items():
        assert_close(alone[name], rows, 1e-12)


class Reader(nn.Module):
    """Reads a sequence forwards and backwards, and classifies it."""

    def __init__(self, kind: type[nn.RNNBase], packed: bool) -> None:
        super().__init__()
        self.packed = packed
        self.body = kind(10, 24, num_layers=2, bidirectional=True, batch_first=True, dropout=0.2)
        self.head = nn.Linear(48, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not self.packed:
            return self.head(self.body(x)[0].mean(1))
        lengths = torch.tensor([3, 1, 2, 3, 3])[: len(x)]
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        state = self.body(packed)[1]
        last = state[0] if isinstance(state, tuple) else state
        return self.head(torch.cat([last[-2], last[-1]], 1))


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("method", [GPM, TRGP])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", CELLS)
def test_a_recurrent_model_does_not_forget(
    kind: type[nn.RNNBase], packed: bool, method: type[GPM], make: type[torch.optim.Optimizer]
) -> None:
    model = Reader(kind, packed).double()
    learner = method(model, threshold=1.0)
    batches, answers = [], []
    for task in range(3):
        basis = torch.randn(3, 10, dtype=torch.float64)
        x = torch.randn(5, 3, 3, dtype=torch.float64) @ basis
        batches.append((x, torch.arange(5) % 3))
        before = [p.detach().clone() for p in model.parameters()]
        learn(learner, task, batches[-1:], make=make, steps=5, lr=0.01)
        assert all(not torch.equal(a, p) for a, p in zip(before, model.parameters(), strict=True))
        answers.append(model.eval()(x).detach())
    for task, (x, _) in enumerate(batches):
        with learner.task(task):
            assert_close(model(x), answers[task], 1e-9)


def test_a_projected_lstm_is_refused() -> None:
    model = nn.ModuleDict({"odd": nn.LSTM(4, 6, proj_size=2), "plain": nn.Linear(4, 4)})
    with pytest.raises(TypeError, match=r"'odd'.*proj_size.*add 'odd' to exclude"):
        GPM(model)
    assert list(GPM(model, exclude=["odd"]).ranks) == ["plain"]


def test_one_weight_that_does_not_train_leaves_the_others_protected() -> None:
    module = nn.GRU(4, 5)
    module.weight_ih_l0.requires_grad_(False)
    module.bias_ih_l0.requires_grad_(False)
    assert list(GPM(nn.Sequential(module)).ranks) == ["0.weight_hh_l0"]
