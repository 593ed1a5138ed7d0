"""Compiled stages return the requested dtype and layout, give bits that depend only on the image, and refuse errors."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from helpers.matrix import matrix
from parity.usable import needs

from gpuload import transforms as T
from gpuload.stage import check_stage, compile_stage
from gpuload.stage import device as devices

NORMALIZE = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
TRAINING_RECIPE = [T.RandomResizedCrop(64), T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4, 0.4, 0.1), NORMALIZE]


def compile_chain(transforms, **options):
    chain = T.Chain(transforms)
    return chain, compile_stage(chain, device="cpu", **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"backend": "cuda"}, "backend must be one of 'auto', 'torch', 'kornia', 'dali', 'fused', got 'cuda'"),
        ({"dtype": "half"}, "dtype must be one of 'float16', 'bfloat16', 'float32', got 'half'"),
        ({"dtype": "uint8"}, "dtype='uint8' is not a float dtype; to get uint8 images, omit dtype, Normalize and ToD"),
        ({"ragged": "pad"}, "ragged='pad' cannot be combined with the module Identity at the end of the transforms"),
        ({"ragged": "list", "pad_to": 32}, "pad_to=32 requires ragged='pad', which pads the images of a batch, but "),
    ],
)
def test_compile_stage_with_invalid_options_raises(options, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        compile_stage(T.Chain([T.CenterCrop(8), torch.nn.Identity()]), **{"device": "cpu", **options})


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("memory_format", ["contiguous_format", "channels_last"])
@pytest.mark.parametrize("jitter", [[], [T.ColorJitter(0.4, 0.4)]])
def test_stage_returns_the_requested_dtype_and_memory_format(make_images, run_stage, dtype, memory_format, jitter):
    transforms, images = [T.RandomResizedCrop((40, 30)), T.RandomHorizontalFlip(), *jitter], make_images(0, 6)
    result = run_stage([*transforms, NORMALIZE], images, dtype=dtype, memory_format=memory_format)
    assert result.shape == (6, 3, 40, 30)
    assert result.dtype == getattr(torch, dtype)
    assert result.is_contiguous(memory_format=getattr(torch, memory_format))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (NORMALIZE.mean, NORMALIZE.std))
    expected = (run_stage(transforms, images).float() / 255 - mean) / std
    tolerance = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    torch.testing.assert_close(result.float(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("conversion", "dtype", "expected_dtype", "divisor"),
    [
        ([], None, torch.uint8, 1),
        ([T.ToDtype("uint8", scale=True)], "float16", torch.uint8, 1),
        ([T.ToDtype("float32")], None, torch.float32, 1),
        ([T.ToDtype("float16", scale=True)], None, torch.float16, 255),
        ([T.ToDtype("float16", scale=True)], "float32", torch.float32, 255),
        ([T.ToDtype("float32"), T.Normalize((0.0,) * 3, (2.0,) * 3)], "bfloat16", torch.bfloat16, 2),
        ([T.Normalize((0.0,) * 3, (1.0,) * 3)], torch.float16, torch.float16, 255),
    ],
)
def test_floats_are_scaled_as_normalize_or_to_dtype_specify(
    make_images, make_batch, conversion, dtype, expected_dtype, divisor
):
    chain, stage = compile_chain([T.CenterCrop(20), *conversion], dtype=dtype)
    result = stage(*make_batch(chain, make_images(1, 2)))
    chain, stage_of_levels = compile_chain([T.CenterCrop(20)])
    pixels = stage_of_levels(*make_batch(chain, make_images(1, 2)))
    assert result.dtype == expected_dtype
    assert pixels.dtype == torch.uint8
    torch.testing.assert_close(result.float(), pixels.float() / divisor, atol=0, rtol=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_stage_bits_do_not_depend_on_the_batch(make_images, run_stage, interpolation):
    transforms = [T.Resize(90, interpolation), T.RandomCrop(70, 4, padding_mode="reflect"), *TRAINING_RECIPE]
    images = make_images(2, 48)
    expected = run_stage(transforms, images)
    for position in range(48):
        alone = run_stage(transforms, images[position : position + 1], first=position)
        assert torch.equal(alone[0], expected[position])
    assert torch.equal(run_stage(transforms, images, cpu_threads=2), expected)


def test_stage_called_twice_gives_the_same_bits_and_only_reads_its_input(make_images, make_batch):
    chain, stage = compile_chain(TRAINING_RECIPE)
    ragged, draws = make_batch(chain, make_images(3, 5))
    pixels_before = ragged.pixels.clone()
    assert torch.equal(stage(ragged, draws), stage(ragged, draws))
    assert torch.equal(ragged.pixels, pixels_before)


def test_ragged_error_names_two_images_of_different_sizes(run_stage):
    images = [np.zeros(shape, np.uint8) for shape in ((20, 40, 3), (20, 40, 3), (30, 20, 3))]
    text = (
        "the images of a batch have different sizes (height × width) after all transforms: image 0 has 10×20, image 2 "
        "has 15×10; end with a crop or a Resize((height, width)), or (with shuffle=Buckets) a Resize(T.bucket_size), "
        "or use ragged='list' or ragged='pad'"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        run_stage([T.Resize(10)], images)


def test_ragged_list_and_pad_hold_the_same_images(make_images, run_stage):
    transforms, images = [T.Resize(30), T.RandomVerticalFlip(), NORMALIZE], make_images(4, 5)
    images_of_list = run_stage(transforms, images, ragged="list")
    padded, sizes = run_stage(transforms, images, ragged="pad")
    assert isinstance(images_of_list, list)
    assert sizes.dtype == torch.int64
    assert sizes.tolist() == [list(image.shape[1:]) for image in images_of_list]
    assert padded.shape == (5, 3, *sizes.amax(0).tolist())
    for image, padded_image, (height, width) in zip(images_of_list, padded, sizes.tolist(), strict=True):
        assert torch.equal(padded_image[:, :height, :width], image)
        assert not padded_image[:, height:].any()
        assert not padded_image[:, :, width:].any()
    # The result is a list even if all images have one size.
    assert [image.shape for image in run_stage([T.CenterCrop(8)], images, ragged="list")] == [(3, 8, 8)] * 5


@matrix(
    pad_to=[1, 7, np.int32(32)],
    conversion=[[], [NORMALIZE, T.RandomErasing(1.0)]],
    memory_format=["contiguous_format", "channels_last"],
    backend=["torch", "batched", "kornia", "fused"],
)
def test_pad_to_rounds_the_padded_size_up_to_a_multiple(
    make_images, run_stage, pad_to, conversion, memory_format, backend
):
    needs("torch" if backend == "batched" else backend)
    options = {"backend": "torch", "runner": "batched"} if backend == "batched" else {"backend": backend}
    options |= {"ragged": "pad", "memory_format": memory_format}
    transforms, images = [T.Resize(20), T.RandomHorizontalFlip(), *conversion], make_images(4, 3)
    expected, expected_sizes = run_stage(transforms, images, **options)
    padded, sizes = run_stage(transforms, images, pad_to=pad_to, **options)
    height, width = sizes.amax(0).tolist()
    assert padded.shape == (3, 3, *(-(-side // pad_to) * pad_to for side in (height, width)))
    assert padded.is_contiguous(memory_format=getattr(torch, memory_format))
    assert torch.equal(sizes, expected_sizes)
    assert torch.equal(padded[:, :, :height, :width], expected)
    assert not padded[:, :, height:].any()
    assert not padded[:, :, :, width:].any()


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_stage_accepts_one_to_four_channels_unless_a_transform_restricts_them(make_images, run_stage, channels):
    images, normalize = make_images(5, 3, channels), T.Normalize((0.5,) * channels, (0.5,) * channels)
    result = run_stage([T.RandomResizedCrop(20), T.RandomHorizontalFlip(), normalize], images)
    assert result.shape == (3, channels, 20, 20)
    transforms = [T.CenterCrop(10), T.ColorJitter(0.4, 0.4, 0.4, 0.1)]
    if channels in (1, 3):
        assert run_stage(transforms, images).shape == (3, channels, 10, 10)
    else:
        text = (
            f"ColorJitter takes images with 1 or 3 channels, but image 0 has {channels}; drop or convert channels in "
            "the dataset, or decode to mode 'RGB' or 'L'"
        )
        with pytest.raises(ValueError, match=re.escape(text)):
            run_stage(transforms, images)


@pytest.mark.parametrize(
    ("channels", "text"),
    [
        ([1],
         "Normalize has 3 means and stds, but image 0 has 1 channel; give a mean and a std for each channel, drop or "
         "convert channels in the dataset, or decode to another mode"),
        ([3, 1],
         "the images of a batch must have the same number of channels, but image 0 has 3 and image 1 has 1; drop or "
         "convert channels in the dataset, or use Encoded(…, mode='RGB') for all images"),
    ],
)  # fmt: skip
def test_channels_that_differ_from_normalize_or_within_a_batch_raise(make_images, run_stage, channels, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        run_stage([T.CenterCrop(8), NORMALIZE], [make_images(6, 1, count)[0] for count in channels])


def test_stage_with_a_program_for_fewer_images_raises(make_images, make_batch):
    chain, stage = compile_chain([T.CenterCrop(8)])
    ragged, draws = make_batch(chain, make_images(7, 2))
    with pytest.raises(ValueError, match=r"at least one image.*, got 2 images and a program for 1"):
        stage(ragged, draws.take(np.array([0])))


def test_stage_resizes_images_of_one_pixel(run_stage):
    images = [np.full((1, 1, 3), 77, np.uint8), np.full((1, 9, 3), 77, np.uint8)]
    jitter = T.ColorJitter(0.4, 0.4, 0.4, 0.1)
    assert torch.isfinite(run_stage([T.RandomResizedCrop(8), jitter, NORMALIZE], images)).all()
    assert set(run_stage([T.Resize(6), T.CenterCrop(8)], images).unique().tolist()) == {0, 77}


def test_stage_restores_the_thread_count_after_a_batch_and_after_an_error(make_images, make_batch):
    thread_counts = []

    class RecordThreads(torch.nn.Module):
        def forward(self, batch):
            thread_counts.append(torch.get_num_threads())
            return batch

    threads_before = torch.get_num_threads()
    chain, stage = compile_chain([T.CenterCrop(8), RecordThreads()], cpu_threads=threads_before + 1)
    stage.call_modules(stage(*make_batch(chain, make_images(9, 2))), [0])
    assert thread_counts == [threads_before + 1]
    assert torch.get_num_threads() == threads_before
    chain, stage = compile_chain([T.CenterCrop(8), NORMALIZE], cpu_threads=threads_before + 1)
    with pytest.raises(ValueError, match="Normalize has"):
        stage(*make_batch(chain, make_images(9, 2, 1)))
    assert torch.get_num_threads() == threads_before


def test_check_stage_does_not_initialize_cuda(monkeypatch):
    """A loader is checked when it is created, in each rank, where the user may not have chosen a device yet."""

    def initialize():
        raise AssertionError("CUDA was initialized")

    monkeypatch.setattr(devices, "default_device_type", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "current_device_index", initialize)
    chain = T.Chain([T.CenterCrop(8)])
    for device in ("cuda", None):
        checked_device, *_ = check_stage(chain, device, "auto", None, "contiguous_format", "error")
        assert checked_device == torch.device("cuda")
    with pytest.raises(AssertionError, match="initialized"):  # a stage needs the device's index
        compile_stage(chain, device="cuda", backend="torch")


def test_compile_stage_for_an_absent_device_raises(monkeypatch):
    monkeypatch.setattr(devices, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device is 'cuda:1', but torch finds no CUDA device here; use device='cpu'"):
        compile_stage(T.Chain([T.Resize(9)]), device="cuda:1")
