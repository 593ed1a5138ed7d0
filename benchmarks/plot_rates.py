"""The plot and the table of README.md, from the recorded run of `make bench`: ``python -m benchmarks.plot_rates``.

Nothing is measured here. It writes rates.svg and rates-dark.svg to docs/pictures, and prints the table in Markdown.
Tests hold both, and README.md, to benchmarks/results/loading-cpu.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.report import Results, median_of, ratio

__all__ = ["FOLDER", "PICTURES", "RECORDED", "draw", "markdown_table"]

REPOSITORY = Path(__file__).parent.parent
RECORDED = REPOSITORY / "benchmarks" / "results" / "loading-cpu.json"
FOLDER = REPOSITORY / "docs" / "pictures"
PICTURES = {"rates.svg": ("#18181b", "white"), "rates-dark.svg": ("#e4e4e7", "none")}  # ink and ground
LABELS = {
    "gpuload": "gpuload",
    "dali": "DALI (CPU)",
    "torch_simplejpeg": "torch DataLoader + torchvision v2, simplejpeg",
    "torch_pillow": "torch DataLoader + torchvision v2, Pillow",
}
OWN, OTHERS = "#0d9488", "#a1a1aa"


def markdown_table(results: Results) -> str:
    """A row for each loader, the fastest first, with gpuload's rate over the row's, taken within rounds."""
    lines = [
        "| loader | images/s | gpuload's rate over it | CPU seconds per 1,000 images | memory of a worker, MB |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, label in LABELS.items():
        rows = results[name]
        times = "" if name == "gpuload" else f"{ratio(results, 'gpuload', name)[0]:.2f} ×"
        memory = median_of(rows, "worker_mb")
        lines.append(
            f"| {label} | {median_of(rows, 'images_per_s'):,.0f} | {times} | {median_of(rows, 'cpu_s_per_1000'):.2f} | "
            f"{f'{memory:,.0f}' if memory else '–'} |"
        )
    return "\n".join(lines) + "\n"


def draw(recorded: dict[str, Any], path: Path) -> None:
    """A bar for each loader: the median of its rates, and a line from the least to the greatest. For a dark page if the
    file's name says so. The same figures give the same bytes."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    results, recipe = recorded["results"], recorded["recipe"]
    rates = {name: [rate for row in results[name] for rate in row["images_per_s"]] for name in LABELS}
    ink, ground = PICTURES[path.name]
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "gpuload", "font.family": "sans-serif", "font.size": 11}
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(8, 2.6))
        figure.subplots_adjust(left=0.3, right=0.98, top=0.98, bottom=0.14)
        for place, name in enumerate(LABELS):
            middle, own = median_of(results[name], "images_per_s"), name == "gpuload"
            axes.barh(place, middle, height=0.62, color=OWN if own else OTHERS)
            axes.plot([min(rates[name]), max(rates[name])], [place, place], color=ink, linewidth=1)
            weight = "bold" if own else "normal"
            axes.text(max(rates[name]) + 25, place, f"{middle:,.0f}", va="center", color=ink, weight=weight)
        axes.set_yticks(range(len(LABELS)), [label.replace(" + ", ",\n") for label in LABELS.values()])
        axes.get_yticklabels()[0].set(weight="bold")
        axes.invert_yaxis()
        axes.set_xlim(0, 1.2 * max(map(max, rates.values())))
        where = f"{recipe['workers']} workers on {recorded['machine']['cpus']} cores"
        caption = f"images per second on the CPU alone, {where}; lines: from the least to the greatest"
        figure.text(0.02, 0.03, caption, color=ink, fontsize=9.5)
        axes.set_xticks([])
        axes.tick_params(length=0, colors=ink)
        axes.spines[:].set_visible(False)
        axes.patch.set_visible(False)
        figure.savefig(path, format="svg", facecolor=ground, metadata={"Date": None})
        plt.close(figure)


def main() -> None:
    recorded = json.loads(RECORDED.read_text())
    for name in PICTURES:
        draw(recorded, FOLDER / name)
    print(markdown_table(recorded["results"]), end="")


if __name__ == "__main__":
    main()
