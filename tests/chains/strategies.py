"""Random chains of transforms, in any order that a chain takes, and random images to try them on.

Arguments are drawn within sense: results stay small, since a backend may take a tenth of a second for an image. A chain
consists of transforms that work on levels, of what makes numbers of them, and of what finished images may go through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.transforms.base import DrawError

__all__ = ["FINISHED", "LEVELS", "Tried", "tried"]

MOST = 160  # pixels of a side

shares = st.floats(0, 1)
chances = st.sampled_from([0.0, 0.3, 0.5, 0.8, 1.0])
sides = st.integers(1, 64)
pairs = st.tuples(sides, sides)
filters = st.sampled_from(["nearest", "bilinear", "bicubic"])
any_filter = st.sampled_from(["nearest", "bilinear", "bicubic", "random"])
fills = st.one_of(st.just(0), st.integers(0, 255))
modes = st.sampled_from(["constant", "edge", "reflect", "symmetric"])
borders = st.integers(0, 20)
odd = st.integers(0, 5).map(lambda number: 2 * number + 1)
bins = st.integers(2, 31)


def spans(least: float, most: float) -> Any:
    """(low, high) within bounds, to two places: a bound with all its digits says nothing more."""
    number = st.integers(round(least * 100), round(most * 100)).map(lambda whole: whole / 100)
    return st.tuples(number, number).map(sorted).map(tuple)


def colour() -> Any:
    """ColorJitter with some of its four arguments."""
    factors = st.one_of(st.none(), spans(0, 2))
    return st.builds(T.ColorJitter, factors, factors, factors, st.one_of(st.none(), spans(-0.5, 0.5)))


def distortion() -> Any:
    return st.builds(T.RandomPhotometricDistort, spans(0, 2), spans(0, 2), spans(0, 2), spans(-0.5, 0.5), p=chances)


# Each name stands for arguments of its own; all transforms that images can go through are here.
LEVELS: dict[str, Any] = {
    "Resize": st.one_of(
        st.builds(T.Resize, pairs, any_filter),
        st.builds(T.Resize, sides, any_filter),
        st.builds(T.Resize, st.integers(1, 40), any_filter, st.integers(41, 64)),
    ),
    "CenterCrop": st.builds(T.CenterCrop, pairs),
    "RandomCrop": st.builds(
        T.RandomCrop,
        pairs,
        st.one_of(st.none(), borders, st.tuples(borders, borders, borders, borders)),
        st.just(True),
        fills,
        modes,
    ),
    "RandomResizedCrop": st.builds(T.RandomResizedCrop, pairs, spans(0.05, 1), spans(0.3, 3), any_filter),
    "Pad": st.builds(T.Pad, st.one_of(borders, st.tuples(*[st.integers(-8, 20)] * 4)), fill=fills, padding_mode=modes),
    "RandomHorizontalFlip": st.builds(T.RandomHorizontalFlip, chances),
    "RandomVerticalFlip": st.builds(T.RandomVerticalFlip, chances),
    "RandomRotate90": st.builds(T.RandomRotate90, chances),
    "RandomTranspose": st.builds(T.RandomTranspose, chances),
    "RandomZoomOut": st.builds(T.RandomZoomOut, fills, spans(1, 2), chances),
    "RandomIoUCrop": st.builds(T.RandomIoUCrop, st.just(0.3), st.just(1.0), trials=st.integers(1, 20)),
    "ScaleJitter": st.builds(T.ScaleJitter, pairs, spans(0.1, 2), any_filter),
    "RandomShortestSize": st.builds(
        T.RandomShortestSize, st.lists(sides, min_size=1, max_size=4), st.one_of(st.none(), sides), any_filter
    ),
    "RandomResize": st.builds(T.RandomResize, st.integers(1, 40), st.integers(41, 64), any_filter),
    "ResizeKeepRatio": st.builds(
        T.ResizeKeepRatio, pairs, shares, any_filter, chances, spans(0.5, 1.5), st.booleans(), chances, spans(0.5, 2)
    ),
    "CenterCropOrPad": st.builds(T.CenterCropOrPad, pairs, fills, modes),
    "RandomCropOrPad": st.builds(T.RandomCropOrPad, pairs, fills, modes),
    "TrimBorder": st.builds(T.TrimBorder, st.integers(0, 6)),
    "RandomRotation": st.builds(
        T.RandomRotation, spans(-180, 180), filters, st.booleans(), st.one_of(st.none(), pairs), fills
    ),
    "RandomAffine": st.builds(
        T.RandomAffine,
        spans(-180, 180),
        st.one_of(st.none(), st.tuples(shares, shares)),
        st.one_of(st.none(), spans(0.3, 2)),
        st.one_of(st.none(), spans(-40, 40)),
        filters,
        fills,
    ),
    "RandomPerspective": st.builds(T.RandomPerspective, shares, chances, filters, fills),
    "ColorJitter": colour(),
    "RandomPhotometricDistort": distortion(),
    "Grayscale": st.builds(T.Grayscale, st.sampled_from([1, 3])),
    "RandomGrayscale": st.builds(T.RandomGrayscale, chances),
    "RandomInvert": st.builds(T.RandomInvert, chances),
    "RandomSolarize": st.builds(T.RandomSolarize, st.integers(1, 255), chances),
    "RandomPosterize": st.builds(T.RandomPosterize, st.integers(0, 8), chances),
    "RandomEqualize": st.builds(T.RandomEqualize, chances),
    "RandomAutocontrast": st.builds(T.RandomAutocontrast, chances),
    "RandomChannelPermutation": st.just(T.RandomChannelPermutation()),
    "RandomAdjustSharpness": st.builds(T.RandomAdjustSharpness, st.integers(0, 30).map(lambda n: n / 10), chances),
    "GaussianBlur": st.builds(T.GaussianBlur, st.tuples(odd, odd), spans(0.1, 4)),
    "GaussianNoise": st.builds(T.GaussianNoise, spans(-0.2, 0.2).map(min), spans(0, 0.3).map(max)),
    "AutoAugment": st.builds(T.AutoAugment, st.sampled_from(["imagenet", "cifar10", "svhn"]), filters, fills),
    "RandAugment": st.builds(
        T.RandAugment, st.integers(0, 4), st.integers(0, 30), st.just(31), interpolation=filters, fill=fills
    ),
    "TrivialAugmentWide": st.builds(T.TrivialAugmentWide, bins, filters, fills),
    "AugMix": st.builds(
        T.AugMix,
        st.integers(1, 10),
        st.integers(1, 3),
        st.sampled_from([-1, 1, 2]),
        st.sampled_from([0.5, 1.0, 3.0]),
        st.booleans(),
        filters,
        fills,
    ),
    "TimmRandAugment": st.builds(
        T.TimmRandAugment,
        st.sampled_from(["rand-m9-mstd0.5-inc1", "rand-n3-m7-p1", "rand-n2-p1-mstdinf-t3aw", "rand-n2-m5-tweights"]),
        st.fixed_dictionaries(
            {"img_mean": fills},
            optional={"interpolation": st.one_of(st.just("random"), filters)},
        ),
    ),
    "TimmAutoAugment": st.builds(
        T.TimmAutoAugment,
        st.sampled_from(["original-mstd0.5", "v0r", "3a"]),
        st.fixed_dictionaries({"img_mean": fills}),
    ),
    "TimmAugMix": st.builds(
        T.TimmAugMix,
        st.sampled_from(["augmix", "augmix-m5-w4-d2", "augmix-m9-w1-mstd1-a0.5"]),
        st.fixed_dictionaries({"img_mean": fills}),
    ),
    "JPEG": st.builds(T.JPEG, st.integers(1, 100)),
    "ElasticTransform": st.builds(
        T.ElasticTransform,
        spans(0, 200),
        st.sampled_from([0, 1.0, (3.0, 5.0)]),
        st.sampled_from(["nearest", "bilinear"]),
        fills,
    ),
    "RandomErasing": st.builds(
        T.RandomErasing, chances, spans(0, 0.5), spans(0.3, 3), st.integers(0, 255), max_count=st.integers(1, 3)
    ),
    "Identity": st.just(T.Identity()),
}
OF_FEW: dict[str, Any] = {name: LEVELS[name] for name in LEVELS if name not in ("Grayscale", "RandomIoUCrop")}


def held(children: Any) -> Any:
    """Transforms that hold others."""
    lists = st.lists(children, min_size=1, max_size=3)
    return st.one_of(
        st.builds(T.RandomApply, lists, chances),
        st.builds(T.RandomChoice, lists),
        st.builds(T.RandomOrder, lists),
        st.builds(T.RandomChoice, lists.map(lambda found: [T.Compose(found), T.Identity()])),
    )


simple = st.sampled_from(sorted(OF_FEW)).flatmap(OF_FEW.__getitem__)
composite = held(st.one_of(simple, simple, held(simple)))
any_level = st.sampled_from([*LEVELS] * 2 + ["held"] * 12).flatmap(lambda name: LEVELS.get(name, composite))

erasing = st.one_of(
    st.builds(T.RandomErasing, chances, value=st.floats(-2, 2, width=16)),
    st.builds(T.RandomErasing, chances, value=st.just("random"), max_count=st.integers(1, 3)),
    st.builds(T.RandomErasing, chances, mode=st.just("rand"), max_count=st.integers(1, 3)),
)
mixing = st.one_of(
    st.builds(T.MixUp, alpha=st.sampled_from([0.2, 1.0])),
    st.builds(T.CutMix, alpha=st.sampled_from([0.2, 1.0])),
    st.just(T.RandomChoice([T.MixUp(), T.CutMix(), T.Identity()])),
)
late_flips = st.one_of(LEVELS["RandomHorizontalFlip"], LEVELS["RandomVerticalFlip"])
# What finished images can go through.
FINISHED: dict[str, Any] = {
    "RandomErasing": erasing,
    "flips": late_flips,
    "RandomApply": st.builds(T.RandomApply, st.lists(st.one_of(erasing, late_flips), min_size=1, max_size=2), chances),
}
any_finished = st.sampled_from(sorted(FINISHED)).flatmap(FINISHED.__getitem__)


@dataclass(frozen=True)
class Tried:
    """One example: a chain, what was drawn for each image, and the images, uint8 H×W×C."""

    transforms: list[Any]
    chain: T.Chain
    draws: T.Program
    regions_tlhw: np.ndarray
    images: list[np.ndarray]
    dtype: str | None

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Hypothesis would show all pixels."""
        printer.text(repr(self))

    def __repr__(self) -> str:
        shapes = [image.shape for image in self.images]
        return f"Tried({self.transforms}, images of {shapes}, dtype={self.dtype})"


