"""Count what a reader must follow on some paths: modules, functions, calls between modules.

`frames` and `files` are those of this package on the stack when a function of FORMULAS is first
called. `make trace` before and after a change of structure shows what it did to a reader.
"""

import sys
from collections.abc import Callable
from inspect import CO_OPTIMIZED
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

import torch

import trgp
from trgp.cli import main as command

SRC = str(Path(trgp.__file__).parent)
FORMULAS = {  # where the paper's projection is computed, by file and name
    ("core/guard.py", "Pin.restore"),
    ("methods/trgp.py", "TRGPMethod.along"),
}
COLUMNS = ("modules", "lines", "functions", "pairs", "frames", "files")


class Trace:
    """The calls of this package's functions while it is open."""

    def __enter__(self) -> "Trace":
        self.functions: set[CodeType] = set()
        self.pairs: set[tuple[str, str]] = set()
        self.formula: list[str] = []
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event != "call" or not _ours(code):
            return
        self.functions.add(code)
        caller = frame.f_back.f_code if frame.f_back else code
        if _ours(caller) and caller.co_filename != code.co_filename:
            self.pairs.add((caller.co_filename, code.co_filename))
        name = code.co_filename.removeprefix(f"{SRC}/"), code.co_qualname
        if name in FORMULAS and not self.formula:
            above: FrameType | None = frame
            while above:
                if _ours(above.f_code):
                    self.formula.append(above.f_code.co_filename)
                above = above.f_back

    def row(self) -> list[int]:
        """One number per column of COLUMNS."""
        files = {code.co_filename for code in self.functions}
        lines = sum(len(Path(file).read_text().splitlines()) for file in files)
        stack = self.formula
        counts = len(self.functions), len(self.pairs), len(stack), len(set(stack))
        return [len(files), lines, *counts]


def _ours(code: CodeType) -> bool:
    """Whether it is a function of this package; bodies of modules and classes are none."""
    return code.co_filename.startswith(SRC) and bool(code.co_flags & CO_OPTIMIZED)


def own_loop() -> Callable[[], None]:
    """TRGP in a loop of one's own: three tasks and a saved learner."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from your_own_loop import train

    def learnt() -> None:
        learner, _ = train()
        with TemporaryDirectory() as folder:
            learner.save(Path(folder, "learner.safetensors"))

    return learnt


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'':<16}", *(f"{column:>9}" for column in COLUMNS))
    with TemporaryDirectory() as out:
        run = ["run", "permuted-digits", "--method", "trgp", "--device", "cpu"]
        short = ["--tasks", "3", "--epochs", "2"]
        paths: dict[str, Callable[[], object]] = {
            "own loop": own_loop(),
            "trgp run": lambda: command([*run, *short, "--out", f"{out}/auto"]),
            "trgp run, eager": lambda: command(
                [*run, *short, "--out", f"{out}/eager", "--engine", "eager"]
            ),
            "trgp report": lambda: command(["report", f"{out}/auto", "--out", f"{out}/report"]),
        }
        for name, path in paths.items():
            with Trace() as trace, (Path(out) / "said").open("w") as said:
                sys.stdout = said
                try:
                    path()
                finally:
                    sys.stdout = sys.__stdout__
            print(f"{name:<16}", *(f"{count:>9}" for count in trace.row()))


if __name__ == "__main__":
    main()
