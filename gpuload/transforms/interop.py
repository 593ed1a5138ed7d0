"""Converts torchvision and timm chains to gpuload chains, without importing torch, torchvision or timm.

torchvision transforms, from `torchvision.transforms` or `torchvision.transforms.v2`, are recognised by the names of
their classes and modules. Each is converted to the gpuload transform with the same name. Its attributes become the
fields with the same names, except for the cases in the tables below. Semantics and defaults of `from_timm` are those of
timm 1.0 (timm/data/transforms_factory.py), for chains without timm's prefetcher. An unsupported transform or argument
raises an error with its name and its position in the chain; the converted chain never has different semantics.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

from gpuload.checks import (
    finite_number,
    flag,
    integer,
    is_sequence,
    mapping,
    numbers,
    one_of,
    optional,
    probability,
    string,
)
from gpuload.transforms.arguments import is_torchvision_transform, refuse_albumentations, size_pair
from gpuload.transforms.base import Transform
from gpuload.transforms.blur_noise import GaussianBlur
from gpuload.transforms.colour import ColorJitter, RandomGrayscale
from gpuload.transforms.composite import Identity, RandomApply, RandomChoice, RandomOrder, as_one
from gpuload.transforms.convert import Normalize, ToDtype
from gpuload.transforms.erasing import RandomErasing
from gpuload.transforms.geometry import CenterCrop, RandomHorizontalFlip, RandomResizedCrop, RandomVerticalFlip, Resize
from gpuload.transforms.names import MODULE_REMEDY, TO_DTYPE, TYPE_CONVERSIONS, UNSUPPORTED
from gpuload.transforms.resizing import CenterCropOrPad, RandomCropOrPad, ResizeKeepRatio, TrimBorder
from gpuload.transforms.timm_policies import TimmAugMix, TimmAutoAugment, TimmRandAugment

__all__ = ["from_timm", "from_torchvision"]

# -- torchvision ------------------------------------------------------------------------------------------------------

CONTAINERS: Final = {"RandomApply": RandomApply, "RandomChoice": RandomChoice, "RandomOrder": RandomOrder}

# Arguments that torchvision stores in an attribute of a different name.
RENAMED: Final[dict[tuple[str, str], str]] = {
    ("CutMix", "labels_getter"): "_labels_getter",
    ("MixUp", "labels_getter"): "_labels_getter",
    ("RandomIoUCrop", "sampler_options"): "options",
}

# The presets in `torchvision.transforms._presets`, which belong to model weights, with the remedy for each.
# ImageClassification is not in this table because it is converted to four transforms. Names in braces are attributes of
# the preset.
PRESET_RESIZE: Final = "T.Resize({resize_size[0]}, {interpolation!r}), "  # dropped if resize_size is None
PRESETS: Final[dict[str, str]] = {
    "ObjectDetection": "write transforms=[T.ToDtype('float32', scale=True)]",
    "OpticalFlow": (
        "return both images in a sample, and write transforms=[T.ToDtype('float32', scale=True), "
        "T.Normalize([0.5] * 3, [0.5] * 3)]"
    ),
    "SemanticSegmentation": (
        f"write transforms=[{PRESET_RESIZE}T.ToDtype('float32', scale=True), "
        "T.Normalize({mean}, {std})]; masks in the sample move with the image"
    ),
    "VideoClassification": "it takes the frames of a video; apply it in the dataset's __getitem__",
}


def from_torchvision(transforms: object) -> list[Transform]:
    """Convert torchvision transforms to gpuload transforms.

    All arguments are preserved, but random parameters are drawn per sample. ``ToImage``, ``PILToTensor``,
    ``ToPureTensor`` and ``ToPILImage`` are dropped, since batches are tensors. ``ToTensor`` and ``ConvertImageDtype``
    become `ToDtype`. ``ImageClassification``, the preset that ``weights.transforms()`` returns, becomes `Resize`,
    `CenterCrop`, `ToDtype` and `Normalize`.

    Args:
        transforms: a ``Compose``, a single transform, a list or ``nn.Sequential`` of transforms, or a preset, from
            `torchvision.transforms.v2` or `torchvision.transforms`.

    Returns:
        A list of transforms for ``Loader(transforms=…)``; you can add more transforms to it.

    Raises:
        TypeError: an entry is not a torchvision transform, or is a ``Lambda``.
        ValueError: gpuload does not support a transform or one of its arguments.

    Example, with torchvision's `v2`::

        from_torchvision(v2.Compose([v2.ToImage(), v2.RandomCrop(32, padding=4)]))
        # [RandomCrop(size=(32, 32), padding=(4, 4, 4, 4))]
    """
    return _Converter().convert_chain(transforms)


class _Converter:
    """A converter for one chain. It keeps track of the `ToDtype` that converts images to floats."""

    def __init__(self) -> None:
        self._to_float: ToDtype | None = None

    def convert_chain(self, transforms: object) -> list[Transform]:
        chain: list[Transform] = []
        for transform in self._convert_all(transforms, "transforms"):
            if not isinstance(transform, ToDtype) or not transform.output_state:
                chain.append(transform)
            elif self._to_float is None:
                self._to_float = transform
                chain.append(transform)
            else:
                # A conversion from floats to floats only changes the dtype, which the first ToDtype can set.
                index = chain.index(self._to_float)
                masks = transform.mask_dtype or self._to_float.mask_dtype
                self._to_float = dataclasses.replace(self._to_float, dtype=transform.dtype, mask_dtype=masks)
                chain[index] = self._to_float
        return chain

    def _convert_all(self, entry: Any, path: str) -> Iterator[Transform]:
        for inner, inner_path in _flatten(entry, path):
            yield from self._convert(inner, inner_path)

    def _convert(self, entry: Any, path: str) -> Iterator[Transform]:
        name, location = type(entry).__name__, f"from_torchvision: {path}"
        if isinstance(entry, Transform):
            yield entry
        elif not _is_from_torchvision(entry):
            refuse_albumentations(location, entry)
            raise TypeError(_foreign_message(entry, location))
        elif name in UNSUPPORTED:
            error = TypeError if name == "Lambda" else ValueError
            raise error(f"{location} is {name}, which gpuload does not have: {UNSUPPORTED[name]}")
        elif name in PRESETS:
            raise ValueError(f"{location} is the preset {name}, which cannot be converted: {_preset_remedy(entry)}")
        elif name == "ImageClassification":
            yield from _convert_classification(entry, location)
        elif name in CONTAINERS:
            yield from self._convert_container(name, entry, path)
        elif name in TO_DTYPE:
            dtype = "float32" if name == "ToTensor" else entry.dtype
            transform = _construct(
                ToDtype, {"dtype": dtype, "scale": entry.scale if name == "ToDtype" else True}, location
            )
            if transform.dtype == "uint8":
                self._check_no_floats(f"{location}, {name},")
            if transform.output_state or transform.mask_dtype:  # a conversion from uint8 to uint8 changes nothing
                yield transform
        elif name == "Identity":
            yield Identity()
        elif name == "ToPILImage":
            if entry.mode is not None:
                raise ValueError(
                    f"{location}, ToPILImage(mode={entry.mode!r}), changes the mode of images; remove it, and "
                    "decode them in this mode with gpuload.Encoded(…, mode=…)"
                )
            self._check_no_floats(f"{location}, ToPILImage,")
        elif name not in TYPE_CONVERSIONS:
            cls = getattr(importlib.import_module("gpuload.transforms"), name, None)
            if not (isinstance(cls, type) and issubclass(cls, Transform)):
                raise ValueError(
                    f"{location} is {name}, which gpuload does not have; call it in the dataset's __getitem__, or "
                    f"wrap it in an nn.Module that takes a batch, and {MODULE_REMEDY}"
                )
            yield _construct(cls, self._read_arguments(cls, entry), location)

    def _convert_container(self, name: str, entry: Any, path: str) -> Iterator[Transform]:
        """Convert a transform with children. Each child of a `RandomChoice` or `RandomOrder` must remain one child, so
        if a child becomes several transforms, wrap them in a `Compose`."""
        children_path, arguments = f"{path}.transforms", {} if name == "RandomOrder" else {"p": entry.p}
        if name == "RandomApply":
            children = list(self._convert_all(list(entry.transforms), children_path))
        else:
            children = [
                as_one(list(self._convert_all(inner, f"{children_path}[{index}]")))
                for index, inner in enumerate(entry.transforms)
            ]
        if name == "RandomOrder":
            children = [child for child in children if not isinstance(child, Identity)]
        elif name == "RandomChoice":
            arguments["p"] = None if entry.p is None or len(set(entry.p)) == 1 else list(entry.p)
        if children or name == "RandomChoice":
            yield _construct(CONTAINERS[name], {"transforms": children, **arguments}, f"from_torchvision: {path}")

    def _check_no_floats(self, subject: str) -> None:
        if self._to_float is not None:
            raise ValueError(
                f"{subject} converts floats back to uint8; remove both this transform and the earlier conversion "
                "to floats: until Normalize, gpuload always computes as if images were uint8"
            )

    def _read_arguments(self, cls: type[Transform], entry: Any) -> dict[str, Any]:
        name, arguments = cls.__name__, {}
        field_names = {field.name for field in dataclasses.fields(cls)}
        for argument, parameter in inspect.signature(type(entry)).parameters.items():
            value = _to_plain(getattr(entry, RENAMED.get((name, argument), argument)))
            if argument in field_names or value != parameter.default:
                arguments[argument] = value
        value: Any = arguments.get("value")
        padding: Any = arguments.get("padding")
        is_v2 = type(entry).__module__.startswith("torchvision.transforms.v2")
        if name == "RandomErasing":  # v2 stores "random" as None, and a number as a list
            is_single = is_sequence(value) and len(value) == 1
            arguments["value"] = "random" if value is None else value[0] if is_single else value
        if name == "RandomCrop" and is_v2 and is_sequence(padding) and len(padding) == 4:
            left, right, top, bottom = padding  # v2 stores this order, but takes left, top, right, bottom
            arguments["padding"] = left, top, right, bottom
        if "fill" in arguments and self._to_float is None:
            arguments["fill"] = _truncate_fill(arguments["fill"])
        return arguments


def _flatten(entry: Any, path: str) -> Iterator[tuple[Any, str]]:
    """Yield each entry of a chain with its path, such as "transforms[2]"; unpack Composes and lists."""
    name = type(entry).__name__
    if _is_from_torchvision(entry) and name in ("Sequential", "ModuleList"):
        entry = list(entry)
    elif _is_from_torchvision(entry) and name == "Compose":
        entry = list(entry.transforms)
        path = path if path == "transforms" else f"{path}.transforms"
    if not isinstance(entry, list | tuple):
        yield entry, path
        return
    for index, inner in enumerate(entry):
        yield from _flatten(inner, f"{path}[{index}]")


def _is_from_torchvision(entry: object) -> bool:
    cls = type(entry)
    if cls.__module__.startswith("torch.nn.modules."):
        return cls.__name__ in ("Identity", "ModuleList", "Sequential")
    return is_torchvision_transform(entry)


def _construct(cls: Any, arguments: dict[str, Any], location: str) -> Any:
    try:
        return cls(**arguments)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{location}: {error}") from None


def _convert_classification(preset: Any, location: str) -> Iterator[Transform]:
    """Convert the preset ``ImageClassification``, which calls functions instead of containing transforms."""
    resize = {"size": _to_plain(preset.resize_size), "interpolation": _to_plain(preset.interpolation)}
    yield _construct(Resize, {**resize, "antialias": getattr(preset, "antialias", True)}, location)
    yield _construct(CenterCrop, {"size": _to_plain(preset.crop_size)}, location)
    yield ToDtype("float32", scale=True)
    yield _construct(Normalize, {"mean": _to_plain(preset.mean), "std": _to_plain(preset.std)}, location)


def _preset_remedy(preset: object) -> str:
    """Return the remedy for a preset in `PRESETS`, with the preset's attributes filled in."""
    text = PRESETS[type(preset).__name__]
    if getattr(preset, "resize_size", ()) is None:
        text = text.replace(PRESET_RESIZE, "")
    return text.format(**{name: _to_plain(value) for name, value in vars(preset).items()})


