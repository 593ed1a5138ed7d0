"""The randomness of block and full shuffles: ``python -m benchmarks.shuffle [--picture docs/shuffle.png]``.

The order has the length of ImageNet's training set, and the data is the worst case: sorted by class, with 1,000
classes. All figures are counts over one epoch, so they do not depend on the machine. Columns:

- classes: the mean number of classes in a batch of 256.
- effective batch: assign a random value to each class. The batch mean of these values has the same variance as the mean
  of this many independent samples; it is 256 for a full shuffle.
- same block: how often two consecutive samples are from one block.
- in use: the number of samples in a window, among which reads are spread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.running import make_parser, markdown
from gpuload.order.blocks import BlockOrder, Blocks, BlockShuffle
from gpuload.order.permutation import Shuffle
from gpuload.rng.philox import epoch_key

SAMPLES, CLASSES, BATCH = 1_281_167, 1000, 256
BLOCKS = (16, 64, 256, 1024)
WINDOWS = (4, 16, 64, 256, 1024)
SHOWN = 20_000  # positions in the picture

Order = Callable[[np.ndarray], np.ndarray]


def order_of(options: BlockShuffle | None, epoch: int = 0) -> Order:
    key = epoch_key(0, epoch)
    return Shuffle(SAMPLES, key) if options is None else BlockOrder(Blocks(SAMPLES, options), key)


def figures(options: BlockShuffle | None) -> dict[str, float]:
    """Measure one order; None means a full shuffle, whose blocks are counted as 64 samples."""
    indices = order_of(options)(np.arange(SAMPLES // BATCH * BATCH))
    classes = (indices * CLASSES // SAMPLES).reshape(-1, BATCH)
    scores = np.random.default_rng(0).standard_normal((CLASSES, 32))
    means = np.stack([scores[row].mean(axis=0) for row in classes])
    block = options.block if options else 64
    blocks = indices // block
    return {
        "classes": float(np.mean([len(np.unique(row)) for row in classes])),
        "effective batch": float((scores.var(axis=0) / means.var(axis=0)).mean()),
        "same block": float((blocks[1:] == blocks[:-1]).mean()),
        "in use": float(SAMPLES if options is None else min(SAMPLES, options.block * options.window)),
    }


def table(results: dict[tuple[int, int] | None, dict[str, float]]) -> str:
    rows = []
    for name, measured in results.items():
        block, window = ("full shuffle", "") if name is None else map(str, name)
        counts = (f"{measured[key]:,.0f}" for key in ("in use", "classes", "effective batch"))
        rows.append([block, window, *counts, f"{measured['same block']:.1%}"])
    headings = ["block", "window", "samples in use", "classes in a batch", "effective batch"]
    return markdown([*headings, "next is of the same block"], rows)


def draw(results: dict[tuple[int, int] | None, dict[str, float]], path: str) -> None:
    """Draw the picture: the indices of the samples at the first positions, and the classes in a batch by window."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 4, figsize=(15, 3.8), width_ratios=(1, 1, 1, 1.5), layout="constrained")
    shown = np.arange(SHOWN)
    orders: list[tuple[str, BlockShuffle | None]] = [
        ("full shuffle", None),
        ('"block": 64 × 256', BlockShuffle()),
        ("64 × 16", BlockShuffle(64, 16)),
    ]
    for panel, (name, options) in zip(panels, orders, strict=False):
        panel.plot(shown / 1000, order_of(options)(shown) / 1e6, ",", color="#1f4e79", alpha=0.6)
        panel.set(title=name, xlabel="position (thousands)", ylabel="index (millions)", xlim=(0, SHOWN / 1000))
        panel.set_ylim(0, SAMPLES / 1e6)
    last: Any = panels[-1]
    for block in BLOCKS:
        classes = [results[block, window]["classes"] for window in WINDOWS]
        last.plot([block * window for window in WINDOWS], classes, "o-", label=f"blocks of {block}")
    full = results[None]
    last.axhline(full["classes"], color="black", linestyle=":", label="full shuffle")
    last.set(xscale="log", xlabel="samples in use (block × window)", ylabel="classes in a batch of 256")
    last.set(title="1,000 classes, sorted", ylim=(0, None))
    last.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = make_parser("shuffle", __doc__)
    parser.add_argument("--picture", help="file to draw the picture to (needs matplotlib)")
    options = parser.parse_args()
    results: dict[tuple[int, int] | None, dict[str, float]] = {None: figures(None)}
    for block in BLOCKS:
        for window in WINDOWS:
            results[block, window] = figures(BlockShuffle(block, window))
    print(table(results), end="")
    if options.picture:
        draw(results, options.picture)


if __name__ == "__main__":
    main()
