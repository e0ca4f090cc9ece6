"""Every Python block of the guide runs, in the order it is read, and every link has a target."""

import re
import sys
from pathlib import Path

import pytest

from trgp.cli import main
from trgp.engine.config import defaults
from trgp.results import store

TREE = Path(__file__).parent.parent
DOCS = TREE / "docs"
PAGES = [TREE / "README.md", *sorted(DOCS.glob("*.md"))]


@pytest.mark.parametrize(
    "page", ["README.md", "docs/layers.md", "docs/learner.md", "docs/suite.md"]
)
def test_the_blocks_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (TREE / page).read_text(), flags=re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for i, block in enumerate(blocks):
        exec(compile(block, f"{page}, block {i}", "exec"), names)


def test_the_method_of_the_page_can_be_pasted_and_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (DOCS / "new-method.md").read_text()
    (module,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (command,) = re.findall(r"```console\ntrgp (.*?)\n```", page, flags=re.DOTALL)
    assert len(module.splitlines()) <= 40
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("my_module.py").write_text(module)
    assert main([*command.split(), "--tasks", "2", "--epochs", "2", "--quiet"]) == 0
    sys.modules.pop("my_module")
    (results,) = store.find("runs", defaults).results
    assert results[0].config["strength"] == 0.1
    assert results[0].state_bytes == results[0].network_bytes


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_has_a_target(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^()\s]+)\)", page.read_text()):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken
