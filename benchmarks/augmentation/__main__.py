"""The command that measures the cost of augmenting a batch, on the CPU (one thread) and on CUDA.

    python -m benchmarks.augmentation [--photos DIR] [--device cpu|cuda|auto] [--backends torch,dali] [--json FILE]
    python -m benchmarks.augmentation --plans    # the table of recipes in docs/backends.md; measures nothing

All contenders start from the same decoded photographs in device memory and end with one batch there. Reading, decoding
and copying are not included; gpuload's draws are. All contenders run in this process, one after another in every round,
in an order that changes. The figures are medians over the rounds, and ratios within rounds.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.augmentation.cases import CLASSIC, Case, dense, everyday, headline, recipes, transforms
from benchmarks.augmentation.contenders import BACKENDS, PEERS, contenders, least_bytes
from benchmarks.augmentation.kernel import kernels_alone
from benchmarks.augmentation.measuring import CaseResult, clock_of, copy_bandwidth, measure
from benchmarks.augmentation.photographs import Photographs
from benchmarks.augmentation.tables import judge, notes, tables
from benchmarks.machine import cpu_model, cuda_device, versions
from benchmarks.photos import find_photos
from benchmarks.running import check_minimums, format_markdown, make_parser, print_verdicts, write_json
from gpuload import Augment

BATCH = {"cpu": 64, "cuda": 256}
ROUNDS = {"cpu": 5, "cuda": 3}
QUICK = ("RandomHorizontalFlip", "ColorJitter", "Normalize, MixUp", CLASSIC)  # enough to see that everything works
LEGEND = """\
gpuload: starts from interleaved levels, as decoders produce them; each image has its own draws, included in the time
gl.Augment: the module, called with a planar uint8 batch as a user's loader yields it; the peers start from the same
  batch, and the conversion to floats that Kornia needs is included in the time
