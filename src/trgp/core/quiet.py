"""Passes over a model that leave no trace."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


@contextmanager
def undisturbed(model: nn.Module, loader: object) -> Iterator[None]:
    """The model in eval mode; afterwards its modes, buffers and all random states as before.

    A loader draws its order from its own generator or from torch's: both are put back, so that
    training sees the batches it would have seen.
    """
    modes = {module: module.training for module in model.modules()}
    buffers = [
        (module, key, buffer, buffer.detach().clone())
        for module in modes
        for key, buffer in module.named_buffers(recurse=False)
    ]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    owners = ["", "sampler", "batch_sampler", "batch_sampler.sampler"]
    found = [_attribute(loader, f"{owner}.generator") for owner in owners]
    generators = [g for g in found if isinstance(g, torch.Generator)]
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.random.fork_rng(devices=list(devices)))
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        for generator in generators:
            stack.callback(generator.set_state, generator.get_state())
        try:
            model.eval()
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode
            with torch.no_grad():
                for module, key, buffer, before in buffers:
                    module._buffers[key] = buffer
                    if not torch.equal(buffer, before):  # an expanded one could not be written
                        buffer.copy_(before)


def _attribute(thing: object, path: str) -> Any:
    for name in path.strip(".").split("."):
        thing = getattr(thing, name, None)
    return thing
