"""Parse the options --seed and --seeds."""

from ..engine.errors import InputError
from ..engine.run import MOST


def chosen(seed: int | None, seeds: str | None) -> list[int]:
    """Return the seeds to run: `--seed`, or `--seeds` as a number or a list; by default 0."""
    if seed is not None and seeds is not None:
        raise InputError("--seed and --seeds exclude each other; give one of them.")
    if seeds is None:
        return [0 if seed is None else seed]
    try:
        listed = [int(part) for part in seeds.split(",")]
    except ValueError:
        raise InputError(
            f"--seeds takes a number of seeds, as in 5, or a list, as in 1,2,37, not '{seeds}'."
        ) from None
    if "," in seeds:
        return listed
    if listed[0] > MOST:
        raise InputError(f"--seeds {seeds} is too many; give at most {MOST}, or --seed {seeds}.")
    return list(range(listed[0]))
