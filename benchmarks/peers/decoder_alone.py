"""The region decoder alone: as many processes as the others have workers, each decoding crops with bare nvImageCodec.

This is as fast as workers could be that did nothing else. The crops are drawn beforehand, the decoded pixels stay
in the decoder's own buffer, which is used again, and nothing is sent anywhere. Each file is read first, as workers
must; beside loaders on the CPU it is measured with the bytes already in memory as well. Without nvImageCodec it is the
decoder that workers use in its place.
"""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.protocol import Recipe, rates_of
from gpuload.datasets.sample import Encoded
from gpuload.decode import Decode
from gpuload.decode.decoder import Decoder

SCALE = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
Region = tuple[int, int, int, int]  # top, left, bottom, right


def draw_region(rng: np.random.Generator, height: int, width: int) -> Region:
    """Draw a box as torchvision's RandomResizedCrop does."""
    for _ in range(10):
        area = height * width * rng.uniform(*SCALE)
        ratio = np.exp(rng.uniform(*np.log(RATIO)))
        w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            top, left = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1))
            return top, left, top + h, left + w
    return 0, 0, height, width


def decode_share(paths: list[str], share: int, connection: Connection) -> None:
    """Run in a child: decode all files each time a word arrives, and answer with the same word."""
    contents = [Path(path).read_bytes() for path in paths]
    rng = np.random.default_rng(share)
    headers = [Decoder(Decode()).header(Encoded(content)) for content in contents]
    regions = [draw_region(rng, header.height, header.width) for header in headers]
    decode = bare_decoder() if used_decoder() == "nvImageCodec" else own_decoder()
    decode(contents[0], regions[0])
    connection.send("ready")
    while word := connection.recv():
        for path, content, region in zip(paths, contents, regions, strict=True):
            if word == "files":
                with open(path, "rb", buffering=0) as file:
                    decode(file.readall(), region)
            else:
                decode(content, region)
        connection.send(word)


def used_decoder() -> str:
    """Return the first of gpuload's decoders of JPEGs that is installed."""
    for name, module in (("nvImageCodec", "nvidia.nvimgcodec"), ("simplejpeg", "simplejpeg")):
        try:
            importlib.import_module(module)
            return name
        except ImportError:
            continue
    return "Pillow"


def own_decoder() -> Callable[[bytes, Region], None]:
    """Make gpuload's decoder, as workers use it."""
    decoder = Decoder(Decode())

    def decode(content: bytes, region: Region) -> None:
        encoded = Encoded(content)
        top, left, bottom, right = region
        decoder.decode(encoded, decoder.header(encoded), (top, left, bottom - top, right - left))

    return decode


def bare_decoder() -> Callable[[bytes, Region], None]:
    """Make nvImageCodec's."""
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
    """Return nvImageCodec's version, of the CUDA version that it was built for."""
    for number in ("12", "13"):
        try:
            return {"nvimgcodec": version(f"nvidia-nvimgcodec-cu{number}")}
        except PackageNotFoundError:
            continue
    return {}


def decoder_alone(recipe: Recipe) -> dict[str, Any]:
    """Measure as many processes as the recipe has workers; each has its share of the files, in a random order."""
    paths = [str(path) for path in sorted(Path(recipe.root).rglob("*.jpg"))]
    np.random.default_rng(0).shuffle(paths)
    context, connections = multiprocessing.get_context("fork"), []
    for share in range(recipe.workers):
        ours, theirs = context.Pipe()
        mine = (paths[share :: recipe.workers], share, theirs)
        context.Process(target=decode_share, args=mine, daemon=True).start()
        theirs.close()  # so that the death of a process is heard
        connections.append(ours)

    def hear(word: str) -> None:
        for connection in connections:
            if (answer := connection.recv()) != word:
                raise SystemExit(f"a decoding process said {answer!r} instead of {word!r}")

    def epoch(word: str) -> int:
        for connection in connections:
            connection.send(word)
        hear(word)
        return len(paths)

    hear("ready")
    result: dict[str, Any] = {**rates_of(lambda: epoch("files"), recipe.epochs - 1)}
    if recipe.device == "cpu":
        from_memory = rates_of(lambda: epoch("memory"), recipe.epochs - 1)
        result["images_per_s_from_memory"] = from_memory["images_per_s"]
    for connection in connections:
        connection.send("")
    return {**result, "decoder": used_decoder(), "versions": versions()}
