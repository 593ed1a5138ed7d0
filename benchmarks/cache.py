"""How useful is a cache smaller than its dataset? ``python -m benchmarks.cache``

Prints the hit rate of `gpuload.Cached` by the share f of the dataset that fits, over the third to the eighth epoch of a
full shuffle; the hit rate expected of any least-recently-used cache, f + (1 - f) ln(1 - f); and the fraction of the
size limit that the cache still uses as its limit at the end. All figures are counts, so they do not depend on the
machine.
"""

from __future__ import annotations

import math

import numpy as np

from benchmarks.running import format_markdown
from gpuload.datasets.cached import Cached
from gpuload.order.permutation import Shuffle
from gpuload.rng.philox import epoch_key

SAMPLES, EPOCHS, SKIPPED_EPOCHS = 4000, 8, 2
CACHED_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


class Bytes:
    """A dataset of samples that take one page each."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> bytes:
        return index.to_bytes(2, "little") * 1500


def expected_hit_rate(share: float) -> float:
    """Return the hit rate expected with a full shuffle in each epoch. A sample at position a of the last epoch and b of
    this one is a hit if the share of other samples between them, 1 - a (1 - b), is below the share that the cache
    holds."""
    return share if share == 1 else share + (1 - share) * math.log(1 - share)


def measure_hit_rate(share: float) -> tuple[float, float]:
    """Return the measured hit rate, and the fraction of the size limit that is allowed at the end."""
    dataset = Cached(Bytes(), max(1 << 20, int(share * SAMPLES * 4096)))
    before = dataset.statistics()
    for epoch in range(EPOCHS):
        if epoch == SKIPPED_EPOCHS:
            before = dataset.statistics()
        for indices in np.array_split(Shuffle(SAMPLES, epoch_key(0, epoch))(np.arange(SAMPLES)), SAMPLES // 16):
            dataset.__getitems__(indices.tolist())
    after = dataset.statistics()
    return (after.hits - before.hits) / (SAMPLES * (EPOCHS - SKIPPED_EPOCHS)), after.bytes_allowed / after.bytes_limit


def main() -> None:
    rows = []
    for share in CACHED_SHARES:
        hit_rate, allowed_share = measure_hit_rate(share)
        rows.append([f"{share:.0%}", f"{hit_rate:.1%}", f"{expected_hit_rate(share):.1%}", f"{allowed_share:.0%}"])
    print(format_markdown(["share that fits", "hits", "expected", "size at the end"], rows), end="")


if __name__ == "__main__":
    main()
