"""Draws the pictures of the documentation: ``python -m benchmarks.pictures`` writes them into docs/pictures.

`rates.svg` and `rates-dark.svg` show what benchmarks/results/loading-cpu.json records, and nothing else.
`augmented.jpg` shows what a few transforms make of photographs in scikit-image's wheel, which are free to use.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import median_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "loading-cpu.json"
PICTURES = ROOT / "docs" / "pictures"

# What the results call it, and what readers do; from the bottom of the plot to its top.
LOADERS = {
    "torch_pillow": "DataLoader,\ntorchvision, Pillow",
    "torch_simplejpeg": "DataLoader,\ntorchvision, simplejpeg",
    "dali": "DALI (CPU)",
    "gpuload": "gpuload",
}
OURS, THEIRS = "#2a8c82", "#9aa3ad"
INK = {"rates.svg": "#24292f", "rates-dark.svg": "#d5d9de"}

SHOWN = ("astronaut", "cat", "coffee")
COLUMNS, SIDE_PX, GAP_PX = 8, 160, 6


def rates(results: dict[str, Any]) -> dict[str, float]:
    """Images per second of each loader: the median over all epochs that were measured."""
    return {name: median_of(results["results"][name], "images_per_s") for name in LOADERS}


def draw_rates(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "gpuload", "font.family": "sans-serif"})
    from matplotlib import pyplot as plt

    found, ink = rates(results), INK[path.name]
    figure, axes = plt.subplots(figsize=(5.6, 2.5))
    bars = axes.barh(
        list(LOADERS.values()), list(found.values()), color=[THEIRS] * (len(LOADERS) - 1) + [OURS], height=0.62
    )
    axes.bar_label(
        bars, [f"{rate:,.0f}" for rate in found.values()], padding=5, color=ink, fontsize=11, fontweight="bold"
    )
    axes.set_xlim(0, 1.12 * max(found.values()))
    machine = results["machine"]
    axes.set_xlabel(f"images/s on {machine['cpus']} cores ({machine['cpu']})", color=ink)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, colors=ink)
    axes.set_xticks([])
    figure.tight_layout()
    figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)


def draw_augmented(path: Path) -> None:
    """A row for each photograph: itself, and what a training step sees of it in seven epochs."""
    from PIL import Image, ImageOps

    from gpuload import transforms as T
    from gpuload.cli.pictures import photographs

    chain = [
        T.RandomResizedCrop(SIDE_PX, scale=(0.25, 1.0)),
        T.RandomHorizontalFlip(),
        T.RandomApply([T.RandomAffine(25, shear=10, interpolation="bilinear")], p=0.5),
        T.ColorJitter(0.4, 0.4, 0.4, 0.08),
        T.RandomApply([T.GaussianBlur(9, (0.5, 2.0))], p=0.2),
        T.RandomErasing(0.3, scale=(0.02, 0.12)),
    ]
    files = photographs()
    step = SIDE_PX + GAP_PX
    sheet = Image.new("RGB", (COLUMNS * step + GAP_PX, len(SHOWN) * step - GAP_PX), "white")
    for row, name in enumerate(SHOWN):
        photograph = Image.open(files[name]).convert("RGB")
        sheet.paste(ImageOps.fit(photograph, (SIDE_PX, SIDE_PX)), (0, row * step))
        for column in range(1, COLUMNS):
            made = T.apply(chain, np.asarray(photograph), seed=COLUMNS * row + column)
            sheet.paste(Image.fromarray(made.permute(1, 2, 0).numpy()), (column * step + GAP_PX, row * step))
    sheet.save(path, quality=88, optimize=True)


def main() -> None:
    results = json.loads(RESULTS.read_text())
    for name in INK:
        draw_rates(results, PICTURES / name)
    draw_augmented(PICTURES / "augmented.jpg")


if __name__ == "__main__":
    main()
