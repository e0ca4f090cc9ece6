"""Recurrent layers: their weights meet the inputs, and the hidden states that come before them.

Fused kernels keep the hidden states to themselves. But a layer's outputs are its hidden states:
each layer is run once more by itself, and its outputs, one step later, are what the recurrent
weight was applied to.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from .layer_kinds import described_by, one_site, refuse, rows
from .layers import Site, join

Inputs = Callable[..., list[Tensor]]


def recurrent(name: str, module: nn.RNNBase) -> Iterator[tuple[str, Site]]:
    """Two weights for each layer and direction, each with its bias."""
    for layer in range(module.num_layers):
        for direction in range(2 if module.bidirectional else 1):
            end = f"l{layer}" + ("_reverse" if direction else "")
            seen: tuple[tuple[str, Inputs], ...] = (
                ("ih", partial(_layer_inputs, layer)),
                ("hh", partial(_hidden_before, layer, direction)),
            )
            for part, inputs in seen:
                weight = f"weight_{part}_{end}"
                yield (
                    join(name, weight),
                    one_site(module, rows, inputs, weight, f"bias_{part}_{end}"),
                )


def _projected(module: nn.RNNBase) -> str | None:
    why = "a kind that cannot be protected with proj_size: what is projected is out of sight"
    return why if module.proj_size else None


def cell(name: str, module: nn.RNNCellBase) -> Iterator[tuple[str, Site]]:
    """A weight for the input and one for the hidden state."""
    for part, inputs in (("ih", _cell_input), ("hh", _cell_hidden)):
        weight = f"weight_{part}"
        yield join(name, weight), one_site(module, rows, inputs, weight, f"bias_{part}")


for _base in (nn.RNNBase, nn.RNNCellBase):  # what is none of the kinds below
    refuse(_base, "a kind that cannot be protected")
for _kind in (nn.RNN, nn.LSTM, nn.GRU):
    described_by(_kind, _projected)(recurrent)
for _cell in (nn.RNNCell, nn.LSTMCell, nn.GRUCell):
    described_by(_cell)(cell)


# ---- layers ------------------------------------------------------------------------------------


def _layer_inputs(
    layer: int, module: nn.RNNBase, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """Everything that a layer is given, at all steps."""
    x, _ = _run(module, layer, args, kwargs)
    return [x.data]


def _hidden_before(
    layer: int, direction: int, module: nn.RNNBase, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """The hidden states before each step of a layer, in one direction."""
    x, states = _run(module, layer, args, kwargs)
    y = _after(module, layer, x, states)
    out, lengths = pad_packed_sequence(y)  # (T, B, directions * h), in the order of the states
    h = out.unflatten(2, (-1, module.hidden_size))[:, :, direction]
    first = states[layer][0] if isinstance(states[layer], tuple) else states[layer]
    start = first[direction].unsqueeze(0)
    step = torch.arange(len(h), device=h.device).unsqueeze(1)
    ends = lengths.to(h.device)
    if direction:  # the sequence is read from its end
        h = torch.where((step == ends - 1).unsqueeze(2), start, h.roll(-1, 0))
    else:
        h = torch.cat([start, h[:-1]])
    return [h[step < ends]]


def _run(
    module: nn.RNNBase, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[PackedSequence, list[Any]]:
    """A layer's input, as a packed sequence, and the states that every layer starts from."""
    named = dict(zip(("input", "hx"), args, strict=False)) | kwargs
    x, state = named["input"], named.get("hx")
    if not isinstance(x, PackedSequence):
        single = x.dim() == 2
        if single:
            x = x.unsqueeze(1)
            state = _each(lambda s: s.unsqueeze(1), state) if state is not None else None
        elif module.batch_first:
            x = x.transpose(0, 1)
        x = pack_padded_sequence(x, torch.full((x.shape[1],), len(x)))
    states = _states(module, x, state)
    for below in range(layer):
        x = _after(module, below, x, states)
    return x, states


def _after(
    module: nn.RNNBase, layer: int, x: PackedSequence, states: Sequence[Any]
) -> PackedSequence:
    """A layer's outputs."""
    # cuDNN wants the weights of what it runs in one block of memory.
    with torch.backends.cudnn.flags(enabled=False):
        y: PackedSequence = _one_layer(module, layer)(x, states[layer])[0]
    return y


def _states(module: nn.RNNBase, x: PackedSequence, given: Any) -> list[Any]:
    """The state that each layer starts from: given to the module, or zeros."""
    directions = 2 if module.bidirectional else 1
    if given is None:
        size = (module.num_layers * directions, int(x.batch_sizes[0]), module.hidden_size)
        given = x.data.new_zeros(size)
        given = (given, given) if isinstance(module, nn.LSTM) else given
    places = [slice(i * directions, (i + 1) * directions) for i in range(module.num_layers)]
    return [_each(partial(_at, place), given) for place in places]


def _at(place: slice, state: Tensor) -> Tensor:
    return state[place].contiguous()


def _each(change: Callable[[Tensor], Tensor], state: Any) -> Any:
    """A state with its tensors changed: one, or the two of an LSTM."""
    return tuple(map(change, state)) if isinstance(state, tuple) else change(state)


def _one_layer(module: nn.RNNBase, layer: int) -> nn.RNNBase:
    """One layer by itself, with the module's own weights."""
    first: Tensor = getattr(module, f"weight_ih_l{layer}")
    options = {"nonlinearity": module.nonlinearity} if isinstance(module, nn.RNN) else {}
    with torch.device("meta"):
        kind: Callable[..., nn.RNNBase] = type(module)
        one = kind(
            first.shape[1],
            module.hidden_size,
            bias=module.bias,
            bidirectional=module.bidirectional,
            **options,
        )
    for name, _ in [*one.named_parameters()]:
        setattr(one, name, getattr(module, name.replace("_l0", f"_l{layer}")))
    return one.train(module.training)


# ---- cells -------------------------------------------------------------------------------------


def _cell_input(
    module: nn.RNNCellBase, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    return [args[0] if args else kwargs["input"]]


def _cell_hidden(
    module: nn.RNNCellBase, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    named = dict(zip(("input", "hx"), args, strict=False)) | kwargs
    state = named.get("hx")
    if state is None:
        x = named["input"]
        return [x.new_zeros(*x.shape[:-1], module.hidden_size)]
    return [state[0] if isinstance(state, tuple | list) else state]
