"""The Kornia runner: results are bit-identical to those of Kornia's functions, and do not depend on the batch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.tensor_layouts import LAYOUTS, interleaved_and_planes
from kornia.enhance import normalize
from kornia.geometry.transform import hflip, resize, vflip, warp_affine, warp_perspective

import gpuload as gl
from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import compile_stage
from gpuload.stage.kornia import runner
from gpuload.stage.kornia.operators import OPERATORS, forward_matrices
from gpuload.stage.kornia.runner import KorniaRunner, images_per_piece
from gpuload.transforms.program.ops import OPS

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NORMALIZE = T.Normalize(MEAN, STD)


def use_gpu_code(monkeypatch, free_bytes: int | None) -> None:
    """Make the runner use its code for GPUs on the CPU, as if a GPU had this much free memory."""
    original_init = KorniaRunner.__init__

    def init(self, *arguments):
        original_init(self, *arguments)
        self._gpu, self.reads_planes = SimpleNamespace(free_bytes=lambda: free_bytes), False

    monkeypatch.setattr(KorniaRunner, "__init__", init)


@pytest.fixture
def with_gpu_code(monkeypatch) -> None:
    use_gpu_code(monkeypatch, 1 << 40)


def to_float_batch(image: np.ndarray) -> torch.Tensor:
    """Convert an H×W×C uint8 image to 1×C×H×W float32 in 0 … 1."""
    return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))[None].float() / 255


def to_levels(images: torch.Tensor) -> torch.Tensor:
    return images.mul(255).round().clamp(0, 255).to(torch.uint8)


def run(transforms, make_batch, images, **options):
    """Return the batch, or the list of images, and the records."""
    chain = T.Chain(transforms)
    ragged, program = make_batch(chain, images)
    return compile_stage(chain, device="cpu", backend="kornia", **options)(ragged, program), program.records


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
def test_resized_crop_is_bit_identical_to_kornias_resize_of_its_box(interpolation, make_images, make_batch):
    images = make_images(3, 7)
    results, [box] = run([T.RandomResizedCrop((20, 24), interpolation=interpolation)], make_batch, images)
    for image, result, (top, left, height, width) in zip(images, results, box.box_tlhw.tolist(), strict=True):
        cropped = to_float_batch(image[top : top + height, left : left + width])
        assert torch.equal(result[None], to_levels(resize(cropped, (20, 24), interpolation, antialias=False)))


@pytest.mark.parametrize("ragged", ["error", "list"])
def test_crop_after_a_resize_is_bit_identical_to_the_crop_of_the_complete_resize(ragged, make_images, make_batch):
    """Only the part of the image that the crop shows is decoded."""
    images = make_images(4, 6)
    results, [resizing, crop] = run([T.Resize(50), T.RandomCrop(30)], make_batch, images, ragged=ragged)
    for index, (image, result) in enumerate(zip(images, results, strict=True)):
        expected = to_levels(resize(to_float_batch(image), tuple(resizing.size_hw[index].tolist())))[0]
        top, left = crop.box_tlhw[index, :2].tolist()
        assert torch.equal(result, expected[:, top : top + 30, left : left + 30])


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_images_resized_together_equal_those_resized_one_by_one(interpolation, make_images, make_batch, with_gpu_code):
    """On CUDA, `warp_affine` resizes images that were extended by their border pixels."""
    images = [*make_images(6, 8, low=20, high=140), np.full((1, 1, 3), 99, np.uint8)]
    transforms = [T.Resize((50, 60), interpolation), T.RandomCrop(30), T.ToDtype("float32", scale=True)]
    results, [_, crop, _] = run(transforms, make_batch, images)
    for index, image in enumerate(images):
        top, left = crop.box_tlhw[index, :2].tolist()
        expected = resize(to_float_batch(image), (50, 60), interpolation, antialias=False).clamp(0, 1)
        expected = expected[0, :, top : top + 30, left : left + 30]
        torch.testing.assert_close(results[index], expected, rtol=0, atol=1e-4)


def test_images_resized_after_another_operation_equal_kornias_resize(make_images, make_batch, with_gpu_code):
    images = make_images(6, 5)
    transforms = [T.RandomInvert(1.0), T.RandomResizedCrop(20), T.ToDtype("float32", scale=True)]
    results, [_, box, _] = run(transforms, make_batch, images)
    for image, result, (top, left, height, width) in zip(images, results, box.box_tlhw.tolist(), strict=True):
        expected = resize(1 - to_float_batch(image[top : top + height, left : left + width]), (20, 20))[0]
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("fill", [0, (9, 99, 199)])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("kind", [T.RandomAffine, T.RandomPerspective])
def test_warp_is_bit_identical_to_kornias_warp(kind, interpolation, fill, make_batch):
    images = list(np.random.default_rng(1).integers(0, 256, (6, 40, 50, 3), np.uint8))
    options = {"degrees": 40, "shear": 10} if kind is T.RandomAffine else {"p": 0.8}
    results, [warp] = run([kind(interpolation=interpolation, fill=fill, **options)], make_batch, images)
    matrices = torch.from_numpy(forward_matrices(warp.coefficients, np.zeros((6, 2), np.int64))).float()
    padding = {"padding_mode": "fill", "fill_value": torch.tensor(fill).float() / 255} if fill else {}
    for index, image in enumerate(images):
        kornia_warp, matrix = (
            (warp_affine, matrices[[index], :2]) if kind is T.RandomAffine else (warp_perspective, matrices[[index]])
        )
        expected = to_float_batch(image)
        if warp.warped[index]:
            expected = kornia_warp(expected, matrix, (40, 50), interpolation, align_corners=False, **padding)
        assert torch.equal(results[[index]], to_levels(expected))


def test_warped_pixels_are_within_two_levels_of_the_reference(run_stage):
    """The image is smooth, rotated about its center, shifted and cropped."""
    y, x = np.mgrid[:60, :70]
    image = np.stack([2 * x + y, 255 - 3 * y, x + y], axis=2).astype(np.uint8)
    transforms = [T.RandomAffine((20, 30), (0.1, 0.1), (1.2, 1.4), 5, "bilinear"), T.CenterCrop((30, 36))]
    expected, result = (run_stage(transforms, [image] * 5, backend=name) for name in ("torch", "kornia"))
    assert (result.int() - expected.int()).abs().max() <= 2


def test_flips_transposition_and_normalize_are_bit_identical_to_kornias_functions(make_batch):
    images = list(np.random.default_rng(1).integers(0, 256, (8, 20, 20, 3), np.uint8))
    transforms = [T.RandomHorizontalFlip(), T.RandomVerticalFlip(), T.RandomTranspose(), NORMALIZE]
    results, [horizontal, vertical, transposition, _] = run(transforms, make_batch, images)
    for index, image in enumerate(images):
        expected = to_float_batch(image)
        expected = hflip(expected) if horizontal.flipped[index] else expected
        expected = vflip(expected) if vertical.flipped[index] else expected
        expected = expected.mT if transposition.transposed[index] else expected
        assert torch.equal(results[[index]], normalize(expected, torch.tensor(MEAN), torch.tensor(STD)))


def test_operations_run_in_the_order_drawn_for_each_image_without_rounding(make_batch):
    """Between operations, values are not rounded to levels."""
    images = list(np.random.default_rng(1).integers(0, 256, (12, 20, 24, 3), np.uint8))
    results, [jitter, _] = run([T.ColorJitter(0.4, 0.4, 0.4, 0.1), NORMALIZE], make_batch, images)
    assert len({*map(tuple, jitter.codes.tolist())}) > 3
    for index, image in enumerate(images):
        expected = to_float_batch(image)
        for code, values in zip(jitter.codes[index], jitter.values[index], strict=True):
            expected = OPERATORS[OPS[code]](expected, values[None])
        assert torch.equal(results[[index]], normalize(expected, torch.tensor(MEAN), torch.tensor(STD)))


def test_images_without_an_operation_keep_their_levels(make_images, make_batch):
    images = make_images(2, 9)
    transforms = [T.RandomApply([T.ColorJitter(0.9, 0.9), T.RandomAffine(30)], 0.4)]
    results, [jitter, *_] = run(transforms, make_batch, images, ragged="list")
    unchanged = sorted({*range(9)} - {*jitter.rows.tolist()})
    assert unchanged
    for row in unchanged:
        assert np.array_equal(results[row].permute(1, 2, 0).numpy(), images[row])


def test_branch_that_no_image_takes_changes_nothing(make_images, run_stage):
    images, branch = make_images(2, 3), [T.Resize(9), T.RandAugment(), T.RandomErasing()]
    results = run_stage([T.RandomApply(branch, 0.0)], images, backend="kornia", ragged="list")
    for image, result in zip(images, results, strict=True):
        assert np.array_equal(result.permute(1, 2, 0).numpy(), image)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
def test_operations_on_an_image_of_one_pixel_give_finite_values(interpolation, run_stage):
    image, crop = np.array([[[7, 77, 177]]], np.uint8), T.RandomResizedCrop(5, interpolation=interpolation)
    transforms = [T.RandomRotation(30, interpolation), crop, T.RandAugment(), NORMALIZE]
    assert run_stage(transforms, [image], backend="kornia").isfinite().all()
    results = run_stage([T.Resize((5, 6), interpolation)], [image], backend="kornia")
    assert (results == torch.tensor([7, 77, 177], dtype=torch.uint8)[:, None, None]).all()


def test_bicubic_overshoots_do_not_reach_the_next_operation(run_stage):
    """Kornia's equalize accepts only values in 0 … 1, and its posterize wraps other values around."""
    image = np.where(np.arange(40)[:, None, None] < 20, 0, 255).repeat(40, 1).repeat(3, 2).astype(np.uint8)
    transforms = [T.Resize((77, 77), "bicubic"), T.RandomEqualize(1.0), T.RandomPosterize(4, 1.0)]
    results = run_stage(transforms, [image, image], backend="kornia")
    assert (results[:, :, :20] == 0).all()
    assert (results[:, :, -20:] >= 192).all()


