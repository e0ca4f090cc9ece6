"""All of a model and of the random states that a pass over it may disturb, to be put back.

A call that fails half-way, by an error or an interrupt at any line, leaves no trace: values, modes,
parameters in their places, hooks, and the states of every generator come back.
"""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .sharding import reset, reshard

REGISTERED = (
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
OWNERS = ("", "sampler", "batch_sampler", "batch_sampler.sampler")  # of a loader's generator


class Snapshot:
    """A model as it is now, with all buffers and the tensors named to it, and the random states."""

    def __init__(self, model: nn.Module, loader: object, tensors: Iterable[Tensor] = ()) -> None:
        """Copy the values of these tensors and of the buffers; all else is kept by reference."""
        reshard(model)
        self.model = model
        self.modules = [
            (module, module.training, vars(module).get("train"), _registered(module))
            for module in model.modules()
        ]
        self.params = [(p, p.requires_grad, p.grad) for p in model.parameters()]
        buffers = [b for b in model.buffers() if b is not None]
        self.values = [(t, t.detach().clone()) for t in (*tensors, *buffers)]
        self.random = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
        self.devices = [(device, torch.cuda.get_rng_state(device)) for device in devices]
        found = [_attribute(loader, f"{owner}.generator") for owner in OWNERS]
        self.generators = [(g, g.get_state()) for g in found if isinstance(g, torch.Generator)]
        self.fused = torch.backends.mha.get_fastpath_enabled()

    @torch.inference_mode(False)
    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back; doing so twice does no harm."""
        reshard(self.model)
        for module, training, train, registered in self.modules:
            for key, saved in registered.items():
                current = vars(module)[key]
                same = len(current) == len(saved) and all(
                    key in current and current[key] is value for key, value in saved.items()
                )
                if not same:
                    current.clear()
                    current.update(saved)
            module.training = training
            if train is None:
                vars(module).pop("train", None)
            else:
                vars(module)["train"] = train
        for p, requires_grad, grad in self.params:
            p.requires_grad_(requires_grad)
            p.grad = grad
        for tensor, value in self.values:
            if not torch.equal(tensor, value):  # an expanded one could not be written
                tensor.copy_(value)
        python, numpy, cpu = self.random
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        for device, state in self.devices:
            torch.cuda.set_rng_state(state, device)
        for generator, state in self.generators:
            generator.set_state(state)
        torch.backends.mha.set_fastpath_enabled(self.fused)


@contextmanager
def undisturbed(model: nn.Module, loader: object) -> Iterator[None]:
    """Hold the model in eval mode; afterwards its modes, buffers and all random states are back.

    A loader draws its order from its own generator or from torch's: both are put back, so that
    training sees the batches it would have seen.
    """
    before = Snapshot(model, loader)
    try:
        with torch.inference_mode(False):
            model.eval()
            yield
    except BaseException:
        reset(model)
        raise
    finally:
        before.restore()


def _registered(module: nn.Module) -> dict[str, dict[Any, Any]]:
    return {key: dict(vars(module)[key]) for key in REGISTERED}


def _attribute(thing: object, path: str) -> Any:
    for name in path.strip(".").split("."):
        thing = getattr(thing, name, None)
    return thing