def picture(shape: tuple[int, int, int], kind: str, rng: np.random.Generator) -> np.ndarray:
    """What images may be like: noise, slow changes as in photographs, few levels, one colour."""
    height, width, channels = shape
    if kind == "noise":
        return rng.integers(0, 256, shape, np.uint8)
    if kind == "few levels":
        low = int(rng.integers(0, 250))
        return rng.integers(low, low + 6, shape, np.uint8)
    if kind == "one colour":
        return np.broadcast_to(rng.integers(0, 256, channels, np.uint8), shape).copy()
    y, x = np.mgrid[0:height, 0:width][:, :, :, None] * rng.uniform(0.02, 0.3, (2, 1, 1, channels))
    waves = 128 + 127 * np.sin(x + y + rng.uniform(0, 6, channels))
    return np.clip(waves + rng.normal(0, 3, shape), 0, 255).astype(np.uint8)


def boxes_for(images: list[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
    """Some boxes within each image: left, top, right, bottom."""
    found = []
    for image in images:
        corners = np.sort(rng.uniform(0, 1, (int(rng.integers(0, 3)), 2, 2)), axis=1)
        found.append((corners * image.shape[1::-1]).reshape(-1, 4))
    return found


@st.composite
def tried(draw: Any, *, longest: int = 5, count: int = 3, most: int = MOST) -> Tried:
    """A chain of at most so many transforms that work on levels, and more; with at most so many images, no side of
    which is ever longer than `most`."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    given = st.tuples(*[st.integers(1, min(64, most))] * 2)
    kinds = st.sampled_from(["noise", "waves", "few levels", "one colour"])
    channels = draw(st.sampled_from([3, 3, 3, 1]))
    images = [
        picture((height, width, channels), kind, rng)
        for (height, width), kind in draw(st.lists(st.tuples(given, kinds), min_size=1, max_size=count))
    ]
    transforms = draw(st.lists(any_level, min_size=1, max_size=longest))
    end = draw(st.sampled_from(["levels", "floats", "normalized", "mixed"]))
    if end == "mixed":
        transforms.append(draw(st.one_of(LEVELS["CenterCrop"], st.builds(T.Resize, pairs, any_filter))))
    final = 1 if any(isinstance(transform, T.Grayscale) for transform in transforms) else channels
    final = next((t.num_output_channels for t in reversed(transforms) if isinstance(t, T.Grayscale)), final)
    if end != "levels":
        scaled = [T.ToDtype("float32", scale=True)] if end == "floats" or draw(st.booleans()) else []
        normal = [T.Normalize((0.4, 0.5, 0.3)[:final], (0.25, 0.2, 0.3)[:final])] if end != "floats" else []
        transforms += [*scaled, *normal, *draw(st.lists(any_finished, max_size=2))]
    if end == "mixed":
        transforms.append(draw(mixing))
    try:
        chain = T.Chain(transforms)
    except ValueError:
        assume(False)
        raise
    positions = np.arange(len(images)) + draw(st.integers(0, 2**40)) // 2 * 2
    key = epoch_key(draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 99)))
    sizes = np.array([image.shape[:2] for image in images], np.int64)
    boxes = boxes_for(images, rng) if chain.reads_boxes else None
    try:
        draws = chain.draw(key, positions, sizes, boxes)
    except DrawError:
        assume(False)
        raise
    assume(all(record.output_hw.max(initial=0) <= most for record in draws.records) and sizes.max() <= most)
    regions = chain.regions(key, positions, sizes, boxes)
    dtype = draw(st.sampled_from([None, None, "float16", "bfloat16"])) if end != "levels" else None
    return Tried(transforms, chain, draws, regions, images, dtype)
