"""The papers' networks: every size as published, and at home in plain and functional PyTorch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers import Batch, assert_close, classification, learn
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from trgp import GPM, TRGP
from trgp.benchmarks.models import MLP, AlexNet, LeNet, ResNet18
from trgp.benchmarks.models.lenet import ResponseNorm

# What the 20 convolutions of the ResNet multiply, in the order of its modules: the stem, then for
# every stage two blocks, the first one with a shortcut (the small number) from the second stage on.
RESNET_INPUTS = [27, *[180] * 4, 180, 360, 20, *[360] * 2, 360, 720, 40, *[720] * 2]
RESNET_INPUTS += [720, 1440, 80, *[1440] * 2]
RESNET_OUTPUTS = [20] * 5 + [40] * 5 + [80] * 5 + [160] * 5


class Published(NamedTuple):
    """A network and the sizes it is published with."""

    make: Callable[[], nn.Module]
    image: tuple[int, ...]
    inputs: list[int]  # n of every protected layer
    outputs: list[int]
    maps: list[int]  # side of every convolution's output
    norms: list[int]  # channels of every BatchNorm
    heads: tuple[int, int, int]  # how many, inputs and classes of each

    @property
    def exclude(self) -> list[str]:
        return ["heads.*"] if self.heads[0] > 1 else []


NETS = {
    "MLP": Published(MLP, (784,), [784, 100, 100], [100, 100, 10], [], [], (1, 100, 10)),
    "AlexNet": Published(
        AlexNet,
        (3, 32, 32),
        [48, 576, 512, 1024, 2048],
        [64, 128, 256, 2048, 2048],
        [29, 12, 5],
        [64, 128, 256, 2048, 2048],
        (10, 2048, 10),
    ),
    "LeNet": Published(
        LeNet,
        (3, 32, 32),
        [75, 500, 3200, 800],
        [20, 50, 800, 500],
        [32, 16],
        [],
        (20, 500, 5),
    ),
    "ResNet18 at 32": Published(
        ResNet18,
        (3, 32, 32),
        RESNET_INPUTS,
        RESNET_OUTPUTS,
        [32] * 5 + [16] * 5 + [8] * 5 + [4] * 5,
        RESNET_OUTPUTS,
        (5, 640, 10),
    ),
    "ResNet18 at 84": Published(
        lambda: ResNet18(heads=20, classes=5, image_size=84, stride=2),
        (3, 84, 84),
        RESNET_INPUTS,
        RESNET_OUTPUTS,
        [42] * 5 + [21] * 5 + [11] * 5 + [6] * 5,
        RESNET_OUTPUTS,
        (20, 1440, 5),
    ),
}

every_net = pytest.mark.parametrize("net", NETS.values(), ids=NETS.keys())


def images(net: Published, samples: int = 4) -> Tensor:
    return torch.randn(samples, *net.image, dtype=torch.float64)


def outputs_of(model: nn.Module, kind: type[nn.Module], x: Tensor) -> list[tuple[int, ...]]:
    """Shapes (without the batch) of what every module of a kind returns, in the order of calls."""
    shapes: list[tuple[int, ...]] = []
    for module in model.modules():
        if isinstance(module, kind):
            module.register_forward_hook(lambda m, args, y: shapes.append(tuple(y.shape[1:])))
    model(x)
    return shapes


# ---- sizes -------------------------------------------------------------------------------------


@every_net
def test_protected_layers_and_their_inputs(net: Published) -> None:
    model = net.make()
    learner = TRGP(model, exclude=net.exclude)
    assert len(learner.ranks) == len(net.inputs)
    assert [n for _, n in learner.ranks.values()] == net.inputs
    layers = dict(model.named_modules())
    assert [layers[name].weight.shape[0] for name in learner.ranks] == net.outputs


def test_the_numbers_of_protected_layers() -> None:
    assert [len(net.inputs) for net in NETS.values()] == [3, 5, 4, 20, 20]


@every_net
def test_parameter_count(net: Published) -> None:
    weights = sum(n * o for n, o in zip(net.inputs, net.outputs, strict=True))
    heads, n, classes = net.heads
    heads_apart = heads * n * classes if net.exclude else 0  # one head is a protected layer
    expected = weights + heads_apart + 2 * sum(net.norms)
    assert sum(p.numel() for p in net.make().parameters()) == expected


def test_parameter_counts_in_figures() -> None:
    counts = [sum(p.numel() for p in net.make().parameters()) for net in NETS.values()]
    assert counts[0] == 89_400
    assert round(counts[1] / 1e6, 2) == 6.71
    assert counts[1:] == [6_713_216, 3_036_500, 1_125_140, 1_237_140]


@every_net
def test_maps_of_every_convolution(net: Published) -> None:
    model = net.make().double()
    shapes = outputs_of(model, nn.Conv2d, images(net))
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(shapes) == len(convolutions)
    assert [height for _, height, _ in shapes] == [width for _, _, width in shapes] == net.maps
    assert [channels for channels, _, _ in shapes] == net.outputs[: len(shapes)]


@pytest.mark.parametrize(
    ("net", "pooled"),
    [("AlexNet", [(64, 14, 14), (128, 6, 6), (256, 2, 2)]), ("LeNet", [(20, 16, 16), (50, 8, 8)])],
)
def test_maps_after_every_pool(net: str, pooled: list[tuple[int, ...]]) -> None:
    model = NETS[net].make().double()
    assert outputs_of(model, nn.MaxPool2d, images(NETS[net])) == pooled


@every_net
def test_what_the_heads_see_and_say(net: Published) -> None:
    model = net.make().double()
    heads, n, classes = net.heads
    assert [(h.in_features, h.out_features) for h in model.heads] == [(n, classes)] * heads
    assert model.features(images(net)).shape == (4, n)
    assert model(images(net)).shape == (4, classes)


@every_net
def test_nothing_has_a_bias_but_batch_norm(net: Published) -> None:
    model = net.make()
    norms = [m for m in model.modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d))]
    assert [m.num_features for m in norms] == net.norms
    assert all(m.affine and not m.track_running_stats for m in norms)
    assert not list(model.buffers())
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    assert {id(b) for b in biases} == {id(m.bias) for m in norms}


def test_dropout_is_alexnet_s_alone() -> None:
    rates: list[float] = []
    model = AlexNet()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda m, args, y: rates.append(m.p))
    model(torch.randn(2, 3, 32, 32))
    assert rates == [0.2, 0.2, 0.5, 0.5, 0.5]
    for net in (MLP(), LeNet(), ResNet18()):
        assert not any(isinstance(m, nn.Dropout) for m in net.modules())


def test_resnet_shortcuts_are_in_the_first_blocks_of_later_stages() -> None:
    names = [n for n, m in ResNet18().named_modules() if n and isinstance(m, nn.Conv2d)]
    shortcuts = [n for n in names if "shortcut" in n]
    assert shortcuts == [f"stages.{stage}.0.shortcut.0" for stage in (1, 2, 3)]


def test_lenet_starts_kaiming_uniform() -> None:
    """Uniform in +-sqrt(6 / fan_in), the heads too; PyTorch's own bound is sqrt(6) times less."""
    for module in LeNet().modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            bound = (6 / module.weight[0].numel()) ** 0.5
            assert 0.95 * bound < float(module.weight.detach().abs().max()) <= bound


