"""Self-supervision: SimCLR's two views of an image, and DINO's two global and eight local crops."""

from __future__ import annotations

import torch
from helpers import peers
from recipes.common import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    check_replay,
    check_runners,
    made,
    ours,
    resized_within,
    shape_of,
    side,
    theirs,
)

import gpuload as gl
from gpuload import transforms as T

vision = peers.torchvision()
v1, v2 = vision.transforms, vision.transforms.v2
BICUBIC = v2.InterpolationMode.BICUBIC


class Views:
    """Several views of an image, as self-supervised training scripts make them within a dataset."""

    def __init__(self, *views) -> None:
        self.views = views

    def __call__(self, image):
        return [view(image) for view in self.views]


# SimCLR, Chen et al. 2020, appendix A: the distortion of colours has strength 1; the kernel is a tenth of the side.


def simclr(library, size: int, end: list) -> list:
    """One view, from torchvision or from gpuload, whose names and arguments are the same."""
    return [
        library.RandomResizedCrop(size),
        library.RandomHorizontalFlip(),
        library.RandomApply([library.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8),
        library.RandomGrayscale(p=0.2),
        library.RandomApply([library.GaussianBlur(size // 20 * 2 + 1, sigma=(0.1, 2.0))], p=0.5),
        *end,
    ]


# DINO, Caron et al. 2021: blur always in the first view, rarely in the second, which is solarized sometimes.


def dino(library, size: int, scale: tuple[float, float], blur: float, solarize: float, end: list) -> list:
    """One view, from torchvision's v2 or from gpuload, whose names and arguments are the same."""
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
OUR_END = [T.ToDtype("float32", scale=True), T.Normalize(IMAGENET_MEAN, IMAGENET_STD)]


def dinos(library, end: list, backend: str = "torch") -> list[list]:
    """All ten views; where kernels are interpreted, four."""
    wide, local = ((side(backend, size), scale) for size, scale in (GLOBAL, LOCAL))
    return [
        dino(library, *wide, 1.0, 0, end),
        dino(library, *wide, 0.1, 0.2, end),
        *[dino(library, *local, 0.5, 0, end)] * (2 if backend == "fused" else 8),
    ]


DINO = Views(*map(v2.Compose, dinos(v2, END)))
OUR_DINO = [T.MultiView(dinos(T, [])), *OUR_END]


def test_simclr(pictures, backend):
    end = [v1.ToTensor(), v1.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    original = v1.Compose(simclr(v1, side(backend, 112), end))
    own = simclr(T, side(backend, 112), OUR_END)
    assert T.from_torchvision(original) == own
    chain = [T.MultiView([own] * 2)]
    found = made(pictures, chain, backend)
    assert shape_of(found) == shape_of(theirs(pictures, Views(original, original), len(pictures)))
    assert not torch.equal(found[0][0], found[0][1])
    for view in (0, 1):
        # The mean that contrast refers to may be rounded to another level, which a factor up to 1.8 makes more of; hues
        # are kept in 8 bits.
        check_replay(chain, pictures, mean=1, most=13, view=view, after=1, backend=backend)
        if backend == "torch":
            check_runners(chain, pictures, after=1, view=view)
        most = 18 + 2 * resized_within(backend)
        check_replay(chain, pictures, mean=1.5, most=most, view=view, backend=backend)


def test_dino(pictures, backend):
    chain = [T.MultiView(dinos(T, [], backend)), *OUR_END]
    for view in (0, 1, 2, len(chain[0].chains) - 1):
        assert [*chain[0].chains[view], *OUR_END] == T.from_torchvision(v2.Compose(dinos(v2, END, backend)[view]))
        check_replay(chain, pictures, mean=0.6, most=8 if view != 1 else 255, view=view, after=1, backend=backend)
        if backend == "torch":
            check_runners(chain, pictures, after=1, view=view)


def test_dinos_batches(images):
    found = ours(images, OUR_DINO, len(images))
    assert shape_of(found) == shape_of(theirs(images, DINO, len(images)))
    assert [view.shape[-1] for view in found[0]] == [112] * 2 + [48] * 8
    for one in range(2, 10):
        assert all(not torch.equal(found[0][one], found[0][other]) for other in range(one))


def test_dino_through_a_loader_of_files(jpeg_folder):
    """Files, decoded once for ten views by two workers; the same draws without workers."""
    dataset = gl.ImageFolder(jpeg_folder)
    epochs = []
    for workers in (2, 0):
        with gl.Loader(
            dataset, 16, shuffle=True, transforms=OUR_DINO, num_workers=workers, device="cpu", drop_last=True
        ) as loader:
            epochs.append(list(loader))
    assert len(epochs[0]) == 3
    for one, other in zip(*epochs, strict=True):
        assert [tuple(view.shape) for view in one[0]] == [(16, 3, 112, 112)] * 2 + [(16, 3, 48, 48)] * 8
        assert all(torch.equal(left, right) for left, right in zip(one[0], other[0], strict=True))
        assert torch.equal(one[1], other[1])
