"""Boxes, keypoints and masks, compared with torchvision's kernels for the same draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import lacking
from helpers.peers import torchvision
from PIL import Image as PILImage
from targets.geometric_chains import GEOMETRIC_CHAINS, KEY, SIZES, draw
from targets.scenes import as_format

import gpuload as gl
from gpuload import transforms as T
from gpuload.datasets.sample import from_xyxy, to_xyxy
from gpuload.stage import RaggedImages, compile_stage
from gpuload.stage.masks import MaskStage
from gpuload.transforms.program.ops import Box, Flip, Turn, Warp
from gpuload.transforms.program.targets import SampleTargets, apply_records

torchvision()
from torchvision import tv_tensors  # noqa: E402
from torchvision.transforms.v2 import functional as F  # noqa: E402


def random_boxes(row: int) -> np.ndarray:
    random = np.random.default_rng(row)
    height, width = SIZES[row]
    start = random.uniform(0, 0.6, (5, 2)) * [width, height]
    return np.concatenate([start, start + random.uniform(0.1, 0.4, (5, 2)) * [width, height]], axis=1)


def torchvision_target(target, draws, row: int):
    """Apply torchvision's kernels to a target, with our draws."""
    for record in draws.records:
        if isinstance(record, Box):
            (top, left, height, width), size = record.box_tlhw[row].tolist(), record.size_hw[row].tolist()
            if [top, left, height, width] != [0, 0, *record.sizes_hw[row].tolist()]:
                target = F.crop(target, top, left, height, width)
            target = F.resize(target, size, interpolation=F.InterpolationMode.NEAREST)
        elif isinstance(record, Flip) and record.flipped[row]:
            target = F.horizontal_flip(target) if record.axis else F.vertical_flip(target)
        elif isinstance(record, Warp) and record.warped[row]:
            target = F.perspective(target, None, None, coefficients=record.coefficients[row].tolist())
    return target


@pytest.mark.parametrize("name", GEOMETRIC_CHAINS)
@pytest.mark.parametrize(
    ("box_format", "dtype", "tolerance"),
    # torchvision computes in float32, and truncates integers after each transform.
    [("xyxy", np.float32, 1e-3), ("xywh", np.float32, 1e-3), ("cxcywh", np.float64, 1e-3), ("xyxy", np.int64, 1)],
)
def test_geometric_transforms_move_boxes_like_torchvision(name, box_format, dtype, tolerance):
    draws = draw(GEOMETRIC_CHAINS[name])
    box_arrays = [as_format(random_boxes(row), box_format).astype(dtype) for row in range(len(SIZES))]
    samples = [SampleTargets([to_xyxy(boxes, box_format)]) for boxes in box_arrays]
    apply_records(draws.records, samples)
    equal_count = 0
    for row, (boxes, sample) in enumerate(zip(box_arrays, samples, strict=True)):
        moved = from_xyxy(sample.boxes[0], box_format, np.dtype(dtype))
        target = tv_tensors.BoundingBoxes(
            torch.from_numpy(boxes), format=box_format.upper(), canvas_size=tuple(SIZES[row])
        )
        expected = torchvision_target(target, draws, row).numpy()
        assert moved.dtype == expected.dtype
        np.testing.assert_allclose(moved, expected, rtol=1e-6, atol=tolerance)
        equal_count += (moved == expected).all(axis=1).sum()
    if dtype is np.int64:
        assert equal_count >= 0.8 * 5 * len(SIZES)  # each image has five boxes


@pytest.mark.parametrize("name", GEOMETRIC_CHAINS)
def test_geometric_transforms_move_keypoints_like_torchvision(name):
    draws = draw(GEOMETRIC_CHAINS[name])
    points = [random_boxes(row).reshape(-1, 2, 2).astype(np.float32) for row in range(len(SIZES))]
    samples = [SampleTargets([], [keypoints.astype(np.float64)]) for keypoints in points]
    apply_records(draws.records, samples)
    for row, (keypoints, sample) in enumerate(zip(points, samples, strict=True)):
        expected = torchvision_target(
            tv_tensors.KeyPoints(keypoints, canvas_size=tuple(SIZES[row])), draws, row
        ).numpy()
        np.testing.assert_allclose(sample.points[0], expected, rtol=1e-5, atol=2e-3)


