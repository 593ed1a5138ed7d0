"""The Python blocks of each tutorial run from top to bottom, and print what the page says."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "docs" / "tutorials"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "index")


@pytest.mark.processes
@pytest.mark.parametrize("page", PAGES)
def test_tutorial_blocks_run_and_print_what_the_page_says(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gpuload.loader.options.usable_cpus", lambda: 1)  # one thread of torch; see conftest.py
    text = (FOLDER / f"{page}.md").read_text()
    names: dict[str, object] = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        line = text[: block.start(1)].count("\n")
        with warnings.catch_warnings():
            if "warning" in block[1]:  # the page mentions the warning
                warnings.simplefilter("ignore")
            exec(compile("\n" * line + block[1], f"{page}.md", "exec"), names)
        documented = re.findall(r"^print\(.*\)  # (\d[\w\[\], ']*|torch\.Size\(\[[\d, ]*\]\))", block[1], re.MULTILINE)
        printed = capsys.readouterr().out
        assert [words for words in documented if words.rstrip() not in printed] == []


@pytest.mark.parametrize("page", PAGES)
def test_tutorial_is_listed_and_has_next_steps(page):
    text = (FOLDER / f"{page}.md").read_text()
    assert f"]({page}.md)" in (FOLDER / "index.md").read_text()
    assert "\n## Next steps\n" in text
    assert "examples/" in text