def _to_plain(value: Any) -> Any:
    """Convert enumerations to their values, torchvision's label getters to gpuload's names, and tensors to numbers."""
    if isinstance(value, enum.Enum) and isinstance(value.value, str):
        return value.value
    if not isinstance(value, enum.Enum) and callable(getattr(value, "tolist", None)):
        return value.tolist()
    if callable(value) and getattr(value, "__module__", "").startswith("torchvision.transforms."):
        # torchvision's MixUp and CutMix replace labels_getter="default" and labels_getter=None with functions.
        return "default" if value.__name__ == "_find_labels_default_heuristic" else None
    if isinstance(value, list | tuple):
        return tuple(_to_plain(entry) for entry in value)
    return value


def _truncate_fill(fill: object) -> Any:
    """Truncate a colour such as (123.675, 116.28, 103.53) to integers, as torchvision does for uint8 images."""
    if isinstance(fill, float):
        return int(fill) if math.isfinite(fill) else fill
    if isinstance(fill, tuple):
        return tuple(map(_truncate_fill, fill))
    if isinstance(fill, defaultdict) and fill.default_factory is not None:
        default_value = _truncate_fill(_to_plain(fill.default_factory()))
        return defaultdict(
            lambda: default_value, {cls: _truncate_fill(_to_plain(value)) for cls, value in fill.items()}
        )
    if isinstance(fill, Mapping):
        return {cls: _truncate_fill(_to_plain(value)) for cls, value in fill.items()}
    return fill


