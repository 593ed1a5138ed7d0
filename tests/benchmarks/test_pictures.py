"""The pictures of the documentation show what was recorded."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.pictures import INK, LOADERS, PICTURES, RESULTS, rates


@pytest.mark.parametrize("name", INK)
def test_the_plot_of_rates_has_the_medians_that_are_recorded(name):
    recorded = rates(json.loads(RESULTS.read_text()))
    shown = re.findall(r">([\d,]+)</text>", (PICTURES / name).read_text(encoding="utf-8"))
    assert sorted(shown) == sorted(f"{recorded[loader]:,.0f}" for loader in LOADERS)
