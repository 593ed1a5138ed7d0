"""The rooms of gpuload/: which may import which, which stay free of torch, and how large a file may be.

Read from the source with `ast`. import-linter can say the floors, but it does not tell an import within a function from
one at the top of a file (the former is how a module without torch reaches it), looks for circles among packages instead
of modules, and knows nothing of sizes and tests. So one mechanism of our own says it all.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase as fnmatch
from functools import cache
from pathlib import Path
from typing import Literal

import pytest

import gpuload

PACKAGE = Path(gpuload.__file__).parent
TESTS = Path(__file__).parent

# From the top: a room may import its own modules and what stands below it. Rooms of one floor do not know each other.
FLOORS = (
    ("cli", "exporters"),
    ("inspection", "packing"),
    ("loader",),
    ("batches",),
    ("stage",),
    ("workers",),
    ("ring",),
    ("order",),
    ("decode", "transforms"),
    ("datasets",),
    ("rng",),
    ("checks", "errors", "public_names"),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
BACKENDS = ("reference", "kornia", "dali", "fused")

# What can be imported where there is no torch, beside `gpuload` itself: workers import it. A function there may import
# torch where only the user's own objects lead to it.
WITHOUT_TORCH = (
    "exporters", "inspection.files", "packing", "workers", "ring", "order", "decode", "transforms", "datasets", "rng",
    "checks", "errors", "public_names", "batches.pad",
)  # fmt: skip

# Which imports of gpuload may be within a function, and why: (who imports, what).
WITHIN_FUNCTIONS = {
    ("gpuload.cli*", "gpuload*"): "a command imports what it runs: torch and more, for which --help should not wait",
    ("gpuload", "gpuload.transforms.names"): "the words for names that do not exist; only that error needs them",
    ("gpuload.transforms", "gpuload.transforms.names"): "as above",
    ("gpuload.transforms.base", "gpuload.transforms.names"): "as above",
    ("gpuload.transforms.arguments", "gpuload.transforms.names"): "as above",
    ("gpuload.transforms.base", "gpuload.transforms"): "`apply` there is the loader's, and needs torch",
    ("gpuload.transforms.chain", "gpuload.transforms.custom"): "few chains have one, and workers start sooner without",
    ("gpuload.transforms.composite", "gpuload.transforms.custom"): "as above",
    ("gpuload.datasets.*", "gpuload.datasets.stores.remote"): "asyncio, threads and fsspec, for URLs alone",
    ("gpuload.datasets.*", "gpuload.datasets.stores.cached"): "zipfile, hashes and tempfile, where an index is kept",
    ("gpuload.datasets.hugging_face", "gpuload.datasets.arrow_rows"): "pyarrow, for datasets of Hugging Face alone",
    ("gpuload.workers.shipping", "gpuload.datasets.arrow_rows"): "as above",
    ("gpuload.packing.manifest", "gpuload.datasets.stores.*"): "only who opens a packed set needs the datasets",
    ("gpuload.stage.dali.backend", "gpuload.stage.dali.*"): "DALI is an optional library",
    ("gpuload.stage.decode.backend", "gpuload.stage.decode.crops"): "Triton is an optional library, and slow to import",
    ("gpuload.stage.kornia.backend", "gpuload.stage.kornia.*"): "Kornia is an optional library",
    ("gpuload.stage.fused.backend", "gpuload.stage.fused.*"): "Triton is an optional library, and slow to import",
    ("gpuload.workers.bootstrap", "gpuload.workers*"): "a script, which first sets where modules are looked for",
    ("gpuload.workers.planned", "gpuload.transforms.program.fusing.plan"): "6 ms, and few workers plan batches",
    ("gpuload.workers.sample", "gpuload.datasets.*"): "seldom needed, and not as a worker starts",
}  # fmt: skip

MOST_LINES = 800
MOST_ENTRIES = 17

# Test files that are about no single module, but about what several do together.
ABOUT_SEVERAL = {
    "batches/test_waits",
    "datasets/stores/test_remote_datasets",
    "decode/test_corpus",
    "decode/test_damage",
    "decode/test_formats",
    "loader/test_apply",
    "loader/test_bottlenecks",
    "loader/test_resume",
    "loader/test_resume_sources",
    "loader/test_sampler",
    "loader/test_scale",
    "order/test_weights",
    "stage/fused/test_bounds",
    "stage/fused/test_compiling",
    "stage/fused/test_planes",
    "stage/reference/test_against_pillow",
    "stage/test_backends",
    "stage/test_composite_stage",
    "stage/test_cuda",
    "stage/test_keep_ratio",
    "stage/test_mixing",
    "stage/test_surroundings",
    "transforms/test_document",
    "transforms/test_specs",
}


@dataclass(frozen=True)
class Import:
    """One module imports another, or `names` from it: at its top, within a function, or for type checkers alone."""

    importer: str
    imported: str
    line: int
    place: Literal["top", "function", "types"]
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """Empty for the package's face, which only names what is in the rooms."""
    return (module + ".").split(".")[1]


