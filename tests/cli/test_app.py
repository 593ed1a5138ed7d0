"""All commands: their help with examples, completion, wrong arguments, and shared options."""

from __future__ import annotations

import re

import pytest
import typer
from helpers.programs import run_python
from typer.testing import CliRunner

import gpuload
from gpuload.cli.app import app

COMMANDS = typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
NAMES = sorted(COMMANDS)


def help_text(*arguments: str, width: int = 80) -> str:
    result = CliRunner().invoke(app, [*arguments, "--help"], env={"COLUMNS": str(width), "NO_COLOR": "1"})
    assert result.exit_code == 0
    return result.output


def test_help_lists_all_commands_and_completion() -> None:
    assert {"bench", "demo", "doctor", "index", "pack", "verify"} <= set(NAMES)
    text = help_text()
    assert [name for name in NAMES if not re.search(rf"│ {name} ", text)] == []
    assert "--install-completion" in text


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize("command", NAMES)
def test_help_has_examples_and_exit_statuses_within_the_width(command: str, width: int) -> None:
    text = help_text(command, width=width)
    assert max(map(len, text.splitlines())) <= width
    _, examples = text.split("Examples:")
    assert f" gpuload {command}" in examples
    assert "Exit status: 0" in " ".join(text.split())


@pytest.mark.parametrize("command", NAMES)
def test_paragraphs_of_help_have_no_line_breaks(command: str) -> None:
    """After the first paragraph, typer prints each line of a docstring as a separate line."""
    text = COMMANDS[command].help or ""
    assert [paragraph for paragraph in text.split("\n\n")[1:] if "\n" in paragraph.strip()] == []


@pytest.mark.parametrize("command", NAMES)
def test_examples_use_only_options_of_the_command(command: str) -> None:
    text = help_text(command, width=200)
    options, examples = text.split("Examples:")
    used = set(re.findall(r"--[\w-]+", examples))
    assert used <= set(re.findall(r"--[\w-]+", options))


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench"],
        ["bench", "x", "--seconds", "0"],
        ["bench", "x", "--no-such"],
        ["pack", "x", "y", "--to", "tar", "--on-error", "replace"],
        ["x"],
    ],
)
def test_wrong_arguments_exit_with_status_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Usage: " in result.stderr


def test_completion_completes_a_command() -> None:
    environment = {"_GPULOAD_COMPLETE": "complete_bash", "COMP_WORDS": "gpuload do", "COMP_CWORD": "1"}
    assert CliRunner().invoke(app, [], env=environment, prog_name="gpuload").stdout.split() == ["doctor"]


@pytest.mark.processes
def test_python_m_gpuload_version_does_not_import_torch() -> None:
    code = (
        "import sys, runpy; sys.argv = ['gpuload', '--version']\n"
        "try: runpy.run_module('gpuload', run_name='__main__')\n"
        "except SystemExit as ended: print('torch' in sys.modules, ended.code)"
    )
    assert run_python(code)[0] == f"gpuload {gpuload.__version__}\nFalse 0\n"


def test_shared_options_have_one_name_and_one_help_in_all_commands() -> None:
    meanings: dict[str, set[str]] = {}
    for command in COMMANDS.values():
        for parameter in command.params:
            if parameter.name in ("as_json", "device", "batch_size", "rounds", "recipe", "fields", "image", "target"):
                meanings.setdefault(parameter.name, set()).add(f"{parameter.opts} {parameter.help}")
    assert len(meanings) == 8
    assert {name: texts for name, texts in meanings.items() if len(texts) > 1} == {}, "give both one name and one help"
    assert {"doctor", "bench", "inspect"} <= {
        name for name, command in COMMANDS.items() if any("--json" in parameter.opts for parameter in command.params)
    }
