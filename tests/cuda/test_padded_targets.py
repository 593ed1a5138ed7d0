"""`gl.Augment` with padded boxes and keypoints on a GPU: the values of the CPU, without a wait of the host."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from helpers.augment_batches import image_batch
from helpers.padded_batches import CHAINS, as_lists, assert_equal_targets, make_padded

import gpuload as gl
from gpuload import transforms as T

pytestmark = pytest.mark.cuda

COUNT = 6
CUDA_0 = torch.device("cuda", 0)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize(("box_format", "dtype"), [("xyxy", np.float32), ("cxcywh", np.float32), ("xywh", np.int64)])
@pytest.mark.filterwarnings("ignore:.*lie outside their image")
def test_padded_targets_on_the_device_equal_those_of_the_cpu(name, box_format, dtype):
    targets, augment = make_padded(COUNT, box_format, dtype, "cuda"), gl.Augment(CHAINS[name], ragged="list")
    _, padded = augment(image_batch(COUNT).to(CUDA_0), targets, positions=range(COUNT))
    _, lists = augment(image_batch(COUNT), as_lists(targets), positions=range(COUNT))
    assert {padded["boxes"].array.device, padded["boxes"].valid.device, padded["points"].array.device} == {CUDA_0}
    assert_equal_targets(padded, lists, steps=4)


@pytest.mark.parametrize("name", CHAINS)
def test_padded_targets_never_make_the_host_wait(name):
    targets, augment, images = make_padded(COUNT, device="cuda"), gl.Augment(CHAINS[name], ragged="list"), image_batch()
    targets["points"] = gl.Keypoints(targets["points"].array, pairs=[(0, 2)], valid=targets["points"].valid)
    targets["visibility"] = torch.ones(COUNT, 5, 3, device=CUDA_0)
    images, masks = images.to(CUDA_0), gl.Mask(torch.zeros(COUNT, 5, 40, 56, dtype=torch.bool, device=CUDA_0))
    batch = {**targets, "masks": masks}
    augment(images, batch)  # creates the stage
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        augment(images, batch)
        augment(images, make_padded(COUNT))  # targets in pageable memory of the host
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_padded_boxes_of_a_loader_are_on_its_device():
    dataset = [
        (gl.Image(np.zeros((40, 50, 3), np.uint8)), {"boxes": gl.Boxes(np.ones((n, 4))), "labels": np.arange(n)})
        for n in range(4)
    ]
    options = {"batch_size": 4, "boxes": "padded", "num_workers": 0, "transforms": [T.RandomHorizontalFlip(1.0)]}
    batches = []
    for device in ("cuda", "cpu"):
        with gl.Loader(dataset, device=device, **options) as loader:
            [(images, target)] = list(loader)
        tensors = images, target["boxes"].array, target["boxes"].valid, target["labels"]
        assert {tensor.device.type for tensor in tensors} == {device}
        batches.append([tensor.cpu() for tensor in tensors])
    assert all(map(torch.equal, *batches))


def test_lengths_on_the_device_become_a_mask_without_a_wait():
    lengths, boxes = torch.tensor([0, 2], device=CUDA_0), torch.zeros(2, 3, 4, device=CUDA_0)
    try:
        torch.cuda.set_sync_debug_mode("error")
        valid = gl.Boxes(boxes, valid=lengths).valid
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert valid.device == CUDA_0
    assert valid.tolist() == [[False] * 3, [True, True, False]]


def test_boxes_of_one_image_on_the_device_raise_an_error_with_a_remedy():
    text = "Boxes() takes the numbers of one image on the CPU, got torch.float32 of shape (1, 4) on cuda:0; on a device"
    with pytest.raises(ValueError, match=re.escape(text)):
        gl.Boxes(torch.zeros(1, 4, device=CUDA_0))


def test_keypoints_on_the_device_are_returned_as_a_tensor():
    points = torch.ones(COUNT, 3, 2, device=CUDA_0)
    _, moved = gl.Augment([T.RandomHorizontalFlip(1.0)])(image_batch(COUNT).to(CUDA_0), gl.Keypoints(points))
    assert moved.device == CUDA_0
    assert moved.tolist() == [[[54, 1]] * 3] * COUNT


def test_boxes_move_to_another_device_with_their_mask():
    boxes = gl.Boxes(np.zeros((2, 3, 4)), valid=[1, 2]).to("cuda", non_blocking=True)
    assert (boxes.array.device, boxes.valid.device) == (CUDA_0, CUDA_0)
