"""`DeviceCached` on a GPU: pixels stay there, with the bits of batches that come from workers; and its rate."""

from __future__ import annotations

import lacking
import pytest
import torch

import gpuload as gl
from benchmarks.resident import measure
from gpuload import transforms as T
from gpuload.stage import device_cache

pytestmark = pytest.mark.cuda

RECIPE = (
    T.RandomResizedCrop(64),
    T.RandomHorizontalFlip(),
    T.ColorJitter(0.4, 0.4, 0.4, 0.1),
    T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
)


@pytest.mark.parametrize("small", [True, False], ids=["together", "one by one"])
@pytest.mark.parametrize("backend", ["torch", "fused"])
def test_batches_are_those_of_workers_to_the_last_bit(jpeg_folder, backend, small, monkeypatch):
    monkeypatch.setattr(device_cache, "SMALL_BYTES", 1 << 30 if small else 0)
    dataset, epochs = gl.ImageFolder(jpeg_folder), []
    for one in (dataset, gl.DeviceCached(dataset)):
        options = {"batch_size": 16, "shuffle": True, "transforms": RECIPE, "num_workers": 2, "backend": backend}
        with gl.Loader(one, device="cuda", **options) as loader:
            epochs.append([(images.cpu(), labels.cpu()) for _ in range(2) for images, labels in loader])
            stats = loader.stats()
    for (images, labels), (images_, labels_) in zip(*epochs, strict=True):
        assert torch.equal(images, images_)
        assert torch.equal(labels, labels_)
    assert (stats.num_workers, stats.pinned_bytes) == (0, 0)
    assert stats.resident_bytes > 0


def test_what_does_not_fit_is_refused_with_the_free_memory(jpeg_folder, monkeypatch):
    monkeypatch.setattr("gpuload.stage.device.Accelerator.free_bytes", lambda self: 100_000)
    loader = gl.Loader(gl.DeviceCached(gl.ImageFolder(jpeg_folder)), num_workers=0, device="cuda")
    with pytest.raises(gl.LimitError, match=r"of pixels on cuda:\d+ .* but 0\.1 MB are free on cuda:\d+"):
        iter(loader)


def test_the_memory_is_free_again_after_clear():
    free = torch.cuda.memory_allocated()
    cached = gl.DeviceCached([torch.zeros(3, 256, 256, dtype=torch.uint8)] * 500)
    with gl.Loader(cached, transforms=[T.CenterCrop(8)], num_workers=0, device="cuda") as loader:
        next(iter(loader))
        assert torch.cuda.memory_allocated() - free >= 500 * 3 * 256 * 256
    cached.clear()
    assert torch.cuda.memory_allocated() - free < 1 << 20


@pytest.mark.slow
def test_the_benchmark_runs_there():
    """What it reaches of the stage alone is for `python -m benchmarks.gpu`, row ``resident``."""
    count = 256 if lacking.IS_FAKE else 4096  # kernels are interpreted there
    found = measure(count, count // 8, "cuda", 1)
    assert found["resident_bytes"] == count * 3 * 32 * 32
    assert min(found["images_per_s"]) > 0
