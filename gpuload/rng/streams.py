"""The one register of who draws which random numbers: Philox's lanes, and the positions that no sample has.

A random number is a function of (seed, epoch, position, lane, number within the lane). Everything that draws has its
own lane or its own positions, so no two ever see the same number. The values are part of what a seed means, and never
change. Used by workers and by the main process; imports nothing.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "GENERATORS",
    "MIXED_BLOCKS",
    "MIXED_DATASETS",
    "MIXED_PERMUTATIONS",
    "MODULE",
    "ORDER",
    "SAMPLER_POSITION",
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

# Lanes, of 2**32.
TRANSFORMS: Final = range(2**31)  # a chain's transforms, counted from 0 in the order in which they are written
GENERATORS: Final = 2**31  # seeds of the global generators, for each sample
SUBSTITUTES: Final = 2**31 + 1  # which samples are tried instead of one that failed
SAMPLE_RNG: Final = 2**31 + 2  # `gpuload.sample_rng()`
SHARDS: Final = 2**31 + 3  # in which order the shards of a stream are read
SHUFFLE_BUFFER: Final = 2**31 + 4  # which sample of a stream's buffer comes next
WINDOWS: Final = 2**31 + 5  # a block shuffle: the keys of its windows
WITHIN_WINDOWS: Final = 2**31 + 6  # the order of the samples in small ones
SHORT_BLOCK: Final = 2**31 + 7  # which turn its last block has
MIXED_BLOCKS: Final = 2**31 + 8  # a `Mix`: the order of the data sets in its blocks
MIXED_DATASETS: Final = 2**31 + 9  # the keys of its data sets
MIXED_PERMUTATIONS: Final = 2**31 + 10  # of such a key: the keys of the data set's permutations
MODULE: Final = range(2**31 + 16, 2**32 - 1)  # the seed of a trailing module, for each view of the images
ORDER: Final = 2**32 - 1  # the epoch's permutation, or its draws with replacement

# Positions, in every lane.
SAMPLE_POSITIONS: Final = range(2**62)  # an epoch's samples
WORKER_INIT_POSITIONS: Final = range(2**62, 2**62 + 2**61)  # each worker's `worker_init_fn`
SAMPLER_POSITION: Final = 2**62 + 2**61  # a user's sampler
