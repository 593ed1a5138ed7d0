"""Making a batch never makes the host wait for the device, whatever the batch contains."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from bits.cases import CASES
from bits.samples import DAMAGED, Samples
from parity.usable import needs
from simulated.runtime import simulated

import gpuload as gl
from gpuload import transforms as T

# By file, the waits for constants and tables that are computed once, for the first batch that needs them, and the
# waits of a transfer that is ahead of the loop.
MAX_WAITS = {"finish.py": 4, "noise.py": 1, "erasing.py": 1, "transfer.py": 10}
FUSED = ("classification", "erasing_of_finished_images", "mixup", "tones")
SIZES_HW = [(30, 40), (50, 31), (33, 33), (47, 60)] * 3


class ShiftByOne(T.Custom):
    """A custom transform that moves images and masks by a pixel."""

    def apply(self, images: torch.Tensor, params: Any) -> torch.Tensor:
        return images.roll(1, dims=-1)

    def apply_masks(self, masks: torch.Tensor, params: Any) -> torch.Tensor:
        return masks.roll(1, dims=-1)


def make_image(number: int) -> np.ndarray:
    height, width = SIZES_HW[number % len(SIZES_HW)]
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)


def make_scene(number: int) -> tuple[Any, dict[str, Any]]:
    """Return an image with boxes, and masks whose number differs between samples."""
    height, width = SIZES_HW[number % len(SIZES_HW)]
    count = 1 + number % 3
    boxes = np.array([[corner, corner, corner + 12, corner + 9] for corner in range(count)], np.float32)
    masks = np.ones((count, height, width), np.uint8)
    return gl.Image(make_image(number), layout="HWC"), {
        "boxes": gl.Boxes(boxes, "xyxy"),
        "masks": gl.Mask(masks),
        "labels": torch.arange(count),
    }


def make_segmented(number: int) -> tuple[Any, Any]:
    height, width = SIZES_HW[number % len(SIZES_HW)]
    return gl.Image(make_image(number), layout="HWC"), gl.Mask(np.full((height, width), number, np.int32))


def make_labeled(number: int) -> tuple[Any, int]:
    return (gl.Encoded(DAMAGED) if number == 2 else gl.Image(make_image(number), layout="HWC")), number % 5


def collate_on_device(samples: list[Any]) -> Any:
    """Collate with labels on the device, as a user's collate_fn may."""
    images, labels = zip(*samples, strict=True)
    labels_on_device = torch.tensor(labels).pin_memory().to(images[0].device, non_blocking=True)
    return torch.stack(images), torch.nn.functional.one_hot(labels_on_device, 5).float()


class BlocksWithFault:
    """A dataset of arrays of one shape, which come in blocks; one sample is damaged."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number == 1:
            raise ValueError("damaged")
        return {"x": np.full((70, 40), number, np.float32), "y": torch.full((70, 40), number)}


EXTRA_CASES: dict[str, dict[str, Any]] = {
    "ragged_pad_with_targets": {
        "dataset": [make_scene(number) for number in range(8)],
        "transforms": [T.RandomIoUCrop(), T.SanitizeBoundingBoxes(min_size=3)],
        "ragged": "pad",
    },
    "padded_boxes": {
        "dataset": [make_scene(number) for number in range(8)],
        "transforms": [T.RandomIoUCrop(), T.SanitizeBoundingBoxes(min_size=3)],
        "ragged": "pad",
        "boxes": "padded",
    },
    "ragged_pad_with_masks": {"dataset": [make_segmented(number) for number in range(8)], "ragged": "pad"},
    "ragged_pad_to_multiples": {
        "dataset": [make_segmented(number) for number in range(8)],
        "ragged": "pad",
        "pad_to": 32,
    },
    "masks_through_a_call": {
        "dataset": [make_segmented(number) for number in range(8)],
        "transforms": [T.Resize((20, 20)), ShiftByOne(), T.RandomHorizontalFlip()],
    },
    "labels_on_the_device": {
        "dataset": [(gl.Image(make_image(number), layout="HWC"), number % 5) for number in range(8)],
        "transforms": [T.RandomResizedCrop(16), T.ToDtype("float32", scale=True), T.MixUp(num_classes=5)],
        "collate_fn": collate_on_device,
    },
    "skipped_images": {
        "dataset": [make_labeled(number) for number in range(8)],
        "transforms": [T.RandomResizedCrop(16)],
        "faults": gl.Faults(on_error="skip"),
        "info": True,
    },
    "skipped_blocks": {"dataset": BlocksWithFault(), "faults": gl.Faults(on_error="skip")},
}


def count_waits(options: dict[str, Any], backend: str) -> Counter[str]:
    """Count the waits of the host for the simulated device, by file, from the first batch to the last."""
    loader_options = {"batch_size": 4, "device": "cuda", "backend": backend, **options, "num_workers": 0}
    with simulated("lazy") as cuda, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with gl.Loader(loader_options.pop("dataset"), **loader_options) as loader:
            batches = iter(loader)
            cuda.waits.clear()  # of values computed before the first batch
            assert sum(1 for _ in batches)
            return Counter(wait.where.partition(":")[0] for wait in cuda.waits)


def parametrize_cases() -> list[Any]:
    cases: list[Any] = [(name, "torch") for name in EXTRA_CASES]
    kornia_names = [name for name, case in CASES.items() if case.drive is None and "kornia" in case.runs]
    cases += [pytest.param(name, "kornia", marks=pytest.mark.slow) for name in kornia_names]
    return cases + [pytest.param(name, "fused", marks=pytest.mark.slow) for name in FUSED]


@pytest.mark.parametrize(("name", "backend"), parametrize_cases())
def test_batches_never_make_the_host_wait_for_the_device(name, backend):
    needs(backend)
    options = EXTRA_CASES[name] if name in EXTRA_CASES else CASES[name].make(Samples(small=backend == "fused"))
    waits = count_waits(options, backend)
    for file_name, max_waits in MAX_WAITS.items():
        assert waits.pop(file_name, 0) <= max_waits, file_name
    if name == "pasted_instances":  # CopyPaste reads from the device which instances remain
        waits.pop("combined_targets.py", None)
    assert not waits