@pytest.mark.parametrize(
    ("transform", "torchvision_transform", "tolerance"),
    [
        (T.RandomRotation((25, 25)), lambda t: F.rotate(t, 25), 1e-3),
        (T.RandomRotation((-130, -130), center=(10, 20)), lambda t: F.rotate(t, -130, center=[10, 20]), 1e-3),
        (T.RandomAffine((20, 20), scale=(1.3, 1.3), shear=(8, 8, -5, -5)),
         lambda t: F.affine(t, 20, [0, 0], 1.3, [8, -5]), 1e-3),
        # torchvision rounds the size of the enlarged image differently.
        (T.RandomRotation((30, 30), expand=True), lambda t: F.rotate(t, 30, expand=True), 1),
    ],
)  # fmt: skip
def test_rotation_and_affine_move_boxes_and_keypoints_like_torchvision(transform, torchvision_transform, tolerance):
    draws = draw([transform])
    samples = [SampleTargets([random_boxes(row)], [random_boxes(row).reshape(-1, 2)]) for row in range(len(SIZES))]
    apply_records(draws.records, samples)
    for row, sample in enumerate(samples):
        size = tuple(SIZES[row].tolist())
        boxes = tv_tensors.BoundingBoxes(torch.from_numpy(random_boxes(row)).float(), format="XYXY", canvas_size=size)
        points = tv_tensors.KeyPoints(torch.from_numpy(random_boxes(row).reshape(-1, 2)).float(), canvas_size=size)
        np.testing.assert_allclose(sample.boxes[0], torchvision_transform(boxes).numpy(), atol=tolerance)
        np.testing.assert_allclose(sample.points[0], torchvision_transform(points).numpy(), atol=tolerance)


@pytest.mark.parametrize("name", GEOMETRIC_CHAINS)
@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_geometric_transforms_move_masks_like_torchvision_with_pillows_nearest_pixel(name, dtype):
    draws = draw(GEOMETRIC_CHAINS[name])
    masks = [np.random.default_rng(row).integers(0, 250, size).astype(dtype) for row, size in enumerate(SIZES)]
    moved, _ = move(masks, draws)
    for row, mask in enumerate(masks):
        expected = mask
        for record in draws.records:
            if isinstance(record, Box):  # torchvision rounds to another nearest pixel than Pillow
                top, left, height, width = record.box_tlhw[row].tolist()
                cropped = F.crop(tv_tensors.Mask(torch.from_numpy(expected)), top, left, height, width).numpy()
                size = tuple(record.size_hw[row, ::-1].tolist())
                image = PILImage.fromarray(cropped.astype(np.int32))
                expected = np.asarray(image.resize(size, PILImage.Resampling.NEAREST)).astype(dtype)
            elif isinstance(record, Flip) and record.flipped[row]:
                expected = np.flip(expected, record.axis).copy()
            elif isinstance(record, Warp) and record.warped[row]:
                image = PILImage.fromarray(expected.astype(np.int32))
                size = tuple(record.output_hw[row, ::-1].tolist())
                method = PILImage.Transform.PERSPECTIVE
                coefficients = record.coefficients[row].tolist()
                if not any(coefficients[6:]):
                    method, coefficients = PILImage.Transform.AFFINE, coefficients[:6]
                expected = np.asarray(image.transform(size, method, coefficients)).astype(dtype)
        np.testing.assert_array_equal(moved[row].numpy(), expected)


def move(masks, draws):
    arrays = [mask[:, :, None].view(np.uint8).reshape(*mask.shape, -1) for mask in masks]
    stage = MaskStage(torch.device("cpu"))
    return stage(RaggedImages.from_arrays(arrays), draws, [(mask.dtype.name, 2) for mask in masks])


