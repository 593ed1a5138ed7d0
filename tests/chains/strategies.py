"""Strategies for random chains of transforms, in any order that `Chain` accepts, with random images.

Images and results are small, because a backend can take a tenth of a second per image. A chain contains transforms that
work on levels, conversions to floats, and transforms of finished images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st
from transforms.specs import SPECS, any_filter, chances, pairs

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.transforms.base import DrawError

__all__ = ["FINISHED", "LEVELS", "Example", "chain_examples"]

MAX_SIDE = 160  # pixels of a side

# The transforms that work on levels, by name.
LEVELS: dict[str, Any] = {name: spec.chains for name, spec in SPECS.items() if spec.chains is not None}
CONTAINED_LEVELS: dict[str, Any] = {name: LEVELS[name] for name in LEVELS if name not in ("Grayscale", "RandomIoUCrop")}


def containers(children: Any) -> Any:
    lists = st.lists(children, min_size=1, max_size=3)
    return st.one_of(
        st.builds(T.RandomApply, lists, chances),
        st.builds(T.RandomChoice, lists),
        st.builds(T.RandomOrder, lists),
        st.builds(T.RandomChoice, lists.map(lambda transforms: [T.Compose(transforms), T.Identity()])),
    )


contained = st.sampled_from(sorted(CONTAINED_LEVELS)).flatmap(CONTAINED_LEVELS.__getitem__)
composite = containers(st.one_of(contained, contained, containers(contained)))
# "containers" is not a name in LEVELS, so it stands for a composite.
any_level = st.sampled_from([*LEVELS] * 2 + ["containers"] * 12).flatmap(lambda name: LEVELS.get(name, composite))

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
# The transforms of finished images, by name.
FINISHED: dict[str, Any] = {
    "RandomErasing": erasing,
    "flips": late_flips,
    "RandomApply": st.builds(T.RandomApply, st.lists(st.one_of(erasing, late_flips), min_size=1, max_size=2), chances),
}
any_finished = st.sampled_from(sorted(FINISHED)).flatmap(FINISHED.__getitem__)


@dataclass(frozen=True)
class Example:
    """A chain, the draws for each image, and the images, uint8 H×W×C."""

    transforms: list[Any]
    chain: T.Chain
    draws: T.Program
    regions_tlhw: np.ndarray
    images: list[np.ndarray]
    dtype: str | None

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # By default, Hypothesis shows all pixels.
        printer.text(repr(self))

    def __repr__(self) -> str:
        shapes = [image.shape for image in self.images]
        return f"Example({self.transforms}, images of {shapes}, dtype={self.dtype})"


def random_image(shape: tuple[int, int, int], kind: str, rng: np.random.Generator) -> np.ndarray:
    """Make an image of noise, of smooth waves as in a photograph, of a few levels, or of one color."""
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


def random_boxes(images: list[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
    """Return random boxes within each image: left, top, right, bottom."""
    boxes = []
    for image in images:
        corners = np.sort(rng.uniform(0, 1, (int(rng.integers(0, 3)), 2, 2)), axis=1)
        boxes.append((corners * image.shape[1::-1]).reshape(-1, 4))
    return boxes


@st.composite
def chain_examples(draw: Any, *, max_length: int = 5, max_images: int = 3, max_side: int = MAX_SIDE) -> Example:
    """Draw a chain of up to `max_length` transforms of levels, then of floats, and up to `count` images; no side of an
    image or a result is longer than `max_side`."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    image_sizes = st.tuples(*[st.integers(1, min(64, max_side))] * 2)
    kinds = st.sampled_from(["noise", "waves", "few levels", "one colour"])
    channels = draw(st.sampled_from([3, 3, 3, 1]))
    images = [
        random_image((height, width, channels), kind, rng)
        for (height, width), kind in draw(st.lists(st.tuples(image_sizes, kinds), min_size=1, max_size=max_images))
    ]
    transforms = draw(st.lists(any_level, min_size=1, max_size=max_length))
    end = draw(st.sampled_from(["levels", "floats", "normalized", "mixed"]))
    if end == "mixed":
        transforms.append(draw(st.one_of(LEVELS["CenterCrop"], st.builds(T.Resize, pairs, any_filter))))
    result_channels = next(
        (t.num_output_channels for t in reversed(transforms) if isinstance(t, T.Grayscale)), channels
    )
    if end != "levels":
        conversion = [T.ToDtype("float32", scale=True)] if end == "floats" or draw(st.booleans()) else []
        mean, std = (0.4, 0.5, 0.3)[:result_channels], (0.25, 0.2, 0.3)[:result_channels]
        normalize = [T.Normalize(mean, std)] if end != "floats" else []
        transforms += [*conversion, *normalize, *draw(st.lists(any_finished, max_size=2))]
    if end == "mixed":
        transforms.append(draw(mixing))
    try:
        chain = T.Chain(transforms)
    except ValueError:
        assume(False)
        raise
    positions = np.arange(len(images)) + draw(st.integers(0, 2**40)) // 2 * 2  # from an even one, so that rows 0, 1 mix
    key = epoch_key(draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 99)))
    sizes = np.array([image.shape[:2] for image in images], np.int64)
    boxes = random_boxes(images, rng) if chain.reads_boxes else None
    try:
        draws = chain.draw(key, positions, sizes, boxes)
    except DrawError:
        assume(False)
        raise
    assume(all(record.output_hw.max(initial=0) <= max_side for record in draws.records) and sizes.max() <= max_side)
    regions = chain.regions(key, positions, sizes, boxes)
    dtype = draw(st.sampled_from([None, None, "float16", "bfloat16"])) if end != "levels" else None
    return Example(transforms, chain, draws, regions, images, dtype)
