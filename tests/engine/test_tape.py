"""What is taped is repeated to the bit, and what cannot be is done as it stands."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from trgp.engine.tape import taped


class Net(nn.Module):
    """Layers whose operations give several results, change tensors in place, and draw."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(3)
        self.fc = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.norm(self.conv(x)).relu(), 0.3)
        logits: Tensor = self.fc(F.max_pool2d(x, 2, 1).flatten(1))
        return logits


class Work:
    """Some steps of SGD on tensors that stay where they are."""

    def __init__(self, read: Callable[[Tensor], Tensor | float] = lambda loss: 0.0) -> None:
        torch.manual_seed(0)
        self.net = Net()
        named = (*self.net.named_parameters(), *self.net.named_buffers())
        self.tensors = {name: tensor.detach().clone() for name, tensor in named}
        self.x, self.y = torch.randn(9, 5, 2, 7, 7), torch.randint(4, (9, 5))
        self.step = torch.zeros(1, dtype=torch.long)
        self.read = read

    def body(self) -> None:
        x, y = (t.index_select(0, self.step).squeeze(0) for t in (self.x, self.y))
        weights = dict(self.net.named_parameters())
        free = {name: self.tensors[name].detach().requires_grad_() for name in weights}
        loss = F.cross_entropy(functional_call(self.net, {**self.tensors, **free}, (x,)), y)
        found = torch.autograd.grad(loss, list(free.values()))
        with torch.no_grad():
            rate = 0.1 + self.read(loss)
            new = [t - rate * g for t, g in zip(free.values(), found, strict=True)]
            torch._foreach_copy_([self.tensors[name] for name in free], new)
            self.step += 1

    def after(self, work: Callable[[], None], start: dict[str, Tensor]) -> dict[str, Tensor]:
        """All tensors after eight steps."""
        for name, tensor in self.tensors.items():
            tensor.copy_(start[name])
        self.step.zero_()
        torch.manual_seed(3)
        for _ in range(8):
            work()
        return {name: tensor.clone() for name, tensor in self.tensors.items()}


def test_a_tape_repeats_its_body_to_the_bit() -> None:
    """Convolutions, pools, dropout and running statistics, from tensors that were set anew."""
    work = Work()
    start = {name: tensor.clone() for name, tensor in work.tensors.items()}
    tape = taped(work.body)
    assert tape != work.body
    plain, repeated = work.after(work.body, start), work.after(tape, start)
    assert all(torch.equal(plain[name], repeated[name]) for name in plain)
    assert not torch.equal(plain["fc.weight"], start["fc.weight"])
    assert plain["norm.num_batches_tracked"] == 8


def test_taping_leaves_a_tensor_as_it_was_that_is_written_whole_and_in_parts() -> None:
    x, y = torch.arange(6.0), torch.ones(6)

    def body() -> None:
        x.add_(y)
        x[:3].mul_(2)
        x.view(2, 3).sub_(1)

    start = x.clone()
    tape = taped(body)
    assert tape is not body
    assert torch.equal(x, start)
    tape()
    done = x.clone()
    x.copy_(start)
    body()
    assert torch.equal(x, done)


READS: dict[str, Callable[[Tensor], Tensor | float]] = {
    "item": lambda loss: loss.item(),
    "numpy": lambda loss: float(loss.detach().numpy()),
    "list": lambda loss: loss.detach().reshape(1).tolist()[0],
    "mask": lambda loss: torch.ones(3)[torch.ones(3) > loss.detach()].sum(),
    "from numpy": lambda loss: torch.from_numpy(loss.detach().numpy().copy()),
}


@pytest.mark.parametrize("read", READS)
def test_what_depends_on_more_than_shapes_is_not_taped(read: str) -> None:
    """A number that was read once would be repeated for ever."""
    work = Work(READS[read])
    assert taped(work.body) == work.body


def swallowed(loss: Tensor) -> float:
    try:
        return loss.item()
    except Exception:
        return 0.5


def written(loss: Tensor) -> Tensor:
    own = torch.tensor(0.5)
    own += 1
    return own


def reshaped(loss: Tensor) -> Tensor:
    return loss.detach().unsqueeze_(0).sum()


def sparse(loss: Tensor) -> Tensor:
    return loss.detach().reshape(1, 1).to_sparse().to_dense().sum()


@pytest.mark.parametrize("read", [swallowed, written, reshaped, sparse])
def test_other_ways_that_a_tape_cannot_follow_are_noticed(
    read: Callable[[Tensor], Tensor | float],
) -> None:
    work = Work(read)
    assert taped(work.body) == work.body


def test_a_single_batch_hides_no_number_that_was_read() -> None:
    work = Work(READS["numpy"])
    work.x, work.y = work.x[:1], work.y[:1]
    assert taped(work.body) == work.body


def test_a_tensor_that_is_replaced_is_not_taken_for_one_that_stays() -> None:
    """As running averages that a network keeps outside its buffers."""
    average = [torch.zeros(())]

    def read(loss: Tensor) -> Tensor:
        average[0] = 0.9 * average[0] + 0.1 * loss.detach()
        return torch.zeros(())

    work = Work(read)
    assert taped(work.body) == work.body


def test_taping_leaves_all_as_it_was_and_is_not_kept() -> None:
    work = Work()
    start = {name: tensor.clone() for name, tensor in work.tensors.items()}
    state = torch.get_rng_state()
    tape = taped(work.body)
    assert all(torch.equal(start[name], tensor) for name, tensor in work.tensors.items())
    assert work.step.item() == 0
    assert torch.equal(torch.get_rng_state(), state)
    gone = weakref.ref(work)
    gc.collect()
    gc.disable()
    try:
        del tape, work
        assert gone() is None
    finally:
        gc.enable()


def test_only_one_batch_is_enough() -> None:
    """What the body leaves behind may be no place to begin from."""
    work = Work()
    work.x, work.y = work.x[:1], work.y[:1]
    tape = taped(work.body)
    assert tape != work.body
    tape()
    assert work.step.item() == 1
    with pytest.raises(IndexError):
        tape()


def test_a_body_that_fails_says_so() -> None:
    """As it would without a tape."""

    def body() -> None:
        torch.ones(2) + torch.ones(3)

    with pytest.raises(RuntimeError, match="must match the size"):
        taped(body)
