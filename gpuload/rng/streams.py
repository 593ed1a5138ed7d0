"""The registry of all random streams: Philox lanes, and positions that do not belong to samples.

A random number is a function of (seed, epoch, position, lane, index within the lane). Each consumer has its own lane or
range of positions, so no two consumers share a random number. The constants below must never change, or a seed would no
longer reproduce the same numbers. Workers and the main process use this module.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "BATCHES",
    "BUCKETS",
    "DRAWS",
    "GENERATORS",
    "MIXED_BLOCKS",
    "MIXED_DATASETS",
    "MIXED_PERMUTATIONS",
    "MODULE",
    "ORDER",
    "SAMPLER_POSITIONS",
    "SAMPLE_POSITIONS",
    "SAMPLE_RNG",
    "SHARDS",
    "SHORT_BLOCK",
    "SHUFFLE_BUFFER",
    "SUBSTITUTES",
    "TRANSFORMS",
    "WINDOWS",
    "WITHIN_WINDOWS",
    "WORKER_INIT_POSITIONS",
]

# Lanes, out of 2**32.
TRANSFORMS: Final = range(2**31)  # the transforms of a chain, numbered from 0 in written order
DRAWS: Final = range(0, 2**31, 2**16)  # added to the lanes of transforms and modules for images with ``draws=k``
GENERATORS: Final = 2**31  # the seeds of the global generators, per sample
SUBSTITUTES: Final = 2**31 + 1  # which samples to try in place of a failed sample
SAMPLE_RNG: Final = 2**31 + 2  # `gpuload.sample_rng()`
SHARDS: Final = 2**31 + 3  # the order in which the shards of a stream are read
SHUFFLE_BUFFER: Final = 2**31 + 4  # which sample of a stream's shuffle buffer comes next
WINDOWS: Final = 2**31 + 5  # block shuffle: the keys of the windows
WITHIN_WINDOWS: Final = 2**31 + 6  # block shuffle: the order of the samples in small windows
SHORT_BLOCK: Final = 2**31 + 7  # block shuffle: the position of the short last block in the order
MIXED_BLOCKS: Final = 2**31 + 8  # `Mix`: the order of the datasets in the blocks
MIXED_DATASETS: Final = 2**31 + 9  # `Mix`: the keys of the datasets
MIXED_PERMUTATIONS: Final = 2**31 + 10  # `Mix`: derives the keys of a dataset's permutations from the dataset's key
BUCKETS: Final = 2**31 + 11  # `Buckets`: the keys of the order of batches, and of the samples of each bucket
BATCHES: Final = 2**31 + 12  # `by_batch`: the value of each batch, whose position is its number in the epoch
MODULE: Final = range(2**31 + 16, 2**32 - 1)  # the seed of the last module of a chain, one lane per view
ORDER: Final = 2**32 - 1  # the epoch's permutation, or its sampling with replacement

# Positions, in every lane.
SAMPLE_POSITIONS: Final = range(2**62)  # an epoch's samples
WORKER_INIT_POSITIONS: Final = range(2**62, 2**62 + 2**61)  # one for the `worker_init_fn` of each worker
SAMPLER_POSITIONS: Final = range(2**62 + 2**61, 2**62 + 2**61 + 2**32)  # for a user's sampler, one per rank
