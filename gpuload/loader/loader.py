"""`Loader`, the main interface: checks its arguments, connects the parts, and iterates.

It runs in the main process, in the thread that iterates, and starts no threads. The first `iter()` starts a *session*:
the ring, the worker processes, the transfer and the compiled stage. A session lasts until `close()`, until the Loader
is garbage-collected or until the interpreter exits. An epoch's iterator holds no resources of its own.
"""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from reprlib import Repr
from types import GenericAlias
from typing import Any, Final, Literal

import numpy as np
import torch
from torch.utils.data import SequentialSampler

from gpuload.batches.assemble import BatchInfo
from gpuload.checks import flag, instance, integer, optional
from gpuload.datasets.sample import Image
from gpuload.decode import Decode
from gpuload.loader.autotune import autotune_for
from gpuload.loader.epoch import Cursor, Epoch, Progress
from gpuload.loader.log import logger
from gpuload.loader.meter import Span
from gpuload.loader.options import Options, loader_arguments
from gpuload.loader.replay import Replay, replay
from gpuload.loader.session import NEWER_ITERATOR, Session, libraries_for
from gpuload.loader.state import State, adapt_to_workers, add_states
from gpuload.loader.stats import Stats
from gpuload.order.blocks import BlockShuffle
from gpuload.order.buckets import Buckets
from gpuload.order.place import Place
from gpuload.order.schedule import (
    Schedule,
    check_has_batches,
    order_name,
    schedule_of,
    shares_of,
    start_warnings,
    steps_of,
)
from gpuload.order.shares import Uneven
from gpuload.ring.ring import on_collected
from gpuload.stage import Plan
from gpuload.stage.plan import MAX_CELL_CHARACTERS, shorten, table
from gpuload.transforms import Chain, Compose
from gpuload.transforms.chain import variants_of
from gpuload.workers.dataset_changes import find_objects
from gpuload.workers.faults import ErrorLog, Faults, OnError
from gpuload.workers.fork_server import start_imports
from gpuload.workers.ray import RayWorkers
from gpuload.workers.signals import deferred_signals
from gpuload.workers.source import pickle_state

__all__ = ["BatchInfo", "Loader", "apply"]

DEFAULT_RING_BYTES = 2 << 30


