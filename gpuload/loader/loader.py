"""`Loader`: the main interface. Checks its arguments, wires the parts together, iterates.

Runs in the main process, in the thread that iterates; it starts no thread. The first `iter()` makes a *session*: the
ring, the worker processes, the transfer and the compiled stage, which last until `close()`, the Loader's garbage
collection or the interpreter's exit. An epoch's iterator holds no resources of its own.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from reprlib import Repr
from types import GenericAlias
from typing import Any, Final, Literal

import numpy as np
import torch
from torch.utils.data import SequentialSampler

from gpuload.batches.assemble import BatchInfo
from gpuload.datasets.sample import Image
from gpuload.decode import Decode
from gpuload.loader import log
from gpuload.loader.autotune import autotune_for
from gpuload.loader.device_cache import cached_samples, describe_cache
from gpuload.loader.epoch import Cursor, Epoch, Progress
from gpuload.loader.meter import Span
from gpuload.loader.options import Options, loader_arguments
from gpuload.loader.replay import Replay, replay
from gpuload.loader.session import NEWER, Session
from gpuload.loader.state import State, for_workers, with_states
from gpuload.loader.stats import Stats
from gpuload.order.blocks import BlockShuffle
from gpuload.order.options import check_integer
from gpuload.order.place import Place
from gpuload.order.schedule import Schedule, check_begin, order_name, remarks_on, schedule_of, shares_of, steps_of
from gpuload.order.shares import Uneven
from gpuload.ring.ring import on_collected
from gpuload.stage import Plan
from gpuload.stage.plan import LONGEST, shortened, table
from gpuload.transforms import Chain, Compose
from gpuload.workers.faults import ErrorLog, Faults, OnError
from gpuload.workers.ray import RayWorkers
from gpuload.workers.signals import deferred_signals
from gpuload.workers.source import pickled_state

__all__ = ["BatchInfo", "Loader", "apply"]

DEFAULT_RING_BYTES = 2 << 30
logger = logging.getLogger("gpuload.loader")


class Loader:
    """Iterate over a dataset in augmented batches that are on the device.

    Args:
        dataset: a map-style dataset: ``dataset[i]`` gives a sample, ``len(dataset)`` their number; or an iterable one
            (torch's `IterableDataset`, or with ``__iter__`` alone). A sample is a nested tuple, list, dict or
            dataclass; its images are `Encoded` (the fast way), `Image` or PIL images; a clip is a list of these, or an
            `Image` of T×H×W×C. Plain arrays are data, or for `transforms` the image where no other leaf may be it.
        batch_size: samples in a batch, on each rank; None means samples one by one, their arrays as tensors. Even with
            MixUp and CutMix.
        shuffle: a new order each epoch, a function of `seed` and the epoch's number. ``"block"``, or a `BlockShuffle`:
            neighbours come at about the same time, for media where reading them together is much cheaper.
        sampler: gives the keys of an epoch's samples, instead of gpuload's order; it is not shared out over ranks.
        batch_sampler: gives lists of keys, a batch each.
        collate_fn: makes a batch of a list of samples (of one sample, with ``batch_size=None``). Samples without images
            are collated in the worker if there are no transforms; others here, with finished images as C×H×W tensors on
            the device. Default: the dataset's ``_get_collate_fn()`` if it has one, else as `default_collate`.
        pin_memory: page-lock batches that stay on the CPU (`device`), and call ``pin_memory()`` of a `collate_fn`'s own
            batch types, if there is CUDA. Memory that goes to a GPU is always page-locked.
        drop_last: leave out the last batch if it is smaller than `batch_size`.
        worker_init_fn: called in each worker, and again in one that was restarted, with its number, before its first
            sample. `iter()` waits for it, and raises a `WorkerError` if it fails.
        generator: a `torch.Generator` whose initial seed is used as `seed`; nothing is drawn from it.
        multiprocessing_context: without effect: this process is never forked, and ``"fork"`` is warned of.
        persistent_workers: False ends the workers with each epoch, so that the next one sees changes of the dataset
            made here; default: they stay.
        in_order: False: batches of an iterable dataset come as workers have them ready, and a slow worker holds up no
            other; a state stays exact. Those of a map dataset always come in order, and no worker waits for that.
        transforms: `gpuload.transforms`, in order, as a list or a `Compose`; a `torch.nn.Module` may come last and gets
            the whole batch.
        num_workers: processes that read and decode; 0: the same work in this process. Default: the CPUs that this
            process may use, less one for each rank of this machine, shared among the ranks, at least 1; 0 for an
            iterable dataset. A warning if more than these CPUs, and more than 8. ``"auto"``: as many as are of use,
            found out while it runs.
        workers: a `RayWorkers`: workers on other machines, in the place of processes on this one.
        prefetch_factor: batches in work besides the one in use (for an iterable dataset, for each worker); default 2.
            ``"auto"``: more while the loop waits for single slow samples, and that helps.
        device: where the batches go: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"xpu"``, the number of a GPU, or a
            `torch.device`. Default: the current GPU, or the CPU if there is none.
        dtype: of float images, ``"float32"``, ``"float16"`` or ``"bfloat16"``, or a torch dtype; default: that of a
            `ToDtype`, else float32. Without `Normalize` and `ToDtype` images stay uint8.
        memory_format: of batches of images, ``"contiguous_format"`` or ``"channels_last"``, or torch's; not of data.
        ragged: what to do if the images of a batch end with different sizes: ``"error"``, ``"list"`` of tensors, or
            ``"pad"`` with zeros at the bottom and right, giving ``(images, sizes)`` with int64 (N, 2) heights and
            widths. On the CPU, images of a list that no transform changes are C×H×W views of memory H×W×C.
        pad_to: with ``ragged="pad"``, the height and width of a padded batch, and of the masks padded with it, are
            multiples of this, such as 32 for detection networks. Default: those of the largest image.
        seed: 0 ≤ seed < 2**64; the order and every random draw are a function of it. Default 0.
        rank, world_size: of this process, among those that share out each epoch. Default: from ``torch.distributed`` if
            it is up at `iter()`, else torchrun's environment, else 0 of 1.
        uneven: what to do with an epoch's last samples if they are too few for whole batches on all ranks: ``"pad"``
            goes on with the epoch's first ones up to a multiple of the ranks, ``"drop"`` cuts to a multiple,
            ``"exact"`` (for evaluation; needs ``info=True``) counts each once and fills up with rows whose
            `BatchInfo.valid` is False. With ``drop_last=True`` they are left out. With MixUp, CutMix or CopyPaste each
            of several ranks has an even number of them, with Mosaic a multiple of 4.
        weights: one for each sample: draw with replacement, with probabilities in proportion to them.
        repeats: how many times in a row each sample comes, each time with other draws and on another rank ("repeated
            augmentation"); an epoch keeps its length, with fewer samples. MixUp and CutMix mix none with itself.
        decode: a `Decode` with options of decoding.
        timeout: seconds after which a worker that is still at one sample is killed and restarted; 0: never.
        on_error: what to do with a sample that fails: ``"raise"`` (default) a `SampleError`, ``"skip"`` it, or
            ``"replace"`` it by another one; short for ``faults=Faults(on_error=…)``.
        faults: a `Faults` with all options of this kind.
        backend: what runs the transforms: ``"torch"``, ``"kornia"``, ``"dali"`` or ``"fused"``, with torch for what
            another one lacks; ``"auto"`` is ``"fused"`` on a GPU and ``"torch"`` on the CPU. `plan` shows it.
        info: give ``(batch, BatchInfo)``.
        chunk_size: the most samples that a worker does at a time, which changes no batch; default: its share, 8 to 64.
        ring_bytes: the most shared memory for decoded pixels on their way; default 2 GiB.
        affinity: ``"auto"``: where there are several NUMA nodes, workers run on the CPUs of the GPU's, if these are
            enough, and decoded pixels lie in its memory; ``"none"``: anywhere. `plan` says what is done.

    Raises:
        ValueError, TypeError: an argument is wrong; the message says what was expected.
        RuntimeError: worker processes cannot be started on this platform.
        LimitError: more workers than open files or processes allow.

    While iterating: `SampleError` names a sample that could not be loaded, `TooManyErrors` says that more were skipped
    or replaced than `Faults` allows, `CollateError` names two samples that do not fit into one batch, `WorkerError`
    says that workers cannot start or died too often, `LimitError` that memory or open files are not enough.

    Attributes:
        errors: the samples that failed so far: a sequence of `ErrorRecord`, each with epoch, position, index, source,
            cause, traceback and ``replaced_by``.

    Example:
        >>> import numpy as np
        >>> from gpuload import transforms as T
        >>> pictures = [(np.full((40, 60, 3), i, np.uint8), i) for i in range(10)]
        >>> loader = Loader(pictures, batch_size=4, transforms=[T.CenterCrop(32)], num_workers=0, device="cpu")
        >>> [tuple(images.shape) for images, labels in loader]
        [(4, 3, 32, 32), (4, 3, 32, 32), (2, 3, 32, 32)]
    """

    # Its arguments; none of these can be set later.
    dataset: Any
    batch_size: int | None
    shuffle: bool | BlockShuffle
    batch_sampler: Any
    collate_fn: Callable[[Any], Any] | None
    pin_memory: bool
    drop_last: bool
    persistent_workers: bool
    generator: torch.Generator | None
    timeout: float
    worker_init_fn: Callable[[int], Any] | None
    multiprocessing_context: Any
    in_order: bool
    info: bool

    @loader_arguments
    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | Literal["block"] | BlockShuffle | None = False,
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
        self._ended: Span | None = None  # the last session that was closed
        options.check_machine()
        check_begin(options.order)
        for remark in options.workers.remarks():
            warnings.warn(remark, RuntimeWarning, stacklevel=3)  # past `loader_arguments`
        self._starting = _Lock()  # one thread at a time begins an epoch, and so starts workers
        self._ready = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OPTIONS and getattr(self, "_ready", False):
            raise ValueError(f"{name} cannot be changed once the Loader is made; make another Loader")
        super().__setattr__(name, value)

    __class_getitem__ = classmethod(GenericAlias)

    def __len__(self) -> int:
        """Batches in a whole epoch, the same on each rank; TypeError if the dataset or sampler has no length."""
        return steps_of(self._options.order)

    @property
    def transforms(self) -> Chain:
        """The transforms, as a sequence."""
        return self._options.chain

    @property
    def device(self) -> torch.device:
        """Where the batches go; before the first `iter()`, if `device` was not given, where they would."""
        return self._options.resolve_device() if self._session is None else self._session.stage.device

    @property
    def num_workers(self) -> int:
        """How many workers there are to be; with ``"auto"`` at this moment."""
        return self._options.workers.count if self._autotune is None else self._autotune.setting.workers

    @property
    def prefetch_factor(self) -> int:
        """How many batches ahead were asked for, or chosen; with ``"auto"`` the number of this moment."""
        _refuse_rebuilding()
        return self._options.workers.prefetch if self._autotune is None else self._autotune.setting.ahead

    @property
    def sampler(self) -> Any:
        """The sampler that was given, or that of the `batch_sampler`. Else an object that stands for gpuload's own
        order: it has ``set_epoch(epoch)``, its length is the number of samples of this rank, and iterating gives their
        indices in the epoch that the next `iter()` begins."""
        order = self._options.order
        if order.batch_sampler is not None:
            sampler = getattr(order.batch_sampler, "sampler", None)
        else:
            sampler = _OwnSampler(self) if order.sampler is None else order.sampler
        _refuse_rebuilding(is_sequential=isinstance(sampler, SequentialSampler))
        return sampler

    @property
    def epoch(self) -> int:
        """The number of the epoch that the last `iter()` began; before the first one, the number it will have."""
        return self._cursor.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch that the next `iter()` begins, also by the ``set_epoch()`` of the dataset (here
        and in the workers) and of the sampler, if they have one.

        If `load_state_dict` went to a place in that epoch, the place is kept: a training loop may call this before each
        epoch, even the first one after resuming.

        Raises:
            ValueError: `epoch` is negative.
        """
        epoch = check_integer("epoch", epoch, 0, 2**63 - 1)
        order, inner = self._options.order, getattr(self.batch_sampler, "sampler", None)
        if (session := self._session) is not None:
            session.note_changes()
        for other in (self.dataset, order.sampler, self.batch_sampler, inner):
            if callable(set_epoch := getattr(other, "set_epoch", None)):
                set_epoch(epoch)
        if session is not None:
            session.changes.skip()  # workers call the dataset's set_epoch() themselves
        self._cursor = self._cursor.set_epoch(epoch, running=session is not None)

    def state_dict(self) -> dict[str, Any]:
        """Where this loader is, as a small dict that JSON can hold: after the batches that it gave, not those that it
        prefetched; after `load_state_dict`, what was loaded, until the next `iter()`. It is the same on every rank, and
        any number of ranks and workers can go on from it.

        It also holds a sampler's own ``state_dict()``, and for an iterable dataset an entry for each worker, so that
        the same number of workers has to go on. These may hold numbers, strings, bytes, arrays, tensors on the CPU, and
        tuples, lists, sets and dicts of these.

        Raises:
            TypeError: the own state of the sampler or dataset holds what a state does not keep; the message says where.
        """
        place = self._cursor.place
        if self._reads_itself and not place.iterable and self._cursor.is_untouched:
            # The dataset may be its own iterator, and nobody else puts it back to its beginning.
            dataset_state = pickled_state(self.dataset, "dataset")
            if isinstance(dataset_state, bytes):  # some have a state only once they are iterated over
                place = with_states(place, 0, {"dataset": dataset_state})
        return self._state(place).to_dict()

    @property
    def _reads_itself(self) -> bool:
        """Whether this process itself iterates over an iterable dataset."""
        return self._options.order.iterable and not self.num_workers

    def load_state_dict(self, state: dict[str, Any], *, strict: bool = True) -> None:
        """Go on from a state: the next `iter()` gives the rest of its epoch.

        Args:
            state: from `state_dict`.
            strict: refuse a state of a loader with another dataset length, seed, order or other transforms; False: go
                on with a warning.

        Raises:
            TypeError, ValueError: the state is not valid, or of another loader.
        """
        (loaded := State.from_dict(state)).check(self._state(Place(0, 0)), strict=strict)
        place = for_workers(loaded.place, self.num_workers)
        if self._cursor.is_open:
            text = "an epoch is open: it goes on as it was, and the next iter() takes the state up"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        if (session := self._session) is not None:
            # Workers have advanced their copies of the dataset, and only new ones have it as it was at the beginning.
            keeps_state = self._options.order.iterable and callable(getattr(self.dataset, "state_dict", None))
            session.outdated = keeps_state and place.iterable is None
        self._cursor = self._cursor.go_to(place, running=session is not None, loaded=True)
        log.state_loaded(loaded)

    def _state(self, place: Place) -> State:
        options = self._options
        return State(
            place=place,
            samples=options.order.samples,
            seed=options.order.seed,
            order=order_name(options.order),
            # Turned images have other sizes, so other draws.
            transforms=options.chain.fingerprint() + ("-exif" if options.workers.decode.exif else ""),
        )

    def plan(self) -> Plan:
        """Return which backend runs which transform here and now, and near which GPU workers are:
        ``print(loader.plan())``.

        Raises:
            BackendError: the backend that was asked for cannot be used here.

        Example:
            >>> from gpuload import transforms as T
            >>> loader = Loader(["a.jpg"], transforms=[T.Resize(224), T.RandomInvert()], backend="kornia", device="cpu")
            >>> print(loader.plan())
            backend kornia on cpu
              Resize(size=224)  torch   Kornia's resize differs by up to 87 levels from Pillow's
              RandomInvert()    kornia
        """
        return replace(self._options.plan(), samples=describe_cache(self._options))

    def stats(self, since: Stats | None = None) -> Stats:
        """Return what loading took since the epoch began: ``print(loader.stats())`` names the bottleneck, and what to
        do.

        May be called at any time, from any thread; it waits for nothing. After `close`, it is what was until then.

        Args:
            since: an earlier snapshot: count from there. One from before a `close` counts as what followed's begin.
        """
        if since is not None and not isinstance(since, Stats):
            raise TypeError(f"since must be what stats() gave before, got {type(since).__name__}: {since!r}")
        span = self._ended if (session := self._session) is None else session.meter.span()
        return Stats(epoch=self.epoch) if span is None else span.stats(since, self.epoch)

    def replay(self, epoch: int, position: int, index: Any = None) -> Replay:
        """Make one augmented sample again, with the values drawn for it: for the day a loss is NaN.

        It is read, decoded and transformed in this process; so are its partners, if MixUp, CutMix, Mosaic or CopyPaste
        put it together with some. (With a sampler these are not known, and it is made as if it had none.)

        Args:
            epoch: its epoch.
            position: its position in the epoch's order, from `BatchInfo.positions` or `ErrorRecord.position`.
            index: its index in the dataset; needed with a sampler, from `BatchInfo.indices`.

        Raises:
            ValueError: there is no such position, or the index is missing.
            TypeError: an iterable dataset, which cannot give a sample again.
            SampleError: it cannot be loaded.
        """
        return replay(self._options, epoch, position, index)

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch, and end an earlier one that is not exhausted; one from which nothing was taken does not
        count. ValueError if the dataset has too few samples for a batch on each of the ranks there are now.
        """
        check_begin(self._options.order)
        options = self._options
        schedule = schedule_of(options.order, self.num_workers)
        for remark in remarks_on(options.order, self.num_workers):
            warnings.warn(remark, RuntimeWarning, stacklevel=2)
        progress = self._cursor.start(schedule)
        options.chain.at(progress.start.epoch)  # a size that cannot be is an error here, not in every sample
        with self._starting:
            return self._begin(schedule, progress)

    def _begin(self, schedule: Schedule, progress: Progress) -> Iterator[Any]:
        """Begin an epoch, in a session that was begun before or now."""
        options = self._options
        if self._session is not None:
            self._session.check_process()
            if self._session.usable:
                self._session.note_changes()
            else:  # the last epoch ended with a WorkerError or a ctrl-C, or the dataset has to be sent again
                self._cursor.end(NEWER)
                self.close()
        if self._session is None:
            cached = cached_samples(options)
            with deferred_signals():  # nothing is started and then forgotten
                self._session = Session(options, self.errors, progress.start.epoch, self._autotune, cached)
                self._forget = on_collected(self, self._session.ending())
        self._cursor.end(NEWER)
        iterator = Epoch(self, self._session, schedule, progress, self._cursor.epoch_sent)
        self._cursor = self._cursor.begin(progress)
        if self._reads_itself and (begin := self._session.where_it_begins()):
            # As DataLoader does; in workers it is with the first batch.
            progress.place = with_states(progress.place, begin.samples, begin.state)
        return iterator

    def close(self) -> None:
        """End the worker processes and free the shared memory. The next `iter()` starts new ones. Idempotent."""
        with deferred_signals():  # a ctrl-C has to wait until all is closed
            self._close()

    def _close(self) -> None:
        self._cursor.end("its Loader was closed")
        if (session := self._session) is not None:
            try:
                self._ended = self._ended if session.steps.in_forked_child else session.meter.span()
            finally:
                session.close()
                self._forget()
                del self._forget  # with what it would have ended
        self._session = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        with deferred_signals(drop_sigint=kind is KeyboardInterrupt):  # a second ctrl-C is ignored
            self._close()

    def __repr__(self) -> str:
        options = self._options
        return (
            f"Loader({self.dataset!r}, batch_size={self.batch_size}, shuffle={self.shuffle}, "
            f"transforms={list(options.chain.transforms)!r}, num_workers={self.num_workers}, seed={options.order.seed})"
        )

    def _repr_html_(self) -> str:
        """The options that matter, and where it stands. Starts nothing, and asks no device."""
        options = self._options
        device = options.stage.device if self._session is None else self._session.stage.device
        samples = options.order.samples
        transforms = " → ".join(repr(transform) for transform in options.chain.transforms)
        short = Repr()
        short.maxother = short.maxstring = LONGEST
        rows = [
            ("dataset", shortened(short.repr(self.dataset))),
            ("samples", "not known" if samples is None else f"{samples:,}"),
            ("batch_size", str(self.batch_size)),
            ("shuffle, seed", f"{self.shuffle}, {options.order.seed}"),
            ("transforms", " → ".join(filter(None, (transforms, options.chain.last))) or "none"),
            ("workers", str(self.num_workers)),
            ("device", "the current GPU, or the CPU" if device is None else str(device)),
            ("epoch", f"{self.epoch}, {'not begun' if self._session is None else 'begun'}"),
        ]
        return table("gpuload.Loader", (), rows)


# The arguments that are public attributes.
OPTIONS = frozenset((*Loader.__annotations__, "device", "num_workers", "prefetch_factor", "sampler", "transforms"))


def apply(transforms: Any, sample: Any, *, seed: int = 0, device: Any = "cpu") -> Any:
    """Apply transforms to one sample, as a `Loader` does to the first of an epoch.

    Args:
        transforms: a list of them, or one.
        sample: an image: Pillow's, an array H×W×C or H×W, a tensor C×H×W, `gpuload.Image` or `Encoded`. Or a sample
            with one in it, beside masks, boxes and keypoints: ``(image, gpuload.Mask(mask))``.
        seed: of the draws.
        device: where they are applied.

    Returns:
        The image as a tensor C×H×W, uint8 unless a transform makes floats; a list of them for a `MultiView`. A sample
        comes back as it was, with tensors in it.

    Raises:
        SampleError: there is something that no transform can be applied to.
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
    with Loader([sample], batch_size=None, transforms=chain, seed=seed, num_workers=0, device=device) as loader:
        return next(iter(loader))


class _Lock:
    """A reentrant lock; a copy of it, as one of a Loader that was never iterated, is a new one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Lock, ()


# -- what frameworks ask for ------------------------------------------------------------------------------------------

# Functions of frameworks that make a DataLoader of a loader's dataset, sampler and arguments, without its transforms.
REBUILDING: Final = {
    ("accelerate", "prepare_data_loader"): (
        "leave the call out, or call accelerator.prepare(loader): a gpuload.Loader puts batches on the device and "
        "divides samples among ranks by itself"
    ),
    ("accelerate", "skip_first_batches"): (
        "leave the call out: loader.load_state_dict(state), or accelerator.load_state() after "
        "accelerator.register_for_checkpointing(loader), goes on at the batch where the state was saved"
    ),
    ("lightning", "_resolve_overfit_batches"): (
        "write Trainer(limit_train_batches=…) in place of overfit_batches, and gpuload.Loader(shuffle=False), whose "
        "epochs all begin with the same samples"
    ),
}
CALLED: Final = {"_resolve_overfit_batches": "overfit_batches"}


def _refuse_rebuilding(*, is_sequential: bool = False) -> None:
    """Refuse to be asked for an attribute by a function that makes a DataLoader of a loader: its batches would come
    without the transforms, and nothing would tell. Only the frame that reads the attribute, two above this one, shows
    it, since other code reads the same attributes. All such functions read `sampler`; but with an iterable dataset,
    accelerate's may read `prefetch_factor` alone.

    Raises:
        TypeError: such a function asks; not Lightning's if the sampler `is_sequential`, since it leaves the loader as
            it is then.
    """
    caller = sys._getframe(2)
    package = str(caller.f_globals.get("__name__")).partition(".")[0].removeprefix("pytorch_")
    function = caller.f_code.co_qualname.partition(".")[0]
    instead = REBUILDING.get((package, function))
    if instead is not None and not (is_sequential and function in CALLED):
        raise TypeError(
            f"{CALLED.get(function, function)} makes a torch DataLoader of a loader, and a gpuload.Loader is none: its "
            f"batches would come without the transforms; {instead}"
        )


class _OwnSampler:
    """The part of an epoch that this rank gets, as a `DistributedSampler` gives it: what a `Loader` has in place of a
    DataLoader's sampler, where gpuload itself decides the order.

    Iterating gives the indices of the whole epoch that the next `iter()` of the loader begins, in their order; its
    length is their number, the same on each rank. With ``drop_last=True`` those that are left out do not count; with
    ``uneven="exact"`` rows that only fill up do.

    Raises:
        TypeError: when it is asked for one of these, with an iterable dataset.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, as `Loader.set_epoch` does."""
        self._loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        batches = self._shares().batches(self._loader._cursor.next.epoch)
        return (index for rows in batches for index in rows.indices.tolist())

    def __len__(self) -> int:
        return self._shares().rows

    def _shares(self) -> Any:
        order = self._loader._options.order
        if order.iterable:
            raise TypeError("an iterable dataset defines its own order, so the Loader's sampler has no indices")
        return shares_of(order)

    def __repr__(self) -> str:
        return f"<sampler of {self._loader!r}>"