@pytest.mark.parametrize("box_format", ["XYXY", "XYWH", "CXCYWH"])
@pytest.mark.parametrize("target_format", ["XYXY", "XYWH", "CXCYWH"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_conversions_of_box_formats_equal_torchvisions(box_format, target_format, dtype):
    boxes = torch.tensor([[10, 20, 30, 41], [4, 4, 5, 7]]).to(dtype)
    expected = F.convert_bounding_box_format(boxes, box_format, target_format)
    ours = gl.Boxes(boxes, box_format)
    converted = from_xyxy(to_xyxy(ours.array, ours.format), target_format.lower(), ours.array.dtype)
    np.testing.assert_allclose(converted, expected.numpy(), atol=0 if dtype.is_floating_point else 1)


def test_sanitized_and_clamped_boxes_equal_torchvisions():
    boxes = np.array(
        [[0, 0, 10, 10], [5, 5, 5.5, 20], [-3, 2, 20, 20], [50, 40, 90, 61], [1, 1, 2.2, 2.2], [9, 9, 9, 9]]
    )
    target = tv_tensors.BoundingBoxes(torch.from_numpy(boxes), format="XYXY", canvas_size=(60, 80))
    for arguments in ({}, {"min_size": 3}, {"min_area": 200}):
        _, expected = F.sanitize_bounding_boxes(target, **arguments)
        sample = SampleTargets([boxes])
        apply_records(
            T.Chain([T.SanitizeBoundingBoxes(**arguments)]).draw(KEY, np.arange(1), np.array([[60, 80]])).records,
            [sample],
        )
        np.testing.assert_array_equal(sample.boxes[0], boxes[expected.numpy()])
    draws = T.Chain([T.ClampBoundingBoxes()]).draw(KEY, np.arange(1), np.array([[60, 80]]))
    sample = SampleTargets([boxes])
    apply_records(draws.records, [sample])
    np.testing.assert_array_equal(sample.boxes[0], F.clamp_bounding_boxes(target).numpy())


def make_albumentations(turn, box_format: str):
    """Make albumentations' transform for one sample: a number of quarter turns, or None for a transposition."""
    import albumentations

    class Turned(albumentations.RandomRotate90):
        def get_params(self):
            return {"factor": turn}

    turn_transform = albumentations.Transpose(p=1) if turn is None else Turned(p=1)
    boxes = albumentations.BboxParams("pascal_voc" if box_format == "xyxy" else "coco", label_fields=[])
    points = albumentations.KeypointParams("xy", remove_invisible=False)
    return albumentations.Compose([turn_transform], bbox_params=boxes, keypoint_params=points)


@lacking.needs("albumentations")
@pytest.mark.filterwarnings("ignore")  # albumentations looks for a newer version
@pytest.mark.parametrize("box_format", ["xyxy", "xywh"])
@pytest.mark.parametrize(
    "transform", [T.RandomRotate90(p=1), T.RandomTranspose(p=1)], ids=["RandomRotate90", "RandomTranspose"]
)
def test_rotate90_and_transpose_move_targets_like_albumentations(monkeypatch, transform, box_format):
    monkeypatch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")
    count, random = 40, np.random.default_rng(0)
    sizes = random.integers(20, 40, (count, 2))
    images = [random.integers(0, 256, (*size, 3), np.uint8) for size in sizes.tolist()]
    [record] = (program := T.Chain([transform]).draw(KEY, np.arange(count), sizes)).records
    assert isinstance(record, Turn)
    boxes = [np.array([[2, 3, 11, 7.5], [0, 0, width, height]], np.float32) for height, width in sizes.tolist()]
    points = [np.array([[1, 2], [width - 1, 0.5]], np.float32) for _, width in sizes.tolist()]
    formatted_boxes = [as_format(boxes_xyxy, box_format) for boxes_xyxy in boxes]
    samples = [
        SampleTargets([to_xyxy(formatted, box_format)], [keypoints.astype(np.float64)])
        for formatted, keypoints in zip(formatted_boxes, points, strict=True)
    ]
    apply_records(program.records, samples)
    batch = compile_stage(T.Chain([transform]), device="cpu", ragged="list")(RaggedImages.from_arrays(images), program)
    turns_seen = set()
    for row, sample in enumerate(samples):
        mirrored = tuple(record.flipped[row].tolist())
        turns = {(False, False): 0, (True, False): 1, (True, True): 2, (False, True): 3}[mirrored]
        expected = make_albumentations(turns if isinstance(transform, T.RandomRotate90) else None, box_format)(
            image=images[row], bboxes=formatted_boxes[row], keypoints=points[row]
        )
        turns_seen.add(turns)
        np.testing.assert_array_equal(batch[row].permute(1, 2, 0), expected["image"])
        moved = from_xyxy(sample.boxes[0], box_format, np.dtype(np.float32))
        np.testing.assert_allclose(moved, expected["bboxes"], atol=1e-4)
        np.testing.assert_allclose(sample.points[0], expected["keypoints"], atol=1e-5)
    assert len(turns_seen) == (4 if isinstance(transform, T.RandomRotate90) else 1)


@pytest.mark.parametrize("box_format", ["xyxy", "xywh", "cxcywh"])
@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_rotate90_and_transpose_move_boxes_with_their_masks(box_format, dtype):
    count, transforms = 60, [T.RandomRotate90(p=1), T.RandomTranspose()]
    sizes = np.random.default_rng(0).integers(20, 40, (count, 2))
    program = T.Chain(transforms).draw(KEY, np.arange(count), sizes)
    masks = [np.zeros((*size, 1), np.uint8) for size in sizes.tolist()]
    for mask in masks:
        mask[4:14, 2:10] = 1
    moved, _ = MaskStage(torch.device("cpu"))(RaggedImages.from_arrays(masks), program, [("uint8", 2)] * count)
    boxes = as_format(np.array([[2, 4, 10, 14]]), box_format).astype(dtype)
    samples = [SampleTargets([to_xyxy(boxes, box_format)], [np.array([[2, 4]])]) for _ in masks]
    apply_records(program.records, samples)
    for mask, sample, size in zip(moved, samples, program.results_hw, strict=True):
        assert mask.shape == tuple(size)
        rows, columns = np.nonzero(mask.numpy())
        box = np.array([[columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]])
        moved_box = from_xyxy(sample.boxes[0], box_format, np.dtype(dtype))
        np.testing.assert_array_equal(moved_box, as_format(box, box_format).astype(dtype))
        assert mask[*reversed(sample.points[0][0].tolist())] == 1
        assert sample.points[0][0, 0] in (columns.min(), columns.max())
        assert sample.points[0][0, 1] in (rows.min(), rows.max())
    assert len({tuple(sample.boxes[0][0]) for sample in samples}) > 20, "too few boxes were moved to different places"
