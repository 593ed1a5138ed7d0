"""Kornia's operations, and whole chains on Kornia, beside the reference: levels, windows, layouts, what is cut into
runs, and how many images go together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from planes import LAYOUTS

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages, compile_stage
from gpuload.stage.kornia import runner
from gpuload.stage.kornia.runner import OPERATIONS, KorniaRunner, images_per_piece
from gpuload.stage.reference import operations as reference
from gpuload.transforms.program.ops import VALUES

NORMALIZE = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# The greatest difference from the reference, and how many numbers of a million may differ; those of all others are the
# same. Blur: weights that are no multiples of 2**-16.
APART = {"blur": (1, 2000)}


@pytest.fixture
def pieces(monkeypatch) -> None:
    """A few images of the size of these tests fill a piece."""
    monkeypatch.setattr(runner, "CPU_BYTES", 3 * 50 * 50 * 3 * runner.BYTES_PER_LEVEL)


def drawn(name: str, count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    found = np.zeros((count, VALUES))
    match name:
        case "solarize":
            found[:, 0] = rng.choice([0, 34 + 1e-14, 127.5, 255, 256, 100], count)
        case "posterize":
            found[:, 0] = rng.integers(0, 9, count)
        case "blur":
            found[:, :2] = rng.choice([1, 3, 9], 2)
            found[:, 2:4] = rng.uniform(0.1, 3, (count, 2))
        case _:
            found[:, 0] = rng.choice([0, 0.3, 0.9, 1, 1.5, 2], count)
    return found


def levels(make_images, channels: int) -> torch.Tensor:
    images = [image[:31, :37] for image in make_images(5, 9, channels, 40)]
    noise = np.random.default_rng(2).integers(0, 256, (2, 31, 37, channels), np.uint8)
    flat = np.full((1, 31, 37, channels), 77, np.uint8)
    return torch.from_numpy(np.concatenate([np.stack(images), noise, flat])).permute(0, 3, 1, 2).float().contiguous()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_those_of_the_reference(name, channels, make_images):
    given = levels(make_images, channels)
    most, per_million = APART.get(name, (0, 0))
    for seed in range(4):
        values = drawn(name, len(given), seed)
        before = given.clone()
        found = OPERATIONS[name](given, values)
        assert torch.equal(given, before)
        expected = reference.OPERATIONS[name](given.clone(), values)
        assert found.dtype == torch.float32
        assert (found == found.round()).all()
        assert found.min() >= 0
        assert found.max() <= 255
        difference = (found - expected).abs()
        assert difference.max() <= most
        assert (difference > 0).double().mean() * 1e6 <= per_million


@pytest.mark.parametrize("size", [(1, 1), (2, 9), (9, 2), (3, 3)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_on_small_images(name, size):
    given = torch.randint(0, 256, (4, 3, *size), generator=torch.Generator().manual_seed(1)).float()
    values = drawn(name, 4, 3)
    difference = OPERATIONS[name](given.clone(), values) - reference.OPERATIONS[name](given.clone(), values)
    assert difference.abs().max() <= APART.get(name, (0, 0))[0]


def test_a_kernel_wider_than_the_image_mirrors_it_again_and_again():
    given, values = torch.arange(24.0).view(2, 1, 3, 4) * 10, np.zeros((2, VALUES))
    values[:, :4] = 31, 23, 6.0, 4.0
    found = OPERATIONS["blur"](given, values)
    tiles = torch.cat([given, given.flip(2)[:, :, 1:-1]], 2).repeat(1, 1, 9, 1)
    tiles = torch.cat([tiles, tiles.flip(3)[:, :, :, 1:-1]], 3).repeat(1, 1, 1, 9)
    wide = OPERATIONS["blur"](tiles, values)[:, :, 16:19, 24:28]
    assert torch.equal(found, wide)


# Behind each, the greatest difference in levels, and that of the mean.
CHAINS = [
    ([T.RandomCrop(28, 4, pad_if_needed=True, fill=(1, 2, 3)), T.RandomHorizontalFlip()], 0, 0),
    ([T.RandomHorizontalFlip(), T.RandomCrop(28, 4, pad_if_needed=True, padding_mode="reflect")], 0, 0),
    ([T.Pad((3, 40), padding_mode="edge"), T.RandomVerticalFlip(), T.CenterCrop((90, 20))], 0, 0),
    ([T.RandomZoomOut(fill=9, p=1), T.CenterCrop(40)], 0, 0),
    ([T.RandomRotation(40, expand=True, fill=(9, 99, 199)), T.CenterCrop((30, 40)), T.RandomVerticalFlip()], 0, 0),
    ([T.RandomAffine(40, (0.2, 0.2), (0.5, 2), 20, "bilinear", fill=50), T.RandomCrop(28)], 1, 1e-3),
    ([T.RandomPerspective(0.6, 0.7), T.Pad((3, 4), fill=7), T.RandomCrop(24)], 1, 1e-3),
    ([T.RandomResizedCrop(24), T.ColorJitter(0.4), T.RandomHorizontalFlip()], 0, 0),
    ([T.ColorJitter(hue=0.5), T.RandomInvert(), T.RandomResizedCrop(24)], 0, 0),
    ([T.RandomCrop(24), T.RandomErasing(1.0, value=(1, 2, 3), max_count=3), T.RandomHorizontalFlip()], 0, 0),
    ([T.RandomCrop(24), T.GaussianBlur(9), T.RandomSolarize(128, 0.5)], 255, 0.1),
    ([T.RandomCrop(26), T.RandomAdjustSharpness(2), T.RandomPosterize(3), T.RandomInvert()], 0, 0),
    ([T.RandomApply([T.RandomCrop(24), T.Pad(4)], 0.5), T.CenterCrop(20)], 0, 0),
    (
        [T.RandomChoice([T.RandomRotation(90), T.RandomEqualize(1), T.RandomErasing(1, value=7)]), T.CenterCrop(21)],
        0,
        0,
    ),
    ([T.RandomOrder([T.RandomGrayscale(0.5), T.RandomSolarize(99), T.RandomHorizontalFlip()]), T.RandomCrop(9)], 0, 0),
    ([T.Grayscale(1), T.RandomCrop(20)], 0, 0),
    ([T.Resize(40), T.RandomRotation(20, "bicubic"), T.RandomInvert(), T.Resize(20), T.CenterCrop(20)], 0, 0),
]


@pytest.mark.parametrize("same_size", [True, False])
@pytest.mark.parametrize(("transforms", "most", "mean"), CHAINS, ids=str)
def test_levels_are_those_of_the_reference(transforms, most, mean, same_size, make_images, make_batch, pieces):
    chain = T.Chain(transforms)
    images = make_images(3, 11, low=50)
    if same_size:
        images = [np.ascontiguousarray(image[:50, :50]) for image in images]
    ragged, program = make_batch(chain, images)
    before = ragged.pixels.clone()
    expected = compile_stage(chain, device="cpu")(ragged, program)
    found = compile_stage(chain, device="cpu", backend="kornia")(ragged, program)
    assert torch.equal(ragged.pixels, before)
    difference = (found.int() - expected.int()).abs()
    assert difference.max() <= most
    assert difference.double().mean() <= mean


def test_what_lies_infinitely_far_away_is_filled(make_batch):
    class Tilted(T.RandomPerspective):
        def draw(self, uniforms, sizes_hw):
            record = super().draw(uniforms, sizes_hw)
            record.coefficients[:] = 1, 0, 0, 0, 1, 0, -1 / 4.5, 0  # w is 0 in the middle of column 4
            return record

    for interpolation in ("nearest", "bilinear"):
        chain = T.Chain([Tilted(0.5, 1.0, interpolation=interpolation, fill=9)])
        batch = make_batch(chain, [np.full((8, 8, 3), 200, np.uint8)])
        assert (compile_stage(chain, device="cpu", backend="kornia")(*batch)[0, :, :, 4] == 9).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("memory_format", ["contiguous_format", "channels_last"])
@pytest.mark.parametrize("end", [[NORMALIZE], [T.ToDtype("float32", scale=True)], [T.ToDtype("float32")]], ids=str)
def test_floats(end, memory_format, dtype, make_images, make_batch):
    chain = T.Chain([T.RandomCrop(20), *end, T.RandomErasing(0.5, value="random"), T.MixUp(num_classes=3)])
    ragged, program = make_batch(chain, make_images(1, 6))
    options = {"dtype": dtype, "memory_format": memory_format}
    expected = compile_stage(chain, device="cpu", **options)(ragged, program)
    found = compile_stage(chain, device="cpu", backend="kornia", **options)(ragged, program)
    assert found.dtype == expected.dtype
    assert found.is_contiguous(memory_format=getattr(torch, memory_format))
    # One unit in the last place, of a float32 and behind it of the dtype.
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(expected.dtype).eps, atol=2e-6)


@pytest.mark.parametrize("option", ["list", "pad"])
def test_results_of_different_sizes(option, make_images, make_batch):
    chain = T.Chain([T.RandomRotation(30, expand=True), T.Pad(2), NORMALIZE, T.RandomErasing(0.8)])
    ragged, program = make_batch(chain, make_images(2, 7))
    expected = compile_stage(chain, device="cpu", ragged=option)(ragged, program)
    found = compile_stage(chain, device="cpu", backend="kornia", ragged=option)(ragged, program)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


# All of Kornia's operators.
ALONE = [
    [
        T.RandomHorizontalFlip(),
        T.ColorJitter(0.8),
        T.GaussianBlur(5),
        T.RandomAffine(30, None, (0.7, 1.3), 5, "bilinear"),
    ],
    [
        T.RandomVerticalFlip(),
        T.RandomPerspective(0.3, interpolation="bilinear"),
        T.RandomEqualize(0.5),
        T.RandomErasing(),
    ],
    [T.RandomRotation(30), T.RandomGrayscale(0.5), T.RandomSolarize(99), T.RandomPosterize(5), T.RandomInvert()],
]


@pytest.mark.parametrize("transforms", ALONE, ids=str)
def test_an_image_comes_out_the_same_alone_and_among_256(transforms, make_batch, monkeypatch):
    """Whatever goes with it in its piece, in pieces of all sizes."""
    chain = T.Chain([*transforms, NORMALIZE])
    images = list(np.random.default_rng(7).integers(0, 256, (256, 24, 31, 3), np.uint8))
    stage = compile_stage(chain, device="cpu", backend="kornia")
    batch = make_batch(chain, images)
    monkeypatch.setattr(runner, "CPU_BYTES", 1 << 40)
    together = stage(*batch)
    monkeypatch.setattr(runner, "CPU_BYTES", 5 * 24 * 31 * 3 * runner.BYTES_PER_LEVEL)
    assert torch.equal(stage(*batch), together)
    for row in range(0, 256, 17):
        assert torch.equal(stage(*make_batch(chain, [images[row]], first=row))[0], together[row])


@pytest.mark.parametrize(("free", "images"), [(0, 1), (1 << 20, 1), (64 << 20, 6), (1 << 40, 114_130)])
def test_as_many_images_go_together_as_memory_allows(free, images):
    """Of the largest window on their way, which has 224×224 pixels of three channels here."""
    windows = [np.array([[5, 5, 224, 224], [0, 0, 20, 20]]), np.array([[0, 0, 100, 100]] * 2)]
    assert images_per_piece(windows, np.array([[224, 224, 3]] * 2), free) == images
    assert images_per_piece(windows, np.array([[224, 224, 1]] * 2), free) == images  # a map has as much for one channel


class Gpu:
    """A device's runtime with so much free memory."""

    def __init__(self, free: int | None) -> None:
        self.free_bytes = lambda: free


