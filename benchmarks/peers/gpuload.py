"""gpuload with worker processes: the recipe, arrays in memory or in a file, entire images, and workers alone.

This module does not import torch, since gpuload's workers, which import `Arrays` from here, do not either.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import gpuload as gl
from benchmarks.peers.protocol import MEAN, STD, Peer, Recipe, rates_of
from gpuload import transforms as T
from gpuload.order.place import Place
from gpuload.order.schedule import schedule_of

IN_MEMORY, IN_FILE = 1024, 8192  # distinct images; an epoch uses each many times


class Arrays:
    """A dataset of `length` samples in memory: 3×`size`×`size` uint8 and a label.

    The loader's only work is to move samples from its workers into a batch.
    """

    def __init__(self, length: int, size: int) -> None:
        self.length = length
        self.images = np.random.default_rng(0).integers(0, 256, (IN_MEMORY, 3, size, size), np.uint8)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.images[index % IN_MEMORY], index


class Rounds:
    """A sampler of `length` keys: random permutations of `count` keys, one after another."""

    def __init__(self, count: int, length: int) -> None:
        self.count, self.length = count, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng(0)
        for start in range(0, self.length, self.count):
            yield from rng.permutation(self.count)[: self.length - start].tolist()


def make_loader(recipe: Recipe, dataset: Any, **options: Any) -> gl.Loader:
    order = {} if "sampler" in options else {"shuffle": True}
    return gl.Loader(
        dataset,
        batch_size=recipe.batch_size,
        drop_last=True,
        num_workers=recipe.workers,
        **{"device": recipe.device, **order, **options},
    )


def peer_of(loader: gl.Loader, *, levels: bool = True, falls_back: tuple[str, ...] = ()) -> Peer:
    return Peer(lambda: loader, {"gpuload": gl.__version__}, levels, falls_back, lambda: str(loader.stats()))


def open_photos(root: str) -> Any:
    """Open a folder of photographs in class folders, or of packed shards."""
    is_packed = next(Path(root).glob("*.tar"), None) is not None
    return gl.TarShards(f"{root}/*.tar", fields=("jpg", "cls")) if is_packed else gl.ImageFolder(root)


def recipe_loader(recipe: Recipe) -> gl.Loader:
    """Build the loader of the recipe on its device. `variant` is ``BACKEND[/WHERE[/SHARE]]``: the backend, where images
    are decoded if not only by workers, and the device's share if both decode.

    Raises RuntimeError if another backend or decoder than the requested one would run.
    """
    backend, *places = recipe.variant.split("/")
    where: Any = places[0] if places else "cpu"
    share = float(places[1]) if len(places) > 1 else None
    jitter = [T.ColorJitter(recipe.jitter, recipe.jitter, recipe.jitter)] if recipe.jitter else []
    loader = make_loader(
        recipe,
        open_photos(recipe.root),
        transforms=[T.RandomResizedCrop(recipe.size), T.RandomHorizontalFlip(), *jitter, T.Normalize(MEAN, STD)],
        dtype=recipe.dtype,
        memory_format="channels_last" if recipe.channels_last else "contiguous_format",
        backend=backend,
        decode=gl.Decode(where=where, device_share=share),
        prefetch_factor=recipe.prefetch,
    )
    plan = loader.plan()
    if backend not in ("auto", plan.backend):
        raise RuntimeError(f"the backend {plan.backend!r} would run instead of {backend!r}: {plan.note}")
    if plan.decoder is not None and plan.decoder.startswith("workers"):
        raise RuntimeError(f"the device does not decode: {plan.decoder}")
    return loader


def gpuload(recipe: Recipe) -> Peer:
    loader = recipe_loader(recipe)
    plan = loader.plan()
    fallbacks = [type(step.transform).__name__ for step in plan.steps if step.backend != plan.backend]
    return peer_of(loader, levels=False, falls_back=tuple(fallbacks))


def gpuload_cuttable(recipe: Recipe) -> Peer:
    """Build the loader of the recipe over cuttable copies of the photographs."""
    return gpuload(replace(recipe, root=recipe.cuttable))


def arrays_gpuload(recipe: Recipe) -> Peer:
    return peer_of(make_loader(recipe, Arrays(recipe.samples, recipe.size)))


def arrays_torch(recipe: Recipe) -> Peer:
    """Build torch's DataLoader over the same arrays. It is in this module because `torch_loader` imports torchvision,
    which it does not need."""
    import torch.utils.data

    loader = torch.utils.data.DataLoader(
        Arrays(recipe.samples, recipe.size),  # pyright: ignore[reportArgumentType]  a map dataset without its base
        batch_size=recipe.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=recipe.workers,
        persistent_workers=True,
    )
    return Peer(lambda: loader, {}, levels=True)


def whole_gpuload(recipe: Recipe) -> Peer:
    """Build a loader whose batches are lists of uint8 tensors of the decoded sizes."""
    return peer_of(make_loader(recipe, gl.ImageFolder(recipe.root), ragged="list", device="cpu"))


def array_file(recipe: Recipe) -> Peer:
    """Build a loader over a file of decoded images in the page cache."""
    count = min(IN_FILE, recipe.samples)
    shape = (count, recipe.size, recipe.size, 3)
    path = Path(recipe.root).parent / f"array-{count}-{recipe.size}.npy"
    if not path.exists():
        unfinished = path.with_suffix(".unfinished.npy")
        images = np.lib.format.open_memmap(unfinished, "w+", np.uint8, shape)
        for start in range(0, count, 256):
            images[start : start + 256] = np.random.default_rng(start).integers(0, 256, shape[1:], np.uint8)
        images.flush()
        unfinished.rename(path)
    dataset = gl.ArrayFile(path, labels=np.arange(count))
    return peer_of(make_loader(recipe, dataset, sampler=Rounds(count, recipe.samples)))


def discard_batches(loader: gl.Loader, epoch: int) -> Iterator[int]:
    """Take the batches of an epoch from the workers of a loader that has begun, discard them, and yield the number of
    images in each: no stage, no tensors. This uses the Loader's private feed, which users should not do."""
    session: Any = loader._session
    session.feed.begin(schedule_of(loader._options.order, loader.num_workers).batches(Place(epoch, 0)))
    while (batch := session.feed.pop_batch()) is not None:
        yield len(batch.spec.positions)
        session.feed.release(batch)


def workers_only(recipe: Recipe) -> dict[str, Any]:
    """Measure the workers with a consumer that only takes and releases their slots.

    The difference to `decoder_alone` is reading headers, drawing crops, and moving pixels and messages.
    """
    transforms = [T.RandomResizedCrop(recipe.size)]
    with make_loader(recipe, gl.ImageFolder(recipe.root), transforms=transforms, device="cpu") as loader:
        iter(loader)
        epochs = itertools.count()

        def epoch() -> int:
            return sum(discard_batches(loader, next(epochs)))

        epoch()
        rates = rates_of(epoch, recipe.epochs - 1)
    return {**rates, "versions": {"gpuload": gl.__version__}}
