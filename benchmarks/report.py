"""What the rounds say: medians, ratios within rounds, tables, goals. Pure functions of the results."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.running import Verdict

__all__ = [
    "ARRAYS", "CUTTABLE", "LOADERS", "NAMES", "WHOLE", "WORKERS", "Results", "judge", "median_of", "ratio", "tables",
]  # fmt: skip

CUTTABLE = "gpuload_cuttable"
LOADERS = {
    "gpuload": "gpuload",
    CUTTABLE: "gpuload, cuttable",
    "torch_pillow": "DataLoader, Pillow",
    "torch_simplejpeg": "DataLoader, simplejpeg",
    "dali": "DALI (CPU)",
    "turboloader": "TurboLoader, decodes smaller",
}
WORKERS = {
    "workers_only": "gpuload's workers, slots only taken",
    "decoder_alone": "region decoder alone, with its files",
}
ARRAYS = {
    "arrays_gpuload": "gpuload",
    "arrays_torch": "DataLoader",
    "arrays_dali": "DALI (CPU)",
}
WHOLE = {
    "whole_gpuload": "gpuload",
    "whole_dali": "DALI (CPU)",
}
NAMES = {
    **LOADERS,
    **WORKERS,
    **{name: f"{label}, arrays" for name, label in ARRAYS.items()},
    **{name: f"{label}, whole images" for name, label in WHOLE.items()},
}

# Of gpuload's rate over the peer's: at least, and what is aimed at.
RATE_GOALS = {"torch_simplejpeg": (1.8, 2.0), "dali": (1.5, 1.7)}
CUTTABLE_GOALS = {"torch_simplejpeg": 2.2, "dali": 1.9}  # the same over cuttable files, the peers over the originals
ARRAYS_GOAL = 3.0  # of gpuload's rate over DataLoader's
WHOLE_GOAL = 1.0  # of gpuload's rate over DALI's
WORKERS_RATIO = 0.95
FIRST_BATCH_S = 0.5
WORKER_MB = 60.0

Results = Mapping[str, list[dict[str, Any]]]
"""The results of each peer, one for each round, in the order of the rounds."""


def median_of(results: list[dict[str, Any]], key: str) -> float:
    """The median over all rounds, and over a round's epochs where there is one value for each. NaN if there is none.

    >>> median_of([{"images_per_s": [1, 2]}, {"images_per_s": [4, 9]}], "images_per_s")
    3.0
    """
    values: list[float] = []
    for result in results:
        value = result.get(key, [])
        values.extend(value if isinstance(value, list) else [value])
    return statistics.median(values) if values else float("nan")


def ratio(results: Results, name: str, other: str) -> tuple[float, float, float]:
    """The rate of `name` over that of `other`, each round by itself: the median, the least and the greatest.

    >>> rounds = {"a": [{"images_per_s": [30]}, {"images_per_s": [10]}], "b": [{"images_per_s": [15]}] * 2}
    >>> median, least, greatest = ratio(rounds, "a", "b")
    >>> least, greatest
    (0.6666666666666666, 2.0)
    """
    ratios = [
        median_of([mine], "images_per_s") / median_of([theirs], "images_per_s")
        for mine, theirs in zip(results[name], results[other], strict=True)
    ]
    return statistics.median(ratios), min(ratios), max(ratios)


def tables(results: Results) -> list[Table]:
    """Return a table for each group of which something was measured."""
    groups = (
        (LOADERS, "gpuload", "Medians; ratio: gpuload's rate over the row's, within rounds"),
        (ARRAYS, "arrays_gpuload", "uint8 arrays in memory and a label, in batches as they are"),
        (WHOLE, "whole_gpuload", "Whole images, uint8, in lists as they were decoded"),
    )
    made = [_rates(results, names, own, title) for names, own, title in groups if results.keys() & names.keys()]
    return made + ([_workers(results)] if results.keys() & WORKERS.keys() else [])


def _rates(results: Results, names: Mapping[str, str], own: str, title: str) -> Table:
    table = Table(title=f"{title} (least … greatest)", title_justify="left", box=box.SIMPLE)
    table.add_column("loader", no_wrap=True)
    for heading in ("images/s", "ratio", "CPU s\nper 1,000", "first\nbatch, s", "memory\nMB", "worker\nMB"):
        table.add_column(heading, justify="right")
    for name in (name for name in names if name in results):
        rows = results[name]
        compared = name != own and own in results
        worker_mb = median_of(rows, "worker_mb")
        table.add_row(
            names[name],
            f"{median_of(rows, 'images_per_s'):,.0f}",
            "{:.2f} ({:.2f} … {:.2f})".format(*ratio(results, own, name)) if compared else "",
            f"{median_of(rows, 'cpu_s_per_1000'):.3g}",
            f"{median_of(rows, 'first_batch_s'):.2f}",
            f"{median_of(rows, 'pss_mb'):,.0f}",
            f"{worker_mb:,.0f}" if worker_mb else "–",
        )
    return table


def _workers(results: Results) -> Table:
    """gpuload's workers beside the decoder that they use, running alone."""
    table = Table(title="Workers beside the decoder alone, on the same cores", title_justify="left", box=box.SIMPLE)
    table.add_column("what runs", no_wrap=True)
    for heading in ("images/s", "CPU s\nper 1,000"):
        table.add_column(heading, justify="right")
    for name in (name for name in WORKERS if name in results):
        rows = results[name]
        rate, cpu = median_of(rows, "images_per_s"), median_of(rows, "cpu_s_per_1000")
        table.add_row(NAMES[name], f"{rate:,.0f}", f"{cpu:.2f}")
    if "decoder_alone" in results:
        rate = median_of(results["decoder_alone"], "images_per_s_from_memory")
        table.add_row("region decoder alone, bytes in memory", f"{rate:,.0f}", "")
    return table