CHAINS = [
    [T.RandomResizedCrop(24), T.ColorJitter(0.4, 0.4, 0.4, 0.1), T.RandomHorizontalFlip(), NORMALIZE],
    [T.RandomCrop(28, 4, pad_if_needed=True, fill=(1, 2, 3)), T.RandAugment(interpolation="bilinear"), NORMALIZE],
    [T.RandomRotation(40, "bilinear", expand=True, fill=9), T.CenterCrop((30, 40)), T.GaussianBlur(5), NORMALIZE],
    [T.RandomPerspective(0.6, 0.7, "bilinear"), T.Pad((3, 4), padding_mode="edge"), T.RandomCrop(24), NORMALIZE],
    [T.RandomApply([T.RandomResizedCrop(24), T.Pad(4)], 0.5), T.AugMix(), T.CenterCrop(20), NORMALIZE],
    [T.RandomChoice([T.RandomRotate90(), T.RandomEqualize(1), T.RandomErasing(1)]), T.Resize((30, 20)), NORMALIZE],
    [T.RandomOrder([T.RandomAutocontrast(), T.RandomAdjustSharpness(2), T.RandomSolarize(9)]), T.RandomCrop(9)],
    [T.Resize(20), T.RandomChannelPermutation(), T.RandomInvert(), T.CenterCrop(20), NORMALIZE, T.RandomErasing(0.7)],
    [T.RandomCrop(20), T.TimmRandAugment("rand-m9-mstd0.5"), NORMALIZE, T.RandomErasing(0.7), T.RandomHorizontalFlip()],
]


