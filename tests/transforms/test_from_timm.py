"""from_timm converts timm's configurations with all arguments, or raises an error that names the problem."""

from __future__ import annotations

import math
import re

import pytest
from helpers import peers
from transforms.drawing import TO_FLOAT

from gpuload import transforms as T

timm = peers.timm()
vision = peers.torchvision()

from timm.data.auto_augment import rand_augment_transform  # noqa: E402
from timm.data.transforms_factory import create_transform  # noqa: E402

v1 = vision.transforms


CONFIG = {
    "input_size": (3, 224, 224),
    "interpolation": "bicubic",
    "mean": (0.48, 0.45, 0.40),
    "std": (0.26, 0.25, 0.24),
    "crop_pct": 0.95,
    "crop_mode": "center",
}


def filter_name(value) -> str:
    """Return gpuload's name for timm's filter; a pair of filters is "random"."""
    if isinstance(value, tuple | list):
        assert {mode.value for mode in value} == {"bilinear", "bicubic"}
        return "random"
    return value.value


def convert_by_attributes(transform) -> list:
    name = type(transform).__name__
    match name:
        case "MaybeToTensor":
            return [TO_FLOAT]
        case "MaybePILToTensor":
            return []
        case "TrimBorder":
            return [T.TrimBorder(transform.border_size)]
        case "RandomResizedCropAndInterpolation":
            interpolation = filter_name(transform.interpolation)
            return [T.RandomResizedCrop(transform.size, transform.scale, transform.ratio, interpolation)]
        case "ResizeKeepRatio":
            kinds = ("scale_prob", "scale_range", "scale_area", "aspect_prob", "aspect_range")
            options = {f"random_{kind}": getattr(transform, f"random_{kind}") for kind in kinds}
            interpolation = filter_name(transform.interpolation)
            return [T.ResizeKeepRatio(transform.size, transform.longest, interpolation, **options)]
        case "CenterCropOrPad" | "RandomCropOrPad":
            return [getattr(T, name)(transform.size, transform.fill, transform.padding_mode)]
        case "RandomErasing":
            assert transform.log_aspect_ratio == (math.log(0.3), math.log(1 / 0.3))
            scale = (transform.min_area, transform.max_area)
            options = {name: getattr(transform, name) for name in ("mode", "min_count", "max_count")}
            return [T.RandomErasing(transform.probability, scale, (0.3, 1 / 0.3), **options)]
        case "Normalize":
            mean, std = ([round(float(x), 6) for x in values] for values in (transform.mean, transform.std))
            return [T.Normalize(mean, std)]
        case _:
            return T.from_torchvision(transform)


def convert_chain(chain: v1.Compose) -> list:
    return [converted for transform in chain.transforms for converted in convert_by_attributes(transform)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"crop_pct": 0.875, "interpolation": "bilinear"},
        {"crop_pct": None, "crop_mode": None},
        {"crop_mode": "squash"},
        {"crop_mode": "border"},
        {"crop_mode": "squash", "crop_pct": 1.0, "input_size": (3, 320, 320)},
        {"input_size": (3, 192, 256)},
        {"input_size": (3, 192, 256), "crop_mode": "border"},
        {"input_size": 160},
        {"input_size": (1, 28, 28), "mean": (0.5,), "std": (0.25,)},
        {"crop_border_pixels": 8},
        {"normalize": False},
        {"is_training": True},
        {"is_training": True, "no_aug": True},
        {"is_training": True, "no_aug": True, "interpolation": "random", "re_prob": 0.5},
        {"is_training": True, "interpolation": "random", "scale": (0.3, 0.9), "ratio": (0.5, 2.0)},
        {"is_training": True, "hflip": 0.0, "vflip": 0.25, "color_jitter": None},
        {"is_training": True, "color_jitter": (0.1, 0.2, 0.3, 0.05), "color_jitter_prob": 0.8},
        {"is_training": True, "color_jitter": [0.1, 0.2, 0.3], "grayscale_prob": 0.2, "gaussian_blur_prob": 0.5},
        {"is_training": True, "re_prob": 0.25, "re_mode": "pixel", "re_count": 3},
        {"is_training": True, "re_prob": 0.25, "re_mode": "rand"},
        {"is_training": True, "re_prob": 0.25, "normalize": False},
        {"is_training": True, "train_crop_mode": "rkrc"},
        {"is_training": True, "train_crop_mode": "rkrr", "interpolation": "random", "scale": (0.5, 1.0)},
        {"is_training": True, "train_crop_mode": "rkrr", "ratio": (0.8, 1.25)},
    ],
    ids=str,
)
def test_from_timm_gives_the_chain_of_create_transform(options):
    config = {**CONFIG, **options}
    is_training = config.pop("is_training", False)
    expected = convert_chain(create_transform(**config, is_training=is_training))
    assert T.from_timm(config, is_training) == expected
    T.Chain(expected)
    # Options are also accepted as arguments.
    arguments = {name: value for name, value in options.items() if name in T.from_timm.__kwdefaults__}
    remaining_config = {name: value for name, value in config.items() if name not in arguments}
    assert T.from_timm(remaining_config, is_training, **arguments) == expected


