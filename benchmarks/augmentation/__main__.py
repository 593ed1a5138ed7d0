"""The command: what augmenting a batch costs, on the CPU (one thread) and on CUDA.

    python -m benchmarks.augmentation [--photos DIR] [--device cpu|cuda|auto] [--backends torch,dali] [--json FILE]

Everything starts from the same decoded photographs in the memory of the device, and ends with one batch there; reading,
decoding and copying are no part of it, gpuload's draws are. All run in this process, one after the other in every
round, in an order that changes: medians over the rounds, and ratios within them.
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

from benchmarks.augmentation.cases import CLASSIC, Case, dense, headline, recipes, transforms
from benchmarks.augmentation.contenders import BACKENDS, PEERS, contenders, least_bytes
from benchmarks.augmentation.kernel import kernels_alone
from benchmarks.augmentation.measuring import CaseResult, clock_of, copy_bandwidth, measure
from benchmarks.augmentation.photographs import Photographs
from benchmarks.augmentation.tables import judge, notes, tables
from benchmarks.machine import cpu_model, cuda_device, versions
from benchmarks.photos import find_photos
from benchmarks.running import check_least, make_parser, say_verdicts, write_json

BATCH = {"cpu": 64, "cuda": 256}
ROUNDS = {"cpu": 5, "cuda": 3}
QUICK = ("RandomHorizontalFlip", "ColorJitter", "Normalize, MixUp", CLASSIC)  # enough to see that all of it works
LEGEND = """\
gpuload: from interleaved levels, as decoders give them; each image has draws of its own, made within the time
gl.Augment: the module, called with a batch of uint8 in planes, as a loader of the user's own yields it; the peers start
  from the same batch, and what makes floats of it, which Kornia takes, is within the time
all: results are levels in planes, or normalised floats for recipes; torchvision and Kornia start from planes
torchvision per sample: called for each image, Pillow's or a tensor, and stacked
torchvision per batch: on the batch, where each transform draws once for all images; photographs are cropped one by one
  before it, since they differ in size
Kornia: AugmentationSequential on a batch of floats, which are there before where the result is levels; photographs
  were brought to one size before, by torch's interpolate
transforms with a probability have 1, so that each image is changed; those that crop or resize start from photographs,
  all others from crops of 224×224
roofline, a plain copy: the bytes that are needed of each image read once and the batch written once, at the rate of a
  plain copy of memory that is larger than all caches, in this run
"""


@dataclass
class DeviceResult:
    """What was measured on a device; or why nothing was."""

    batch: int
    name: str
    copy_gb_s: float | None
    cases: list[CaseResult]
    missing: str | None = None


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options; `backends` and `devices` are lists."""
    parser = make_parser("augmentation", __doc__, "photos", "cache", "json")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: all that there are")
    parser.add_argument("--backends", help=f"of gpuload, comma-separated; all of {', '.join(BACKENDS)} without it")
    parser.add_argument("--peers", help=f"comma-separated; all of {', '.join(PEERS)} without it; none for none")
    parser.add_argument("--only", help="parts of the names of cases, comma-separated")
    parser.add_argument("--rounds", type=int, help="how often each is run (default 5, on CUDA 3)")
    parser.add_argument("--batch-size", type=int, help="images in a batch, even (default 64, on CUDA 256)")
    parser.add_argument("--budget-s", type=float, help="begin no round later than this, on each device")
    parser.add_argument("--quick", action="store_true", help="a few cases once with 8 images: to see that it runs")
    options = parser.parse_args(arguments)
    for name, known, asked in (("backends", BACKENDS, options.backends), ("peers", tuple(PEERS), options.peers)):
        chosen = list(known) if asked is None else [] if (name, asked) == ("peers", "none") else asked.split(",")
        for word in chosen:
            if word not in known:
                parser.error(f"--{name} takes any of {', '.join(known)}, comma-separated; got {word!r}")
        setattr(options, name, chosen)
    options.devices = ["cpu", "cuda"] if options.device == "auto" else [options.device]
    if options.quick:
        options.rounds, options.batch_size = options.rounds or 1, options.batch_size or 8
    check_least(parser, options, rounds=1)
    if options.batch_size is not None and (options.batch_size < 2 or options.batch_size % 2):
        parser.error(f"--batch-size must be even, since images are mixed in pairs, got {options.batch_size}")
    options.photos = find_photos(options.cache, options.photos)[0]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report. Returns the exit status: 1 if something failed that should have run."""
    options = parse(arguments)
    print(LEGEND)
    found: dict[str, DeviceResult] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # Peers warn of their own futures.
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            for device in options.devices:
                measure_device(device, options, found)
    finally:
        torch.set_num_threads(threads)
    for device, result in found.items():
        _show(device, result)
    for device, result in found.items():
        say_verdicts(judge(device, result.cases, result.batch))
    failed = any(row.failed for result in found.values() for case in result.cases for row in case.rows.values())
    wanted = options.device == "cuda" and found["cuda"].missing is not None
    return 1 if failed or wanted else 0


def measure_device(device_type: str, options: argparse.Namespace, found: dict[str, DeviceResult]) -> DeviceResult:
    """Measure all on a device, for `found`; the file of results is written after each case, so that nothing is lost."""
    batch = options.batch_size or BATCH[device_type]
    if device_type == "cuda" and not torch.cuda.is_available():
        found[device_type] = DeviceResult(batch, "none", None, [], missing="torch finds no CUDA device")
        _write(options, found)
        return found[device_type]
    started = time.monotonic()
    device = torch.device(device_type)
    photographs = Photographs(options.photos, batch, device)
    bandwidth = copy_bandwidth(device)
    name = f"{cpu_model()}, one thread" if device_type == "cpu" else cuda_device()
    result = found[device_type] = DeviceResult(batch, name, bandwidth / 1e9, [])
    rounds = options.rounds or ROUNDS[device_type]
    deadline = None if options.budget_s is None else started + options.budget_s
    for case in _cases(device_type, options):
        torch.manual_seed(0)
        moved = least_bytes(case, photographs, range(1, rounds + 1))
        measured = contenders(case, photographs, options.backends, options.peers)
        if case.section == "kernel" and "fused" in options.backends:
            measured = kernels_alone(case, photographs) | measured
        rows = measure(measured, clock_of(device), rounds, deadline=deadline)
        result.cases.append(CaseResult(case.name, case.section, moved, 1000 * moved / bandwidth, rows))
        _write(options, found)
    return result


def _cases(device: str, options: argparse.Namespace) -> list[Case]:
    """Choose the cases; what is measured first is what matters most, should the time be up."""
    first = headline() if device == "cuda" or options.only else []
    cases = [*first, *recipes(), *dense(), *transforms()]
    if options.quick:
        cases = [case for case in cases if case.name in QUICK or case.section == "kernel"]
    if options.only:
        parts = options.only.split(",")
        cases = [case for case in cases if any(part in case.name for part in parts)]
        if not cases:
            raise SystemExit(f"--only {options.only!r} is part of no case's name")
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


def _write(options: argparse.Namespace, found: dict[str, DeviceResult]) -> None:
    devices: dict[str, Any] = {
        device: {
            **asdict(result),
            "goals": [verdict._asdict() for verdict in judge(device, result.cases, result.batch)],
        }
        for device, result in found.items()
    }
    machine = {"cpu": cpu_model(), "cpus": len(os.sched_getaffinity(0))}
    about = {"versions": versions(), "machine": machine, "photos": options.photos.name}
    write_json(options.json, {**about, "devices": devices})


if __name__ == "__main__":
    sys.exit(main())
