"""The messages of gpuload's own errors, read from its source: each with `…` for what depends on the case."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[3] / "gpuload"
ERRORS = {
    "BackendError",
    "CollateError",
    "CompilerError",
    "DecodeError",
    "GpuloadError",
    "LimitError",
    "SampleError",
    "TooManyErrors",
    "WorkerError",
}
OWN_BASES = ERRORS | {"_ForwardedError"}  # the bases of others
# Where a message is made that is raised elsewhere: functions that return it, constants that hold it.
MAKERS = {
    "datasets/sample.py": {"explain_deep_pixels"},
    "datasets/files.py": {"explain_large_file", "explain_non_image"},
    "ring/ring.py": {"_shortage"},
    "stage/dali/backend.py": {"unmet_requirement"},
    "stage/fused/backend.py": {"unmet_requirement", "_try_compiling"},
    "stage/kornia/backend.py": {"MISSING", "unmet_requirement"},
}


class Message(NamedTuple):
    text: str
    place: str  # the module, below the package
    line: int


def message_template(node: ast.expr) -> str:
    """The text that an expression gives, `…` where it depends on the case; what is added under a condition is left
    out."""
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
    """What the package's errors are made with."""
    for path, tree in _modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS and node.args:
                yield Message(message_template(node.args[0]), path, node.lineno)


def made_messages() -> Iterator[Message]:
    """What `MAKERS` return."""
    for path, tree in _modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name in MAKERS.get(path, ()):
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Return) and inner.value is not None:
                        yield Message(message_template(inner.value), path, inner.lineno)
            elif isinstance(node, ast.AnnAssign) and getattr(node.target, "id", None) in MAKERS.get(path, ()):
                assert node.value is not None
                yield Message(message_template(node.value), path, node.lineno)
            elif isinstance(node, ast.ClassDef) and any(getattr(base, "id", None) in OWN_BASES for base in node.bases):
                yield from _of_class(node, path)


def _of_class(node: ast.ClassDef, path: str) -> Iterator[Message]:
    """The messages that a class of errors makes itself: what it begins `text` with, or gives to its base."""
    for inner in ast.walk(node):
        match inner:
            case ast.Assign([ast.Name("text")], text):
                yield Message(message_template(text), path, inner.lineno)
            case ast.Call(ast.Attribute(attr="__init__"), [ast.JoinedStr() as text, *_]):
                yield Message(message_template(text), path, inner.lineno)


@cache
def _modules() -> list[tuple[str, ast.Module]]:
    """Those that name an error, or make a message."""
    modules = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).as_posix()
        if name in MAKERS or any(error in text for error in OWN_BASES):
            modules.append((name, ast.parse(text)))
    return modules


def has_own_words(text: str) -> bool:
    """Whether a message has words of its own, and is not what a maker gave."""
    return any(part.strip(" :()\n'") for part in text.split("…"))
