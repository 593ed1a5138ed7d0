"""Public names and signatures equal the record in public_api.txt."""

from __future__ import annotations

import difflib

from public_api import RECORDED, public_api


def test_public_names_and_signatures_equal_public_api_txt():
    recorded, current = RECORDED.read_text().splitlines(), public_api().splitlines()
    changes = list(difflib.unified_diff(recorded, current, "recorded", "found", lineterm="", n=0))
    text = "run `make api`, which writes tests/public_api.txt, if the change is intended:\n"
    assert not changes, text + "\n".join(changes)