@pytest.mark.parametrize("transforms", CHAINS, ids=str)
def test_bits_of_an_image_do_not_depend_on_its_batch(transforms, make_images, make_batch, monkeypatch):
    """The pieces of a batch vary in size, and its images have one size or several sizes."""
    chain, images = T.Chain(transforms), make_images(3, 40, low=50)
    images[20:] = [image[:50, :50].copy() for image in images[20:]]
    stage, batch = compile_stage(chain, device="cpu", backend="kornia"), make_batch(chain, images)
    expected = stage(*batch)
    for count in (1, 3, 1000):  # images per piece
        monkeypatch.setattr(runner, "CPU_BYTES", count * 50 * 50 * 3 * runner.BYTES_PER_VALUE)
        assert torch.equal(stage(*batch), expected)
    for row in range(0, 40, 7):
        assert torch.equal(stage(*make_batch(chain, [images[row]], first=row))[0], expected[row])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("memory_format", ["contiguous_format", "channels_last"])
@pytest.mark.parametrize("conversion", [NORMALIZE, T.ToDtype("float32", scale=True), T.ToDtype("float32")], ids=str)
def test_floats_are_within_rounding_of_the_reference(conversion, memory_format, dtype, make_images, run_stage):
    """The tolerance is a unit in the last place of float32, then of the dtype; the crop does not change levels."""
    transforms = [T.RandomCrop(20), conversion, T.RandomErasing(0.5, value="random"), T.MixUp(num_classes=3)]
    expected, result = (
        run_stage(transforms, make_images(1, 6), backend=backend, dtype=dtype, memory_format=memory_format)
        for backend in ("torch", "kornia")
    )
    assert result.dtype == expected.dtype
    assert result.is_contiguous(memory_format=getattr(torch, memory_format))
    torch.testing.assert_close(result, expected, rtol=2 * torch.finfo(expected.dtype).eps, atol=2e-6)


