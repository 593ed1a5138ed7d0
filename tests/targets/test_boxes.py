"""Draws of RandomIoUCrop, compared with the published definition and torchvision; and arguments of box transforms."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from helpers.peers import torchvision

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.transforms.base import Uniforms
from gpuload.transforms.program.ops import Box

KEY = epoch_key(5, 0)
SIZE_HW = (90, 120)
BOXES = np.array([[10.0, 10, 40, 50], [60, 30, 110, 80], [30, 60, 50, 85]])


def draw(transform: T.RandomIoUCrop, count: int, boxes: np.ndarray = BOXES, first_position: int = 0) -> Box:
    positions = np.arange(first_position, first_position + count)
    return transform.draw(Uniforms(KEY, positions, 0, [boxes] * count), np.array([SIZE_HW] * count))  # pyright: ignore


def published_crop(
    random: np.random.Generator, sampler_options, trials: int, scale=(0.3, 1.0), ratio=(0.5, 2.0)
) -> list[float]:
    """Draw a crop by the published definition: left, top, width, height, and the number of boxes that remain."""
    height, width = SIZE_HW
    while True:
        min_overlap = sampler_options[random.integers(len(sampler_options))]
        if min_overlap >= 1:
            return [0, 0, width, height, len(BOXES)]
        for _ in range(trials):
            width_share, height_share = random.uniform(*scale, 2)
            new_width, new_height = int(width * width_share), int(height * height_share)
            if not ratio[0] <= new_width / new_height <= ratio[1]:
                continue
            left, top = int((width - new_width) * random.random()), int((height - new_height) * random.random())
            x, y = (BOXES[:, 0] + BOXES[:, 2]) / 2, (BOXES[:, 1] + BOXES[:, 3]) / 2
            inside = (left < x) & (x < left + new_width) & (top < y) & (y < top + new_height)
            if not inside.any():
                continue
            max_overlap = 0.0
            for box in BOXES[inside]:
                w = max(0.0, min(box[2], left + new_width) - max(box[0], left))
                h = max(0.0, min(box[3], top + new_height) - max(box[1], top))
                area = (box[2] - box[0]) * (box[3] - box[1])
                max_overlap = max(max_overlap, w * h / (area + new_width * new_height - w * h))
            if max_overlap < min_overlap:
                continue
            return [left, top, new_width, new_height, int(inside.sum())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler_options", "trials"), [((0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0), 40), ((0.1, 0.3), 5), ((0.5, 2.0), 3)]
)
def test_iou_crops_are_distributed_as_published(sampler_options, trials):
    count = 3000
    record = draw(T.RandomIoUCrop(sampler_options=sampler_options, trials=trials), count)
    crops = np.column_stack([record.box_tlhw[:, [1, 0, 3, 2]], record.kept_boxes.sum(axis=1)])
    random = np.random.default_rng(0)
    published_crops = np.array([published_crop(random, sampler_options, trials) for _ in range(count)])
    for column in range(4):
        assert scipy.stats.ks_2samp(crops[:, column], published_crops[:, column]).pvalue > 1e-3
    tables = np.array([[(counts == n).sum() for n in range(1, 4)] for counts in (crops[:, 4], published_crops[:, 4])])
    assert scipy.stats.chi2_contingency(tables).pvalue > 1e-3
    complete_shares = [(rows[:, 2:4] == SIZE_HW[::-1]).all(axis=1).mean() for rows in (crops, published_crops)]
    # four standard deviations of a difference of two frequencies
    assert abs(complete_shares[0] - complete_shares[1]) < 4 * (0.25 * 2 / count) ** 0.5


def test_iou_crops_are_inside_the_image_and_list_the_boxes_inside_them():
    record = draw(T.RandomIoUCrop(), 500)
    top, left, height, width = record.box_tlhw.T
    assert (record.box_tlhw[:, :2] >= 0).all()
    assert (top + height <= SIZE_HW[0]).all()
    assert (left + width <= SIZE_HW[1]).all()
    assert ((width / height >= 0.5) & (width / height <= 2)).all()
    x, y = (BOXES[:, :2] + BOXES[:, 2:]).T / 2
    inside = (left[:, None] < x) & (x < (left + width)[:, None]) & (top[:, None] < y) & (y < (top + height)[:, None])
    np.testing.assert_array_equal(record.kept_boxes, inside)


@pytest.mark.parametrize(
    ("crop", "boxes"),
    [(T.RandomIoUCrop(), np.zeros((0, 4))), (T.RandomIoUCrop(sampler_options=[0.99], trials=2), BOXES)],
    ids=["no boxes", "impossible overlap"],
)
def test_iou_crop_without_a_possible_box_is_the_complete_image(crop, boxes):
    record = draw(crop, 20, boxes)
    np.testing.assert_array_equal(record.box_tlhw, [[0, 0, *SIZE_HW]] * 20)
    assert record.kept_boxes.all()


@pytest.mark.slow
def test_iou_crops_have_torchvisions_areas_and_numbers_of_boxes():
    tv_tensors, v2 = torchvision().tv_tensors, torchvision().transforms.v2
    torch.manual_seed(0)
    boxes = tv_tensors.BoundingBoxes(torch.from_numpy(BOXES).float(), format="XYXY", canvas_size=SIZE_HW)
    image = tv_tensors.Image(torch.zeros(1, *SIZE_HW, dtype=torch.uint8))
    crop = v2.RandomIoUCrop()
    areas, box_counts = [], []
    for _ in range(400):
        out, moved = crop(image, boxes)
        areas.append(out.shape[-1] * out.shape[-2])
        box_counts.append(int((moved[:, 2] > moved[:, 0]).sum()))
    record = draw(T.RandomIoUCrop(), 400)
    assert scipy.stats.ks_2samp(record.box_tlhw[:, 2:].prod(axis=1), areas).pvalue > 1e-3
    assert scipy.stats.ks_2samp(record.kept_boxes.sum(axis=1), box_counts).pvalue > 1e-3


def test_convert_bounding_box_format_accepts_torchvisions_enum():
    torchvision_format = torchvision().tv_tensors.BoundingBoxFormat.CXCYWH
    assert T.ConvertBoundingBoxFormat(torchvision_format) == T.ConvertBoundingBoxFormat("cxcywh")


def test_labels_getter_does_not_change_the_fingerprint():
    chains = [T.Chain([T.SanitizeBoundingBoxes(labels_getter=getter)]) for getter in (None, len)]
    assert chains[0].fingerprint() == chains[1].fingerprint()
    assert T.Chain([T.SanitizeBoundingBoxes(min_size=2)]).fingerprint() != chains[0].fingerprint()
