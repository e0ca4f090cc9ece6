"""The device of a run, and settings that make it repeat to the bit."""

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

ENGINES = ("auto", "eager", "captured", "compiled")
SMALL = 1 << 20  # weights; below this, sharing products among threads costs more than it saves


def resolve(device: str | torch.device) -> torch.device:
    """Return the device; 'auto' is the GPU if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(
            f"There is no device {device!r}; give auto, cpu, cuda or cuda:0."
        ) from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"This machine has no {device}; give --device cpu.")
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"{device} is not supported; give --device cpu or cuda.")
    return found


def is_captured(engine: str, device: torch.device) -> bool:
    """Whether steps are captured and replayed."""
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, not {engine!r}.")
    if engine == "compiled" and device.type != "cuda":
        raise ValueError("Networks are compiled for a GPU only; give --engine captured.")
    return engine != "eager"


def described(device: torch.device) -> str:
    """Describe the device in words."""
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Use deterministic kernels while open; restore torch's random state and settings."""
    # cuBLAS reads it only at its first use.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, torch.get_num_threads(), torch.get_float32_matmul_precision()
    blas = torch.backends.cuda.preferred_blas_library()
    mode = torch.get_deterministic_debug_mode()
    fill: Any = torch.utils.deterministic
    filled = fill.fill_uninitialized_memory
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        try:
            # Not use_deterministic_algorithms, which spends seconds on importing the compiler.
            torch.set_deterministic_debug_mode("warn")
            # Nothing here reads unwritten memory, and filling every tensor doubles small steps.
            fill.fill_uninitialized_memory = False
            cudnn.benchmark = False
            torch.set_float32_matmul_precision("highest")
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            yield
        finally:
            torch.set_deterministic_debug_mode(mode)
            fill.fill_uninitialized_memory = filled
            cudnn.benchmark = before[0]
            if device.type == "cuda":
                torch.backends.cuda.preferred_blas_library(blas)
            torch.set_num_threads(before[1])
            torch.set_float32_matmul_precision(before[2])


def settle_libraries(weights: int, device: torch.device) -> None:
    """Use one thread, and on a GPU cuBLASLt, for a small network; bits depend on both.

    Measured: an MLP's step takes 0.22 ms with cuBLAS, which has no good kernel for a product with
    few rows, and 0.08 ms with cuBLASLt; AlexNet's, with larger products, 0.62 and 0.86 ms.
    """
    if weights < SMALL:
        torch.set_num_threads(1)
        if device.type == "cuda":
            torch.backends.cuda.preferred_blas_library("cublaslt")


def finish(device: torch.device) -> None:
    """Wait for the work that this run has queued, so that a clock can be read."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def finish_all(device: torch.device) -> None:
    """Wait for everything on the device, if it still answers."""
    if device.type == "cuda":
        with suppress(RuntimeError):
            torch.cuda.synchronize(device)


def peak_memory(device: torch.device) -> int:
    """Return the peak in bytes: of torch's allocations on a GPU, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # missing on Windows

    scale = 1 if sys.platform == "darwin" else 1024  # elsewhere it counts kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
