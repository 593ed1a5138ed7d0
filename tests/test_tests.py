"""Rules for the tests themselves: how they end, when they are skipped, what they import, which packages they need."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import combinations, product
from pathlib import Path

import pytest
from helpers import lacking
from helpers.matrix import covering

TESTS = Path(__file__).parent
MAY_SKIP = {TESTS / "helpers" / "lacking.py", TESTS / "conftest.py"}
SKIPPING = {"skip", "skipif", "importorskip", "skipTest", "SkipTest"}
OWNERS_OF_SKIPPING = {"pytest", "pytest.mark", "mark", "unittest", "self"}
FILES = [path for path in sorted(TESTS.rglob("*.py")) if "__pycache__" not in path.parts]


def returns_of_tests(tree: ast.AST) -> Iterator[int]:
    """Yield the lines at which a test returns, but not those at which a function inside a test returns."""
    for test in ast.walk(tree):
        if isinstance(test, ast.FunctionDef) and test.name.startswith("test"):
            inside: list[ast.AST] = list(test.body)
            while inside:
                node = inside.pop()
                if isinstance(node, ast.Return):
                    yield node.lineno
                elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
                    inside += ast.iter_child_nodes(node)


def skips(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that skip tests with the functions of pytest or unittest."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in SKIPPING and ast.unparse(node.value) in OWNERS_OF_SKIPPING:
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and node.module in ("pytest", "unittest"):
            yield from (node.lineno for name in node.names if name.name in SKIPPING)


def imports_of_test_modules(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that import a module of tests, or something from one."""
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module or ''}.{name}" for name in names]
        if any(part.startswith("test_") for name in names for part in name.split(".")):
            yield node.lineno


def lines_by_file(search: Callable[[ast.AST], Iterator[int]], paths: list[Path]) -> dict[str, list[int]]:
    """Return the lines that `search` yields for each file, keyed by the file's path in tests/."""
    lines = {str(path.relative_to(TESTS)): [*search(ast.parse(path.read_text()))] for path in paths}
    return {name: numbers for name, numbers in lines.items() if numbers}


@pytest.mark.parametrize(
    ("code", "returns", "skipped"),
    [
        ("def test_it():\n    if x:\n        return\n    assert y", [3], []),
        ("def test_it():\n    def inner():\n        return 3\n    assert inner()", [], []),
        ("class TestIt:\n    def test_it(self):\n        for x in y:\n            return", [4], []),
        ("def helper():\n    return 3", [], []),
        ("import pytest\npytest.skip('no')", [], [2]),
        ("import pytest\nm = pytest.mark.skipif(x, reason='no')", [], [2]),
        ("import pytest\nx = pytest.importorskip('x')", [], [2]),
        ("from pytest import skip", [], [1]),
        ("import unittest\nraise unittest.SkipTest", [], [2]),
        ("after = step.skip", [], []),
        ("from helpers import lacking\nlacking.skip('chromium')", [], []),
    ],
)
def test_returns_of_tests_and_skips_yield_line_numbers(code, returns, skipped):
    assert list(returns_of_tests(ast.parse(code))) == returns
    assert list(skips(ast.parse(code))) == skipped


def test_no_test_returns_before_its_end():
    assert lines_by_file(returns_of_tests, FILES) == {}, (
        "leave a case that does not apply out of the parameters, or give it a test of its own"
    )


def test_tests_are_skipped_only_by_lacking():
    files = [path for path in FILES if path not in MAY_SKIP]
    assert lines_by_file(skips, files) == {}, "use a function of tests/helpers/lacking.py"


@pytest.mark.parametrize(
    "code",
    ["import test_a", "import a.test_b", "from test_a import b", "from .test_a import b", "from a import test_b"],
)
def test_imports_of_test_modules_yields_each_form_of_import(code):
    assert list(imports_of_test_modules(ast.parse(code))) == [1]


def test_no_test_module_is_imported_by_another_file():
    assert lines_by_file(imports_of_test_modules, FILES) == {}, (
        "move what tests share into tests/helpers/, or into a module of their folder"
    )


def packages_of_module(tree: ast.Module) -> set[str]:
    """Return the optional packages that a module of tests imports, or passes to `lacking.require`, at its top level."""
    packages = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            packages |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            packages |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Expr) and ast.unparse(node).startswith("lacking.require("):
            packages |= {ast.literal_eval(argument) for argument in node.value.args}
    return {package for package in lacking.OPTIONAL if any(f"{name}.".startswith(f"{package}.") for name in packages)}


def test_modules_that_import_packages_beyond_those_of_make_test_are_listed_in_needed(pytestconfig):
    """Otherwise, their tests would run nowhere: `make test` skips them, and `make test-integrations` deselects them."""
    needed_by = pytestconfig.pluginmanager.get_plugin(str(TESTS / "conftest.py")).needed_by
    unlisted = {}
    for path in (path for path in FILES if path.name.startswith("test_") and "project" not in path.parts):
        nodeid = str(path.relative_to(TESTS.parent))
        packages = packages_of_module(ast.parse(path.read_text())) - lacking.REQUIRED["test"] - needed_by(nodeid)
        unlisted |= {nodeid: sorted(packages)} if packages else {}
    assert unlisted == {}, "add these files to NEEDED in tests/conftest.py, or import the packages within tests"


@pytest.mark.parametrize(("sizes", "strength", "max_rows"), [([5, 6, 2], 2, 30), ([3, 3, 3, 3], 2, 15), ([7, 2], 1, 7)])
def test_covering_contains_each_combination_of_values_in_few_rows(sizes, strength, max_rows):
    array = covering(sizes, strength)
    assert len(array) <= max_rows
    for axes in combinations(range(len(sizes)), strength):
        combined = {tuple(row[axis] for axis in axes) for row in array}
        assert combined == set(product(*(range(sizes[axis]) for axis in axes)))


@pytest.mark.processes
@pytest.mark.parametrize("processes", [[], ["-n", "2"]])
def test_pytest_addopts_configures_xdist_processes_but_is_absent_from_the_environment_of_tests(tmp_path, processes):
    if processes:
        lacking.require("xdist")
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "plugin.py").write_text("import pytest\n\n@pytest.fixture\ndef seven():\n    return 7\n")
    (tmp_path / "test_it.py").write_text(
        "import os\n\ndef test_it(pytestconfig, seven):\n"
        "    assert (pytestconfig.getoption('maxfail'), seven) == (3, 7)\n"
        "    names = {name for name in os.environ if name.startswith('PYTEST_')}\n"
        "    assert names <= {'PYTEST_CURRENT_TEST', 'PYTEST_VERSION'}\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *processes]
    result = subprocess.run(
        [*command, "-c", str(TESTS.parent / "pyproject.toml"), "--rootdir", str(tmp_path), str(tmp_path)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
            "PYTEST_ADDOPTS": "--maxfail=3",
            "PYTEST_PLUGINS": "plugin",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "1 passed" in result.stdout, result.stdout + result.stderr
