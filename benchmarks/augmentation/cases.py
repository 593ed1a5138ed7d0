"""The cases to measure: single transforms and complete recipes, as defined in gpuload, torchvision v2 and Kornia.

Single transforms with a probability use 1, so that every image is changed. Transforms that bring images to one size
start from full photographs, all others from crops of 224×224. A recipe turns photographs, or a batch of photographs,
into a normalised batch. `everyday` has the recipes whose plans are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from benchmarks.peers.protocol import MEAN, STD
from benchmarks.peers.torchvision_import import v2
from gpuload import transforms as T

CLASSES = 1000
CLASSIC = "classic"
RAND_AUGMENT, TRIVIAL_AUGMENT = f"{CLASSIC} + RandAugment", f"{CLASSIC} + TrivialAugment"

Start = Literal["photographs", "landscape", "crops", "squares"]
"""Full photographs in portrait and landscape format; photographs all 375×500; crops of 224×224; crops of 256×256."""
Both = tuple[Any, Any]
"""gpuload's transform and torchvision's."""
Modules = Callable[[Any], Any]
"""A function that takes `kornia.augmentation` and returns a module or a list of modules."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A transform or recipe to measure.

    Attributes:
        name: the name in the tables.
        ours: all of gpuload's transforms.
        image: torchvision's transforms on a single image (Pillow's or a tensor), before the conversion to floats.
        finished: torchvision's transforms on a single image after that conversion.
        mixed: torchvision's transforms on a batch and its labels.
        leading: the number of transforms in `image` that run on each photograph separately, before sizes are equal.
        no_pillow: whether torchvision's transforms do not accept Pillow's images.
        kornia: Kornia's modules, or the reason why Kornia has no equivalent.
        start: the input.
        floats: whether the result is a normalised float batch, not levels.
        boxes: whether crops depend on the boxes of each image.
        dtype, channels_last: the format of a float batch.
        section: the table of the case. In ``"dense"``, `gpuload.Augment` is called on a batch N×C×H×W.
    """

    name: str
    ours: tuple[Any, ...]
    image: tuple[Any, ...] = ()
    finished: tuple[Any, ...] = ()
    mixed: tuple[Any, ...] = ()
    leading: int = 0
    no_pillow: bool = False
    kornia: Modules | str
    start: Start = "crops"
    floats: bool = False
    boxes: bool = False
    dtype: str = "float32"
    channels_last: bool = False
    section: Literal["transforms", "recipes", "dense", "kernel"] = "transforms"


def both(name: str, *arguments: Any, **options: Any) -> Both:
    """Make the transform of this name in both libraries. A list among the arguments holds such pairs of transforms."""

    def make(library: Any, index: int, overrides: dict[str, Any]) -> Any:
        values = [[pair[index] for pair in value] if isinstance(value, list) else value for value in arguments]
        return getattr(library, name)(*values, **options | overrides)

    overrides = {"interpolation": v2.InterpolationMode.BILINEAR} if "interpolation" in options else {}
    return make(T, 0, {}), make(v2, 1, overrides)


def alone(pair: Both, kornia: Modules, name: str = "", **more: Any) -> Case:
    """Make the case of a transform by itself."""
    ours, theirs = pair
    return Case(name=name or type(ours).__name__, ours=(ours,), image=(theirs,), kornia=lambda K: [kornia(K)], **more)


def normalized(name: str, ours: Any = None, theirs: Any = None, kornia: Modules | None = None) -> Case:
    """Make the case of normalising a batch, optionally followed by mixing."""
    return Case(
        name=name,
        ours=(T.Normalize(MEAN, STD), *([ours] if ours else [])),
        mixed=(theirs,) if theirs else (),
        kornia=lambda K: [K.Normalize(MEAN, STD), *([kornia(K)] if kornia else [])],
        floats=True,
    )


def transforms() -> list[Case]:
    """Return a case for each transform."""
    crop, blur, colour, hue = (224, 224), (0.1, 2.0), (0.4, 0.4, 0.4), (0.4, 0.4, 0.4, 0.1)
    affine = (0.1, 0.1), (0.8, 1.2), 10.0
    smooth: dict[str, Any] = {"interpolation": "bilinear"}
    photographs: dict[str, Any] = {"start": "photographs", "leading": 1}
    cut_mix = lambda K: K.RandomCutMixV2(p=1.0, use_correct_lambda=True)  # noqa: E731
    return [
        alone(both("RandomResizedCrop", 224), lambda K: K.RandomResizedCrop(crop), **photographs),
        alone(both("Resize", crop), lambda K: K.Resize(crop, antialias=True), **photographs),
        alone(both("CenterCrop", 224), lambda K: K.CenterCrop(224), **photographs),
        alone(both("RandomCrop", 224), lambda K: K.RandomCrop(crop), **photographs),
        alone(both("Pad", 16), lambda K: K.PadTo((256, 256))),
        alone(both("RandomHorizontalFlip", 1), lambda K: K.RandomHorizontalFlip(p=1.0)),
        alone(both("RandomVerticalFlip", 1), lambda K: K.RandomVerticalFlip(p=1.0)),
        alone(both("RandomRotation", 30, **smooth), lambda K: K.RandomRotation(30.0, p=1.0)),
        alone(both("RandomAffine", 15, *affine, **smooth), lambda K: K.RandomAffine(15.0, *affine, p=1.0)),
        alone(both("RandomPerspective", p=1), lambda K: K.RandomPerspective(0.5, p=1.0)),
        alone(both("ColorJitter", *colour), lambda K: K.ColorJitter(*colour)),
        alone(both("ColorJitter", *hue), lambda K: K.ColorJitter(*hue), "ColorJitter, with hue"),
        alone(both("Grayscale", 3), lambda K: K.RandomGrayscale(p=1.0)),
        alone(both("RandomSolarize", 128, p=1), lambda K: K.RandomSolarize(0.0, 0.0, p=1.0)),
        alone(both("RandomPosterize", 4, p=1), lambda K: K.RandomPosterize((4.0, 4.0), p=1.0)),
        alone(both("RandomEqualize", 1), lambda K: K.RandomEqualize(p=1.0)),
        alone(both("RandomAutocontrast", 1), lambda K: K.RandomAutoContrast(p=1.0)),
        alone(both("RandomInvert", 1), lambda K: K.RandomInvert(p=1.0)),
        alone(both("RandomAdjustSharpness", 2, p=1), lambda K: K.RandomSharpness((2.0, 2.0), p=1.0)),
        alone(both("GaussianBlur", 23, blur), lambda K: K.RandomGaussianBlur((23, 23), blur, p=1.0)),
        alone(both("RandAugment", **smooth), lambda K: K.auto.RandAugment(n=2, m=9)),
        alone(both("TrivialAugmentWide", **smooth), lambda K: K.auto.TrivialAugment()),
        alone(both("AutoAugment", **smooth), lambda K: K.auto.AutoAugment("imagenet")),
        alone(both("RandomErasing", 1.0), lambda K: K.RandomErasing(p=1.0), no_pillow=True),
        normalized("Normalize"),
        normalized("Normalize, MixUp", T.MixUp(), v2.MixUp(num_classes=CLASSES), lambda K: K.RandomMixUpV2(p=1.0)),
        normalized("Normalize, CutMix", T.CutMix(), v2.CutMix(num_classes=CLASSES), cut_mix),
    ]


def recipe(name: str, pairs: Sequence[Both], kornia: Modules | str, behind: tuple[Any, ...] = (), **more: Any) -> Case:
    """Make the case of a recipe that starts from photographs, normalises, and then runs gpuload's `behind`."""
    ours, image = zip(*pairs, strict=True)
    options: dict[str, Any] = {"start": "photographs", "leading": 1, "floats": True, "section": "recipes", **more}
    return Case(name=name, ours=(*ours, T.Normalize(MEAN, STD), *behind), image=image, kornia=kornia, **options)