# ---- behaviour ---------------------------------------------------------------------------------


def alexnet_by_hand(p: dict[str, Tensor], x: Tensor) -> Tensor:
    def norm(x: Tensor, i: int) -> Tensor:
        return F.batch_norm(x, None, None, p[f"bn{i}.weight"], p[f"bn{i}.bias"], training=True)

    for i in (1, 2, 3):
        x = F.max_pool2d(F.relu(norm(F.conv2d(x, p[f"conv{i}.weight"]), i)), 2)
    x = x.reshape(len(x), 1024)
    for i in (1, 2):
        x = F.relu(norm(x @ p[f"fc{i}.weight"].T, i + 3))
    return x @ p["heads.0.weight"].T


def lenet_by_hand(p: dict[str, Tensor], x: Tensor) -> Tensor:
    for i in (1, 2):
        x = F.relu(F.conv2d(x, p[f"conv{i}.weight"], padding=2))
        x = F.max_pool2d(F.local_response_norm(x, 4, 1e-3 / 9, 0.75, 1), 3, 2, 1)
    x = x.reshape(len(x), 3200)
    x = F.relu(F.relu(x @ p["fc1.weight"].T) @ p["fc2.weight"].T)
    return x @ p["heads.0.weight"].T


@pytest.mark.parametrize(
    ("net", "by_hand"), [("AlexNet", alexnet_by_hand), ("LeNet", lenet_by_hand)]
)
def test_the_order_of_operations(
    net: str, by_hand: Callable[[dict[str, Tensor], Tensor], Tensor]
) -> None:
    model, x = NETS[net].make().double().eval(), images(NETS[net])
    assert_close(model(x), by_hand(dict(model.named_parameters()), x))


@every_net
def test_one_head_is_computed_and_learns(net: Published) -> None:
    model = net.make().double()
    called: list[int] = []
    for i, module in enumerate(model.heads):
        module.register_forward_hook(lambda m, args, y, i=i: called.append(i))
    last = net.heads[0] - 1
    model(images(net), head=last).sum().backward()
    assert called == [last]
    learning = [name for name, p in model.named_parameters() if p.grad is not None]
    assert [name for name in learning if name.startswith("heads")] == [f"heads.{last}.weight"]
    with pytest.raises(IndexError):
        model(images(net), head=last + 1)


