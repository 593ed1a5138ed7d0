"""What a `Loader` tells the log, a line each: how a session works, and where it goes on. Runs in the main process.

The loggers are children of ``gpuload``: ``gpuload.loader`` here, ``gpuload.workers`` (restarts) and ``gpuload.ring``
(growth). gpuload sets no level and no handler, but one that does nothing: without it Python would print warnings of a
program that has not asked for a log. Lines are put together only where somebody listens.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from gpuload.datasets.resident import find_resident
from gpuload.decode import Decoder
from gpuload.decode.jpeg import NvImageCodec
from gpuload.stage import Plan

if TYPE_CHECKING:
    from gpuload.loader.options import Options
    from gpuload.loader.state import State
    from gpuload.workers.device_cache import CachedSamples

__all__ = ["begun", "cache_filled", "changed", "keeping", "kept_so_far", "resuming"]

logging.getLogger("gpuload").addHandler(logging.NullHandler())
logger = logging.getLogger("gpuload.loader")


def begun(options: Options, plan: Plan, placed: str) -> None:
    """Say that a session has begun: its workers, and where they are placed, its decoders of JPEGs, its plan."""
    if not logger.isEnabledFor(logging.INFO):
        return
    workers = options.workers
    logger.info(
        "session begun: %s, batches of %d on %s, prefetch_factor=%d, ring_bytes=%d",
        _workers(options),
        options.order.size,
        plan.device,
        workers.prefetch,
        workers.ring_bytes,
    )
    if workers.workers is None:  # else they are decoded elsewhere
        logger.info("JPEGs: %s", plan.decoder or _decoders(options))
    logger.info("plan: %s", _steps(plan))
    if placed:
        logger.info("placement: %s", placed)


def keeping(samples: int, pixels: int, others: int, device: object) -> None:
    """Say that a `DeviceCached` is about to be read."""
    logger.info("keeping %d samples: about %.1f MB on %s, %.1f MB besides", samples, pixels / 1e6, device, others / 1e6)


def kept_so_far(done: int, samples: int) -> None:
    """Say how much of a `DeviceCached` was read."""
    logger.info("keeping samples: %d of %d were read", done, samples)


def cache_filled(samples: CachedSamples, device: object, seconds: float) -> None:
    """Say that all of a `DeviceCached` was read."""
    memory, failed = samples.memory.nbytes / 1e6, len(samples.errors)
    first = f"; {failed} failed, the first with {next(iter(samples.errors.values())).describe()}" if failed else ""
    logger.info("kept %d samples, %.1f MB on %s, in %.1f s%s", samples.count - failed, memory, device, seconds, first)


def changed(what: str) -> None:
    """Say that the user changed an attribute of the dataset."""
    logger.info("%s: workers apply it from the next epoch on", what)


def resuming(state: State) -> None:
    """Say that a state was loaded."""
    logger.info(
        "resuming in epoch %d at position %d%s",
        state.place.epoch,
        state.place.position,
        "" if state.samples is None else f" of {state.samples}",
    )


def _workers(options: Options) -> str:
    workers = options.workers
    if workers.workers is not None:
        return repr(workers.workers)
    if find_resident(options.order.dataset) is not None:
        return "all samples are kept, no workers"
    if not workers.count:
        return "no worker processes (num_workers=0)"
    return f"{workers.count} worker{'s' * (workers.count > 1)}"


def _decoders(options: Options) -> str:
    """Say which decoders there are, as the workers find them: of the same installation."""
    decoders, missing = Decoder(options.workers.decode).jpeg_decoders
    usable = [decoder.name for decoder in decoders]
    if not missing:
        return f"crops by {usable[0]}, whole images by {usable[-1]}, what they refuse by Pillow"
    text = f"{', then '.join([*usable, 'Pillow'])}; {'; '.join(missing)}"
    if NvImageCodec.name in usable:
        return text
    return (
        f"{text}. With nvImageCodec only the region of a crop is decoded: pip install 'gpuload[cu13]', or "
        "'gpuload[cu12]' for CUDA 12"
    )


def _steps(plan: Plan) -> str:
    views = []
    for number, view in enumerate(plan.views):
        steps = [
            f"{type(step.transform).__name__} by {step.backend}" + (f" ({step.reason})" if step.reason else "")
            for step in view
        ]
        steps += [plan.module] if plan.module else []
        views.append((f"view {number + 1}: " if len(plan.views) > 1 else "") + (", ".join(steps) or "no transforms"))
    note = f" ({plan.note})" if plan.note else ""
    return f"backend {plan.backend} on {plan.device}{note}: {'; '.join(views)}"
