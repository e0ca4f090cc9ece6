"""What the learner asks of an optimizer: that it holds everything to train, scalings included."""

import inspect
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

SCALE_GROUP = "trgp_scale"  # marks the group of the scalings, which may have its own learning rate


def check(optimizer: Optimizer, to_train: Mapping[str, nn.Parameter]) -> None:
    """Refuse an optimizer that cannot be guarded, or that would leave something untrained."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"attach needs a torch optimizer, not {type(optimizer).__name__}.")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{type(optimizer).__name__} calls a closure several times a step, moving the weights "
            "in between, where they cannot be protected; use a first-order optimizer such as SGD "
            "or AdamW."
        )
    held = {p for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, param in to_train.items() if param not in held]
    if missing:
        raise ValueError(
            f"The optimizer does not hold '{missing[0]}' ({len(missing)} parameters are missing); "
            "make it after begin_task, from learner.parameters() or learner.param_groups(...)."
        )


def add(optimizer: Optimizer, scalings: Sequence[nn.Parameter]) -> None:
    """Let an optimizer kept from an earlier task train the new task's scalings.

    They join an existing group: schedulers expect the number of groups to stay what it was.
    """
    groups = optimizer.param_groups
    group = next((g for g in groups if g.get(SCALE_GROUP)), groups[0])
    group["params"].extend(scalings)
    if "param_names" in group:  # made from named parameters, it expects a name for each
        group["param_names"].extend(f"{SCALE_GROUP}.{i}" for i in range(len(scalings)))
    if isinstance(optimizer, torch.optim.Adagrad) and scalings:
        # Alone among torch's optimizers it made its state when constructed, up to torch 2.11.
        start = optimizer.defaults["initial_accumulator_value"]
        fresh = torch.optim.Adagrad(scalings, initial_accumulator_value=start)
        optimizer.state.update(fresh.state)


def remove(optimizer: Optimizer, scalings: Sequence[nn.Parameter]) -> None:
    """Take a finished task's scalings out, with what the optimizer remembers of them."""
    gone = set(scalings)
    for group in optimizer.param_groups:
        if "param_names" in group:
            pairs = zip(group["params"], group["param_names"], strict=True)
            group["param_names"][:] = [name for p, name in pairs if p not in gone]
        group["params"][:] = [p for p in group["params"] if p not in gone]
    for scaling in scalings:
        optimizer.state.pop(scaling, None)
