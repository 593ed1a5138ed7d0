"""The rows, each in its own process: ``python -m benchmarks.gpu.rows NAME RECIPE PACE [MORE]``.

Prints a line of JSON after each phase, so that a phase that fails or times out does not lose the phases before it.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.gpu.plan import NETWORKS, Pace
from benchmarks.interpreter import speed_up_interpreter
from benchmarks.peers.protocol import Peer, Recipe, find_peer, looks_of

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[torch.Tensor, torch.Tensor], None]
DECODED = 2048  # images for the device's decoder


class Runtime:
    """The device as a row needs it: timestamps on its stream, and its memory usage. On the CPU the timestamps are the
    host's, so that every row can run without a GPU."""

    def __init__(self, device: str) -> None:
        self.device = torch.empty(0, device=device).device  # with its index, which decoders need
        self._module: Any = None if self.device.type == "cpu" else torch.get_device_module(self.device)
        self._used_before_mb = self._used_mb()

    def mark(self) -> Any:
        """Mark a point on the caller's current stream, for `ms`."""
        if self._module is None:
            return time.perf_counter()
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start: Any, end: Any) -> float:
        """Return the device's milliseconds from one mark to another, once the device is past both."""
        return 1000 * (end - start) if self._module is None else start.elapsed_time(end)

    def synchronize(self) -> None:
        """Wait for all work issued to the device."""
        if self._module is not None:
            self._module.synchronize(self.device)

    def memory(self) -> dict[str, float]:
        """Return the peak MB of torch's allocator in this process, and the growth of all memory in use on the device.
        Empty on the CPU."""
        if self._module is None:
            return {}
        peak_mb = self._module.max_memory_allocated(self.device) / 1e6
        return {"peak_mb": peak_mb, "device_mb": self._used_mb() - self._used_before_mb}

    def _used_mb(self) -> float:
        if self._module is None:
            return 0.0
        free, total = self._module.mem_get_info(self.device)
        return (total - free) / 1e6


def training_step(name: str, device: torch.device, *, small: bool, channels_last: bool) -> Step:
    """Make a function of (images, labels) that trains the network for a step, without synchronization.

    The networks are torchvision's ResNets in bfloat16. `small` selects a network that only shows that the row runs. It
    has no torch optimiser, whose import would take as long as everything else in such a row.
    """
    torch.manual_seed(0)
    if small:
        convolution = nn.Conv2d(3, 16, 8, 4, 4, bias=False)
        layers = (
            convolution,
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 1000),
        )
        network: nn.Module = nn.Sequential(*layers)
    else:
        from benchmarks.peers.torchvision_import import torchvision

        network = torchvision.models.get_model(name, weights=None, num_classes=1000)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    network = network.to(device, memory_format=layout).train()  # pyright: ignore[reportCallIssue]
    optimiser = None if small else torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    torch.backends.cudnn.benchmark = True

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(network(images), labels)
        network.zero_grad(set_to_none=True)
        loss.backward()
        if optimiser is not None:
            optimiser.step()

    return step


def endless(peer: Peer) -> Iterator[Batch]:
    """Yield the batches of one epoch after another, forever."""
    while True:
        count = 0
        for count, batch in enumerate(peer.epoch(), 1):  # noqa: B007
            yield batch
        if not count:
            raise RuntimeError("an epoch without batches: there are fewer files than a batch has images")


def measured(
    batches: Iterator[Batch], step: Step | None, runtime: Runtime, pace: Pace, ahead: int = 0
) -> dict[str, Any]:
    """Measure rounds after a warm-up. Each value of the result is a list with one entry per round.

    A step first runs repeatedly on one batch, which lets cuDNN choose its algorithms. Meanwhile the loader prefetches
    batches, at most `ahead`. These are then consumed without a step: batches left over from a time when none were
    needed would hide that the step has to wait for the loader.

    Returns:
        images_per_s; next_ms, the median host time of a ``next()``; next_cpu_ms, its median CPU time in the main
        thread. With a step: idle_ms, the median device time from the end of one step to the beginning of the next;
        waiting, the share of the device's time spent so.
    """
    if step is not None:
        batch = next(batches)
        for _ in range(pace.steps):
            step(*batch)
        runtime.synchronize()
        for _ in islice(batches, ahead):
            pass
    if pace.warm_s:
        _round(batches, step, runtime, pace.warm_s, pace.steps)
    rounds = [_round(batches, step, runtime, pace.round_s, pace.steps) for _ in range(pace.rounds)]
    return {key: [figures[key] for figures in rounds] for key in rounds[0]}


def _round(
    batches: Iterator[Batch], step: Step | None, runtime: Runtime, limit_s: float, min_steps: int
) -> dict[str, float]:
    """Consume batches for `limit_s` seconds, and at least `min_steps` batches; the round ends when the device has
    finished all of them."""
    images, marks = 0, []
    next_ms: list[float] = []
    next_cpu_ms: list[float] = []
    runtime.synchronize()
    started = time.perf_counter()
    while len(next_ms) < min_steps or time.perf_counter() - started < limit_s:
        wall, cpu = time.perf_counter(), time.thread_time()
        batch = next(batches)
        next_ms.append(1000 * (time.perf_counter() - wall))
        next_cpu_ms.append(1000 * (time.thread_time() - cpu))
        images += len(batch[0])
        if step is not None:
            begin = runtime.mark()
            step(*batch)
            marks.append((begin, runtime.mark()))
    runtime.synchronize()
    figures = {
        "images_per_s": images / (time.perf_counter() - started),
        "next_ms": statistics.median(next_ms),
        "next_cpu_ms": statistics.median(next_cpu_ms),
    }
    if marks:
        idle = [runtime.ms(end, begin) for (_, end), (begin, _) in pairwise(marks)]
        total_ms = runtime.ms(marks[0][0], marks[-1][1])
        figures |= {"idle_ms": statistics.median(idle), "waiting": sum(idle) / total_ms}
    return figures


