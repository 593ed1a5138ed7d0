"""On the fused kernels, images stored as planes have the results and launches of the same images stored as H×W×C."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.matrix import matrix
from helpers.tensor_layouts import DENSE, interleaved_and_planes

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages, compile_stage
from gpuload.stage.combined_images import groups_of
from gpuload.stage.fused import runner, statistics
from gpuload.stage.fused.kernel import one_pass
from gpuload.transforms.program.ops import Combination

TO_FLOAT = T.ToDtype("float32", scale=True)
CROP = T.RandomResizedCrop(14)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHAINS = {
    "classic": [CROP, T.RandomHorizontalFlip(), TO_FLOAT, T.RandomErasing(0.8)],
    "flipped before": [T.RandomHorizontalFlip(), T.RandomVerticalFlip(), T.Resize((9, 15), "bicubic"), TO_FLOAT],
    "cut": [T.RandomCrop(12), T.RandomRotate90(0.8), T.RandomHorizontalFlip()],
    "pad": [T.RandomTranspose(), T.Resize((15, 16), "nearest"), T.Pad(3, padding_mode="reflect"), T.RandomCrop(12)],
    "warped": [T.RandomAffine(30, interpolation="bilinear", fill=7), T.CenterCrop(12)],
    "warped, cubic": [T.RandomPerspective(0.4, 0.8, interpolation="bicubic"), T.CenterCrop(12)],
    "warped, nearest": [T.RandomAffine(30, (0.2, 0.2)), T.CenterCrop(12)],
    "blurred": [T.GaussianBlur(5), T.CenterCrop(12)],
    "sharpened": [T.RandomAdjustSharpness(2, 0.8), T.CenterCrop(12)],
    "counted first": [T.RandomChoice([T.RandomEqualize(1.0), T.RandomAutocontrast(1.0)]), T.CenterCrop(12)],
    "counted later": [T.RandomApply([T.RandomVerticalFlip(1.0)]), T.ColorJitter(0.4, 0.4), CROP, T.RandomEqualize()],
    "randaugment": [CROP, T.RandAugment(2), T.RandomApply([T.RandomErasing(1.0, value=9)]), TO_FLOAT],
    "mixed": [CROP, TO_FLOAT, T.RandomErasing(), T.CutMix(num_classes=3), T.RandomErasing(0.8, value=3.0)],
    "gray": [CROP, T.Grayscale(3), T.RandomInvert()],
    "lambda": [T.CenterCrop(13), T.Lambda(lambda images: 255 - images), T.RandomEqualize(), TO_FLOAT],
    "mosaic": [T.Mosaic((20, 20)), T.RandomCrop(12)],
}


def generate_images(make_images, channels: int, *, same_size: bool) -> list[np.ndarray]:
    return [image[:21, :24] if same_size else image for image in make_images(6, 4, channels, 21 + 3 * same_size, 34)]


@pytest.fixture
def launches(monkeypatch) -> list[tuple[str, tuple[int, ...]]]:
    """The launches of kernels that read images: the name of the kernel, and its grid."""
    launched = []

    class RecordedKernel:
        def __init__(self, name: str, kernel) -> None:
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid: tuple[int, ...]):
            launched.append((self.name, grid))
            return self.kernel[grid]

    monkeypatch.setattr(runner, "one_pass", RecordedKernel("one_pass", one_pass))
    monkeypatch.setattr(statistics, "_count", RecordedKernel("count", statistics._count))
    return launched


def assert_same_bits(chain: T.Chain, inputs: tuple[RaggedImages, RaggedImages], **options) -> None:
    stage = compile_stage(chain, device=DEVICE, **options)
    positions = np.arange(len(inputs[0]))
    program = chain.draw(epoch_key(2, 0), positions, inputs[0].sizes_hw)
    for record in program.records:
        if isinstance(record, Combination):
            record.groups = groups_of(positions, record.group_size)
    expected, outputs = (stage(images, program) for images in inputs)
    assert torch.equal(outputs, expected)


@matrix(name=CHAINS, layout=["contiguous", "columns first", "within others"], channels=[1, 3])
def test_planes_have_the_bits_and_launches_of_interleaved_images(make_images, launches, name, layout, channels):
    images = generate_images(make_images, channels, same_size=layout in DENSE)
    assert_same_bits(T.Chain(CHAINS[name]), interleaved_and_planes(images, layout, DEVICE), backend="fused")
    half = len(launches) // 2  # the launches for interleaved images come first
    assert launches[:half] == launches[half:] != []


@pytest.mark.parametrize("name", ["classic", "counted first", "blurred", "gray"])
def test_planes_are_read_without_a_copy(make_images, monkeypatch, name):
    inputs = interleaved_and_planes(
        generate_images(make_images, 1 if name == "gray" else 3, same_size=False), "within others"
    )
    monkeypatch.setattr(RaggedImages, "interleave", None)
    assert_same_bits(T.Chain(CHAINS[name]), inputs, backend="fused")


@pytest.mark.parametrize("layout", ["one color", "one row", "one column", "one pixel"])
def test_planes_of_one_color_row_column_or_pixel_have_the_bits_of_interleaved_images(make_images, layout):
    height, width = {"one row": (1, 9), "one column": (9, 1), "one pixel": (1, 1)}.get(layout, (9, 9))
    image = torch.from_numpy(make_images(1, 1)[0][:height, :width].copy()).permute(2, 0, 1)
    planes = image[:, :, :1].expand(4, 3, 9, 9) if layout == "one color" else image.contiguous().expand(4, -1, -1, -1)
    arrays = [*planes.permute(0, 2, 3, 1).contiguous().numpy()]
    inputs = RaggedImages.from_arrays(arrays, DEVICE), RaggedImages.from_planes(planes.to(DEVICE), list("abcd"))
    transforms = [T.RandomTranspose(0.6), T.RandomHorizontalFlip(), T.ColorJitter(contrast=0.4), T.RandomEqualize(0.6)]
    assert_same_bits(T.Chain([*transforms, T.Resize((5, 6)), T.GaussianBlur(3)]), inputs, backend="fused")


@pytest.mark.parametrize(("channels", "dtype"), [(2, "uint8"), (4, "uint8"), (3, "uint16"), (1, "float32")])
def test_planes_that_kernels_do_not_support_have_the_bits_of_interleaved_images(make_images, channels, dtype):
    images = [image.astype(dtype) for image in generate_images(make_images, channels, same_size=False)]
    chain = [CROP, T.RandomHorizontalFlip(), T.CenterCrop(9), TO_FLOAT]
    assert_same_bits(T.Chain(chain), interleaved_and_planes(images, "within others", DEVICE), backend="fused")


def test_planes_beyond_max_reach_bytes_are_copied(make_images, monkeypatch):
    inputs = interleaved_and_planes(generate_images(make_images, 3, same_size=True), "columns first", DEVICE)
    copied, copy = [], RaggedImages.interleave
    monkeypatch.setattr(RaggedImages, "interleave", lambda *args: copied.append(args) or copy(*args))
    reach_bytes = int(((inputs[1].shapes - 1) * inputs[1].steps).sum(axis=1).max())
    for reach, copy_count in ((reach_bytes + 1, 0), (reach_bytes, 1)):
        monkeypatch.setattr(runner, "MAX_REACH_BYTES", reach)
        assert_same_bits(T.Chain(CHAINS["classic"]), inputs, backend="fused")
        assert len(copied) == copy_count