class Loader:
    """An iterable over a dataset that yields augmented batches on the device.

    Args:
        dataset: a map-style dataset (with ``dataset[i]`` and ``len(dataset)``) or an iterable one (torch's
            `IterableDataset`, or any object that only has ``__iter__``). A sample is a nested tuple, list, dict or
            dataclass. Its images are `Encoded` (the fastest), `Image` or PIL images; a clip is a list of images, or a
            T×H×W×C `Image`. Plain arrays are data, except that `transforms` apply to a plain array if no other leaf can
            be the image.
        batch_size: samples per batch on each rank; None yields single samples, with their arrays as tensors. MixUp and
            CutMix need an even number.
        shuffle: True draws a new order each epoch, which depends only on `seed` and the epoch number. ``"block"`` or a
            `BlockShuffle` keeps neighbouring samples close together, for storage where reading them together is much
            cheaper. `Buckets` gives all images of a batch one size, which differs from batch to batch.
        sampler: yields the keys of an epoch's samples and replaces gpuload's order; it is not split among ranks.
        batch_sampler: yields lists of keys, one list per batch, which may have an attribute ``size_hw``: the size
            of the batch's images, for `bucket_size`.
        collate_fn: makes a batch from a list of samples (from a single sample if ``batch_size=None``). Without
            transforms, it gets PIL images that the dataset returned as they are, and runs in the worker if there are no
            other images; otherwise it runs in this process, where it gets images as C×H×W tensors on the device.
            Default: the dataset's ``_get_collate_fn()`` if it has one, otherwise a function like `default_collate`.
        pin_memory: if CUDA is available, page-lock batches that stay on the CPU (see `device`), and call the
            ``pin_memory()`` method of custom batch types that `collate_fn` returns. Memory that is copied to a GPU is
            always page-locked.
        drop_last: drop the last batch if it is smaller than `batch_size`.
        worker_init_fn: called in each worker, with the worker's index, before its first sample, and again after a
            restart. `iter()` waits for it, and raises a `WorkerError` if it fails.
        generator: a `torch.Generator` whose initial seed becomes `seed`; nothing is drawn from it.
        multiprocessing_context: has no effect, since gpuload never forks this process; ``"fork"`` causes a warning.
        persistent_workers: False ends the workers after each epoch. By default, workers stay alive between epochs.
        in_order: False yields each batch of an iterable dataset as soon as a worker has finished it, so that a slow
            worker does not delay the others; states stay exact. Batches of a map-style dataset are always yielded
            in order, without making workers wait.
        transforms: `gpuload.transforms` in order, as a list or a `Compose`. The last one may be a `torch.nn.Module`,
            which is applied to the entire batch.
        num_workers: processes that read and decode; with 0, this process does the work. Default: the number of
            CPUs that this process may use, minus one per rank on this machine, divided by the number of these ranks,
            but at least 1; 0 for an iterable dataset. More workers than both 8 and the number of CPUs cause a warning.
            ``"auto"`` adjusts the number while the loader runs.
        workers: a `RayWorkers`, to use workers on other machines instead of processes on this one.
        prefetch_factor: batches prepared ahead of the one in use (per worker for an iterable dataset). Default: 2, or
            more if workers would have less than three chunks each and a quarter of `ring_bytes` is enough.
            ``"auto"`` raises it while the loop waits for single slow samples and more prefetching helps.
        device: where the batches go: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"xpu"``, the index of a GPU, or a
            `torch.device`. Default: the current GPU, or the CPU if there is no GPU.
        dtype: dtype of float images: ``"float32"``, ``"float16"``, ``"bfloat16"`` or a torch dtype. Default: the dtype
            of a `ToDtype`, else float32. Without `Normalize` and `ToDtype`, images stay uint8.
        memory_format: ``"contiguous_format"``, ``"channels_last"`` or a torch memory format, for batches of images.
        ragged: how to batch images whose final sizes differ: ``"error"``, ``"list"`` for a list of tensors, or
            ``"pad"``, which pads with zeros at the bottom and right and yields ``(images, sizes)`` with int64 (N, 2)
            heights and widths. On the CPU, listed images that no transform changes are C×H×W views of H×W×C memory.
        pad_to: with ``ragged="pad"``, round the height and width of a padded batch, and of masks padded with it, up to
            a multiple of this, such as 32 for detection networks. Default: the size of the largest image.
        boxes: ``"list"`` yields boxes as a list of tensors, and a dict that contains them as a list of dicts.
            ``"padded"`` yields `Boxes` of shape N×M×4, whose `valid` says which are boxes; all values with an entry for
            each box, such as labels and masks, are padded like them.
        seed: 0 ≤ seed < 2**64; determines the order and every random draw. Default 0.
        rank, world_size: this process's rank, and the number of ranks that share each epoch. Default: from
            ``torch.distributed`` if it is initialized at `iter()`, else from torchrun's environment, else 0 and 1.
        uneven: what to do if an epoch's samples cannot be divided evenly among the ranks. ``"pad"`` repeats the
            epoch's first samples up to a multiple of the number of ranks; ``"drop"`` drops samples down to a multiple;
            ``"exact"`` (for evaluation; needs ``info=True``) counts each sample once and pads with entries whose
            `BatchInfo.valid` is False. ``drop_last=True`` drops the samples that do not fill a batch on every rank. On
            more than one rank, each rank gets an even number of samples with MixUp, CutMix or CopyPaste, and a multiple
            of 4 with Mosaic.
        weights: one weight per sample: draw with replacement, with probabilities proportional to the weights.
        repeats: how many times in a row each sample appears ("repeated augmentation"), each time with different random
            parameters and on a different rank. The length of an epoch does not change, so it has fewer distinct
            samples. MixUp and CutMix never mix a sample with itself.
        decode: a `Decode` with decoding options.
        timeout: kill and restart a worker that spends more than this many seconds on one sample; 0 means no timeout.
        on_error: what to do with a sample that fails: ``"raise"`` a `SampleError` (default), ``"skip"`` the sample, or
            ``"replace"`` it with another one; short for ``faults=Faults(on_error=…)``.
        faults: a `Faults` with all options for error handling.
        backend: the implementation that runs the transforms: ``"torch"``, ``"kornia"``, ``"dali"`` or ``"fused"``,
            with torch for transforms that the backend lacks. ``"kornia"`` and ``"dali"`` have the definitions of their
            libraries, all others Pillow's. ``"auto"`` means ``"fused"`` on a GPU and ``"torch"`` on the CPU. `plan`
            shows the result.
        info: yield ``(batch, BatchInfo)``.
        chunk_size: the maximum number of samples that a worker processes at a time; it does not affect the batches.
            Default: the worker's share, 8 to 64.
        ring_bytes: the maximum shared memory for decoded pixels in flight; default 2 GiB.
        affinity: ``"auto"``: on a machine with several NUMA nodes, run workers on the CPUs of the GPU's node if it has
            enough, and keep decoded pixels in its memory. ``"none"``: anywhere. `plan` shows the placement.

    Raises:
        ValueError, TypeError: an argument is invalid; the message says what was expected.
        RuntimeError: worker processes cannot be started on this platform.
        LimitError: the limits on open files or processes do not allow this many workers.

    Iterating raises `SampleError` for a sample that could not be loaded, `TooManyErrors` if more samples were skipped
    or replaced than `Faults` allows, `CollateError` for two samples that do not fit into one batch, `WorkerError` if
    workers cannot start or died too often, and `LimitError` if memory or open files run out.

    Attributes:
        errors: the samples that have failed so far: a sequence of `ErrorRecord`, each with epoch, position, index,
            source, cause, traceback and ``replaced_by``.

    Example:
        >>> import numpy as np
        >>> from gpuload import transforms as T
        >>> pictures = [(np.full((40, 60, 3), i, np.uint8), i) for i in range(10)]
        >>> loader = Loader(pictures, batch_size=4, transforms=[T.CenterCrop(32)], num_workers=0, device="cpu")
        >>> [tuple(images.shape) for images, labels in loader]
        [(4, 3, 32, 32), (4, 3, 32, 32), (2, 3, 32, 32)]
    """

    # Arguments that are read-only public attributes.
    dataset: Any
    batch_size: int | None
    shuffle: bool | BlockShuffle | Buckets
    batch_sampler: Any
    collate_fn: Callable[[Any], Any] | None
    pin_memory: bool
    drop_last: bool
    persistent_workers: bool
    generator: torch.Generator | None
    timeout: float
    worker_init_fn: Callable[[int], Any] | None
    multiprocessing_context: object
    in_order: bool
    info: bool

    @loader_arguments
    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | Literal["block"] | BlockShuffle | Buckets | None = False,
        *,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        worker_init_fn: Callable[[int], Any] | None = None,
        generator: torch.Generator | None = None,
        multiprocessing_context: Any = None,
        persistent_workers: bool = True,
        in_order: bool = True,
        transforms: Sequence[Any] | Compose = (),
        num_workers: int | Literal["auto"] | None = None,
        workers: RayWorkers | None = None,
        prefetch_factor: int | Literal["auto"] | None = None,
        device: str | int | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        memory_format: str | torch.memory_format = "contiguous_format",
        ragged: Literal["error", "list", "pad"] = "error",
        pad_to: int | None = None,
        boxes: Literal["list", "padded"] = "list",
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        uneven: Uneven = "pad",
        weights: Any = None,
        repeats: int = 1,
        decode: Decode | None = None,
        timeout: float = 0,
        on_error: OnError | None = None,
        faults: Faults | None = None,
        backend: str = "auto",
        info: bool = False,
        chunk_size: int | None = None,
        ring_bytes: int = DEFAULT_RING_BYTES,
        affinity: Literal["auto", "none"] = "auto",
    ) -> None:
        options = self._options = Options.of(locals())
        for name in Loader.__annotations__:
            setattr(self, name, options.argument(name))
        self._autotune = autotune_for(options)
        self.errors = ErrorLog()
        self._cursor = Cursor()
        self._session: Session | None = None
        self._final_span: Span | None = None  # statistics of the last closed session
        options.check_machine()
        check_has_batches(options.order)
        for text in options.workers.creation_warnings():
            warnings.warn(text, RuntimeWarning, stacklevel=3)  # points at the caller of `Loader`, beyond its decorator
        start_imports(libraries_for(options))
        self._start_lock = _Lock()  # held while a thread begins an epoch, which may start workers
        self._initialized = True

    def __setattr__(self, name: str, value: object) -> None:
        if name in OPTIONS and getattr(self, "_initialized", False):
            raise ValueError(f"{name} cannot be changed after the Loader has been created; create another Loader")
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which has no workers and has not begun an epoch."""
        state = {name: value for name, value in vars(self).items() if name != "_cancel_finalizer"}
        if self._cursor.last_progress is not None:
            state["_cursor"] = Cursor()
        return state | {
            "_autotune": autotune_for(self._options),
            "_final_span": None,
            "_session": None,
            "errors": ErrorLog(),
        }

    __class_getitem__ = classmethod(GenericAlias)

    def __len__(self) -> int:
        """Return the number of batches in a full epoch, the same on each rank; raise a TypeError if the dataset or
        sampler has no length."""
        return steps_of(self._options.order)

    @property
    def transforms(self) -> Chain:
        """The transforms as a sequence."""
        return self._options.chain

    @property
    def device(self) -> torch.device:
        """The device that batches go to. Before the first `iter()` and without `device`, the device that `iter()` would
        choose now."""
        return self._options.resolve_device() if self._session is None else self._session.stage.device

    @property
    def num_workers(self) -> int:
        """The number of workers; with ``"auto"`` the current target."""
        return self._options.workers.count if self._autotune is None else self._autotune.setting.workers

    @property
    def prefetch_factor(self) -> int:
        """The number of batches to prepare ahead of the one in use (per worker for an iterable dataset): as requested,
        or the default for the current number of workers; with ``"auto"`` the current number."""
        _refuse_rebuilding()
        options = self._options
        ahead = options.workers.prefetch if self._autotune is None else self._autotune.setting.ahead
        return options.prefetch_factor(self.num_workers, ahead)

    @property
    def sampler(self) -> Any:
        """The `sampler` argument, or the sampler of the `batch_sampler`. Without either, an object that represents
        gpuload's own order: it has ``set_epoch(epoch)``, its length is this rank's number of samples, and iterating
        yields their indices in the epoch that the next `iter()` begins."""
        order = self._options.order
        if order.batch_sampler is not None:
            sampler = getattr(order.batch_sampler, "sampler", None)
        else:
            sampler = _OrderSampler(self) if order.sampler is None else order.sampler
        _refuse_rebuilding(is_sequential=isinstance(sampler, SequentialSampler))
        return sampler

    @property
    def epoch(self) -> int:
        """The number of the epoch that the last `iter()` began, or that the first `iter()` will begin."""
        return self._cursor.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch that the next `iter()` begins. Also call ``set_epoch()`` of the dataset (here and
        in the workers) and of the sampler, if they have this method.

        A position in this epoch that `load_state_dict` has loaded is kept, so a training loop can call this before
        each epoch, even before the first one after resuming. If the state was saved after this epoch's last batch, the
        next `iter()` yields no batch, and the one after it begins the following epoch.

        Raises:
            ValueError: `epoch` is negative.
        """
        epoch = integer("epoch", epoch, minimum=0, maximum=2**63 - 1)
        order, inner_sampler = self._options.order, getattr(self.batch_sampler, "sampler", None)
        if (session := self._session) is not None:
            session.note_changes()
        for owner in (self.dataset, order.sampler, self.batch_sampler, inner_sampler):
            if callable(set_epoch := getattr(owner, "set_epoch", None)):
                set_epoch(epoch)
        if session is not None:
            session.changes.ignore()  # workers call the dataset's set_epoch() themselves
        self._cursor = self._cursor.set_epoch(epoch, is_running=session is not None)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position as a small dict that can be stored as JSON. It counts the batches that were
        yielded, not those that were prefetched; after `load_state_dict`, it is the loaded state until the next
        `iter()`. The state is the same on every rank, and can be resumed with any number of ranks and workers
        (ranks only between epochs with `Buckets` or ``Mix(per=…)``).

        The state includes the sampler's ``state_dict()``, and for an iterable dataset one entry per worker, which only
        the same number of workers can resume. The states of samplers and datasets may contain numbers, strings, bytes,
        arrays, CPU tensors, and tuples, lists, sets and dicts of these.

        Raises:
            TypeError: the state of the sampler or dataset contains an unsupported type; the message says where.
        """
        place = self._cursor.place
        if self._iterates_in_process and not place.iterable_progress and self._cursor.is_untouched:
            # If the dataset is its own iterator, only this state can rewind it.
            dataset_state = pickle_state(self.dataset, "dataset")
            if isinstance(dataset_state, bytes):  # some datasets have a state only after iteration has begun
                place = add_states(place, 0, {"dataset": dataset_state})
        return self._make_state(place).to_dict()

    @property
    def _iterates_in_process(self) -> bool:
        """Whether this process, not a worker, iterates over an iterable dataset."""
        return self._options.order.iterable and not self.num_workers

    def load_state_dict(self, state: dict[str, Any], *, strict: bool = True) -> None:
        """Resume from a state: the next `iter()` yields the remaining batches of its epoch.

        Args:
            state: from `state_dict`.
            strict: reject the state of a loader with a different dataset length, seed, order or different transforms;
                False only warns. A different backend is only a warning in any case.

        Raises:
            TypeError, ValueError: the state is invalid, or belongs to a different loader.
        """
        (loaded_state := State.from_dict(state)).check(self._make_state(Place(0, 0)), strict=flag("strict", strict))
        place = adapt_to_workers(loaded_state.place, self.num_workers)
        if self._cursor.is_open:
            text = "load_state_dict() does not affect the epoch in progress; the next iter() resumes from the state"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        if (session := self._session) is not None:
            # Workers have advanced their copies of the dataset; only new workers get it in its initial state.
            keeps_state = self._options.order.iterable and callable(getattr(self.dataset, "state_dict", None))
            session.is_outdated = keeps_state and place.iterable_progress is None
        self._cursor = self._cursor.go_to(
            place, is_running=session is not None, is_loaded=True, completed=loaded_state.completed
        )
        samples = "" if loaded_state.samples is None else f" of {loaded_state.samples}"
        logger.info(
            "resuming in epoch %d at position %d%s", loaded_state.place.epoch, loaded_state.place.position, samples
        )

    @property
    def _turns_upright(self) -> bool:
        """Whether `Decode.exif`, or else a dataset, turns images upright."""
        exif = self._options.workers.decode.exif
        if exif is not None:
            return exif
        return any(getattr(inner, "exif", None) is True for _, inner in find_objects(self.dataset))

    def _make_state(self, place: Place) -> State:
        options = self._options
        return State(
            place=place,
            completed=self._cursor.completed_epoch,
            samples=options.order.samples,
            seed=options.order.seed,
            order=order_name(options.order),
            # Rotating images by their Exif orientation changes their sizes, and therefore the random parameters.
            transforms=options.chain.fingerprint() + "-exif" * self._turns_upright,
            backend=options.backend_name,
        )

    def plan(self) -> Plan:
        """Return which backend runs each transform on this machine, and where workers are placed:
        ``print(loader.plan())``.

        Raises:
            BackendError: the requested backend cannot be used here.

        Example:
            >>> from gpuload import transforms as T
            >>> loader = Loader(["a.jpg"], transforms=[T.Resize(224), T.RandomInvert()], backend="kornia", device="cpu")
            >>> print(loader.plan())
            backend kornia on cpu
              Resize(size=224)  kornia  not antialiased
              RandomInvert()    kornia
        """
        return self._options.plan()

    def stats(self, since: Stats | None = None) -> Stats:
        """Return the loading statistics since the epoch began: ``print(loader.stats())`` names the bottleneck and a
        remedy.

        It can be called at any time and from any thread, and never blocks. After `close`, it returns the final
        statistics.

        Args:
            since: an earlier snapshot to count from. A snapshot of a session that has been closed means the beginning
                of the next session.
        """
        optional(instance, "since", since, cls=Stats)
        span = self._final_span if (session := self._session) is None else session.meter.span()
        return Stats(epoch=self.epoch) if span is None else span.stats(since, self.epoch)

    def replay(self, epoch: int, position: int, index: object = None) -> Replay:
        """Recreate one augmented sample with the same random draws, for example to find out why a loss is NaN.

        The sample is read, decoded and transformed in this process, together with the samples that MixUp, CutMix,
        Mosaic or CopyPaste combined it with. With a sampler, these are unknown, and the sample is made without them.

        Args:
            epoch: the sample's epoch.
            position: the sample's position in the epoch's order, from `BatchInfo.positions` or `ErrorRecord.position`.
                For `by_batch`, its batch is the one with this position in an epoch that was not resumed with another
                batch size; for a position that pads the last batch again, the earlier batch.
            index: the sample's index in the dataset, from `BatchInfo.indices`; required with a sampler.

        Raises:
            ValueError: the epoch has no such position, the index is missing, or a transform depends on the batch, which
                only the `batch_sampler` knows.
            TypeError: the dataset is iterable and cannot return a sample again.
            SampleError: the sample cannot be loaded.
        """
        return replay(self._options, epoch, position, index)

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch and end an unfinished earlier one; an epoch that has yielded no batch does not count.
        Raise a ValueError if the dataset has too few samples for a batch on each current rank.
        """
        check_has_batches(self._options.order)
        options = self._options
        schedule = schedule_of(options.order, self.num_workers)
        for text in start_warnings(options.order, self.num_workers):
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        progress = self._cursor.start_progress(schedule)
        variants_of(options.chain, progress.start.epoch)  # an invalid value raises an error here, not for every sample
        with self._start_lock:
            return self._begin(schedule, progress)

    def _begin(self, schedule: Schedule, progress: Progress) -> Iterator[Any]:
        """Begin an epoch in the current session, or in a new one."""
        options = self._options
        if self._session is not None:
            self._session.check_process()
            if self._session.is_usable:
                self._session.update_workers(progress.start.epoch)
            if (
                not self._session.is_usable
            ):  # the last epoch ended with a WorkerError or Ctrl-C, or the dataset must be sent again
                self._cursor.end(NEWER_ITERATOR)
                self.close()
        if self._session is None:
            with deferred_signals():  # a signal in between would leak the session's processes
                self._session = Session(options, self.errors, progress.start.epoch, self._autotune)
                self._cancel_finalizer = on_collected(self, self._session.make_finalizer())
        self._cursor.end(NEWER_ITERATOR)
        iterator = Epoch(self, self._session, schedule, progress, self._cursor.epoch_sent)
        self._cursor = self._cursor.begin(progress)
        if self._iterates_in_process and (initial_place := self._session.initial_place()):
            # As in DataLoader, save the initial state now. Workers send theirs with the first batch.
            progress.place = add_states(progress.place, initial_place.samples, initial_place.state)
        return iterator

    def close(self) -> None:
        """End the worker processes and free the shared memory. The next `iter()` starts new ones. Idempotent."""
        with deferred_signals():  # Ctrl-C waits until everything is closed
            self._close()

    def _close(self) -> None:
        self._cursor.end("its Loader was closed")
        if (session := self._session) is not None:
            try:
                self._final_span = self._final_span if session.steps.in_forked_child else session.meter.span()
            finally:
                session.close()
                self._cancel_finalizer()
                del self._cancel_finalizer  # and its references to the session's resources
        self._session = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        with deferred_signals(drop_sigint=kind is KeyboardInterrupt):  # ignore a second Ctrl-C
            self._close()

    def __repr__(self) -> str:
        options = self._options
        return (
            f"Loader({self.dataset!r}, batch_size={self.batch_size}, shuffle={self.shuffle}, "
            f"transforms={list(options.chain.transforms)!r}, num_workers={self.num_workers}, seed={options.order.seed})"
        )

    def _repr_html_(self) -> str:
        """Return the main options and the current epoch, without starting workers or querying a device."""
        options = self._options
        device = options.stage.device if self._session is None else self._session.stage.device
        samples = options.order.samples
        transforms = " → ".join(repr(transform) for transform in options.chain.transforms)
        formatter = Repr()
        formatter.maxother = formatter.maxstring = MAX_CELL_CHARACTERS
        rows = [
            ("dataset", shorten(formatter.repr(self.dataset))),
            ("samples", "unknown" if samples is None else f"{samples:,}"),
            ("batch_size", str(self.batch_size)),
            ("shuffle, seed", f"{self.shuffle}, {options.order.seed}"),
            ("transforms", " → ".join(filter(None, (transforms, *options.chain.module_names))) or "none"),
            ("workers", str(self.num_workers)),
            ("device", "the current GPU, or the CPU" if device is None else str(device)),
            ("epoch", f"{self.epoch}, {'not begun' if self._session is None else 'begun'}"),
        ]
        return table("gpuload.Loader", (), rows)


