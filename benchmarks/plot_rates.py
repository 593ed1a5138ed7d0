"""The plot of README.md, and the tables of README.md and docs/performance.md, from the recorded run of `make bench`.

    make rates ARGS="--photos DIR"     measures, records, and writes plot and tables; takes a quarter of an hour
    python -m benchmarks.plot_rates    writes plot and tables from benchmarks/results/loading-cpu.json

The plots are docs/pictures/rates.svg and rates-dark.svg. Each table replaces the lines between a comment with its name,
such as ``<!-- measured: loaders -->``, and the next empty line. Tests compare plots and pages with the recorded run.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.loading import ARRAYS, LOADERS, WHOLE, WORKERS, Results, columns, judge, median_of, ratio
from benchmarks.running import REPOSITORY, format_markdown

RECORDED = REPOSITORY / "benchmarks" / "results" / "loading-cpu.json"
FOLDER = REPOSITORY / "docs" / "pictures"
PAGES = (REPOSITORY / "README.md", REPOSITORY / "docs" / "performance.md")
# The foreground and background colours of each picture.
PICTURE_COLOURS = {"rates.svg": ("#18181b", "white"), "rates-dark.svg": ("#e4e4e7", "none")}
LABELS = {
    "gpuload": "gpuload",
    "dali": "DALI (CPU)",
    "turboloader": "TurboLoader (CPU), decoding at a reduced size",
    "torch_simplejpeg": "torch DataLoader + torchvision v2, simplejpeg",
    "torch_pillow": "torch DataLoader + torchvision v2, Pillow",
}
OWN, OTHERS = "#0d9488", "#a1a1aa"


def format_tables(recorded: dict[str, Any]) -> dict[str, str]:
    """Return the Markdown of all tables of measured results in the pages, keyed by name."""
    results: Results = recorded["results"]
    machine, recipe, photos = recorded["machine"], recorded["recipe"], recorded["photos"]
    rounds = len(results["gpuload"])
    about = (
        f"{rounds} rounds over {photos['files']:,} files of {photos['mean_kb']:.0f} KB, {recipe['workers']} workers on "
        f"{machine['cpus']} CPUs ({machine['cpu']});\n"
        f"{', '.join(f'{name} {version}' for name, version in recorded['versions'].items())}.\n"
    )
    goals = "".join(f"- {'met' if verdict.met else 'missed'}: {verdict.text}\n" for verdict in judge(results))
    return {
        "readme": _readme_table(results),
        "about": about,
        "loaders": _table(results, {name: LOADERS[name] for name in sort_by_rate(results)}, "gpuload"),
        "workers": _table(results, WORKERS, None),
        "arrays": _table(results, ARRAYS, "arrays_gpuload"),
        "whole": _table(results, WHOLE, "whole_gpuload"),
        "goals": goals,
    }


def fill_page(page: str, texts: dict[str, str]) -> str:
    """Return `page` with each of `texts` after the comment with its name. Raise ValueError if a comment has an unknown
    name."""

    def text(match: re.Match[str]) -> str:
        if match["name"] not in texts:
            raise ValueError(f"<!-- measured: {match['name']} --> is none of {', '.join(texts)}")
        return match["mark"] + texts[match["name"]]

    return re.sub(r"(?P<mark><!-- measured: (?P<name>.+) -->\n)(?:.+\n)*", text, page)


def sort_by_rate(results: Results) -> list[str]:
    """Return the names of the measured loaders: gpuload, then the others from fastest to slowest."""
    names = [name for name in LABELS if name in results]
    return sorted(names, key=lambda name: (name != "gpuload", -median_of(results[name], "images_per_s")))


def _readme_table(results: Results) -> str:
    headings = ["loader", "images/s", "gpuload's speedup", "CPU seconds per 1,000 images"]
    rows = []
    for name in sort_by_rate(results):
        times = "" if name == "gpuload" else f"{ratio(results, 'gpuload', name)[0]:.2f} ×"
        rate, cpu_s, memory = (median_of(results[name], key) for key in ("images_per_s", "cpu_s_per_1000", "worker_mb"))
        rows.append([LABELS[name], f"{rate:,.0f}", times, f"{cpu_s:.2f}", f"{memory:,.0f}" if memory else "–"])
    return format_markdown([*headings, "memory per worker, MB"], rows, ["---", *["---:"] * 4])


def _table(results: Results, labels: dict[str, str], ours: str | None) -> str:
    """Format the figures of the measured peers; "" if there are none."""
    return format_markdown(*columns(results, labels, ours)) if results.keys() & labels.keys() else ""


def draw(recorded: dict[str, Any], path: Path) -> None:
    """Draw a bar for each loader, the median of its rates, with a line from the minimum to the maximum. The file's
    name determines the colours (`PICTURE_COLOURS`). The same figures produce the same bytes."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    results, recipe = recorded["results"], recorded["recipe"]
    rates = {name: [rate for row in results[name] for rate in row["images_per_s"]] for name in sort_by_rate(results)}
    foreground, background = PICTURE_COLOURS[path.name]
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "gpuload", "font.family": "sans-serif", "font.size": 11}
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(8, 0.65 * len(rates)))
        figure.subplots_adjust(left=0.3, right=0.98, top=0.98, bottom=0.14)
        for bar, name in enumerate(rates):
            median_rate, is_gpuload = median_of(results[name], "images_per_s"), name == "gpuload"
            axes.barh(bar, median_rate, height=0.62, color=OWN if is_gpuload else OTHERS)
            axes.plot([min(rates[name]), max(rates[name])], [bar, bar], color=foreground, linewidth=1)
            weight = "bold" if is_gpuload else "normal"
            axes.text(max(rates[name]) + 25, bar, f"{median_rate:,.0f}", va="center", color=foreground, weight=weight)
        axes.set_yticks(
            range(len(rates)), [LABELS[name].replace(" + ", ", ").replace(", ", ",\n", 1) for name in rates]
        )
        axes.get_yticklabels()[0].set(weight="bold")
        axes.invert_yaxis()
        axes.set_xlim(0, 1.2 * max(map(max, rates.values())))
        where = f"{recipe['workers']} workers on {recorded['machine']['cpus']} cores"
        caption = f"images per second on the CPU alone, {where}; lines: lowest to highest round"
        figure.text(0.02, 0.03, caption, color=foreground, fontsize=9.5)
        axes.set_xticks([])
        axes.tick_params(length=0, colors=foreground)
        axes.spines[:].set_visible(False)
        axes.patch.set_visible(False)
        figure.savefig(path, format="svg", facecolor=background, metadata={"Date": None})
        plt.close(figure)


def main() -> None:
    recorded = json.loads(RECORDED.read_text())
    for name in PICTURE_COLOURS:
        draw(recorded, FOLDER / name)
    texts = format_tables(recorded)
    for page in PAGES:
        page.write_text(fill_page(page.read_text(encoding="utf-8"), texts), encoding="utf-8")
    print(texts["readme"], end="")


if __name__ == "__main__":
    main()
