"""Workers and page-locked slots on the NUMA node of the GPU, and batches of an `ArrayFile` on a GPU."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import lacking

import gpuload as gl
from gpuload import transforms as T
from gpuload.loader.limits import count_numa_nodes, find_numa_node, find_placement, parse_cpu_list
from gpuload.stage import device as devices

pytestmark = pytest.mark.cuda


class AllowedCpus:
    """A dataset of images, each with a mask of the CPUs that its worker may use."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        allowed = np.zeros(4096, np.bool_)  # more CPUs than a machine with GPUs has
        allowed[list(os.sched_getaffinity(0))] = True
        return np.full((64, 64, 3), index, np.uint8), allowed


@lacking.skip_on_fake_cuda("a PCI device in /sys")
def test_pci_address_of_the_gpu_is_known_to_the_system():
    address = devices.pci_address(devices.current_device())
    assert address is not None
    assert re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.0", address)
    if Path("/sys/bus/pci/devices").is_dir():
        assert Path("/sys/bus/pci/devices", address).is_dir()


def test_workers_and_slots_are_on_the_numa_node_of_the_gpu():
    device = devices.current_device()
    address = devices.pci_address(device)
    assert address is not None
    node, cpus = find_numa_node(address)
    if count_numa_nodes() < 2 or not find_placement(address, device=str(device), ranks=1).cpus_for(1):
        lacking.skip("a GPU near some CPUs")
    with gl.Loader(AllowedCpus(), 8, num_workers=1, device=device, transforms=[T.CenterCrop(32)]) as loader:
        allowed = torch.cat([cpu_masks for _, cpu_masks in loader]).any(0)
        usable = parse_cpu_list(cpus) & os.sched_getaffinity(0)
        assert set(allowed.nonzero().flatten().tolist()) == usable
        maps = Path("/proc/self/numa_maps").read_text().splitlines()
        pages_by_node: dict[int, int] = {}
        for line in maps:
            if "gpuload-ring" in line:
                for page_node, count in re.findall(r"N(\d+)=(\d+)", line):
                    pages_by_node[int(page_node)] = pages_by_node.get(int(page_node), 0) + int(count)
        assert pages_by_node.get(node, 0) > 0.9 * sum(pages_by_node.values()), f"GPU on node {node}: {pages_by_node}"
        assert len(os.sched_getaffinity(0)) > len(usable), "the main process must keep all of its CPUs"


@pytest.mark.parametrize("transforms", [[], [T.RandomCrop(48), T.RandomHorizontalFlip()]], ids=["whole", "crops"])
def test_array_file_gives_the_same_batches_on_the_gpu_and_the_cpu(tmp_path, transforms: Any):
    path = tmp_path / "images.npy"
    np.save(path, np.random.default_rng(0).integers(0, 256, (600, 64, 64, 3), np.uint8))
    options: dict[str, Any] = {"batch_size": 128, "shuffle": True, "transforms": transforms, "num_workers": 2}
    batches = {}
    for device in ("cpu", "cuda"):
        with gl.Loader(gl.ArrayFile(path, labels=range(600)), device=device, **options) as loader:
            batches[device] = [(images.cpu(), labels.tolist()) for images, labels in loader]
    for (images, labels), (expected_images, expected_labels) in zip(batches["cuda"], batches["cpu"], strict=True):
        assert images.equal(expected_images)
        assert labels == expected_labels