def recipes() -> list[Case]:
    """Return common training recipes, starting with the classic one and variants of it.

    In the timm recipe, gpuload uses timm's RandAugment; torchvision and Kornia use their own. Kornia accepts only one
    module that mixes images, so it applies MixUp to every batch, where the others apply MixUp or CutMix.
    """
    crop, flip = both("RandomResizedCrop", 224), both("RandomHorizontalFlip")
    colour, hue, simclr, blur = (0.4, 0.4, 0.4), (0.4, 0.4, 0.4, 0.1), (0.8, 0.8, 0.8, 0.2), (0.1, 2.0)

    def cropped(middle: Modules = lambda K: [], behind: Modules = lambda K: []) -> Modules:
        """Return Kornia's recipe that crops, flips and normalises."""
        crop_and_flip = lambda K: [K.RandomResizedCrop((224, 224)), K.RandomHorizontalFlip()]  # noqa: E731
        return lambda K: [*crop_and_flip(K), *middle(K), K.Normalize(MEAN, STD), *behind(K)]

    return [
        recipe(CLASSIC, [crop, flip], cropped()),
        *(
            recipe(
                f"classic + ColorJitter{words}",
                [crop, flip, both("ColorJitter", *strengths)],
                cropped(lambda K, strengths=strengths: [K.ColorJitter(*strengths)]),
            )
            for words, strengths in (("", colour), (" with hue", hue))
        ),
        recipe(
            "evaluation",
            [both("Resize", 256), both("CenterCrop", 224)],
            lambda K: [K.Resize(256, antialias=True), K.CenterCrop(224), K.Normalize(MEAN, STD)],
            leading=2,
        ),
        recipe(
            "timm",
            [crop, flip, (T.TimmRandAugment("rand-m9-mstd0.5-inc1"), v2.RandAugment())],
            cropped(
                lambda K: [K.auto.RandAugment(n=2, m=9)], lambda K: [K.RandomErasing(p=0.25), K.RandomMixUpV2(p=1.0)]
            ),
            (T.RandomErasing(0.25, mode="pixel"), T.RandomChoice([T.MixUp(alpha=0.8), T.CutMix()])),
            finished=(v2.RandomErasing(0.25, value="random"),),  # pyright: ignore[reportArgumentType]
            mixed=(v2.RandomChoice([v2.MixUp(alpha=0.8, num_classes=CLASSES), v2.CutMix(num_classes=CLASSES)]),),
        ),
        recipe(
            "SimCLR, one view",
            [
                crop,
                flip,
                both("RandomApply", [both("ColorJitter", *simclr)], p=0.8),
                both("RandomGrayscale", 0.2),
                both("RandomApply", [both("GaussianBlur", 23, blur)], p=0.5),
            ],
            cropped(
                lambda K: [
                    K.ColorJitter(*simclr, p=0.8),
                    K.RandomGrayscale(p=0.2),
                    K.RandomGaussianBlur((23, 23), blur, p=0.5),
                ]
            ),
        ),
        recipe(
            "detection (SSD, 300×300)",
            [
                both("RandomPhotometricDistort"),
                both("RandomZoomOut", fill=(123, 117, 104)),
                both("RandomIoUCrop"),
                flip,
                both("Resize", (300, 300)),
            ],
            "Kornia has no crop that depends on boxes",
            boxes=True,
        ),
    ]


