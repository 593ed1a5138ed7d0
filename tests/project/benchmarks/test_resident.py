"""The benchmark of a dataset that stays: each way gives its rates."""

from __future__ import annotations

import pytest

from benchmarks.resident import measure


@pytest.mark.processes
def test_all_ways_are_measured():
    found = measure(samples=80, batch_size=16, device="cpu", rounds=2)
    for name in ("images_per_s", "stage", "uncached"):
        assert len(found[name]) == 2
        assert min(found[name]) > 0
    assert found["share"] > 0
    assert found["resident_bytes"] == 80 * 32 * 32 * 3
