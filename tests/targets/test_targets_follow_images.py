"""Geometric transforms in a loader move masks, boxes and keypoints with their images."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from helpers.both_loaders import alike
from helpers.programs import run_python
from targets.scenes import COLOR, DOTS, Scenes, region

import gpuload as gl
from gpuload import transforms as T

# With the nearest pixel, images contain only the original colours.
NEAREST = {"interpolation": "nearest"}
FLIPS = (T.RandomHorizontalFlip(), T.RandomVerticalFlip())
CHAINS = {
    "resized crop and flips": [T.RandomResizedCrop(80, scale=(0.5, 1), **NEAREST), *FLIPS],
    "crop with padding": [T.RandomCrop(72, padding=12, pad_if_needed=True), *FLIPS],
    "short side, then the middle": [T.Resize(90, **NEAREST), T.CenterCrop(88)],
    "a larger canvas": [T.RandomZoomOut(side_range=(1, 2), p=1), T.Resize((120, 120), **NEAREST)],
    "rotation": [T.RandomRotation(25, **NEAREST), T.CenterCrop(100)],
    "rotation with expand": [T.RandomRotation((30, 30), expand=True, **NEAREST), T.Resize((128, 128), **NEAREST)],
    "quarter turns": [T.RandomRotate90(0.9), T.RandomCrop((56, 52)), T.RandomTranspose(), T.CenterCrop(50)],
    "affine": [T.RandomAffine(20, translate=(0.1, 0.1), scale=(0.9, 1.3), shear=10, **NEAREST), T.CenterCrop(90)],
    "perspective": [T.Resize((96, 96), **NEAREST), T.RandomPerspective(0.3, p=0.8, **NEAREST)],
    "branches": [
        T.RandomHorizontalFlip(),
        T.RandomOrder([T.RandomCrop(58), T.RandomVerticalFlip()]),
        T.Pad(3),
        T.RandomApply([T.RandomRotation(10, **NEAREST)]),
        T.CenterCrop((58, 60)),
    ],
    "choice and order": [
        T.RandomChoice([T.RandomResizedCrop(64, scale=(0.6, 1), **NEAREST), T.Compose([T.Resize(70, **NEAREST),
                        T.CenterCrop(64)])]),
        T.RandomOrder(list(FLIPS)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("box_format", ["xyxy", "cxcywh"])
def test_geometric_transforms_move_targets_with_the_image(name, box_format):
    transforms = [*CHAINS[name], T.ConvertBoundingBoxFormat("xyxy")]
    visible_dots = 0
    with gl.Loader(Scenes(12, box_format), 4, transforms=transforms, num_workers=0, device="cpu") as loader:
        for batch in loader:
            for image, target, mask in zip(*batch, strict=True):
                visible_dots += check_targets(image.numpy(), target, mask.numpy())
    assert visible_dots >= 12, "too few of the 36 dots are visible to test their positions"


def check_targets(image: np.ndarray, target: dict[str, torch.Tensor], mask: np.ndarray) -> int:
    """Compare the targets of a sample with its image, and return the number of visible dots."""
    height, width = mask.shape
    assert image.shape == (3, height, width)
    np.testing.assert_array_equal(mask == 7, region(image, COLOR))
    np.testing.assert_array_equal(mask == 9, np.any([region(image, color) for color in DOTS], axis=0))
    np.testing.assert_array_equal(target["masks"].numpy()[0], mask != 0)
    left, top, right, bottom = target["boxes"][0].tolist()
    assert 0 <= left <= right <= width
    assert 0 <= top <= bottom <= height
    rows, columns = np.nonzero(mask)
    if len(rows):
        # The nearest pixel can be half a pixel away on both sides.
        assert left - 1 <= columns.min()
        assert columns.max() <= right + 1
        assert top - 1 <= rows.min()
        assert rows.max() <= bottom + 1
    visible_dots = 0
    for (x, y), color in zip(target["keypoints"].tolist(), DOTS, strict=True):
        if not (5 <= x <= width - 6 and 5 <= y <= height - 6):
            continue
        rows, columns = np.nonzero(region(image, color))
        assert len(rows), "a dot must be where its keypoint is"
        assert abs(columns.mean() - x) < 2
        assert abs(rows.mean() - y) < 2
        visible_dots += 1
    return visible_dots


def test_flips_move_keypoints_to_the_mirrored_pixel():
    image = np.zeros((10, 20, 3), np.uint8)
    image[2, 3] = 255
    sample = image, gl.Boxes([[3, 2, 4, 3]]), gl.Keypoints([[3, 2]])
    transforms = [T.RandomHorizontalFlip(p=1), T.RandomVerticalFlip(p=1)]
    with gl.Loader([sample], transforms=transforms, num_workers=0, device="cpu") as loader:
        [[images, boxes, points]] = list(loader)
    assert images[0, 0].nonzero().tolist() == [[7, 16]]
    assert boxes[0].tolist() == [[16, 7, 17, 8]]
    assert points[0].tolist() == [[16, 7]]


@pytest.mark.parametrize("seed", range(4))
def test_rotate90_moves_keypoints_to_pixels_and_rotation_to_corners_of_pixels(seed):
    # `RandomRotate90` moves keypoints like flips, and `RandomRotation` like torchvision.
    image = np.zeros((20, 30, 3), np.uint8)
    image[5, 3] = 255
    keypoints_and_pixels = []
    for transform in (T.RandomRotate90(p=1), T.RandomRotation((90, 90), expand=True)):
        sample = (image, gl.Keypoints([[3, 5]]))
        with gl.Loader([sample], transforms=[transform], num_workers=0, device="cpu", seed=seed) as loader:
            [[images, points]] = list(loader)
        [[row, column]] = images[0, 0].nonzero().tolist()
        keypoints_and_pixels.append((points[0].tolist(), [[column, row]]))
    (turned, pixel), (rotated, rotated_pixel) = keypoints_and_pixels
    assert turned == pixel
    assert rotated_pixel == [[5, 30 - 1 - 3]]
    assert rotated == [[5, 30 - 3]]


RECIPE = (
    T.RandomZoomOut(fill={gl.Image: 5, gl.Mask: 200}, p=0.5),
    T.RandomIoUCrop(),
    T.RandomHorizontalFlip(),
    T.Resize((48, 48)),
    T.ColorJitter(0.4, contrast=0.4),
    T.RandomRotation(10),
    T.SanitizeBoundingBoxes(labels_getter=lambda sample: (sample[1]["labels"], sample[1]["area"])),
    T.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
)


class ScenesWithSeveralBoxes(Scenes):
    """A dataset of scenes with up to three boxes and instance masks."""

    def __getitem__(self, index):
        image, target, mask = super().__getitem__(index)
        count = index % 4
        random = np.random.default_rng(index)
        start = random.uniform(0, 40, (count, 2))
        boxes = np.concatenate([start, start + random.uniform(4, 20, (count, 2))], axis=1).astype(np.float32)
        target["boxes"] = gl.Boxes(boxes)
        target["labels"] = np.arange(count)
        target["area"] = boxes[:, 2] * 1.0
        height, width = mask.array.shape
        grid_y, grid_x = np.mgrid[:height, :width]
        inside = [(grid_x >= b[0]) & (grid_x < b[2]) & (grid_y >= b[1]) & (grid_y < b[3]) for b in boxes]
        target["masks"] = gl.Mask(
            np.array(inside, np.int16).reshape(count, height, width) * (1 + np.arange(count))[:, None, None]
        )
        return image, target, mask


def load_epoch(samples=16, **options):
    options = {"batch_size": 4, "transforms": RECIPE, "shuffle": True, "seed": 3, "device": "cpu", **options}
    with gl.Loader(ScenesWithSeveralBoxes(samples), **options) as loader:
        return list(loader)


@pytest.mark.processes
def test_workers_give_the_targets_of_the_main_process():
    expected = load_epoch(num_workers=0)
    assert alike(load_epoch(num_workers=2, chunk_size=3), expected)
    sizes = [len(target["boxes"]) for _, targets, _ in expected for target in targets]
    assert 0 < sum(sizes) < sum(index % 4 for index in range(16))
    for _, targets, _ in expected:
        for target in targets:
            count = len(target["boxes"])
            assert len(target["labels"]) == len(target["area"]) == len(target["masks"]) == count
            for number, mask in zip(target["labels"].tolist(), target["masks"], strict=True):
                assert set(mask.unique().tolist()) <= {0, 200, number + 1}


@pytest.mark.cuda
def test_targets_on_a_gpu_equal_those_on_the_cpu():
    for expected, on_gpu in zip(load_epoch(num_workers=0), load_epoch(num_workers=2, device="cuda"), strict=True):
        (_, targets, masks), (_, expected_targets, expected_masks) = on_gpu, expected
        rows = zip([*targets, {"masks": masks}], [*expected_targets, {"masks": expected_masks}], strict=True)
        for values, expected_values in rows:
            for name, expected_value in expected_values.items():
                if isinstance(expected_value, torch.Tensor):
                    assert values[name].is_cuda, name
                    torch.testing.assert_close(values[name].cpu(), expected_value, rtol=0, atol=0)


@pytest.mark.processes
def test_nested_and_repeated_iou_crops_move_boxes_with_their_masks():
    first_crop = T.RandomApply([T.RandomHorizontalFlip(), T.RandomIoUCrop()], p=0.6)
    second_crop = T.RandomOrder([T.RandomIoUCrop(), T.RandomVerticalFlip()])
    last_steps = [T.SanitizeBoundingBoxes(), T.Resize((40, 40))]
    transforms = [T.RandomZoomOut(p=0.5), first_crop, T.Resize(60), second_crop, *last_steps]
    options = {"samples": 32, "batch_size": 8, "transforms": transforms, "chunk_size": 3}
    box_count, expected = 0, load_epoch(num_workers=0, **options)
    assert alike(load_epoch(num_workers=2, **options), expected)
    for _, targets, _ in expected:
        for target in targets:
            assert len(target["boxes"]) == len(target["labels"]) == len(target["masks"])
            box_count += len(target["boxes"])
            slack = 4  # a pixel of the image, enlarged by the crop
            for box, mask in zip(target["boxes"], target["masks"], strict=True):
                rows, columns = mask.nonzero(as_tuple=True)
                if len(rows):
                    assert box[0] - slack <= columns.min()
                    assert columns.max() <= box[2] + slack
                    assert box[1] - slack <= rows.min()
                    assert rows.max() <= box[3] + slack
    assert 0 < box_count < sum(index % 4 for index in range(32))


HASH_WARPED_TARGETS = """
import hashlib
import numpy as np
from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.transforms.program.targets import SampleTargets, apply_records

rows = np.arange(64)
chain = T.Chain([T.RandomAffine(40, (0.2, 0.2), (0.5, 2), 20), T.RandomPerspective(0.4, p=1)])
program = chain.draw(epoch_key(1, 0), rows, np.full((64, 2), 90))
points = np.random.default_rng(0).uniform(0, 90, (64, 5, 2))
samples = [SampleTargets([np.concatenate([xy, xy + 9], axis=1)], [xy]) for xy in points]
apply_records(program.records, samples)
print(hashlib.sha256(b"".join(s.boxes[0].tobytes() + s.points[0].tobytes() for s in samples)).hexdigest())
"""


@pytest.mark.processes
def test_targets_have_the_same_bits_with_any_kernels_of_numpys_blas():
    environments = [{**os.environ, "OPENBLAS_CORETYPE": kernels} for kernels in ("Haswell", "Sandybridge")]
    hashes = {run_python(HASH_WARPED_TARGETS, env=environment) for environment in environments}
    assert len(hashes) == 1
