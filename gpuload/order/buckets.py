"""The order of ``shuffle=Buckets(…)``: every batch has samples of one bucket, whose images are resized to one shape.

Unlike other orders, this one depends on the batch size and the number of ranks, because a batch never has samples of
two buckets. A bucket's samples are shuffled and cut into global batches, of which only the last can be short
(`gpuload.order.shares` divides each among the ranks). Then the batches of all buckets are shuffled. The batches of a
bucket keep their order, so its short batch is its last.

With G = ranks × batch_size, the sample in place p of the global batch of step s has the position s × G + p. So
positions are unique, a step begins at a multiple of G, and after a short batch some positions are not used. A sample
that ``uneven="pad"`` repeats keeps its position, as in other orders.

`Buckets` keeps 8 bytes for each sample in addition to its sizes, and an epoch 16 bytes for each step. This module runs
in the main process.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np

from gpuload.checks import argument, check_fields, integer, is_sequence, pair
from gpuload.order.permutation import Shuffle
from gpuload.order.shares import RankBatch, Shares
from gpuload.rng import philox
from gpuload.rng.streams import BUCKETS

__all__ = ["BucketShares", "Buckets"]

MULTIPLE_OF: Final = 64  # as in the training of Stable Diffusion XL


def _check_sizes(name: str, value: object) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, as from gpuload.image_sizes(dataset), got {array.dtype}")
    if array.ndim != 2 or array.shape[1] != 2 or not len(array):
        raise ValueError(f"{name} must have the shape (samples, 2), a height and a width each, got {array.shape}")
    if (invalid := np.flatnonzero((array < 1).any(axis=1))).size:
        raise ValueError(
            f"{name} must be heights and widths of at least 1, but sizes[{invalid[0]}] is {array[invalid[0]].tolist()}"
        )
    return array


def _check_shapes(name: str, value: Any) -> tuple[tuple[int, int], ...]:
    if not is_sequence(value) or not len(value):
        raise TypeError(f"{name} must be a list of pairs (height, width), got {value!r}")
    options: Any = {"form": "(height, width) in pixels", "entry": integer, "minimum": 1}
    return tuple(pair(f"{name}, entry {i},", shape, **options) for i, shape in enumerate(value))


@dataclass(frozen=True, slots=True, eq=False)
class Buckets:
    """A shuffle whose batches each have images for one shape, for ``Loader(…, shuffle=Buckets(…))``.

    Each sample is assigned to the shape that cuts least if its image is resized to cover the shape and then cropped
    to it. If several cut equally little, it is the shape with the least enlargement, and among these the largest.
    Samples are shuffled within each shape, and then the batches of all shapes. All samples of a batch have the same
    shape, and so have all ranks in the same step. To give the images this shape, write ``T.bucket_size`` as the size of
    a resize or crop: ``[T.ResizeKeepRatio(T.bucket_size), T.RandomCrop(T.bucket_size)]``.

    Each epoch has every sample once, and each shape has at most one short batch per epoch. ``drop_last=True`` drops
    these batches, and `uneven` says how the ranks divide them. The batches of an epoch depend on the batch size and the
    number of ranks, so a state from the middle of an epoch can be resumed only with the same ones.

    Args:
        sizes: the height and width of each sample's image, integers (N, 2), as from `image_sizes`.
        shapes: the heights and widths of the batches, such as ``[(512, 768), (640, 640), (768, 512)]``.
        max_pixels: create the shapes: for each height the largest width, and for each width the largest height, with at
            most this many pixels. Shapes that no sample is assigned to are left out.
        multiple_of: the heights and widths of these shapes are multiples of this. Default: 64.

    Attributes:
        shapes: the (height, width) of each bucket.

    Raises:
        TypeError, ValueError: `sizes` are not (N, 2) positive integers; `shapes` are not pairs; there are both
            `shapes` and `max_pixels`, or neither.

    Example:
        >>> buckets = Buckets([(480, 640), (640, 480), (300, 410), (500, 500)], max_pixels=512 * 512)
        >>> buckets.shapes
        ((448, 576), (512, 512), (576, 448))
    """

    sizes: Any = argument(_check_sizes)
    shapes: Sequence[tuple[int, int]] = argument(_check_shapes, default=None, kw_only=True)
    max_pixels: int | None = argument(integer, default=None, kw_only=True, minimum=1)
    multiple_of: int | None = argument(integer, default=None, kw_only=True, minimum=1)
    _members: tuple[np.ndarray, ...] = field(default=(), init=False)  # the indices of the samples of each shape
    _checksum: int = field(default=0, init=False)  # differs for other shapes or members

    def __post_init__(self) -> None:
        check_fields(self, "Buckets")
        if (self.shapes is None) == (self.max_pixels is None):
            problem = "neither" if self.shapes is None else "both"
            raise ValueError(f"Buckets() takes either shapes= or max_pixels=, got {problem}; pass one of them")
        if self.max_pixels is None:
            if self.multiple_of is not None:
                raise ValueError(
                    f"Buckets(multiple_of={self.multiple_of}) applies to the shapes that max_pixels= creates, not to "
                    "shapes=; leave it out"
                )
            bucket_of_sample = _nearest_shapes(self.sizes, np.array(self.shapes))
        else:
            candidates = _candidate_shapes(self.max_pixels, self.multiple_of or MULTIPLE_OF)
            used, bucket_of_sample = np.unique(_nearest_shapes(self.sizes, candidates), return_inverse=True)
            object.__setattr__(self, "shapes", tuple(map(tuple, candidates[used].tolist())))
        checksum = zlib.crc32(bucket_of_sample.astype("<i8").tobytes(), zlib.crc32(repr(self.shapes).encode()))
        object.__setattr__(self, "_checksum", checksum)
        order = np.argsort(bucket_of_sample, kind="stable")
        counts = np.bincount(bucket_of_sample, minlength=len(self.shapes))
        object.__setattr__(self, "_members", tuple(np.split(order, np.cumsum(counts)[:-1])))

    def __repr__(self) -> str:
        return f"Buckets({len(self.sizes)} sizes in {len(self.shapes)} shapes)"


def _candidate_shapes(max_pixels: int, multiple_of: int) -> np.ndarray:
    """Return (shapes, 2) sides, multiples of `multiple_of`: for each height the largest width, and for each width the
    largest height, with at most `max_pixels` pixels."""
    units = max_pixels // multiple_of**2
    if not units:
        raise ValueError(
            f"Buckets(max_pixels=…) must be at least multiple_of² = {multiple_of**2}, got {max_pixels}: there is no "
            "smaller shape"
        )
    short_sides = np.arange(1, units + 1)
    shapes = np.stack([short_sides, units // short_sides], axis=1)
    return np.unique(np.concatenate([shapes, shapes[:, ::-1]]), axis=0) * multiple_of


def _nearest_shapes(sizes: np.ndarray, shapes: np.ndarray) -> np.ndarray:
    """Return the index of each image's shape, as `Buckets` describes.

    The closer the ratio of the sides is to the image's, the less is cut. So only the shapes with the next smaller and
    the next larger ratio are compared.
    """
    # As complex numbers, sizes are compared twenty times as fast as with `axis=0`.
    unique_sizes, size_of_sample = np.unique(sizes @ np.array([1, 1j]), return_inverse=True)
    heights, widths = np.real(unique_sizes), np.imag(unique_sizes)
    ratios = shapes[:, 0] / shapes[:, 1]
    order = np.argsort(ratios, kind="stable")
    unique_ratios, starts, counts = np.unique(ratios[order], return_index=True, return_counts=True)
    next_larger = np.searchsorted(unique_ratios, heights / widths)
    groups = np.stack([np.minimum(next_larger, len(unique_ratios) - 1), np.maximum(next_larger - 1, 0)])[:, None]
    # The candidates for each size, (candidates, sizes). Of equally good ones, the last is chosen, so the first shapes
    # come last.
    candidates = order[starts[groups] + np.minimum(np.arange(counts.max())[::-1, None], counts[groups] - 1)]
    candidates = candidates.reshape(-1, len(heights))
    shape_heights, shape_widths = shapes[candidates].transpose(2, 0, 1)
    # The part that remains is a quotient of products. Below 2**53 they are exact, so that equal parts are equal floats.
    products = np.stack([heights * shape_widths, widths * shape_heights])
    part = products.min(axis=0) / products.max(axis=0)
    enlargement = np.maximum(1.0, np.maximum(shape_heights / heights, shape_widths / widths))
    best = np.lexsort((shape_heights * shape_widths, -enlargement, part), axis=0)[-1:]
    return np.take_along_axis(candidates, best, axis=0)[0][size_of_sample]


def _order_members(members: np.ndarray, bucket: int, key: philox.Key) -> Callable[[np.ndarray], np.ndarray]:
    """Return the order of a bucket's samples in the epoch with this key."""
    shuffle = Shuffle(len(members), _derive_key(key, 1 + bucket))
    return lambda positions: members[shuffle(positions)]


