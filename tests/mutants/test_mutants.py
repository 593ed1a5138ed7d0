"""The patches still apply, and name a file of tests. `python tests/mutants/run.py` reports which tests notice them."""

from __future__ import annotations

import subprocess

import pytest
from mutants.run import PATCHES, ROOT, apply, changed_module, noticing_file


@pytest.mark.parametrize("name", PATCHES)
def test_patch_of_a_mutant_applies_to_gpuload_and_names_a_file_of_tests(name):
    try:
        apply(name, ROOT, "--check")
    except subprocess.CalledProcessError as error:
        pytest.fail(
            f"{PATCHES[name]} no longer applies: adapt it, or break the same behavior elsewhere\n{error.stderr}"
        )
    assert changed_module(name).parts[0] == "gpuload"
    assert (ROOT / noticing_file(name)).is_file()


def test_patches_are_found():
    assert len(PATCHES) >= 80, "fewer patches than expected: were some lost?"
