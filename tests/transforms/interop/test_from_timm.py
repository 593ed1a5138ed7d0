"""A data configuration of timm's gives the chain that timm's `create_transform` makes of it, or an error that says why
not."""

from __future__ import annotations

import re

import originals
import pytest

from gpuload import transforms as T

timm = originals.timm()
vision = originals.torchvision()

from timm.data.auto_augment import rand_augment_transform  # noqa: E402
from timm.data.transforms_factory import create_transform  # noqa: E402

CONFIG = {
    "input_size": (3, 224, 224),
    "interpolation": "bicubic",
    "mean": (0.48, 0.45, 0.40),
    "std": (0.26, 0.25, 0.24),
    "crop_pct": 0.95,
    "crop_mode": "center",
}


def filters(value) -> str:
    """The name of theirs, of which "random" is two."""
    if isinstance(value, tuple | list):
        assert {mode.value for mode in value} == {"bilinear", "bicubic"}
        return "random"
    return value.value


def ours_of(transform) -> list:
    """One of timm's chain, read from its attributes, as ours."""
    name = type(transform).__name__
    match name:
        case "MaybeToTensor":
            return [T.ToDtype("float32", scale=True)]
        case "MaybePILToTensor":
            return []
        case "TrimBorder":
            return [T.TrimBorder(transform.border_size)]
        case "RandomResizedCropAndInterpolation":
            return [
                T.RandomResizedCrop(
                    transform.size, transform.scale, transform.ratio, interpolation=filters(transform.interpolation)
                )
            ]
        case "ResizeKeepRatio":
            return [
                T.ResizeKeepRatio(
                    transform.size,
                    transform.longest,
                    filters(transform.interpolation),
                    transform.random_scale_prob,
                    transform.random_scale_range,
                    transform.random_scale_area,
                    transform.random_aspect_prob,
                    transform.random_aspect_range,
                )
            ]
        case "CenterCropOrPad" | "RandomCropOrPad":
            return [getattr(T, name)(transform.size, transform.fill, transform.padding_mode)]
        case "RandomErasing":
            assert transform.log_aspect_ratio[0] == -transform.log_aspect_ratio[1]
            return [
                T.RandomErasing(
                    transform.probability,
                    scale=(transform.min_area, transform.max_area),
                    ratio=(0.3, 1 / 0.3),
                    mode=transform.mode,
                    min_count=transform.min_count,
                    max_count=transform.max_count,
                )
            ]
        case "Normalize":
            return [
                T.Normalize([round(float(x), 6) for x in transform.mean], [round(float(x), 6) for x in transform.std])
            ]
        case _:
            return T.from_torchvision(transform)