def feeding(recipe: Recipe, pace: Pace, name: str, feeds: str) -> None:
    """Measure a loader alone, then feeding each network, unless `feeds` is "0"."""
    warnings.simplefilter("ignore", FutureWarning)  # peers warn about their own deprecations
    warnings.simplefilter("ignore", DeprecationWarning)
    if (recipe.variant.split("/")[0], recipe.device) == ("fused", "cpu"):
        speed_up_interpreter()
    runtime = Runtime(recipe.device)
    peer: Peer = find_peer(name)(recipe)
    started = time.perf_counter()
    batches = endless(peer)
    first = next(batches)
    runtime.synchronize()
    tell({"first_batch_s": time.perf_counter() - started, "falls_back": peer.falls_back, "versions": peer.versions})
    looks_of(first, recipe, getattr(torch, recipe.dtype))
    del first
    # DataLoader prefetches two batches per worker, and workers finish at about the same time, so that batches arrive in
    # bursts of one per worker. No round is shorter than such a burst.
    ahead = 0 if pace.small else 2 * recipe.workers + 2
    burst_pace = replace(pace, steps=max(pace.steps, 0 if pace.small else recipe.workers))
    tell({"alone": measured(batches, None, runtime, burst_pace), "stats": peer.stats(), **runtime.memory()})
    for network in NETWORKS if int(feeds) else ():
        step = training_step(network, runtime.device, small=pace.small, channels_last=recipe.channels_last)
        tell({network: measured(batches, step, runtime, burst_pace, ahead), **runtime.memory()})


def device(recipe: Recipe, pace: Pace) -> None:
    """Measure upper bounds on this device: its copies, and each network on one resident batch."""
    from benchmarks.augmentation.measuring import copy_bandwidth, upload_bandwidth

    runtime = Runtime(recipe.device)
    tell({"copy_gb_s": copy_bandwidth(runtime.device) / 1e9})
    tell({"upload_gb_s": upload_bandwidth(runtime.device) / 1e9})
    images = torch.randn(recipe.batch_size, 3, recipe.size, recipe.size, device=runtime.device)
    layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
    images = images.to(getattr(torch, recipe.dtype), memory_format=layout)
    labels = torch.arange(recipe.batch_size, device=runtime.device)
    for network in NETWORKS:
        step = training_step(network, runtime.device, small=pace.small, channels_last=recipe.channels_last)
        tell({network: measured(itertools.repeat((images, labels)), step, runtime, pace)})


def device_decoder(recipe: Recipe, pace: Pace) -> None:
    """Measure the device's decoder alone, on files in memory, a batch at a time: the upper bound of decoding on the
    device. A decoder that supports regions decodes crops like the recipe's; any other decodes full images."""
    import gpuload as gl
    from benchmarks.peers.decoder_alone import draw_region
    from gpuload.decode import Decode, Decoder
    from gpuload.stage.decode.backend import EncodedRegion, Pixels
    from gpuload.stage.decode.choose import find_decoder

    runtime = Runtime(recipe.device)
    decoder, headers = find_decoder(runtime.device, os.cpu_count() or 1), Decoder(Decode())
    sources, rng = [], np.random.default_rng(0)
    for path in islice(sorted(Path(recipe.root).rglob("*.jpg")), DECODED):
        file = path.read_bytes()
        header = headers.header(gl.Encoded(file))
        top, left, bottom, right = draw_region(rng, header.height, header.width)
        crop = (top, left, bottom - top, right - left)
        sources.append(EncodedRegion(np.frombuffer(file, np.uint8), header.height, header.width, False, crop))
    rates = []
    for _ in range(1 + pace.rounds):
        runtime.synchronize()
        done, started = 0, time.perf_counter()
        while not done or time.perf_counter() - started < pace.round_s:
            for at in range(0, len(sources), recipe.batch_size):
                images = decoder.decode(sources[at : at + recipe.batch_size])
                done += sum(isinstance(image, Pixels) for image in images)
        runtime.synchronize()
        rates.append(done / (time.perf_counter() - started))
    tell({"images_per_s": rates[1:], "decoder": ", ".join(decoder.names), "note": decoder.note})


def session(recipe: Recipe, pace: Pace, trace: str) -> None:
    """Explain where the time of a session goes."""
    from benchmarks.gpu.why import explain

    if recipe.device == "cpu":
        speed_up_interpreter()
    explain(recipe, pace, Path(trace), tell, Runtime(recipe.device).device)


def tell(phase: dict[str, Any]) -> None:
    print(json.dumps(phase), flush=True)


if __name__ == "__main__":
    _, name, recipe, pace, *more = sys.argv
    row: Callable[..., None] = {row.__name__: row for row in (feeding, session, device, device_decoder)}[name]
    row(Recipe(**json.loads(recipe)), Pace(**json.loads(pace)), *more)
