"""What cutting saves: CPU time of a RandomResizedCrop region of photographs, as they are and made cuttable.

    python -m benchmarks.cuttable --photos DIR

Each region is decoded in three ways, one after the other, in every round: from the original; from the cuttable file, as
if it had no index; cut. The regions of a file are cut out together, as workers cut those of a chunk. What counts is the
least CPU time of a region in all rounds, so that other work on the machine matters little. Pixels are compared. Needs
jpegtran for progressive JPEGs, and those with restart markers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.machine import cpu_model
from benchmarks.peers.decoder_alone import draw_region
from benchmarks.photos import SUFFIXES, find_photos
from gpuload.datasets.sample import Encoded
from gpuload.decode import Decode, Decoder, Header
from gpuload.decode.cut import find_grid, is_cuttable
from gpuload.decode.indexed import Index
from gpuload.packing.jpeg_cuttable import make_cuttable

__all__ = ["main"]

WAYS = ("original", "cuttable, not cut", "cuttable, cut")
CUTTING = "of which: cutting"


def whole(header: Header) -> Header:
    """The header of a JPEG that is not to be cut."""
    assert header.jpeg is not None
    return header._replace(jpeg=header.jpeg._replace(restart_interval=0, index_at=0))


def least_us(rounds: int, call: Callable[..., object], *args: Any) -> float:
    """The least CPU time of a call, in µs."""
    best = float("inf")
    for _ in range(rounds):
        started = time.process_time_ns()
        call(*args)
        best = min(best, time.process_time_ns() - started)
    return best / 1000


def main(arguments: list[str] | None = None) -> int:
    """Measure and report. Returns the exit status: 1 where pixels differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuttable", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--photos", type=Path, help="folder of JPEGs (default: scikit-image's photographs, varied)")
    parser.add_argument("--cache", type=Path, default=Path(__file__).parent.parent / ".data")
    parser.add_argument("--files", type=int, default=100, help="how many at most (default 100)")
    parser.add_argument("--regions", type=int, default=10, help="of each file (default 10)")
    parser.add_argument("--rounds", type=int, default=9, help="how often each is decoded (default 9)")
    options = parser.parse_args(arguments)
    source = options.photos or find_photos(options.cache)[0]
    paths = sorted(path for path in source.rglob("*") if path.suffix.lower() in SUFFIXES)[: options.files]

    decoder, rng = Decoder(Decode()), np.random.default_rng(0)
    times: dict[str, list[float]] = {way: [] for way in (*WAYS, CUTTING)}
    sizes, spacings, differ, regions, were_cut = [], Counter(), 0, 0, 0
    packing_s = 0.0
    for path in paths:
        original = Encoded(path.read_bytes())
        started = time.process_time()
        made = Encoded(make_cuttable(original.data))
        packing_s += time.process_time() - started
        header, made_header = decoder.header(original), decoder.header(made)
        jpeg = made_header.jpeg
        if jpeg is None or not is_cuttable(made.data, jpeg):
            continue
        grid = find_grid(made.data, jpeg)
        spacings[grid.across if isinstance(grid, Index) else -jpeg.restart_interval] += 1
        sizes.append((len(original.data), len(made.data)))
        files = (original, header), (made, whole(made_header)), (made, made_header)
        drawn = [draw_region(rng, header.height, header.width) for _ in range(options.regions)]
        wanted = [(made, made_header, (top, left, bottom - top, right - left)) for top, left, bottom, right in drawn]
        cutting = least_us(options.rounds, decoder.cuts, wanted) / len(wanted)
        for (_, _, region), part in zip(wanted, decoder.cuts(wanted), strict=True):
            out = [np.empty((*region[2:], 3), np.uint8) for _ in WAYS]
            for way, file, pixels, found in zip(WAYS, files, out, (None, None, part), strict=True):
                times[way].append(least_us(options.rounds, decoder.decode, *file, region, pixels, found))
            times[WAYS[-1]][-1] += cutting
            times[CUTTING].append(cutting)
            differ += not all(np.array_equal(out[0], other) for other in out[1:])
            regions += 1
            were_cut += part is not None
    if not regions:
        raise SystemExit(f"none of the {len(paths)} files in {source} can be made cuttable")

    console = Console(highlight=False)
    before, after = (sum(column) for column in zip(*sizes, strict=True))
    console.print(
        f"{len(paths)} files in {source}, {len(sizes)} made cuttable: {before / len(sizes) / 1000:.1f} → "
        f"{after / len(sizes) / 1000:.1f} KB on average, {100 * (after / before - 1):+.1f}%\n"
        f"MCUs from a point of the index to the next, and files: "
        f"{', '.join(f'{n}: {found}' for n, found in sorted(spacings.items()))} (below 0: of an interval)\n"
        f"making one cuttable: {1000 * packing_s / len(paths):.0f} ms of CPU\n"
        f"{regions} regions of RandomResizedCrop, {were_cut} of them cut; "
        f"{'pixels are equal' if not differ else f'PIXELS DIFFER in {differ}'}; {cpu_model()}",
        soft_wrap=True,
    )
    table = Table(box=box.SIMPLE)
    for heading in ("", "CPU µs for a region, mean", "median"):
        table.add_column(heading, justify="right" if heading else "left")
    for way, found in times.items():
        table.add_row(way, f"{statistics.mean(found):.0f}", f"{statistics.median(found):.0f}")
    console.print(table)
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
