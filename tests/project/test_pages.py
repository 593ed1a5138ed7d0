"""What pages name is there: files, links, commands, packages; and each module says what it is."""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from pathlib import Path

import pytest
from helpers.package_layers import LAYERS, PACKAGE

from gpuload import __version__

ROOT = Path(__file__).parents[2]
MADE = ("docs/project/", "docs/reference/")  # by building the site
DOCS = sorted(
    page for path in ROOT.glob("docs/**/*.md") if not (page := path.relative_to(ROOT).as_posix()).startswith(MADE)
)
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "RELEASING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
    "examples/README.md",
    *DOCS,
]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"(?:[\w.-]+/)+(?:[\w.-]+\.\w+)?|[\w-]+\.(?:md|py|toml|txt|yaml|yml)")
PLACES = (ROOT, PACKAGE, PACKAGE / "stage", PACKAGE / "transforms", ROOT / "examples")  # that paths on pages begin at
ELSEWHERE = {"corpus/", "photos/", "test/test_dataloader.py", "test_state_dict.py"}  # the user's, and PyTorch's


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page):
    named = {path for path in CODE.findall((ROOT / page).read_text()) if PATH.fullmatch(path)}
    assert {path for path in named - ELSEWHERE if not any((place / path).exists() for place in PLACES)} == set()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in links if link and not (ROOT / page).parent.joinpath(link).exists()] == []


@pytest.mark.parametrize("page", [*PAGES, "notebooks/README.md"])
def test_each_block_says_what_it_is_and_is_for_one_cuda(page):
    fences = re.findall(r"^ *```([^\n]*)\n(.*?)^ *```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    for language, text in fences:
        assert language in ("python", "sh", "text", "yaml") or language.startswith("{"), text
        assert language != "python" or not re.match(r"(pip|gpuload|make|git) |\$ ", text), text
        extras = [extra for named in extras_of(text) for extra in named if re.search(r"cu\d\d$", extra)]
        assert len({extra[-4:] for extra in extras}) < 2, text


def test_the_changelog_has_this_version():
    assert f"\n## [{__version__}] - " in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_make_exist(page):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"(?:`|^    |^)make ([\w-]+)", (ROOT / page).read_text(), re.MULTILINE)
    assert set(named) <= set(targets)


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
SOURCES = [path.relative_to(ROOT).as_posix() for path in sorted(PACKAGE.rglob("*.py"))]


def extras_of(text: str) -> list[list[str]]:
    """The extras that each ``pip install 'gpuload[a,b]'`` or ``'.[a,b]'`` of a text names."""
    return [found.split(",") for found in re.findall(r"(?:gpuload|'\.)\[([a-z0-9]+(?:[,-][a-z0-9]+)*)\]", text)]


@pytest.mark.parametrize("file", [*PAGES, "notebooks/README.md", ".github/workflows/ci.yml", *SOURCES])
def test_extras_that_a_file_names_exist_and_are_for_one_cuda(file):
    for extras in extras_of((ROOT / file).read_text()):
        assert set(extras) - EXTRAS.keys() == set()
        assert len({extra[-4:] for extra in extras if re.fullmatch(r".*cu\d\d", extra)}) < 2, extras


def test_each_of_nvidias_extras_says_for_which_cuda_it_is():
    for extra, (*_, requirement) in EXTRAS.items():
        if requirement.startswith("nvidia"):
            assert re.search(r"(?:cu|cuda)(\d\d)", requirement)[1] == re.fullmatch(r".*cu(\d\d)", extra)[1], extra
    assert extras_of("pip install 'gpuload[dali,cu13]', '.[cu13,dali-cu13]'") == [
        ["dali", "cu13"],
        ["cu13", "dali-cu13"],
    ]


def test_layers_in_architecture_md_are_those_that_are_tested():
    table = ARCHITECTURE.split("| package |")[1].split("\n\n")[0]
    rows = [CODE.findall(row.split("|")[1]) for row in table.splitlines()[2:]]
    assert [tuple(name.removesuffix("/").removesuffix(".py") for name in row) for row in rows] == list(LAYERS)


def test_each_module_says_what_it_is():
    assert [path for path in SOURCES if ast.get_docstring(ast.parse((ROOT / path).read_text())) is None] == []


def test_the_architecture_is_short():
    assert len(ARCHITECTURE.splitlines()) <= 200


def test_the_architecture_names_what_is_in_the_code():
    sources = [path.read_text() for path in PACKAGE.rglob("*.py")]
    classes = {
        node.name: node for text in sources for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)
    }
    for name, attribute in re.findall(r"`([A-Z]\w*[a-z])\.(\w+)`", ARCHITECTURE):
        assert re.search(rf"\b{attribute}\b", ast.unparse(classes[name])), f"{name}.{attribute}"
    blocks = re.findall(r"<!-- not run: a part of gpuload -->\n *```python\n(.*?)^ *```$", ARCHITECTURE, re.M | re.S)
    assert blocks
    for block in map(textwrap.dedent, blocks):
        assert any(block in text for text in sources), block


@pytest.mark.parametrize("workflow", ["ci", "docs", "nightly"])
def test_each_job_that_runs_make_sets_up_python_first_and_names_its_runner(workflow):
    text = (ROOT / ".github" / "workflows" / f"{workflow}.yml").read_text().split("\njobs:\n")[1]
    _, *parts = re.split(r"^  ([\w-]+):\n", text, flags=re.MULTILINE)
    jobs = dict(zip(parts[::2], parts[1::2], strict=True))
    commands = {name: re.search(r"run: (?:make|\.ci/run)", steps) for name, steps in jobs.items()}
    assert any(commands.values())
    for name, command in commands.items():
        if command is not None:
            assert "actions/setup-python@" in jobs[name][: command.start()], name
            assert re.search(r"runs-on: (?:ubuntu-|\[self-hosted, linux, x64)", jobs[name]), name


def test_hooks_use_the_ruff_that_is_tested():
    pinned = re.search(r"^ruff==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    hooks = re.findall(r"ruff==[\d.]+", (ROOT / ".pre-commit-config.yaml").read_text())
    assert pinned is not None
    assert set(hooks) == {pinned[0]}
