"""What trust regions hold: how often nothing but the tasks that were learnt last."""

from collections.abc import Iterator

from recorded import Found, Wanted, recorded
from table_parts import texts

from trgp.benchmarks import PAPER
from trgp.results.result import Result


def latest(found: Found) -> str:
    """Of every choice that TRGP had, a layer of a task with more old tasks than it may trust."""
    rows = []
    for benchmark in PAPER:
        for preset in ("paper", "official"):
            results = recorded(found, Wanted(benchmark, "trgp", preset))
            if results is None:
                continue
            choices = [choice for run in results for choice in _choices(run)]
            if not choices:
                continue
            last = sum(trusted == newest for trusted, newest in choices)
            fewer = sum(len(trusted) < len(newest) for trusted, newest in choices)
            each = last, fewer, len(choices) - last - fewer
            shares = [f"{100 * count / len(choices):.0f} %" for count in each]
            seeds, top_k = str(len(results)), str(results[0].config["top_k"])
            rows.append((benchmark, preset, seeds, top_k, str(len(choices)), *shares))
    header = ("benchmark", "preset", "seeds", "K", "choices")
    return texts((*header, "the K latest tasks", "fewer than K", "others"), rows)


def _choices(run: Result) -> Iterator[tuple[set[int], set[int]]]:
    """The old tasks that a layer trusts, and as many as it may that were learnt last."""
    top_k = run.config["top_k"]
    for task, layers in enumerate(run.selected or []):
        if task > top_k:
            for trusted in layers.values():
                yield set(trusted), set(range(task - top_k, task))
