"""What is measured: each transform alone, and whole recipes, as gpuload, torchvision v2 and Kornia have them.

Where a transform alone has a probability, it is 1, so that every image is changed. Those that bring images to one size
start from whole photographs, all others from crops of 224×224. A recipe goes from photographs, or from a batch of them,
to a normalised batch.
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

Start = Literal["photographs", "landscape", "crops", "squares"]
"""Whole photographs, upright and lying; all of them 375×500; or crops of 224×224, or of 256×256."""
Both = tuple[Any, Any]
"""gpuload's transform, and torchvision's."""
Modules = Callable[[Any], Any]
"""Given `kornia.augmentation`, returns a module, or a list of them."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Something to measure.

    Attributes:
        name: what the tables call it.
        ours: gpuload's transforms, all of them.
        image: torchvision's, on an image (Pillow's or a tensor) that is not yet floats.
        finished: torchvision's on an image that is.
        mixed: torchvision's on a batch and its labels.
        leading: how many of `image` are called for each photograph, since only then all are of one size.
        no_pillow: torchvision's do not take Pillow's images.
        kornia: Kornia's modules; or why there is nothing like it.
        start: what it starts from.
        floats: the result is a normalised float batch; else levels.
        boxes: crops depend on boxes next to each image.
        dtype, channels_last: of a float batch.
        section: the table that it is in. In ``"dense"`` gpuload is given a batch N×C×H×W, by `gpuload.Augment`.
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
    """Make a transform of this name in both libraries; lists are of such pairs."""

    def make(library: Any, which: int, more: dict[str, Any]) -> Any:
        given = [[pair[which] for pair in one] if isinstance(one, list) else one for one in arguments]
        return getattr(library, name)(*given, **options | more)

    more = {"interpolation": v2.InterpolationMode.BILINEAR} if "interpolation" in options else {}
    return make(T, 0, {}), make(v2, 1, more)


def alone(pair: Both, kornia: Modules, name: str = "", **more: Any) -> Case:
    """Make the case of a transform by itself."""
    ours, theirs = pair
    return Case(name=name or type(ours).__name__, ours=(ours,), image=(theirs,), kornia=lambda K: [kornia(K)], **more)


def normalized(name: str, ours: Any = None, theirs: Any = None, kornia: Modules | None = None) -> Case:
    """Make the case of normalising a batch, and of mixing it after that."""
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
    whole: dict[str, Any] = {"start": "photographs", "leading": 1}
    cut_mix = lambda K: K.RandomCutMixV2(p=1.0, use_correct_lambda=True)  # noqa: E731
    return [
        alone(both("RandomResizedCrop", 224), lambda K: K.RandomResizedCrop(crop), **whole),
        alone(both("Resize", crop), lambda K: K.Resize(crop, antialias=True), **whole),
        alone(both("CenterCrop", 224), lambda K: K.CenterCrop(224), **whole),
        alone(both("RandomCrop", 224), lambda K: K.RandomCrop(crop), **whole),
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
    """Make the case of a recipe that starts from photographs, normalises, and goes on with gpuload's `behind`."""
    ours, image = zip(*pairs, strict=True)
    options: dict[str, Any] = {"start": "photographs", "leading": 1, "floats": True, "section": "recipes", **more}
    return Case(name=name, ours=(*ours, T.Normalize(MEAN, STD), *behind), image=image, kornia=kornia, **options)


def recipes() -> list[Case]:
    """Return the recipes that people train with, and what is added to or taken from the first.

    The timm recipe has timm's own RandAugment in gpuload; torchvision's and Kornia's rows have theirs instead. Kornia
    takes one module that mixes images, so it has MixUp for all batches, where the others have MixUp or CutMix.
    """
    crop, flip = both("RandomResizedCrop", 224), both("RandomHorizontalFlip")
    colour, hue, simclr, blur = (0.4, 0.4, 0.4), (0.4, 0.4, 0.4, 0.1), (0.8, 0.8, 0.8, 0.2), (0.1, 2.0)

    def cropped(middle: Modules = lambda K: [], behind: Modules = lambda K: []) -> Modules:
        """Kornia's recipe that crops, flips and normalises."""
        lead = lambda K: [K.RandomResizedCrop((224, 224)), K.RandomHorizontalFlip()]  # noqa: E731
        return lambda K: [*lead(K), *middle(K), K.Normalize(MEAN, STD), *behind(K)]

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
            "it has no crop that depends on boxes",
            boxes=True,
        ),
    ]


def dense() -> list[Case]:
    """Return the first two recipes from a batch of uint8 N×3×256×256, as any loader yields it: `gpuload.Augment` next
    to what people call there."""
    return [
        replace(case, name=f"dense, {case.name}", start="squares", leading=0, section="dense") for case in recipes()[:2]
    ]


def headline() -> list[Case]:
    """Return the classic recipe in half precision from photographs of one size, in both layouts: the goals for CUDA."""
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
