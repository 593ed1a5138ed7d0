"""The region decoder alone: as many processes as other peers have workers, each decoding crops with bare nvImageCodec.

This is an upper bound for the rate of workers. The crops are drawn beforehand, the decoded pixels stay in the decoder's
own buffer, which is reused, and nothing is sent anywhere. Each file is read first, as workers must. The processes take
the next few files whenever they are done, as workers do. Without nvImageCodec, the processes use the decoder that
workers fall back to.
"""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.peers.protocol import Recipe, rates_of
from benchmarks.running import take_turns
from gpuload.datasets.sample import Encoded
from gpuload.decode import Decode
from gpuload.decode.decoder import Decoder

SCALE = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
FILES_AT_ONCE = 8  # 10 to 20 ms of work
Region = tuple[int, int, int, int]  # top, left, bottom, right


def draw_region(rng: np.random.Generator, height: int, width: int) -> Region:
    """Draw a crop as torchvision's RandomResizedCrop does."""
    for _ in range(10):
        area = height * width * rng.uniform(*SCALE)
        ratio = np.exp(rng.uniform(*np.log(RATIO)))
        w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            top, left = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1))
            return top, left, top + h, left + w
    return 0, 0, height, width


class Work(NamedTuple):
    """The files to decode, with a region of each, and the number of files that processes have taken so far."""

    paths: list[str]
    regions: list[Region]
    counter: Synchronized[int]


def decode_files(work: Work, connection: Connection) -> None:
    """Run in a child process: decode files on each message that is true until all are taken, and answer with their
    number."""
    decode = bare_decoder() if used_decoder() == "nvImageCodec" else own_decoder()
    decode(Path(work.paths[0]).read_bytes(), work.regions[0])
    connection.send(0)
    while connection.recv():
        count = 0
        for index in take_turns(len(work.paths), work.counter, FILES_AT_ONCE):
            with open(work.paths[index], "rb", buffering=0) as file:
                decode(file.readall(), work.regions[index])
            count += 1
        connection.send(count)


def used_decoder() -> str:
    """Return the name of the installed JPEG decoder that gpuload prefers."""
    for name, module in (("nvImageCodec", "nvidia.nvimgcodec"), ("simplejpeg", "simplejpeg")):
        try:
            importlib.import_module(module)
            return name
        except ImportError:
            continue
    return "Pillow"


def own_decoder() -> Callable[[bytes, Region], None]:
    """Make a function that decodes with gpuload's decoder, as workers do."""
    decoder = Decoder(Decode())

    def decode(content: bytes, region: Region) -> None:
        encoded = Encoded(content)
        top, left, bottom, right = region
        decoder.decode(encoded, decoder.header(encoded), (top, left, bottom - top, right - left))

    return decode


def bare_decoder() -> Callable[[bytes, Region], None]:
    """Make a function that decodes with nvImageCodec directly."""
    codec: Any = importlib.import_module("nvidia.nvimgcodec")
    decoder = codec.Decoder(
        device_id=codec.NVIMGCODEC_DEVICE_CPU_ONLY,
        max_num_cpu_threads=1,
        backends=[codec.Backend(codec.BackendKind.CPU_ONLY)],
    )
    params = codec.DecodeParams(
        apply_exif_orientation=False, color_spec=codec.ColorSpec.SRGB, sample_format=codec.SampleFormat.I_RGB
    )
    image: Any = None

    def decode(content: bytes, region: Region) -> None:
        nonlocal image
        box = codec.Region(start=region[:2], end=region[2:])
        stream = codec.CodeStream(content).get_sub_code_stream(region=box)
        image = decoder.decode(stream, image=image, params=params)
        assert image is not None
        assert (image.height, image.width) == (region[2] - region[0], region[3] - region[1])

    return decode


def versions() -> dict[str, str]:
    """Return nvImageCodec's version, whichever CUDA version it was built for; empty if it is not installed."""
    for number in ("12", "13"):
        try:
            return {"nvimgcodec": version(f"nvidia-nvimgcodec-cu{number}")}
        except PackageNotFoundError:
            continue
    return {}


def decoder_alone(recipe: Recipe) -> dict[str, Any]:
    """Measure as many processes as the recipe has workers; together they decode all files in random order."""
    paths, rng = [str(path) for path in sorted(Path(recipe.root).rglob("*.jpg"))], np.random.default_rng(0)
    rng.shuffle(paths)
    decoder = Decoder(Decode())
    headers = [decoder.header(Encoded(Path(path).read_bytes())) for path in paths]
    regions = [draw_region(rng, header.height, header.width) for header in headers]
    context, connections = multiprocessing.get_context("fork"), []
    work = Work(paths, regions, context.Value("q", 0))
    for _ in range(recipe.workers):
        ours, theirs = context.Pipe()
        context.Process(target=decode_files, args=(work, theirs), daemon=True).start()
        theirs.close()  # so that the death of a process ends this one with EOFError
        connections.append(ours)
    counts: list[int] = []  # of each process in the last epoch

    def epoch() -> int:
        work.counter.value = 0
        for connection in connections:
            connection.send(True)
        counts[:] = [connection.recv() for connection in connections]
        return sum(counts)

    for connection in connections:
        connection.recv()  # blocks until the process is ready
    result = rates_of(epoch, recipe.epochs - 1)
    for connection in connections:
        connection.send(False)
    return {**result, "files_by_process": counts, "decoder": used_decoder(), "versions": versions()}
