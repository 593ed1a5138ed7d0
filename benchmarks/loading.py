"""The ImageNet training recipe on the CPU: gpuload against torch DataLoader + torchvision, DALI and TurboLoader.

    make bench ARGS="--photos DIR"        or   python -m benchmarks.loading --photos DIR

Each loader runs in its own process, and every round runs all of them (`benchmarks.running`). torch's thread settings
keep their defaults. Peers that are not installed are skipped, and the report says so.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks import running
from benchmarks.peers.protocol import Recipe
from benchmarks.photos import copy_photos, cuttable_copy, find_photos, warm_page_cache

ARRAY_SAMPLES = 20_000
PEER_LIMIT_S = 600
CUTTABLE = "gpuload_cuttable"
LOADERS = {
    "gpuload": "gpuload",
    CUTTABLE: "gpuload, cuttable",
    "torch_pillow": "DataLoader, Pillow",
    "torch_simplejpeg": "DataLoader, simplejpeg",
    "dali": "DALI (CPU)",
    "turboloader": "TurboLoader, decoding at a reduced size",
}
WORKERS = {
    "workers_only": "gpuload's workers, batches discarded",
    "decoder_alone": "region decoder alone, including file reads",
}
ARRAYS = {"arrays_gpuload": "gpuload", "arrays_torch": "DataLoader", "arrays_dali": "DALI (CPU)"}
WHOLE = {"whole_gpuload": "gpuload", "whole_dali": "DALI (CPU)"}
GROUPS = {"loaders": LOADERS, "workers": WORKERS, "arrays": ARRAYS, "whole": WHOLE}
TITLES = {
    "loaders": "Medians of all rounds",
    "workers": "Workers and the decoder alone, on the same cores",
    "arrays": "uint8 arrays in memory with a label, batched unchanged",
    "whole": "Whole images, uint8, in lists, without transforms",
}
NAMES = {
    **LOADERS,
    **WORKERS,
    **{name: f"{label}, arrays" for name, label in ARRAYS.items()},
    **{name: f"{label}, whole images" for name, label in WHOLE.items()},
}
FIGURES = {  # key in the results: column heading, number format
    "cpu_s_per_1000": ("CPU s per 1,000 images", ".3g"),
    "first_batch_s": ("first batch, s", ".2f"),
    "pss_mb": ("memory of all processes, MB", ",.0f"),
    "worker_mb": ("memory per worker, MB", ",.0f"),
}

# Ratios of gpuload's rate to the peer's rate: the minimum, and the stretch goal.
RATE_GOALS = {"torch_simplejpeg": (1.8, 2.0), "dali": (1.5, 1.7)}
CUTTABLE_GOALS = {"torch_simplejpeg": 2.2, "dali": 1.9}  # gpuload over cuttable files, the peers over the originals
ARRAYS_GOAL = 3.0  # gpuload's rate over DataLoader's
WHOLE_GOAL = 1.0  # gpuload's rate over DALI's
WORKERS_RATIO = 0.95
FIRST_BATCH_S = 0.5
WORKER_MB = 60.0

Results = Mapping[str, list[dict[str, Any]]]
"""The results of each peer, one per round, in the order of the rounds."""


def median_of(results: list[dict[str, Any]], key: str) -> float:
    """Return the median over all rounds, or over all epochs of all rounds if rounds have lists of values; NaN if
    there are no values.

    >>> median_of([{"images_per_s": [1, 2]}, {"images_per_s": [4, 9]}], "images_per_s")
    3.0
    """
    values: list[float] = []
    for result in results:
        value = result.get(key, [])
        values.extend(value if isinstance(value, list) else [value])
    return statistics.median(values) if values else float("nan")


def ratio(results: Results, ours: str, peer: str) -> tuple[float, float, float]:
    """Divide the rate of `ours` by the rate of `peer` within each round. Return the median, minimum and maximum.

    >>> rounds = {"a": [{"images_per_s": [30]}, {"images_per_s": [10]}], "b": [{"images_per_s": [15]}] * 2}
    >>> median, minimum, maximum = ratio(rounds, "a", "b")
    >>> minimum, maximum
    (0.6666666666666666, 2.0)
    """
    ratios = [
        median_of([own_result], "images_per_s") / median_of([peer_result], "images_per_s")
        for own_result, peer_result in zip(results[ours], results[peer], strict=True)
    ]
    return statistics.median(ratios), min(ratios), max(ratios)


def columns(results: Results, labels: Mapping[str, str], ours: str | None) -> tuple[list[str], list[list[str]]]:
    """Return the headings and rows of a table of the peers in `labels`. `ours` is the peer whose rate is compared with
    the other rates. A figure that no peer has is omitted."""
    names = [name for name in labels if name in results]
    cells: dict[str, list[str]] = {"images/s": [f"{median_of(results[name], 'images_per_s'):,.0f}" for name in names]}
    if ours in names:
        cells["gpuload's speedup (lowest … highest round)"] = [
            "" if name == ours else "{:.2f} × ({:.2f} … {:.2f})".format(*ratio(results, ours, name)) for name in names
        ]
    for key, (heading, number_format) in FIGURES.items():
        values = [median_of(results[name], key) for name in names]
        if any(value > 0 for value in values):
            cells[heading] = [f"{value:{number_format}}" if value > 0 else "–" for value in values]
    return ["", *cells], [list(row) for row in zip((labels[name] for name in names), *cells.values(), strict=True)]


def judge(results: Results) -> list[running.Verdict]:
    """Check every goal whose figures were measured."""
    verdicts = []

    def at_least(goal: float, name: str, other: str, text: str, figure_format: str = "{:.2f}") -> None:
        if {name, other} <= results.keys():
            speedup = ratio(results, name, other)[0]
            verdicts.append(running.Verdict(f"{text}: {figure_format.format(speedup)}", speedup >= goal))

    for peer, (minimum, aim) in RATE_GOALS.items():
        at_least(minimum, "gpuload", peer, f"at least {minimum} times {NAMES[peer]} (stretch goal {aim})")
    if "gpuload" in results:
        keys = ("first_batch_s", "worker_mb", "worker_share_mb")
        first_s, worker_mb, share_mb = (median_of(results["gpuload"], key) for key in keys)
        verdicts.append(
            running.Verdict(f"first batch within {FIRST_BATCH_S} s: {first_s:.2f} s", first_s <= FIRST_BATCH_S)
        )
        share = f"{share_mb:.0f} MB as its share of the shared memory"
        text = f"a worker under {WORKER_MB:.0f} MB: {worker_mb:.0f} MB (and {share})"
        verdicts.append(running.Verdict(text, worker_mb < WORKER_MB))
    for peer, minimum in CUTTABLE_GOALS.items():
        at_least(minimum, CUTTABLE, peer, f"over cuttable files at least {minimum} times {NAMES[peer]}")
    text = f"arrays in memory: at least {ARRAYS_GOAL:.0f} times DataLoader"
    at_least(ARRAYS_GOAL, "arrays_gpuload", "arrays_torch", text)
    text = f"whole images: at least as fast as {NAMES['dali']}"
    at_least(WHOLE_GOAL, "whole_gpuload", "whole_dali", text)
    text = f"workers at least {WORKERS_RATIO:.0%} of the decoder alone"
    at_least(WORKERS_RATIO, "workers_only", "decoder_alone", text, "{:.1%}")
    return verdicts


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the options; `peers` lists the names of the contenders to measure."""
    numbers = {"files": 2000, "rounds": 3, "workers": 2, "batch_size": 64}
    parser = running.make_parser("loading", __doc__, "photos", "cache", "json", **numbers)
    parser.add_argument("--epochs", type=int, default=3, help="epochs in a run, the first as warm-up (default 3)")
    choices = f"{', '.join(GROUPS)}, or any of {', '.join(NAMES)}"
    parser.add_argument("--only", help=f"comma-separated: {choices}")
    parser.add_argument(
        "--cuttable", action="store_true", help="also measure gpuload over the same files made cuttable"
    )
    options = parser.parse_args(arguments)
    running.check_minimums(parser, options, rounds=1, epochs=2, workers=1, batch_size=1, files=options.batch_size)
    chosen = [] if options.only else list(NAMES)
    for word in options.only.split(",") if options.only else []:
        if word not in NAMES and word not in GROUPS:
            parser.error(f"--only takes {choices}; got {word!r}")
        chosen += GROUPS.get(word, [word])
    options.peers = [name for name in dict.fromkeys(chosen) if name != CUTTABLE or options.cuttable]
    if not options.peers:
        parser.error(f"--only {CUTTABLE} also needs --cuttable")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure and report. Return the exit status: 1 if a peer could not be measured."""
    options = parse(arguments)
    source, described = find_photos(options.cache, options.photos)
    root = copy_photos(source, options.cache, options.files)
    count, mean_kb = warm_page_cache(root)
    cuttable = ""
    if options.cuttable:
        cuttable = str(cuttable_copy(root))
        described += f"; made cuttable {warm_page_cache(cuttable_copy(root))[1]:.0f} KB"
    recipe = Recipe(
        root=str(root),
        cuttable=cuttable,
        batch_size=options.batch_size,
        workers=options.workers,
        epochs=options.epochs,
        samples=ARRAY_SAMPLES,
    )
    failed: dict[str, dict[str, str]] = {}
    rounds = running.run_rounds(
        options.peers,
        options.rounds,
        lambda peer: running.run_module(["benchmarks.peers.protocol", peer, recipe.to_json()], PEER_LIMIT_S),
        failed,
        lambda peer, result: f"{NAMES[peer]}: {median_of([result], 'images_per_s'):,.0f} images/s",
    )
    results = {peer: [by_peer[peer] for by_peer in rounds] for peer in options.peers if peer not in failed}

    versions: dict[str, str] = {"python": platform.python_version()}
    for rows in results.values():
        versions |= rows[0].get("versions", {})
    threads = sorted({rows[0]["threads"] for rows in results.values() if "threads" in rows[0]})
    where = running.describe_machine()
    print(
        f"\nphotos: {described}: {count:,} files of {mean_kb:.0f} KB on average, in the page cache\n"
        f"recipe: RandomResizedCrop({recipe.size}), flip, normalise, float32; batch {recipe.batch_size}; "
        f"{recipe.workers} workers; device: CPU\n"
        f"machine: {where['cpu']}, {where['cpus']} CPUs for this process, torch's default threads: "
        f"{', '.join(map(str, threads)) or 'not queried'}\n"
        f"versions: {', '.join(f'{name} {version}' for name, version in versions.items())}\n"
        f"{options.rounds} rounds of {options.epochs - 1} measured epochs after one that is not, full batches only\n"
        "DataLoader: torch's, with torchvision's v2 transforms on each sample\n"
        "memory: proportional (PSS), of the entire process tree; worker: the largest, without shared memory"
    )
    for group, labels in GROUPS.items():
        if results.keys() & labels.keys():
            ours = None if group == "workers" else next(iter(labels))
            print("", running.format_table(*columns(results, labels, ours), TITLES[group]), sep="\n")
    print()
    running.print_verdicts(verdicts := judge(results))
    settings = {name: value for name, value in vars(recipe).items() if name not in ("root", "cuttable")}
    photos = {"source": described, "files": count, "mean_kb": mean_kb}
    everything = {"recipe": settings, "photos": photos, "versions": versions, "results": results, "failed": failed}
    running.write_results(options.json, everything, verdicts)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
