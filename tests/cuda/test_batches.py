"""Batches on a GPU: the same as on the CPU, for any number of workers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.labelled_images import CLASSES, Pictures

import gpuload as gl
from gpuload import transforms as T

pytestmark = pytest.mark.cuda

RECIPE = (T.RandomResizedCrop(64), T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4, 0.4, 0.1))
NORMALIZE = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def test_batches_of_a_gpu_equal_those_of_the_cpu_up_to_the_rounding_of_hue(jpeg_folder):
    def run(device):
        options = {"batch_size": 16, "shuffle": True, "transforms": RECIPE, "num_workers": 2, "seed": 1}
        with gl.Loader(gl.ImageFolder(jpeg_folder), device=device, **options) as loader:
            return [(images.cpu(), labels.cpu(), images.device.type) for images, labels in loader]

    for (images, labels, device), (expected_images, expected_labels, _) in zip(run("cuda"), run("cpu"), strict=True):
        assert device == "cuda"
        assert torch.equal(labels, expected_labels)
        difference = (images.int() - expected_images.int()).abs()
        assert difference.max() <= 9  # levels: the kernel and the reference round hues differently
        assert difference.float().mean() <= 0.1


def test_batches_are_equal_to_the_last_bit_with_any_workers_and_chunks(jpeg_folder):
    def run(workers, chunk):
        options = {"batch_size": 20, "shuffle": True, "transforms": [*RECIPE, NORMALIZE]}
        with gl.Loader(
            gl.ImageFolder(jpeg_folder), num_workers=workers, chunk_size=chunk, device="cuda", **options
        ) as loader:
            return [images.cpu() for images, _ in loader]

    expected = run(0, 16)
    for workers, chunk in ((1, 5), (4, 1), (2, 16)):
        for step, (images, expected_images) in enumerate(zip(run(workers, chunk), expected, strict=True)):
            assert torch.equal(images, expected_images), (workers, chunk, step)


def test_batches_of_changing_sizes_are_equal_to_the_last_bit_to_those_of_one_size():
    def run(size, workers):
        chain = [T.RandomResizedCrop(size), *RECIPE[1:], NORMALIZE]
        options = {"transforms": chain, "shuffle": True, "num_workers": workers, "device": "cuda", "dtype": "float16"}
        with gl.Loader(Pictures(16), 2, **options) as loader:
            return [images.cpu() for images, _ in loader]

    sizes = [(24, 24), (17, 12), (32, 20)]
    expected = {size: run(size, 0) for size in sizes}
    for workers in (0, 2):
        batches = run(T.by_batch(sizes), workers)
        shapes = [tuple(images.shape[2:]) for images in batches]
        assert set(shapes) == set(sizes)
        for step, (images, shape) in enumerate(zip(batches, shapes, strict=True)):
            assert torch.equal(images, expected[shape][step])


def test_images_labels_and_info_of_a_batch_are_on_the_device():
    with gl.Loader(Pictures(20), 8, transforms=RECIPE, num_workers=1, device="cuda", info=True) as loader:
        (images, labels), info = next(iter(loader))
    assert {t.device.type for t in (images, labels, info.positions, info.indices, info.valid)} == {"cuda"}


@pytest.mark.filterwarnings("ignore:.*(Sparse|nested tensor).*:UserWarning")
@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "jagged"])
@pytest.mark.parametrize("workers", [0, 1])
def test_sparse_and_jagged_tensors_of_a_collate_fn_come_to_the_device(layout, workers):
    def collate_fn(samples):
        import torch

        labels = [label for _, label in samples]
        if layout == "jagged":
            return torch.nested.nested_tensor([torch.full((n + 1,), n) for n in labels], layout=torch.jagged)
        dense = torch.eye(8)[labels]
        return dense.to_sparse() if layout == "sparse_coo" else dense.to_sparse_csr()

    with gl.Loader(Pictures(32), 4, collate_fn=collate_fn, num_workers=workers, device="cuda") as loader:
        for step, batch in enumerate(loader):
            assert batch.device.type == "cuda"
            labels = [(4 * step + row) % CLASSES for row in range(4)]
            if layout == "jagged":
                assert [row.tolist() for row in batch.unbind()] == [[n] * (n + 1) for n in labels]
            else:
                assert torch.equal(batch.to_dense().cpu(), torch.eye(8)[labels])


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_broken_samples_are_skipped_or_replaced_on_a_gpu(on_error):
    broken = {3, 4, 5, 17}
    faults = gl.Faults(on_error=on_error, max_error_rate=1.0)
    options = {"transforms": RECIPE, "num_workers": 1, "faults": faults, "info": True}
    with pytest.warns(RuntimeWarning), gl.Loader(Pictures(24, broken), 6, device="cuda", **options) as loader:
        positions = np.concatenate([info.positions.cpu() for _, info in loader]).tolist()
    assert set(range(24)) - set(positions) == (broken if on_error == "skip" else set())


def test_ring_smaller_than_a_batch_gives_the_same_batches():
    def run(**options):
        with gl.Loader(Pictures(64), 32, transforms=RECIPE, num_workers=1, device="cuda", **options) as loader:
            return [images.cpu() for images, _ in loader]

    expected = run()
    # the ring has two slots, of at least 64 KiB each, for the eight chunks of a batch
    with_small_ring = run(ring_bytes=2 * (64 << 10), chunk_size=4)
    for step, (images, expected_images) in enumerate(zip(with_small_ring, expected, strict=True)):
        assert torch.equal(images, expected_images), step


def test_ten_interrupted_epochs_leave_no_memory_on_the_device():
    with gl.Loader(Pictures(48), 4, transforms=RECIPE, num_workers=2, device="cuda") as loader:
        allocated_bytes = []
        for _ in range(10):
            for step, _ in enumerate(loader):
                if step == 5:
                    break
            torch.cuda.synchronize()
            allocated_bytes.append(torch.cuda.memory_allocated())
        assert allocated_bytes[-1] <= allocated_bytes[0] + (1 << 20)
