"""The examples in docstrings print what they show."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
from helpers import lacking

ROOT = Path(__file__).parents[2]
WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in [*(ROOT / "gpuload").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    if ">>> " in path.read_text(encoding="utf-8")
)

# Packages that the examples of a module need.
NEEDED = {"gpuload.exporters.prometheus": ["prometheus_client"], "gpuload.loader.loader": ["kornia"]}


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_docstring_examples_print_what_they_show(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    lacking.require(*NEEDED.get(name, ()))
    module = importlib.import_module(name)
    failed, attempted = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert attempted, f"{name} has examples that doctest does not find: are they in a docstring?"
    assert not failed, capsys.readouterr().out


def test_modules_with_examples_are_found() -> None:
    assert "gpuload.datasets.sample" in WITH_EXAMPLES
