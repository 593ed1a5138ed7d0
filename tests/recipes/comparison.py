"""What the tests of recipes share: datasets of photographs, batches of both loaders, and how they are held together."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from parity.compare import all_cases
from PIL import Image
from recipes.replay import replay_records
from torch.utils.data import DataLoader

import gpuload as gl
from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages, compile_stage

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SEED = 7


class Pictures:
    """A map dataset of (Pillow image, class); with a transform, as torchvision's datasets have one."""

    def __init__(self, images: Sequence[Image.Image], transform: Callable[[Any], Any] | None = None) -> None:
        self.images, self.transform = list(images), transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = self.images[index]
        return (image if self.transform is None else self.transform(image)), index % 5


def gpuload_batch(images: Sequence[Image.Image], transforms: list[Any], batch_size: int, **options: Any) -> Any:
    """The first batch of a real loader, in order."""
    options = {"num_workers": 0, "device": "cpu", "seed": SEED, **options}
    with gl.Loader(Pictures(images), batch_size, transforms=transforms, **options) as loader:
        loader.set_epoch(0)
        return next(iter(loader))


_last_batch: list[Any] = []


def cached_batch(images: Sequence[Image.Image], transforms: list[Any], backend: str) -> Any:
    """The batch of all images, as `ours` makes it; the last one is kept, as tests look at the views of one in turn."""
    if not (
        _last_batch
        and _last_batch[:2] == [transforms, backend]
        and list(map(id, _last_batch[2])) == list(map(id, images))
    ):
        _last_batch[:] = (
            transforms,
            backend,
            list(images),
            gpuload_batch(images, transforms, len(images), backend=backend),
        )
    return _last_batch[3]


def torch_batch(images: Sequence[Image.Image], transform: Any, batch_size: int, **options: Any) -> Any:
    """The first batch of torch's; the same in each run, since with some draws the others raise: Pillow 13 refuses to
    keep no bits, which timm's posterize asks for at the greatest magnitude."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    return next(iter(DataLoader(Pictures(images, transform), batch_size, **options)))


def draws_of(
    transforms: Any, images: Sequence[Image.Image], *, view: int = 0, boxes: Any = None
) -> tuple[T.Chain, T.Program]:
    """What the loader of `ours` draws for the first batch."""
    chain = T.Chain(transforms)
    sizes = np.array([(image.height, image.width) for image in images], np.int64)
    return chain, chain.draw(epoch_key(SEED, 0), np.arange(len(images)), sizes, boxes, view=view)


def levels_apart(first: torch.Tensor, second: torch.Tensor, std: Sequence[float] = IMAGENET_STD) -> torch.Tensor:
    """Differences of normalised images, in levels."""
    scale = torch.tensor(std, dtype=torch.float64)[:, None, None] * 255
    return (first.double() - second.double()).abs() * scale


def side(backend: str, length: int) -> int:
    """A length of a recipe, or a quarter of it where kernels are interpreted."""
    return length // 4 if backend == "fused" else length


def images_after(
    transforms: list[Any], images: Sequence[Image.Image], count: int, view: int = 0, backend: str = "torch"
) -> list[Image.Image]:
    """The images after the first so many transforms, on a backend."""
    if not count:
        return list(images)
    chain, draws = draws_of(transforms, images, view=view)
    leading = draws.part(0, draws.place_of(count))
    before = T.Chain(chain.lines[view].transforms[:count])
    stage = compile_stage(before, device="cpu", backend=backend, ragged="list")
    results = stage(RaggedImages.from_arrays([np.asarray(image) for image in images]), leading)
    return [Image.fromarray(levels.permute(1, 2, 0).numpy()) for levels in results]


def draws_after(draws: T.Program, after: int) -> T.Program:
    """What was drawn by all but the first so many transforms, counted from there."""
    remaining = draws.part(draws.place_of(after), len(draws.records))
    late_from = None if draws.late_from is None else max(draws.late_from - after, 0)
    records = tuple(replace(record, step=record.step - after) for record in remaining.records)
    return replace(remaining, records=records, late_from=late_from)


def check_runners(transforms: list[Any], images: Sequence[Image.Image], *, after: int = 0, view: int = 0) -> None:
    """The runner of batches, which CUDA devices have, makes the same as that of single images, to the last bit.

    Both begin with the images after the first so many transforms: resamplings may differ by a level.
    """
    full_chain, draws = draws_of(transforms, images, view=view)
    arrays = [np.asarray(image) for image in images_after(transforms, images, after, view)]
    remaining, chain = draws_after(draws, after), T.Chain(full_chain.lines[view].transforms[after:])
    batch = compile_stage(chain, device="cpu")(RaggedImages.from_arrays(arrays), remaining)
    assert isinstance(batch, torch.Tensor)
    batched = compile_stage(chain, device="cpu", runner="batched")(RaggedImages.from_arrays(arrays), remaining)
    assert torch.equal(batch, batched)


def check_replay(
    transforms: list[Any],
    images: Sequence[Image.Image],
    *,
    max_mean: float,
    max_level: float,
    std: Sequence[float] = IMAGENET_STD,
    view: int | None = None,
    after: int = 0,
    backend: str = "torch",
) -> None:
    """Our loader's images are what torchvision's functions make of the same draws.

    Args:
        transforms: the recipe.
        images: what it is tried on.
        mean, most: no image may be further off on average, and no number of any, in levels.
        std: by which results are brought back to levels.
        view: which of a `MultiView`'s.
        after: torchvision's functions begin with what our first so many transforms give. An operation with steps, such
            as solarize, may make 255 levels of the one by which two resamplings differ.
        backend: what runs the recipe, and what it begins with.
    """
    start = images_after(transforms, images, after, view or 0, backend)
    batch = cached_batch(images, transforms, backend)[0]
    batch = batch if view is None else batch[view]
    _, draws = draws_of(transforms, images, view=view or 0)
    means, maxima = [], []
    for row, image in enumerate(start):
        [expected] = replay_records(draws_after(draws, after).records, row, image)
        assert batch[row].shape == expected.shape
        differences = levels_apart(batch[row], expected, std)
        means.append(float(differences.mean()))
        maxima.append(float(differences.max()))
    assert max(means) <= max_mean, f"mean {max(means):.3f} levels, greatest {max(maxima):.1f}"
    assert max(maxima) <= max_level, f"greatest {max(maxima):.1f} levels, mean {max(means):.3f}"


def resized_within(backend: str, interpolation: str = "bilinear") -> float:
    """How far an image that was resized, and no more, may lie from Pillow's, in levels: as in the table of parity; and
    what float32 adds."""
    name = {"bilinear": "RandomResizedCrop", "nearest": "RandomResizedCrop(nearest)"}
    sought = name.get(interpolation, "RandomResizedCrop(bicubic)")
    return next(case for case in all_cases() if case.name == sought).tolerance(backend).max + 1e-3


def shape_of(value: Any) -> Any:
    """Nesting, shapes and dtypes of a batch."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return {key: shape_of(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [shape_of(inner) for inner in value]
    return type(value)
