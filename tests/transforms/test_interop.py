"""from_torchvision converts chains with all arguments, or raises an error that names the problem."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections import defaultdict

import pytest
import torch
from helpers import peers
from helpers.generated_images import smooth_image
from PIL import Image
from torch import nn
from transforms.drawing import TO_FLOAT, draw
from transforms.specs import SPECS, second_entry

import gpuload as gl
from gpuload import transforms as T
from gpuload.transforms.interop import PRESETS
from gpuload.transforms.names import TO_DTYPE, TYPE_CONVERSIONS, UNSUPPORTED

vision = peers.torchvision()
v1 = vision.transforms
v2 = v1.v2
BICUBIC = v2.InterpolationMode.BICUBIC


CONTAINERS = {"Compose", "RandomApply", "RandomChoice", "RandomOrder"}
HANDLED_SEPARATELY = {*TYPE_CONVERSIONS, *TO_DTYPE, *UNSUPPORTED, *CONTAINERS}
# The arguments of each transform that is converted to the transform of the same name; no value is a default.
EXAMPLES = {
    name: spec.torchvision
    for name, spec in SPECS.items()
    if spec.torchvision is not None and name not in HANDLED_SEPARATELY
}
NOT_TRANSFORMS = {"AutoAugmentPolicy", "InterpolationMode", "Transform"}


def all_fields(transforms) -> list:
    """Return the values of all fields, including those that are not compared."""
    return [
        (type(transform), [getattr(transform, field.name) for field in dataclasses.fields(transform)])
        for transform in transforms
    ]


def torchvision_arguments(arguments: dict) -> dict:
    """Convert strings to torchvision's enums."""
    enums = {"interpolation": v2.InterpolationMode, "policy": v2.AutoAugmentPolicy}
    return {key: enums[key](value) if key in enums else value for key, value in arguments.items()}


def parameter_names(kind: type) -> set[str]:
    return set(inspect.signature(kind).parameters)


@pytest.mark.parametrize("module", [v1, v2], ids=["v1", "v2"])
def test_each_torchvision_transform_has_a_spec_or_is_unsupported(module):
    classes = {name for name, value in vars(module).items() if isinstance(value, type)}
    missing = sorted(classes - NOT_TRANSFORMS - {*EXAMPLES, *HANDLED_SEPARATELY})
    assert not missing, (
        f"for {', '.join(missing)}, add a Spec with `torchvision=…` to tests/transforms/specs.py, or an entry to "
        "UNSUPPORTED in gpuload/transforms/names.py"
    )


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_transforms_have_every_argument_of_torchvision(name):
    for module in (v1, v2):
        if hasattr(module, name):
            assert parameter_names(getattr(module, name)) == set(EXAMPLES[name])
    assert set(EXAMPLES[name]) <= parameter_names(getattr(T, name))


def test_from_torchvision_refuses_an_unknown_argument_unless_it_is_its_default():
    class RandomInvert:
        def __init__(self, p=0.5, channels=None):
            self.p, self.channels = p, channels

    RandomInvert.__module__ = "torchvision.transforms.v2._color"
    assert T.from_torchvision(RandomInvert(0.3)) == [T.RandomInvert(0.3)]
    with pytest.raises(TypeError, match=r"transforms: RandomInvert has no argument 'channels'; its arguments: p"):
        T.from_torchvision(RandomInvert(0.3, channels=2))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        pytest.param(module, name, id=f"{version}-{name}")
        for version, module in (("v1", v1), ("v2", v2))
        for name in sorted(EXAMPLES)
        if module is v2 or hasattr(v1, name)  # v2 has all of EXAMPLES
    ],
)
def test_from_torchvision_converts_every_argument(module, name):
    arguments, kind = EXAMPLES[name], getattr(T, name)
    fields = all_fields([kind(**arguments)])
    assert all_fields(T.from_torchvision(getattr(module, name)(**torchvision_arguments(arguments)))) == fields
    for key in arguments:
        if inspect.signature(kind).parameters[key].default is inspect.Parameter.empty:
            continue
        # Without this argument, the fields differ, so the example shows whether the argument is converted.
        remaining_arguments = {other: value for other, value in arguments.items() if other != key}
        remaining_fields = all_fields([kind(**remaining_arguments)])
        assert remaining_fields != fields
        assert (
            all_fields(T.from_torchvision(getattr(module, name)(**torchvision_arguments(remaining_arguments))))
            == remaining_fields
        )


