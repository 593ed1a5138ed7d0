"""What `Decode(where="device")` costs the training loop for each image, beyond the library's own work.

    python -m benchmarks.device_decode [--pairs 60] [--images 256] [--size 48x32] [--device cpu] [--json FILE]

A batch is decoded by a loader's `ImageDecoder` (files to code streams, one call of nvImageCodec, crops to their
places), and then by that call alone, with the same code streams. The two take turns, so that what else runs on the
machine is in both. What counts is the median of the differences, of the CPU time of this thread, which is the one that
trains, and of the time on the clock. Images are small, since decoding a photograph takes a hundred times what is
measured; the crop is half as high and as wide, and its copy is in the figure on the CPU, where no kernel does it.

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

__all__ = ["Case", "differences", "main"]

WAYS: Final = {"whole images, cropped": dict.fromkeys(REGIONS_RIGHT, ()), "regions alone": REGIONS_RIGHT}


class Recorder:
    """A decoder of the library's, which notes what it is called with."""

    def __init__(self, decoder: Any) -> None:
        self.decoder = decoder
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def decode(self, codes: Any, **given: Any) -> Any:
        self.calls.append((codes, given))
        return self.decoder.decode(codes, **given)


class Case:
    """A batch that is decoded again and again: `own` as a loader does it, `bare` by the library's calls alone."""

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
        self._decoder = ImageDecoder(self.codec, decode, session.stage.device, session.transfer)
        inner = {name: Recorder(decoder) for name, decoder in self.codec._decoders.items()}
        self.codec._decoders = dict(inner)
        self.own()
        self.calls = [(recorder.decoder, *call) for recorder in inner.values() for call in recorder.calls]
        self.codec._decoders = {name: recorder.decoder for name, recorder in inner.items()}

    def own(self) -> None:
        for part in self.batch.parts:
            part.decoded = None  # as if it were not decoded yet
        failed = self._decoder(self.batch)
        assert not failed

    def bare(self) -> None:
        for decoder, codes, given in self.calls:
            assert None not in decoder.decode(codes, **given)

    def close(self) -> None:
        self._decoder.close()
        self.loader.close()


def differences(case: Case, pairs: int, images: int) -> dict[str, list[float]]:
    """Microseconds of an image that each call of `own` took more than the `bare` one after it."""
    found: dict[str, list[float]] = {"cpu_us": [], "clock_us": []}
    for _ in range(pairs):
        marks = [(time.thread_time(), time.perf_counter())]
        for call in (case.own, case.bare):
            call()
            marks.append((time.thread_time(), time.perf_counter()))
        for which, name in enumerate(found):
            before, between, after = (mark[which] for mark in marks)
            found[name].append(1e6 * ((between - before) - (after - between)) / images)
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
    parser.add_argument("--pairs", type=int, default=60, help="of each way (default 60)")
    parser.add_argument("--images", type=int, default=256, help="in a batch (default 256)")
    parser.add_argument("--size", default="48x32", help="of the images, width x height (default 48x32)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--json", type=Path, help="write all differences there")
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
            found[way] = differences(case, given.pairs, given.images)
        finally:
            case.close()
        for name, values in found[way].items():
            low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
            print(f"{way}, {name}: {middle:.1f} (quartiles {low:.1f} … {high:.1f}) an image, {given.pairs} pairs")
    if given.json is not None:
        given.json.write_text(json.dumps({"images": given.images, "size": given.size, "ways": found}) + "\n")


if __name__ == "__main__":
    main()
