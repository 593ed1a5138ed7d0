"""Mistakes of new users: one line of the error or warning says what to write instead."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from helpers.both_loaders import cpu_loader
from helpers.map_datasets import MapDataset
from PIL import Image
from recipes.user_datasets import (
    HALF,
    MOVE,
    Stream,
    bands,
    box,
    chw,
    detection,
    load,
    mask,
    picture,
    png16,
    scene,
    scenes_and_masks,
)

import gpuload as gl
from gpuload import transforms as T


def load_on_two_ranks(**options: Any) -> list:
    """Load with the environment that `torchrun --nproc-per-node=2` sets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "2")
        return load(MapDataset(int, 10), None, **options)


def nested_loops() -> None:
    with cpu_loader(MapDataset(int, 8), 4) as loader:
        for _ in loader:
            list(loader)


def zip_loader_with_itself() -> None:
    with cpu_loader(MapDataset(int, 8), 4) as loader:
        list(zip(loader, loader, strict=True))


class FloatsOnly(torch.nn.Module):
    """A module that refuses integers, like those of Kornia."""

    def forward(self, images):
        raise TypeError(f"Expected floats, got {images.dtype}")


class ReturnsNone(torch.nn.Module):
    def forward(self, images):
        images.mul(2)


@dataclass(frozen=True)
class WithoutApplyMasks(T.Custom):
    """A custom transform that does not handle masks."""

    def apply(self, images, params):
        return images


