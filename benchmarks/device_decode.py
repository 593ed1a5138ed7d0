"""What `Decode(where="device")` costs the training loop for each image, beyond the library's own call.

    python -m benchmarks.device_decode [--rounds 100] [--images 256] [--size 48x32] [--device cpu] [--json FILE]

A batch is decoded by a loader's `ImageDecoder` again and again: files to code streams, one call of nvImageCodec, crops
to their places. Off each round's time goes that of the call within it, so what else runs on the machine is in both.
What counts is the median, of the CPU time of this thread, which is the one that trains, and of the time on the clock;
on a busy machine, where caches and cores are shared, the least says more. Images are small, since decoding a photograph
takes a hundred times what is measured; the crop is half as high and as wide, and its copy is in the figure on the CPU,
where no kernel does it.

"Whole images" is what a GPU does with a version of nvImageCodec that is not known to have regions right.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image

import gpuload as gl
from benchmarks.machine import cpu_model, versions
from gpuload import transforms as T
from gpuload.stage.decode import ImageDecoder
from gpuload.stage.decode.nvimagecodec import REGIONS_RIGHT, NvImageCodec, load_library

__all__ = ["CLOCKS", "WAYS", "Case", "main", "overheads", "photographs"]

CLOCKS: Final = {"cpu_us": time.thread_time, "clock_us": time.perf_counter}
WAYS: Final = {"whole images, cropped": dict.fromkeys(REGIONS_RIGHT, ()), "regions alone": REGIONS_RIGHT}


class Timed:
    """A decoder of the library's, whose calls are timed: `spent_s` by each of the `CLOCKS`."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self.spent_s = dict.fromkeys(CLOCKS, 0.0)

    def decode(self, codes: Any, **given: Any) -> Any:
        before = {name: clock() for name, clock in CLOCKS.items()}
        images = self._decoder.decode(codes, **given)
        for name, clock in CLOCKS.items():
            self.spent_s[name] += clock() - before[name]
        return images


class Case:
    """A batch that is decoded again and again, and the library's decoders that do it."""

    def __init__(self, way: str, files: Sequence[bytes], size_hw: tuple[int, int], device: torch.device) -> None:
        chain = [T.CenterCrop((size_hw[0] // 2, size_hw[1] // 2))]
        dataset = [(gl.Encoded(file), number) for number, file in enumerate(files)]
        decode = gl.Decode(where="device")
        self.loader = gl.Loader(
            dataset, len(files), transforms=chain, num_workers=0, device=device, shuffle=False, decode=decode
        )
        self._epoch = iter(self.loader)  # which ends with its iterator
        session: Any = self.loader._session
        self.batch = session.feed.take()
        self.codec = NvImageCodec(session.stage.device, 1, load_library(), regions_right=WAYS[way])
        self.timed = [Timed(decoder) for decoder in self.codec._decoders.values()]
        self.codec._decoders = dict(zip(self.codec.names, self.timed, strict=True))
        self._decoder = ImageDecoder(self.codec, decode, session.stage.device, session.transfer)

    def decode(self) -> None:
        for part in self.batch.parts:
            part.decoded = None  # as if it were not decoded yet
        failed = self._decoder(self.batch)
        assert not failed

    def close(self) -> None:
        self._decoder.close()
        self.loader.close()


def overheads(case: Case, rounds: int, images: int) -> dict[str, list[float]]:
    """Microseconds of an image that each round took more than the library's calls in it, by each of the `CLOCKS`."""
    case.decode()
    found: dict[str, list[float]] = {name: [] for name in CLOCKS}
    for _ in range(rounds):
        within = {name: sum(timed.spent_s[name] for timed in case.timed) for name in CLOCKS}
        before = {name: clock() for name, clock in CLOCKS.items()}
        case.decode()
        for name, clock in CLOCKS.items():
            spent_s = sum(timed.spent_s[name] for timed in case.timed) - within[name]
            found[name].append(1e6 * (clock() - before[name] - spent_s) / images)
    return found


def photographs(count: int, size_hw: tuple[int, int]) -> list[bytes]:
    rng = np.random.default_rng(0)
    files = []
    for _ in range(count):
        file = io.BytesIO()
        coarse = Image.fromarray(rng.integers(0, 256, (4, 6, 3), np.uint8))
        coarse.resize((size_hw[1], size_hw[0]), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    return files


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="of each way (default 100)")
    parser.add_argument("--images", type=int, default=256, help="in a batch (default 256)")
    parser.add_argument("--size", default="48x32", help="of the images, width x height (default 48x32)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--json", type=Path, help="write all figures there")
    given = parser.parse_args(arguments)
    width, height = map(int, given.size.split("x"))
    files, device = photographs(given.images, (height, width)), torch.device(given.device)
    print(f"{cpu_model()}; " + ", ".join(f"{name} {number}" for name, number in versions().items()))
    found = {}
    for way in WAYS:
        case = Case(way, files, (height, width), device)
        try:
            if case.codec.regions != (way == "regions alone"):
                print(f"{way}: not with this version ({case.codec.note})")
                continue
            found[way] = overheads(case, given.rounds, given.images)
        finally:
            case.close()
        for name, values in found[way].items():
            low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
            print(f"{way}, {name}: {middle:.1f} (quartiles {low:.1f} … {high:.1f}, least {min(values):.1f}) an image")
    if given.json is not None:
        given.json.write_text(json.dumps({"images": given.images, "size": given.size, "ways": found}) + "\n")


if __name__ == "__main__":
    main()
