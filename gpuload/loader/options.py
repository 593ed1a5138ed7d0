"""A `Loader`'s options, checked: what is wrong is said when the loader is made, not in epoch 3.

Runs in the main process. `Options` is what a session is built from.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpuload.datasets.kinds import is_iterable
from gpuload.decode import Decode
from gpuload.loader.cpus import default_workers, usable_cpus
from gpuload.order.options import check_pairs
from gpuload.transforms import Chain
from gpuload.workers.faults import Faults, OnError
from gpuload.workers.process import check_platform

__all__ = ["Options", "check_device", "check_integer", "check_options"]

DEFAULT_PREFETCH = 2
RAGGED = ("error", "list", "pad")
# Chunks of 32 cost 2% less CPU than chunks of 16, and 8% less than chunks of 8 (2 workers); a first batch comes sooner
# when each worker has a part of it.
LEAST_CHUNK, MOST_CHUNK = 8, 32
MAX_CHUNK = 4096  # a request has to fit the socket


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a session is built from.

    Attributes:
        samples: the dataset's length; None where it has none.
        iterable: the dataset is a stream.
        sampled: a sampler of the user's says which keys are in a batch.
        single: samples come one by one (``batch_size=None``).
    """

    dataset: Any
    samples: int | None
    iterable: bool
    sampled: bool
    single: bool
    chain: Chain
    batch_size: int
    num_workers: int
    cpu_threads: int
    prefetch_factor: int
    device: Any
    dtype: str | None
    memory_format: str
    ragged: str
    seed: int
    decode: Decode
    timeout_s: float
    faults: Faults
    backend: str
    chunk_size: int
    plain_chunk_size: int
    ring_bytes: int
    collate_fn: Callable[[Any], Any] | None
    worker_init_fn: Callable[[int], Any] | None
    pin_memory: bool


def check_options(
    *,
    dataset: Any,
    batch_size: int | None,
    sampler: Any,
    batch_sampler: Any,
    transforms: Sequence[Any],
    num_workers: int | None,
    prefetch_factor: int | None,
    device: Any,
    dtype: Any,
    memory_format: Any,
    ragged: str,
    seed: int | None,
    generator: Any,
    decode: Decode | None,
    timeout: float,
    on_error: OnError | None,
    faults: Faults | None,
    backend: str,
    chunk_size: int | None,
    ring_bytes: int,
    collate_fn: Any,
    worker_init_fn: Any,
    pin_memory: Any,
    multiprocessing_context: Any,
) -> Options:
    """Check what a `Loader` was given, and fill in what it was not.

    Raises:
        TypeError, ValueError: an argument is wrong; the message says what was expected.
        RuntimeError: worker processes cannot be started on this platform.
    """
    iterable = is_iterable(dataset)
    sampled = sampler is not None or batch_sampler is not None
    if iterable and hasattr(dataset, "__next__") and not isinstance(dataset, torch.utils.data.IterableDataset):
        raise TypeError(
            f"the dataset is a {type(dataset).__name__}, which can be iterated over once only; pass an object whose "
            "__iter__ begins anew (an IterableDataset), or a list"
        )
    if not iterable:
        for name in ("__getitem__", "__len__")[: 1 if sampled else 2]:
            if not hasattr(dataset, name):
                raise TypeError(
                    f"the dataset must have {name} (a map-style dataset) or __iter__ (an iterable one), got "
                    f"{type(dataset).__name__}" + (f": {dataset!r}" if isinstance(dataset, str | int | None) else "")
                )
    single = batch_size is None and batch_sampler is None
    size = 1 if batch_size is None else check_integer("batch_size", batch_size, 1)
    seed = _seed(seed, generator)
    cpus = usable_cpus()
    if num_workers is None:
        local_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        num_workers = default_workers(cpus, local_ranks) if sys.platform == "linux" and not iterable else 0
    num_workers = check_integer("num_workers", num_workers, 0)
    _check_context(multiprocessing_context)
    chain = transforms if isinstance(transforms, Chain) else Chain(transforms)
    check_pairs(chain, batch_size, batch_sampler)
    if collate_fn is None and callable(own := getattr(dataset, "_get_collate_fn", None)):
        collate_fn = own()
    for name, value in (("collate_fn", collate_fn), ("worker_init_fn", worker_init_fn)):
        if value is not None and not callable(value):
            raise TypeError(f"{name} must be callable or None, got {type(value).__name__}: {value!r}")
    if ragged not in RAGGED:
        raise ValueError(f"ragged must be one of {', '.join(map(repr, RAGGED))}, got {ragged!r}")
    if (collate_fn is not None or single) and ragged != "error":
        raise ValueError(
            f"ragged={ragged!r} has no meaning with {'batch_size=None' if single else 'a collate_fn'}, which gets each "
            "image with its own size; leave it out (gpuload.pad_collate pads)"
        )
    if num_workers:
        check_platform()
    if not isinstance(timeout, int | float) or not 0 <= timeout < float("inf"):
        raise ValueError(f"timeout must be seconds, 0 for none, got {timeout!r}")
    if decode is not None and not isinstance(decode, Decode):
        raise TypeError(f"decode must be a gpuload.Decode, got {type(decode).__name__}: {decode!r}")
    return Options(
        dataset=dataset,
        samples=_length(dataset, iterable),
        iterable=iterable,
        sampled=sampled,
        single=single,
        chain=chain,
        batch_size=size,
        num_workers=num_workers,
        cpu_threads=max(1, cpus - num_workers),
        prefetch_factor=DEFAULT_PREFETCH
        if prefetch_factor is None
        else check_integer("prefetch_factor", prefetch_factor, 1),
        device=None if device is None else check_device(device),
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        memory_format=str(memory_format).removeprefix("torch."),
        ragged=ragged,
        seed=seed,
        decode=decode or Decode(),
        timeout_s=float(timeout),
        faults=_faults(on_error, faults, iterable),
        backend=backend,
        plain_chunk_size=1 if chunk_size is not None else min(size, MAX_CHUNK),
        chunk_size=_chunk_size(chunk_size, size, num_workers, iterable or (collate_fn is not None and not len(chain))),
        ring_bytes=check_integer("ring_bytes", ring_bytes, 1),
        collate_fn=collate_fn,
        worker_init_fn=worker_init_fn,
        pin_memory=bool(pin_memory),
    )