NORMALIZE = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
MISTAKES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "a plain mask": (lambda: load(lambda i: (scene(i), mask(i))), ("sample[1]", "gpuload.Mask(array)")),
    "a dict with a plain mask": (
        lambda: load(lambda i: {"image": scene(i), "mask": mask(i)}),
        ('sample["mask"]', "gpuload.Mask(array)"),
    ),
    "a Pillow mask": (
        lambda: load(lambda i: (picture(i), Image.fromarray(mask(i)).convert("P"))),
        ("mode 'P'", "gpuload.Mask(picture)"),
    ),
    "plain boxes": (
        lambda: load(lambda i: (scene(i), {"boxes": box(i)})),
        ('sample[1]["boxes"]', "gpuload.Boxes(array, format='xyxy')"),
    ),
    "plain boxes of varying number": (
        lambda: load(lambda i: (scene(i), {"boxes": np.ones((i + 1, 4))})),
        ("'1.boxes'", "gpuload.Boxes(array, format)"),
    ),
    "plain keypoints": (
        lambda: load(lambda i: (scene(i), {"keypoints": np.ones((5, 2))})),
        ('sample[1]["keypoints"]', "gpuload.Keypoints(array)"),
    ),
    "clips of two lengths": (
        lambda: load(lambda i: np.stack([scene(i)] * (i + 1))),
        ("cut clips to one length", "pass a collate_fn"),
    ),
    "a float array": (lambda: load(bands), ("float32 array 48×64×13", "gpuload.Image(array)")),
    "ToTensor in the dataset": (
        lambda: load(lambda i: chw(i) / 255),
        ("gpuload.Image(tensor, layout='CHW')", "remove ToTensor or other scaling from the dataset"),
    ),
    "channels first without a layout": (lambda: load(lambda i: gl.Image(chw(i))), ("write layout='CHW'",)),
    "thirteen channels of levels": (
        lambda: load(lambda i: scene(i, 13)),
        ("sample, uint8 array", "gpuload.Image(array)"),
    ),
    "three means for thirteen channels": (
        lambda: load(lambda i: gl.Image(bands(i)), [*MOVE, HALF]),
        ("Normalize has 3 means", "give a mean and a std for each channel"),
    ),
    "colours of thirteen channels": (
        lambda: load(lambda i: gl.Image(bands(i)), [T.ColorJitter(0.4)]),
        ("ColorJitter takes uint8 images", "remove it"),
    ),
    "uint16": (lambda: load(lambda i: scene(i).astype(np.uint16)), ("uint16 array", "gpuload.Image(array)")),
    "a 16-bit PNG": (lambda: load(png16), ("gpuload.Encoded(data, mode='unchanged')",)),
    "grey for a Normalize of three": (
        lambda: load(lambda i: Image.fromarray(mask(i)), [*MOVE, HALF]),
        ("3 means and stds", "1 channel", "another mode"),
    ),
    "a bare lambda": (lambda: load(scene, [*MOVE, lambda x: x]), ("transforms[2]", "T.Lambda(<lambda>)")),
    "a function as transforms": (lambda: load(scene, lambda x: x), ("write [T.Lambda(<lambda>)]",)),
    "a transform without a list": (lambda: load(scene, T.RandomCrop(8)), ("must be a list", "write [RandomCrop(")),
    "a function with masks": (
        lambda: load(scenes_and_masks, [*MOVE, T.Lambda(torch.fliplr)]),
        ("gets only the images", "gpuload's transforms"),
    ),
    "an own transform with masks": (
        lambda: load(scenes_and_masks, [*MOVE, WithoutApplyMasks()]),
        ("WithoutApplyMasks has no apply_masks", "moves_pixels = False"),
    ),
    "a policy with masks": (lambda: load(scenes_and_masks, [T.RandAugment()]), ("RandAugment", "remove RandAugment")),
    "a module of floats on levels": (
        lambda: load(scene, [*MOVE, FloatsOnly()]),
        ("FloatsOnly was called with uint8", "put ToDtype('float32', scale=True)"),
    ),
    "a module of floats on levels in mid-chain": (
        lambda: load(scene, [*MOVE, FloatsOnly(), HALF]),
        ("FloatsOnly (transform number 3", "put ToDtype('float32', scale=True)"),
    ),
    "a module that returns None": (
        lambda: load(scene, [*MOVE, ReturnsNone()]),
        ("ReturnsNone", "returned None", "must return a tensor"),
    ),
    "MixUp of levels": (
        lambda: load(scene, [*MOVE, T.MixUp()]),
        ("MixUp", "put ToDtype('float32', scale=True) or Normalize before it"),
    ),
    "captions": (
        lambda: load(lambda i: {"caption": np.ones(i + 1)}, None),
        ("collate_fn=gpuload.pad('caption') pads",),
    ),
    "tokens": (lambda: load(lambda i: {"tokens": [1] * (i + 1)}, None), ("collate_fn=gpuload.pad('tokens') pads",)),
    "padding a leaf that is deeper": (
        lambda: load(lambda i: (i, {"c": np.ones(i + 1)}), None, collate_fn=gl.pad("c")),
        ("pad() names", "'1.c'"),
    ),
    "dicts of different keys": (
        lambda: load(lambda i: {"a": i, **({"flag": 1} if i % 2 else {})}, None),
        ("'flag'", "return every sample with the same structure"),
    ),
    "a sampler and shuffle": (lambda: load(int, None, sampler=range(8), shuffle=True), ("leave one of them out",)),
    "shuffle='yes'": (
        lambda: load(int, None, shuffle="yes"),
        ("shuffle, unless it is 'block' or a gpuload.BlockShuffle, must be True or False",),
    ),
    "paths as a dataset": (lambda: load(["a.jpg", "b.jpg"] * 4), ("gpuload.read(path)", "gpuload.ImageFiles")),
    "a folder as a dataset": (
        lambda: load("data/train"),
        ("gpuload.ImageFolder('data/train')", "gpuload.ImageFiles('data/train')"),
    ),
    "a path in a sample": (
        lambda: load(lambda i: ("a.jpg", i)),
        ("sample[0] is the path 'a.jpg'", "gpuload.read(path)"),
    ),
    "an Image of a path": (lambda: load(lambda i: gl.Image("a.jpg")), ("return gpuload.read(path)",)),  # pyright: ignore
    "a Mask of a path": (lambda: load(lambda i: (scene(i), gl.Mask("a.png"))), ("Mask(gpuload.read(path))",)),
    "bytes of a file": (lambda: load(lambda i: (b"\xff\xd8", i)), ("return gpuload.Encoded(bytes)",)),
    "images of two sizes": (
        lambda: load(lambda i: gl.Image(scene(i)[i:]), None),
        ("Resize((height, width))", "ragged='list'"),
    ),
    "arrays of two sizes": (lambda: load(lambda i: scene(i)[i:], None), ("gpuload.Image(array)", "ragged='list'")),
    "two images": (
        lambda: load(lambda i: (scene(i), scene(i))),
        ("sample[0], uint8 array", "so may sample[1], uint8 array", "gpuload.Image(array)", "gpuload.Mask(…)"),
    ),
    "zip(loader, loader)": (zip_loader_with_itself, ("create a second Loader",)),
    "nested loops": (nested_loops, ("create a second Loader",)),
    "T.ToTensor": (lambda: T.ToTensor, ("write ToDtype('float32', scale=True)",)),  # pyright: ignore
    "gl.DataLoader": (lambda: gl.DataLoader, ("write gpuload.Loader",)),  # pyright: ignore
    "means of levels": (
        lambda: load(scene, [*MOVE, T.Normalize((123.7, 116.3, 103.5), (58.4, 57.1, 57.4))]),
        ("by 255", "ToDtype('float32')"),
    ),
    "ToDtype without scale": (
        lambda: load(scene, [*MOVE, T.ToDtype("float32"), NORMALIZE]),
        ("set scale=True, or remove the ToDtype",),
    ),
    "Mosaic of an odd batch": (lambda: load(detection, [T.Mosaic(64)], batch_size=3), ("use batch_size=4",)),
    "an evaluation on the first rank": (load_on_two_ranks, ("RANK=0", "rank=0, world_size=1", "evaluation")),
    "a stream not divided among workers": (
        lambda: load(Stream(False), None, workers=2),
        ("the same first", "get_worker_info()", "yield only the worker's share"),
    ),
    "a stream that is shuffled": (lambda: load(Stream(True), None, shuffle=True), ("iterable dataset", "leave it out")),
    "None for a sample": (lambda: load(lambda i: None), ("the dataset returned None", "return a sample")),
}


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("recipe", MISTAKES)
def test_mistake_has_one_line_of_message_that_names_the_remedy(recipe):
    write, words = MISTAKES[recipe]
    lines: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            write()
        except Exception as error:
            lines += [*str(error).splitlines(), *getattr(error, "__notes__", ())]
    lines += [str(warning.message) for warning in caught]
    assert any(all(word in line for word in words) for line in lines), f"no line has {words}:\n" + "\n".join(lines)
