"""MixUp and CutMix in a kernel are bit-identical to the reference in all dtypes and memory formats."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpuload import transforms as T
from gpuload.rng.philox import Key
from gpuload.stage.finish import apply_late, default_partners
from gpuload.stage.fused.mixing import mix
from gpuload.transforms.program.ops import PartnerMix

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)

MIXING = {
    "mixup": T.MixUp(alpha=0.8, num_classes=5),
    "cutmix": T.CutMix(num_classes=5),
    "either": T.RandomChoice([T.MixUp(num_classes=5), T.CutMix(num_classes=5)]),
    "some": T.RandomApply([T.MixUp(num_classes=5)], 0.5),
}


def random_images(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    if dtype == torch.uint8:
        return torch.from_numpy(rng.integers(0, 256, shape, np.uint8))
    return torch.from_numpy(rng.normal(scale=1.5, size=shape).astype(np.float32)).to(dtype)


def mix_by_both(images: torch.Tensor, transform, partners: np.ndarray | None, position: int = 0):
    """Mix the images by the reference and by the kernel, and return both results."""
    count, channels, *size = images.shape
    chain = T.Chain([T.Normalize([0.5] * channels, [0.25] * channels), transform])
    draws = chain.draw(Key(1, 2), np.arange(position, position + count), np.tile(np.array(size, np.int64), (count, 1)))
    _, program = draws.split()
    assert program is not None
    assert program.mix is not None
    expected = images.clone()
    apply_late(expected, program, partners=partners)
    mixed = images.to(DEVICE).clone()
    mix(mixed, program.mix, default_partners(count) if partners is None else partners)
    assert mixed.stride() == images.stride()
    return expected, mixed.cpu()


def are_bit_identical(result: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(result.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MIXING)
def test_mix_is_bit_identical_to_the_reference(name, dtype):
    for number, shape in enumerate([(6, 3, 32, 40), (8, 1, 17, 23), (3, 3, 5, 64)]):
        images = random_images(shape, dtype, number)
        expected, mixed = mix_by_both(images, MIXING[name], None, 2 * number)
        assert are_bit_identical(mixed, expected)
        assert not torch.equal(mixed, images)
        if len(images) % 2:
            assert torch.equal(mixed[-1], images[-1])  # it has no partner


@pytest.mark.parametrize("name", ["cutmix", "either"])
def test_mix_of_channels_last_images_is_bit_identical_to_the_reference(name):
    images = random_images((4, 3, 21, 35), torch.float16).contiguous(memory_format=torch.channels_last)
    expected, mixed = mix_by_both(images, MIXING[name], None)
    assert are_bit_identical(mixed, expected)
    assert not torch.equal(mixed, images)


def test_mix_mixes_each_image_with_its_explicit_partner():
    """Partners are not neighbors, image 5 has none, and images 0 and 3 are partners but do not change themselves."""
    images = random_images((6, 3, 16, 16), torch.float32)
    partners = np.array([4, 1, 3, 2, 0, 5])
    box_tlhw = np.zeros((6, 4), np.int64)
    box_tlhw[4] = 2, 3, 10, 5
    box_tlhw[1] = 1, 1, 4, 4  # has no effect, because image 1 is its own partner
    mixed = images.to(DEVICE).clone()
    mix(mixed, PartnerMix(np.array([1.0, 0.5, 0.25, 1.0, 0.5, 0.5]), box_tlhw), partners)
    mixed = mixed.cpu()
    expected = images.clone()
    expected[4, :, 2:12, 3:8] = images[0, :, 2:12, 3:8]
    expected[2] = images[3] * 0.75 + images[2] * 0.25
    assert are_bit_identical(mixed, expected)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -0.0])
def test_mix_with_a_share_of_one_leaves_the_image_unchanged(value):
    """Adding the partner with a share of 0 would spread an infinity, and turn -0 into 0."""
    images = random_images((2, 3, 4, 4), torch.float32)
    images[1] = value
    images[0, 0] = -0.0
    mixed = images.to(DEVICE).clone()
    mix(mixed, PartnerMix(np.array([1.0, 0.5]), np.zeros((2, 4), np.int64)), np.array([1, 0]))
    assert are_bit_identical(mixed[0].cpu(), images[0])


def test_mix_of_a_large_image_puts_its_pieces_on_the_first_axis_of_the_grid(monkeypatch):
    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *_, **__: None

    monkeypatch.setattr("gpuload.stage.fused.mixing._mix", Kernel())
    images = torch.empty(2, 3, 6000, 8000, dtype=torch.uint8)
    mix(images, PartnerMix(np.full(2, 0.5), np.zeros((2, 4), np.int64)), np.array([1, 0]))
    [(pieces, pairs)] = grids
    assert pieces > 65_535  # the limit of the second axis
    assert pairs == 1


def test_mix_without_partners_or_pixels_changes_nothing():
    for images, partners in ((random_images((2, 3, 4, 4), torch.float32), [0, 1]), (torch.empty(2, 3, 0, 4), [1, 0])):
        mixed = images.to(DEVICE).clone()
        mix(mixed, PartnerMix(np.full(2, 0.5), np.zeros((2, 4), np.int64)), np.array(partners))
        assert torch.equal(mixed.cpu(), images)


def test_mix_of_a_list_of_images_raises():
    with pytest.raises(AssertionError, match="only images of one size can be mixed"):
        mix([torch.zeros(3, 4, 4)] * 2, PartnerMix(np.full(2, 0.5), np.zeros((2, 4), np.int64)), np.array([1, 0]))
