"""Rules for tests: none ends early in place of being left out, and none is skipped but for what a machine lacks."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import combinations, product
from pathlib import Path

import pytest
from helpers import lacking
from helpers.matrix import covering

import gpuload as gl

TESTS = Path(__file__).parent
MAY_SKIP = {TESTS / "helpers" / "lacking.py", TESTS / "conftest.py"}
SKIPPING = {"skip", "skipif", "importorskip", "skipTest", "SkipTest"}
BY = {"pytest", "pytest.mark", "mark", "unittest", "self"}
FILES = [path for path in sorted(TESTS.rglob("*.py")) if "__pycache__" not in path.parts]


def returns_of_tests(tree: ast.AST) -> Iterator[int]:
    """The lines at which a test returns; not those of functions within it."""
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
    """The lines that skip tests by pytest's own means, or unittest's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in SKIPPING and ast.unparse(node.value) in BY:
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and node.module in ("pytest", "unittest"):
            yield from (node.lineno for name in node.names if name.name in SKIPPING)


def found_by(look: Callable[[ast.AST], Iterator[int]], paths: list[Path]) -> dict[str, list[int]]:
    """The lines of each file that are found, by the file's path."""
    found = {str(path.relative_to(TESTS)): [*look(ast.parse(path.read_text()))] for path in paths}
    return {name: lines for name, lines in found.items() if lines}


@pytest.mark.parametrize(
    ("code", "returning", "skipping"),
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
def test_what_is_looked_for_is_found(code, returning, skipping):
    assert list(returns_of_tests(ast.parse(code))) == returning
    assert list(skips(ast.parse(code))) == skipping


def test_no_test_returns_before_its_end():
    assert found_by(returns_of_tests, FILES) == {}, (
        "a case that does not apply is left out of the parameters, or has a test of its own"
    )


def test_tests_are_skipped_only_for_what_a_machine_lacks():
    assert found_by(skips, [path for path in FILES if path not in MAY_SKIP]) == {}, "see tests/helpers/lacking.py"


@pytest.mark.parametrize(("name", "package"), [("kornia", "kornia"), ("fused", "triton"), ("dali", "nvidia.dali")])
def test_an_error_that_says_that_a_package_is_absent_skips_a_test(name, package, pytestconfig, monkeypatch):
    absence = pytestconfig.pluginmanager.get_plugin(str(TESTS / "conftest.py")).absence
    monkeypatch.setattr(lacking, "is_absent", lambda other: other == package)
    backend = importlib.import_module(f"gpuload.stage.{name}.backend")
    monkeypatch.setattr(backend, "_is_installed" if name == "dali" else "find_spec", lambda *name: None)
    with pytest.raises(gl.BackendError) as caught:
        gl.Loader([], transforms=[gl.transforms.Resize(8)], backend=name, device="cpu")
    assert absence(caught.value) == package
    assert absence(gl.BackendError(f"{package} cannot run this; use another backend")) is None
    assert absence(ModuleNotFoundError(name=f"{package}.fn")) == package
    assert absence(ModuleNotFoundError(name=f"gpuload.{package}")) is None
    assert absence(AssertionError(f"needs {package}, which is not installed")) is None
    caused = gl.GpuloadError("it failed")
    caused.__cause__ = ModuleNotFoundError(name=package)
    assert absence(caused) == package


@pytest.mark.parametrize(("sizes", "strength", "rows"), [([5, 6, 2], 2, 30), ([3, 3, 3, 3], 2, 15), ([7, 2], 1, 7)])
def test_in_a_covering_array_all_values_meet(sizes, strength, rows):
    chosen = covering(sizes, strength)
    assert len(chosen) <= rows
    for axes in combinations(range(len(sizes)), strength):
        met = {tuple(row[axis] for axis in axes) for row in chosen}
        assert met == set(product(*(range(sizes[axis]) for axis in axes)))


@pytest.mark.processes
@pytest.mark.parametrize("processes", [[], ["-n", "2"]])
def test_what_a_user_tells_pytest_does_not_reach_one_within_a_test(tmp_path, processes):
    """But it does reach the one that the user started, and the processes that xdist starts for it."""
    if processes:
        lacking.require("xdist")
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "users_own.py").write_text("import pytest\n\n@pytest.fixture\ndef users_own():\n    return 7\n")
    (tmp_path / "test_it.py").write_text(
        "import os\n\ndef test_it(pytestconfig, users_own):\n"
        "    assert (pytestconfig.getoption('maxfail'), users_own) == (3, 7)\n"
        "    names = {name for name in os.environ if name.startswith('PYTEST_')}\n"
        "    assert names <= {'PYTEST_CURRENT_TEST', 'PYTEST_VERSION'}\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *processes]
    done = subprocess.run(
        [*command, "-c", str(TESTS.parent / "pyproject.toml"), "--rootdir", str(tmp_path), str(tmp_path)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
            "PYTEST_ADDOPTS": "--maxfail=3",
            "PYTEST_PLUGINS": "users_own",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
