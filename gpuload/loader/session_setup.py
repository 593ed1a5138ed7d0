"""What a session is made with: the device, the compiled stage, who decodes, whether the machine allows it all; what
does the chunks, and what it is sent.

Runs in the main process; keeps nothing.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gpuload.loader.limits import Placement, check_descriptors, check_memory, check_workers, find_placement
from gpuload.loader.options import Options, local_ranks
from gpuload.order.ranks import find_group
from gpuload.order.schedule import ranks_of
from gpuload.ring.ring import Ring
from gpuload.stage import Plan, Stage, accelerator, check_stage, compile_stage
from gpuload.stage.decode import Choice, choose
from gpuload.stage.decode.share import measure_share
from gpuload.stage.ranges import DECODE, named
from gpuload.workers.changes import objects_in
from gpuload.workers.inherited import module_values
from gpuload.workers.inline import InProcessEngine
from gpuload.workers.job import Job
from gpuload.workers.pool import WorkerPool
from gpuload.workers.ray import RayPool

__all__ = [
    "check_for",
    "check_limits",
    "choose_decoder",
    "compile_for",
    "engine_for",
    "job_for",
    "placement_for",
    "plan_for",
    "resolve_device",
    "with_share",
]


def compile_for(options: Options, device: torch.device) -> Stage:
    """Compile the transforms for a device."""
    stage_options = options.stage
    stage = compile_stage(
        options.chain,
        device=device,
        backend=stage_options.backend,
        dtype=stage_options.dtype,
        memory_format=stage_options.memory_format,
        ragged=_ragged(options),
        cpu_threads=options.cpu_threads,
    )
    stage.plan = replace(stage.plan, decode=_decoding(options))
    return stage


def _decoding(options: Options) -> str | None:
    """Say what comes of ``scale="fast"``; None without it."""
    if options.workers.decode.scale == "exact":
        return None
    reason = options.chain.resizes_late
    if reason is None:
        return "decode scale='fast': JPEGs at 1/2, 1/4 or 1/8 of their size where that costs less, else as they are"
    return f"decode scale='fast': all images as they are, since {reason}"


def placement_for(options: Options, device: torch.device) -> Placement:
    """Decide where workers and ring go; workers of a cluster have other machines' CPUs."""
    address = accelerator.pci_address(device)
    if address is None or options.workers.workers is not None or sys.platform != "linux":
        return Placement()
    if options.workers.affinity == "none":
        return Placement(why="affinity='none': nothing is placed")
    return find_placement(address, device=str(device), ranks=local_ranks())


def choose_decoder(options: Options, device: torch.device) -> Choice:
    """Decide who decodes."""
    return choose(options.workers.decode, device, options.cpu_threads, options.device_share, options.stage.backend)


def with_share(options: Options) -> Options:
    """Return the options with the device's share of the decoding, measured if it has to be.

    Raises:
        ValueError: there are several ranks, each of which would find another one.
    """
    if not options.measures_share or options.device_share is not None:
        return options
    if (ranks := ranks_of(options.order)["world_size"]) > 1:
        raise ValueError(
            f"Decode(where='both') measures which share the device decodes, and each of {ranks} ranks would find "
            "another one; give it: device_share=0.5, say, or what loader.plan() says on one rank"
        )
    choice = choose_decoder(options, resolve_device(options.stage.device))
    if choice.decoder is None:
        return options
    try:
        return replace(options, device_share=measure_share(choice.decoder, options.workers.count))
    finally:
        choice.decoder.close()


def plan_for(options: Options) -> Plan:
    """Return what runs where, and who decodes, here and now."""
    device = resolve_device(options.stage.device)
    choice = choose_decoder(options, device)
    if choice.decoder is not None:
        choice.decoder.close()
    placed = placement_for(options, device).describe(options.workers.processes)
    return replace(compile_for(options, device).plan, placement=placed or None, decoder=choice.text)


def check_for(options: Options) -> None:
    """Check before anything is made: the stage's options, and that this many workers can be started."""
    check_workers(options.workers.processes)
    stage, ragged = options.stage, _ragged(options)
    check_stage(
        options.chain, stage.device, stage.backend, stage.dtype, stage.memory_format, ragged, options.cpu_threads
    )


def _ragged(options: Options) -> str:
    return "views" if options.batches.by_row else options.batches.ragged


def resolve_device(device: torch.device | None) -> torch.device:
    """Return the device, a GPU with its index. None means the current GPU (by LOCAL_RANK if none was chosen), or the
    CPU."""
    if device is None:
        device = torch.device(accelerator.usual_type())
    if device.type == "cpu" or device.index is not None:
        return device
    current, local_rank = accelerator.current_device(), os.environ.get("LOCAL_RANK")
    if current.index or local_rank is None:
        return current
    return torch.device(current.type, int(local_rank) % accelerator.device_count())


def check_limits(options: Options, device: torch.device, count: int) -> None:
    """Raise a LimitError if this machine allows too few open files or too little memory for so many workers."""
    workers, samples = count if options.workers.processes else 0, options.order.samples
    if workers:
        check_descriptors(workers)
    rows = options.order.size if samples is None else min(options.order.size, samples)
    size = options.chain.at(0).output_size_hw
    pixel_bytes = 3 * (2 if any(transform.makes for transform in options.chain) else 1)  # floats may be of 16 bits
    check_memory(
        workers=workers,
        output_bytes=0 if size is None or device.type != "cpu" else rows * size[0] * size[1] * pixel_bytes,
    )


def job_for(options: Options, epoch: int, fusing: Any = None, *, whole: bool = False, device_share: float = 0.0) -> Job:
    """Return what workers are sent.

    Args:
        options: the loader's.
        epoch: the number of the first epoch.
        fusing: plans batches, if workers do that.
        whole: for images that are kept, not cropped.
        device_share: the share of the samples that the device decodes.
    """
    return Job(
        options.order.dataset,
        options.chain,
        options.workers.decode,
        options.order.seed,
        collate_fn=options.batches.collate_fn,
        worker_init_fn=options.workers.worker_init_fn,
        single=options.order.single,
        plain=not len(options.chain) and options.chain.module is None,
        moves=options.chain.moves_pixels,
        epoch=epoch,
        **ranks_of(options.order),
        group=find_group(),
        fusing=fusing,
        whole=whole,
        device_share=device_share,
        module_values=_module_values(options) if options.workers.processes else {},
    )


def _module_values(options: Options) -> dict[str, dict[str, Any]]:
    """Return the values of the user's modules that workers' code refers to."""
    objects = [options.batches.collate_fn, options.workers.worker_init_fn]
    for _, part in objects_in(options.order.dataset):
        objects += [part, *getattr(part, "__dict__", {}).values()]
    return module_values(user for user in objects if user is not None)


def engine_for(
    job: Job, options: Options, ring: Ring, count: int, placement: Placement
) -> WorkerPool | RayPool | InProcessEngine:
    """Return what does the chunks: processes of this machine, workers of a cluster, or this process."""
    workers = options.workers
    watch = {"timeout_s": workers.timeout, "own_queues": options.order.iterable}
    if workers.workers is not None:
        return RayPool(job, workers.workers, ring, **watch)
    if not count:
        return InProcessEngine(job, ring, around=partial(named, DECODE))
    return WorkerPool(job, count, ring, most=workers.most, cpus_for=placement.cpus_for, **watch)