def backend_of(module: str) -> str | None:
    return next((name for name in BACKENDS if is_in(module, f"gpuload.stage.{name}")), None)


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_in(name: str, tree: ast.Module) -> Iterator[Import]:
    """All that a module imports from gpuload."""

    def of(node: ast.AST, place: Literal["top", "function", "types"]) -> Iterator[Import]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            place = "function"
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            place = "types"
        modules: dict[str, tuple[str, ...]] = {}
        if isinstance(node, ast.Import):
            modules = {alias.name: () for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}:{node.lineno}: imports are written in full"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                module = inner if inner in SOURCES else str(node.module)
                modules[module] = (*modules.get(module, ()), alias.name)
        for imported, names in modules.items():
            if imported.split(".")[0] == "gpuload":
                yield Import(name, imported, node.lineno, place, names)  # type: ignore[attr-defined]
        for child in ast.iter_child_nodes(node):
            yield from of(child, place)

    return of(tree, "top")


@cache
def all_imports() -> list[Import]:
    """Not when this file is collected, as each process of xdist does it, and again for those that import this one."""
    return [found for name, path in SOURCES.items() for found in imports_in(name, ast.parse(path.read_text()))]


def test_a_room_imports_only_what_stands_below_it():
    assert {room_of(name) for name in SOURCES} - {"", "__main__"} == set(FLOOR_OF), "a room that has no floor"
    wrong = []
    for found in all_imports():
        room, other = room_of(found.importer), room_of(found.imported)
        if room == other or room not in FLOOR_OF or (room == "cli" and not other):  # cli uses gpuload as users do
            continue
        if other not in FLOOR_OF or FLOOR_OF[room] >= FLOOR_OF[other]:
            wrong.append(str(found))
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_by_way_of_others():
    """An import within a function counts too: it would only hide the circle."""
    arrows = {(i.importer, i.imported) for i in all_imports() if i.place != "types"}
    while True:  # take away what begins or ends nowhere, until only circles are left
        starts, ends = {start for start, _ in arrows}, {end for _, end in arrows}
        kept = {(start, end) for start, end in arrows if start in ends and end in starts}
        if kept == arrows:
            break
        arrows = kept
    assert sorted(arrows) == []


def test_imports_stand_at_the_top_or_say_why_not():
    wrong = [
        str(found)
        for found in all_imports()
        if found.place == "function"
        and not any(fnmatch(found.importer, one) and fnmatch(found.imported, two) for one, two in WITHIN_FUNCTIONS)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_what_is_private_to_another():
    wrong = [
        f"{found}: {name}"
        for found in all_imports()
        for name in found.names
        if name.startswith("_") and not name.startswith("__")
    ]
    assert not wrong, "\n".join(wrong)


def test_a_backend_knows_nothing_of_transforms_but_the_program():
    wrong = [
        str(found)
        for found in all_imports()
        if backend_of(found.importer)
        and room_of(found.imported) == "transforms"
        and not is_in(found.imported, "gpuload.transforms.program")
    ]
    assert not wrong, "\n".join(wrong)


def test_backends_do_not_know_each_other():
    """But all may use the reference, which runs in the place of what they lack."""
    wrong = [
        str(found)
        for found in all_imports()
        if (backend := backend_of(found.importer)) and backend_of(found.imported) not in (None, "reference", backend)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_workers_need_no_torch():
    modules = [name for name in SOURCES if name == "gpuload" or any(is_in(name, f"gpuload.{x}") for x in WITHOUT_TORCH)]
    modules.remove("gpuload.workers.bootstrap")  # a script, which imports `workers.main`
    assert len(modules) > 60
    program = f"""
import importlib, sys
sys.modules["torch"] = None
for name in {modules}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{{name}}: {{error}}")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert not done.stdout, done.stdout


def test_files_are_short():
    lines = {name: path.read_text().count("\n") for name, path in SOURCES.items()}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_the_top_of_the_package_is_seen_at_a_glance():
    plain = {"__init__.py", "__init__.pyi", "__main__.py", "__pycache__", "py.typed"}
    assert len({path.name for path in PACKAGE.iterdir()} - plain) <= MOST_ENTRIES


def test_tests_mirror_the_package():
    """``tests/room/test_x.py`` is about ``gpuload/room/x.py`` (or the room ``gpuload/room/x/``), or it is listed."""
    about_several = set()
    for path in sorted(TESTS.rglob("test_*.py")):
        place = path.relative_to(TESTS)
        if place.parts[0] in FLOOR_OF:
            subject = PACKAGE / place.parent / place.stem.removeprefix("test_")
            if not (subject.with_suffix(".py").is_file() or subject.is_dir()):
                about_several.add(place.with_suffix("").as_posix())
    assert about_several - ABOUT_SEVERAL == set(), "name it after a module, or list it"
    assert ABOUT_SEVERAL - about_several == set(), "listed, but gone, or named after a module"


def test_architecture_page_lists_the_floors():
    table = (TESTS.parent / "docs" / "architecture.md").read_text().split("| package |")[1].split("\n\n")[0]
    rows = [re.findall(r"`([^`\n]+)`", row.split("|")[1]) for row in table.splitlines()[2:]]
    assert [tuple(name.removesuffix("/").removesuffix(".py") for name in row) for row in rows] == list(FLOORS), (
        "edit the table in docs/architecture.md"
    )
