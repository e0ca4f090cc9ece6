"""The experiments that explain a figure: what is recorded is what the script asks for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from trgp.benchmarks.models import AlexNet
from trgp.engine.config import configure
from trgp.engine.network import Network

RECORDS = Path(__file__).parents[2] / "records"


@pytest.fixture
def explain(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(RECORDS)
    import explain

    return explain


def written(cell: dict[str, Any]) -> str:
    return json.dumps({k: v for k, v in cell.items() if k not in ("acc", "bwt", "a_ii")})


def test_every_record_holds_the_settings_of_its_experiment(explain: Any) -> None:
    """Each of them a configuration of its own, scored on validation data."""
    for name, search in explain.EXPERIMENTS.items():
        settings = list(explain.settings(search, search.grids))
        cells = [cell for setting in settings for cell in setting.cells]
        assert len({cell.folder("") for cell in cells}) == len(cells)
        assert all(cell.config.settings["score_on"] == "validation" for cell in cells)
        record = json.loads((RECORDS / f"explain-{name}.json").read_text())
        asked = [written({"method": s.method, **s.values}) for s in settings]
        assert sorted(map(written, record["cells"])) == sorted(asked)
        assert (record["benchmark"], record["epochs"]) == (search.benchmark, search.epochs)
        assert (record["seeds"], record["tasks"]) == (list(search.seeds), 10)


def test_owm_of_linear_layers_leaves_convolutions_alone(explain: Any) -> None:
    network = Network(lambda: AlexNet(2, 10), True, torch.device("cpu"), 0)
    bound = configure("split-cifar100", "partly:LinearOWM", norm="shared").method.bind(network)
    assert [*bound.layers] == ["fc1", "fc2"]
    assert not bound.frozen(1)


def test_the_network_with_averages_is_the_published_one_but_for_them(explain: Any) -> None:
    from running import alexnet

    plain, own = AlexNet(2, 10).state_dict(), alexnet(2, 10).state_dict()
    added = {name: own[name].shape for name in own.keys() - plain.keys()}
    assert {name: own[name].shape for name in plain} == {n: w.shape for n, w in plain.items()}
    assert {name.split(".")[0] for name in added} == {f"bn{k}" for k in range(1, 6)}