@pytest.mark.parametrize("interpolation", ["random", "bicubic"])
@pytest.mark.parametrize("size", [(3, 224, 224), (3, 160, 192)], ids=str)
def test_from_timm_converts_rand_augment_with_its_hparams(interpolation, size):
    config = {**CONFIG, "interpolation": interpolation, "input_size": size}
    chain = T.from_timm(config, True, auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.25)
    assert [type(transform).__name__ for transform in chain] == [
        "RandomResizedCrop",
        "RandomHorizontalFlip",
        "TimmRandAugment",  # in place of ColorJitter
        "ToDtype",
        "Normalize",
        "RandomErasing",
    ]
    timm_chain = create_transform(**config, is_training=True, auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.25)
    operation = timm_chain.transforms[2].ops[0]
    hparams = dict(chain[2].hparams)
    assert tuple(operation.kwargs["fillcolor"]) == tuple(hparams["img_mean"]) == (122, 115, 102)  # 255 × mean
    assert hparams["translate_const"] == operation.hparams["translate_const"] == int(min(size[1:]) * 0.45)
    assert ("interpolation" in hparams) == (interpolation != "random") == ("interpolation" in operation.hparams)
    assert chain[2].config == "rand-m9-mstd0.5-inc1"
    assert rand_augment_transform(chain[2].config, {}).num_layers == 2


def test_from_timm_accepts_the_configuration_of_a_model():
    config = timm.data.resolve_model_data_config(timm.create_model("resnet18", pretrained=False))
    assert T.from_timm(config) == convert_chain(create_transform(**config, is_training=False))


@pytest.mark.parametrize("is_training", [False, True])
def test_from_timm_without_a_configuration_uses_timms_defaults(is_training):
    assert T.from_timm(is_training=is_training) == convert_chain(create_transform(is_training=is_training))


def test_from_timm_arguments_override_the_configuration():
    assert T.from_timm(CONFIG, interpolation="bilinear", crop_pct=1.0)[0] == T.Resize(224)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([1],), TypeError, "from_timm(data_config=…) must be a dict, got [1] (list)"),
        (({"crop_pt": 1},), ValueError, "has the unsupported key 'crop_pt'; remove it."),
        (({"naflex": True},), ValueError, "from_timm: naflex=True cannot be converted"),
        (({"use_prefetcher": True},), ValueError, "use_prefetcher=True cannot be converted: gpuload itself moves"),
        (({"separate": True},), ValueError, "from_timm: separate=True cannot be converted"),
        (({"tf_preprocessing": True},), ValueError, "from_timm: tf_preprocessing=True cannot be converted"),
        (({"patchify": True},), ValueError, "from_timm: patchify=True cannot be converted"),
        (({"re_num_splits": 3},), ValueError, "from_timm: re_num_splits=3 cannot be converted"),
        (({"interpolation": "random"},), ValueError, "interpolation='random' is only for training; pass"),
        (({"crop_pct": 1.5},), ValueError, "from_timm(crop_pct=…) must be greater than 0 and at most 1, got 1.5"),
        (({"color_jitter": (1, 2)}, True), ValueError, "from_timm(color_jitter=…) must be a number or 3 or 4 numbers"),
        (({"auto_augment": 3}, True), TypeError, "from_timm(auto_augment=…) must be a string, got 3 (int)"),
        (({"auto_augment": "rand-x9"}, True), ValueError, "rand-x9"),
        (({"input_size": "224"},), TypeError, "input_size must be an integer, got '224' (str)"),
    ],
)  # fmt: skip
def test_from_timm_refuses_invalid_arguments(arguments, error, text):
    with pytest.raises(error, match=re.escape(text)):
        T.from_timm(*arguments)


def test_from_timm_refuses_an_argument_that_contradicts_the_configuration():
    with pytest.raises(ValueError, match=re.escape("hflip is passed twice, as 0.5 and in data_config as 0.1")):
        T.from_timm({**CONFIG, "hflip": 0.1}, True, hflip=0.5)
