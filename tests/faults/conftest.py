"""Fixtures for the tests of faults: programs that tests can kill."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import pytest
from faults.programs import Program, Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture
def start_program(zygote, tmp_path, jpeg_folder):
    """Return a function that starts a script. The script's globals are those of `zygote.py`, `tmp` (a folder for its
    files) and `folder` (JPEGs)."""
    programs: list[Program] = []

    def start_program(code: str) -> Program:
        head = f"tmp, folder = {str(tmp_path)!r}, {str(jpeg_folder)!r}\n"
        programs.append(Program(zygote, tmp_path, head + textwrap.dedent(code)))
        return programs[-1]

    yield start_program
    for program in programs:
        program.kill()


@pytest.fixture
def run_without_errors(start_program):
    """Return a function that runs a script and checks that it exits with 0, without errors and leaving no process."""

    def run_without_errors(code: str) -> None:
        exit_code, error = start_program(code).end()
        assert error == "", error
        assert exit_code == 0

    return run_without_errors
