"""Operations on single pixels in a kernel: the levels are those of the reference, in any order of operations."""

# A call of a kernel's function raises outside of kernels, and type checkers take it for that.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from gpuload.stage.fused.pointwise import operate
from gpuload.stage.reference.color import equalize_table
from gpuload.stage.reference.operations import OPERATIONS
from gpuload.transforms.program.fusing.passes import ERASE_BOX, POINTWISE
from gpuload.transforms.program.ops import OPS, VALUES, code

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOOKED_UP = ("contrast", "equalize", "autocontrast")


@triton.jit
def line(
    levels_ptr,
    codes_ptr,
    values_ptr,
    tables_ptr,
    count,
    height,
    width,
    OPERATIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
    SIDE: tl.constexpr,
):
    """All operations on one image C×H×W of float32."""
    ys = tl.arange(0, SIDE)
    xs = tl.arange(0, SIDE)
    there = (ys[:, None] < height) & (xs[None, :] < width)
    places = levels_ptr + ys[:, None] * width + xs[None, :]
    plane = height * width if CHANNELS == 3 else 0
    red = tl.load(places, there, 0.0)
    green = tl.load(places + plane, there, 0.0)
    blue = tl.load(places + 2 * plane, there, 0.0)
    at = 0
    while at < count:
        code = tl.load(codes_ptr + at)
        red, green, blue = operate(
            red, green, blue, ys, xs, code, values_ptr + at * 8, tables_ptr + at * 768, OPERATIONS, CHANNELS
        )
        at += 1
    tl.store(places, red, there)
    if CHANNELS == 3:
        tl.store(places + plane, green, there)
        tl.store(places + 2 * plane, blue, there)


def run(image: np.ndarray, operations, tables=None) -> np.ndarray:
    """Operations (code, values …) on an image C×H×W."""
    channels, height, width = image.shape
    levels = torch.from_numpy(image.astype(np.float32)).to(DEVICE)
    values = np.zeros((len(operations), VALUES))
    for row, (_, *numbers) in zip(values, operations, strict=True):
        row[: len(numbers)] = numbers
    codes = torch.tensor([code for code, *_ in operations], dtype=torch.int64, device=DEVICE)
    if tables is None:
        tables = torch.zeros(len(operations), 3, 256, dtype=torch.uint8)
    line[(1,)](
        levels,
        codes,
        torch.from_numpy(values).to(DEVICE),
        tables.to(DEVICE),
        len(operations),
        height,
        width,
        OPERATIONS=sum(1 << number for number in {code for code, *_ in operations}),
        CHANNELS=channels,
        SIDE=triton.next_power_of_2(max(height, width)),
        enable_fp_fusion=False,
    )
    return levels.cpu().numpy()


def expected(image: np.ndarray, operations) -> np.ndarray:
    levels = torch.from_numpy(image.astype(np.float32))[None]
    for number, *values in operations:
        row = np.zeros((1, VALUES))
        row[0, : len(values)] = values
        levels = OPERATIONS[OPS[number]](levels.clone(), row)
    return levels[0].numpy()


def pictures(channels: int = 3) -> list[np.ndarray]:
    """Random, of one colour, nearly black, of few levels; of odd sizes."""
    rng = np.random.default_rng(channels)
    return [
        rng.integers(0, 256, (channels, 61, 47), np.uint8),
        np.broadcast_to(rng.integers(0, 256, (channels, 1, 1), np.uint8), (channels, 3, 5)).copy(),
        rng.integers(0, 3, (channels, 17, 64), np.uint8),
        rng.choice(np.array([0, 1, 127, 128, 254, 255], np.uint8), (channels, 33, 31)),
    ]


# Factors in steps, as policies have them: their products with whole numbers lie next to whole numbers.
FACTORS = (0.0, 1e-7, 0.1, 0.3, 0.49999997, 0.5, 0.7, 1.0, 1.12, 1.3, 1.6, 1.7, 1.9, 3.0)
CASES = [
    *[("brightness", factor) for factor in FACTORS],
    *[("saturation", factor) for factor in FACTORS],
    *[("hue", factor) for factor in (-0.5, -0.1, -0.001, 0.0, 0.002, 0.02, 0.1, 0.37, 0.5)],
    *[("solarize", threshold) for threshold in (0.0, 0.5, 34 + 1e-14, 128.0, 255.0, 255.5, 256.0, 300.0)],
    *[("posterize", bits) for bits in (0.0, 1.0, 4.0, 7.0, 8.0)],
    ("invert",),
    ("grayscale",),
    *[("permute", *order) for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1))],
    *[("solarize_add", threshold, added) for threshold, added in ((128, 40), (0, 110), (128, 0), (256, 110))],
]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", list(dict.fromkeys(name for name, *_ in CASES)))
def test_the_levels_are_those_of_the_reference(name, channels):
    for kind, *values in CASES:
        for image in pictures(channels) if kind == name else []:
            operation = [(code(name), *values)]
            np.testing.assert_array_equal(run(image, operation), expected(image, operation), str((kind, values)))


