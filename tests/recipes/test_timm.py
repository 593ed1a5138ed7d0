"""timm's transforms for evaluation and for training."""

from __future__ import annotations

import pytest
import torch
from helpers import peers
from recipes.comparison import (
    check_replay,
    check_runners,
    gpuload_batch,
    levels_apart,
    resized_within,
    shape_of,
    side,
    torch_batch,
)

from gpuload import transforms as T

timm = peers.timm()

from timm.data.transforms_factory import create_transform  # noqa: E402

CONFIG = {
    "input_size": (3, 224, 224),
    "interpolation": "bicubic",
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "crop_pct": 0.95,
    "crop_mode": "center",
}
SMALL = {**CONFIG, "input_size": (3, 128, 128)}


def sized(config, backend):
    """Return the config, for smaller images if kernels are interpreted."""
    channels, *size = config["input_size"]
    border = (
        {"crop_border_pixels": side(backend, config["crop_border_pixels"])} if "crop_border_pixels" in config else {}
    )
    return {**config, **border, "input_size": (channels, *(side(backend, length) for length in size))}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"crop_pct": 0.875, "interpolation": "bilinear"},
        {"crop_mode": "squash", "crop_pct": 1.0},
        {"crop_mode": "border"},
        {"input_size": (3, 192, 256)},
        {"input_size": (3, 256, 160), "crop_mode": "border"},
        {"crop_border_pixels": 16},
        {"interpolation": "nearest"},
    ],
    ids=str,
)
def test_timm_evaluation_equals_timms(pictures, backend, changes):
    config = sized({**CONFIG, **changes}, backend)
    expected = torch_batch(pictures, create_transform(**config, is_training=False), len(pictures))
    batch = gpuload_batch(pictures, T.from_timm(config), len(pictures), backend=backend)
    assert shape_of(batch) == shape_of(expected)
    assert levels_apart(batch[0], expected[0]).max() <= resized_within(backend, config["interpolation"])


def test_timm_evaluation_of_a_models_config_equals_timms(images):
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False)
    config = timm.data.resolve_model_data_config(model)
    expected = torch_batch(images, create_transform(**config), len(images))
    batch = gpuload_batch(images, T.from_timm(config), len(images))
    std = torch.tensor(config["std"])[:, None, None] * 255
    assert ((batch[0] - expected[0]).abs() * std).max() <= 2


# Arguments of timm, and limits of the mean and the maximum of differences in levels. The mean for contrast may be
# rounded to another level; hues have 8 bits; a blend may be on the other side of an integer.
TRAINING = {
    "jitter": ({"interpolation": "random"}, 0.5, 3),
    "rand-m9-mstd0.5-inc1": ({"auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 0.5, "re_count": 3}, 0.02, 40),
    "rand-m7-n3": ({"auto_augment": "rand-m7-n3", "interpolation": "random", "vflip": 0.5}, 0.02, 40),
    "simclr-like": ({"color_jitter": (0.8, 0.8, 0.8, 0.2), "color_jitter_prob": 0.8, "grayscale_prob": 0.2}, 1, 20),
    "rkrr": ({"train_crop_mode": "rkrr", "color_jitter": None}, 0.001, 0.001),
}


@pytest.mark.parametrize("name", TRAINING)
def test_timm_training_equals_timms_for_the_same_draws(pictures, backend, name):
    """The crop may differ by one level; after it, operations equal torchvision's."""
    arguments, max_mean, max_level = TRAINING[name]
    config = sized(SMALL, backend)
    chain = T.from_timm(config, True, **arguments)
    after = 2 if name == "rkrr" else 1  # rkrr resizes and crops by two transforms
    check_replay(chain, pictures, max_mean=max_mean, max_level=max_level, after=after, backend=backend)
    if backend == "torch":
        check_runners(chain, pictures, after=after)
    max_level = 255 if "rand" in name else 20  # solarize may turn a difference of one level into 255
    check_replay(chain, pictures, max_mean=1, max_level=max_level, backend=backend)
    original = create_transform(**{**config, **arguments}, is_training=True)
    assert shape_of(gpuload_batch(pictures, chain, 4, backend=backend)) == shape_of(torch_batch(pictures, original, 4))


@pytest.mark.parametrize("mode", ["pixel", "rand"])
def test_timm_erasing_changes_only_its_box(images, mode):
    """Random values are in units of the normalized image; other pixels do not change."""
    unerased = gpuload_batch(images, T.from_timm(SMALL, True), len(images))[0]
    erased = gpuload_batch(images, T.from_timm(SMALL, True, re_prob=1.0, re_mode=mode), len(images))[0]
    changed_values = erased[unerased != erased]
    assert 0.01 < len(changed_values) / erased.numel() < 0.4  # as timm's default: boxes of 2% to 33% of an image
    if mode == "pixel":
        assert abs(float(changed_values.mean())) < 0.02
        assert abs(float(changed_values.std()) - 1) < 0.02
    else:
        for unerased_image, erased_image in zip(unerased, erased, strict=True):
            for unerased_channel, channel in zip(unerased_image, erased_image, strict=True):
                assert len(channel[unerased_channel != channel].unique()) == 1
