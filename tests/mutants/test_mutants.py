"""Each mutant still applies, and says what it breaks. `python tests/mutants/run.py` says which tests notice it."""

from __future__ import annotations

import subprocess

import pytest
from mutants.run import PATCHES, ROOT, apply, noticed_last, touched


@pytest.mark.parametrize("name", PATCHES)
def test_it_applies(name):
    try:
        apply(name, ROOT, "--check")
    except subprocess.CalledProcessError as error:
        pytest.fail(f"{PATCHES[name]} no longer applies: adapt it, or break the same thing elsewhere\n{error.stderr}")
    assert touched(name).parts[0] == "gpuload"
    assert (ROOT / noticed_last(name)).is_file()


def test_there_are_eighty():
    assert len(PATCHES) >= 80
