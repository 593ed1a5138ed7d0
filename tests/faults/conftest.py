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
def start(zygote, tmp_path, jpeg_folder):
    """Start a script. Its globals are those of `zygote.py`, `tmp` (a folder for its files) and `folder` (JPEGs)."""
    started: list[Program] = []

    def start(code: str) -> Program:
        head = f"tmp, folder = {str(tmp_path)!r}, {str(jpeg_folder)!r}\n"
        started.append(Program(zygote, tmp_path, head + textwrap.dedent(code)))
        return started[-1]

    yield start
    for program in started:
        program.kill()


@pytest.fixture
def succeed(start):
    """Run a script and check that it exits with 0, prints nothing to stderr and leaves no process."""

    def succeed(code: str) -> None:
        exit_code, error = start(code).end()
        assert error == "", error
        assert exit_code == 0

    return succeed
