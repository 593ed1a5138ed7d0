"""Images as planes through whole chains on the fused kernels: the bits of the same images H×W×C, by the same launches,
without a copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.matrix import matrix
from helpers.tensor_layouts import DENSE, LAYOUTS

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages, compile_stage
from gpuload.stage.combined_images import groups_of
from gpuload.stage.fused import runner, statistics
from gpuload.stage.fused.kernel import one_pass
from gpuload.transforms.program.ops import Combination

FLOATS = T.ToDtype("float32", scale=True)
CROP = T.RandomResizedCrop(14)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHAINS = {
    "classic": [CROP, T.RandomHorizontalFlip(), FLOATS, T.RandomErasing(0.8)],
    "flipped before": [T.RandomHorizontalFlip(), T.RandomVerticalFlip(), T.Resize((9, 15), "bicubic"), FLOATS],
    "cut": [T.RandomCrop(12), T.RandomRotate90(0.8), T.RandomHorizontalFlip()],
    "listed": [T.RandomTranspose(), T.Resize((15, 16), "nearest"), T.Pad(3, padding_mode="reflect"), T.RandomCrop(12)],
    "warped": [T.RandomAffine(30, interpolation="bilinear", fill=7), T.CenterCrop(12)],
    "warped, cubic": [T.RandomPerspective(0.4, 0.8, interpolation="bicubic"), T.CenterCrop(12)],
    "warped, nearest": [T.RandomAffine(30, (0.2, 0.2)), T.CenterCrop(12)],
    "blurred": [T.GaussianBlur(5), T.CenterCrop(12)],
    "sharpened": [T.RandomAdjustSharpness(2, 0.8), T.CenterCrop(12)],
    "counted first": [T.RandomChoice([T.RandomEqualize(1.0), T.RandomAutocontrast(1.0)]), T.CenterCrop(12)],
    "counted later": [T.RandomApply([T.RandomVerticalFlip(1.0)]), T.ColorJitter(0.4, 0.4), CROP, T.RandomEqualize()],
    "randaugment": [CROP, T.RandAugment(2), T.RandomApply([T.RandomErasing(1.0, value=9)]), FLOATS],
    "mixed": [CROP, FLOATS, T.RandomErasing(), T.CutMix(num_classes=3), T.RandomErasing(0.8, value=3.0)],
    "grey": [CROP, T.Grayscale(3), T.RandomInvert()],
    "own": [T.CenterCrop(13), T.Lambda(lambda images: 255 - images), T.RandomEqualize(), FLOATS],
    "put together": [T.Mosaic((20, 20)), T.RandomCrop(12)],
}


def images_of(make_images, channels: int, *, alike: bool) -> list[np.ndarray]:
    return [image[:21, :24] if alike else image for image in make_images(6, 4, channels, 21 + 3 * alike, 34)]


def batches(images: list[np.ndarray], layout: str) -> tuple[RaggedImages, RaggedImages]:
    """The same images: H×W×C, and as planes."""
    given = DENSE[layout](images) if layout in DENSE else LAYOUTS[layout](images)
    on_device = given.to(DEVICE) if isinstance(given, torch.Tensor) else [image.to(DEVICE) for image in given]
    labels = [f"image {number}" for number in range(len(images))]
    return RaggedImages.from_arrays(images, DEVICE), RaggedImages.from_planes(on_device, labels)


@pytest.fixture
def launches(monkeypatch) -> list[tuple[str, tuple[int, ...]]]:
    """The kernels that read images, and their grids."""
    seen = []

    class Watched:
        def __init__(self, name: str, kernel) -> None:
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid: tuple[int, ...]):
            seen.append((self.name, grid))
            return self.kernel[grid]

    monkeypatch.setattr(runner, "one_pass", Watched("one_pass", one_pass))
    monkeypatch.setattr(statistics, "_count", Watched("count", statistics._count))
    return seen


def compare(chain: T.Chain, both: tuple[RaggedImages, RaggedImages], **options) -> None:
    stage = compile_stage(chain, device=DEVICE, **options)
    positions = np.arange(len(both[0]))
    program = chain.draw(epoch_key(2, 0), positions, both[0].sizes_hw)
    for record in program.records:
        if isinstance(record, Combination):
            record.groups = groups_of(positions, record.group_size)
    expected, found = (stage(images, program) for images in both)
    assert torch.equal(found, expected)


@matrix(name=CHAINS, layout=["contiguous", "columns first", "within others"], channels=[1, 3])
def test_the_bits_and_launches_are_those_of_interleaved_images(make_images, launches, name, layout, channels):
    images = images_of(make_images, channels, alike=layout in DENSE)
    compare(T.Chain(CHAINS[name]), batches(images, layout), backend="fused")
    half = len(launches) // 2
    assert launches[:half] == launches[half:] != []


@pytest.mark.parametrize("name", ["classic", "counted first", "blurred", "grey"])
def test_kernels_read_planes_without_a_copy(make_images, monkeypatch, name):
    both = batches(images_of(make_images, 1 if name == "grey" else 3, alike=False), "within others")
    monkeypatch.setattr(RaggedImages, "interleave", None)
    compare(T.Chain(CHAINS[name]), both, backend="fused")


@pytest.mark.parametrize("layout", ["one colour", "one row", "one column", "one pixel"])
def test_planes_of_one_pixel_across(make_images, layout):
    height, width = {"one row": (1, 9), "one column": (9, 1), "one pixel": (1, 1)}.get(layout, (9, 9))
    image = torch.from_numpy(make_images(1, 1)[0][:height, :width].copy()).permute(2, 0, 1)
    given = image[:, :, :1].expand(4, 3, 9, 9) if layout == "one colour" else image.contiguous().expand(4, -1, -1, -1)
    arrays = [*given.permute(0, 2, 3, 1).contiguous().numpy()]
    both = RaggedImages.from_arrays(arrays, DEVICE), RaggedImages.from_planes(given.to(DEVICE), list("abcd"))
    transforms = [T.RandomTranspose(0.6), T.RandomHorizontalFlip(), T.ColorJitter(contrast=0.4), T.RandomEqualize(0.6)]
    compare(T.Chain([*transforms, T.Resize((5, 6)), T.GaussianBlur(3)]), both, backend="fused")


@pytest.mark.parametrize(("channels", "dtype"), [(2, "uint8"), (4, "uint8"), (3, "uint16"), (1, "float32")])
def test_images_that_kernels_do_not_read_are_copied(make_images, channels, dtype):
    images = [image.astype(dtype) for image in images_of(make_images, channels, alike=False)]
    chain = [CROP, T.RandomHorizontalFlip(), T.CenterCrop(9), FLOATS]
    compare(T.Chain(chain), batches(images, "within others"), backend="fused")


def test_planes_whose_pixels_lie_far_apart_are_copied(make_images, monkeypatch):
    both = batches(images_of(make_images, 3, alike=True), "columns first")
    copied, copy = [], RaggedImages.interleave
    monkeypatch.setattr(RaggedImages, "interleave", lambda *args: copied.append(args) or copy(*args))
    most = int(((both[1].shapes - 1) * both[1].steps).sum(axis=1).max())
    for reach, times in ((most + 1, 0), (most, 1)):
        monkeypatch.setattr(runner, "MAX_REACH_BYTES", reach)
        compare(T.Chain(CHAINS["classic"]), both, backend="fused")
        assert len(copied) == times