def test_from_torchvision_converts_labels_getters():
    for kind in ("MixUp", "CutMix"):
        for getter in ("default", None, second_entry):
            [converted] = T.from_torchvision(getattr(v2, kind)(num_classes=3, labels_getter=getter))
            assert converted.labels_getter == getter
    [converted] = T.from_torchvision(v2.SanitizeBoundingBoxes(labels_getter=second_entry))
    assert converted.labels_getter is second_entry


tv_tensors = vision.tv_tensors
FILL_BY_TYPE = defaultdict(lambda: 0, {tv_tensors.Image: (1, 2, 3), tv_tensors.Mask: 255})
FILL = {gl.Image: (1, 2, 3), gl.Mask: 255}
DTYPES_BY_TYPE = {tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None}
TV_FLIP, TV_JITTER = v2.RandomHorizontalFlip(1.0), v2.ColorJitter(0.2)
FLIP, JITTER = T.RandomHorizontalFlip(1.0), T.ColorJitter(0.2)
TO_FLOAT16 = [v1.ToTensor(), v1.Normalize([0.5], [0.5]), v1.ConvertImageDtype(torch.float16)]


@pytest.mark.parametrize(
    ("transforms", "expected"),
    [
        *(
            (module.RandomErasing(value=value), [T.RandomErasing(value=value)])
            for module in (v1, v2)
            for value in (0.5, "random", (0.1, 0.2, 0.3))
        ),
        (v2.RandomCrop(8, fill=FILL_BY_TYPE), [T.RandomCrop(8, fill=FILL)]),
        (v2.Pad(3, fill=FILL_BY_TYPE), [T.Pad(3, fill=FILL)]),
        (v2.RandomZoomOut(fill={"others": 5}), [T.RandomZoomOut(fill={"others": 5})]),
        ([v2.ToImage(), v1.PILToTensor(), v2.ToPureTensor(), v2.ToPILImage(), v2.ToDtype(torch.uint8, scale=True)], []),
        ([v2.Identity(), nn.Identity()], [T.Identity(), T.Identity()]),
        ([v1.ToTensor()], [TO_FLOAT]),
        ([v1.ConvertImageDtype(torch.float32)], [TO_FLOAT]),
        ([v2.ConvertImageDtype()], [TO_FLOAT]),
        (v2.ToDtype(torch.float16), [T.ToDtype("float16")]),
        # Of two conversions, the second changes only the width of the floats.
        ([v1.ToTensor(), v1.ConvertImageDtype(torch.float32)], [TO_FLOAT]),
        (TO_FLOAT16, [T.ToDtype("float16", scale=True), T.Normalize([0.5], [0.5])]),
        ([v2.ToDtype(DTYPES_BY_TYPE, scale=True)], [T.ToDtype("float32", scale=True, mask_dtype="int64")]),
        ([v2.ToDtype(DTYPES_BY_TYPE, scale=True)], [T.ToDtype({gl.Image: "float32", gl.Mask: "int64"}, scale=True)]),
        ([v2.ToDtype({tv_tensors.Mask: torch.int64, "others": None})], [T.ToDtype(None, mask_dtype="int64")]),
        (
            v2.Compose([v2.ToImage(), v2.Compose([TV_FLIP]), nn.Sequential(TV_JITTER, nn.Sequential(TV_FLIP))]),
            [FLIP, JITTER, FLIP],
        ),
        (v1.Compose([v1.RandomApply([TV_JITTER, TV_FLIP], p=0.3)]), [T.RandomApply([JITTER, FLIP], p=0.3)]),
        (v2.RandomApply(nn.ModuleList([TV_JITTER]), p=0.3), [T.RandomApply([JITTER], p=0.3)]),
        (v2.RandomApply([v2.ToImage()]), []),
        *((module.RandomChoice([TV_FLIP, TV_JITTER]), [T.RandomChoice([FLIP, JITTER])]) for module in (v1, v2)),
        *((module.RandomOrder([TV_FLIP, TV_JITTER]), [T.RandomOrder([FLIP, JITTER])]) for module in (v1, v2)),
        (
            v2.RandomChoice([v2.ToImage(), v2.Compose([TV_FLIP, TV_JITTER])], p=[1, 3]),
            [T.RandomChoice([T.Identity(), T.Compose([FLIP, JITTER])], p=[0.25, 0.75])],
        ),
        ([FLIP, TV_JITTER], [FLIP, JITTER]),
    ],
)
def test_from_torchvision_converts_fills_types_and_containers(transforms, expected):
    assert T.from_torchvision(transforms) == expected


