"""The table in docs/transforms.md: the arguments of each transform, the values it works on, and notes on torchvision.

``python tests/transforms/catalogue.py`` rewrites the table between its marks; a test checks that it is up to date.
Arguments, defaults and states are read from the code, and notes from specs.py.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

from gpuload import transforms as T

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from transforms.specs import SPECS

__all__ = ["BEGIN", "END", "PAGE", "signature", "table"]

PAGE = Path(__file__).parents[2] / "docs" / "transforms.md"
BEGIN, END = "<!-- table: python tests/transforms/catalogue.py -->", "<!-- end of table -->"


def signature(kind: type) -> str:
    """Return the call with all arguments and their defaults."""
    arguments, keyword_only = [], False
    for name, parameter in inspect.signature(kind).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
            arguments.append("*")
            keyword_only = True
        arguments.append(
            name if parameter.default is inspect.Parameter.empty else f"{name}={format_default(parameter.default)}"
        )
    return f"{kind.__name__}({', '.join(arguments)})"


def format_default(value: Any) -> str:
    if isinstance(value, tuple) and any(isinstance(number, float) for number in value):
        return f"({', '.join(f'{number:.4g}' for number in value)})"
    return repr(value)


def works_on(kind: Any) -> str:
    """Return the kinds of values that a transform works on."""
    if not isinstance(kind.works_on, tuple):
        return "integers" if kind is T.ToDtype else "as the contained transforms"
    words = {"uint8": "integers", "float": "floats", "normalized": "normalised"}
    return ", ".join(words[state] for state in kind.works_on)


def table() -> str:
    rows = ["| transform | works on | compared with torchvision |", "| --- | --- | --- |"]
    for name, spec in sorted(SPECS.items()):
        kind = getattr(T, name)
        rows.append(f"| `{signature(kind)}` | {works_on(kind)} | {spec.note or 'the same'} |")
    return "\n".join(rows)


def main() -> None:
    text = PAGE.read_text()
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    PAGE.write_text(f"{text[:start]}\n\n{table()}\n\n{text[end:]}")


if __name__ == "__main__":
    main()