def _foreign_message(entry: object, location: str) -> str:
    cls = type(entry)
    text = f"{location} is not a torchvision transform: got {entry!r} ({cls.__module__}.{cls.__name__})"
    if isinstance(entry, type):
        return f"{location} is the class {entry.__name__}; write {entry.__name__}(…)"
    if cls.__module__.split(".")[0] == "timm":
        return f"{text}; write from_timm(data_config, …) for timm's chains"
    if any(base.__module__ == "torch.nn.modules.module" for base in cls.__mro__):
        return (
            f"{text}; remove it from the chain. If it takes a batch, {MODULE_REMEDY}; if it takes one image, call it "
            "in the dataset's __getitem__"
        )
    return (
        f"{text}; call it in the dataset's __getitem__, or wrap it in an nn.Module that takes a batch, and "
        f"{MODULE_REMEDY}"
    )


# -- timm -------------------------------------------------------------------------------------------------------------


class Default(enum.Enum):
    """A sentinel for an omitted argument, since None is a valid value."""

    TIMM = "the value in data_config, else timm's default"

    def __repr__(self) -> str:
        return "TIMM"


TIMM: Final = Default.TIMM

# The arguments of timm.data.create_transform that a data_config can contain, with their defaults.
DEFAULTS: Final[dict[str, Any]] = {
    "input_size": 224, "interpolation": "bilinear", "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225),
    "crop_pct": None, "crop_mode": None, "crop_border_pixels": None, "no_aug": False,
    "train_crop_mode": None, "scale": None, "ratio": None, "hflip": 0.5, "vflip": 0.0,
    "color_jitter": 0.4, "color_jitter_prob": None, "grayscale_prob": 0.0, "gaussian_blur_prob": 0.0,
    "auto_augment": None, "re_prob": 0.0, "re_mode": "const", "re_count": 1, "normalize": True,
}  # fmt: skip
CROP_PCT: Final = 0.875
TIMM_CHECKS: Final[dict[str, Callable[[str, Any], Any]]] = {
    **dict.fromkeys(("hflip", "vflip", "grayscale_prob", "gaussian_blur_prob", "re_prob"), probability),
    **dict.fromkeys(("no_aug", "normalize"), flag),
    "color_jitter_prob": partial(optional, probability),
    "re_count": partial(integer, minimum=0),
    "crop_border_pixels": partial(optional, integer, minimum=0),
    "crop_pct": partial(optional, finite_number, above=0, maximum=1),
}

