"""How random a block shuffle is, beside a full one: ``python -m benchmarks.shuffle [--picture docs/shuffle.png]``.

On an order of the length of ImageNet's training set, with the worst data there is: sorted by class, 1,000 of them. All
figures are counts over one epoch, so they do not depend on the machine. Columns:

- classes: how many there are in a batch of 256, on average.
- effective batch: of how many independent samples the batch's mean of a random value for each class would have the same
  variance: 256 for a full shuffle.
- same block: how often two samples that follow each other are of one block.
- in use: how many samples the reads of a window are among.
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
    """What is measured of one order; None for a full shuffle, in blocks of 64."""
    indices = order_of(options)(np.arange(SAMPLES // BATCH * BATCH))
    classes = (indices * CLASSES // SAMPLES).reshape(-1, BATCH)
    scores = np.random.default_rng(0).standard_normal((CLASSES, 32))
    means = np.stack([scores[row].mean(axis=0) for row in classes])
    block = options.block if options else 64
    of_block = indices // block
    return {
        "classes": float(np.mean([len(np.unique(row)) for row in classes])),
        "effective batch": float((scores.var(axis=0) / means.var(axis=0)).mean()),
        "same block": float((of_block[1:] == of_block[:-1]).mean()),
        "in use": float(SAMPLES if options is None else min(SAMPLES, options.block * options.window)),
    }


def table(results: dict[tuple[int, int] | None, dict[str, float]]) -> str:
    rows = []
    for name, found in results.items():
        block, window = ("full shuffle", "") if name is None else map(str, name)
        counts = (f"{found[key]:,.0f}" for key in ("in use", "classes", "effective batch"))
        rows.append([block, window, *counts, f"{found['same block']:.1%}"])
    headings = ["block", "window", "samples in use", "classes in a batch", "effective batch"]
    return markdown([*headings, "next is of the same block"], rows)


def draw(results: dict[tuple[int, int] | None, dict[str, float]], path: str) -> None:
    """The picture: where the samples of the first positions lie, and classes in a batch by the window."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 4, figsize=(15, 3.8), width_ratios=(1, 1, 1, 1.5), layout="constrained")
    shown = np.arange(SHOWN)
    ways: list[tuple[str, BlockShuffle | None]] = [
        ("full shuffle", None),
        ('"block": 64 × 256', BlockShuffle()),
        ("64 × 16", BlockShuffle(64, 16)),
    ]
    for panel, (name, options) in zip(panels, ways, strict=False):
        panel.plot(shown / 1000, order_of(options)(shown) / 1e6, ",", color="#1f4e79", alpha=0.6)
        panel.set(title=name, xlabel="position (thousands)", ylabel="index (millions)", xlim=(0, SHOWN / 1000))
        panel.set_ylim(0, SAMPLES / 1e6)
    last: Any = panels[-1]
    for block in BLOCKS:
        found = [results[block, window]["classes"] for window in WINDOWS]
        last.plot([block * window for window in WINDOWS], found, "o-", label=f"blocks of {block}")
    whole = results[None]
    last.axhline(whole["classes"], color="black", linestyle=":", label="full shuffle")
    last.set(xscale="log", xlabel="samples in use (block × window)", ylabel="classes in a batch of 256")
    last.set(title="1,000 classes, sorted", ylim=(0, None))
    last.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = make_parser("shuffle", __doc__)
    parser.add_argument("--picture", help="where to draw the picture (needs matplotlib)")
    given = parser.parse_args()
    results: dict[tuple[int, int] | None, dict[str, float]] = {None: figures(None)}
    for block in BLOCKS:
        for window in WINDOWS:
            results[block, window] = figures(BlockShuffle(block, window))
    print(table(results), end="")
    if given.picture:
        draw(results, given.picture)


if __name__ == "__main__":
    main()
