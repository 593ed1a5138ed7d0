"""The benchmark of a dataset that stays on the device measures each method."""

from __future__ import annotations

import pytest

from benchmarks.resident import measure


@pytest.mark.processes
def test_resident_benchmark_measures_each_method():
    figures = measure(samples=80, batch_size=16, device="cpu", rounds=2)
    for name in ("images_per_s", "stage", "uncached"):
        assert len(figures[name]) == 2
        assert min(figures[name]) > 0
    assert figures["share"] > 0
    assert figures["resident_bytes"] == 80 * 32 * 32 * 3
