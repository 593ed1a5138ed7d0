"""Operations on single pixels in a kernel give the levels of the reference, in any order of operations."""

# Outside kernels, calls of a kernel's function raise, so type checkers report them.
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
TABLE_OPERATIONS = ("contrast", "equalize", "autocontrast")


@triton.jit
def apply_operations(
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
    ys = tl.arange(0, SIDE)
    xs = tl.arange(0, SIDE)
    inside = (ys[:, None] < height) & (xs[None, :] < width)
    pointers = levels_ptr + ys[:, None] * width + xs[None, :]
    plane = height * width if CHANNELS == 3 else 0
    red = tl.load(pointers, inside, 0.0)
    green = tl.load(pointers + plane, inside, 0.0)
    blue = tl.load(pointers + 2 * plane, inside, 0.0)
    index = 0  # of an operation, which has 8 values and 3 tables of 256 levels
    while index < count:
        code = tl.load(codes_ptr + index)
        red, green, blue = operate(
            red, green, blue, ys, xs, code, values_ptr + index * 8, tables_ptr + index * 768, OPERATIONS, CHANNELS
        )
        index += 1
    tl.store(pointers, red, inside)
    if CHANNELS == 3:
        tl.store(pointers + plane, green, inside)
        tl.store(pointers + 2 * plane, blue, inside)


def run_kernel(image: np.ndarray, operations, tables=None) -> np.ndarray:
    """Apply operations (code, values …) to a C×H×W image by the kernel."""
    channels, height, width = image.shape
    levels = torch.from_numpy(image.astype(np.float32)).to(DEVICE)
    values = np.zeros((len(operations), VALUES))
    for row, (_, *numbers) in zip(values, operations, strict=True):
        row[: len(numbers)] = numbers
    codes = torch.tensor([code for code, *_ in operations], dtype=torch.int64, device=DEVICE)
    if tables is None:
        tables = torch.zeros(len(operations), 3, 256, dtype=torch.uint8)
    apply_operations[(1,)](
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


def reference_levels(image: np.ndarray, operations) -> np.ndarray:
    levels = torch.from_numpy(image.astype(np.float32))[None]
    for number, *values in operations:
        row = np.zeros((1, VALUES))
        row[0, : len(values)] = values
        levels = OPERATIONS[OPS[number]](levels.clone(), row)
    return levels[0].numpy()


def varied_images(channels: int = 3) -> list[np.ndarray]:
    """Generate images of odd sizes: random, of one color, nearly black, and of few levels."""
    rng = np.random.default_rng(channels)
    return [
        rng.integers(0, 256, (channels, 61, 47), np.uint8),
        np.broadcast_to(rng.integers(0, 256, (channels, 1, 1), np.uint8), (channels, 3, 5)).copy(),
        rng.integers(0, 3, (channels, 17, 64), np.uint8),
        rng.choice(np.array([0, 1, 127, 128, 254, 255], np.uint8), (channels, 33, 31)),
    ]


# Round factors, as in policies, because their products with integers are close to integers.
FACTORS = (0.0, 1e-7, 0.1, 0.3, 0.49999997, 0.5, 0.7, 1.0, 1.12, 1.3, 1.6, 1.7, 1.9, 3.0)
OPERATION_CASES = [
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
@pytest.mark.parametrize("name", list(dict.fromkeys(name for name, *_ in OPERATION_CASES)))
def test_operate_gives_the_levels_of_the_reference(name, channels):
    for case_name, *values in OPERATION_CASES:
        for image in varied_images(channels) if case_name == name else []:
            operation = [(code(name), *values)]
            np.testing.assert_array_equal(
                run_kernel(image, operation), reference_levels(image, operation), str((case_name, values))
            )


def test_saturation_rounds_both_its_product_and_its_sum():
    """Rounding only the sum would change 1070 of the 65,536 pairs with a factor of 1.6, and 701 with 1.7."""
    reds, grays = np.meshgrid(np.arange(256), np.arange(256))
    gray = grays.astype(np.uint8)
    # With these levels of green and blue, the luma is the gray level, or close to it.
    green_and_blue = np.clip(np.rint((gray - 0.299 * reds) / 0.701), 0, 255)
    image = np.stack([reds, green_and_blue, green_and_blue]).astype(np.uint8)
    for factor in (1.6, 1.7):
        # Triton would take minutes to compile a block of 256×256, which has hundreds of levels per thread.
        for part in (part for rows in np.split(image, 4, axis=1) for part in np.split(rows, 4, axis=2)):
            operation = [(code("saturation"), factor)]
            np.testing.assert_array_equal(run_kernel(part, operation), reference_levels(part, operation))


def test_hue_of_gray_pure_and_mixed_colors_gives_the_levels_of_the_reference():
    steps = np.array([0, 1, 2, 63, 127, 128, 200, 255], np.uint8)
    colors = np.stack(np.meshgrid(steps, steps, steps)).reshape(3, 16, 32)
    for factor in (0.0, 1 / 255, 0.25, -0.25, 0.4999):
        operation = [(code("hue"), factor)]
        np.testing.assert_array_equal(run_kernel(colors, operation), reference_levels(colors, operation))


@pytest.mark.parametrize("channels", [1, 3])
def test_operate_applies_operations_in_any_order(channels):
    image = varied_images(channels)[0]
    operations = [
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
        order = [operations[number] for number in rng.permutation(len(operations))]
        without_identity = [entry for entry in order if entry[0] != code("identity")]
        results.append(run_kernel(image, order))
        np.testing.assert_array_equal(results[-1], reference_levels(image, without_identity))
    assert len({result.tobytes() for result in results}) > 1, "the order of operations has no effect"


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", TABLE_OPERATIONS)
def test_operate_looks_levels_up_in_tables(name, channels):
    image = varied_images(channels)[0]
    counts = torch.stack([torch.bincount(torch.from_numpy(plane).ravel().long(), minlength=256) for plane in image])
    tables = torch.zeros(1, 3, 256, dtype=torch.uint8)
    tables[0, :channels] = equalize_table(counts).to(torch.uint8)
    result = run_kernel(image, [(code(name),)], tables)
    np.testing.assert_array_equal(result, reference_levels(image, [(code("equalize"),)]))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("box", [(3, 5, 10, 20), (-4, -3, 9, 30), (50, 40, 30, 30), (2, 2, 0, 0), (0, 0, 61, 47)])
def test_operate_erases_a_box_of_levels(channels, box):
    image = varied_images(channels)[0]
    color = (7, 99, 255)[:channels]
    top, left, height, width = box
    expected_levels = image.astype(np.float32)
    box_levels = expected_levels[:, max(top, 0) : max(top + height, 0), max(left, 0) : max(left + width, 0)]
    box_levels[:] = np.array(color)[:, None, None]
    np.testing.assert_array_equal(run_kernel(image, [(ERASE_BOX, *box, *color)]), expected_levels)


def test_operate_changes_the_image_for_each_pointwise_operation_except_identity():
    assert ERASE_BOX not in range(len(OPS))
    not_pointwise = {
        "sharpness", "blur", "noise", "jpeg", "warp", "pillow_blur", "clahe", "illumination", "motion_blur", "shadow"
    }  # fmt: skip
    assert set(OPS) - set(POINTWISE) == not_pointwise, (
        "add a new operation to POINTWISE in gpuload/transforms/program/fusing/passes.py, or to `not_pointwise` here"
    )
    values = {"brightness": (0.5,), "saturation": (0.2,), "hue": (0.3,), "solarize": (90,), "posterize": (2,)}
    values |= {"permute": (2, 0, 1), "solarize_add": (128, 40)}
    for name in POINTWISE:
        image = varied_images()[0]
        result = run_kernel(image, [(code(name), *values.get(name, ()))])  # tables are all 0
        assert (result == image).all() == (name == "identity"), name