def judge(results: Results) -> list[Verdict]:
    """Every goal for which the figures were measured."""
    verdicts = []
    if "gpuload" in results:
        for peer, (least, aim) in RATE_GOALS.items():
            if peer in results:
                times = ratio(results, "gpuload", peer)[0]
                text = f"at least {least} times {NAMES[peer]} (aim {aim}): {times:.2f}"
                verdicts.append(Verdict(text, times >= least))
        first_s = median_of(results["gpuload"], "first_batch_s")
        verdicts.append(Verdict(f"first batch within {FIRST_BATCH_S} s: {first_s:.2f} s", first_s <= FIRST_BATCH_S))
        worker_mb = median_of(results["gpuload"], "worker_mb")
        share_mb = median_of(results["gpuload"], "worker_share_mb")
        text = f"a worker under {WORKER_MB:.0f} MB: {worker_mb:.0f} MB (and {share_mb:.0f} MB as its share of the ring)"
        verdicts.append(Verdict(text, worker_mb < WORKER_MB))
    for peer, least in CUTTABLE_GOALS.items():
        if {CUTTABLE, peer} <= results.keys():
            times = ratio(results, CUTTABLE, peer)[0]
            text = f"over cuttable files at least {least} times {NAMES[peer]}: {times:.2f}"
            verdicts.append(Verdict(text, times >= least))
    if {"arrays_gpuload", "arrays_torch"} <= results.keys():
        times = ratio(results, "arrays_gpuload", "arrays_torch")[0]
        text = f"arrays in memory: at least {ARRAYS_GOAL:.0f} times DataLoader: {times:.2f}"
        verdicts.append(Verdict(text, times >= ARRAYS_GOAL))
    if WHOLE.keys() <= results.keys():
        times = ratio(results, "whole_gpuload", "whole_dali")[0]
        text = f"whole images: at least {WHOLE_GOAL:.0f} times {NAMES['dali']}: {times:.2f}"
        verdicts.append(Verdict(text, times >= WHOLE_GOAL))
    if WORKERS.keys() <= results.keys():
        share = ratio(results, "workers_only", "decoder_alone")[0]
        text = f"workers at least {WORKERS_RATIO:.0%} of the decoder alone: {share:.1%}"
        verdicts.append(Verdict(text, share >= WORKERS_RATIO))
    return verdicts