def test_a_blend_with_grey_rounds_its_product_and_its_sum():
    """Rounding only the sum would change 1070 of the 65,536 pairs with a factor of 1.6, and 701 with 1.7."""
    reds, greys = np.meshgrid(np.arange(256), np.arange(256))
    grey = greys.astype(np.uint8)
    # Green and blue are such that the luma is the grey level wanted, or nearly.
    rest = np.clip(np.rint((grey - 0.299 * reds) / 0.701), 0, 255)
    image = np.stack([reds, rest, rest]).astype(np.uint8)
    for factor in (1.6, 1.7):
        # A block of 256×256 would be a thread's hundreds of levels, which Triton takes minutes to compile.
        for part in (part for rows in np.split(image, 4, axis=1) for part in np.split(rows, 4, axis=2)):
            operation = [(code("saturation"), factor)]
            np.testing.assert_array_equal(run(part, operation), expected(part, operation))


def test_hue_of_every_kind_of_colour():
    """Greys, pure colours, and those where two channels are equal."""
    steps = np.array([0, 1, 2, 63, 127, 128, 200, 255], np.uint8)
    colours = np.stack(np.meshgrid(steps, steps, steps)).reshape(3, 16, 32)
    for factor in (0.0, 1 / 255, 0.25, -0.25, 0.4999):
        operation = [(code("hue"), factor)]
        np.testing.assert_array_equal(run(colours, operation), expected(colours, operation))


@pytest.mark.parametrize("channels", [1, 3])
def test_the_order_is_data(channels):
    image = pictures(channels)[0]
    some = [
        (code("brightness"), 1.3),
        (code("hue"), 0.1),
        (code("identity"),),
        (code("saturation"), 0.6),
        (code("solarize"), 100.0),
        (code("posterize"), 5.0),
    ]
    rng = np.random.default_rng(0)
    results = []
    for _ in range(4):
        order = [some[number] for number in rng.permutation(len(some))]
        without = [entry for entry in order if entry[0] != code("identity")]
        results.append(run(image, order))
        np.testing.assert_array_equal(results[-1], expected(image, without))
    assert any((result != results[0]).any() for result in results[1:])


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", LOOKED_UP)
def test_tables_are_looked_up(name, channels):
    image = pictures(channels)[0]
    counts = torch.stack([torch.bincount(torch.from_numpy(plane).ravel().long(), minlength=256) for plane in image])
    tables = torch.zeros(1, 3, 256, dtype=torch.uint8)
    tables[0, :channels] = equalize_table(counts).to(torch.uint8)
    result = run(image, [(code(name),)], tables)
    np.testing.assert_array_equal(result, expected(image, [(code("equalize"),)]))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("box", [(3, 5, 10, 20), (-4, -3, 9, 30), (50, 40, 30, 30), (2, 2, 0, 0), (0, 0, 61, 47)])
def test_a_box_of_levels_is_erased(channels, box):
    image = pictures(channels)[0]
    colour = (7, 99, 255)[:channels]
    top, left, height, width = box
    wanted = image.astype(np.float32)
    inside = wanted[:, max(top, 0) : max(top + height, 0), max(left, 0) : max(left + width, 0)]
    inside[:] = np.array(colour)[:, None, None]
    np.testing.assert_array_equal(run(image, [(ERASE_BOX, *box, *colour)]), wanted)


def test_what_is_called_pointwise_is_done():
    """Each operation in the list changes a random image, except identity; the codes are those of the parameters."""
    assert ERASE_BOX not in range(len(OPS))
    others = {"sharpness", "blur", "noise", "jpeg", "warp", "pillow_blur"}
    assert set(OPS) - set(POINTWISE) == others, (
        "add a new operation to POINTWISE in gpuload/transforms/program/fusing/passes.py, or to `others` in this test"
    )
    values = {"brightness": (0.5,), "saturation": (0.2,), "hue": (0.3,), "solarize": (90,), "posterize": (2,)}
    values |= {"permute": (2, 0, 1), "solarize_add": (128, 40)}
    for name in POINTWISE:
        image = pictures()[0]
        result = run(image, [(code(name), *values.get(name, ()))])  # tables are all 0
        assert (result == image).all() == (name == "identity"), name
