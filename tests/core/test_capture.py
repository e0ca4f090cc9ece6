"""The streamed Gram matrices are those of the inputs that every weight really meets."""

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Vit, assert_close, classification, cross_entropy, learn, mlp
from support.inside import bases
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trgp import GPM, TRGP
from trgp.core import capture
from trgp.core.capture import Gram, GramCapture, observing
from trgp.core.plan import make_plan

D, HEADS = 8, 2


def captured(model: nn.Module, run: Callable[[], object]) -> dict[str, Gram]:
    """What a capture sees while `run` computes, in eval mode and without gradients."""
    layers = make_plan(model, [], [], "freeze").layers
    seen = GramCapture(layers.values())
    model.eval()
    with torch.no_grad(), observing(layers.values(), seen):
        run()
    return seen.grams


def gram(*inputs: Tensor, bias: bool = True) -> Tensor:
    """R R' of explicit representations, their rows being the last dimension."""
    R = torch.cat([x.reshape(-1, x.shape[-1]) for x in inputs]).T.double()
    R = torch.cat([R, torch.ones_like(R[:1])]) if bias else R
    return (R @ R.T)[None]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# ---- streaming ---------------------------------------------------------------------------------


def test_batches_add_up_to_the_gram_matrix_of_all_inputs() -> None:
    model = mlp(5, 6, 3).double()
    x = randn(23, 5)
    seen = captured(model, lambda: [model(part) for part in x.split([10, 1, 12])])
    assert_close(seen["0"].A, gram(x))
    assert_close(seen["2"].A, gram(model[:2](x)))
    assert seen["0"].columns == 23
    assert seen["0"].eps == torch.finfo(torch.float64).eps


def test_it_is_summed_in_double_precision() -> None:
    model = mlp(5, 3)
    x = torch.randn(100, 5) * torch.logspace(-4, 4, 5)
    seen = captured(model, lambda: model(x))["0"]
    torch.testing.assert_close(seen.A, gram(x), rtol=1e-13, atol=1e-13)
    assert seen.eps == torch.finfo(torch.float32).eps


