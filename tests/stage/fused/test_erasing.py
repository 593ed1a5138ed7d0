"""Random erasing in kernels writes the bits of the reference into finished images."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton

# Type checkers do not know that calls in kernels return.
# pyright: reportGeneralTypeIssues=false
import triton.language as tl

from gpuload import transforms as T
from gpuload.rng.philox import Key
from gpuload.stage.finish import apply_late
from gpuload.stage.fused.erasing import erase, erase_images, quantile_table
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.fusing.jobs import RECORD, erased_boxes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIDE = 32


@triton.jit
def erase_tile(image_ptr, records_ptr, count, quantiles_ptr, height, width, CHANNELS: tl.constexpr, SIDE: tl.constexpr):
    """Erase boxes (8 numbers each) of float32 N×C×H×W images. Grid: rows of tiles, columns of tiles, images."""
    ys = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    xs = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    inside = (ys[:, None] < height) & (xs[None, :] < width)
    pointers = image_ptr + tl.program_id(2) * CHANNELS * height * width + ys[:, None] * width + xs[None, :]
    plane = height * width if CHANNELS == 3 else 0
    red = tl.load(pointers, inside, 0.0)
    green = tl.load(pointers + plane, inside, 0.0)
    blue = tl.load(pointers + 2 * plane, inside, 0.0)
    red, green, blue = erase(
        red, green, blue, ys, xs, records_ptr + tl.program_id(2) * count * 8, count, quantiles_ptr, CHANNELS
    )
    tl.store(pointers, red, inside)
    if CHANNELS == 3:
        tl.store(pointers + plane, green, inside)
        tl.store(pointers + 2 * plane, blue, inside)


def erasing_program(erasings, channels: int, size: tuple[int, int], count: int, seed: int = 0) -> Program:
    chain = T.Chain([T.Normalize([0.5] * channels, [0.25] * channels), *erasings])
    sizes = np.tile(np.array(size, np.int64), (count, 1))
    _, program = chain.draw(Key(seed, 3), np.arange(count), sizes).split()
    assert program is not None
    return program


def erase_by_both(erasings, channels: int, size: tuple[int, int], count: int = 3, seed: int = 0) -> list[np.ndarray]:
    """Erase random finished images, and return the results of the reference and of the kernel, and the images."""
    return erase_program_by_both(erasing_program(erasings, channels, size, count, seed), channels, size, seed)


def erase_program_by_both(program: Program, channels: int, size: tuple[int, int], seed: int = 0) -> list[np.ndarray]:
    count = len(program)
    images = torch.from_numpy(np.random.default_rng(seed).normal(size=(count, channels, *size)).astype(np.float32))
    expected = images.clone()
    apply_late(expected, program, partners=None)
    boxes = np.concatenate([erased_boxes(erasing, channels) for erasing in program.records], axis=1)
    result = images.to(DEVICE).clone()
    grid = triton.cdiv(size[0], SIDE), triton.cdiv(size[1], SIDE), count
    table = quantile_table(DEVICE)
    device_boxes = torch.from_numpy(boxes).to(DEVICE)
    box_count = boxes.shape[1] // RECORD
    erase_tile[grid](
        result, device_boxes, box_count, table, *size, CHANNELS=channels, SIDE=SIDE, enable_fp_fusion=False
    )
    return [expected.numpy(), result.cpu().numpy(), images.numpy()]


ERASING_OPTIONS = {"const": {"value": 0.3}, "pixel": {"value": "random"}, "rand": {"mode": "rand"}}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("counts", [(1, 1), (1, 4)], ids=["one box", "some boxes"])
@pytest.mark.parametrize("kind", ERASING_OPTIONS)
def test_erase_is_bit_identical_to_the_reference(kind, counts, channels):
    erasing = T.RandomErasing(1.0, scale=(0.1, 0.6), min_count=counts[0], max_count=counts[1], **ERASING_OPTIONS[kind])
    for seed, size in enumerate([(37, 45), (16, 16), (5, 64)]):
        expected, result, images = erase_by_both([erasing], channels, size, seed=seed)
        np.testing.assert_array_equal(result.view(np.int32), expected.view(np.int32))
        assert (result != images).any()


@pytest.mark.parametrize(
    ("erasings", "count", "expected_changes"),
    [
        ([T.RandomErasing(1.0, value=(-0.1, 1e-9, 3.7))], 3, {True}),
        ([T.RandomErasing(0.5, value="random")], 8, {False, True}),
        ([T.RandomErasing(0.0, value="random")], 2, {False}),
        (
            [
                T.RandomErasing(1.0, scale=(0.4, 0.8), value="random"),
                T.RandomErasing(0.7, scale=(0.2, 0.5), value=(1.0, 2.0, 3.0)),
                T.RandomErasing(1.0, scale=(0.1, 0.3), mode="rand", max_count=3),
            ],
            3,
            {True},
        ),
    ],
    ids=["a value for each channel", "some images", "no images", "several erasings"],
)
def test_erase_of_some_images_is_bit_identical_to_the_reference(erasings, count, expected_changes):
    expected, result, images = erase_by_both(erasings, 3, (48, 31), count)
    np.testing.assert_array_equal(result, expected)
    assert set((result != images).any(axis=(1, 2, 3)).tolist()) == expected_changes


def test_erase_of_boxes_at_the_edges_of_tiles_is_bit_identical_to_the_reference():
    program = erasing_program([T.RandomErasing(1.0, value=(5.0, 6.0, 7.0))], 3, (70, 65), 2)
    image_boxes = [(69, 64, 1, 1), (32, 32, 1, 1), (31, 32, 2, 32), (0, 0, 32, 32)], [(31, 31, 1, 1), (63, 0, 1, 64)]
    boxes = np.zeros((2, 4, 4), np.int64)
    boxes[0], boxes[1, 1:3] = image_boxes
    program = replace(program, records=(replace(program.records[0], boxes_tlhw=boxes),))
    expected, result, _ = erase_program_by_both(program, 3, (70, 65))
    np.testing.assert_array_equal(result, expected)
    assert [(image[0] == 5.0).sum() for image in result] == [1 + 2 * 32 + 32 * 32, 1 + 64]


LAYOUTS = [
    ("contiguous", torch.float32),
    ("channels last", torch.float16),
    ("slice", torch.bfloat16),
    ("list", torch.float32),
]


@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS, ids=[layout for layout, _ in LAYOUTS])
@pytest.mark.parametrize("kind", ERASING_OPTIONS)
def test_erase_images_erases_images_of_any_layout_in_place(kind, layout, dtype):
    erasing = T.RandomErasing(0.7, scale=(0.05, 0.4), max_count=3, **ERASING_OPTIONS[kind])
    channels = 1 if layout == "list" else 3
    program = erasing_program([erasing], channels, (41, 70), 4)
    size = (50, 80) if layout == "slice" else (41, 70)
    original = torch.from_numpy(np.random.default_rng(0).normal(size=(6, channels, *size))).to(dtype)
    if layout == "channels last":
        original = original.contiguous(memory_format=torch.channels_last)
    expected, result = original.clone(), original.to(DEVICE).clone()
    expected_images, images = (batch[:, :, -41:, -70:] for batch in (expected, result))
    rows = np.array([0, 2, 3, 5])
    apply_late([expected_images[row] for row in rows], program, partners=None)
    erase_images(list(images) if layout == "list" else images, replace(program.records[0], rows=rows))
    assert torch.equal(result.cpu(), expected)
    assert not torch.equal(expected, original)


def test_erase_images_without_boxes_changes_nothing():
    images = torch.ones(2, 3, 16, 16, device=DEVICE)
    program = erasing_program([T.RandomErasing(0.0)], 3, (16, 16), 2)
    erase_images(images, program.records[0])
    assert (images == 1).all()
