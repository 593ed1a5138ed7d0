"""The device's decoder alone: files in memory, a batch at a time. Decoding there can be no faster. A decoder that has
regions decodes such as the recipe's crops; others, whole images.

python -m benchmarks.gpu.decoding RECIPE PACE

Prints a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import islice
from pathlib import Path

import numpy as np

import gpuload as gl
from benchmarks.gpu.feeding import tell
from benchmarks.gpu.plan import Pace
from benchmarks.gpu.runtime import Runtime
from benchmarks.peers.decoder_alone import draw_region
from benchmarks.peers.recipe import Recipe
from gpuload.decode import Decode, Decoder
from gpuload.stage.decode.backend import Pixels, Source
from gpuload.stage.decode.choose import find_decoder

__all__ = ["main"]

IMAGES = 2048


def main() -> None:
    recipe, pace = Recipe(**json.loads(sys.argv[1])), Pace(**json.loads(sys.argv[2]))
    runtime = Runtime(recipe.device)
    decoder, headers = find_decoder(runtime.device, os.cpu_count() or 1), Decoder(Decode())
    sources, rng = [], np.random.default_rng(0)
    for path in islice(sorted(Path(recipe.root).rglob("*.jpg")), IMAGES):
        file = path.read_bytes()
        header = headers.header(gl.Encoded(file))
        top, left, bottom, right = draw_region(rng, header.height, header.width)
        crop = (top, left, bottom - top, right - left)
        sources.append(Source(np.frombuffer(file, np.uint8), header.height, header.width, False, crop))
    rates = []
    for _ in range(1 + pace.rounds):
        runtime.synchronize()
        done, started = 0, time.perf_counter()
        while not done or time.perf_counter() - started < pace.round_s:
            for at in range(0, len(sources), recipe.batch_size):
                found = decoder.decode(sources[at : at + recipe.batch_size])
                done += sum(isinstance(one, Pixels) for one in found)
        runtime.synchronize()
        rates.append(done / (time.perf_counter() - started))
    tell({"images_per_s": rates[1:], "decoder": ", ".join(decoder.names), "note": decoder.note})


if __name__ == "__main__":
    main()