@pytest.mark.filterwarnings("ignore:.*ToTensor:UserWarning")  # it is deprecated
def test_from_torchvision_converts_the_deprecated_to_tensor():
    assert T.from_torchvision([v2.ToTensor()]) == [TO_FLOAT]


def test_from_torchvision_truncates_a_fill_between_levels():
    color, image = (123.675, 116.28, 103.53), Image.new("RGB", (4, 4))
    for fill in (color, {"others": color}, defaultdict(lambda: color), {tv_tensors.Image: list(color)}):
        [pad] = T.from_torchvision(v2.Pad(1, fill=fill))
        assert pad.outside.image == v2.Pad(1, fill=color)(image).getpixel((0, 0)) == (123, 116, 103)
    assert T.from_torchvision(v1.RandomRotation(5, fill=7.9)) == [T.RandomRotation(5, fill=7)]
    # After ToTensor, a fill is not a level.
    with pytest.raises(ValueError, match=r"Pad\(fill=\(0.5,\)\) is a pixel value in 0 … 255, but comes after ToDtype"):
        T.Chain(T.from_torchvision([v1.ToTensor(), v1.Pad(1, fill=0.5)]))


def test_from_torchvision_does_not_scale_a_threshold_after_to_tensor():
    chain = T.from_torchvision([v1.ToTensor(), v1.RandomSolarize(0.5, p=1)])
    assert chain[1] == T.RandomSolarize(0.5, p=1)
    assert draw(*chain, count=1).records[1].values[0, 0, 0] == 127.5


class UserModule(nn.Module):
    pass


@pytest.mark.parametrize(
    ("transforms", "error", "text"),
    [
        (lambda: v2.Lambda(second_entry), TypeError,
         "transforms is Lambda, which gpuload does not have: torchvision calls its function with every part of a "
         "sample; with gpuload, write T.Lambda(fn, per='image') to call"),
        (lambda: [v1.ToTensor(), v1.Lambda(second_entry)], TypeError, "from_torchvision: transforms[1] is Lambda"),
        (lambda: v2.Compose([v2.Resize(8), v2.RandomApply([v2.Compose([v2.RGB()])])]), ValueError,
         "from_torchvision: transforms[1].transforms[0].transforms[0] is RGB, which gpuload does not have"),
        (lambda: v2.RandomChoice([v2.Resize(8), v2.RGB()]), ValueError, "transforms.transforms[1] is RGB"),
        (lambda: v1.FiveCrop(8), ValueError, "is FiveCrop, which gpuload does not have: it makes five images from one"),
        (lambda: [v2.Resize(8, v2.InterpolationMode.BOX)], ValueError, "transforms[0]: Resize(interpolation=…) must"),
        (lambda: v2.RandomApply([v1.ToTensor()]), ValueError, "RandomApply cannot hold ToDtype, which would convert"),
        (lambda: [v1.ToTensor(), v1.ToPILImage()], ValueError,
         "transforms[1], ToPILImage, converts floats back to uint8"),
        (lambda: [v1.ToPILImage("L")], ValueError, "transforms[0], ToPILImage(mode='L'), changes the mode"),
        (lambda: [v1.ToTensor(), v2.ToDtype(torch.uint8, scale=True)], ValueError,
         "transforms[1], ToDtype, converts floats back to uint8; remove both"),
        (lambda: [second_entry], TypeError, "transforms[0] is not a torchvision transform: got <function second"),
        (lambda: [v2.Resize], TypeError, "transforms[0] is the class Resize; write Resize(…)"),
        (lambda: [v2.Resize(8), UserModule()], TypeError,
         "remove it from the chain. If it takes a batch, write transforms=[*T.from_torchvision(…), module]"),
    ],
)  # fmt: skip
def test_from_torchvision_refuses_unsupported_transforms_with_their_index(transforms, error, text):
    with pytest.raises(error, match=re.escape(text)):
        T.from_torchvision(transforms())


