"""What is measured: each transform alone, as gpuload, torchvision v2 and Kornia have it.

Where a transform has a probability, it is 1 here, so that every image is changed. Those that bring images to one size
start from whole photographs, all others from crops of 224×224.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.peers.torchvision_import import v2
from gpuload import transforms as T

__all__ = ["MEAN", "STD", "Case", "Start", "transforms"]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLASSES = 1000
BILINEAR = v2.InterpolationMode.BILINEAR

Start = Literal["photographs", "landscape", "crops", "squares"]
"""Whole photographs, upright and lying; all of them 375×500; or crops of 224×224, or of 256×256."""


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
        kornia: given `kornia.augmentation`, its modules; or why there is nothing like it.
        start: what it starts from.
        floats: the result is a normalised float batch; else levels.
        boxes: crops depend on boxes beside each image.
        dtype, channels_last: of a float batch.
        section: the table that it stands in.
    """

    name: str
    ours: tuple[Any, ...]
    image: tuple[Any, ...] = ()
    finished: tuple[Any, ...] = ()
    mixed: tuple[Any, ...] = ()
    leading: int = 0
    no_pillow: bool = False
    kornia: Callable[[Any], list[Any]] | str
    start: Start = "crops"
    floats: bool = False
    boxes: bool = False
    dtype: str = "float32"
    channels_last: bool = False
    section: Literal["transforms", "recipes", "dense", "kernel"] = "transforms"

    @property
    def is_dense(self) -> bool:
        """Whether gpuload is given a batch N×C×H×W, as any loader yields it, by `gpuload.Augment`."""
        return self.section == "dense"

    @property
    def per_sample(self) -> bool:
        """Whether torchvision has it for a sample."""
        return not self.mixed


def transforms() -> list[Case]:
    """A case for each transform."""
    return [*_geometry(), *_colours(), *_policies(), *_finished()]


def _geometry() -> list[Case]:
    whole: dict[str, Any] = {"start": "photographs", "leading": 1}
    return [
        Case(
            name="RandomResizedCrop",
            ours=(T.RandomResizedCrop(224),),
            image=(v2.RandomResizedCrop(224),),
            kornia=lambda K: [K.RandomResizedCrop((224, 224))],
            **whole,
        ),
        Case(
            name="Resize",
            ours=(T.Resize((224, 224)),),
            image=(v2.Resize((224, 224)),),
            kornia=lambda K: [K.Resize((224, 224), antialias=True)],
            **whole,
        ),
        Case(
            name="CenterCrop",
            ours=(T.CenterCrop(224),),
            image=(v2.CenterCrop(224),),
            kornia=lambda K: [K.CenterCrop(224)],
            **whole,
        ),
        Case(
            name="RandomCrop",
            ours=(T.RandomCrop(224),),
            image=(v2.RandomCrop(224),),
            kornia=lambda K: [K.RandomCrop((224, 224))],
            **whole,
        ),
        Case(name="Pad", ours=(T.Pad(16),), image=(v2.Pad(16),), kornia=lambda K: [K.PadTo((256, 256))]),
        Case(
            name="RandomHorizontalFlip",
            ours=(T.RandomHorizontalFlip(1),),
            image=(v2.RandomHorizontalFlip(1),),
            kornia=lambda K: [K.RandomHorizontalFlip(p=1.0)],
        ),
        Case(
            name="RandomVerticalFlip",
            ours=(T.RandomVerticalFlip(1),),
            image=(v2.RandomVerticalFlip(1),),
            kornia=lambda K: [K.RandomVerticalFlip(p=1.0)],
        ),
        Case(
            name="RandomRotation",
            ours=(T.RandomRotation(30, "bilinear"),),
            image=(v2.RandomRotation([-30, 30], BILINEAR),),
            kornia=lambda K: [K.RandomRotation(30.0, p=1.0)],
        ),
        Case(
            name="RandomAffine",
            ours=(T.RandomAffine(15, (0.1, 0.1), (0.8, 1.2), 10, "bilinear"),),
            image=(v2.RandomAffine([-15, 15], (0.1, 0.1), (0.8, 1.2), 10, BILINEAR),),
            kornia=lambda K: [K.RandomAffine(15.0, (0.1, 0.1), (0.8, 1.2), 10.0, p=1.0)],
        ),
        Case(
            name="RandomPerspective",
            ours=(T.RandomPerspective(p=1),),
            image=(v2.RandomPerspective(p=1),),
            kornia=lambda K: [K.RandomPerspective(0.5, p=1.0)],
        ),
    ]


