"""The benchmark of the block shuffle: the figures of a full shuffle and of blocks."""

from __future__ import annotations

import pytest

from benchmarks import shuffle
from gpuload.order.blocks import BlockShuffle


@pytest.mark.slow
def test_measure_order_gives_the_expected_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffle, "SAMPLES", 64_000)
    full, blocks = shuffle.measure_order(None), shuffle.measure_order(BlockShuffle(block=64, window=16))
    assert full["classes"] == pytest.approx(1000 * (1 - 0.999**256), rel=0.02)  # of 1000 classes, in a batch of 256
    assert full["effective batch"] == pytest.approx(256, rel=0.15)
    assert blocks["classes"] == pytest.approx(17, rel=0.2)  # a class is a block; a batch may span two windows
    assert blocks["effective batch"] == pytest.approx(16, rel=0.2)
    assert blocks["same block"] == pytest.approx((64 - 1) / (64 * 16 - 1), rel=0.05)
    table = shuffle.format_results({None: full, (64, 16): blocks})
    assert "| full shuffle |  | 64,000 |" in table
    assert "| 64 | 16 | 1,024 |" in table