# Photographs, an image that is enlarged, and one that is smaller than the crop.
@pytest.mark.parametrize("size", [(500, 375), (375, 500), (90, 300), (40, 30)])
@pytest.mark.parametrize(
    "options",
    [
        {"crop_size": 64},
        {"crop_size": 96, "resize_size": 80, "interpolation": BICUBIC, "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)},
    ],
    ids=["defaults", "all arguments"],
)
def test_converted_classification_preset_gives_the_images_of_the_preset(size, options):
    preset = v1._presets.ImageClassification(**options)
    image = Image.fromarray(smooth_image(*size, 0))
    with gl.Loader([image], transforms=T.from_torchvision(preset), num_workers=0, device="cpu") as loader:
        [images] = loader
    levels_per_unit = torch.tensor(preset.std)[:, None, None] * 255
    assert ((images[0] - preset(image)).abs() * levels_per_unit).max() <= 2


def test_from_torchvision_converts_a_classification_preset_to_four_transforms():
    expected = [
        T.Resize(256, "bicubic"),
        T.CenterCrop(224),
        T.ToDtype("float32", scale=True),
        T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]
    preset = v1._presets.ImageClassification(crop_size=224, interpolation=BICUBIC)
    assert T.from_torchvision(preset) == expected
    assert T.from_torchvision([v2.ToImage(), preset]) == expected


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("SemanticSegmentation", {"resize_size": 520, "mean": (0.5, 0.4, 0.3)},
         "transforms is the preset SemanticSegmentation, which cannot be converted: write "
         "transforms=[T.Resize(520, 'bilinear'), T.ToDtype('float32', scale=True), "
         "T.Normalize((0.5, 0.4, 0.3), (0.229, 0.224, 0.225))]; masks"),
        ("SemanticSegmentation", {"resize_size": None}, "write transforms=[T.ToDtype('float32', scale=True), T.Norm"),
        ("ObjectDetection", {}, "cannot be converted: write transforms=[T.ToDtype('float32', scale=True)]"),
        ("VideoClassification", {"crop_size": (8, 8), "resize_size": (9,)}, "apply it in the dataset's __getitem__"),
        ("OpticalFlow", {}, "return both images in a sample, and write transforms=[T.ToDtype"),
    ],
)  # fmt: skip
def test_from_torchvision_refuses_unsupported_presets_with_a_remedy(name, options, text):
    assert set(v1._presets.__all__) == {"ImageClassification", *PRESETS}
    with pytest.raises(ValueError, match=re.escape(text)):
        T.from_torchvision(getattr(v1._presets, name)(**options))


@pytest.mark.parametrize("name", [*sorted(UNSUPPORTED), "RandomUnknown"])
def test_from_torchvision_refuses_each_unsupported_transform_by_name(name):
    kind = type(name, (), {"__module__": "torchvision.transforms.v2._any"})
    text = f"transforms[0] is {name}, which gpuload does not have"
    with pytest.raises(
        (TypeError, ValueError), match=re.escape(text + ("; call it in" if name == "RandomUnknown" else ""))
    ):
        T.from_torchvision([kind()])


def test_from_torchvision_refuses_a_timm_transform_with_from_timm_as_the_remedy():
    kind = type("MaybeToTensor", (), {"__module__": "timm.data.transforms"})
    with pytest.raises(TypeError, match="write from_timm"):
        T.from_torchvision([kind()])
