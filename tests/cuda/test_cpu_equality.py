"""Each kind of batch on a GPU equals that of the CPU, and does not make the host wait."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from chains.bounds import STEPS
from helpers import lacking
from torch.utils._pytree import tree_leaves

import gpuload as gl
from gpuload import transforms as T

pytestmark = pytest.mark.cuda

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NORMALIZE = T.Normalize(MEAN, STD)
CROP = T.RandomResizedCrop(48)
LEVEL = 1 / 255 / min(STD)  # in normalized images
LIGHT = [T.RandomGamma((50, 200), p=0.8), T.PlanckianJitter(p=0.8)]


def picture(number: int) -> np.ndarray:
    height, width = 60 + 7 * (number % 9), 80 + 5 * (number % 11)
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 3, y * 2, x + y + number], -1).astype(np.uint8)


def labelled(number: int) -> Any:
    return gl.Image(picture(number)), number % 7


def detected(number: int) -> Any:
    image = picture(number)
    boxes = np.array([[5.0, 6, 40, 30], [20, 10, 60, 50]])
    masks = np.stack([np.full(image.shape[:2], kind, np.uint8) for kind in (1, 2)])
    return gl.Image(image), {"boxes": gl.Boxes(boxes, "xyxy"), "labels": np.array([1, 2]), "masks": gl.Mask(masks)}


def segmented(number: int) -> Any:
    image = picture(number)
    return gl.Image(image), gl.Mask((image[:, :, 0] // 32).astype(np.int64))


def block(number: int) -> Any:
    return {"x": np.full((30, 20), number, np.float32), "y": number}


def stacked(samples: list[Any]) -> Any:
    images, labels = zip(*samples, strict=True)
    return {"images": torch.stack(images), "labels": torch.tensor(labels)}


HALF_PRECISION = {"dtype": "float16", "memory_format": "channels_last"}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "float16, channels_last": (labelled, {"transforms": [CROP, T.RandomHorizontalFlip(), NORMALIZE], **HALF_PRECISION}),
    "views": (labelled, {"transforms": [T.MultiView([[CROP], [T.Resize((32, 32))]]), NORMALIZE]}),
    "mixed": (labelled, {"transforms": [CROP, NORMALIZE, T.MixUp(num_classes=7)]}),
    "cut and mixed": (labelled, {"transforms": [CROP, NORMALIZE, T.CutMix(num_classes=7)]}),
    "detection": (detected, {"transforms": [T.RandomIoUCrop(), T.RandomHorizontalFlip()], "ragged": "list"}),
    "detection, padded": (detected, {"transforms": [T.RandomIoUCrop(), T.SanitizeBoundingBoxes()], "ragged": "pad"}),
    "segmentation": (segmented, {"transforms": [T.RandomCrop(40), T.RandomRotation(10), NORMALIZE]}),
    "segmentation, padded": (segmented, {"transforms": [T.RandomHorizontalFlip()], "ragged": "pad"}),
    "blocks": (block, {}),
    "collate_fn": (labelled, {"transforms": [CROP], "collate_fn": stacked}),
    "augmix": (labelled, {"transforms": [CROP, T.AugMix()], "backend": "torch"}),
    "erased": (labelled, {"transforms": [CROP, NORMALIZE, T.RandomErasing(0.8, value="random")]}),
    "blur": (labelled, {"transforms": [CROP, T.GaussianBlur(5)], "backend": "kornia"}),
    "light": (labelled, {"transforms": [T.RandomCrop(40), T.GaussianIllumination(p=0.8), *LIGHT, NORMALIZE]}),
    "robots": (
        labelled,
        {
            "transforms": [T.RandomCrop(40), *LIGHT, T.RandomShadow(p=0.8), T.MotionBlur(p=0.8), T.CLAHE(p=0.8)],
            "backend": "torch",
        },
    ),
    "motion": (
        labelled,
        {"transforms": [T.RandomCrop(40), T.MotionBlur(p=0.8), *LIGHT, T.CLAHE()], "backend": "kornia"},
    ),
    "maps": (labelled, {"transforms": [CROP, T.RandomAffine(10, (0.1, 0.1))], "backend": "kornia"}),
}
AMPLIFYING = ("augmix",)  # differences grow through its operations, so it is not compared


def loader(kind: str, device: str) -> gl.Loader:
    make, kind_options = KINDS[kind]
    if kind_options.get("backend") == "kornia":
        lacking.require("kornia")
    options = {"num_workers": 0, "seed": 3, "shuffle": True, **kind_options}
    if device == "cpu" and options.get("backend") != "kornia":
        options["backend"] = "torch"
    return gl.Loader([make(number) for number in range(64)], 8, device=device, **options)


def leaves_on_host(batches: Iterator[Any]) -> list[Any]:
    all_leaves = []
    for batch in batches:
        all_leaves += [leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_leaves(batch)]
    return all_leaves


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in AMPLIFYING])
def test_batch_of_a_gpu_equals_that_of_the_cpu(kind):
    tolerance = (STEPS["fused"]["resize bilinear"] + 2) * LEVEL
    with loader(kind, "cuda") as on_gpu, loader(kind, "cpu") as on_cpu:
        for leaf, expected in zip(leaves_on_host(iter(on_gpu)), leaves_on_host(iter(on_cpu)), strict=True):
            if not isinstance(expected, torch.Tensor):
                assert leaf == expected
            elif expected.is_floating_point():
                assert leaf.dtype == expected.dtype
                torch.testing.assert_close(leaf, expected, atol=tolerance, rtol=2**-9)
            elif expected.dtype == torch.uint8 and expected.dim() == 4:
                assert (leaf.int() - expected.int()).abs().max() <= 4  # levels
            else:
                assert torch.equal(leaf, expected)


@pytest.mark.parametrize("kind", list(KINDS))
def test_no_batch_waits_for_the_device(kind):
    with loader(kind, "cuda") as loader_:
        batches = iter(loader_)
        for _ in range(3):  # creates the stage and its constants
            next(batches)
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode("error")
            for _ in range(4):
                next(batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_autocast_does_not_change_batches():
    with loader("float16, channels_last", "cuda") as loader_:
        expected = leaves_on_host(iter(loader_))
        loader_.set_epoch(0)
        with torch.autocast("cuda", torch.bfloat16):
            with_autocast = leaves_on_host(iter(loader_))
    for leaf, expected_leaf in zip(with_autocast, expected, strict=True):
        assert torch.equal(leaf, expected_leaf)


def test_two_ranks_on_a_gpu_share_the_batches_of_one_rank():
    options = {"transforms": [CROP, NORMALIZE], "num_workers": 0, "seed": 3, "shuffle": True, "device": "cuda"}
    data = [labelled(number) for number in range(64)]
    with gl.Loader(data, 8, info=True, **options) as loader_:
        expected = {int(index): image.cpu() for (images, _), info in loader_ for image, index in _rows(images, info)}
    for rank in range(2):
        with gl.Loader(data, 4, rank=rank, world_size=2, info=True, **options) as loader_:
            for (images, _), info in loader_:
                for image, index in _rows(images, info):
                    assert torch.equal(image.cpu(), expected.pop(int(index)))
    assert expected == {}, "no rank loaded these samples"


def _rows(images: torch.Tensor, info: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return zip(images, info.indices, strict=True)


@lacking.needs("nvidia.nvimgcodec")
def test_files_decoded_in_a_process_with_cuda_equal_those_of_workers(jpeg_folder):
    """nvImageCodec decodes on the CPU, in a process with a context on the GPU."""
    torch.zeros(1, device="cuda")
    options = {"transforms": [CROP], "seed": 1, "device": "cuda"}
    with (
        gl.Loader(gl.ImageFolder(jpeg_folder), 8, num_workers=0, **options) as in_process,
        gl.Loader(gl.ImageFolder(jpeg_folder), 8, num_workers=min(2, os.cpu_count() or 1), **options) as in_workers,
    ):
        for (images, labels), (images_of_workers, labels_of_workers) in zip(in_process, in_workers, strict=True):
            assert torch.equal(images, images_of_workers)
            assert torch.equal(labels, labels_of_workers)
