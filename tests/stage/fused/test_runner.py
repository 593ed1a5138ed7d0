"""Entire chains on the fused kernels, on a GPU or in Triton's interpreter, are equal or close to the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages, compile_stage
from gpuload.stage.finish import UNCHANGED
from gpuload.stage.fused.runner import FusedRunner
from gpuload.transforms.program.draws import IMAGE
from gpuload.transforms.program.fusing.plan import KernelTile
from gpuload.transforms.program.ops import Turn

NORMALIZE = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
LEVEL = 1 / 255 / 0.224  # the size of a level after NORMALIZE, in the channel with the smallest std
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run_kernels(chain, images, program, **options):
    """Run a chain on the fused backend, and return its results on the CPU."""
    stage = compile_stage(chain, device=DEVICE, backend="fused", **options)
    result = stage(replace(images, pixels=images.pixels.to(DEVICE)), program)
    return result.cpu() if isinstance(result, torch.Tensor) else type(result)(image.cpu() for image in result)


def run_both(make_batch, transforms, images, *, uncut=False, **options):
    chain = T.Chain(transforms)
    ragged, program = make_batch(chain, images, uncut=uncut)
    result = run_kernels(chain, ragged, program, **options)
    expected = compile_stage(chain, device="cpu", backend="torch", **options)(ragged, program)
    assert type(result) is type(expected)
    return result, expected


@pytest.fixture
def images(make_images):
    return make_images(3, 3, low=20, high=60)


@pytest.mark.parametrize("uncut", [True, False], ids=["uncut", "regions"])
@pytest.mark.parametrize(
    "transforms",
    [
        [T.RandomResizedCrop(24), T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4, 0.4)],
        [T.RandomVerticalFlip(), T.Resize(20, "bicubic"), T.RandomCrop((18, 17), padding=5, fill=(1, 2, 3))],
        [T.RandomResizedCrop(24), T.RandAugment(3, interpolation="bilinear", fill=9)],
        [T.Resize((30, 31), "nearest"), T.Pad(9, padding_mode="reflect"), T.RandomAffine(30), T.CenterCrop(21)],
        [
            T.RandomApply([T.RandomResizedCrop(40), T.RandomErasing(1.0, value=(3, 200, 77))], 0.5),
            T.RandomChoice([T.GaussianBlur(5), T.RandomVerticalFlip(1.0), T.RandomAdjustSharpness(3, 1.0)]),
            T.Resize((16, 19)),
        ],
    ],
)
def test_levels_of_chains_are_close_to_the_reference(make_batch, images, transforms, uncut):
    result, expected = run_both(make_batch, transforms, images, uncut=uncut)
    difference = (result.int() - expected.int()).abs()
    assert difference.max() <= 6
    assert difference.double().mean() < 0.1


@pytest.mark.parametrize("flip", [T.RandomHorizontalFlip, T.RandomVerticalFlip])
def test_erased_box_of_a_mirrored_image_equals_the_reference(make_batch, images, flip):
    erasing = T.RandomErasing(1.0, (0.02, 0.2), value=(3, 200, 77))
    # The inversion before the flip keeps the mirroring in the same pass.
    transforms = [T.RandomInvert(1.0), flip(1.0), T.CenterCrop((19, 17)), erasing, flip(0.5)]
    result, expected = run_both(make_batch, transforms, images)
    assert torch.equal(result, expected)


TURN, TRANSPOSE, CROP = T.RandomRotate90(0.9), T.RandomTranspose(0.6), T.RandomResizedCrop(24)
LEVEL_ERASING = T.RandomErasing(1.0, value=(3, 200, 77))
TURN_CHAINS = {
    "before a crop": [TURN, T.RandomResizedCrop((21, 24)), NORMALIZE],
    "after a crop": [CROP, TURN, TRANSPOSE, NORMALIZE],
    "between operations": [CROP, TURN, T.RandomEqualize(0.8), TRANSPOSE, T.RandomInvert(), TURN],
    "cut": [T.Resize((31, 20)), TURN, TRANSPOSE, T.RandomHorizontalFlip(), T.CenterCrop((15, 17)), TRANSPOSE],
    "erased": [T.Resize((31, 20)), TURN, LEVEL_ERASING, TRANSPOSE, T.CenterCrop(15)],
    "warped": [CROP, TURN, T.RandomAffine(30), TRANSPOSE, T.RandomPerspective(), TURN],
    "nearest": [T.Resize((30, 31), "nearest"), TRANSPOSE, T.Pad(3, padding_mode="symmetric"), TURN],
    "in containers": [
        T.RandomApply([TURN, T.RandomInvert(1.0)]),
        T.Pad(2),
        T.RandomOrder([TURN, TRANSPOSE, T.RandomPosterize(3)]),
    ],
    "finished, erased": [
        CROP,
        TURN,
        NORMALIZE,
        T.RandomErasing(1.0, value="random"),
        T.RandomErasing(0.8, (0.1, 0.5), mode="pixel"),
        T.RandomErasing(0.8, (0.1, 0.5), value=0.3),
    ],
}


@pytest.mark.parametrize("memory_format", ["contiguous_format", "channels_last"])
@pytest.mark.parametrize("name", TURN_CHAINS)
def test_turned_images_are_bit_identical_to_the_batched_reference(make_batch, make_images, name, memory_format):
    chain, options = T.Chain(TURN_CHAINS[name]), {"memory_format": memory_format, "ragged": "list"}
    batch = make_batch(chain, make_images(3, 5, low=20, high=60))
    result = run_kernels(chain, *batch, **options)
    expected = compile_stage(chain, device="cpu", backend="torch", runner="batched", **options)(*batch)
    transposed = [record.transposed for record in batch[1].records if isinstance(record, Turn)]
    assert np.concatenate(transposed).any(), "no image is transposed"
    for image, expected_image in zip(result, expected, strict=True):
        assert image.stride() == expected_image.stride()
        assert torch.equal(image, expected_image)


@pytest.mark.parametrize("turn", [T.RandomRotate90, T.RandomTranspose])
@pytest.mark.parametrize(
    "chain_with",
    [
        lambda turn: [turn, T.RandomResizedCrop(24), NORMALIZE],
        lambda turn: [T.RandomResizedCrop(24), turn, T.ColorJitter(0.4, 0.4, 0.4, 0.1), NORMALIZE, T.RandomErasing()],
        lambda turn: [T.RandomResizedCrop(24), T.RandAugment(2), turn, NORMALIZE, T.RandomErasing(value="random")],
    ],
    ids=["first", "between", "last"],
)
def test_turn_launches_the_kernels_of_a_flip(make_batch, make_images, turn, chain_with):
    runner, launches = FusedRunner(UNCHANGED, torch.device("cpu")), []
    for transform in (turn(0.7), T.RandomHorizontalFlip(0.7)):
        images, program = make_batch(T.Chain(chain_with(transform)), make_images(3, 16, low=30, high=60))
        levels, finishing = program.split()
        outputs = torch.empty(16, 3, 24, 24, dtype=torch.uint8)
        erasing = [] if finishing is None else finishing.records
        plan, _ = runner.prepare(images, levels, levels.windows_tlhw, outputs, erasing)  # pyright: ignore
        launches.append([(launch.number, launch.geometry, launch.finished) for launch in plan.launches])
    assert launches[0] == launches[1]


def test_grayscale_changes_the_channels_like_the_reference(make_batch, make_images, images):
    transforms = [T.RandomResizedCrop(20), T.TrivialAugmentWide(), T.Grayscale(3), T.Pad(2, fill=(9, 99, 199))]
    result, expected = run_both(make_batch, transforms, make_images(4, 2, channels=1, low=20, high=50))
    assert result.shape == expected.shape == (2, 3, 24, 24)
    assert (result.int() - expected.int()).abs().max() <= 2
    result, expected = run_both(make_batch, [T.CenterCrop(20), T.Grayscale(), T.RandomPosterize(4, 1.0)], images)
    assert result.shape == (3, 1, 20, 20)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_images_of_one_two_or_four_channels_equal_the_reference(make_batch, make_images, channels):
    images = make_images(1, 2, channels=channels, low=20, high=40)
    normalize = T.Normalize([0.5] * channels, [0.25] * channels)
    for conversion in ([T.ToDtype("float32", scale=True)], [normalize, T.RandomHorizontalFlip(), T.RandomErasing(1.0)]):
        result, expected = run_both(make_batch, [T.RandomResizedCrop(20), *conversion], images)
        torch.testing.assert_close(result, expected, atol=1e-6 if DEVICE == "cpu" else LEVEL, rtol=0)


def test_prepare_puts_the_tiles_of_a_large_image_on_the_first_axis_of_the_grid(monkeypatch):
    monkeypatch.setattr("gpuload.stage.fused.runner.tile_of", lambda device: KernelTile(8, 32, 1))
    chain = T.Chain([T.RandomInvert(1.0)])
    table = np.array([(0, (6000, 8000, 3), (6000, 8000), (0, 0, 6000, 8000))], IMAGE)
    ragged = RaggedImages(torch.empty(0, dtype=torch.uint8), table, ["large"])
    program = chain.draw(epoch_key(0, 0), np.arange(1), ragged.sizes_hw)
    runner = FusedRunner(UNCHANGED, torch.device("cpu"))
    outputs = torch.empty(1, device="meta", dtype=torch.uint8).expand(1, 3, 6000, 8000)
    plan, _ = runner.prepare(ragged, program, program.windows_tlhw, outputs)
    [launch] = plan.launches
    assert launch.tiles == (6000 // 8) * (8000 // 32)
    assert launch.grid[0] == launch.tiles  # only the first axis of a grid goes beyond 65,535


@pytest.mark.parametrize("limit", ["SECOND_AXIS", "MOST_PROGRAMS"])
@pytest.mark.parametrize("ragged", ["error", "list"])
def test_batch_of_more_images_than_a_launch_takes_has_the_same_bits(
    make_batch, make_images, monkeypatch, ragged, limit
):
    mixing = [T.CutMix(num_classes=3)] if ragged == "error" else []
    levels = [T.RandomResizedCrop(20), T.RandomApply([T.ColorJitter(0.4, 0.4)])]
    chain = T.Chain([*levels, NORMALIZE, T.RandomErasing(0.8), *mixing, T.RandomErasing(1.0)])
    batch = make_batch(chain, make_images(7, 6, low=25, high=40))
    expected = run_kernels(chain, *batch, ragged=ragged)
    monkeypatch.setattr(f"gpuload.transforms.program.fusing.plan.{limit}", 2)
    for image, expected_image in zip(run_kernels(chain, *batch, ragged=ragged), expected, strict=True):
        assert torch.equal(image, expected_image)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("memory_format", ["contiguous_format", "channels_last"])
def test_each_dtype_and_memory_format_has_the_bits_of_the_reference(make_batch, images, dtype, memory_format):
    transforms = [T.CenterCrop(20), NORMALIZE, T.RandomErasing(1.0, value="random")]
    result, expected = run_both(make_batch, transforms, images, dtype=dtype, memory_format=memory_format)
    assert result.dtype == expected.dtype
    assert result.stride() == expected.stride()
    assert torch.equal(result, expected)


@pytest.mark.parametrize("memory_format", ["contiguous_format", "channels_last"])
def test_result_of_many_tiles_has_the_bits_of_one_tile(make_batch, images, monkeypatch, memory_format):
    chain = T.Chain([T.RandomResizedCrop((17, 33)), T.GaussianBlur(5), NORMALIZE, T.RandomErasing(1.0)])
    batch = make_batch(chain, images[:1])
    expected = run_kernels(chain, *batch, memory_format=memory_format)
    monkeypatch.setattr("gpuload.stage.fused.runner.tile_of", lambda device: KernelTile(8, 32, 1))
    assert torch.equal(run_kernels(chain, *batch, memory_format=memory_format), expected)


@pytest.mark.parametrize("ragged", ["list", "pad"])
def test_images_of_different_sizes_are_close_to_the_reference(make_batch, images, ragged):
    result, expected = run_both(make_batch, [T.Resize(16), NORMALIZE, T.RandomErasing(0.9)], images, ragged=ragged)
    for image, expected_image in zip(result, expected, strict=True):
        torch.testing.assert_close(image, expected_image, atol=LEVEL * 1.01, rtol=0)


@pytest.mark.parametrize("mixing", [T.MixUp(num_classes=3), T.CutMix(num_classes=3)], ids=["MixUp", "CutMix"])
def test_mixed_and_erased_images_equal_the_reference(make_batch, make_images, mixing):
    images = make_images(2, 5, low=25, high=40)
    erasing = T.RandomApply([T.RandomErasing(1.0, value=7.0)])
    transforms = [T.CenterCrop(20), NORMALIZE, T.RandomErasing(1.0), mixing, T.RandomErasing(1.0, value=5.0), erasing]
    result, expected = run_both(make_batch, transforms, images)
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=0)


def test_bits_of_an_image_do_not_depend_on_the_batch(make_batch, make_images):
    chain = T.Chain([T.RandomResizedCrop(20), T.RandAugment(2), NORMALIZE])
    images = make_images(5, 4, low=30, high=50)
    expected = run_kernels(chain, *make_batch(chain, images))
    for position in range(4):
        result = run_kernels(chain, *make_batch(chain, images[position : position + 1], first=position))
        assert torch.equal(result[0], expected[position])


def test_images_one_pixel_thin_equal_the_reference(make_batch):
    images = [np.full((1, 40, 3), 9, np.uint8), np.full((40, 1, 3), 200, np.uint8), np.full((1, 1, 3), 3, np.uint8)]
    result, expected = run_both(make_batch, [T.RandomVerticalFlip(1.0), T.Resize((5, 7)), T.GaussianBlur(3)], images)
    assert torch.equal(result, expected)


def test_images_at_an_offset_of_larger_memory_have_the_same_bits(make_batch, images):
    chain = T.Chain([T.RandomResizedCrop(20), NORMALIZE])
    ragged, program = make_batch(chain, images)
    expected = run_kernels(chain, ragged, program)
    memory = torch.full((len(ragged.pixels) + 200,), 255, dtype=torch.uint8)
    memory[100:-100] = ragged.pixels
    table = ragged.table.copy()
    table["offset"] += 100
    ragged = RaggedImages(memory, table, ragged.labels)
    assert torch.equal(run_kernels(chain, ragged, program), expected)


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("memory_format", ["contiguous_format", "channels_last"])
def test_batch_planner_makes_the_plan_of_the_runner(make_batch, make_images, channels, memory_format):
    normalize = T.Normalize([0.5] * channels, [0.25] * channels)
    colors = [] if channels == 1 else [T.RandAugment(2), T.ColorJitter(0.4, 0.4, 0.4, 0.1)]
    erasing = T.RandomErasing(0.8), T.RandomErasing()
    turn_and_crop = T.RandomRotate90(0.8), T.CenterCrop((9, 14))
    chain = T.Chain([T.RandomResizedCrop(14), *colors, T.RandomEqualize(0.5), *turn_and_crop, normalize, *erasing])
    images, program = make_batch(chain, make_images(5, 6, channels=channels, low=20, high=40))
    options = {"backend": "fused", "memory_format": memory_format}
    batch_planner = compile_stage(chain, device=DEVICE, **options).batch_planner()
    assert batch_planner is not None
    plan, arrays = batch_planner(images.table, program)
    levels, finishing = program.split()
    assert finishing is not None
    outputs = torch.empty(6, channels, 9, 14, memory_format=getattr(torch, memory_format), device=DEVICE)
    images = replace(images, pixels=images.pixels.to(DEVICE))
    runner = FusedRunner(UNCHANGED, outputs.device)
    expected_plan, expected_arrays = runner.prepare(images, levels, levels.windows_tlhw, outputs, finishing.records)
    assert plan == expected_plan
    assert plan.has_erasing
    for name, parts in arrays.items():
        expected = expected_arrays[name].cpu().numpy()
        np.testing.assert_array_equal(np.concatenate([part.reshape(-1) for part in parts]), expected.reshape(-1))


@pytest.mark.parametrize(
    ("transforms", "options", "is_planned"),
    [
        ([T.RandomCrop(8), NORMALIZE], {}, True),
        ([T.RandomCrop(8), NORMALIZE, T.MixUp(num_classes=3)], {}, False),
        ([T.RandomCrop(8), T.GaussianNoise(), NORMALIZE], {}, False),
        ([T.RandomCrop(8), NORMALIZE, T.RandomErasing(1.0), T.RandomHorizontalFlip()], {}, False),
        ([T.RandomCrop(8), T.Lambda(lambda images: images), T.RandomHorizontalFlip(), NORMALIZE], {}, False),
        ([T.MultiView([[T.RandomCrop(8)], [T.CenterCrop(8)]]), NORMALIZE], {}, False),
        ([T.Mosaic((8, 8)), NORMALIZE], {}, False),
        ([T.RandomCrop(8), NORMALIZE], {"ragged": "list"}, False),
        ([T.RandomCrop(8), NORMALIZE], {"backend": "torch"}, False),
    ],
    ids=["only kernels", "MixUp", "noise", "flip at the end", "Lambda", "views", "Mosaic", "list", "reference"],
)
def test_batch_planner_exists_only_if_one_run_of_the_kernels_does_everything(transforms, options, is_planned):
    stage = compile_stage(T.Chain(transforms), device=DEVICE, **{"backend": "fused", **options})
    assert (stage.batch_planner() is not None) == is_planned
