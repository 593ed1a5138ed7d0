"""The Python blocks in README and docs run in the order of a page, on the CPU and over small images.

A comment that readers do not see, ``<!-- not run: needs a GPU -->`` in the line before a block, says why a block is
only compiled. `scene.py` makes the files that a page's blocks read, and the names that they expect.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers.generated_images import jpeg_bytes, smooth_image
from PIL import ExifTags, Image
from project.documentation import scene

import gpuload as gl

ROOT = Path(__file__).parents[3]
FENCE = re.compile(
    r"^(?P<indent> *)(?:<!-- not run: (?P<reason>[^\n]+?) -->\n(?P=indent))?```python\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
# Smaller values for a test machine. `transforms=[...]` stands for the reader's transforms.
SMALLER_VALUES = {
    'device="cuda"': 'device="cpu"',
    "num_workers=8": "num_workers=1",
    "batch_size=256": "batch_size=8",
    "batch_size=64": "batch_size=8",
    "dataset, 256": "dataset, 8",
    " 256,\n": " 8,\n",
    "range(90)": "range(1)",
    "transforms=[...]": "transforms=[]",
    "Compose([...])": "Compose([v2.RandomHorizontalFlip()])",
}


class Block(NamedTuple):
    page: Path
    line: int
    code: str
    reason_not_run: str | None  # None if it is run

    def compiled(self) -> Any:
        """Compile the code so that tracebacks name the page and its line."""
        code = self.code
        for written, run in SMALLER_VALUES.items():
            code = code.replace(written, run)
        return compile("\n" * self.line + code, str(self.page), "exec")


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, match.start("code")), textwrap.dedent(match["code"]), match["reason"])
        for match in FENCE.finditer(text)
    ]


# Pages whose blocks are run by another test, and only compiled here.
TESTED_ELSEWHERE = {
    "docs/observing.md": "tests/project/test_observing.py",
    "docs/tutorials/": "tests/project/examples/test_tutorials.py",
}
PAGES = sorted(
    path
    for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    if "```python" in path.read_text(encoding="utf-8") and path.parent.name not in ("project", "reference")
)
PAGE_NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]


@pytest.fixture(scope="module")
def images_folder(tmp_path_factory):
    """The folder in which blocks run, with images."""
    folder = tmp_path_factory.mktemp("reader")
    scene.write_images(folder)
    return folder


@pytest.mark.processes
@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_code_blocks_of_a_page_run(page, images_folder, monkeypatch):
    monkeypatch.chdir(images_folder)
    name = page.relative_to(ROOT).as_posix()
    names = {"__name__": "__main__", **scene.page_names(name)}
    for block in blocks_of(page):
        code = block.compiled()
        if block.reason_not_run is None and not name.startswith(tuple(TESTED_ELSEWHERE)):
            exec(code, names)
    for loader in [value for value in names.values() if hasattr(value, "close") and hasattr(value, "plan")]:
        loader.close()


def test_yolo_recipe_gives_boxes_in_pixels_of_the_upright_image(tmp_path):
    """The images are a landscape, and a portrait that is stored as a landscape. A line with a polygon is refused."""
    (recipe,) = [block.code for block in blocks_of(ROOT / "docs" / "targets.md") if "class Yolo" in block.code]
    names = {}
    exec(recipe.partition("\nloader = ")[0], names)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
    for number, options in enumerate(({}, {"exif": exif})):
        (tmp_path / "images" / f"{number}.jpg").write_bytes(jpeg_bytes(smooth_image(90, 120, 1), **options))
        (tmp_path / "labels" / f"{number}.txt").write_text("2 0.5 0.25 0.1 0.5\n")
    dataset = names["Yolo"](tmp_path)
    loader = gl.Loader(dataset, 2, decode=gl.Decode(exif=True), ragged="list", num_workers=0, device="cpu")
    images, targets = next(iter(loader))
    for number, (height, width) in enumerate([(90, 120), (120, 90)]):
        assert images[number].shape == (3, height, width)
        assert dataset[number][1]["boxes"].canvas_hw == (height, width)
        np.testing.assert_allclose(targets[number]["boxes"], [[width / 2, height / 4, width / 10, height / 2]])
        assert targets[number]["labels"].tolist() == [2]
    (tmp_path / "labels" / "1.txt").write_text("2 0.1 0.1 0.5 0.1 0.5 0.5\n")
    with pytest.raises(ValueError, match="too many values to unpack"):
        dataset[1]


def test_pages_tested_elsewhere_have_an_existing_test_file():
    for start, test in TESTED_ELSEWHERE.items():
        assert (ROOT / test).exists() or not any(name.startswith(start) for name in PAGE_NAMES), start


def test_blocks_of_finds_every_python_block():
    for page in PAGES:
        assert page.read_text(encoding="utf-8").count("```python") == len(blocks_of(page)), page
    assert sum(len(blocks_of(page)) for page in PAGES) > 60


def test_blocks_of_reads_the_mark_and_compiled_keeps_the_line(tmp_path):
    page = tmp_path / "page.md"
    marked_block, run_block = "<!-- not run: no network -->\n```python\nopen('x:/')\n```", "  ```python\n  1 / 0\n  ```"
    page.write_text(f"one\n\n{marked_block}\n\n- two\n\n{run_block}\n")
    marked, run = blocks_of(page)
    assert (marked.reason_not_run, marked.code) == ("no network", "open('x:/')\n")
    assert (run.reason_not_run, run.code) == (None, "1 / 0\n")
    with pytest.raises(ZeroDivisionError) as caught:
        exec(run.compiled(), {})
    assert caught.traceback[-1].lineno + 1 == 11  # the line of `1 / 0` on the page
    assert FENCE.search("```text\n1\n```") is None
