"""The blocks of Python in pages, and how they are run: those of a page one after the other, as a reader would.

A comment that readers do not see, ``<!-- not run: needs a GPU -->`` in the line before a block, says why one is only
compiled. `scene.py` beside this makes what a page's blocks read, and the names that they expect.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

FENCE = re.compile(
    r"^(?P<indent> *)(?:<!-- not run: (?P<why>[^\n]+?) -->\n(?P=indent))?```python\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
# What a machine for tests has less of. `transforms=[...]` stands for whatever the reader has.
SMALLER = {
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
    why_not: str | None  # why it is not run

    def compiled(self) -> Any:
        """The code, with the page and its line in tracebacks; a SyntaxError where it is no Python."""
        code = self.code
        for written, run in SMALLER.items():
            code = code.replace(written, run)
        return compile("\n" * self.line + code, str(self.page), "exec")


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, match.start("code")), textwrap.dedent(match["code"]), match["why"])
        for match in FENCE.finditer(text)
    ]