def dense() -> list[Case]:
    """Return recipes that start from a uint8 batch N×3×256×256 as any loader yields it: `gpuload.Augment` next to the
    usual alternatives, each with the defaults of its library. Kornia's `Resize`, for example, does not antialias."""
    crop, flip, smooth = both("RandomResizedCrop", 224), both("RandomHorizontalFlip"), {"interpolation": "bilinear"}
    affine, hue = (15.0, (0.1, 0.1), (0.8, 1.2), 10.0), (0.4, 0.4, 0.4, 0.1)

    def cropped(policy: Modules) -> Modules:
        crop_and_flip = lambda K: [K.RandomResizedCrop((224, 224)), K.RandomHorizontalFlip()]  # noqa: E731
        return lambda K: [*crop_and_flip(K), policy(K), K.Normalize(MEAN, STD)]

    cases = [
        *recipes()[:3],
        recipe(
            "evaluation",
            [both("Resize", 232), both("CenterCrop", 224)],
            lambda K: [K.Resize(232), K.CenterCrop(224), K.Normalize(MEAN, STD)],
        ),
        recipe(
            "robot",
            [both("RandomAffine", *affine, **smooth), both("ColorJitter", *hue)],
            lambda K: [K.RandomAffine(*affine, p=1.0), K.ColorJitter(*hue), K.Normalize(MEAN, STD)],
        ),
        recipe(RAND_AUGMENT, [crop, flip, both("RandAugment")], cropped(lambda K: K.auto.RandAugment(n=2, m=9))),
        recipe(TRIVIAL_AUGMENT, [crop, flip, both("TrivialAugmentWide")], cropped(lambda K: K.auto.TrivialAugment())),
    ]
    return [replace(case, name=f"dense, {case.name}", start="squares", leading=0, section="dense") for case in cases]


def everyday() -> dict[str, tuple[Any, ...]]:
    """Return ten everyday recipes as gpuload's transforms: measured recipes, and recipes for CIFAR, timm's training
    script and segmentation. MixUp and CutMix, which torch runs on every backend, are not included."""
    measured = {case.name: case.ours for case in [*dense(), *recipes()]}
    flip, normalize = T.RandomHorizontalFlip(), T.Normalize(MEAN, STD)
    cifar = T.RandomCrop(32, padding=4), flip
    return {
        "crop, flip": measured[CLASSIC],
        "crop, flip, ColorJitter": measured[f"{CLASSIC} + ColorJitter with hue"],
        "evaluation": measured["evaluation"],
        "CIFAR": (*cifar, normalize),
        "CIFAR, RandAugment": (*cifar, T.RandAugment(), normalize, T.RandomErasing()),
        "timm": (
            T.RandomResizedCrop(224, interpolation="random"),
            flip,
            T.TimmRandAugment("rand-m9-mstd0.5-inc1"),
            normalize,
            T.RandomErasing(0.25, mode="pixel"),
        ),
        "SimCLR": measured["SimCLR, one view"],
        "robot": measured["dense, robot"],
        "segmentation": (T.RandomCrop(480, pad_if_needed=True), flip, normalize),
        "TrivialAugment": measured[f"dense, {TRIVIAL_AUGMENT}"],
    }


def headline() -> list[Case]:
    """Return the cases of the CUDA goals: the classic recipe in float16, from photographs of one size, in both
    layouts."""
    options: dict[str, Any] = {"start": "landscape", "leading": 0, "dtype": "float16", "section": "kernel"}
    return [
        replace(
            recipes()[0],
            name=f"500×375 → 224, float16, {'channels_last' if channels_last else 'NCHW'}",
            channels_last=channels_last,
            **options,
        )
        for channels_last in (False, True)
    ]
