"""Every Python block of the guide runs, in the order it is read."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("page", ["learner.md", "suite.md"])
def test_the_blocks_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)
    assert len(blocks) > 2
    names: dict[str, object] = {}
    for i, block in enumerate(blocks):
        exec(compile(block, f"{page}, block {i}", "exec"), names)
