"""Which of DALI's two modes costs less as a stage on the CPU: its dynamic mode, or a pipeline with external sources.

    python -m benchmarks.dali_modes --photos DIR

Both are given the same decoded photographs, of their own sizes, as views of one flat tensor (DLPack, no copy), and the
same parameters for each sample: a box that is resized to 224×224, and a coin for a flip. They end with one normalised
batch, N×C×H×W, in torch's memory. One thread each; one after the other in every round, in an order that changes; the
first round is not counted. Figures are medians over the rounds, the ratio is taken within them.

Before anything is measured it is checked that DALI looks at the photographs where they lie, and that both modes give
the same numbers.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nvidia import dali
from nvidia.dali import backend as dali_backend
from nvidia.dali import fn as dali_fn
from nvidia.dali import types as dali_types
from nvidia.dali.experimental import dynamic as dali_dynamic
from nvidia.dali.pipeline import pipeline_def
from PIL import Image

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages
from gpuload.transforms.program.ops import Box, Flip

__all__ = ["main"]

# Made at run time, or with arguments of many kinds: no type checker knows them.
backend: Any = dali_backend
fn: Any = dali_fn
ndd: Any = dali_dynamic
types: Any = dali_types

MEAN, STD = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]
SIZE = 224
DTYPES = {"float32": types.FLOAT, "float16": types.FLOAT16}
Parameters = dict[str, np.ndarray]
Mode = Callable[[list[torch.Tensor], Parameters, torch.Tensor], None]


def dynamic_mode(dtype: str) -> Mode:
    """A function that makes a batch in dynamic mode."""
    cpu = ndd.Device("cpu")
    with cpu:
        context = ndd.EvalContext(num_threads=1)

    def run(images: list[torch.Tensor], parameters: Parameters, output: torch.Tensor) -> None:
        with cpu, context, ndd.EvalMode.sync_cpu:
            given = {name: ndd.as_batch(values) for name, values in parameters.items()}
            mirror = given.pop("mirror")
            resized = ndd.resize(
                ndd.as_batch(images, layout="HWC"), **given, interp_type=types.INTERP_TRIANGULAR, antialias=True
            )
            finished = ndd.crop_mirror_normalize(
                resized, mirror=mirror, mean=MEAN, std=STD, dtype=DTYPES[dtype], output_layout="CHW"
            )
            output.copy_(finished.torch())

    return run


def pipeline_mode(dtype: str, batch_size: int) -> Mode:
    """A function that makes a batch with a pipeline that is fed."""

    nowhere: Any = None  # no GPU

    @pipeline_def(
        batch_size=batch_size,
        num_threads=1,
        device_id=nowhere,
        exec_async=False,
        exec_pipelined=False,
        prefetch_queue_depth=1,
    )
    def line() -> Any:
        def source(name: str, ndim: int, kind: Any, layout: str | None = None) -> Any:
            return fn.external_source(name=name, no_copy=True, layout=layout, ndim=ndim, dtype=kind)

        images = fn.resize(
            source("images", 3, types.UINT8, "HWC"),
            roi_start=source("roi_start", 1, types.FLOAT),
            roi_end=source("roi_end", 1, types.FLOAT),
            size=source("size", 1, types.FLOAT),
            interp_type=types.INTERP_TRIANGULAR,
            antialias=True,
        )
        mirror = source("mirror", 0, types.INT32)
        return fn.crop_mirror_normalize(
            images, mirror=mirror, mean=MEAN, std=STD, dtype=DTYPES[dtype], output_layout="CHW"
        )

    pipe = line()
    pipe.build()

    def run(images: list[torch.Tensor], parameters: Parameters, output: torch.Tensor) -> None:
        pipe.feed_input("images", backend.TensorListCPU.from_dlpack_list(images, layout="HWC", contiguous=False))
        for name, values in parameters.items():
            pipe.feed_input(name, backend.TensorListCPU(values))
        (finished,) = pipe.run()
        output.copy_(torch.from_dlpack(finished.as_tensor()))

    return run


def parameters_of(sizes_hw: np.ndarray, turn: int) -> Parameters:
    """What gpuload draws for the photographs in a round, as both modes take it."""
    chain = T.Chain([T.RandomResizedCrop(SIZE), T.RandomHorizontalFlip()])
    crop, flip = chain.draw(epoch_key(0, turn), np.arange(len(sizes_hw)), sizes_hw).records
    assert isinstance(crop, Box)
    assert isinstance(flip, Flip)
    boxes = crop.box_tlhw.astype(np.float32)
    return {
        "roi_start": np.ascontiguousarray(boxes[:, :2]),
        "roi_end": boxes[:, :2] + boxes[:, 2:],
        "size": np.full((len(boxes), 2), SIZE, np.float32),
        "mirror": flip.flipped.astype(np.int32),
    }


def views(images: RaggedImages) -> list[torch.Tensor]:
    """Each photograph, H×W×C, where it lies."""
    found = []
    for offset, (height, width, channels) in zip(images.offsets.tolist(), images.shapes.tolist(), strict=True):
        strides = (width * channels, channels, 1)
        found.append(images.pixels.as_strided((height, width, channels), strides, offset))
    return found


def check(modes: dict[str, Mode], images: list[torch.Tensor], parameters: Parameters) -> float:
    """Whether nothing is copied on the way in, and the greatest difference between the modes."""
    for given in (
        backend.TensorListCPU.from_dlpack_list(images, layout="HWC", contiguous=False),
        ndd.as_batch(images, layout="HWC")._storage,
    ):
        if [given[row].data_ptr() for row in range(len(images))] != [image.data_ptr() for image in images]:
            raise SystemExit("DALI has copied the photographs")
    results = [torch.empty(len(images), 3, SIZE, SIZE) for _ in modes]
    for mode, result in zip(modes.values(), results, strict=True):
        mode(images, parameters, result)
    return float((results[0] - results[1]).abs().max())


def measure(
    modes: dict[str, Mode], images: RaggedImages, dtype: str, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU milliseconds for a batch of each mode, round by round."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in modes}
    output = torch.empty(len(images), 3, SIZE, SIZE, dtype=getattr(torch, dtype))
    order = list(modes)
    for turn in range(rounds + 1):
        random.Random(turn).shuffle(order)
        parameters = parameters_of(images.sizes_hw, turn)
        for name in order:
            wall, spent = time.perf_counter(), time.process_time()
            modes[name](views(images), parameters, output)
            taken = 1000 * (time.perf_counter() - wall), 1000 * (time.process_time() - spent)
            if turn:
                found[name].append(taken)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--photos", type=Path, required=True, help="a folder of JPEGs; they are taken in turn")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    options: Any = parser.parse_args(arguments)
    torch.set_num_threads(1)
    files = sorted(options.photos.glob("*.jpg"))
    if not files:
        raise SystemExit(f"no JPEGs (*.jpg) in {options.photos}")
    decoded = [np.array(Image.open(file).convert("RGB")) for file in files]
    images = RaggedImages.from_arrays([decoded[row % len(files)] for row in range(options.batch_size)])
    print(
        f"DALI {dali.__version__}, torch {torch.__version__}, Python {platform.python_version()}; CPU, one thread of "
        f"{os.cpu_count()}; {len(files)} photographs, batches of {len(images)}, {options.rounds} rounds"
    )
    for dtype in DTYPES:
        print(f"crop, flip, normalise, {dtype}")
        compare(images, dtype, options.rounds)


def compare(images: RaggedImages, dtype: str, rounds: int) -> None:
    """Measure both modes, and print."""
    modes = {"dynamic": dynamic_mode(dtype), "pipeline": pipeline_mode(dtype, len(images))}
    apart = check(modes, views(images), parameters_of(images.sizes_hw, 0))
    results = measure(modes, images, dtype, rounds)
    for name, taken in results.items():
        wall, spent = (statistics.median(column) for column in zip(*taken, strict=True))
        print(f"  {name:9} {wall:7.2f} ms for a batch, {spent / len(images):6.3f} CPU ms for an image")
    ratios = [one[1] / other[1] for one, other in zip(results["dynamic"], results["pipeline"], strict=True)]
    print(
        f"  dynamic over pipeline, CPU: {statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f}); "
        f"the numbers differ by {apart:g} at most"
    )


if __name__ == "__main__":
    main()
