"""Self-supervision: SimCLR's two views of an image, and DINO's two global and eight local crops."""

from __future__ import annotations

import torch
from helpers import peers
from helpers.both_loaders import alike, gpuload_batches
from recipes.comparison import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    cached_batch,
    check_replay,
    check_runners,
    gpuload_batch,
    resized_within,
    shape_of,
    side,
    torch_batch,
)

import gpuload as gl
from gpuload import transforms as T

vision = peers.torchvision()
v1, v2 = vision.transforms, vision.transforms.v2
BICUBIC = v2.InterpolationMode.BICUBIC


class Views:
    """A transform that returns several views of an image, as in scripts for self-supervised training."""

    def __init__(self, *views) -> None:
        self.views = views

    def __call__(self, image):
        return [view(image) for view in self.views]


def simclr(library, size: int, end: list) -> list:
    """Return one view of SimCLR (Chen et al. 2020, appendix A) with torchvision's or gpuload's transforms.

    Color distortion has strength 1; the kernel of the blur is a tenth of the side.
    """
    return [
        library.RandomResizedCrop(size),
        library.RandomHorizontalFlip(),
        library.RandomApply([library.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8),
        library.RandomGrayscale(p=0.2),
        library.RandomApply([library.GaussianBlur(size // 20 * 2 + 1, sigma=(0.1, 2.0))], p=0.5),
        *end,
    ]


def dino(library, size: int, scale: tuple[float, float], blur: float, solarize: float, end: list) -> list:
    """Return one view of DINO (Caron et al. 2021) with the transforms of torchvision's v2 or of gpuload."""
    return [
        library.RandomResizedCrop(size, scale=scale, interpolation=BICUBIC),
        library.RandomHorizontalFlip(p=0.5),
        library.RandomApply([library.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8),
        library.RandomGrayscale(p=0.2),
        library.RandomApply([library.GaussianBlur(9, sigma=(0.1, 2.0))], p=blur),
        *([library.RandomSolarize(128, p=solarize)] if solarize else []),
        *end,
    ]


GLOBAL, LOCAL = (112, (0.4, 1.0)), (48, (0.05, 0.4))
END = [
    v2.ToImage(),
    v2.ToDtype(torch.float32, scale=True),
    v2.Normalize(IMAGENET_MEAN, IMAGENET_STD),
    v2.ToPureTensor(),
]
GPULOAD_END = [T.ToDtype("float32", scale=True), T.Normalize(IMAGENET_MEAN, IMAGENET_STD)]


def dino_views(library, end: list, backend: str = "torch") -> list[list]:
    """Return DINO's ten views, or four if kernels are interpreted. The first is always blurred, the second rarely."""
    wide, local = ((side(backend, size), scale) for size, scale in (GLOBAL, LOCAL))
    return [
        dino(library, *wide, 1.0, 0, end),
        dino(library, *wide, 0.1, 0.2, end),
        *[dino(library, *local, 0.5, 0, end)] * (2 if backend == "fused" else 8),
    ]


DINO = Views(*map(v2.Compose, dino_views(v2, END)))
GPULOAD_DINO = [T.MultiView(dino_views(T, [])), *GPULOAD_END]


def test_simclr_views_equal_torchvisions_for_the_same_draws(pictures, backend):
    end = [v1.ToTensor(), v1.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    original = v1.Compose(simclr(v1, side(backend, 112), end))
    one_view = simclr(T, side(backend, 112), GPULOAD_END)
    assert T.from_torchvision(original) == one_view
    chain = [T.MultiView([one_view] * 2)]
    batch = cached_batch(pictures, chain, backend)
    assert shape_of(batch) == shape_of(torch_batch(pictures, Views(original, original), len(pictures)))
    assert not torch.equal(batch[0][0], batch[0][1])
    for view in (0, 1):
        # The mean for contrast may be rounded to another level, which a factor up to 1.8 enlarges; hues have 8 bits.
        check_replay(chain, pictures, max_mean=1, max_level=13, view=view, after=1, backend=backend)
        if backend == "torch":
            check_runners(chain, pictures, after=1, view=view)
        max_level = 18 + 2 * resized_within(backend)
        check_replay(chain, pictures, max_mean=1.5, max_level=max_level, view=view, backend=backend)


def test_dino_views_equal_torchvisions_for_the_same_draws(pictures, backend):
    chain = [T.MultiView(dino_views(T, [], backend)), *GPULOAD_END]
    for view in (0, 1, 2, len(chain[0].chains) - 1):
        assert [*chain[0].chains[view], *GPULOAD_END] == T.from_torchvision(
            v2.Compose(dino_views(v2, END, backend)[view])
        )
        check_replay(chain, pictures, max_mean=0.6, max_level=8, view=view, after=1, backend=backend)
        if backend == "torch":
            check_runners(chain, pictures, after=1, view=view)


def test_dino_batch_has_the_shapes_of_torchvisions_and_distinct_views(images):
    batch = gpuload_batch(images, GPULOAD_DINO, len(images))
    assert shape_of(batch) == shape_of(torch_batch(images, DINO, len(images)))
    assert [view.shape[-1] for view in batch[0]] == [112] * 2 + [48] * 8
    for first in range(10):
        for second in range(first):
            assert not torch.equal(batch[0][first], batch[0][second]), (first, second)


def test_dino_batches_of_files_are_the_same_with_and_without_workers(jpeg_folder):
    options = {"batch_size": 16, "shuffle": True, "transforms": GPULOAD_DINO, "drop_last": True}
    batches = gpuload_batches(gl.ImageFolder(jpeg_folder), num_workers=2, **options)
    assert alike(batches, gpuload_batches(gl.ImageFolder(jpeg_folder), **options))
    assert len(batches) == 3
    for views, _ in batches:
        assert [tuple(view.shape) for view in views] == [(16, 3, 112, 112)] * 2 + [(16, 3, 48, 48)] * 8
