"""Who draws which random numbers: the one register of Philox's lanes and of the positions that no sample has.

A random number is a function of (seed, epoch, position, lane, number within the lane). Whoever draws has a lane of its
own, or positions of its own: then no two ever see the same number. The values are part of what a seed means, and never
change. (The file keeps its name from the plan of the house; the word for Philox is *lane*, a stream is CUDA's.)

Used by workers and by the main process; imports nothing.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "GENERATORS",
    "MODULE",
    "ORDER",
    "SAMPLER_POSITION",
    "SAMPLE_POSITIONS",
    "SAMPLE_RNG",
    "SUBSTITUTES",
    "TRANSFORMS",
    "WORKER_INIT_POSITIONS",
]

# Lanes, of 2**32.
TRANSFORMS: Final = range(2**31)  # of a chain, counted from 0 in the order in which its transforms are written
GENERATORS: Final = 2**31  # what the global generators are seeded with before a sample
SUBSTITUTES: Final = 2**31 + 1  # which samples are tried in the place of one that failed
SAMPLE_RNG: Final = 2**31 + 2  # `gpuload.sample_rng()`
MODULE: Final = range(2**31 + 16, 2**32 - 1)  # the seed of a trailing module, for each view of the images
ORDER: Final = 2**32 - 1  # of the epoch: its permutation, or its draws with replacement

# Positions, in every lane.
SAMPLE_POSITIONS: Final = range(2**62)  # of an epoch's samples
WORKER_INIT_POSITIONS: Final = range(2**62, 2**62 + 2**61)  # for each worker, what its `worker_init_fn` draws from
SAMPLER_POSITION: Final = 2**62 + 2**61  # what a user's sampler draws from
