"""What trust regions hold: how often nothing but the tasks that were learnt last, or nothing."""

from collections.abc import Callable, Iterator

from recorded import Found, Wanted, recorded
from table_parts import texts
from torch import nn

from trgp.benchmarks import PAPER
from trgp.benchmarks.models import MLP, AlexNet
from trgp.results.result import Result

NETWORKS: dict[str, Callable[[], nn.Module]] = {"pmnist": MLP, "split-cifar100": AlexNet}


def latest(found: Found) -> str:
    """Of every choice that TRGP had, a layer of a task with more old tasks than it may trust."""
    rows = []
    for benchmark in PAPER:
        for preset, scope in (("paper", "layer"), ("paper", "task"), ("official", "layer")):
            changes = {} if scope == "layer" else {"scope": scope}
            results = recorded(found, Wanted(benchmark, "trgp", preset, changes))
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
            named = benchmark, preset, f"{scope}-wise"
            rows.append((*named, seeds, top_k, str(len(choices)), *shares))
    header = ("benchmark", "preset", "regions", "seeds", "K", "choices")
    return texts((*header, "the K latest tasks", "fewer than K", "others"), rows)


def gate(found: Found) -> str:
    """How often the first layer trusts somebody: else its gate shuts the others' scalings."""
    rows = []
    for benchmark, network in NETWORKS.items():
        names = (name for name, module in network().named_modules() if is_weighted(module))
        first = next(names)
        for preset, gated in (("paper", False), ("official", False), ("official", True)):
            changes = {"first_layer_gate": False} if preset == "official" and not gated else {}
            results = recorded(found, Wanted(benchmark, "trgp", preset, changes))
            if results is None:
                continue
            tasks = [layers for run in results for layers in (run.selected or [])[1:]]
            trusting = sum(bool(layers.get(first)) for layers in tasks)
            shown = f"{preset} ({'with' if gated else 'without'} the gate)"
            rows.append((benchmark, shown, str(len(results)), str(len(tasks)), str(trusting)))
    header = ("benchmark", "preset", "seeds", "tasks after the first")
    return texts((*header, "where the first layer trusts somebody"), rows)


def is_weighted(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.Conv2d))


def _choices(run: Result) -> Iterator[tuple[set[int], set[int]]]:
    """The old tasks that a layer trusts, and as many as it may that were learnt last."""
    top_k = run.config["top_k"]
    for task, layers in enumerate(run.selected or []):
        if task > top_k:
            for trusted in layers.values():
                yield set(trusted), set(range(task - top_k, task))
