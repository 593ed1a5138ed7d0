"""docs/errors.md has every message of gpuload's own errors once, under a heading, with advice.

The messages are read from the source, with `…` for what depends on the case.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from gpuload import errors

PACKAGE = Path(__file__).parents[3] / "gpuload"
BASE_ERRORS = {
    name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.GpuloadError)
}
PUBLIC_ERRORS = {name for name in BASE_ERRORS if not name.startswith("_")}
# Functions that return, and constants that hold, messages that are raised elsewhere.
MESSAGE_SOURCES = {
    "datasets/sample.py": {"explain_deep_pixels"},
    "datasets/files.py": {"explain_large_file", "explain_non_image"},
    "ring/ring.py": {"_shortage"},
    "stage/dali/backend.py": {"unmet_requirement"},
    "stage/fused/backend.py": {"unmet_requirement", "_try_compiling"},
    "stage/kornia/backend.py": {"MISSING", "unmet_requirement"},
}
PAGE = (PACKAGE.parent / "docs" / "errors.md").read_text(encoding="utf-8")
SECTIONS = {part.split("\n", 1)[0]: part for part in PAGE.split("\n### ")[1:]}
# For each module, how many messages come from `MESSAGE_SOURCES`, from another process or from another error.
PASSED_ON_COUNTS = {
    "datasets/files.py": 1,
    "datasets/recognise.py": 1,
    "decode/decoder.py": 1,
    "decode/header.py": 2,
    "loader/replay.py": 1,
    "loader/session.py": 2,
    "packing/pool.py": 1,
    "ring/ring.py": 2,
    "stage/dali/backend.py": 1,
    "stage/fused/backend.py": 1,
    "stage/kornia/backend.py": 1,
    "stage/stage.py": 2,
}


class Message(NamedTuple):
    text: str
    place: str  # the module, below the package
    line: int


def message_template(node: ast.expr) -> str:
    """Return the text of an expression, with `…` for what depends on the case, and without conditional additions."""
    match node:
        case ast.Constant(str(text)):
            return text
        case ast.JoinedStr(parts):
            return "".join(map(message_template, parts))
        case ast.BinOp(left, ast.Add(), ast.IfExp()):
            return message_template(left)
        case ast.BinOp(left, ast.Add(), right):
            return message_template(left) + message_template(right)
        case ast.IfExp(_, text, ast.Constant(None)) | ast.IfExp(_, ast.Constant(None), text):
            return message_template(text)
    return "…"


def raised_messages() -> Iterator[Message]:
    """Yield the messages that the package's errors are raised with."""
    for path, tree in _modules():
        for node in ast.walk(tree):
            match node:
                case ast.Call(ast.Name(name), [text, *_]) if name in PUBLIC_ERRORS:
                    yield Message(message_template(text), path, node.lineno)


def made_messages() -> Iterator[Message]:
    """Yield the messages of `MESSAGE_SOURCES` and of the classes of errors."""
    for path, tree in _modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name in MESSAGE_SOURCES.get(path, ()):
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Return) and inner.value is not None:
                        yield Message(message_template(inner.value), path, inner.lineno)
            elif isinstance(node, ast.AnnAssign) and getattr(node.target, "id", None) in MESSAGE_SOURCES.get(path, ()):
                assert node.value is not None
                yield Message(message_template(node.value), path, node.lineno)
            elif isinstance(node, ast.ClassDef) and any(
                getattr(base, "id", None) in BASE_ERRORS for base in node.bases
            ):
                yield from _of_class(node, path)


def _of_class(node: ast.ClassDef, path: str) -> Iterator[Message]:
    """Yield the messages that a class of errors assigns to `text` or passes to its base class."""
    for inner in ast.walk(node):
        match inner:
            case ast.Assign([ast.Name("text")], text):
                yield Message(message_template(text), path, inner.lineno)
            case ast.Call(ast.Attribute(attr="__init__"), [ast.JoinedStr() as text, *_]):
                yield Message(message_template(text), path, inner.lineno)


@cache
def _modules() -> list[tuple[str, ast.Module]]:
    """Return the modules that name an error or make a message."""
    modules = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).as_posix()
        if name in MESSAGE_SOURCES or any(error in text for error in BASE_ERRORS):
            modules.append((name, ast.parse(text)))
    return modules


def has_own_words(text: str) -> bool:
    """Return whether a message has words, and does not come entirely from a message source."""
    return any(part.strip(" :()\n'") for part in text.split("…"))


def join_lines(text: str) -> str:
    return " ".join(text.split())


def messages_on_page() -> list[str]:
    blocks = re.findall(r"```text\n(.*?)\n```", PAGE, re.DOTALL)
    return [join_lines(message) for block in blocks for message in block.split("\n\n")]


def test_errors_page_has_each_message_once():
    known = {
        join_lines(message.text): message
        for message in (*raised_messages(), *made_messages())
        if has_own_words(message.text)
    }
    missing = [f"{place}:{line}: {text}" for text, (_, place, line) in known.items() if text not in messages_on_page()]
    assert missing == [], "docs/errors.md lacks messages: give each a place under a heading there"
    assert sorted(set(messages_on_page()) - set(known)) == [], "docs/errors.md has messages that are nowhere in gpuload"
    repeated = [text for text, times in Counter(messages_on_page()).items() if times > 1]
    assert repeated == [], "docs/errors.md has these messages twice"


def test_passed_on_messages_come_from_known_sources():
    passed_on = Counter(message.place for message in raised_messages() if not has_own_words(message.text))
    assert passed_on == Counter(PASSED_ON_COUNTS), "a message is made elsewhere: add that function to MESSAGE_SOURCES"
    modules = Counter(message.place for message in made_messages())
    assert set(MESSAGE_SOURCES) | {"errors.py", "packing/pack.py"} == set(modules)


def test_each_section_says_why_and_what_to_do():
    assert len(SECTIONS) > 30
    assert [name for name, text in SECTIONS.items() if "\n- **Why**: " not in text] == []
    assert [name for name, text in SECTIONS.items() if "\n- **What to do**: " not in text] == []
    assert [name for name, text in SECTIONS.items() if "```text\n" not in text] == []
