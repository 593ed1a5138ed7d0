"""The benchmark of a dataset that stays on the GPU."""

from __future__ import annotations

import pytest
from helpers import lacking

from benchmarks.resident import measure

pytestmark = pytest.mark.cuda


@pytest.mark.slow
def test_resident_benchmark_measures_the_memory_and_rates():
    count = 256 if lacking.IS_FAKE else 4096  # kernels are slow on the fake runtime, which interprets them
    measured = measure(count, count // 8, "cuda", 1)
    assert measured["resident_bytes"] == count * 3 * 32 * 32
    assert min(measured["images_per_s"]) > 0
