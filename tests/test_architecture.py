"""The architecture of gpuload: imports between subpackages, modules that need no torch, sizes of files and folders, and
names of test files.

The source is read with `ast`. import-linter can check layers, but it does not distinguish imports within functions from
those at the top of a file, and looks for circular imports of packages instead of modules.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase as fnmatch
from functools import cache
from pathlib import Path
from typing import Literal

import pytest
from helpers import lacking

import gpuload

PACKAGE = Path(gpuload.__file__).parent
TESTS = Path(__file__).parent

# From top to bottom: a subpackage may import its own modules and lower layers, but not its own layer's subpackages.
LAYERS = (
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

LAYER_OF = {subpackage: layer for layer, subpackages in enumerate(LAYERS) for subpackage in subpackages}
BACKENDS = ("reference", "kornia", "dali", "fused")

# What workers import, in addition to `gpuload`: it must work without torch. A function may import torch for objects of
# the user that need torch.
WITHOUT_TORCH = (
    "exporters", "inspection.files", "packing", "workers", "ring", "order", "decode", "transforms", "datasets", "rng",
    "checks", "errors", "public_names", "batches.pad",
)  # fmt: skip

# Imports of gpuload that may be within a function, (importer, imported), with the reason.
WITHIN_FUNCTIONS = {
    ("gpuload.cli*", "gpuload*"): "a command imports what it runs: torch and more, for which --help should not wait",
    ("gpuload", "gpuload.transforms.names"): "hints for names that do not exist; only errors need them",
    ("gpuload.transforms", "gpuload.transforms.names"): "as above",
    ("gpuload.transforms.base", "gpuload.transforms.names"): "as above",
    ("gpuload.transforms.arguments", "gpuload.transforms.names"): "as above",
    ("gpuload.transforms.base", "gpuload.transforms"): "`apply` there is the loader's, and needs torch",
    ("gpuload.transforms.chain", "gpuload.transforms.custom"): "few chains need it, and workers start without it",
    ("gpuload.transforms.composite", "gpuload.transforms.custom"): "as above",
    ("gpuload.datasets.*", "gpuload.datasets.stores.remote"): "asyncio, threads and fsspec, only for URLs",
    ("gpuload.datasets.*", "gpuload.datasets.stores.cached"): "zipfile, hashes and tempfile, only for cached indexes",
    ("gpuload.datasets.hugging_face", "gpuload.datasets.arrow_rows"): "pyarrow, only for datasets of Hugging Face",
    ("gpuload.workers.shipping", "gpuload.datasets.arrow_rows"): "as above",
    ("gpuload.packing.manifest", "gpuload.datasets.stores.*"): "datasets are needed only to open a packed set",
    ("gpuload.stage.dali.backend", "gpuload.stage.dali.*"): "DALI is an optional library",
    ("gpuload.stage.decode.backend", "gpuload.stage.decode.crops"): "Triton is an optional library, and slow to import",
    ("gpuload.stage.kornia.backend", "gpuload.stage.kornia.*"): "Kornia is an optional library",
    ("gpuload.stage.fused.backend", "gpuload.stage.fused.*"): "Triton is an optional library, and slow to import",
    ("gpuload.workers.bootstrap", "gpuload.workers*"): "a script, which first sets the search path of modules",
    ("gpuload.workers.planned", "gpuload.transforms.program.fusing.plan"): "6 ms, and few workers plan batches",
}  # fmt: skip

MAX_LINES = 800
MAX_ENTRIES = 17

# Test files whose subject is several modules together, or one function of a module.
ABOUT_SEVERAL_MODULES = {
    "batches/test_host_waits", "datasets/stores/test_remote_datasets", "decode/test_corpus", "decode/test_damage",
    "decode/test_formats", "loader/test_apply", "loader/test_batch_arguments", "loader/test_bottlenecks",
    "loader/test_buckets", "loader/test_resume",
    "loader/test_resume_sources", "loader/test_sampler", "loader/test_scaled_decoding", "order/test_weights",
    "stage/fused/test_bounds", "stage/fused/test_compiling", "stage/fused/test_planes",
    "stage/reference/test_against_pillow", "stage/test_backends", "stage/test_composite_stage", "stage/test_cuda",
    "stage/test_mixing", "stage/test_process_state", "stage/test_timm_crops", "transforms/test_document",
    "transforms/test_from_albumentations", "transforms/test_from_timm", "transforms/test_specs",
}  # fmt: skip


@dataclass(frozen=True)
class Import:
    """An import of a module, or of `names` in it: at the top, within a function, or only for type checkers."""

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


def subpackage_of(module: str) -> str:
    """Return the name of the subpackage or top-level module; "" for `gpuload` itself, which only re-exports."""
    return (module + ".").split(".")[1]


def backend_of(module: str) -> str | None:
    return next((name for name in BACKENDS if is_in(module, f"gpuload.stage.{name}")), None)


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_in(name: str, tree: ast.Module) -> Iterator[Import]:
    """Yield the imports of gpuload in a module."""

    def walk(node: ast.AST, place: Literal["top", "function", "types"]) -> Iterator[Import]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            place = "function"
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            place = "types"
        modules: dict[str, tuple[str, ...]] = {}
        if isinstance(node, ast.Import):
            modules = {alias.name: () for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}:{node.lineno}: write the import in full, without leading dots"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                module = inner if inner in SOURCES else str(node.module)
                modules[module] = (*modules.get(module, ()), alias.name)
        for imported, names in modules.items():
            if imported.split(".")[0] == "gpuload":
                yield Import(name, imported, node.lineno, place, names)  # type: ignore[attr-defined]
        for child in ast.iter_child_nodes(node):
            yield from walk(child, place)

    return walk(tree, "top")


@cache  # not a constant, because each process of xdist collects this file
def all_imports() -> list[Import]:
    return [statement for name, path in SOURCES.items() for statement in imports_in(name, ast.parse(path.read_text()))]


def check_imports(is_forbidden: Callable[[Import], bool], rule: str) -> None:
    forbidden = [str(statement) for statement in all_imports() if is_forbidden(statement)]
    assert forbidden == [], rule


def test_packages_import_only_packages_of_lower_layers():
    unlisted = {subpackage_of(name) for name in SOURCES} - {"", "__main__"} ^ set(LAYER_OF)
    assert not unlisted, "edit LAYERS in tests/test_architecture.py, and the table in docs/architecture.md"

    def is_forbidden(statement: Import) -> bool:
        importer, imported = subpackage_of(statement.importer), subpackage_of(statement.imported)
        if importer == imported or importer not in LAYER_OF or (importer == "cli" and not imported):
            return False  # the command line uses gpuload like a user
        return imported not in LAYER_OF or LAYER_OF[importer] >= LAYER_OF[imported]

    check_imports(is_forbidden, "a subpackage imports only lower LAYERS")


def test_there_are_no_circular_imports():
    # Imports within functions count too: they would only hide the circle.
    edges = {(i.importer, i.imported) for i in all_imports() if i.place != "types"}
    while True:  # remove edges from modules that nothing imports, and to modules that import nothing
        importers, imported = {start for start, _ in edges}, {end for _, end in edges}
        remaining = {(start, end) for start, end in edges if start in imported and end in importers}
        if remaining == edges:
            break
        edges = remaining
    assert sorted(edges) == []


def test_imports_within_functions_are_listed_with_a_reason():
    def matches(statement: Import, listed: tuple[str, str]) -> bool:
        names = (statement.importer, statement.imported)
        return statement.place == "function" and all(map(fnmatch, names, listed))

    check_imports(
        lambda i: i.place == "function" and not any(matches(i, listed) for listed in WITHIN_FUNCTIONS),
        "move these to the top, or to WITHIN_FUNCTIONS",
    )
    unused = [listed for listed in WITHIN_FUNCTIONS if not any(matches(i, listed) for i in all_imports())]
    assert unused == [], "remove these from WITHIN_FUNCTIONS"


def test_no_module_imports_private_names_of_another_module():
    check_imports(
        lambda i: any(name.startswith("_") and not name.startswith("__") for name in i.names),
        "private names are imported: remove the underscore, or move the name",
    )


def test_backends_import_only_the_program_of_transforms():
    check_imports(
        lambda i: (
            bool(backend_of(i.importer))
            and subpackage_of(i.imported) == "transforms"
            and not is_in(i.imported, "gpuload.transforms.program")
        ),
        "backends import nothing of gpuload.transforms but gpuload.transforms.program",
    )


def test_backends_import_no_backend_except_the_reference():
    def is_forbidden(statement: Import) -> bool:
        backend = backend_of(statement.importer)
        return bool(backend) and backend_of(statement.imported) not in (None, "reference", backend)

    check_imports(is_forbidden, "a backend imports no backend but the reference, which runs what it lacks")


@lacking.needs("pyarrow")
@pytest.mark.slow
def test_modules_of_workers_can_be_imported_without_torch():
    modules = [name for name in SOURCES if name == "gpuload" or any(is_in(name, f"gpuload.{x}") for x in WITHOUT_TORCH)]
    modules.remove("gpuload.workers.bootstrap")  # a script, which imports `workers.main`
    assert len(modules) > 60, "fewer modules than expected: does WITHOUT_TORCH match their names?"
    program = f"""
