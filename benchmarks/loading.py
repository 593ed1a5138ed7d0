"""The ImageNet training recipe on the CPU: gpuload beside torch DataLoader + torchvision, DALI, TurboLoader.

    make bench ARGS="--photos DIR"        or   python -m benchmarks.loading --photos DIR

Each loader runs in a process of its own, all of them in every round, in an order that changes from round to round. So a
machine that other work slows down for a while slows them all, and the ratios, taken within a round, stay true.
torch's thread settings are left as they are. Peers that are not installed are left out, and the report says so.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

from benchmarks.peers.recipe import Recipe
from benchmarks.photos import copy_photos, cuttable_copy, find_photos, warm
from benchmarks.report import ARRAYS, CUTTABLE, LOADERS, NAMES, WHOLE, WORKERS, judge, median_of, tables
from benchmarks.running import REPOSITORY, in_turns, machine, make_console, run_module, say_verdicts, write_results

__all__ = ["main", "parse"]

ARRAY_SAMPLES = 20_000
PEER_LIMIT_S = 600


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options; `peers` are the names of what is to be measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--photos", type=Path, help="folder of JPEGs (default: scikit-image's photographs, varied)")
    parser.add_argument("--files", type=int, default=2000, help="how many files they are copied to (default 2000)")
    parser.add_argument("--cache", type=Path, default=REPOSITORY / ".data", help="where the copies are kept")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is run (default 3)")
    parser.add_argument("--epochs", type=int, default=3, help="epochs in a run, the first to warm up (default 3)")
    parser.add_argument("--workers", type=int, default=2, help="worker processes; DALI's threads (default 2)")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument(
        "--only", help=f"comma-separated: loaders, workers, arrays, whole, or any of {', '.join(NAMES)}"
    )
    parser.add_argument(
        "--cuttable",
        action="store_true",
        help="gpuload over the same files made cuttable, too",
    )
    parser.add_argument("--json", type=Path, help="write all results to this file")
    options = parser.parse_args(arguments)
    for name, least in (("rounds", 1), ("epochs", 2), ("workers", 1), ("batch_size", 1), ("files", options.batch_size)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(options, name)}")
    groups = {"loaders": list(LOADERS), "workers": list(WORKERS), "arrays": list(ARRAYS), "whole": list(WHOLE)}
    chosen = [] if options.only else list(NAMES)
    for word in options.only.split(",") if options.only else []:
        if word not in NAMES and word not in groups:
            parser.error(f"--only takes loaders, workers, arrays, whole, or any of {', '.join(NAMES)}; got {word!r}")
        chosen += groups.get(word, [word])
    options.peers = [name for name in dict.fromkeys(chosen) if name != CUTTABLE or options.cuttable]
    if not options.peers:
        parser.error(f"--only {CUTTABLE} needs --cuttable too")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure and report. Returns the exit status: 1 where a peer could not be measured."""
    options = parse(arguments)
    console = make_console(110)
    if options.photos is None:
        source, described = find_photos(options.cache)
        described += " (no --photos given)"
    else:
        source, described = options.photos, str(options.photos)
    root = copy_photos(source, options.cache, options.files)
    count, mean_kb = warm(root)
    cuttable = ""
    if options.cuttable:
        folder = cuttable_copy(root)
        described += f"; made cuttable {warm(folder)[1]:.0f} KB"
        cuttable = str(folder)
    recipe = Recipe(
        root=str(root),
        cuttable=cuttable,
        batch_size=options.batch_size,
        workers=options.workers,
        epochs=options.epochs,
        samples=ARRAY_SAMPLES,
    )
    failed: dict[str, dict[str, str]] = {}
    rounds = in_turns(
        options.peers,
        options.rounds,
        lambda peer: run_module([f"benchmarks.peers.{peer}", recipe.to_json()], PEER_LIMIT_S),
        console,
        failed,
        lambda peer, result: f"{NAMES[peer]}: {median_of([result], 'images_per_s'):,.0f} images/s",
    )
    results = {peer: [one[peer] for one in rounds] for peer in options.peers if peer not in failed}

    versions: dict[str, str] = {"python": platform.python_version()}
    for rows in results.values():
        versions |= rows[0].get("versions", {})
    threads = sorted({rows[0]["threads"] for rows in results.values() if "threads" in rows[0]})
    where = machine()
    console.print(
        f"\nphotos: {described}: {count:,} files of {mean_kb:.0f} KB on average, in the page cache\n"
        f"recipe: RandomResizedCrop({recipe.size}), flip, normalise, float32; batch {recipe.batch_size}; "
        f"{recipe.workers} workers; device: CPU\n"
        f"machine: {where['cpu']}, {where['cpus']} CPUs for this process, torch's threads as they are: "
        f"{', '.join(map(str, threads)) or 'not asked'}\n"
        f"versions: {', '.join(f'{name} {version}' for name, version in versions.items())}\n"
        f"{options.rounds} rounds of {options.epochs - 1} measured epochs, whole batches only\n"
        "DataLoader: torch's, with torchvision's v2 transforms on each sample\n"
        "memory: proportional (PSS), of the whole process tree; worker: the largest, without shared memory\n",
        soft_wrap=True,
    )
    for table in tables(results):
        console.print(table)
    say_verdicts(console, verdicts := judge(results))
    asked = {name: value for name, value in json.loads(recipe.to_json()).items() if name not in ("root", "cuttable")}
    photos = {"source": described, "files": count, "mean_kb": mean_kb}
    everything = {"recipe": asked, "photos": photos, "versions": versions, "results": results, "failed": failed}
    write_results(options.json, everything, verdicts)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
