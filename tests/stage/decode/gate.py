"""Loaders whose decoder on the device is stopped during a call, until a test opens the gate."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from helpers.generated_images import jpeg_bytes, smooth_image
from simulated.decoder import decoding_with

import gpuload as gl
from gpuload import transforms as T

LIMIT_S = 60
FILES = [jpeg_bytes(smooth_image(40, 50, number)) for number in range(12)]
IMAGES = [(gl.Encoded(file), index) for index, file in enumerate(FILES)]


class Gate:
    """A function that runs before each call of the decoder, and stops one of the calls until `opened` is set."""

    def __init__(self, stopped_call: int) -> None:
        self.stopped_call, self.calls = stopped_call, 0
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.stopped_call:
            self.reached.set()
            assert self.opened.wait(LIMIT_S)


def make_loader(**options: Any) -> gl.Loader:
    defaults = {"num_workers": 1, "device": "cpu", "transforms": [T.CenterCrop(32)], "prefetch_factor": 4}
    return gl.Loader(IMAGES, 2, **{"decode": gl.Decode(where="device"), **defaults, **options})


@contextlib.contextmanager
def stopped_at(gate: Gate) -> Iterator[tuple[gl.Loader, Any, list[Any]]]:
    """Yield a loader whose decoder is stopped at the gate, its iterator, and the batches read so far."""
    with decoding_with(before=gate), make_loader() as loader:
        iterator = iter(loader)
        first_batch = next(iterator)
        while not gate.reached.wait(0.001):
            loader._session.feed.pump(0.0)
        try:
            yield loader, iterator, [first_batch]
        finally:
            gate.opened.set()


def open_after_closing_has_begun(steps: Any, gate: Gate) -> None:
    while not steps.closed:
        gate.opened.wait(0.001)
    gate.opened.set()