@pytest.mark.parametrize("ragged", ["list", "pad", "error"])
def test_finished_images_are_erased_and_flipped_in_the_same_pass(ragged, make_images, make_batch, monkeypatch):
    """Values equal those of the reference, which changes the batch in place."""
    crop_or_pad = T.CenterCrop(20) if ragged == "error" else T.Pad(2)
    chain = T.Chain([crop_or_pad, NORMALIZE, T.RandomErasing(0.8, value=(1, 2, 3)), T.RandomHorizontalFlip()])
    batch = make_batch(chain, make_images(2, 7))
    expected = compile_stage(chain, device="cpu", ragged=ragged)(*batch)
    stage = compile_stage(chain, device="cpu", backend="kornia", ragged=ragged)
    assert [step.backend for step in stage.plan.steps] == ["kornia"] * 4
    monkeypatch.setattr("gpuload.stage.finish._erase", None)  # the reference's in-place function must not be called
    for image, expected_image in zip(stage(*batch), expected, strict=True):
        torch.testing.assert_close(image, expected_image, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_images_of_one_to_four_channels_keep_their_channels(channels, make_images, run_stage):
    transforms = [T.RandomResizedCrop(20), T.RandomAffine(20, interpolation="bilinear"), T.RandomErasing(1.0, value=9)]
    transforms += [T.ColorJitter(0.4, 0.4, 0.4, 0.1), T.RandAugment()] if channels in (1, 3) else []
    assert run_stage(transforms, make_images(4, 5, channels), backend="kornia").shape == (5, channels, 20, 20)


def test_grayscale_expands_one_channel_to_three_equal_channels(make_images, run_stage):
    transforms = [T.RandomCrop(20), T.Grayscale(3), T.RandomHorizontalFlip()]
    results = run_stage(transforms, make_images(4, 5, 1), backend="kornia")
    assert results.shape == (5, 3, 20, 20)
    assert (results[:, :1] == results).all()


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_planar_images_give_bit_identical_results_to_interleaved_images(layout, make_images):
    inputs = interleaved_and_planes(make_images(4, 4, low=30, high=50), layout)
    chain = T.Chain([T.RandomResizedCrop(20), T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4), NORMALIZE])
    draws = chain.draw(epoch_key(0, 0), np.arange(4), inputs[0].sizes_hw)
    stage = compile_stage(chain, device="cpu", backend="kornia")
    expected, outputs = (stage(images, draws) for images in inputs)
    assert torch.equal(outputs, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_augment_applies_kornia_to_floats_without_rounding(dtype):
    """Floats in 0 … 1 are not rounded to levels, and color transforms accept them."""
    images = torch.rand(4, 3, 24, 26, generator=torch.Generator().manual_seed(1)).to(dtype)
    augment = gl.Augment([T.ColorJitter((0.5, 0.5)), NORMALIZE], backend="kornia")
    expected = normalize(images.float() * 0.5, torch.tensor(MEAN), torch.tensor(STD))
    assert torch.equal(augment(images), expected)


def test_loader_and_augment_give_the_same_images_for_float_images():
    arrays = np.random.default_rng(1).random((6, 20, 22, 3), np.float32)
    images = [gl.Image(array) for array in arrays]
    transforms = [T.RandomResizedCrop(16), T.RandAugment(), NORMALIZE]
    with gl.Loader(images, 3, transforms=transforms, backend="kornia", num_workers=0, device="cpu") as loader:
        batches = torch.cat(list(loader))
    augment = gl.Augment(transforms, backend="kornia")
    assert torch.equal(augment(torch.from_numpy(arrays).permute(0, 3, 1, 2)), batches)


def test_augment_refuses_floats_for_color_transforms_on_torch():
    images = torch.rand(4, 3, 24, 26)
    with pytest.raises(ValueError, match="RandomChannelPermutation takes uint8 images"):
        gl.Augment([T.ColorJitter(0.4), T.RandomChannelPermutation()], backend="kornia")(images)


@pytest.mark.parametrize(("value", "text"), [(2, "floats from 2 to 2, but"), (np.nan, "NaN, but")])
def test_loader_refuses_floats_outside_0_to_1_before_a_color_transform(value, text):
    images, transforms = [gl.Image(np.full((9, 9, 3), value, np.float32))] * 4, [T.RandomEqualize(1.0)]
    with (
        pytest.raises(gl.SampleError, match=f"contains {text} float images must be in 0 … 1"),
        gl.Loader(images, 2, transforms=transforms, backend="kornia", num_workers=0, device="cpu") as loader,
    ):
        next(iter(loader))


def test_loader_and_augment_give_the_same_images(jpeg_folder):
    """Workers decode only the part of an image that its crop depends on; Augment has the complete image."""
    affine = T.RandomAffine(20, interpolation="bilinear")
    transforms = [T.Resize(40, "bicubic"), T.CenterCrop(32), affine, T.RandAugment(), NORMALIZE]
    options = {"transforms": transforms, "backend": "kornia", "device": "cpu"}
    with gl.Loader(gl.ImageFolder(jpeg_folder), 4, num_workers=0, shuffle=False, **options) as loader:
        batches = torch.cat([images for images, _ in loader])
    with gl.Loader(gl.ImageFolder(jpeg_folder), 1, num_workers=0, shuffle=False, device="cpu") as loader:
        images = [images[0] for images, _ in loader]
    assert torch.equal(gl.Augment(transforms, backend="kornia")(images), batches)


# The largest window needs 224 × 224 × 3 values of 64 bytes; a piece has one image even if the memory is too small.
@pytest.mark.parametrize(("free_bytes", "expected"), [(0, 1), (1 << 20, 1), (64 << 20, 6), (1 << 40, 114_130)])
def test_images_per_piece_depends_on_memory(free_bytes, expected):
    windows_tlhw = [np.array([[5, 5, 224, 224], [0, 0, 20, 20]]), np.array([[0, 0, 100, 100]] * 2)]
    for channels in (3, 1):  # a sampling map takes as much memory for one channel as for three
        assert images_per_piece(windows_tlhw, np.array([[224, 224, channels]] * 2), free_bytes) == expected


ROOM_FOR_12_IMAGES = 2 * 12 * (50 * 50 * 3) * runner.BYTES_PER_VALUE  # only half of the free memory is used


@pytest.mark.parametrize(
    ("free_bytes", "expected"), [(1 << 40, [40]), (ROOM_FOR_12_IMAGES, [12, 12, 12, 4]), (None, [40])]
)
def test_pieces_on_a_gpu_depend_on_its_free_memory(free_bytes, expected, run_stage, monkeypatch):
    """If a runtime does not report its free memory, the batch is one piece."""
    piece_sizes, invert = [], OPERATORS["invert"]

    def record_and_invert(images, values):
        piece_sizes.append(len(images))
        return invert(images, values)

    monkeypatch.setitem(OPERATORS, "invert", record_and_invert)
    use_gpu_code(monkeypatch, free_bytes)
    run_stage([T.RandomInvert(1.0)], [np.zeros((50, 50, 3), np.uint8)] * 40, backend="kornia")
    assert piece_sizes == expected