def _colours() -> list[Case]:
    return [
        Case(
            name="ColorJitter",
            ours=(T.ColorJitter(0.4, 0.4, 0.4),),
            image=(v2.ColorJitter(0.4, 0.4, 0.4),),
            kornia=lambda K: [K.ColorJitter(0.4, 0.4, 0.4)],
        ),
        Case(
            name="ColorJitter, with hue",
            ours=(T.ColorJitter(0.4, 0.4, 0.4, 0.1),),
            image=(v2.ColorJitter(0.4, 0.4, 0.4, 0.1),),
            kornia=lambda K: [K.ColorJitter(0.4, 0.4, 0.4, 0.1)],
        ),
        Case(
            name="Grayscale",
            ours=(T.Grayscale(3),),
            image=(v2.Grayscale(3),),
            kornia=lambda K: [K.RandomGrayscale(p=1.0)],
        ),
        Case(
            name="RandomSolarize",
            ours=(T.RandomSolarize(128, p=1),),
            image=(v2.RandomSolarize(128, p=1),),
            kornia=lambda K: [K.RandomSolarize(0.0, 0.0, p=1.0)],
        ),
        Case(
            name="RandomPosterize",
            ours=(T.RandomPosterize(4, p=1),),
            image=(v2.RandomPosterize(4, p=1),),
            kornia=lambda K: [K.RandomPosterize((4.0, 4.0), p=1.0)],
        ),
        Case(
            name="RandomEqualize",
            ours=(T.RandomEqualize(1),),
            image=(v2.RandomEqualize(1),),
            kornia=lambda K: [K.RandomEqualize(p=1.0)],
        ),
        Case(
            name="RandomAutocontrast",
            ours=(T.RandomAutocontrast(1),),
            image=(v2.RandomAutocontrast(1),),
            kornia=lambda K: [K.RandomAutoContrast(p=1.0)],
        ),
        Case(
            name="RandomInvert",
            ours=(T.RandomInvert(1),),
            image=(v2.RandomInvert(1),),
            kornia=lambda K: [K.RandomInvert(p=1.0)],
        ),
        Case(
            name="RandomAdjustSharpness",
            ours=(T.RandomAdjustSharpness(2, p=1),),
            image=(v2.RandomAdjustSharpness(2, p=1),),
            kornia=lambda K: [K.RandomSharpness((2.0, 2.0), p=1.0)],
        ),
        Case(
            name="GaussianBlur",
            ours=(T.GaussianBlur(23, (0.1, 2.0)),),
            image=(v2.GaussianBlur(23, (0.1, 2.0)),),
            kornia=lambda K: [K.RandomGaussianBlur((23, 23), (0.1, 2.0), p=1.0)],
        ),
    ]


def _policies() -> list[Case]:
    return [
        Case(
            name="RandAugment",
            ours=(T.RandAugment(interpolation="bilinear"),),
            image=(v2.RandAugment(interpolation=BILINEAR),),
            kornia=lambda K: [K.auto.RandAugment(n=2, m=9)],
        ),
        Case(
            name="TrivialAugmentWide",
            ours=(T.TrivialAugmentWide(interpolation="bilinear"),),
            image=(v2.TrivialAugmentWide(interpolation=BILINEAR),),
            kornia=lambda K: [K.auto.TrivialAugment()],
        ),
        Case(
            name="AutoAugment",
            ours=(T.AutoAugment(interpolation="bilinear"),),
            image=(v2.AutoAugment(interpolation=BILINEAR),),
            kornia=lambda K: [K.auto.AutoAugment("imagenet")],
        ),
    ]


def _finished() -> list[Case]:
    return [
        Case(
            name="RandomErasing",
            ours=(T.RandomErasing(1.0),),
            image=(v2.RandomErasing(1.0),),
            no_pillow=True,
            kornia=lambda K: [K.RandomErasing(p=1.0)],
        ),
        Case(
            name="Normalize",
            ours=(T.Normalize(MEAN, STD),),
            kornia=lambda K: [K.Normalize(MEAN, STD)],
            floats=True,
        ),
        Case(
            name="Normalize, MixUp",
            ours=(T.Normalize(MEAN, STD), T.MixUp()),
            mixed=(v2.MixUp(num_classes=CLASSES),),
            kornia=lambda K: [K.Normalize(MEAN, STD), K.RandomMixUpV2(p=1.0)],
            floats=True,
        ),
        Case(
            name="Normalize, CutMix",
            ours=(T.Normalize(MEAN, STD), T.CutMix()),
            mixed=(v2.CutMix(num_classes=CLASSES),),
            kornia=lambda K: [K.Normalize(MEAN, STD), K.RandomCutMixV2(p=1.0, use_correct_lambda=True)],
            floats=True,
        ),
    ]