import importlib, sys
sys.modules["torch"] = None
for name in {modules}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{{name}}: {{error}}")
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert not process.stdout, process.stdout


def test_modules_have_at_most_800_lines():
    lines = {name: path.read_text().count("\n") for name, path in SOURCES.items()}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}, "divide these modules"


def test_the_package_has_at_most_17_entries():
    uncounted = {"__init__.py", "__init__.pyi", "__main__.py", "__pycache__", "py.typed"}
    assert len({path.name for path in PACKAGE.iterdir()} - uncounted) <= MAX_ENTRIES, "move modules into subpackages"


def test_tests_are_named_after_the_modules_that_they_test():
    about_several = set()
    for path in sorted(TESTS.rglob("test_*.py")):
        place = path.relative_to(TESTS)
        if place.parts[0] in LAYER_OF:
            subject = PACKAGE / place.parent / place.stem.removeprefix("test_")
            if not (subject.with_suffix(".py").is_file() or subject.is_dir()):
                about_several.add(place.with_suffix("").as_posix())
    unlisted, stale = about_several - ABOUT_SEVERAL_MODULES, ABOUT_SEVERAL_MODULES - about_several
    assert not unlisted, (
        "name the file after a module of the same folder in gpuload, or add it to ABOUT_SEVERAL_MODULES"
    )
    assert not stale, "remove from ABOUT_SEVERAL_MODULES: the file does not exist, or is named after a module"


def test_the_table_in_architecture_md_lists_the_layers():
    table = (TESTS.parent / "docs" / "architecture.md").read_text().split("| package |")[1].split("\n\n")[0]
    rows = [re.findall(r"`([^`\n]+)`", row.split("|")[1]) for row in table.splitlines()[2:]]
    assert [tuple(name.removesuffix("/").removesuffix(".py") for name in row) for row in rows] == list(LAYERS), (
        "edit the table in docs/architecture.md"
    )
