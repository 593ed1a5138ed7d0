"""Batches on a GPU: the same as on the CPU, and as any workers make them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.labelled_images import Pictures

import gpuload as gl
from gpuload import transforms as T

pytestmark = pytest.mark.cuda

RECIPE = (T.RandomResizedCrop(64), T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4, 0.4, 0.1))
NORMALIZE = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def test_batches_are_those_of_the_cpu_within_what_hue_makes_of_a_level(jpeg_folder):
    def run(device):
        options = {"batch_size": 16, "shuffle": True, "transforms": RECIPE, "num_workers": 2, "seed": 1}
        with gl.Loader(gl.ImageFolder(jpeg_folder), device=device, **options) as loader:
            return [(images.cpu(), labels.cpu(), images.device.type) for images, labels in loader]

    for (images, labels, device), (images_, labels_, _) in zip(run("cuda"), run("cpu"), strict=True):
        assert device == "cuda"
        assert torch.equal(labels, labels_)
        difference = (images.int() - images_.int()).abs()
        assert difference.max() <= 9
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
        assert all(torch.equal(a, b) for a, b in zip(run(workers, chunk), expected, strict=True))


def test_everything_of_a_batch_is_on_the_device():
    with gl.Loader(Pictures(20), 8, transforms=RECIPE, num_workers=1, device="cuda", info=True) as loader:
        (images, labels), info = next(iter(loader))
    assert {t.device.type for t in (images, labels, info.positions, info.indices, info.valid)} == {"cuda"}


@pytest.mark.filterwarnings("ignore:.*(Sparse|nested tensor).*:UserWarning")
@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "jagged"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_fn_may_return_tensors_of_any_layout(layout, workers):
    def collate_fn(samples):
        import torch

        labels = [label for _, label in samples]
        if layout == "jagged":
            return torch.nested.nested_tensor([torch.full((n + 1,), n) for n in labels], layout=torch.jagged)
        dense = torch.eye(8)[labels]
        return dense.to_sparse() if layout == "sparse_coo" else dense.to_sparse_csr()

    with gl.Loader(Pictures(32), 4, collate_fn=collate_fn, num_workers=workers, device="cuda") as loader:
        for step, found in enumerate(loader):
            assert found.device.type == "cuda"
            labels = [(4 * step + row) % 7 for row in range(4)]
            if layout == "jagged":
                assert [row.tolist() for row in found.unbind()] == [[n] * (n + 1) for n in labels]
            else:
                assert torch.equal(found.to_dense().cpu(), torch.eye(8)[labels])


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_samples_are_skipped_and_replaced(on_error):
    bad = {3, 4, 5, 17}
    faults = gl.Faults(on_error=on_error, max_error_rate=1.0)
    options = {"transforms": RECIPE, "num_workers": 1, "faults": faults, "info": True}
    with pytest.warns(RuntimeWarning), gl.Loader(Pictures(24, bad), 6, device="cuda", **options) as loader:
        positions = np.concatenate([info.positions.cpu() for _, info in loader]).tolist()
    missing = set(range(24)) - set(positions)
    assert missing == (bad if on_error == "skip" else set())


def test_a_ring_smaller_than_a_batch():
    def run(device, **options):
        with gl.Loader(Pictures(64), 32, transforms=RECIPE, num_workers=1, device=device, **options) as loader:
            return [images.cpu() for images, _ in loader]

    expected = run("cuda")
    found = run("cuda", ring_bytes=2 << 16, chunk_size=4)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_ten_broken_off_epochs_leave_no_memory_on_the_device():
    with gl.Loader(Pictures(48), 4, transforms=RECIPE, num_workers=2, device="cuda") as loader:
        used = []
        for _ in range(10):
            for step, _ in enumerate(loader):
                if step == 5:
                    break
            torch.cuda.synchronize()
            used.append(torch.cuda.memory_allocated())
        assert used[-1] <= used[0] + (1 << 20)
