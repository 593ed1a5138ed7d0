"""The benchmark of caches that are too small: the measured hit rate equals the expected rate."""

from __future__ import annotations

import pytest

from benchmarks import cache


@pytest.mark.slow
def test_measure_hit_rate_equals_the_expected_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SAMPLES", 600)
    monkeypatch.setattr(cache, "EPOCHS", 4)
    hit_rate, allowed_share = cache.measure_hit_rate(0.75)
    assert hit_rate == pytest.approx(cache.expected_hit_rate(0.75), abs=0.04)
    assert allowed_share == 1
    assert cache.measure_hit_rate(1.0) == (1.0, 1.0)