def test_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch too large to unfold at once is unfolded in parts."""
    model = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, groups=2)).double()
    x = randn(9, 4, 5, 5)
    whole = captured(model, lambda: model(x))["0"]
    monkeypatch.setattr(capture, "SLICE", 2 * x[0].numel() * 9)
    largest = 0
    add = Gram.add

    def counted(self: Gram, columns: Tensor) -> None:
        nonlocal largest
        largest = max(largest, columns.shape[1])
        add(self, columns)

    monkeypatch.setattr(Gram, "add", counted)
    parts = captured(model, lambda: model(x))["0"]
    assert largest == 2 * 25
    assert_close(parts.A, whole.A)
    assert parts.columns == whole.columns == 9 * 25


def test_few_columns_are_held_and_half_as_many_as_rows_no_longer() -> None:
    gram = Gram(torch.zeros(1, 9, 9, dtype=torch.float64))
    assert gram.inputs is None
    X = randn(1, 5, 9)
    for k in range(4):
        gram.add(X[:, k : k + 1])
        assert gram.inputs is not None
        assert torch.equal(gram.inputs, X[:, : k + 1].mT)
        assert_close(gram.A, gram.inputs @ gram.inputs.mT)
    gram.add(X[:, 4:])
    assert gram.inputs is None
    assert not gram.few
    gram.add(X[:, :0])
    assert gram.inputs is None
    assert_close(gram.A, X.mT @ X)


def test_what_is_kept_of_few_inputs_is_a_copy() -> None:
    """A loader may put every batch into the same tensor."""
    gram = Gram(torch.zeros(1, 9, 9, dtype=torch.float64))
    buffer, X = torch.empty(1, 1, 9, dtype=torch.float64), randn(1, 3, 9).double()
    for x in X.split(1, dim=1):
        gram.add(buffer.copy_(x))
    assert gram.inputs is not None
    assert torch.equal(gram.inputs, X.mT)


def test_the_representation_matrix_is_never_held() -> None:
    """What a capture holds does not grow with the number of samples."""
    model = mlp(6, 6, 6)
    layers = make_plan(model, [], [], "freeze").layers
    seen = GramCapture(layers.values())
    with torch.no_grad(), observing(layers.values(), seen):
        model(torch.randn(1000, 6))
        before = len(pickle.dumps(vars(seen)))
        for _ in range(20):
            model(torch.randn(1000, 6))
    assert seen.grams["0"].columns == 21_000
    assert len(pickle.dumps(vars(seen))) == before < 2000 * len(layers)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions_see_their_unfolded_patches(dims: int) -> None:
    """Against a loop over every position, for each group apart."""
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    module = conv(4, 6, 2, stride=2, dilation=2, padding=1, groups=2).double()
    x = randn(3, 4, *(7, 6, 5)[:dims])
    padded = F.pad(x, [1, 1] * dims)
    sizes = [(size - 3) // 2 + 1 for size in padded.shape[2:]]
    expected = torch.zeros(2, 4 // 2 * 2**dims + 1, 4 // 2 * 2**dims + 1, dtype=torch.float64)
    for position in torch.cartesian_prod(*(torch.arange(s) for s in sizes)).reshape(-1, dims):
        window = tuple(slice(2 * int(p), 2 * int(p) + 3, 2) for p in position)
        for group in range(2):
            patch = padded[(slice(None), slice(2 * group, 2 * group + 2), *window)]
            expected[group] += gram(patch.flatten(1))[0]
    model = nn.Sequential(module)
    assert_close(captured(model, lambda: model(x))["0"].A, expected)


def test_a_module_called_several_times_is_seen_every_time() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.cell(x).tanh()
            return x

    model = Recurrent().double()
    x = randn(4, 5)
    states = [x, model.cell(x).tanh(), model.cell(model.cell(x).tanh()).tanh()]
    assert_close(captured(model, lambda: model(x))["cell"].A, gram(*states).detach())


def test_a_weight_shared_by_two_modules_sees_both_inputs() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)).double()
    model[2].weight = model[0].weight
    x = randn(4, 5)
    h = model[:2](x)
    one, none = torch.ones(4, 1).double(), torch.zeros(4, 1).double()
    expected = gram(torch.cat([x, one, none], 1), torch.cat([h, none, one], 1), bias=False).detach()
    assert_close(captured(model, lambda: model(x))["0"].A, expected)


def test_a_layer_that_is_not_used_sees_nothing() -> None:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    seen = captured(model, lambda: model[0](torch.ones(2, 3)))
    assert seen["1"].columns == 0
    assert not seen["1"].A.any()


def test_a_keyword_argument_is_seen() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Conv1d(3, 3, 1)).double()
    x, image = randn(4, 3), randn(4, 3, 2)
    seen = captured(model, lambda: (model[0](input=x), model[1](input=image)))
    assert_close(seen["0"].A, gram(x))
    assert_close(seen["1"].A, gram(image.mT))


def test_hooks_of_the_user_come_first() -> None:
    """What a hook makes of the input is what the weight meets."""
    model = mlp(3, 3).double()
    model[0].register_forward_pre_hook(lambda module, args: (2 * args[0],))
    x = randn(4, 3)
    assert_close(captured(model, lambda: model(x))["0"].A, gram(2 * x))


def test_nothing_stays_behind() -> None:
    """Hooks and the switch of the fused path are put back, also after an error."""
    model = mlp(3, 3)
    layers = make_plan(model, [], [], "freeze").layers
    assert torch.backends.mha.get_fastpath_enabled()

    def fail(*_: object) -> None:
        assert not torch.backends.mha.get_fastpath_enabled()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), observing(layers.values(), fail):
        model(torch.ones(1, 3))
    assert torch.backends.mha.get_fastpath_enabled()
    assert not model[0]._forward_pre_hooks


# ---- attention ---------------------------------------------------------------------------------


def attended(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """What the output projection meets: heads side by side (batch first), from the formula."""
    if module.in_proj_weight is not None:
        Wq, Wk, Wv = module.in_proj_weight.chunk(3)
    else:
        Wq, Wk, Wv = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    bq, bk, bv = module.in_proj_bias.chunk(3) if module.in_proj_bias is not None else [None] * 3

    def heads(x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
        return F.linear(x, W, b).unflatten(-1, (HEADS, -1)).transpose(1, 2)

    q, k, v = heads(query, Wq, bq), heads(key, Wk, bk), heads(value, Wv, bv)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:  # True: not allowed
        scores = scores.masked_fill(mask, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2).detach()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_self_attention(batch_first: bool, bias: bool) -> None:
    module = nn.MultiheadAttention(D, HEADS, bias=bias, batch_first=batch_first).double()
    x = randn(3, 5, D)
    given = x if batch_first else x.transpose(0, 1).contiguous()
    model = nn.ModuleDict({"attention": module})
    seen = captured(model, lambda: module(given, given, given, need_weights=False))
    assert list(seen) == ["attention.in_proj_weight", "attention.out_proj"]
    assert_close(seen["attention.in_proj_weight"].A, gram(x, bias=bias))
    expected = attended(module, x, x, x)
    assert_close(seen["attention.out_proj"].A, gram(expected, bias=bias))
    # The reference is right: projected, it is the module's own output.
    y = module(given, given, given)[0]
    assert_close(module.out_proj(expected), y if batch_first else y.transpose(0, 1))


def test_cross_attention_sees_query_key_and_value() -> None:
    module = nn.MultiheadAttention(D, HEADS, batch_first=True).double()
    query, key, value = randn(2, 3, D), randn(2, 5, D), randn(2, 5, D)
    model = nn.ModuleDict({"attention": module})
    seen = captured(model, lambda: module(query, key=key, value=value))
    assert_close(seen["attention.in_proj_weight"].A, gram(query, key, value))
    assert_close(seen["attention.out_proj"].A, gram(attended(module, query, key, value)))


def test_attention_of_other_widths_has_a_weight_for_each_input() -> None:
    module = nn.MultiheadAttention(D, HEADS, kdim=5, vdim=3, batch_first=True).double()
    query, key, value = randn(2, 3, D), randn(2, 4, 5), randn(2, 4, 3)
    model = nn.ModuleDict({"attention": module})
    seen = captured(model, lambda: module(query, key, value))
    assert_close(seen["attention.q_proj_weight"].A, gram(query, bias=False))
    assert_close(seen["attention.k_proj_weight"].A, gram(key, bias=False))
    assert_close(seen["attention.v_proj_weight"].A, gram(value, bias=False))
    assert_close(seen["attention.out_proj"].A, gram(attended(module, query, key, value)))
    # One bias for the three of them cannot be protected with each: it is frozen.
    assert list(make_plan(model, [], [], "freeze").others) == ["attention.in_proj_bias"]


@pytest.mark.parametrize("kind", ["attention", "padding", "causal", "float"])
def test_masks_reach_the_output_projection(kind: str) -> None:
    module = nn.MultiheadAttention(D, HEADS, batch_first=True).double()
    x = randn(2, 4, D)
    causal = torch.ones(4, 4).triu(1).bool()
    padding = torch.tensor([[False, False, False, True], [False, False, True, True]])
    options: dict[str, Any] = {
        "attention": {"attn_mask": causal},
        "padding": {"key_padding_mask": padding},
        "causal": {"attn_mask": causal, "is_causal": True, "need_weights": False},
        "float": {"attn_mask": torch.zeros(4, 4).double().masked_fill(causal, -torch.inf)},
    }[kind]
    mask = padding[:, None, None, :] if kind == "padding" else causal
    model = nn.ModuleDict({"attention": module})
    seen = captured(model, lambda: module(x, x, x, **options))
    expected = attended(module, x, x, x, mask)
    assert_close(seen["attention.out_proj"].A, gram(expected))
    assert_close(module.out_proj(expected), module(x, x, x, **options)[0])


def encoder_inputs(layer: nn.TransformerEncoderLayer, x: Tensor) -> dict[str, Tensor]:
    """The inputs of every weight of a post-norm encoder layer, from its definition."""
    inner = attended(layer.self_attn, x, x, x)
    h = layer.norm1(x + layer.self_attn.out_proj(inner))
    wide = layer.linear1(h).relu()
    named = {
        "self_attn.in_proj_weight": x,
        "self_attn.out_proj": inner,
        "linear1": h,
        "linear2": wide,
    }
    return {name: value.detach() for name, value in named.items()}


def test_the_fused_encoder_layer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """In eval mode without gradients torch runs one kernel and calls no module at all."""
    layer = nn.TransformerEncoderLayer(D, HEADS, 12, batch_first=True).double()
    model = nn.ModuleDict({"layer": layer}).eval()
    x = randn(3, 5, D)
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", lambda *_: pytest.fail("not fused: no point in this"))
        layer(x)
    seen = captured(model, lambda: layer(x))
    for name, inputs in encoder_inputs(layer, x).items():
        assert_close(seen[f"layer.{name}"].A, gram(inputs))


def test_an_encoder_with_padding_is_seen_layer_by_layer() -> None:
    """With a padding mask torch would even pack the tokens into a nested tensor."""
    layer = nn.TransformerEncoderLayer(D, HEADS, 12, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).double().eval()
    x = randn(2, 4, D)
    padding = torch.tensor([[False, False, False, True], [False, False, False, False]])
    seen = captured(model, lambda: model(x, src_key_padding_mask=padding))
    mask = padding[:, None, None, :]
    inner = attended(model.layers[0].self_attn, x, x, x, mask)
    assert_close(seen["layers.0.self_attn.in_proj_weight"].A, gram(x))
    assert_close(seen["layers.0.self_attn.out_proj"].A, gram(inner))
    with torch.no_grad():
        torch.backends.mha.set_fastpath_enabled(False)
        second = model.layers[0](x, src_key_padding_mask=padding)
        torch.backends.mha.set_fastpath_enabled(True)
    assert_close(seen["layers.1.self_attn.in_proj_weight"].A, gram(second))


def test_a_whole_transformer_is_seen_everywhere() -> None:
    """Encoder, decoder and cross attention: no weight is missed."""
    model = nn.Transformer(D, HEADS, 1, 1, 12, batch_first=True).double()
    seen = captured(model, lambda: model(randn(2, 3, D), randn(2, 4, D)))
    assert len(seen) == 4 + 6
    assert all(gram.columns > 0 for gram in seen.values())
    # The decoder's cross attention meets 8 target tokens and the 6 of the encoder.
    assert seen["decoder.layers.0.multihead_attn.in_proj_weight"].columns == 14


def test_watching_attention_changes_neither_its_output_nor_its_gradients() -> None:
    model = Vit(width=8).double().eval()
    batch = classification(0, 16, 4, 4, dtype=torch.float64)
    layers = make_plan(model, [], [], "freeze").layers
    params = list(model.parameters())
    plain = torch.autograd.grad(cross_entropy(model, batch), params)
    with observing(layers.values(), GramCapture(layers.values())):
        watched = torch.autograd.grad(cross_entropy(model, batch), params)
    for a, b in zip(plain, watched, strict=True):
        assert_close(a, b, 1e-12)
    assert isinstance(model.blocks[0].self_attn.out_proj.bias, nn.Parameter)


@pytest.mark.parametrize("method", [GPM, TRGP])
def test_watching_leaves_activation_checkpointing_alone(method: type[GPM]) -> None:
    """What a hook computes must not be part of the graph: the second forward runs without it."""

    class Checkpointed(nn.Module):
        def __init__(self, use: bool) -> None:
            super().__init__()
            self.use = use
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 4)
            self.encoder = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)[:, None]
            x = checkpoint(self.encoder, x, use_reentrant=False) if self.use else self.encoder(x)
            return self.last(x[:, 0])

    outputs = []
    for use in (False, True):
        torch.manual_seed(0)
        model = Checkpointed(use).double()
        learner = method(model)
        for task in range(2):
            learn(learner, task, [classification(task, 6, dtype=torch.float64)], steps=5)
        outputs.append(model(torch.ones(1, 6).double()).detach())
    assert_close(outputs[1], outputs[0])


# ---- compiled models ---------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_is_captured_and_learns_as_the_plain_one_does() -> None:
    """Compiled before the learner or after it, by its module or in the loss alone."""
    start = mlp(6, 8, 4).double()
    batches = [classification(t, 6, dtype=torch.float64) for t in range(3)]

    def run(kind: str) -> tuple[TRGP, Tensor]:
        model = copy.deepcopy(start)
        compiled = torch.compile(model, backend="eager") if kind != "plain" else model
        learner = TRGP(compiled if kind == "module" else model)
        loss_fn = cross_entropy
        if kind == "loss":
            loss_fn = functools.partial(lambda net, _, batch: cross_entropy(net, batch), compiled)
        for task, batch in enumerate(batches):
            learn(learner, task, [batch], loss_fn)
        with learner.task(1):
            return learner, model(batches[1][0]).detach()

    plain, expected = run("plain")
    assert all(rank > 0 for rank, _ in plain.ranks.values())
    assert plain.selected[2]["2"]
    for kind in ("module", "loss"):
        learner, logits = run(kind)
        assert list(learner.ranks.values()) == list(plain.ranks.values())
        assert_close(logits, expected)


# ---- through the learner -----------------------------------------------------------------------


def test_memory_samples_says_how_many_samples_feed_the_memory() -> None:
    """Each sample is a direction of its own here, so the rank counts them."""
    x = torch.eye(12, dtype=torch.float64)
    batches = [(part, torch.zeros(len(part), dtype=torch.long)) for part in x.split(5)]
    for limit, rank in ((3, 3), (5, 5), (7, 7), (None, 12)):
        learner = GPM(mlp(12, 4, bias=False).double(), threshold=1.0, memory_samples=limit)
        learn(learner, 0, batches, steps=1)
        assert learner.ranks["0"] == (rank, 12)


def test_representations_are_those_of_the_effective_weights() -> None:
    """The second layer's memory of a task is what the task's own first layer feeds it."""
    torch.manual_seed(1)
    model = mlp(6, 6, 4, bias=False).double()
    learner = TRGP(model, threshold=1.0, epsilon=0.0)
    x = randn(2, 6)
    first, second = (x, torch.tensor([0, 1])), (-x, torch.tensor([1, 0]))
    learn(learner, 0, [first])
    learn(learner, 1, [second], steps=50)
    assert learner.selected[1]["0"] == [0]
    with learner.task(1):
        h = model[:2](second[0]).detach()
    with learner.task(0):
        unscaled = model[:2](second[0]).detach()
    basis = bases(learner)["2"].by_task[1][0]
    assert_close(h @ basis @ basis.T, h, 1e-8)
    assert (unscaled @ basis @ basis.T - unscaled).norm() > 1e-2
