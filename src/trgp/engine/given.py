"""What the user gave as a benchmark: a name, a file or tensors."""

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from .. import benchmarks
from ..benchmarks import Benchmark
from ..benchmarks.own import TENSORS, Samples
from ..data import store
from ..data.store import PathLike
from .config import Config

Load = Callable[[int, torch.device], Benchmark]
Tasks = Sequence[tuple[Samples, Samples]]


def named(config: Config, data_root: PathLike | None) -> tuple[Config, Load]:
    """A benchmark by its name or file; a file's content is a part of the configuration."""
    if config.benchmark.endswith(".npz"):
        path = store.locate(config.benchmark)
        if not path.is_file():
            store.load(path)  # which says what is wrong
        config = replace(config, data_source=hashlib.sha256(path.read_bytes()).hexdigest()[:16])

    def load(seed: int, device: torch.device) -> Benchmark:
        options = vars(config.data)
        return benchmarks.load(
            config.benchmark, seed=seed, root=data_root, device=device, **options
        )

    return config, load


def tensors(config: Config, tasks: Tasks, network: Callable[[], nn.Module]) -> tuple[Config, Load]:
    """Tasks in memory, whose content is a part of the configuration."""
    if config.data.tasks is not None or config.data.model is not None:
        raise ValueError("Tasks given as tensors have their number and network; leave both out.")
    total = hashlib.sha256()
    for task in tasks:
        for samples in task:
            for tensor in samples:
                if not isinstance(tensor, Tensor):
                    raise TypeError("A task is ((x, y), (x, y)), train and test, of four tensors.")
                total.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
                total.update(tensor_bytes(tensor))
    total.update(_described(network).encode())

    def load(seed: int, device: torch.device) -> Benchmark:
        return benchmarks.from_tensors(tasks, network, seed=seed, device=device)

    return replace(config, data_source=total.hexdigest()[:16]), load


def _described(network: Callable[[], nn.Module]) -> str:
    """What a network is made of, and the text of its class where there is one to read."""
    with torch.random.fork_rng(devices=[]):
        module = network()
    if not isinstance(module, nn.Module):
        raise TypeError(f"network made a {type(module).__name__}, not an nn.Module.")
    shapes = {name: (p.dtype, tuple(p.shape)) for name, p in module.named_parameters()}
    try:
        source = inspect.getsource(type(module))
    except (OSError, TypeError):
        source = ""
    return f"{module} {shapes} {source}"


def tensor_bytes(tensor: Tensor) -> bytes:
    """A tensor's content as it lies in memory."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


__all__ = ["TENSORS", "Load", "Tasks", "named", "tensor_bytes", "tensors"]
