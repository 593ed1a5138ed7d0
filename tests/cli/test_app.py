"""All commands: help with examples, completion, and how they are started."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from gpuload.cli.app import app

COMMANDS = sorted(typer.main.get_command(app).commands)  # pyright: ignore[reportAttributeAccessIssue]


def helped(*arguments: str, width: int = 80) -> str:
    done = CliRunner().invoke(app, [*arguments, "--help"], env={"COLUMNS": str(width), "NO_COLOR": "1"})
    assert done.exit_code == 0
    return done.output


def test_there_are_commands() -> None:
    assert {"bench", "demo", "doctor", "index", "pack", "verify"} <= set(COMMANDS)
    text = helped()
    assert [name for name in COMMANDS if not re.search(rf"│ {name} ", text)] == []
    assert "--install-completion" in text


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_and_exit_statuses_and_fits(command: str, width: int) -> None:
    text = helped(command, width=width)
    assert max(map(len, text.splitlines())) <= width
    examples = text.split("Examples:")[1]
    assert f" gpuload {command}" in examples
    assert "Exit status: 0" in " ".join(text.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_no_line_of_help_ends_early(command: str) -> None:
    """typer keeps a docstring's line breaks after the first paragraph: each further one is a line of its own there."""
    help = typer.main.get_command(app).commands[command].help or ""  # pyright: ignore[reportAttributeAccessIssue]
    assert [one for one in help.split("\n\n")[1:] if "\n" in one.strip()] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_name_options_that_there_are(command: str) -> None:
    text = helped(command, width=200)
    before, examples = text.split("Examples:")
    used = set(re.findall(r"--[\w-]+", examples))
    assert used <= set(re.findall(r"--[\w-]+", before))


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
def test_a_command_line_that_makes_no_sense_ends_with_2(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Usage: " in done.stderr


def test_completion_is_there() -> None:
    asked = {"_GPULOAD_COMPLETE": "complete_bash", "COMP_WORDS": "gpuload do", "COMP_CWORD": "1"}
    done = CliRunner().invoke(app, [], env=asked, prog_name="gpuload")
    assert done.stdout.split() == ["doctor"]


@pytest.mark.processes
def test_python_m_gpuload_is_light() -> None:
    code = (
        "import sys, runpy; sys.argv = ['gpuload', '--version']\n"
        "try: runpy.run_module('gpuload', run_name='__main__')\n"
        "except SystemExit as ended: print('torch' in sys.modules, ended.code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[1:] == ["False 0"], done.stderr


def test_one_thing_has_one_name_and_one_help_in_all_commands() -> None:
    commands = typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    meanings: dict[str, set[str]] = {}
    for command in commands.values():
        for parameter in command.params:
            if parameter.name in ("as_json", "device", "batch_size", "rounds", "recipe", "fields", "image", "target"):
                meanings.setdefault(parameter.name, set()).add(f"{parameter.opts} {parameter.help}")
    assert len(meanings) == 8
    assert {name for name, texts in meanings.items() if len(texts) > 1} == set()
    assert {"doctor", "bench", "inspect"} <= {
        name for name, command in commands.items() if any("--json" in one.opts for one in command.params)
    }
