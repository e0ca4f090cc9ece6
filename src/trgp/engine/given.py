"""Benchmarks from a user's input: a name, a file or tensors."""

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import benchmarks
from ..benchmarks import Benchmark
from ..benchmarks.data import store
from ..benchmarks.own import TENSORS, Samples
from ..types import PathLike
from .config import Config

Load = Callable[[int, torch.device], Benchmark]
Tasks = Sequence[tuple[Samples, Samples]]


def named(config: Config, data_root: PathLike | None) -> tuple[Config, Load]:
    """Prepare a benchmark given by name or file; a file's content joins the configuration."""
    if config.benchmark.endswith(".npz"):
        path = store.locate(config.benchmark)
        if not path.is_file():
            store.load(path)  # raises an error that says what is wrong
        config = replace(config, data_source=hashlib.sha256(path.read_bytes()).hexdigest()[:16])

    def load(seed: int, device: torch.device) -> Benchmark:
        options = vars(config.data)
        return benchmarks.load(
            config.benchmark, seed=seed, root=data_root, device=device, **options
        )

    return config, load


def tensors(config: Config, tasks: Tasks, network: Callable[[], nn.Module]) -> tuple[Config, Load]:
    """Prepare tasks given as tensors; their content joins the configuration."""
    if config.data.tasks is not None or config.data.model is not None:
        raise ValueError("Tensor tasks fix their number and network; leave out tasks and model.")
    if not isinstance(tasks, Sequence):
        raise TypeError("A benchmark must be a name, the path of an npz file or a list of tasks.")
    if isinstance(network, nn.Module) or not callable(network):
        raise TypeError("network must be a class or a function that makes a module, not a module.")
    total = hashlib.sha256()
    for task in tasks:
        for tensor in _four(task):
            _add(total, tensor)
    _add_network(total, network)

    def load(seed: int, device: torch.device) -> Benchmark:
        return benchmarks.from_tensors(tasks, network, seed=seed, device=device)

    return replace(config, data_source=total.hexdigest()[:16]), load


def _four(task: Any) -> tuple[Tensor, ...]:
    try:
        (train_x, train_y), (test_x, test_y) = task
    except (TypeError, ValueError):
        found: tuple[Any, ...] = ()
    else:
        found = train_x, train_y, test_x, test_y
    if not found or not all(isinstance(tensor, Tensor) for tensor in found):
        raise TypeError("A task must be ((x, y), (x, y)), train and test, of four tensors.")
    return found


def _add(total: "hashlib._Hash", tensor: Tensor) -> None:
    total.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    total.update(tensor_bytes(tensor))


def _add_network(total: "hashlib._Hash", network: Callable[[], nn.Module]) -> None:
    """Add a network's structure, its initial tensors and, if there is one, its class's source."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = network()
    if not isinstance(module, nn.Module):
        raise TypeError(f"network returned a {type(module).__name__}; let it return an nn.Module.")
    try:
        source = inspect.getsource(type(module))
    except (OSError, TypeError):
        source = ""
    total.update(f"{module} {source}".encode())
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        total.update(name.encode())
        _add(total, tensor)


def fingerprint(benchmark: Benchmark) -> str:
    """Return a checksum of some samples of every task, enough to distinguish data sets."""
    total = hashlib.sha256()
    for task in benchmark.tasks:
        for part in (task.train, task.valid, task.test):
            some = slice(None, None, max(1, len(part) // 16))
            total.update(f"{len(part)}".encode())
            total.update(tensor_bytes(part.x[some]) + tensor_bytes(part.y[some]))
    return total.hexdigest()[:16]


def tensor_bytes(tensor: Tensor) -> bytes:
    """Return a tensor's content as raw bytes."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


__all__ = ["TENSORS", "Load", "Tasks", "named", "tensor_bytes", "tensors"]