# The other arguments of create_transform: the values that have no effect, and the reason why other values are refused,
# with the remedy.
REFUSED_TIMM_ARGUMENTS: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    "naflex": ((False,), "it makes patches of images of many sizes, which are not a batch of images; remove it"),
    "patchify": (
        (False,),
        "gpuload makes no patches; make them from the batch, for example in an nn.Module at the end of the chain",
    ),
    "re_num_splits": ((0, 1), "gpuload draws for each image separately, so a batch has no splits; remove it"),
    "separate": ((False,), "it returns three chains; remove it, and split the returned list yourself"),
    "tf_preprocessing": ((False,), "TensorFlow's resampling is not supported; remove it"),
    "use_prefetcher": ((False,), "gpuload itself moves batches to the device; remove it"),
}
# These arguments are ignored, since they have an effect only together with an argument in `REFUSED_TIMM_ARGUMENTS`.
IGNORED_TIMM_ARGUMENTS: Final = ("max_seq_len", "patch_size", "patchify_channels_last", "patchify_flatten")


def from_timm(
    data_config: Mapping[str, Any] | None = None,
    is_training: bool = False,
    *,
    no_aug: bool | Default = TIMM,
    train_crop_mode: Literal["rrc", "rkrc", "rkrr"] | Default | None = TIMM,
    scale: tuple[float, float] | Default | None = TIMM,
    ratio: tuple[float, float] | Default | None = TIMM,
    hflip: float | Default = TIMM,
    vflip: float | Default = TIMM,
    color_jitter: float | Sequence[float] | Default | None = TIMM,
    color_jitter_prob: float | Default | None = TIMM,
    grayscale_prob: float | Default = TIMM,
    gaussian_blur_prob: float | Default = TIMM,
    auto_augment: str | Default | None = TIMM,
    interpolation: str | Default = TIMM,
    re_prob: float | Default = TIMM,
    re_mode: str | Default = TIMM,
    re_count: int | Default = TIMM,
    crop_pct: float | Default | None = TIMM,
    crop_mode: Literal["center", "squash", "border"] | Default | None = TIMM,
    crop_border_pixels: int | Default | None = TIMM,
    normalize: bool | Default = TIMM,
) -> list[Transform]:
    """Convert timm's preprocessing to gpuload transforms.

    An omitted argument (``TIMM``) gets its value from `data_config`, or else timm's default.

    Args:
        data_config: the result of ``timm.data.resolve_model_data_config(model)``: input_size, interpolation, mean, std,
            crop_pct, crop_mode. It can also contain any of the arguments below.
        is_training: whether to return the chain for training, with augmentation, or the chain for evaluation.
        no_aug: whether to leave out the augmentation from the chain for training.
        train_crop_mode: ``"rrc"`` (RandomResizedCrop), ``"rkrc"`` or ``"rkrr"`` (ResizeKeepRatio and a central or
            random crop).
        scale, ratio: the ranges of the random crop; None means timm's ranges.
        hflip, vflip: the probabilities of flips.
        color_jitter: one number for brightness, contrast and saturation, or three numbers, or four with hue; None means
            no jitter. Ignored if `auto_augment` is a string, unless that string contains ``3a``.
        color_jitter_prob: the probability of the jitter; None means always.
        grayscale_prob, gaussian_blur_prob: the probabilities of grayscale and blur.
        auto_augment: timm's string for RandAugment, AutoAugment or AugMix: ``"rand-m9-mstd0.5-inc1"``,
            ``"original-mstd0.5"``, ``"augmix-m5-w4-d2"``.
        interpolation: ``"random"`` (bilinear or bicubic, drawn for each sample), or the name of a filter.
        re_prob, re_mode, re_count: the probability, mode and maximum count of `RandomErasing`.
        crop_pct, crop_mode, crop_border_pixels: the crop for evaluation.
        normalize: whether to convert batches to float32 and normalize them; otherwise they are uint8.

    Returns:
        A list of transforms for ``Loader(transforms=…)``.

    Raises:
        TypeError, ValueError: an argument is invalid or not supported; the message names the argument.

    Example:
        >>> config = {"input_size": (3, 224, 224), "interpolation": "bicubic", "crop_pct": 0.9, "crop_mode": "center"}
        >>> from_timm(config)[:2]
        [Resize(size=248, interpolation='bicubic'), CenterCrop(size=(224, 224))]
    """
    arguments = {name: value for name, value in locals().items() if name in DEFAULTS and value is not TIMM}
    options = _merge_options(data_config, arguments)
    size = options["input_size"]  # (channels, height, width), (height, width) or one side
    size_hw = size_pair("from_timm: input_size", size[1:] if is_sequence(size) and len(size) == 3 else size)
    if not (is_training := flag("from_timm(is_training=…)", is_training)):
        chain = _build_evaluation_chain(options, size_hw)
    elif options["no_aug"]:
        filter_name = "bilinear" if options["interpolation"] == "random" else options["interpolation"]
        chain = [Resize(size_hw, interpolation=filter_name), CenterCrop(size_hw)]
    else:
        chain = [*_build_crop_and_flips(options, size_hw), *_build_colour_changes(options, size_hw)]
    if not options["normalize"]:
        return chain
    chain += [ToDtype("float32", scale=True), Normalize(mean=options["mean"], std=options["std"])]
    if is_training and not options["no_aug"] and options["re_prob"] > 0:
        chain.append(_build_random_erasing(options))
    return chain


