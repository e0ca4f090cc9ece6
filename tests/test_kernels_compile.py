"""The kernels compile for a GPU, which being interpreted does not show. It needs no GPU."""

import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trgp.kernels import batch_norm, convolution, few_rows, parts

COUNTS = {"M", "N", "K", "SAM", "SAK", "SBK", "SBN", "each", "rows", "number", "count"}
COUNTS |= {"SN", "SC", "SH", "SW", "pad_h", "pad_w"}
NORM = {"SHARE": 0.8, "C": 64, "RELU": True, "PARTS": 128}
FIRST, SECOND = {"ROWS": 256, "CHANNELS": 16}, {"ROWS": 64, "CHANNELS": 32}
MAPS = {"C": 20, "H": 9, "W": 9, "OH": 5, "OW": 5, "OC": 40, "K": 180, "KW": 3}
MAPS |= {"STRIDE_H": 2, "STRIDE_W": 2, "BM": 64, "BN": 64, "BK": 32, "ROUNDING": "tf32"}
PADDED = {**MAPS, "PADDED": True}
LEFT_OUT: dict[str, dict[str, Any]] = {
    "all": {},
    "no sum": {"plus": None},
    "no dropout": {"keep": None},
    "neither": {"plus": None, "keep": None},
}
TILES = {"BN": 64, "BK": 64}
CASES = {
    **{
        f"few rows {high} {a} {b}": (few_rows._product, {"BM": high, **TILES, a: 1, b: 1})
        for high, a, b in ((16, "SAK", "SBN"), (32, "SAK", "SBN"), (64, "SAM", "SBK"))
    },
    **{
        f"parts {tall}": (parts._add_up, {"C": 20, "TAPS": 9, "BLOCK": 4096 // tall, "ROWS": tall})
        for tall in (2, 128)
    },
    "statistics": (batch_norm._sums, {"C": 64, "PARTS": 128, **FIRST}),
    **{
        f"{name} {what}": (kernel, {**NORM, **more, **left})
        for what, left in LEFT_OUT.items()
        for name, kernel, more in (
            ("norm", batch_norm._normalise, {"EPS": 1e-5, **SECOND}),
            ("norm's sums", batch_norm._gradient_sums, FIRST),
            ("norm's gradient", batch_norm._input_gradient, SECOND),
        )
    },
    "convolution": (convolution._product, PADDED),
    "convolution's input": (convolution._turned_product, MAPS),
    "convolution's weight": (convolution._weight_product, {**PADDED, "BM": 32}),
}


def kind(name: str) -> str:
    if name in COUNTS:
        return "i32"
    return "*u8" if name == "keep" else "*fp32"


def compile_all() -> None:
    for case, (kernel, constants) in CASES.items():
        names = kernel.arg_names
        signature = {n: "constexpr" if n in constants else kind(n) for n in names}
        places = {(names.index(n),): value for n, value in constants.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=places)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        assert ".entry" in made.asm["ptx"], case
        assert made.metadata.shared < 227 * 1024, case
        print(case)


def test_the_kernels_compile() -> None:
    """In a process of its own: tests that interpret kernels leave Triton changed."""
    command = [sys.executable, "-W", "ignore", __file__]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == list(CASES)


if __name__ == "__main__":
    compile_all()