OPTIONS = frozenset(inspect.signature(Loader).parameters)


def apply(transforms: Any, sample: Any, *, seed: int = 0, device: Any = "cpu") -> Any:
    """Apply transforms to one sample, as a `Loader` does to the first sample of an epoch.

    Args:
        transforms: a list of transforms, or a single one.
        sample: an image (a PIL image, an H×W×C or H×W array, a C×H×W tensor, a `gpuload.Image` or an `Encoded`), or a
            sample that contains an image next to masks, boxes and keypoints, such as ``(image, gpuload.Mask(mask))``.
        seed: seed for the random draws.
        device: the device that runs the transforms.

    Returns:
        The image as a C×H×W tensor, uint8 unless a transform produces floats; a list of tensors for a `MultiView`. A
        structured sample keeps its structure and contains tensors.

    Raises:
        SampleError: the transforms cannot be applied to the sample.
        TypeError, ValueError: as for `Loader`.

    Example:
        >>> from gpuload import transforms as T
        >>> apply([T.Resize((4, 6)), T.RandomInvert(1.0)], np.zeros((8, 8, 3), np.uint8)).unique()
        tensor([255], dtype=torch.uint8)
    """
    chain = list(transforms) if isinstance(transforms, list | tuple) else [transforms]
    if isinstance(sample, np.ndarray):
        sample = Image(sample if sample.ndim == 3 else sample[..., None], layout="HWC")
    elif isinstance(sample, torch.Tensor):
        sample = Image(sample.cpu(), layout="CHW")
    options: dict[str, Any] = {"num_workers": 0, "device": device, "rank": 0, "world_size": 1}
    with Loader([sample], batch_size=None, transforms=chain, seed=seed, **options) as loader:
        return next(iter(loader))


