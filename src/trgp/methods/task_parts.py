"""The two parts of a network with a head per task: layer weights, and per-task tensors."""

from .base import Network

HEADS = "heads."


def layer_weights(network: Network) -> tuple[str, ...]:
    """Names of the trainable tensors of two or more dimensions before the heads."""
    named = network.module.named_parameters()
    return tuple(
        name
        for name, param in named
        if param.dim() > 1 and name in network.trainable and not name.startswith(HEADS)
    )


def own_parts(network: Network, task: int) -> tuple[str, ...]:
    """Names of the per-task tensors: the task's head, and all biases, norm layers and running
    statistics before it."""
    weights = set(layer_weights(network))
    return tuple(
        name
        for name in sorted(network.names)
        if name.startswith(f"{HEADS}{task}.")
        or (name not in weights and not name.startswith(HEADS))
    )
