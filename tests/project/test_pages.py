"""The files, links, commands and extras that pages name exist; rules for docstrings, workflows and hooks."""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from pathlib import Path

import pytest

from gpuload import __version__

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "gpuload"
GENERATED = ("docs/project/", "docs/reference/")  # when the site is built
DOCS = sorted(
    page for path in ROOT.glob("docs/**/*.md") if not (page := path.relative_to(ROOT).as_posix()).startswith(GENERATED)
)
PAGES = [
    "README.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/README.md",
    "examples/README.md", *DOCS,
]  # fmt: skip
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"(?:[\w.-]+/)+(?:[\w.-]+\.\w+)?|[\w-]+\.(?:md|py|toml|txt|yaml|yml)")
PATH_ROOTS = (ROOT, PACKAGE, PACKAGE / "stage", PACKAGE / "transforms", ROOT / "examples")
ELSEWHERE = {"corpus/", "photos/", "test/test_dataloader.py", "test_state_dict.py"}  # files of the user and of PyTorch


@pytest.mark.parametrize("page", PAGES)
def test_paths_on_a_page_exist(page):
    paths = {name for name in CODE.findall((ROOT / page).read_text()) if PATH.fullmatch(name)}
    assert {name for name in paths - ELSEWHERE if not any((folder / name).exists() for folder in PATH_ROOTS)} == set()


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_exist(page):
    text = (ROOT / page).read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in links if link and not (ROOT / page).parent.joinpath(link).exists()] == []


@pytest.mark.parametrize("page", [*PAGES, "notebooks/README.md"])
def test_code_blocks_have_a_language_and_one_cuda_version(page):
    fences = re.findall(r"^ *```([^\n]*)\n(.*?)^ *```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    for language, text in fences:
        assert language in ("python", "sh", "text", "yaml") or language.startswith("{"), text
        assert language != "python" or not re.match(r"(pip|gpuload|make|git) |\$ ", text), text
        extras = [extra for names in extras_of(text) for extra in names if re.search(r"cu\d\d$", extra)]
        assert len({extra[-4:] for extra in extras}) < 2, text


def test_changelog_has_this_version():
    assert f"\n## [{__version__}] - " in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_make_commands_on_a_page_exist(page):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = re.findall(r"(?:`|^    |^)make ([\w-]+)", (ROOT / page).read_text(), re.MULTILINE)
    assert set(commands) <= set(targets)


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
SOURCES = [path.relative_to(ROOT).as_posix() for path in sorted(PACKAGE.rglob("*.py"))]


def extras_of(text: str) -> list[list[str]]:
    """Return the extras of each ``pip install 'gpuload[a,b]'`` or ``'.[a,b]'`` of a text."""
    return [extras.split(",") for extras in re.findall(r"(?:gpuload|'\.)\[([a-z0-9]+(?:[,-][a-z0-9]+)*)\]", text)]


@pytest.mark.parametrize("file", [*PAGES, "notebooks/README.md", ".github/workflows/ci.yml", *SOURCES])
def test_extras_in_a_file_exist_and_have_one_cuda_version(file):
    for extras in extras_of((ROOT / file).read_text()):
        assert set(extras) - EXTRAS.keys() == set()
        assert len({extra[-4:] for extra in extras if re.fullmatch(r".*cu\d\d", extra)}) < 2, extras


def test_extras_with_nvidia_packages_name_their_cuda_version():
    for extra, (*_, requirement) in EXTRAS.items():
        if requirement.startswith("nvidia"):
            assert re.search(r"(?:cu|cuda)(\d\d)", requirement)[1] == re.fullmatch(r".*cu(\d\d)", extra)[1], extra
    assert extras_of("pip install 'gpuload[dali,cu13]', '.[cu13,dali-cu13]'") == [
        ["dali", "cu13"],
        ["cu13", "dali-cu13"],
    ]


def test_each_module_has_a_docstring():
    assert [path for path in SOURCES if ast.get_docstring(ast.parse((ROOT / path).read_text())) is None] == []


def test_architecture_has_at_most_200_lines():
    assert len(ARCHITECTURE.splitlines()) <= 200


def test_architecture_shows_attributes_and_code_that_exist():
    sources = [path.read_text() for path in PACKAGE.rglob("*.py")]
    classes = {
        node.name: node for text in sources for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)
    }
    for name, attribute in re.findall(r"`([A-Z]\w*[a-z])\.(\w+)`", ARCHITECTURE):
        assert re.search(rf"\b{attribute}\b", ast.unparse(classes[name])), f"{name}.{attribute}"
    blocks = re.findall(r"<!-- not run: a part of gpuload -->\n *```python\n(.*?)^ *```$", ARCHITECTURE, re.M | re.S)
    assert blocks, "no block is marked as a part of gpuload"
    for block in map(textwrap.dedent, blocks):
        assert any(block in text for text in sources), block


@pytest.mark.parametrize("workflow", ["ci", "docs", "nightly"])
def test_workflow_jobs_set_up_python_before_make_and_name_a_runner(workflow):
    text = (ROOT / ".github" / "workflows" / f"{workflow}.yml").read_text().split("\njobs:\n")[1]
    _, *parts = re.split(r"^  ([\w-]+):\n", text, flags=re.MULTILINE)
    jobs = dict(zip(parts[::2], parts[1::2], strict=True))
    commands = {name: re.search(r"run: (?:make|\.ci/run)", steps) for name, steps in jobs.items()}
    assert any(commands.values()), "no job runs make"
    for name, command in commands.items():
        if command is not None:
            assert "actions/setup-python@" in jobs[name][: command.start()], name
            assert re.search(r"runs-on: (?:ubuntu-|\[self-hosted, linux, x64)", jobs[name]), name


def test_pre_commit_uses_the_ruff_of_constraints_txt():
    pinned = re.search(r"^ruff==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    hooks = re.findall(r"ruff==[\d.]+", (ROOT / ".pre-commit-config.yaml").read_text())
    assert pinned is not None
    assert set(hooks) == {pinned[0]}
