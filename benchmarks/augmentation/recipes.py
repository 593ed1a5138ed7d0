"""What is measured: whole recipes, from photographs, or from a batch of them, to a normalised batch.

The timm recipe has timm's own RandAugment in gpuload; torchvision's and Kornia's rows have theirs in its place. Kornia
takes one module that mixes images, so it has MixUp for all batches, where the others have MixUp or CutMix.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.augmentation.cases import CLASSES, MEAN, STD, Case
from benchmarks.peers.torchvision_import import v2
from gpuload import transforms as T

__all__ = ["CLASSIC", "dense", "headline", "recipes"]

CLASSIC = "classic"
WHOLE: dict[str, Any] = {"start": "photographs", "leading": 1, "floats": True, "section": "recipes"}


def recipes() -> list[Case]:
    """The four recipes that people train with, and what is added to or taken from the first."""
    normalize = T.Normalize(MEAN, STD)
    return [
        Case(
            name=CLASSIC,
            ours=(T.RandomResizedCrop(224), T.RandomHorizontalFlip(), normalize),
            image=(v2.RandomResizedCrop(224), v2.RandomHorizontalFlip()),
            kornia=lambda K: [K.RandomResizedCrop((224, 224)), K.RandomHorizontalFlip(), K.Normalize(MEAN, STD)],
            **WHOLE,
        ),
        _jittered("classic + ColorJitter", 0.4, 0.4, 0.4),
        _jittered("classic + ColorJitter with hue", 0.4, 0.4, 0.4, 0.1),
        Case(
            name="evaluation",
            ours=(T.Resize(256), T.CenterCrop(224), normalize),
            image=(v2.Resize(256), v2.CenterCrop(224)),
            kornia=lambda K: [K.Resize(256, antialias=True), K.CenterCrop(224), K.Normalize(MEAN, STD)],
            **{**WHOLE, "leading": 2},
        ),
        Case(
            name="timm",
            ours=(
                T.RandomResizedCrop(224),
                T.RandomHorizontalFlip(),
                T.TimmRandAugment("rand-m9-mstd0.5-inc1"),
                normalize,
                T.RandomErasing(0.25, mode="pixel"),
                T.RandomChoice([T.MixUp(alpha=0.8), T.CutMix()]),
            ),
            image=(v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), v2.RandAugment()),
            finished=(v2.RandomErasing(0.25, value="random"),),  # pyright: ignore[reportArgumentType]
            mixed=(v2.RandomChoice([v2.MixUp(alpha=0.8, num_classes=CLASSES), v2.CutMix(num_classes=CLASSES)]),),
            kornia=lambda K: [
                K.RandomResizedCrop((224, 224)),
                K.RandomHorizontalFlip(),
                K.auto.RandAugment(n=2, m=9),
                K.Normalize(MEAN, STD),
                K.RandomErasing(p=0.25),
                K.RandomMixUpV2(p=1.0),
            ],
            **WHOLE,
        ),
        Case(
            name="SimCLR, one view",
            ours=(
                T.RandomResizedCrop(224),
                T.RandomHorizontalFlip(),
                T.RandomApply([T.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8),
                T.RandomGrayscale(0.2),
                T.RandomApply([T.GaussianBlur(23, (0.1, 2.0))], p=0.5),
                normalize,
            ),
            image=(
                v2.RandomResizedCrop(224),
                v2.RandomHorizontalFlip(),
                v2.RandomApply([v2.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8),
                v2.RandomGrayscale(0.2),
                v2.RandomApply([v2.GaussianBlur(23, (0.1, 2.0))], p=0.5),
            ),
            kornia=lambda K: [
                K.RandomResizedCrop((224, 224)),
                K.RandomHorizontalFlip(),
                K.ColorJitter(0.8, 0.8, 0.8, 0.2, p=0.8),
                K.RandomGrayscale(p=0.2),
                K.RandomGaussianBlur((23, 23), (0.1, 2.0), p=0.5),
                K.Normalize(MEAN, STD),
            ],
            **WHOLE,
        ),
        Case(
            name="detection (SSD, 300×300)",
            ours=(
                T.RandomPhotometricDistort(),
                T.RandomZoomOut(fill=(123, 117, 104)),
                T.RandomIoUCrop(),
                T.RandomHorizontalFlip(),
                T.Resize((300, 300)),
                normalize,
            ),
            image=(
                v2.RandomPhotometricDistort(),
                v2.RandomZoomOut(fill=(123, 117, 104)),
                v2.RandomIoUCrop(),
                v2.RandomHorizontalFlip(),
                v2.Resize((300, 300)),
            ),
            kornia="it has no crop that depends on boxes",
            boxes=True,
            **WHOLE,
        ),
    ]


def dense() -> list[Case]:
    """The first two recipes from a batch of uint8 N×3×256×256, as any loader yields it: `gpuload.Augment` beside what
    people call there."""
    return [
        replace(case, name=f"dense, {case.name}", start="squares", leading=0, section="dense") for case in recipes()[:2]
    ]


def headline() -> list[Case]:
    """The classic recipe in half precision from photographs of one size, in both layouts: the goals for CUDA."""
    classic = recipes()[0]
    return [
        replace(
            classic,
            name=f"500×375 → 224, float16, {'channels_last' if channels_last else 'NCHW'}",
            start="landscape",
            leading=0,
            dtype="float16",
            channels_last=channels_last,
            section="kernel",
        )
        for channels_last in (False, True)
    ]


def _jittered(name: str, *strengths: float) -> Case:
    return Case(
        name=name,
        ours=(
            T.RandomResizedCrop(224),
            T.RandomHorizontalFlip(),
            T.ColorJitter(*strengths),
            T.Normalize(MEAN, STD),
        ),
        image=(v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), v2.ColorJitter(*strengths)),
        kornia=lambda K: [
            K.RandomResizedCrop((224, 224)),
            K.RandomHorizontalFlip(),
            K.ColorJitter(*strengths),
            K.Normalize(MEAN, STD),
        ],
        **WHOLE,
    )
