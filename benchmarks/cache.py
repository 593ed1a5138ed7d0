"""What a cache smaller than its dataset is good for: ``python -m benchmarks.cache``.

Hit rates of `gpuload.Cached` by the share of the dataset that fits, over the third to the eighth epoch of a full
shuffle; beside what is expected of any cache that drops what was not used for longest, f + (1 - f) ln(1 - f); and how
much of its limit it still takes. Figures are counts, so they do not depend on the machine.
"""

from __future__ import annotations

import math

import numpy as np

from benchmarks.running import markdown
from gpuload.datasets.cached import Cached
from gpuload.order.permutation import Shuffle
from gpuload.rng.philox import epoch_key

SAMPLES, EPOCHS, SKIPPED = 4000, 8, 2
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


class Bytes:
    """Samples that take a page each."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> bytes:
        return index.to_bytes(2, "little") * 1500


def expected(share: float) -> float:
    """Hit rate of a full shuffle in each epoch. A sample at a (of the last epoch) and b (of this one) is hit if the
    share of others that came between, 1 - a (1 - b), is below the cache's."""
    return share if share == 1 else share + (1 - share) * math.log(1 - share)


def measured(share: float) -> tuple[float, float]:
    """Hit rate, and the part of the limit that is allowed in the end."""
    dataset = Cached(Bytes(), max(1 << 20, int(share * SAMPLES * 4096)))
    before = dataset.statistics()
    for epoch in range(EPOCHS):
        if epoch == SKIPPED:
            before = dataset.statistics()
        for numbers in np.array_split(Shuffle(SAMPLES, epoch_key(0, epoch))(np.arange(SAMPLES)), SAMPLES // 16):
            dataset.__getitems__(numbers.tolist())
    after = dataset.statistics()
    return (after.hits - before.hits) / (SAMPLES * (EPOCHS - SKIPPED)), after.bytes_allowed / after.bytes_limit


def main() -> None:
    rows = []
    for share in SHARES:
        hits, size = measured(share)
        rows.append([f"{share:.0%}", f"{hits:.1%}", f"{expected(share):.1%}", f"{size:.0%}"])
    print(markdown(["share that fits", "hits", "expected", "size at the end"], rows), end="")


if __name__ == "__main__":
    main()