def _derive_key(key: philox.Key, number: int) -> philox.Key:
    """Derive a key from an epoch's key: number 0 for the order of batches, 1 + b for the order of bucket b."""
    return philox.Key(*philox.words(key, np.array([number]), BUCKETS, 2)[0].tolist())


class BucketShares:
    """The distribution of the batches of all buckets among the ranks, with the interface of `Shares`.

    Args:
        buckets: the buckets.
        **options: the options of `Shares` that do not define an order.

    Attributes:
        global_batch_size: the number of samples of all ranks in a full step.
        samples: the number of positions in an epoch, including those that are not used.
        name: a name that identifies the order: equal names and seeds mean equal orders for equal options.
    """

    def __init__(self, buckets: Buckets, **options: Any) -> None:
        self._buckets = buckets
        self._options = Shares(samples=len(buckets.sizes), **options)
        self.global_batch_size = self._options.global_batch_size
        self.name = f"buckets-{buckets._checksum:08x}"
        self._shares = [
            replace(self._options, samples=len(members), order=partial(_order_members, members, bucket))
            for bucket, members in enumerate(buckets._members)
        ]
        self._steps = [shares.steps() for shares in self._shares]
        self.samples = sum(self._steps) * self.global_batch_size

    @property
    def division(self) -> str:
        """The options that the batches of an epoch depend on, in addition to the buckets and the seed."""
        return self._options.describe_division()

    @property
    def samples_per_rank(self) -> int:
        """The number of samples of each rank in an epoch."""
        return sum(shares.samples_per_rank for shares in self._shares)

    def steps(self, start: int = 0) -> int:
        """Return the number of batches from position `start` to the end of an epoch, which is the same on every
        rank."""
        return max(0, self.samples - start) // self.global_batch_size

    @property
    def unused_samples(self) -> int:
        """The number of samples that are in no epoch, since their bucket has no batch."""
        return sum(shares.samples for shares, steps in zip(self._shares, self._steps, strict=True) if not steps)

    def describe(self) -> str:
        """Describe the batches of an epoch, and how many samples it leaves out or repeats."""
        ranks = self._options.world_size
        surpluses = [ranks * shares.samples_per_rank - shares.samples for shares in self._shares]
        left_out, added = sum(max(0, -surplus) for surplus in surpluses), sum(max(0, surplus) for surplus in surpluses)
        return (
            f"{sum(self._steps):,} batches in {len(self._shares)} buckets; an epoch leaves out {left_out:,} of "
            f"{self._options.samples:,} samples, and has {added:,} padding or repeated samples"
        )

    def batches(self, epoch: int, start: int = 0) -> Iterator[RankBatch]:
        """Yield this rank's batches of an epoch, starting at position `start`, a multiple of the global batch size."""
        buckets, steps = self._schedule(epoch)
        iterators: dict[int, Iterator[RankBatch]] = {}
        for step in range(start // self.global_batch_size, len(buckets)):
            bucket = int(buckets[step])
            if bucket not in iterators:
                number = int(np.searchsorted(steps[bucket], step))
                iterators[bucket] = self._shares[bucket].batches(epoch, number * self.global_batch_size)
            yield self._place(next(iterators[bucket]), bucket, steps[bucket])

    def group_at(self, epoch: int, position: int) -> RankBatch:
        """Return the group of neighbouring samples that contains a position.

        Raises:
            ValueError: the epoch has no sample at this position.
        """
        (buckets, steps), (step, place) = self._schedule(epoch), divmod(position, self.global_batch_size)
        bucket = int(buckets[step])
        bucket_position = int(np.searchsorted(steps[bucket], step)) * self.global_batch_size + place
        if bucket_position >= len(self._buckets._members[bucket]):
            raise ValueError(
                f"epoch {epoch} has no sample at position {position}, since the batch of step {step} is short; take a "
                "position from BatchInfo.positions or ErrorRecord.position"
            )
        return self._place(self._shares[bucket].group_at(epoch, bucket_position), bucket, steps[bucket])

    def _place(self, batch: RankBatch, bucket: int, steps: np.ndarray) -> RankBatch:
        """Return a batch of a bucket, whose batches come in these steps, with its positions in the epoch and the
        bucket's shape."""
        numbers, places = np.divmod(batch.positions, self.global_batch_size)
        return batch._replace(
            positions=steps[numbers] * self.global_batch_size + places, size_hw=self._buckets.shapes[bucket]
        )

    def _schedule(self, epoch: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return the bucket of each step, and for each bucket the steps of its batches."""
        bucket_of_batch = np.repeat(np.arange(len(self._steps)), self._steps)
        key = _derive_key(philox.epoch_key(self._options.seed, epoch), 0)
        buckets = bucket_of_batch[Shuffle(len(bucket_of_batch), key)(np.arange(len(bucket_of_batch)))]
        return buckets, np.split(np.argsort(buckets, kind="stable"), np.cumsum(self._steps)[:-1])
