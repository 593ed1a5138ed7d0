"""Batches and rings are freed as soon as they are deleted, without the garbage collector."""

from __future__ import annotations

import gc
import os
import weakref

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

import gpuload as gl
from gpuload import transforms as T

pytestmark = pytest.mark.processes


class SamplesWithTargets:
    def __len__(self):
        return 24

    def __getitem__(self, i):
        boxes = gl.Boxes(np.array([[1.0, 2.0, 20.0, 30.0]], np.float32))
        image = gl.Image(np.full((40, 50, 3), i, np.uint8))
        return image, np.ones((30, 30), np.float32), gl.Mask(np.ones((40, 50), np.uint8)), {"boxes": boxes, "number": i}


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def mapped_rings() -> list[str]:
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # the descriptor of the listing itself
            continue
    return [link for link in links if "gpuload-ring" in link]


def first_image(samples):
    return samples[0][0], [sample[1] for sample in samples]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("collate_fn", [None, gl.pad_collate, first_image])
def test_batches_and_rings_are_freed_without_the_garbage_collector(no_collector, num_workers, collate_fn):
    transforms = [T.RandomResizedCrop(24), T.RandomHorizontalFlip(), T.ColorJitter(0.4), T.ToDtype("float32", True)]
    options = {"transforms": transforms, "num_workers": num_workers, "collate_fn": collate_fn, "device": "cpu"}
    ring_count = len(mapped_rings())
    with gl.Loader(SamplesWithTargets(), 4, **options) as loader:
        references = [
            weakref.ref(leaf) for batch in loader for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)
        ]
    assert len(references) >= 6  # a tensor or more of each of the six batches
    assert [reference for reference in references if reference() is not None] == []
    assert len(mapped_rings()) == ring_count
