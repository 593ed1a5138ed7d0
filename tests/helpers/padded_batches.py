"""Boxes and keypoints of a batch in padded form, and the same targets in lists, with one entry per image."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from targets.geometric_chains import GEOMETRIC_CHAINS

import gpuload as gl
from gpuload import transforms as T

# Transforms that move or drop boxes and keypoints in padded form.
CHAINS = {
    **GEOMETRIC_CHAINS,
    "RandomRotate90": [T.RandomRotate90(p=0.7)],
    "RandomTranspose": [T.RandomTranspose(p=0.5)],
    "clamped": [T.RandomCrop(40, pad_if_needed=True), T.ClampBoundingBoxes(), T.ClampKeyPoints()],
    "sanitized": [T.RandomResizedCrop(30), T.SanitizeBoundingBoxes(min_size=5), T.RandomRotation(30)],
    "sanitized keypoints": [T.RandomCrop(30), T.SanitizeKeyPoints(), T.RandomHorizontalFlip()],
    "keypoints of some images": [T.RandomApply([T.SanitizeKeyPoints()], p=0.5)],
    "sanitized twice": [
        T.SanitizeBoundingBoxes(min_area=60), T.RandomPerspective(p=0.5), T.SanitizeBoundingBoxes(min_size=3)
    ],
    "some images": [
        T.RandomChoice([T.RandomRotation(30), T.CenterCrop(30)]), T.RandomApply([T.SanitizeBoundingBoxes(20)], p=0.5),
        T.Resize((44, 31)),
    ],
    "converted": [T.RandomHorizontalFlip(), T.ConvertBoundingBoxFormat("cxcywh"), T.RandomRotation(10)],
    "elastic": [T.ElasticTransform(alpha=60.0, sigma=3.0)],
    "no smoothing": [T.ElasticTransform(sigma=0.0)],
}  # fmt: skip
LENGTHS = [0, 5, 3, 1, 2, 4]  # the numbers of boxes


def make_padded(count: int, box_format: Any = "xyxy", dtype: Any = np.float32, device: str = "cpu") -> dict[str, Any]:
    """Return boxes N×5×4, labels N×5 and keypoints N×5×3×2, some of which are padding or beyond the image."""
    random, lengths = np.random.default_rng(count), torch.tensor(LENGTHS[:count])
    boxes = np.sort(random.uniform(-5, 50, (count, 5, 2, 2)), axis=2).reshape(count, 5, 4)
    if box_format != "xyxy":
        boxes[..., 2:] -= boxes[..., :2]
    points = torch.from_numpy(random.uniform(0, 60, (count, 5, 3, 2)).astype(dtype)).to(device)
    boxes = torch.from_numpy(boxes.astype(dtype)).to(device)
    return {
        "boxes": gl.Boxes(boxes, box_format, valid=lengths.to(device)),
        "labels": torch.arange(5 * count, device=device).view(count, 5),
        "points": gl.Keypoints(points, valid=lengths),
    }


def as_lists(targets: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the targets with one dict for each image, on the CPU."""
    boxes, labels, points = (targets[name] for name in ("boxes", "labels", "points"))
    return [
        {
            "boxes": gl.Boxes(torch.as_tensor(boxes.array[row][:length]).cpu().numpy(), boxes.format),
            "labels": labels[row][:length].cpu(),
            "points": gl.Keypoints(torch.as_tensor(points.array[row][:length]).cpu().numpy()),
        }
        for row, length in enumerate(LENGTHS[: len(labels)])
    ]


def assert_equal_targets(padded: dict[str, Any], lists: list[dict[str, Any]], steps: int = 0) -> None:
    """Check that the valid entries of padded targets equal those of lists: floats up to a number of float32 steps of
    the largest coordinate, and integers exactly."""
    for row, expected in enumerate(lists):
        boxes, points = padded["boxes"], padded["points"]
        valid = boxes.valid[row].cpu()
        assert padded["labels"][row].cpu()[valid].tolist() == expected["labels"].tolist()
        for result, target in ((boxes.array[row].cpu()[valid], expected["boxes"]), (points, expected["points"])):
            if result is points:
                result = points.array[row].cpu()[points.valid[row].cpu()]
            assert result.dtype == target.dtype
            assert result.shape == target.shape
            limit = 0.0
            if steps and result.is_floating_point() and target.numel():
                limit = steps * float(np.spacing(np.float32(target.abs().max())))
            assert not target.numel() or float((result.double() - target.double()).abs().max()) <= limit
