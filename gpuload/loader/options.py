"""A `Loader`'s options, checked when the loader is created, not in epoch 3. This module runs in the main process.

Each argument of `Loader` is a field of one of four groups: `OrderOptions`, `StageOptions`, `BatchOptions`, or
`WorkerOptions`, which is defined here (and calls `workers` `ray_workers`). `Options` combines the four and checks them
against each other. `loader_arguments` makes the error for an argument of another library's loader name the equivalent
in gpuload.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Final, Literal, TypeVar

import torch

from gpuload import transforms
from gpuload.batches.collate import BatchOptions
from gpuload.checks import (
    argument,
    check_fields,
    finite_number,
    flag,
    function,
    instance,
    integer,
    keyword_or,
    one_of,
    optional,
)
from gpuload.datasets.kinds import row_bytes
from gpuload.datasets.without_torch import has_copy, without_torch
from gpuload.decode import Decode
from gpuload.errors import explain_unknown_arguments
from gpuload.loader.limits import (
    WORKER_BYTES,
    Placement,
    check_descriptors,
    check_memory,
    check_workers,
    default_workers,
    find_placement,
    usable_cpus,
)
from gpuload.order.options import OrderOptions
from gpuload.stage import Plan, Stage, check_stage, compile_stage
from gpuload.stage import device as devices
from gpuload.stage.decode import Choice, choose
from gpuload.stage.plan import StageOptions
from gpuload.stage.stage import resolve_backend
from gpuload.transforms import Chain
from gpuload.transforms.chain import find_varying, variants_of
from gpuload.transforms.varying import BucketSize, ByBatch
from gpuload.workers.faults import Faults, OnError
from gpuload.workers.feed import CHUNKS_PER_WORKER
from gpuload.workers.process import check_platform
from gpuload.workers.ray import RayWorkers

__all__ = [
    "ARGUMENTS",
    "DEFAULT_PREFETCH",
    "MIN_CHUNK",
    "Options",
    "WorkerOptions",
    "loader_arguments",
    "local_ranks",
    "look_ahead",
]

DEFAULT_PREFETCH = 2
# Large chunks save CPU time: chunks of 32 cost 2% less than chunks of 16, and 8% less than chunks of 8 (2 workers).
# But with small chunks, every worker gets a part of the first batch, which is then ready sooner. Each chunk costs the
# main process about 50 µs, so batches that are large enough for two chunks of `LARGE_CHUNK` per worker are not split
# further.
MIN_CHUNK, MAX_DEFAULT_CHUNK, LARGE_CHUNK = 8, 32, 64
# The chunks of an `ArrayFile`, whose workers only copy decoded images (20 µs each). With chunks of 64 instead of 32,
# `next()` took a quarter less time. But a batch is still split into at least four chunks, which four workers can share,
# and the bytes of a chunk are limited, since samples may be volumes.
ROW_CHUNK_BYTES, ROW_PARTS = 16 << 20, 4
MAX_CHUNK = 4096  # a request must fit into one socket message
WORKERS_WITHOUT_WARNING = 8  # no warning for up to this many workers, even if there are fewer CPUs
# "auto" begins with few workers, since starting each one takes 0.3 s of CPU time. It adds workers beyond the number of
# CPUs as long as they mostly wait for a disk or for other machines, up to a limit per CPU and a total limit.
FIRST_WORKERS, MAX_WORKERS_PER_CPU, MAX_WAITING_WORKERS = 8, 16, 64
AUTO_CHUNK = 16  # for any number of workers: small chunks help many workers more than large chunks help few
START_CPU_S = 0.3  # CPU time to start one worker while others start (2 busy hyperthreads)

Group = TypeVar("Group")
_integer_or_auto = partial(keyword_or, keyword="auto", otherwise=integer)


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The options of the processes that read and decode.

    Args:
        num_workers, prefetch_factor, …: as for `Loader`.
        ray_workers: the argument `workers` of `Loader`.

    Attributes:
        num_workers: the argument with its default filled in, or the number of `ray_workers`.
        count: the initial number of workers; `max_workers`: the maximum number.
        prefetch_factor: None means `Options.batches_ahead` computes it; `prefetch`: the initial number, or the minimum.
        faults: includes the value of `on_error`; `on_error` itself becomes None.
        chunk_size: None means `Options.chunk_size` computes it.

    Raises:
        TypeError, ValueError: an argument is invalid.
        RuntimeError: worker processes cannot be started on this platform.
    """

    num_workers: int | Literal["auto"] = argument(_integer_or_auto, minimum=0)
    ray_workers: RayWorkers | None
    prefetch_factor: int | Literal["auto"] | None = argument(_integer_or_auto, optional=True, minimum=1)
    timeout: float = argument(finite_number, minimum=0)
    worker_init_fn: Callable[[int], Any] | None = argument(function, optional=True)
    multiprocessing_context: object
    persistent_workers: bool = argument(flag)
    decode: Decode = argument(instance, optional=True, cls=Decode)
    on_error: OnError | None
    faults: Faults = argument(instance, optional=True, cls=Faults)
    chunk_size: int | None = argument(integer, optional=True, minimum=1, maximum=MAX_CHUNK)
    ring_bytes: int = argument(integer, minimum=1)
    affinity: Literal["auto", "none"] = argument(one_of, choices=("auto", "none"))

    def __post_init__(self) -> None:
        workers = optional(instance, "workers", self.ray_workers, cls=RayWorkers)
        check_fields(self)
        if self._context_name not in (None, "spawn", "forkserver", "fork"):
            raise ValueError(
                "multiprocessing_context must be None, 'spawn', 'forkserver', 'fork' or one of these contexts, got "
                f"{self.multiprocessing_context!r}; it has no effect, since gpuload never forks this process: "
                "leave it out"
            )
        if workers is not None and self.prefetch_factor == "auto":
            raise ValueError(
                "prefetch_factor='auto' needs workers on this machine, whose waiting time can be measured; with "
                f"workers={workers!r}, pass a number, or leave the argument out"
            )
        if self.num_workers:
            check_platform()
        object.__setattr__(self, "decode", self.decode or Decode())
        object.__setattr__(self, "faults", _merge_faults(self.on_error, self.faults))
        object.__setattr__(self, "on_error", None)

    @property
    def cpus(self) -> int:
        """Return this rank's share of the CPUs, at least 1."""
        return max(1, usable_cpus() // local_ranks())

    @property
    def count(self) -> int:
        if self.num_workers != "auto":
            return self.num_workers
        return min(FIRST_WORKERS, default_workers(usable_cpus(), local_ranks()))

    @property
    def max_workers(self) -> int:
        if self.num_workers != "auto":
            return self.num_workers
        return max(self.cpus, min(MAX_WORKERS_PER_CPU * self.cpus, MAX_WAITING_WORKERS))

    @property
    def prefetch(self) -> int:
        return self.prefetch_factor if isinstance(self.prefetch_factor, int) else DEFAULT_PREFETCH

    @property
    def processes(self) -> int:
        """Return the number of worker processes on this machine."""
        return 0 if self.ray_workers is not None else self.count

    @property
    def _context_name(self) -> Any:
        context = self.multiprocessing_context
        return context if context is None or isinstance(context, str) else getattr(context, "_name", context)

    def creation_warnings(self) -> Iterator[str]:
        """Yield the warnings to issue when a loader is created."""
        if self.processes and self._context_name == "fork":
            yield (
                f"multiprocessing_context={self.multiprocessing_context!r} has no effect: gpuload's workers are not "
                "forks of this process. The dataset is pickled for them (even lambdas and notebook classes), and they "
                "do not see values that this program has set in modules; leave the argument out, or pass 'spawn'"
            )
        cpus, workers = usable_cpus(), self.processes
        if workers > max(WORKERS_WITHOUT_WARNING, cpus):
            yield (
                f"num_workers={workers}, but this process may use only {cpus} CPU{'s' * (cpus > 1)}: starting the "
                f"workers will occupy all CPUs for about {START_CPU_S * workers / cpus:.0f} s before the first batch "
                "(many times longer if the dataset imports torch: 40 workers on two CPUs took 23 s), and then they "
                f"use about {workers * WORKER_BYTES / 1e9:.1f} GB of memory. The default is "
                f"{default_workers(cpus, local_ranks())}; more workers than CPUs help only if reading is slow; "
                "num_workers='auto' finds the best number"
            )


@dataclass(frozen=True, kw_only=True)
class Options:
    """All options of a loader, in four groups. Creating it raises a ValueError if options of two groups contradict each
    other."""

    order: OrderOptions
    stage: StageOptions
    batches: BatchOptions
    workers: WorkerOptions

    def __post_init__(self) -> None:
        if self.order.iterable and self.workers.faults.on_error == "replace":
            raise ValueError(
                "on_error='replace' does not apply to an iterable dataset: it has no other samples to choose from; "
                "use 'skip'"
            )
        argument = find_varying(self.chain, ByBatch, BucketSize)
        if self.order.iterable and argument:
            raise ValueError(
                f"{argument} depends on the batch, which does not apply to an iterable dataset: each worker makes "
                "batches of its own, which have no number that all workers and ranks share. Use T.by_epoch or a fixed "
                "value, or a map-style dataset"
            )

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Options:
        """Create the groups from a `Loader`'s arguments, keyed by name. Fill in defaults that depend on other
        groups."""
        stage = _make_group(StageOptions, arguments)
        chain = stage.transforms
        combining_transform, group_size = chain.group
        order = _make_group(
            OrderOptions,
            arguments,
            combining_transform=combining_transform,
            group_size=group_size,
            sized_argument=find_varying(chain, BucketSize),
        )
        num_workers, collate_fn = arguments["num_workers"], arguments["collate_fn"]
        ray_workers = arguments["workers"]
        if isinstance(ray_workers, RayWorkers):
            if num_workers is not None:
                raise ValueError(
                    f"num_workers={num_workers!r} and workers={ray_workers!r} cannot be combined; leave one of them out"
                )
            num_workers = ray_workers.count
        elif isinstance(num_workers, str) and num_workers == "auto" and order.iterable:
            raise ValueError(
                "num_workers='auto' needs a map-style dataset: each worker reads its own share of an iterable dataset, "
                "so changing the number of workers would change the data; give a number"
            )
        elif num_workers is None or (sys.platform != "linux" and num_workers == "auto"):
            in_process = sys.platform != "linux" or order.iterable
            num_workers = 0 if in_process else default_workers(usable_cpus(), local_ranks())
        workers = _make_group(WorkerOptions, arguments, num_workers=num_workers, ray_workers=ray_workers)
        if collate_fn is None and callable(get_collate_fn := getattr(order.dataset, "_get_collate_fn", None)):
            collate_fn = get_collate_fn()
        batches = _make_group(
            BatchOptions,
            arguments,
            collate_fn=collate_fn,
            chain=chain,
            seed=order.seed,
            single=order.yields_samples,
            planned=order.is_planned,
            repeats=order.repeats,
        )
        return cls(order=order, stage=stage, batches=batches, workers=workers)

    def argument(self, name: str) -> Any:
        """Return the value of an argument of `Loader`, with defaults filled in."""
        groups = (self.order, self.stage, self.batches, self.workers)
        return next(getattr(group, name) for group in groups if hasattr(group, name))

    @property
    def chain(self) -> Chain:
        """Return the chain of transforms."""
        return self.stage.transforms

    @property
    def dataset_to_send(self) -> Any:
        """Return the dataset to send to workers now: a copy that needs no torch if possible, but the original if there
        is a `worker_init_fn`, which may inspect it."""
        return without_torch(self.order.dataset) if self.sends_copy else self.order.dataset

    @property
    def sends_copy(self) -> bool:
        """Whether `dataset_to_send` is a copy."""
        workers = self.workers
        return bool(workers.count) and workers.worker_init_fn is None and has_copy(self.order.dataset)

    @property
    def is_plain(self) -> bool:
        """Whether images are neither transformed nor passed to a module."""
        return not len(self.chain) and not self.chain.modules

    @property
    def backend_name(self) -> str | None:
        """The name of the backend; None without transforms. It remains ``"fused"`` where `compile_stage` falls back to
        ``"torch"``, whose pixel values are within the same bounds."""
        device = self.stage.device or torch.device(devices.default_device_type())
        return None if self.is_plain else resolve_backend(self.stage.backend, device)

    @property
    def cpu_threads(self) -> int:
        """Return the number of CPU threads for the stage: the CPUs that workers do not use."""
        return max(1, usable_cpus() - self.workers.processes)

    @property
    def chunk_size(self) -> int:
        """Return the maximum number of samples in a request to a worker."""
        size, workers = self.order.size, self.workers
        if workers.chunk_size is not None:
            return min(workers.chunk_size, size)
        if self.order.iterable or (self.batches.collate_fn is not None and not len(self.chain)):
            return min(size, MAX_CHUNK)  # a single worker makes the entire batch
        if workers.ray_workers is not None:  # each chunk costs this process a message, whatever its size
            return min(MAX_DEFAULT_CHUNK, size)
        nbytes = row_bytes(self.order.dataset)
        minimum = max(MIN_CHUNK, min(LARGE_CHUNK, ROW_CHUNK_BYTES // nbytes, -(-size // ROW_PARTS)) if nbytes else 0)
        if workers.num_workers == "auto":  # independent of the number of workers, which changes
            return min(max(min(-(-size // workers.cpus), AUTO_CHUNK), minimum), size)
        share = -(-size // max(1, workers.count))
        maximum = max(MAX_DEFAULT_CHUNK, min(share // 2, LARGE_CHUNK))
        return min(max(min(share, maximum), minimum), size)

    @property
    def plain_chunk_size(self) -> int:
        """Return the minimum chunk size for samples that turn out to be plain arrays: an entire batch, unless the user
        chose a chunk size."""
        return 1 if self.workers.chunk_size is not None else min(self.order.size, MAX_CHUNK)

    def batches_ahead(self, count: int, prefetch: int) -> tuple[int, int]:
        """Return how many batches to prepare ahead of the one in use, at least and at most, for `count` workers and the
        requested or default `prefetch` factor."""
        workers = self.workers
        if not count:
            return 1, 1
        if self.order.iterable:
            return prefetch * count, prefetch * count
        chunks = -(-self.order.size // self.chunk_size)
        is_minimum = workers.num_workers == "auto" or workers.ray_workers is not None
        # If a batch is a single chunk, the feed prepares a batch for each worker.
        if not is_minimum and (chunks == 1 or isinstance(workers.prefetch_factor, int)):
            return prefetch, prefetch
        return prefetch, max(prefetch, look_ahead(count, chunks))

    def prefetch_factor(self, count: int, prefetch: int) -> int:
        """Return the value of `Loader.prefetch_factor` for `count` workers: `prefetch` if the user chose it or
        `Autotune` adjusts it, otherwise the default (per worker for an iterable dataset)."""
        is_default = self.workers.prefetch_factor is None and count and not self.order.iterable
        return self.batches_ahead(count, prefetch)[1] if is_default else prefetch

    # -- values that depend on this machine

    def resolve_device(self) -> torch.device:
        """Return the device for batches, a GPU with its index. The default is the current GPU (by LOCAL_RANK if the
        program has not chosen one), or the CPU."""
        device = self.stage.device or torch.device(devices.default_device_type())
        if device.type == "cpu" or device.index is not None:
            return device
        current, local_rank = devices.current_device(), os.environ.get("LOCAL_RANK")
        if current.index or local_rank is None:
            return current
        return torch.device(current.type, int(local_rank) % torch.accelerator.device_count())

    def compile(self, device: torch.device) -> Stage:
        """Compile the transforms for a device."""
        stage = compile_stage(self.chain, device=device, cpu_threads=self.cpu_threads, **self._stage_arguments)
        if self.workers.decode.scale != "exact":
            reason = self.chain.resizes_late
            fast_text = "JPEGs at 1/2, 1/4 or 1/8 of their size where that costs less, else at full size"
            text = fast_text if reason is None else f"all images at full size, since {reason}"
            stage.plan = replace(stage.plan, decode=f"decode scale='fast': {text}")
        return stage

    @property
    def _stage_arguments(self) -> dict[str, Any]:
        """Return the arguments that `compile_stage` and `check_stage` share."""
        return {
            "backend": self.stage.backend,
            "dtype": self.stage.dtype,
            "memory_format": self.stage.memory_format,
            "ragged": "views" if self.batches.rebuilds_samples else self.batches.ragged,
            "pad_to": self.batches.pad_to,
        }

    def choose_decoder(self, device: torch.device) -> Choice:
        """Choose which images the device decodes, and its decoder."""
        return choose(self.workers.decode, device, self.cpu_threads)

    def find_placement(self, device: torch.device) -> Placement:
        """Decide where to place the workers and the ring. Workers of a cluster run on other machines and are not
        placed."""
        address = devices.pci_address(device)
        if address is None or self.workers.ray_workers is not None or sys.platform != "linux":
            return Placement()
        if self.workers.affinity == "none":
            return Placement(reason="affinity='none': nothing is placed")
        return find_placement(address, device=str(device), ranks=local_ranks())

    def plan(self) -> Plan:
        """Return the plan: where each transform runs, the placement of workers, and the decoder."""
        device = self.resolve_device()
        choice = self.choose_decoder(device)
        if choice.decoder is not None:
            choice.decoder.close()
        placement = self.find_placement(device).describe(self.workers.processes)
        return replace(self.compile(device).plan, placement=placement or None, decoder=choice.text)

    def check_machine(self) -> None:
        """Check, before anything is created, that the stage can run and this number of workers can start here."""
        check_workers(self.workers.processes)
        check_stage(self.chain, self.stage.device, **self._stage_arguments)

    def check_limits(self, device: torch.device, count: int, epoch: int) -> None:
        """Raise a LimitError if this machine allows too few open files, or too little memory, for `count` workers and
        the batches of an epoch."""
        workers, samples = count if self.workers.processes else 0, self.order.samples
        if workers:
            check_descriptors(workers)
        images = self.order.size if samples is None else min(self.order.size, samples)
        shapes = ((1, 1),) if self.order.buckets is None else self.order.buckets.shapes
        sizes = [chain.output_size_hw for chain in variants_of(self.chain, epoch, shapes)]
        pixels = max((size[0] * size[1] for size in sizes if size is not None), default=0)
        has_floats = any(transform.output_state for transform in self.chain)
        pixel_bytes = 3 * (2 if has_floats else 1)  # floats have at least 16 bits
        output_bytes = images * pixels * pixel_bytes if device.type == "cpu" else 0
        check_memory(workers=workers, output_bytes=output_bytes)


def look_ahead(workers: int, chunks: int) -> int:
    """Return the number of batches, of this many chunks each, that keep this many workers busy."""
    return -(-CHUNKS_PER_WORKER * workers // chunks)


def _make_group(group_type: type[Group], arguments: Mapping[str, object], **extra_arguments: object) -> Group:
    """Make a group from the arguments that are its fields."""
    names = {field.name for field in fields(group_type)}  # pyright: ignore[reportArgumentType]
    return group_type(**{**{name: value for name, value in arguments.items() if name in names}, **extra_arguments})


def _merge_faults(on_error: OnError | None, faults: Faults | None) -> Faults:
    if faults is not None and on_error is not None:
        raise ValueError(
            f"on_error={on_error!r} and faults={faults!r} cannot be combined; "
            f"write faults=Faults(on_error={on_error!r}, …)"
        )
    return faults or Faults(on_error="raise" if on_error is None else on_error)


def local_ranks() -> int:
    """Return the number of ranks on this machine."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


# -- argument names of other libraries' loaders, also a table in docs/howto/moving.md ---------------------------------

# Argument names, separated by spaces, and advice for each.
ANSWERS: Final = {
    "pin_memory_device": "leave it out: device=… says where batches go",
    "snapshot_every_n_steps": "leave it out: every state is exact",
    "nodesplitter workersplitter distributed stick_to_shard": (
        "leave it out: samples are divided among ranks and workers, as set by torch.distributed or torchrun"
    ),
    "resampled": "write weights=np.ones(len(dataset)) to draw with replacement",
    "shardshuffle buffer_size": "write shuffle=True, which is the full shuffle, or shuffle='block'",
    "transform augmentations batch_tfms batch_transforms item_tfms": (
        "write transforms=[…], a list from gpuload.transforms"
    ),
    "target_transform": "change the labels in the dataset",
    "batch bs": "write batch_size=…",
    "n_workers num_processes num_threads py_num_workers": "write num_workers=…",
    "prefetch prefetch_queue_depth batches_ahead": (
        "write prefetch_factor=…, the number of batches prepared ahead of the one in use"
    ),
    "random_state rng": "write seed=…",
    "batch_size_choices input_size_choices": (
        "write T.by_epoch({0: 128, 10: 224}) as a size, for sizes that change from epoch to epoch"
    ),
    "fp16": "write dtype='float16'",
    "img_dtype": "write dtype=…",
    "input_size": "write transforms=T.from_timm(config, is_training=…); the config contains it",
    "is_training": "write transforms=T.from_timm(config, is_training=…), and shuffle=True, drop_last=True for training",
    "mean std": "write transforms=[…, T.Normalize(mean, std)]",
    "num_aug_repeats": "write repeats=…",
    "num_aug_splits": "write transforms=[T.MultiView([…, …])], with a chain for each split",
    "num_batches auto_reset reader_name size": (
        "leave it out: an epoch is as long as the dataset, and each loop over the loader starts a new one"
    ),
    "tf_preprocessing": "leave it out: TensorFlow's preprocessing is not in gpuload",
    "use_multi_epochs_loader": "leave it out: workers stay alive from epoch to epoch",
    "use_prefetcher": "leave it out: batches arrive on the device",
    "worker_seeding": "leave it out: random draws depend only on seed, epoch and position",
    "device_id": "write device=…, such as 0 or 'cuda:0'",
    "dynamic_shape": "write ragged='list' or ragged='pad'",
    "pad_size_divisor size_divisible size_divisibility size_divisor": "write ragged='pad' and pad_to=…, such as 32",
    "exec_async exec_dynamic exec_pipelined prepare_first_batch": "leave it out: gpuload.Loader does so automatically",
    "file_list": "write gpuload.Loader(gpuload.FileList(manifest), …)",
    "file_root": "write gpuload.Loader(gpuload.ImageFolder(root), …), or another dataset",
    "fill_last_batch last_batch_padded last_batch_policy pad_last_batch": (
        "write drop_last=True, or uneven='pad', 'drop' or 'exact'"
    ),
    "initial_fill": "leave it out: shuffle=True is the full shuffle",
    "num_shards": "write world_size=…, or leave it out under torchrun",
    "output_map": "leave it out: a batch has the structure of a sample, so have the dataset return dicts",
    "pipelines": (
        "write transforms=[…], a list from gpuload.transforms; images are decoded and labels collated automatically"
    ),
    "py_start_method": "leave it out: workers are forked from a fresh interpreter",
    "random_shuffle": "write shuffle=True",
    "set_affinity": "leave it out, or write affinity='none'",
    "shard_id": "write rank=…, or leave it out under torchrun",
    "custom_fields": "leave it out: a dataset may return any fields",
    "fname": (
        "write gpuload.Loader(gpuload.ImageFolder(root), …), or another dataset; gpuload does not read .beton "
        "files, but gpuload.pack writes similar ones"
    ),
    "indices": "write gpuload.Loader(torch.utils.data.Subset(dataset, indices), …)",
    "order": "write shuffle=True for OrderOption.RANDOM, shuffle='block' for QUASI_RANDOM, nothing for SEQUENTIAL",
    "os_cache": "leave it out, or write gpuload.Loader(gpuload.Cached(dataset, bytes_limit), …)",
    "recompile": "leave it out: nothing is compiled",
}
ARGUMENTS: Final = {name: answer for names, answer in ANSWERS.items() for name in names.split()}


def _suggest_argument(argument: str) -> str | None:
    if argument in ARGUMENTS:
        return ARGUMENTS[argument]
    if argument in inspect.signature(transforms.from_timm).parameters:
        return f"write transforms=T.from_timm(config, {argument}=…)"
    return None


loader_arguments = explain_unknown_arguments(_suggest_argument)
"""A decorator for `Loader.__init__`: its error for another library's argument names the equivalent in gpuload."""
