"""Stored results as sweeps leave them, for the tests of tables, figures and their files."""

from typing import Any

from some_results import a_result

from trgp.results.result import Results
from trgp.results.store import Found

SMALL = ((0.9, None, None), (0.8, 0.7, None), (0.6, 0.65, 0.95))


def matrix(shift: float = 0.0) -> list[list[float | None]]:
    """Accuracies of three tasks, all of them higher by so much."""
    return [[None if x is None else x + shift for x in row] for row in SMALL]


def a_configuration(
    method: str, *, seeds: int = 3, shift: float = 0.0, wobble: float = 0.01, **changes: Any
) -> Results:
    """Seeds that differ a little, from each other and from the same seed of another method."""
    runs = []
    for seed in range(seeds):
        by = shift + wobble * (seed % 3) * (1 if len(method) % 2 else -1)
        R = changes.get("accuracy_matrix") or matrix(by)
        command = f"trgp run {changes.get('benchmark', 'split-cifar100')} --method {method} "
        fields = {"command": f"{command}--seed {seed} --device cpu", **changes}
        runs.append(a_result(seed, method=method, **fields | {"accuracy_matrix": R}))
    return Results(tuple(runs))


def some_found() -> Found:
    """Several methods on the paper's data, ablations, quirks, a joint method, and a problem."""
    config = {"epsilon": 0.5, "scope": "layer", "top_k": 2}
    trgp: dict[str, Any] = {"shift": 0.03, "config": config}
    joint = [[None, None, None], [None, None, None], [0.9, 0.9, 0.9]]
    none: dict[str, Any] = {"selected": [{}] * 3, "ranks": {}}
    return Found(
        [
            a_configuration("gpm", selected=[{}] * 3),
            a_configuration("trgp", **trgp),
            a_configuration("trgp", **trgp | {"shift": 0.02}, changed={"epsilon": 0.2}),
            a_configuration(
                "trgp",
                **trgp | {"shift": 0.01, "config": config | {"scope": "task"}},
                changed={"scope": "task"},
            ),
            a_configuration("trgp", **trgp, changed={"lr": 0.1}),
            a_configuration("trgp", **trgp, changed={"first_layer_gate": True}),
            a_configuration("trgp", **trgp | {"shift": 0.04}, preset="official"),
            a_configuration("finetune", shift=-0.2, **none),
            a_configuration("multitask", accuracy_matrix=joint, bwt=None, **none),
            a_configuration("ewc", seeds=1, shift=-0.01, **none),
            a_configuration(
                "single",
                benchmark="cifar100-superclass",
                state_bytes=6 * 2**20,
                network_bytes=2 * 2**20,
                **none,
            ),
            a_configuration("trgp", benchmark="cifar100-superclass", shift=0.02, wobble=0.0),
        ],
        ["runs/x/result.json is not JSON or was cut short; delete it and repeat the run."],
    )
