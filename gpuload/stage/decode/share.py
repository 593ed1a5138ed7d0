"""How much of the decoding a device should do where workers do the rest: the share with which both end together.

Measured in a fraction of a second, in the main process, with a picture made up for it: a crop of it on the device, a
batch at a time, beside the same crop on one CPU, times the workers. Runs before workers are started; keeps nothing.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from time import perf_counter
from typing import Final

import numpy as np

from gpuload.datasets.sample import Encoded
from gpuload.decode import Decode, Decoder
from gpuload.stage.decode.backend import DeviceDecoder, Pixels, Source

__all__ = ["measure_share", "share_of"]

HEIGHT, WIDTH = 375, 500
CROP: Final = (60, 90, 255, 255)  # a third of the picture: about what RandomResizedCrop draws in the mean
BATCH: Final = 64
LEAST_S: Final = 0.05  # of each measurement
ROUNDS: Final = 3
LEAST_SHARE: Final = 0.01


def measure_share(decoder: DeviceDecoder, workers: int) -> float:
    """The share for so many workers, 0.01 to 0.99.

    Raises:
        RuntimeError: the device refuses the picture.
    """
    data = _picture()
    source = Source(np.frombuffer(data, np.uint8), HEIGHT, WIDTH, False, CROP)
    given, cpu = Encoded(data), Decoder(Decode(), prefer="nvimgcodec")

    def on_device() -> int:
        last = decoder.decode([source] * BATCH)[-1]
        if not isinstance(last, Pixels):
            raise RuntimeError(f"Decode(where='both'): the device refuses a plain JPEG: {last.why}")
        last.tensor[:1].cpu()  # waits for it
        return BATCH

    def on_cpu() -> int:
        cpu.decode(given, cpu.header(given), CROP)
        return 1

    return share_of(_rate(on_device), _rate(on_cpu) * max(1, workers))


def share_of(device_rate: float, workers_rate: float) -> float:
    """The share with which both end together, in hundredths.

    Example:
        >>> share_of(9000.0, 3000.0)
        0.75
    """
    share = round(device_rate / (device_rate + workers_rate), 2)
    return min(max(share, LEAST_SHARE), 1 - LEAST_SHARE)


def _rate(call: Callable[[], int]) -> float:
    """Images a second, of the best of some rounds: what else runs only makes it slower."""
    call()
    best = 0.0
    for _ in range(ROUNDS):
        done, start = 0, perf_counter()
        while (took := perf_counter() - start) < LEAST_S:
            done += call()
        best = max(best, done / took)
    return best


def _picture() -> bytes:
    """A JPEG with as many details as a photograph has, about."""
    from PIL import Image

    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3), np.uint8)).resize(
        (WIDTH, HEIGHT), Image.Resampling.BICUBIC
    )
    noisy = np.asarray(coarse, np.int16) + rng.integers(-12, 13, (HEIGHT, WIDTH, 1), np.int16)
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()