@pytest.mark.parametrize(
    ("free", "expected"), [(1 << 40, [40]), (2 * 12 * 3 * 50 * 50 * 64, [12] * 3 + [4]), (None, [40])]
)
def test_pieces_on_a_gpu_are_of_the_memory_that_is_free(free, expected, make_batch, monkeypatch):
    """Half of what is free; where a runtime does not say, as many as the reference takes."""
    seen = []
    invert, plain = OPERATIONS["invert"], KorniaRunner.__init__

    def counted(levels, values):
        seen.append(len(levels))
        return invert(levels, values)

    def on_a_gpu(self, *arguments):
        plain(self, *arguments)
        self._gpu = Gpu(free)

    monkeypatch.setitem(OPERATIONS, "invert", counted)
    monkeypatch.setattr(KorniaRunner, "__init__", on_a_gpu)
    chain = T.Chain([T.RandomInvert(1.0)])
    batch = make_batch(chain, [np.zeros((50, 50, 3), np.uint8)] * 40)
    compile_stage(chain, device="cpu", backend="kornia")(*batch)
    assert seen == expected


@pytest.mark.parametrize("layout", ["within others", "each"])
def test_planes_give_the_bits_of_interleaved_images(make_images, layout):
    arrays = make_images(4, 4, low=30, high=50)
    both = RaggedImages.from_arrays(arrays), RaggedImages.from_planes(LAYOUTS[layout](arrays), list("abcd"))
    chain = T.Chain([T.RandomResizedCrop(20), T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4), NORMALIZE])
    draws = chain.draw(epoch_key(0, 0), np.arange(4), both[0].sizes_hw)
    stage = compile_stage(chain, device="cpu", backend="kornia")
    expected, found = (stage(images, draws) for images in both)
    assert torch.equal(found, expected)
