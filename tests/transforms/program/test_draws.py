"""Programs have the sizes and boxes of torchvision, and are adapted to regions that were resized by their decoder."""

from __future__ import annotations

import numpy as np
import pytest
from transforms.drawing import draw

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.transforms.program.draws import image_table
from gpuload.transforms.program.ops import code


@pytest.mark.parametrize(
    ("size_hw", "box"), [((10, 1000), [0, 493, 10, 13]), ((1000, 10), [493, 0, 13, 10]), ((1, 1), [0, 0, 1, 1])]
)
def test_random_resized_crop_falls_back_to_the_central_box(size_hw, box):
    [record] = draw(T.RandomResizedCrop(8, scale=(0.9, 1.0)), size_hw=size_hw, count=5).records
    assert record.box_tlhw.tolist() == [box] * 5


def test_color_jitter_draws_the_same_hue_with_and_without_brightness():
    factors = []
    for jitter in (T.ColorJitter(0.4, hue=0.1), T.ColorJitter(hue=0.1)):
        [record] = draw(jitter).records
        factors.append(record.values[:, :, 0][record.codes == code("hue")])
    np.testing.assert_array_equal(*factors)


@pytest.mark.parametrize(
    ("resize", "size", "expected"),
    [
        (T.Resize(256), (375, 500), (256, 341)),
        (T.Resize(256), (500, 333), (384, 256)),
        (T.Resize(256), (300, 300), (256, 256)),
        (T.Resize(256, max_size=300), (375, 500), (225, 300)),
        (T.Resize(None, max_size=250), (375, 500), (187, 250)),
        (T.Resize((30, 40)), (375, 500), (30, 40)),
        (T.Resize(10, max_size=20), (1, 1000), (1, 20)),
    ],
)
def test_resize_rounds_sizes_like_torchvision(resize, size, expected):
    assert tuple(draw(resize, size_hw=size, count=1).results_hw[0]) == expected
    assert T.Chain([T.CenterCrop(size), resize]).output_size_hw == expected


def test_center_crop_rounds_and_pads_like_torchvision():
    sizes = np.array([[10, 11], [11, 12], [12, 13], [7, 6], [6, 20]])
    boxes = T.Chain([T.CenterCrop(8)]).draw(epoch_key(0, 0), np.arange(5), sizes).records[0].box_tlhw
    # Halves are rounded to even numbers; if an odd number of pixels is missing, fewer are added at the top and left.
    assert boxes[:, :2].tolist() == [[1, 2], [2, 2], [2, 2], [0, -1], [-1, 6]]


def test_of_decoded_makes_the_resize_of_a_resized_region_an_identity():
    chain = T.Chain([T.Resize((20, 30)), T.RandomHorizontalFlip(), T.CenterCrop(16)])
    program = chain.draw(epoch_key(8, 0), np.arange(3), np.array([[200, 300], [90, 80], [41, 33]]))
    windows = program.windows_tlhw[0]
    shapes = np.hstack([windows[:, 2:], np.full((3, 1), 3)])
    unresized_images = image_table(np.arange(3), shapes, program.sizes_hw, windows)
    assert program.of_decoded(unresized_images)[0] is program
    resized_images = unresized_images.copy()
    resized_images["shape"][1, :2], resized_images["region_tlhw"][1] = (20, 30), (0, 0, 90, 80)

    decoded, images = program.of_decoded(resized_images)
    assert images["region_tlhw"].tolist() == [windows[0].tolist(), [0, 0, 20, 30], windows[2].tolist()]
    assert images["size_hw"].tolist() == decoded.sizes_hw.tolist()
    assert (images["offset"].tolist(), images["shape"].tolist()) == ([0, 1, 2], resized_images["shape"].tolist())
    assert decoded.sizes_hw.tolist() == [[200, 300], [20, 30], [41, 33]]
    assert decoded.resize is not None
    assert decoded.resize.box_tlhw.tolist() == [[0, 0, 200, 300], [0, 0, 20, 30], [0, 0, 41, 33]]
    assert decoded.resize.sizes_hw.tolist() == decoded.sizes_hw.tolist()
    assert decoded.results_hw is program.results_hw
    for expected, windows_tlhw in zip(program.windows_tlhw[1:], decoded.windows_tlhw[1:], strict=True):
        np.testing.assert_array_equal(expected, windows_tlhw)
    top, left, height, width = decoded.windows_tlhw[0][1]
    assert 0 <= top < top + height <= 20
    assert 0 <= left < left + width <= 30


def test_program_resize_is_a_resize_before_all_records_that_change_pixels():
    def resize_of(*transforms: T.Transform) -> object:
        return T.Chain(transforms).draw(epoch_key(8, 0), np.arange(2), np.array([[90, 80], [50, 60]])).resize

    assert resize_of(T.Resize(20), T.RandomInvert()) is not None
    assert resize_of(T.ToDtype("float32"), T.Resize(20)) is not None
    assert resize_of(T.RandomInvert(), T.Resize(20)) is None
    assert resize_of(T.CenterCrop(20)) is None
    assert resize_of(T.RandomApply([T.Resize(20)], 0.5)) is None
    assert resize_of() is None
