"""The public face changes on purpose only: names and signatures are those that were recorded."""

from __future__ import annotations

import difflib

from public_api import RECORDED, public_api


def test_public_names_and_signatures_are_those_in_public_api_txt():
    recorded, current = RECORDED.read_text().splitlines(), public_api().splitlines()
    changes = list(difflib.unified_diff(recorded, current, "recorded", "found", lineterm="", n=0))
    assert not changes, "run `make api` if this is meant:\n" + "\n".join(changes)