@pytest.mark.parametrize(
    "more",
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
def test_the_chain_is_that_of_create_transform(more):
    config = {**CONFIG, **more}
    training = config.pop("is_training", False)
    theirs = create_transform(**config, is_training=training)
    expected = [ours for transform in theirs.transforms for ours in ours_of(transform)]
    assert T.from_timm(config, training) == expected
    T.Chain(expected)  # in a possible order
    # The same where arguments are given beside the configuration.
    beside = {name: value for name, value in more.items() if name in T.from_timm.__kwdefaults__}
    rest = {name: value for name, value in config.items() if name not in beside}
    assert T.from_timm(rest, training, **beside) == expected


@pytest.mark.parametrize("interpolation", ["random", "bicubic"])
@pytest.mark.parametrize("size", [(3, 224, 224), (3, 160, 192)], ids=str)
def test_randaugment(interpolation, size):
    config = {**CONFIG, "interpolation": interpolation, "input_size": size}
    chain = T.from_timm(config, True, auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.25)
    assert [type(transform).__name__ for transform in chain] == [
        "RandomResizedCrop",
        "RandomHorizontalFlip",
        "TimmRandAugment",  # in place of the colour jitter
        "ToDtype",
        "Normalize",
        "RandomErasing",
    ]
    theirs = create_transform(**config, is_training=True, auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.25)
    operation = theirs.transforms[2].ops[0]
    hparams = dict(chain[2].hparams)
    assert tuple(operation.kwargs["fillcolor"]) == tuple(hparams["img_mean"]) == (122, 115, 102)
    assert hparams["translate_const"] == operation.hparams["translate_const"] == int(min(size[1:]) * 0.45)
    assert ("interpolation" in hparams) == (interpolation != "random") == ("interpolation" in operation.hparams)
    assert chain[2].config == "rand-m9-mstd0.5-inc1"
    assert rand_augment_transform(chain[2].config, {}).num_layers == 2


def test_a_models_configuration():
    model = timm.create_model("resnet18", pretrained=False)
    config = timm.data.resolve_model_data_config(model)
    theirs = create_transform(**config, is_training=False)
    assert T.from_timm(config) == [ours for transform in theirs.transforms for ours in ours_of(transform)]


def test_no_configuration_is_timms_defaults():
    for training in (False, True):
        theirs = create_transform(is_training=training)
        assert T.from_timm(is_training=training) == [
            ours for transform in theirs.transforms for ours in ours_of(transform)
        ]


def test_what_training_scripts_override():
    assert T.from_timm(CONFIG, interpolation="bilinear", crop_pct=1.0)[0] == T.Resize(224)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([1],), TypeError, "from_timm(data_config=…) must be a dict, as timm.data.resolve_model_data_config(model)"),
        (({"crop_pt": 1},), ValueError, "holds 'crop_pt', which is none of the arguments of timm's create_transform"),
        (({"naflex": True},), ValueError, "from_timm: naflex=True cannot be mapped"),
        (({"use_prefetcher": True},), ValueError, "use_prefetcher=True cannot be mapped: gpuload puts batches on"),
        (({"separate": True},), ValueError, "from_timm: separate=True cannot be mapped"),
        (({"tf_preprocessing": True},), ValueError, "from_timm: tf_preprocessing=True cannot be mapped"),
        (({"patchify": True},), ValueError, "from_timm: patchify=True cannot be mapped"),
        (({"re_num_splits": 3},), ValueError, "from_timm: re_num_splits=3 cannot be mapped"),
        (({"interpolation": "random"},), ValueError, "interpolation='random' is for training; name a filter"),
        (({"interpolation": "box"},), ValueError, "Resize(interpolation=…) must be one of"),
        (({"crop_pct": 1.5},), ValueError, "from_timm(crop_pct=…) must be greater than 0, and at most 1, got 1.5"),
        (({"crop_mode": "zoom"},), ValueError, "from_timm(crop_mode=…) must be 'center', 'squash' or 'border'"),
        (({"train_crop_mode": "zoom"}, True), ValueError, "(train_crop_mode=…) must be 'rrc', 'rkrc' or 'rkrr'"),
        (({"hflip": 1.5}, True), ValueError, "from_timm(hflip=…) is a probability and must lie in 0 … 1"),
        (({"color_jitter": (1, 2)}, True), ValueError, "from_timm(color_jitter=…) must be one number, or three"),
        (({"auto_augment": 3}, True), TypeError, "from_timm(auto_augment=…) must be a string, got 3 (int)"),
        (({"auto_augment": "v1"}, True), ValueError, "TimmAutoAugment(config=…) must begin with one of 'original'"),
        (({"auto_augment": "rand-x9"}, True), ValueError, "rand-x9"),
        (({"re_prob": 1.0, "re_mode": "noise"}, True), ValueError, "RandomErasing(mode=…) must be one of"),
        (({"input_size": "224"},), TypeError, "input_size must be an integer, got '224' (str)"),
    ],
)  # fmt: skip
def test_refused(arguments, error, text):
    with pytest.raises(error, match=re.escape(text)):
        T.from_timm(*arguments)


def test_a_contradiction_is_refused():
    with pytest.raises(ValueError, match=re.escape("hflip is given twice, as 0.5 and in data_config as 0.1")):
        T.from_timm({**CONFIG, "hflip": 0.1}, True, hflip=0.5)
