"""The public face changes on purpose only: names and signatures are those that were recorded."""

from __future__ import annotations

import difflib

from public_api import RECORDED, public_api


def test_names_and_signatures_are_those_that_were_recorded():
    recorded, found = RECORDED.read_text().splitlines(), public_api().splitlines()
    changes = list(difflib.unified_diff(recorded, found, "recorded", "found", lineterm="", n=0))
    assert not changes, "run `make api` if this is meant:\n" + "\n".join(changes)