class _Lock:
    """A reentrant lock that copies and pickles as a new lock, so that an unused Loader can be copied."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Lock, ()


# -- support for training frameworks ----------------------------------------------------------------------------------

# Framework functions that build a DataLoader from a loader's dataset, sampler and arguments, without its transforms,
# and the remedy to name in the error.
REBUILDING_FUNCTIONS: Final = {
    ("accelerate", "prepare_data_loader"): (
        "remove the call, or call accelerator.prepare(loader): a gpuload.Loader moves batches to the device and "
        "divides samples among ranks by itself"
    ),
    ("accelerate", "skip_first_batches"): (
        "remove the call: loader.load_state_dict(state), or accelerator.load_state() after "
        "accelerator.register_for_checkpointing(loader), resumes at the batch where the state was saved"
    ),
    ("lightning", "_resolve_overfit_batches"): (
        "use Trainer(limit_train_batches=…) instead of overfit_batches, and gpuload.Loader(shuffle=False), whose "
        "epochs all begin with the same samples"
    ),
}
# The public names of private functions, for messages.
PUBLIC_NAMES: Final = {"_resolve_overfit_batches": "overfit_batches"}


def _refuse_rebuilding(*, is_sequential: bool = False) -> None:
    """Raise an error if the caller's caller is a function that rebuilds a loader as a torch DataLoader. The rebuilt
    loader would silently drop the transforms. Other code reads the same attributes legitimately, so only the stack
    frame that reads the attribute, two above this one, distinguishes the cases. All these functions read `sampler`,
    except that accelerate's may read only `prefetch_factor` with an iterable dataset.

    Raises:
        TypeError: the attribute is read by such a function, except by Lightning's if the sampler `is_sequential`,
            since Lightning then keeps the loader.
    """
    caller = sys._getframe(2)
    package = str(caller.f_globals.get("__name__")).partition(".")[0].removeprefix("pytorch_")
    function = caller.f_code.co_qualname.partition(".")[0]
    remedy = REBUILDING_FUNCTIONS.get((package, function))
    if remedy is not None and not (is_sequential and function in PUBLIC_NAMES):
        raise TypeError(
            f"{PUBLIC_NAMES.get(function, function)} would replace this gpuload.Loader with a torch DataLoader, which "
            f"drops the transforms; {remedy}"
        )


class _OrderSampler:
    """This rank's part of an epoch, like a `DistributedSampler`: the value of `Loader.sampler` where gpuload decides
    the order.

    Iterating yields the indices of the full epoch that the loader's next `iter()` begins, in order. The length is the
    number of these indices, which is the same on each rank. Samples that ``drop_last=True`` drops do not count; padding
    that ``uneven="exact"`` adds does.

    Raises:
        TypeError: from iterating or `len()`, if the dataset is iterable.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, as `Loader.set_epoch` does."""
        self._loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        batches = self._shares().batches(self._loader._cursor.next_place.epoch)
        return (index for batch in batches for index in batch.indices.tolist())

    def __len__(self) -> int:
        return self._shares().samples_per_rank

    def _shares(self) -> Any:
        order = self._loader._options.order
        if order.iterable:
            raise TypeError("an iterable dataset defines its own order, so the Loader's sampler has no indices")
        return shares_of(order)

    def __repr__(self) -> str:
        return f"<sampler of {self._loader!r}>"
