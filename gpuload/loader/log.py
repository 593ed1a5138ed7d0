"""The logger of a `Loader`, and the messages about how a session is set up. It runs in the main process.

The loggers are children of ``gpuload``: ``gpuload.loader`` here, ``gpuload.workers`` (restarts) and ``gpuload.ring``
(growth). gpuload sets no level, and its only handler is a NullHandler: without a handler, Python would print warnings
even if the program has not configured logging. Messages are formatted only if their level is enabled.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from gpuload.decode import Decoder
from gpuload.decode.jpeg import NvImageCodecRegions
from gpuload.order.buckets import BucketShares
from gpuload.order.schedule import shares_of
from gpuload.stage import Plan

if TYPE_CHECKING:
    from gpuload.loader.options import Options

__all__ = ["logger", "report_session_start"]

logging.getLogger("gpuload").addHandler(logging.NullHandler())
logger = logging.getLogger("gpuload.loader")


def report_session_start(options: Options, plan: Plan, placement: str) -> None:
    """Log the workers of a new session, its JPEG decoders, its plan and the placement of its workers."""
    if not logger.isEnabledFor(logging.INFO):
        return
    workers = options.workers
    logger.info(
        "session started: %s, batches of %d on %s, prefetch_factor=%d, ring_bytes=%d",
        _describe_workers(options),
        options.order.size,
        plan.device,
        options.prefetch_factor(workers.count, workers.prefetch),
        workers.ring_bytes,
    )
    if workers.ray_workers is None:  # otherwise JPEGs are decoded on other machines
        logger.info("JPEGs: %s", plan.decoder or _describe_decoders(options))
    logger.info("plan: %s", _describe_steps(plan))
    if options.order.buckets is not None and isinstance(shares := shares_of(options.order), BucketShares):
        logger.info("Buckets: %s", shares.describe())
    if placement:
        logger.info("placement: %s", placement)


def _describe_workers(options: Options) -> str:
    workers = options.workers
    if workers.ray_workers is not None:
        return repr(workers.ray_workers)
    if not workers.count:
        return "no worker processes (num_workers=0)"
    return f"{workers.count} worker{'s' * (workers.count > 1)}"


def _describe_decoders(options: Options) -> str:
    """Describe the JPEG decoders of this process; the workers have the same decoders, from the same installation."""
    decoders, reasons = Decoder(options.workers.decode).jpeg_decoders
    usable = [decoder.name for decoder in decoders]
    if not reasons:
        return f"crops by {usable[0]}, entire images by {usable[-1]}, other images by Pillow"
    text = f"{', then '.join([*usable, 'Pillow'])}; {'; '.join(reasons)}"
    if NvImageCodecRegions.name in usable:
        return text
    remedy = "pip install 'gpuload[cu13]', or 'gpuload[cu12]' for CUDA 12"
    return f"{text}. With nvImageCodec only the region of a crop is decoded: {remedy}"


def _describe_steps(plan: Plan) -> str:
    views = []
    for i, view in enumerate(plan.views):
        steps = [
            f"{type(step.transform).__name__} by {step.backend}" + (f" ({step.reason})" if step.reason else "")
            for step in view
        ]
        steps += plan.modules
        views.append((f"view {i + 1}: " if len(plan.views) > 1 else "") + (", ".join(steps) or "no transforms"))
    note = f" ({plan.note})" if plan.note else ""
    return f"backend {plan.backend} on {plan.device}{note}: {'; '.join(views)}"
