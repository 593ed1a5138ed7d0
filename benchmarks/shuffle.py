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

from benchmarks.running import format_markdown, make_parser
from gpuload.order.blocks import BlockOrder, Blocks, BlockShuffle
from gpuload.order.permutation import Shuffle
from gpuload.rng.philox import epoch_key

SAMPLES, CLASSES, BATCH = 1_281_167, 1000, 256
BLOCKS = (16, 64, 256, 1024)
WINDOWS = (4, 16, 64, 256, 1024)
PLOTTED_POSITIONS = 20_000  # in the picture

Order = Callable[[np.ndarray], np.ndarray]


def make_order(options: BlockShuffle | None, epoch: int = 0) -> Order:
    key = epoch_key(0, epoch)
    return Shuffle(SAMPLES, key) if options is None else BlockOrder(Blocks(SAMPLES, options), key)


def measure_order(options: BlockShuffle | None) -> dict[str, float]:
    """Measure one order; None means a full shuffle, for which blocks are assumed to have 64 samples."""
    indices = make_order(options)(np.arange(SAMPLES // BATCH * BATCH))
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


def format_results(results: dict[tuple[int, int] | None, dict[str, float]]) -> str:
    rows = []
    for name, measured in results.items():
        block, window = ("full shuffle", "") if name is None else map(str, name)
        counts = (f"{measured[key]:,.0f}" for key in ("in use", "classes", "effective batch"))
        rows.append([block, window, *counts, f"{measured['same block']:.1%}"])
    headings = ["block", "window", "samples in use", "classes in a batch", "effective batch"]
    return format_markdown([*headings, "next is of the same block"], rows)


def draw(results: dict[tuple[int, int] | None, dict[str, float]], path: str) -> None:
    """Draw the picture: the indices of the samples at the first positions, and the classes in a batch by window."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 4, figsize=(15, 3.8), width_ratios=(1, 1, 1, 1.5), layout="constrained")
    positions = np.arange(PLOTTED_POSITIONS)
    orders: list[tuple[str, BlockShuffle | None]] = [
        ("full shuffle", None),
        ('"block": 64 × 256', BlockShuffle()),
        ("64 × 16", BlockShuffle(64, 16)),
    ]
    for panel, (name, options) in zip(panels, orders, strict=False):
        panel.plot(positions / 1000, make_order(options)(positions) / 1e6, ",", color="#1f4e79", alpha=0.6)
        panel.set(
            title=name, xlabel="position (thousands)", ylabel="index (millions)", xlim=(0, PLOTTED_POSITIONS / 1000)
        )
        panel.set_ylim(0, SAMPLES / 1e6)
    last_panel: Any = panels[-1]
    for block in BLOCKS:
        classes = [results[block, window]["classes"] for window in WINDOWS]
        last_panel.plot([block * window for window in WINDOWS], classes, "o-", label=f"blocks of {block}")
    full_shuffle = results[None]
    last_panel.axhline(full_shuffle["classes"], color="black", linestyle=":", label="full shuffle")
    last_panel.set(xscale="log", xlabel="samples in use (block × window)", ylabel="classes in a batch of 256")
    last_panel.set(title="1,000 classes, sorted", ylim=(0, None))
    last_panel.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = make_parser("shuffle", __doc__)
    parser.add_argument("--picture", help="file to draw the picture to (needs matplotlib)")
    options = parser.parse_args()
    results: dict[tuple[int, int] | None, dict[str, float]] = {None: measure_order(None)}
    for block in BLOCKS:
        for window in WINDOWS:
            results[block, window] = measure_order(BlockShuffle(block, window))
    print(format_results(results), end="")
    if options.picture:
        draw(results, options.picture)


if __name__ == "__main__":
    main()