def check_device(device: Any) -> torch.device:
    """A CPU or a CUDA device, be there one or not. A number is that of a CUDA device; a CPU loses its own, as torch
    ignores it.

    Raises:
        TypeError, ValueError: it is neither.
    """
    text = f"device must be 'cpu', 'cuda', 'cuda:0' or a torch.device of these kinds, got {device!r}"
    if isinstance(device, bool) or not isinstance(device, str | int | torch.device):
        raise TypeError(text)
    try:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, ValueError):  # torch's lists all kinds that it knows
        raise ValueError(text) from None
    if found.type not in ("cpu", "cuda"):
        raise ValueError(text)
    return torch.device("cpu") if found.type == "cpu" else found


def check_integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """An integer within bounds.

    Raises:
        TypeError, ValueError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an integer of at least {least}, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")
    return int(value)


def _seed(seed: int | None, generator: Any) -> int:
    if generator is None:
        return 0 if seed is None else check_integer("seed", seed, 0, 2**64 - 1)
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")
    if seed is not None:
        raise ValueError(f"seed={seed} and generator are both given; the generator only gives its initial seed")
    return generator.initial_seed() % 2**64


def _length(dataset: Any, iterable: bool) -> int | None:
    if iterable:
        return None
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _faults(on_error: OnError | None, faults: Faults | None, iterable: bool) -> Faults:
    if faults is not None and not isinstance(faults, Faults):
        raise TypeError(f"faults must be a gpuload.Faults, got {type(faults).__name__}: {faults!r}")
    if faults is not None and on_error is not None:
        raise ValueError(
            f"on_error={on_error!r} and faults={faults!r} are both given; write faults=Faults(on_error={on_error!r}, …)"
        )
    faults = faults or Faults(on_error="raise" if on_error is None else on_error)
    if iterable and faults.on_error == "replace":
        raise ValueError(
            "on_error='replace' has no meaning for an iterable dataset: there is no other sample to ask for; use 'skip'"
        )
    return faults


def _chunk_size(chunk_size: int | None, batch_size: int, workers: int, whole: bool) -> int:
    """`whole`: a batch is one worker's affair."""
    if chunk_size is None:
        share = batch_size if whole else min(max(-(-batch_size // max(1, workers)), LEAST_CHUNK), MOST_CHUNK)
        chunk_size = min(share, MAX_CHUNK)
    return min(check_integer("chunk_size", chunk_size, 1, MAX_CHUNK), batch_size)


def _check_context(context: Any) -> None:
    """gpuload's workers are fresh interpreters, as a "spawn" context's are; a "fork" they can never be."""
    name = context if context is None or isinstance(context, str) else getattr(context, "_name", None)
    if name not in (None, "spawn", "forkserver"):
        raise ValueError(
            f"multiprocessing_context={context!r} cannot be had: gpuload's workers are fresh interpreters, never "
            "forks, and get the dataset by pickle (of lambdas and notebook classes too); leave it out, or pass 'spawn'"
        )
