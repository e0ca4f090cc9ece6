"""Kernels run on a GPU where there is one, and else interpreted: slow, but number by number."""

import sys

import pytest
import torch


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def interpreted(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the test alone, and whatever has been imported before it.

    The variable by itself would hold for what is decorated while it is set, and for as long as the
    process lives.
    """
    if device == "cpu":
        import triton.language as tl
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction

        monkeypatch.setenv("TRITON_INTERPRET", "1")
        kernels = [module for name, module in sys.modules.items() if "trgp.fast.kernels." in name]
        for module in (*kernels, tl, tl.standard):
            for name, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    monkeypatch.setattr(module, name, InterpretedFunction(value.fn))
