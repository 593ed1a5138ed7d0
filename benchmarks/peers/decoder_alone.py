"""The region decoder alone: as many processes as the others have workers, each decoding crops with bare nvImageCodec.

This is as fast as workers could be that did nothing else. The crops are drawn beforehand, the decoded pixels stay
in the decoder's own buffer, which is used again, and nothing is sent anywhere. Each file is read first, as workers
must; beside loaders on the CPU it is measured with the bytes already in memory as well. Without nvImageCodec it is the
decoder that workers use in its place.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from gpuload.cli.processes import cpu_seconds
from gpuload.datasets.sample import Encoded
from gpuload.decode import Decode
from gpuload.decode.decoder import Decoder

SCALE = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
Region = tuple[int, int, int, int]  # top, left, bottom, right


def draw_region(rng: np.random.Generator, height: int, width: int) -> Region:
    """A box as torchvision's RandomResizedCrop draws it."""
    for _ in range(10):
        area = height * width * rng.uniform(*SCALE)
        ratio = np.exp(rng.uniform(*np.log(RATIO)))
        w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            top, left = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1))
            return top, left, top + h, left + w
    return 0, 0, height, width


def decode_share(root: str, share: int, shares: int) -> None:
    """A child: decode every `shares`-th file each time a line arrives on standard input, and answer with a line."""
    paths = sorted(Path(root).rglob("*.jpg"))
    np.random.default_rng(0).shuffle(paths)  # pyright: ignore[reportArgumentType]
    paths = [str(path) for path in paths[share::shares]]
    contents = [Path(path).read_bytes() for path in paths]
    rng = np.random.default_rng(share)
    headers = [Decoder(Decode()).header(Encoded(content)) for content in contents]
    regions = [draw_region(rng, header.height, header.width) for header in headers]
    decode = bare_decoder() if used_decoder() == "nvImageCodec" else own_decoder()
    decode(contents[0], regions[0])
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "files":
            for path, region in zip(paths, regions, strict=True):
                with open(path, "rb", buffering=0) as file:
                    decode(file.readall(), region)
        else:
            for content, region in zip(contents, regions, strict=True):
                decode(content, region)
        print("done", flush=True)


def used_decoder() -> str:
    """The first of gpuload's decoders of JPEGs that is installed."""
    for name, module in (("nvImageCodec", "nvidia.nvimgcodec"), ("simplejpeg", "simplejpeg")):
        try:
            importlib.import_module(module)
            return name
        except ImportError:
            continue
    return "Pillow"


def own_decoder() -> Callable[[bytes, Region], None]:
    """gpuload's decoder, as workers use it."""
    decoder = Decoder(Decode())

    def decode(content: bytes, region: Region) -> None:
        encoded = Encoded(content)
        top, left, bottom, right = region
        decoder.decode(encoded, decoder.header(encoded), (top, left, bottom - top, right - left))

    return decode


def bare_decoder() -> Callable[[bytes, Region], None]:
    """nvImageCodec's."""
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
    """nvImageCodec's, of the CUDA version that it was built for."""
    for number in ("12", "13"):
        try:
            return {"nvimgcodec": version(f"nvidia-nvimgcodec-cu{number}")}
        except PackageNotFoundError:
            continue
    return {}


def main() -> None:
    recipe = json.loads(sys.argv[1])
    root, shares = recipe["root"], recipe["workers"]
    count = sum(1 for _ in Path(root).rglob("*.jpg"))
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers.decoder_alone", "child", root, str(share), str(shares)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for share in range(shares)
    ]

    def all_answer(word: str) -> None:
        for child in children:
            assert child.stdout is not None
            answer = child.stdout.readline().strip()
            if answer != word:
                raise SystemExit(f"a decoding process said {answer!r} instead of {word!r}")

    result: dict[str, Any] = {"decoder": used_decoder(), "versions": versions()}
    all_answer("ready")
    ways = [("images_per_s", "files")]
    if recipe["device"] == "cpu":
        ways.append(("images_per_s_from_memory", "memory"))
    for key, word in ways:
        rates, cpus = [], []
        for _ in range(recipe["epochs"] - 1):
            cpu_before = cpu_seconds(os.getpid())
            started = time.perf_counter()
            for child in children:
                assert child.stdin is not None
                child.stdin.write(word + "\n")
                child.stdin.flush()
            all_answer("done")
            rates.append(count / (time.perf_counter() - started))
            cpus.append(1000 * (cpu_seconds(os.getpid()) - cpu_before) / count)
        result[key] = rates
        if word == "files":
            result["cpu_s_per_1000"] = cpus
    for child in children:
        child.communicate(timeout=10)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "child":
        decode_share(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
