"""Digests of a dozen short CPU runs, to show that a refactoring moves no bit.

    make same-bits WRITE=before.json      # before the change
    make same-bits COMPARE=before.json    # after it: fails and names the runs that differ

Each run has two digests: `tensors` of its final weights and of the method's state, `result` of
everything else that two equal runs agree in (accuracies, losses of every epoch, ranks, settings).
Another processor or version of torch gives other bits: compare on one machine, commit no digests.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import trgp
from trgp.engine.config import configure
from trgp.engine.events import EpochFinished, Event, nobody
from trgp.engine.given import named
from trgp.engine.learning import Asked, learn
from trgp.results.result import Result

# Equal runs differ in these, and so do equal runs of two checkouts.
LEFT_OUT = ("seconds", "peak_memory_bytes", "command", "versions", "digest", "checksum")
SHORT: dict[str, Any] = {"tasks": 3, "epochs": 3, "patience": 2}


class Convolutions(nn.Module):
    """A small network with convolutions and BatchNorm for the digits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, stride=2, groups=2)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv1(x)).relu()
        logits: Tensor = self.head(self.conv2(x).relu().flatten(1))
        return logits


def alone(
    out: Path, method: str, benchmark: str = "permuted-digits", **more: Any
) -> Sequence[Result]:
    """One run, from its start or from where it was interrupted."""
    return trgp.run(benchmark, method, device="cpu", out=out, **(SHORT | more))


def interrupted(out: Path, method: str) -> Sequence[Result]:
    """One run that is interrupted in its second task and resumed."""

    def interrupt(event: Event) -> None:
        if isinstance(event, EpochFinished) and (event.task, event.epoch) == (1, 1):
            raise KeyboardInterrupt

    try:
        alone(out, method, observer=interrupt)
    except KeyboardInterrupt:
        return alone(out, method)
    raise AssertionError("The run was not interrupted.")


def two_seeds(out: Path, method: str) -> Sequence[Result]:
    """Two runs that share every vmapped step, as on a GPU."""
    config, load = named(configure("permuted-digits", method, **SHORT), None)
    asked = [Asked(config, seed, load, out / f"seed-{seed}", "") for seed in (0, 1)]
    with closing(learn(asked, torch.device("cpu"), True, nobody)) as ends:
        results = [end for _, end in ends if isinstance(end, Result)]
    return sorted(results, key=lambda result: result.seed)


CONVOLUTIONS: dict[str, Any] = {"model": "same_bits:Convolutions"}
RUNS: dict[str, Callable[[Path], Sequence[Result]]] = {
    "gpm": partial(alone, method="gpm"),
    "gpm eager": partial(alone, method="gpm", engine="eager"),
    "gpm two seeds": partial(two_seeds, method="gpm"),
    "trgp": partial(alone, method="trgp"),
    "trgp eager": partial(alone, method="trgp", engine="eager"),
    "trgp resumed": partial(interrupted, method="trgp"),
    "trgp two seeds": partial(two_seeds, method="trgp"),
    "trgp convolutions": partial(alone, method="trgp", **CONVOLUTIONS),
    "trgp union": partial(alone, method="trgp", scaling_over="union"),
    "trgp official": partial(alone, method="trgp", preset="official"),
    "owm": partial(alone, method="owm"),
    "hat": partial(alone, method="hat", benchmark="split-digits"),
    "er": partial(alone, method="er"),
    "ewc": partial(alone, method="ewc"),
}


def digests(results: Sequence[Result]) -> dict[str, str]:
    """Both digests of what one entry of RUNS has learnt."""
    assert results, "Every seed has failed."
    rest = [{k: v for k, v in asdict(r).items() if k not in LEFT_OUT} for r in results]
    for each in rest:
        for settings in (each["config"], each["changed"]):
            settings.pop("model_source", None)  # a checksum of this file
    parts = {
        "tensors": [result.digest for result in results],
        "result": json.dumps(rest, sort_keys=True),
    }
    return {k: hashlib.sha256(str(v).encode()).hexdigest()[:16] for k, v in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Digests of a dozen short CPU runs.")
    parser.add_argument("--write", type=Path, metavar="FILE", help="keep the digests there")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="fail where they differ")
    arguments = parser.parse_args()
    before = json.loads(arguments.compare.read_text()) if arguments.compare else {}
    torch.set_num_threads(1)
    found = {}
    for name, learnt in RUNS.items():
        with TemporaryDirectory() as out:
            found[name] = digests(learnt(Path(out)))
        print(f"{name:<18}", *found[name].values())
    if found["trgp resumed"] != found["trgp"]:
        sys.exit("A run that was interrupted and resumed ends with other bits than a whole one.")
    if arguments.write:
        arguments.write.write_text(json.dumps(found, indent=1) + "\n")
    if arguments.compare and before != found:
        names = [name for name in before | found if before.get(name) != found.get(name)]
        sys.exit(f"Other bits than before: {', '.join(names)}.")


if __name__ == "__main__":
    main()