all: results are planar levels, or normalised floats for recipes; torchvision and Kornia start from planes
torchvision per sample: called for each image (Pillow's or a tensor), then stacked
torchvision per batch: called on the batch, with one draw for all images; photographs are cropped one by one first,
  since they differ in size
Kornia: AugmentationSequential on a batch of floats, converted before the clock starts where the result is levels;
  photographs were resized to one size beforehand, by torch's interpolate
DALI's dynamic mode: on a dense batch, each operator called once, with parameters for each image drawn with NumPy
transforms with a probability use 1, so that every image is changed; those that crop or resize start from photographs,
  all others from crops of 224×224
roofline, a plain copy: time to read the required bytes of each image once and write the batch once, at the rate of a
  plain copy larger than all caches, measured in this run
"""


@dataclass
class DeviceResult:
    """The measurements on a device, or the reason why there are none (`missing`)."""

    batch: int
    name: str
    copy_gb_s: float | None
    cases: list[CaseResult]
    missing: str | None = None


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options; `backends` and `devices` are lists."""
    parser = make_parser("augmentation", __doc__, "photos", "cache", "json")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: all available devices")
    parser.add_argument("--backends", help=f"gpuload's backends, comma-separated (default {','.join(BACKENDS)})")
    parser.add_argument("--peers", help=f"comma-separated, or none (default {','.join(PEERS)})")
    parser.add_argument("--only", help="parts of case names, comma-separated")
    parser.add_argument("--rounds", type=int, help="number of measured rounds (default 5, on CUDA 3)")
    parser.add_argument("--batch-size", type=int, help="images in a batch, even (default 64, on CUDA 256)")
    parser.add_argument("--budget-s", type=float, help="seconds per device after which no round begins")
    parser.add_argument("--quick", action="store_true", help="a smoke test: a few cases, once, with 8 images")
    parser.add_argument("--plans", action="store_true", help="print what kornia and dali run of ten everyday recipes")
    options = parser.parse_args(arguments)
    for name, allowed, value in (("backends", BACKENDS, options.backends), ("peers", tuple(PEERS), options.peers)):
        chosen = list(allowed) if value is None else [] if (name, value) == ("peers", "none") else value.split(",")
        for word in chosen:
            if word not in allowed:
                parser.error(f"--{name} takes any of {', '.join(allowed)}, comma-separated; got {word!r}")
        setattr(options, name, chosen)
    options.devices = ["cpu", "cuda"] if options.device == "auto" else [options.device]
    if options.quick:
        options.rounds, options.batch_size = options.rounds or 1, options.batch_size or 8
    check_minimums(parser, options, rounds=1)
    if options.batch_size is not None and (options.batch_size < 2 or options.batch_size % 2):
        parser.error(f"--batch-size must be even, since images are mixed in pairs, got {options.batch_size}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report. Returns the exit status: 1 if a contender failed, or CUDA was requested but is missing."""
    options = parse(arguments)
    if options.plans:
        print(format_plans(), end="")
        return 0
    options.photos = find_photos(options.cache, options.photos)[0]
    print(LEGEND)
    results: dict[str, DeviceResult] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # Peers warn about their own deprecations.
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            for device in options.devices:
                measure_device(device, options, results)
    finally:
        torch.set_num_threads(threads)
    for device, result in results.items():
        _show(device, result)
    for device, result in results.items():
        print_verdicts(judge(device, result.cases, result.batch))
    failed = any(row.failed for result in results.values() for case in result.cases for row in case.rows.values())
    cuda_missing = options.device == "cuda" and results["cuda"].missing is not None
    return 1 if failed or cuda_missing else 0


def format_plans() -> str:
    """Return the number of transforms of each everyday recipe that Kornia's and DALI's backends run themselves, as a
    Markdown table."""
    rows, totals = [], {"": 0, "kornia": 0, "dali": 0}
    for name, recipe in everyday().items():
        names = [type(transform).__name__ for transform in recipe]
        row = [f"{name}: {', '.join(f'`{name}`' for name in names)}", str(len(names))]
        totals[""] += len(names)
        for backend in ("kornia", "dali"):
            steps = Augment(recipe, device="cpu", backend=backend).plan().steps
            others = [f"`{type(step.transform).__name__}`" for step in steps if step.backend != backend]
            totals[backend] += len(steps) - len(others)
            row.append(f"{len(steps) - len(others)}" + (f"; not {', '.join(others)}" if others else ""))
        rows.append(row)
    rows.append(["all", *map(str, totals.values())])
    return format_markdown(["recipe", "transforms", "`kornia`", "`dali`"], rows, ["---", "---:", "---", "---"])


def measure_device(device_type: str, options: argparse.Namespace, results: dict[str, DeviceResult]) -> DeviceResult:
    """Measure all cases on a device and add the result to `results`. The results file is written after each case, so
    that nothing is lost."""
    batch = options.batch_size or BATCH[device_type]
    if device_type == "cuda" and not torch.cuda.is_available():
        results[device_type] = DeviceResult(batch, "none", None, [], missing="torch finds no CUDA device")
        _write(options, results)
        return results[device_type]
    started = time.monotonic()
    device = torch.device(device_type)
    photographs = Photographs(options.photos, batch, device)
    bandwidth = copy_bandwidth(device)
    name = f"{cpu_model()}, one thread" if device_type == "cpu" else cuda_device()
    result = results[device_type] = DeviceResult(batch, name, bandwidth / 1e9, [])
    rounds = options.rounds or ROUNDS[device_type]
    deadline = None if options.budget_s is None else started + options.budget_s
    for case in _cases(device_type, options):
        torch.manual_seed(0)
        nbytes = least_bytes(case, photographs, range(1, rounds + 1))
        case_contenders = contenders(case, photographs, options.backends, options.peers)
        if case.section == "kernel" and "fused" in options.backends:
            case_contenders = kernels_alone(case, photographs) | case_contenders
        rows = measure(case_contenders, clock_of(device), rounds, deadline=deadline)
        result.cases.append(CaseResult(case.name, case.section, nbytes, 1000 * nbytes / bandwidth, rows))
        _write(options, results)
    return result


def _cases(device: str, options: argparse.Namespace) -> list[Case]:
    """Choose the cases, the most important first in case the time runs out."""
    first = headline() if device == "cuda" or options.only else []
    cases = [*first, *recipes(), *dense(), *transforms()]
    if options.quick:
        cases = [case for case in cases if case.name in QUICK or case.section == "kernel"]
    if options.only:
        parts = options.only.split(",")
        cases = [case for case in cases if any(part in case.name for part in parts)]
        if not cases:
            raise SystemExit(f"--only {options.only!r} matches no case name")
    return cases


def _show(device: str, result: DeviceResult) -> None:
    where = {"cpu": "CPU", "cuda": "CUDA"}[device]
    if result.missing:
        print(f"{where}: not measured: {result.missing}\n")
        return
    print(f"{where}: {result.name}; a plain copy moves {result.copy_gb_s:.1f} GB/s")
    print(f"versions: {', '.join(f'{name} {number}' for name, number in versions().items())}")
    for alone in (True, False):
        cases = [case for case in result.cases if (case.section == "transforms") == alone]
        if cases:
            print("", *tables(cases, result.batch, where), "\n".join(notes(cases)), sep="\n\n")
    print()


def _write(options: argparse.Namespace, results: dict[str, DeviceResult]) -> None:
    devices: dict[str, Any] = {
        device: {
            **asdict(result),
            "goals": [verdict._asdict() for verdict in judge(device, result.cases, result.batch)],
        }
        for device, result in results.items()
    }
    machine = {"cpu": cpu_model(), "cpus": len(os.sched_getaffinity(0))}
    about = {"versions": versions(), "machine": machine, "photos": options.photos.name}
    write_json(options.json, {**about, "devices": devices})


if __name__ == "__main__":
    sys.exit(main())
