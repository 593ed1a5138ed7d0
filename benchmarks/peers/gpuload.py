"""gpuload, with its own worker processes and the stage on the recipe's device; `variant` is the backend, and after a
slash where images are decoded, if that is not by workers alone, and the device's share, if both decode."""

from __future__ import annotations

from typing import Any

import gpuload as gl
from benchmarks.peers.protocol import MEAN, STD, Peer, Recipe, main
from gpuload import transforms as T


def build(recipe: Recipe) -> Peer:
    """Raises RuntimeError where another backend or decoder would run in the place of the one that was asked for."""
    backend, *places = recipe.variant.split("/")
    where: Any = places[0] if places else "cpu"
    share = float(places[1]) if len(places) > 1 else None
    jitter = [T.ColorJitter(recipe.jitter, recipe.jitter, recipe.jitter)] if recipe.jitter else []
    loader = gl.Loader(
        gl.ImageFolder(recipe.root),
        batch_size=recipe.batch_size,
        shuffle=True,
        drop_last=True,
        transforms=[T.RandomResizedCrop(recipe.size), T.RandomHorizontalFlip(), *jitter, T.Normalize(MEAN, STD)],
        num_workers=recipe.workers,
        device=recipe.device,
        dtype=recipe.dtype,
        memory_format="channels_last" if recipe.channels_last else "contiguous_format",
        backend=backend,
        decode=gl.Decode(where=where, device_share=share),
    )
    plan = loader.plan()
    if backend not in ("auto", plan.backend):
        raise RuntimeError(f"the backend {plan.backend!r} would run in the place of {backend!r}: {plan.note}")
    if plan.decoder is not None and plan.decoder.startswith("workers"):
        raise RuntimeError(f"the device does not decode: {plan.decoder}")
    away = [type(step.transform).__name__ for step in plan.steps if step.backend != plan.backend]
    return Peer(lambda: loader, {"gpuload": gl.__version__}, tuple(away), lambda: str(loader.stats()))


if __name__ == "__main__":
    main(build)
