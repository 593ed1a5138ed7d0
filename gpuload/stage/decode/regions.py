"""Whether a GPU's decoder decodes regions: tried in a process of its own, since one that cannot may end its process.

A trial runs once for each decoder, version of nvImageCodec, GPU and driver. What it found is kept in a file of its own
beside the indices (`gpuload.datasets.stores.cached.cache_folder`), written under another name and then renamed. A file
that is damaged, or of something else, counts as none. What says nothing of regions is not kept: a trial that could not
be started, that ended with an error such as a full GPU, or that was killed from outside.

The main process asks; the trial's process (`serve`) has a CUDA context for a few seconds, leaves no core file, and is
killed at the end of its time.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from gpuload.datasets.stores.cached import cache_folder
from gpuload.errors import one_line
from gpuload.stage.decode.backend import DeviceDecoder, Pixels, Source

__all__ = ["fault_of_regions", "find_fault", "serve", "try_regions"]

LIMIT_S: Final = 60.0
END_S: Final = 5.0  # a process in a driver's call may not end when it is killed
FROM_OUTSIDE: Final = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)
HEIGHT, WIDTH = 165, 221
# As (top, left, height, width): within, at each edge and corner, thin, and on the borders of 4:2:0's blocks of 16×16.
REGIONS: Final = (
    (0, 0, HEIGHT, WIDTH),
    (37, 51, 90, 101),
    (0, 0, 33, 47),
    (HEIGHT - 31, WIDTH - 45, 31, 45),
    (16, 32, 64, 80),
    (0, 17, HEIGHT, 1),
    (0, WIDTH - 1, HEIGHT, 1),
    (HEIGHT - 1, 0, 1, WIDTH),
    (HEIGHT - 1, WIDTH - 1, 1, 1),
)
PROGRAM: Final = """
import json, sys
given = json.loads(sys.argv[1])
sys.path[:] = given["path"]
from gpuload.stage.decode.regions import serve
serve(given["decoder"], given["device"])
"""


@functools.cache
def fault_of_regions(decoder: str, device: torch.device, here: tuple[str, ...]) -> str:
    """Why a device's decoder, by its name, is not to be used for regions; "" if it is.

    `here` is what the answer depends on beside the decoder: version of nvImageCodec, GPU, driver.
    """
    asked = [decoder, *here]
    name = "regions-" + hashlib.blake2b(json.dumps(asked).encode(), digest_size=16).hexdigest() + ".json"
    path = os.path.join(cache_folder(), name)
    if (fault := _read(path, asked)) is None:
        given = json.dumps({"path": sys.path, "decoder": decoder, "device": str(device)})
        fault, kept = try_regions([sys.executable, "-P", "-c", PROGRAM, given])
        if kept:
            with contextlib.suppress(OSError):
                _write(path, asked, fault)
    return fault


def try_regions(command: Sequence[str], limit_s: float = LIMIT_S) -> tuple[str, bool]:
    """Run a trial. Returns what is wrong with regions, "" if nothing is, and whether that will be so the next time."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return f"a trial of regions could not be started: {one_line(str(error))}", False
    try:
        printed, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"a trial of regions had not ended after {limit_s:g} s", True
    finally:
        if process.poll() is None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=END_S)
    if process.returncode < 0:
        number = -process.returncode
        named = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        return f"a trial of regions was ended by {named}", number not in FROM_OUTSIDE
    lines = errors.strip().splitlines() or ["no message"]
    if process.returncode:
        return f"a trial of regions failed: {one_line(lines[-1])}", False
    try:
        return str(json.loads(printed.splitlines()[-1])["fault"]), True
    except (IndexError, KeyError, TypeError, ValueError):
        return f"a trial of regions gave no answer: {one_line(lines[-1])}", False


def serve(decoder: str, device: str) -> None:
    """The trial itself: one line of JSON."""
    import resource  # not on Windows, which has no such decoder either

    from gpuload.stage.decode.nvimagecodec import NvImageCodec, load_library

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    fault = find_fault(NvImageCodec(torch.device(device), 1, load_library(), only=decoder))
    print(json.dumps({"fault": fault}), flush=True)


def find_fault(decoder: DeviceDecoder) -> str:
    """What is wrong with the regions of a decoder that says it has them: each must have the bits of that part of the
    whole picture, many in one call; "" if nothing is. Pictures of which it refuses the whole do not count."""
    for data, grey in _pictures():
        file = np.frombuffer(data, np.uint8)
        sources = [Source(file, HEIGHT, WIDTH, grey, region) for region in REGIONS]
        [one] = decoder.decode(sources[:1])
        if not isinstance(one, Pixels):
            continue
        whole = one.tensor.clone()
        for region, found in zip(REGIONS, decoder.decode(sources), strict=True):
            if not isinstance(found, Pixels):
                return f"it refuses a region: {found.why}"
            top, left, height, width = region
            expected = whole[top : top + height, left : left + width]
            pixels = found.tensor[top : top + height, left : left + width] if found.whole else found.tensor
            if not torch.equal(pixels, expected):
                levels = (pixels.int() - expected.int()).abs().max().item()
                return f"the region {region} is up to {levels} levels away from that part of the whole picture"
    return ""


def _pictures() -> list[tuple[bytes, bool]]:
    """JPEGs, and whether they are grey."""
    from PIL import Image

    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (12, 16, 3), np.uint8)
    picture = Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
    options: list[dict[str, Any]] = [{"subsampling": 2}, {"subsampling": 1}, {"subsampling": 0}]
    options.append({"subsampling": 2, "restart_marker_blocks": 4})
    made = []
    for grey, given in [(False, one) for one in options] + [(True, {})]:
        file = io.BytesIO()
        (picture.convert("L") if grey else picture).save(file, "JPEG", quality=90, **given)
        made.append((file.getvalue(), grey))
    return made


def _read(path: str, asked: list[str]) -> str | None:
    """What a trial found; None if that is not known."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        return found["fault"] if found["asked"] == asked and isinstance(found["fault"], str) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: str, asked: list[str], fault: str) -> None:
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    descriptor, other = tempfile.mkstemp(dir=folder, suffix=".part")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump({"asked": asked, "fault": fault}, file)
        os.replace(other, path)
    except BaseException:
        os.unlink(other)
        raise
