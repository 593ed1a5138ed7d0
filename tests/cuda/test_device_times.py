"""What `stats()` says of a real device: its times, by events, and page-locked memory."""

from __future__ import annotations

import pytest
import torch
from helpers.labelled_images import Pictures

import gpuload as gl
from gpuload import transforms as T

pytestmark = pytest.mark.cuda


def test_copies_and_transforms_are_timed_on_the_device():
    chain = [T.RandomResizedCrop(64), T.ColorJitter(0.4, 0.4, 0.4)]
    with gl.Loader(Pictures(320), 8, transforms=chain, num_workers=1, device="cuda") as loader:
        for images, _ in loader:
            images.float().sum()
        torch.cuda.synchronize()
        found = loader.stats()
    assert found.batches == 40
    for name in ("copy", "stage"):
        assert found.part(name, "device").count == 40
        assert 0 < found.part(name, "device").seconds < found.seconds
    assert found.stage.pinned_bytes == found.ring.bytes > 0
    assert not found.stage.pinning_refused