@pytest.mark.parametrize("make", [AlexNet, ResNet18])
def test_batch_statistics_as_published_or_running_ones(make: Callable[..., nn.Module]) -> None:
    x = torch.randn(6, 3, 32, 32, dtype=torch.float64)
    published, running = make().double(), make(track_running_stats=True).double()
    running(x)
    for model, same in [(published, False), (running, True)]:
        model.eval()
        alone, among_others = model(x[:3]), model(x)[:3]
        assert torch.allclose(alone, among_others, atol=1e-9) is same


@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        (MLP, {"hidden": (100, 0)}),
        (AlexNet, {"heads": 0}),
        (LeNet, {"classes": True}),
        (ResNet18, {"classes": 2.5}),
        (ResNet18, {"stride": 0}),
    ],
)
def test_sizes_must_be_counts(make: Callable[..., nn.Module], sizes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="whole number of at least 1"):
        make(**sizes)


def test_resnet_refuses_images_that_vanish() -> None:
    with pytest.raises(ValueError, match=r"8x8 are too small at stride 1.*1x1"):
        ResNet18(image_size=8)


@pytest.mark.parametrize(("size", "stride"), [(9, 1), (31, 1), (33, 2), (64, 2), (84, 3)])
def test_resnet_counts_its_features_for_any_image(size: int, stride: int) -> None:
    model = ResNet18(heads=1, classes=3, image_size=size, stride=stride, filters=4)
    assert model(torch.randn(2, 3, size, size)).shape == (2, 3)


def test_mlp_of_other_sizes_and_several_heads() -> None:
    model = MLP(64, (32,), 2, heads=5)
    assert sum(p.numel() for p in model.parameters()) == 64 * 32 + 5 * 32 * 2
    assert model(torch.randn(3, 1, 8, 8), head=4).shape == (3, 2)
    assert MLP(5, (), 2)(torch.randn(3, 5)).shape == (3, 2)


# ---- torch.func --------------------------------------------------------------------------------


@every_net
def test_functional_call_is_the_same(net: Published) -> None:
    model, other = net.make().double().eval(), net.make().double().eval()
    head, x = net.heads[0] - 1, images(net)
    weights = dict(other.named_parameters())
    assert_close(functional_call(model, weights, (x,), {"head": head}), other(x, head))


@every_net
def test_vmap_over_stacked_networks_is_the_same(net: Published) -> None:
    """Several seeds at once: logits and gradients as one network after the other has them."""
    models = [net.make().double().eval() for _ in range(2)]
    params, buffers = stack_module_state(models)
    x, y = images(net), torch.arange(4)
    base = net.make().to("meta").eval()

    def loss(p: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = functional_call(base, (p, buffers), (x,))
        return F.cross_entropy(logits, y), logits

    gradients, logits = vmap(grad(loss, has_aux=True))(params)
    for i, model in enumerate(models):
        expected = model(x)
        assert_close(logits[i], expected)
        F.cross_entropy(expected, y).backward()
        for name, param in model.named_parameters():
            if param.grad is not None:
                assert_close(gradients[name][i], param.grad)


# ---- learners ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", [GPM, TRGP])
@every_net
def test_two_tasks_are_learnt_and_the_first_is_kept(net: Published, method: type[GPM]) -> None:
    model = net.make().double()
    learner = method(model, threshold=0.999999, exclude=net.exclude)
    logits = []
    for task in range(2):
        head = task if net.exclude else 0
        x, y = classification(
            task, *net.image, samples=4, classes=net.heads[2], rank=2, dtype=torch.float64
        )

        def loss_fn(model: nn.Module, batch: Batch, head: int = head) -> Tensor:
            return F.cross_entropy(model(batch[0], head), batch[1])

        def evaluated(f: Callable[..., Any] = loss_fn, batch: Batch = (x, y)) -> float:
            model.eval()
            with torch.no_grad():
                return float(f(model, batch))

        before = evaluated()
        learn(learner, task, [(x, y)], loss_fn, steps=10, lr=0.02)
        assert evaluated() < before
        logits.append((x, head, model(x, head).detach()))
    x, head, kept = logits[0]
    with learner.task(0), torch.no_grad():
        drift = (model.eval()(x, head) - kept).abs().max()
    assert drift < 1e-3 * kept.abs().max()
    assert [n for _, n in learner.ranks.values()] == net.inputs
    if method is TRGP:
        assert any(learner.selected[1].values())


def test_the_response_norm_is_torchs_own_to_the_bit() -> None:
    x = 10 * torch.randn(3, 20, 5, 5)
    expected = torch.nn.LocalResponseNorm(4, alpha=0.001 / 9, beta=0.75, k=1)(x)
    assert torch.equal(ResponseNorm()(x), expected)
