"""The result of a finished run."""

import hashlib
import platform

import numpy as np
import torch

from ..methods.base import Method
from ..results.metrics import acc, bwt
from ..results.result import SCHEMA_VERSION, Result
from ..tree import leaves, nbytes
from ..types import VERSION
from .config import Config
from .given import tensor_bytes
from .machine import described, peak_memory
from .position import Position


def outcome(config: Config, seed: int, method: Method, end: Position, command: str) -> Result:
    """Build the result of a run from its final position."""
    network, record = method.network, end.record
    report = method.report(end.state)
    selected = report.selected or {}
    matrix = record.accuracy_matrix
    return Result(
        schema_version=SCHEMA_VERSION,
        command=command,
        benchmark=config.benchmark,
        method=config.method_name,
        preset=config.preset,
        seed=seed,
        config=config.settings,
        versions={
            "trgp": VERSION,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        device=described(network.device),
        accuracy_matrix=matrix,
        acc=acc(matrix),
        bwt=None if method.about.joint else bwt(matrix),
        curves=record.curves,
        selected=[dict(selected.get(t, {})) for t in range(len(matrix))],
        ranks=dict(report.ranks or {}),
        seconds=record.seconds,
        peak_memory_bytes=max(record.peak_memory_bytes, peak_memory(network.device)),
        state_bytes=nbytes(end.state),
        network_bytes=network.nbytes,
        form=report.form,
        changed=config.changed,
        untrained=record.untrained,
        figures=dict(report.figures or {}),
        digest=_digest(end),
    )


def _digest(end: Position) -> str:
    """Return a checksum of every final tensor and its name."""
    total = hashlib.sha256()
    named = [*end.params.items(), *((f"state/{path}", t) for path, t in leaves(end.state))]
    for name, tensor in sorted(named, key=lambda pair: pair[0]):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor_bytes(tensor))
    return total.hexdigest()