def _merge_options(data_config: Mapping[str, Any] | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the values of all options: from the arguments, or else from `data_config`, or else timm's defaults."""
    config = dict(optional(mapping, "from_timm(data_config=…)", data_config) or {})
    for name, (harmless_values, remedy) in REFUSED_TIMM_ARGUMENTS.items():
        value = config.pop(name, harmless_values[0])
        if value not in harmless_values:
            raise ValueError(f"from_timm: {name}={value!r} cannot be converted: {remedy}")
    for name in IGNORED_TIMM_ARGUMENTS:
        config.pop(name, None)
    unknown = sorted(set(config) - set(DEFAULTS))
    if unknown:
        raise ValueError(
            f"from_timm(data_config=…) has the unsupported key {unknown[0]!r}; remove it. The supported keys are "
            f"{', '.join(DEFAULTS)}"
        )
    for name, value in arguments.items():
        if name in config and config[name] != value:
            # Training scripts may override these values of a model's configuration, so a difference is not an error.
            if name in ("interpolation", "crop_pct", "crop_mode"):
                continue
            raise ValueError(
                f"from_timm: {name} is passed twice, as {value!r} and in data_config as {config[name]!r}; remove one"
            )
    options = {**DEFAULTS, **config, **arguments}
    for name, check in TIMM_CHECKS.items():
        options[name] = check(f"from_timm({name}=…)", options[name])
    return options


def _build_evaluation_chain(options: dict[str, Any], size_hw: tuple[int, int]) -> list[Transform]:
    filter_name = options["interpolation"]
    if filter_name == "random":
        raise ValueError(
            "from_timm: interpolation='random' is only for training; pass the name of a filter, such as 'bicubic'"
        )
    crop_fraction = options["crop_pct"] or CROP_PCT
    scaled_hw = math.floor(size_hw[0] / crop_fraction), math.floor(size_hw[1] / crop_fraction)
    border = options["crop_border_pixels"]
    mode = one_of("from_timm(crop_mode=…)", options["crop_mode"] or "center", ("center", "squash", "border"))
    crop: Transform = CenterCrop(size_hw)
    if mode == "border":
        resize = ResizeKeepRatio(scaled_hw, longest=1.0, interpolation=filter_name)
        crop = CenterCropOrPad(size_hw, fill=tuple(round(255 * value) for value in options["mean"]))
    elif mode == "squash" or scaled_hw[0] == scaled_hw[1]:
        resize = Resize(scaled_hw if mode == "squash" else scaled_hw[0], interpolation=filter_name)
    else:
        resize = ResizeKeepRatio(scaled_hw, interpolation=filter_name)
    return [*([TrimBorder(border)] if border else []), resize, crop]


def _build_crop_and_flips(options: dict[str, Any], size_hw: tuple[int, int]) -> list[Transform]:
    """Return what timm calls primary transforms: a crop and flips."""
    mode = one_of("from_timm(train_crop_mode=…)", options["train_crop_mode"] or "rrc", ("rrc", "rkrc", "rkrr"))
    scale, ratio = options["scale"], options["ratio"]
    chain: list[Transform]
    if mode == "rrc":
        crop = RandomResizedCrop(
            size_hw,
            scale=(0.08, 1.0) if scale is None else scale,
            ratio=(3 / 4, 4 / 3) if ratio is None else ratio,
            interpolation=options["interpolation"],
        )
        chain = [crop]
    else:
        resize = ResizeKeepRatio(
            size_hw,
            interpolation=options["interpolation"],
            random_scale_prob=0.5,
            random_scale_range=(0.8, 1.0) if scale is None else scale,
            random_scale_area=True,
            random_aspect_prob=0.5,
            random_aspect_range=(0.9, 1 / 0.9) if ratio is None else ratio,
        )
        crop = (CenterCropOrPad if mode == "rkrc" else RandomCropOrPad)(size_hw, padding_mode="reflect")
        chain = [resize, crop]
    if options["hflip"]:
        chain.append(RandomHorizontalFlip(options["hflip"]))
    if options["vflip"]:
        chain.append(RandomVerticalFlip(options["vflip"]))
    return chain


def _build_colour_changes(options: dict[str, Any], size_hw: tuple[int, int]) -> list[Transform]:
    """Return what timm calls secondary transforms: automatic augmentation or jitter, grayscale, and blur."""
    chain: list[Transform] = []
    auto_augment = options["auto_augment"]
    if auto_augment:
        chain.append(_build_auto_augment(options, size_hw))
    if options["color_jitter"] is not None and (not auto_augment or "3a" in auto_augment):
        jitter = _build_color_jitter(options["color_jitter"])
        jitter_probability = options["color_jitter_prob"]
        chain.append(jitter if jitter_probability is None else RandomApply([jitter], p=jitter_probability))
    if options["grayscale_prob"]:
        chain.append(RandomGrayscale(options["grayscale_prob"]))
    if options["gaussian_blur_prob"]:
        chain.append(RandomApply([GaussianBlur(23)], p=options["gaussian_blur_prob"]))
    return chain


def _build_color_jitter(value: Any) -> ColorJitter:
    strengths = numbers("from_timm(color_jitter=…)", value, form="3 or 4 numbers", counts=(1, 3, 4), single=True)
    return ColorJitter(*(strengths * 3 if len(strengths) == 1 else strengths))


def _build_auto_augment(options: dict[str, Any], size_hw: tuple[int, int]) -> Transform:
    config = string("from_timm(auto_augment=…)", options["auto_augment"])
    hparams: dict[str, Any] = {
        "translate_const": int(min(size_hw) * 0.45),
        "img_mean": tuple(min(255, round(255 * value)) for value in options["mean"]),
    }
    if options["interpolation"] != "random":
        hparams["interpolation"] = options["interpolation"]
    if config.startswith("augmix"):
        return TimmAugMix(config, {**hparams, "translate_pct": 0.3})
    return (TimmRandAugment if config.startswith("rand") else TimmAutoAugment)(config, hparams)


def _build_random_erasing(options: dict[str, Any]) -> Transform:
    mode = str(options["re_mode"]).lower() or "const"
    count = options["re_count"] or 1
    return RandomErasing(
        options["re_prob"], scale=(0.02, 1 / 3), ratio=(0.3, 1 / 0.3), mode=mode, min_count=1, max_count=count
    )
