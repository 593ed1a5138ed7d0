"""Batches of photographs from gpuload and from torchvision, and checks that they are equal."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from helpers.both_loaders import cpu_loader
from parity.compare import all_cases
from PIL import Image
from recipes.replay import replay_records
from torch.utils.data import DataLoader

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages, compile_stage

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SEED = 7


class Pictures:
    """A dataset of (image, class), with a transform like torchvision's datasets."""

    def __init__(self, images: Sequence[Image.Image], transform: Callable[[Any], Any] | None = None) -> None:
        self.images, self.transform = list(images), transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = self.images[index]
        return (image if self.transform is None else self.transform(image)), index % 5


def first_batch(dataset: Any, batch_size: int, transforms: list[Any], **options: Any) -> Any:
    """Return the first batch of a loader's first epoch."""
    with cpu_loader(dataset, batch_size, transforms=transforms, seed=SEED, **options) as loader:
        loader.set_epoch(0)
        return next(iter(loader))


def gpuload_batch(images: Sequence[Image.Image], transforms: list[Any], batch_size: int, **options: Any) -> Any:
    return first_batch(Pictures(images), batch_size, transforms, **options)


_last_batch: list[Any] = []


def cached_batch(images: Sequence[Image.Image], transforms: list[Any], backend: str) -> Any:
    """Return the batch of all images. The last batch is cached, since tests look at its views one by one."""
    key = transforms, backend, list(map(id, images))
    if not _last_batch or _last_batch[0] != key:
        _last_batch[:] = key, images, gpuload_batch(images, transforms, len(images), backend=backend)
    return _last_batch[2]


def torch_batch(images: Sequence[Image.Image], transform: Any, batch_size: int, **options: Any) -> Any:
    """Return the first batch of torch's DataLoader. The random numbers are fixed, since other libraries fail with some:
    timm's posterize at the greatest magnitude asks for 0 bits, which Pillow 13 refuses."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    return next(iter(DataLoader(Pictures(images, transform), batch_size, **options)))


def draws_of(
    transforms: Any, images: Sequence[Image.Image], *, view: int = 0, boxes: Any = None
) -> tuple[T.Chain, T.Program]:
    """Return the chain and its draws for the first batch of `gpuload_batch`."""
    chain = T.Chain(transforms)
    sizes = np.array([(image.height, image.width) for image in images], np.int64)
    return chain, chain.draw(epoch_key(SEED, 0), np.arange(len(images)), sizes, boxes, view=view)


def levels_apart(first: torch.Tensor, second: torch.Tensor, std: Sequence[float] = IMAGENET_STD) -> torch.Tensor:
    """Return the differences of normalized images, in levels."""
    scale = torch.tensor(std, dtype=torch.float64)[:, None, None] * 255
    return (first.double() - second.double()).abs() * scale


def side(backend: str, length: int) -> int:
    """Return a length of a recipe, or a quarter of it if kernels are interpreted."""
    return length // 4 if backend == "fused" else length


def images_after(
    transforms: list[Any], images: Sequence[Image.Image], count: int, view: int = 0, backend: str = "torch"
) -> list[Image.Image]:
    """Return the images after the first `count` transforms."""
    if not count:
        return list(images)
    chain, draws = draws_of(transforms, images, view=view)
    leading_draws = draws.part(0, draws.place_of(count))
    leading_chain = T.Chain(chain.lines[view].transforms[:count])
    stage = compile_stage(leading_chain, device="cpu", backend=backend, ragged="list")
    results = stage(RaggedImages.from_arrays([np.asarray(image) for image in images]), leading_draws)
    return [Image.fromarray(levels.permute(1, 2, 0).numpy()) for levels in results]


def draws_after(draws: T.Program, after: int) -> T.Program:
    """Return the draws without those of the first `after` transforms, as draws of a chain without these."""
    remaining = draws.part(draws.place_of(after), len(draws.records))
    late_from = None if draws.late_from is None else max(draws.late_from - after, 0)
    records = tuple(replace(record, step=record.step - after) for record in remaining.records)
    return replace(remaining, records=records, late_from=late_from)


def check_runners(transforms: list[Any], images: Sequence[Image.Image], *, after: int = 0, view: int = 0) -> None:
    """Check that the runner for batches, which CUDA devices use, is bitwise equal to the runner for single images.

    Both begin with the images after the first `after` transforms, since resampled images may differ by a level.
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
    """Check that gpuload's images are those that torchvision's functions make with the same draws.

    Args:
        transforms: the recipe.
        images: the images to which it is applied.
        max_mean, max_level: limits of the mean difference of an image, and of the difference of a pixel, in levels.
        std: the standard deviations with which the recipe normalizes.
        view: the number of a `MultiView`'s view.
        after: torchvision's functions begin with the results of gpuload's first `after` transforms. Otherwise, an
            operation with steps, such as solarize, may turn a difference of one level after resampling into 255.
        backend: the backend that runs the recipe.
    """
    start_images = images_after(transforms, images, after, view or 0, backend)
    batch, _labels = cached_batch(images, transforms, backend)
    batch = batch if view is None else batch[view]
    _, draws = draws_of(transforms, images, view=view or 0)
    means, maxima = [], []
    for row, image in enumerate(start_images):
        [expected] = replay_records(draws_after(draws, after).records, row, image)
        assert batch[row].shape == expected.shape
        differences = levels_apart(batch[row], expected, std)
        means.append(float(differences.mean()))
        maxima.append(float(differences.max()))
    assert max(means) <= max_mean, f"mean {max(means):.3f} levels, greatest {max(maxima):.1f}"
    assert max(maxima) <= max_level, f"greatest {max(maxima):.1f} levels, mean {max(means):.3f}"


def resized_within(backend: str, interpolation: str = "bilinear") -> float:
    """Return how many levels a resized image may differ from Pillow's: the limit of the parity table, plus rounding."""
    name = "RandomResizedCrop" if interpolation == "bilinear" else f"RandomResizedCrop({interpolation})"
    return next(case for case in all_cases() if case.name == name).tolerance(backend).max + 1e-3


def shape_of(value: Any) -> Any:
    """Return the nesting, shapes and dtypes of a batch."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return {key: shape_of(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [shape_of(inner) for inner in value]
    return type(value)
