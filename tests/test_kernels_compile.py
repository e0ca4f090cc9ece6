"""The kernels compile for a GPU, which being interpreted does not show. It needs no GPU."""

import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trgp.fast.kernels import batch_norm, convolution, few_rows, few_terms, parts

pytestmark = pytest.mark.slow

COUNTS = {"M", "N", "K", "R", "each", "rows", "number", "count", "pad_h", "pad_w"}
COUNTS |= {"SAR", "SAM", "SAK", "SBR", "SBK", "SBN", "SN", "SR"}  # strides
NORM = {"SHARE": 0.8, "C": 64, "RELU": True, "PARTS": 128}
FIRST, SECOND = {"ROWS": 256, "CHANNELS": 16}, {"ROWS": 64, "CHANNELS": 32}
MAPS = {"C": 20, "H": 9, "W": 9, "OH": 5, "OW": 5, "OC": 40, "KW": 3}
MAPS |= {"STRIDE_H": 2, "STRIDE_W": 2, "ROUNDING": "tf32"}
PATCHES = {**MAPS, "SN": 1620, "SC": 1, "SH": 180, "SW": 20, "K": 180, "PADDED": True}
# Rows, columns and terms that are cut differently.
TILED = ((99, 20, 180), (99, 20, 1250), (99, 40, 180), (99, 160, 180), (9999, 160, 180))
LAUNCH = ("num_warps", "num_stages")
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
    **{
        f"convolution {size}": (convolution._product, PATCHES | convolution._tiles(*size)._asdict())
        for size in TILED
    },
    **{
        f"convolution's input {size}": (
            convolution._turned_product,
            {**MAPS, "KH": 3} | convolution._tiles(*size)._asdict(),
        )
        for size in TILED
    },
    "convolution's weight": (
        convolution._weight_product,
        PATCHES | {"BM": 32, "BN": 128, "BK": 32, "num_stages": 1},
    ),
    "halves": (few_terms._split, {"BN": 64, "BR": 32, "SN": 1}),
    "few terms": (
        few_terms._add_product,
        dict(zip(("BM", "BN", "BK"), few_terms.TILES, strict=True)) | few_terms.LAUNCH,
    ),
}


def kind(name: str) -> str:
    if name in COUNTS:
        return "i32"
    return {"keep": "*u8", "alpha": "fp32"}.get(name, "*fp32")


def compile_all() -> None:
    for case, (kernel, constants) in CASES.items():
        names = kernel.arg_names
        options = {name: constants[name] for name in LAUNCH if name in constants}
        constants = {n: value for n, value in constants.items() if n not in options}
        signature = {n: "constexpr" if n in constants else kind(n) for n in names}
        places = {(names.index(n),): value for n, value in constants.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=places)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
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
