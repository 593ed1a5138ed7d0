"""The blocks of Python in README and docs run, on the CPU, over small images made for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from project.documentation import scene
from project.documentation.blocks import FENCE, blocks_of

ROOT = Path(__file__).parents[3]
# Pages whose blocks have a test of their own; here they are only compiled.
OWN_TESTS = {
    "docs/observing.md": "tests/project/test_observing.py",
    "docs/tutorials/": "tests/project/examples/test_tutorials.py",
}
PAGES = sorted(
    path
    for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    if blocks_of(path) and path.parent.name not in ("project", "reference")
)
NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """The folder that blocks run in, with the images that they read."""
    folder = tmp_path_factory.mktemp("reader")
    scene.write(folder)
    return folder


@pytest.mark.processes
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_blocks_run(page, images, monkeypatch):
    monkeypatch.chdir(images)
    name = page.relative_to(ROOT).as_posix()
    names = {"__name__": "__main__", **scene.names(name)}
    for block in blocks_of(page):
        code = block.compiled()
        if block.why_not is None and not name.startswith(tuple(OWN_TESTS)):
            exec(code, names)
    for loader in [value for value in names.values() if hasattr(value, "close") and hasattr(value, "plan")]:
        loader.close()


def test_pages_that_are_only_compiled_have_tests():
    for start, test in OWN_TESTS.items():
        assert (ROOT / test).exists() or not any(name.startswith(start) for name in NAMES), start


def test_every_block_is_found():
    for page in PAGES:
        assert page.read_text(encoding="utf-8").count("```python") == len(blocks_of(page)), page
    assert sum(len(blocks_of(page)) for page in PAGES) > 60


def test_a_mark_is_seen_and_a_wrong_block_fails(tmp_path):
    page = tmp_path / "page.md"
    first, second = "<!-- not run: no network -->\n```python\nopen('x:/')\n```", "  ```python\n  1 / 0\n  ```"
    page.write_text(f"one\n\n{first}\n\n- two\n\n{second}\n")
    marked, run = blocks_of(page)
    assert (marked.why_not, marked.code) == ("no network", "open('x:/')\n")
    assert (run.why_not, run.code) == (None, "1 / 0\n")
    with pytest.raises(ZeroDivisionError) as caught:
        exec(run.compiled(), {})
    assert caught.traceback[-1].lineno + 1 == 11
    assert FENCE.search("```text\n1\n```") is None
