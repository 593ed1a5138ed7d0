"""The times that `stats()` measures by events on a device, and its page-locked memory."""

from __future__ import annotations

import pytest
import torch
from helpers.labelled_images import Pictures

import gpuload as gl
from gpuload import transforms as T

pytestmark = pytest.mark.cuda


def test_stats_time_copies_and_transforms_on_the_device():
    chain = [T.RandomResizedCrop(64), T.ColorJitter(0.4, 0.4, 0.4)]
    with gl.Loader(Pictures(320), 8, transforms=chain, num_workers=1, device="cuda") as loader:
        for images, _ in loader:
            images.float().sum()
        torch.cuda.synchronize()
        stats = loader.stats()
    assert stats.batches == 40
    for name in ("copy", "stage"):
        assert stats.part(name, "device").count == 40
        assert 0 < stats.part(name, "device").seconds < stats.seconds
    assert stats.stage.pinned_bytes == stats.ring.bytes > 0
    assert not stats.stage.pinning_refused
