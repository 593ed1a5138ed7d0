"""Trials for ``gpuload doctor`` that can crash, hang or take seconds, and therefore run in separate processes. The
doctor calls `try_in_process`; each separate process runs `main`, which prints the result of each step when it ends.
"""

from __future__ import annotations

import io
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from gpuload.errors import one_line

__all__ = ["ISOLATED", "LOCKED_BYTES", "STEPS", "find_fault", "main", "sample_jpeg", "try_in_process", "try_regions"]

TIMEOUT_S: Final = 120.0
RESULT: Final = b"gpuload-trial "  # prefix of lines with results; libraries also print to stdout
LOCKED_BYTES: Final = 64 << 20
MAX_MEAN_ERROR: Final = 3  # maximum average difference from the expected pixel values, which are 0 to 255
SIZE_WH: Final = (96, 64)
REGION_TLHW: Final = (16, 8, 32, 40)

# For checking regions: the size of the pictures, and the regions as (top, left, height, width): inside the picture, at
# each edge and corner, one pixel thin, and aligned to the 16×16 blocks of 4:2:0.
HEIGHT, WIDTH = 165, 221
REGIONS: Final = (
    (0, 0, HEIGHT, WIDTH), (37, 51, 90, 101), (0, 0, 33, 47), (HEIGHT - 31, WIDTH - 45, 31, 45), (16, 32, 64, 80),
    (0, 17, HEIGHT, 1), (0, WIDTH - 1, HEIGHT, 1), (HEIGHT - 1, 0, 1, WIDTH), (HEIGHT - 1, WIDTH - 1, 1, 1),
)  # fmt: skip


def try_in_process(steps: Sequence[str], jpeg: bytes = b"", timeout_s: float = TIMEOUT_S) -> dict[str, dict[str, Any]]:
    """Run some of the `STEPS` in another process. Return a dict per step with ``ok``, ``why`` (the reason for a
    failure), and values specific to the step."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from gpuload.cli.trial import main; main({list(steps)})"
    try:
        completed = subprocess.run(
            [sys.executable, "-P", "-c", code], input=jpeg, capture_output=True, timeout=timeout_s
        )
        output, why = completed.stdout, _exit_reason(completed.returncode, completed.stderr.decode(errors="replace"))
    except subprocess.TimeoutExpired as error:
        output, why = error.stdout or b"", f"it did not finish within {timeout_s:.0f} seconds"
    lines = [line.removeprefix(RESULT) for line in output.splitlines() if line.startswith(RESULT)]
    results = dict(map(json.loads, lines))
    for step in steps[len(results) :]:
        results[step] = {"ok": False, "why": why}
        why = why if why.startswith("not tried") else f"not tried, because of {step}: {why}"
    return results


def _exit_reason(status: int, errors: str) -> str:
    if status < 0:
        return f"the process crashed ({signal.Signals(-status).name})"
    last_line = next((f": {line}" for line in reversed(errors.splitlines()) if line.strip()), "")
    return one_line(f"the process ended with status {status}{last_line}")


def main(steps: Sequence[str]) -> None:
    """Run the steps in this process, and print the name and result of each as a line of JSON."""
    jpeg = sys.stdin.buffer.read()
    for step in steps:
        try:
            result = {"ok": True, "why": "", **(STEPS[step](jpeg) or {})}
        except BaseException as error:  # a broken installation may raise anything, even SystemExit
            result = {"ok": False, "why": one_line(f"{type(error).__name__}: {error}")}
        print(f"\n{RESULT.decode()}{json.dumps([step, result])}", flush=True)


def sample_jpeg() -> bytes:
    """Create a small 4:2:0 JPEG with known pixels."""
    from PIL import Image

    width, height = SIZE_WH
    image = Image.new("RGB", SIZE_WH)
    image.putdata([(2 * x, 3 * y, x + y) for y in range(height) for x in range(width)])
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    return file.getvalue()


def _make_decode_step(name: str) -> Callable[[bytes], None]:
    """Return a step that decodes a region of the JPEG with one of gpuload's decoders and checks the pixels."""

    def step(jpeg: bytes) -> None:
        from gpuload.decode import Decode
        from gpuload.decode import jpeg as decoders
        from gpuload.decode.header import read_header

        pixels, why = getattr(decoders, name)().decode(jpeg, read_header(jpeg, Decode()).jpeg, False, REGION_TLHW)
        if pixels is None:
            raise RuntimeError(why)
        _check_pixels(pixels)

    return step


def _try_pillow(jpeg: bytes) -> None:
    import numpy as np
    from PIL import Image

    top, left, height, width = REGION_TLHW
    _check_pixels(np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB"))[top : top + height, left : left + width])


def _check_pixels(pixels: Any) -> None:
    import numpy as np

    top, left, height, width = REGION_TLHW
    ys, xs = np.mgrid[top : top + height, left : left + width]
    error = float(np.abs(np.stack([2 * xs, 3 * ys, xs + ys], axis=2) - pixels.astype(np.int64)).mean())
    if error > MAX_MEAN_ERROR:
        raise RuntimeError(f"decoded pixels differ from the expected values by {error:.0f} of 255 on average")


def _try_torch(jpeg: bytes) -> dict[str, Any]:
    import torch

    result: dict[str, Any] = {"version": str(torch.__version__), "cuda": torch.version.cuda, "other": "", "devices": []}
    if torch.version.hip:
        result["other"] = f"ROCm {torch.version.hip}"
    elif torch.xpu._is_compiled():
        result["other"] = "XPU"
    try:
        if torch.version.cuda and not torch.cuda.is_available():
            torch.cuda.init()  # raises an error that says why
        for number in range(torch.accelerator.device_count() if torch.accelerator.is_available() else 0):
            properties = torch.get_device_module().get_device_properties(number)
            result["devices"].append({"name": properties.name, "bytes": properties.total_memory})
    except (RuntimeError, AssertionError) as error:
        result["why"] = one_line(str(error))
    return result


def _try_page_locking(jpeg: bytes) -> dict[str, Any]:
    import numpy as np
    import torch

    from gpuload.stage import device as devices

    if not devices.is_available():
        return {"code": None}
    device = devices.Accelerator(devices.current_device())
    memory = np.ones(LOCKED_BYTES, np.uint8)
    code = device.lock(memory.ctypes.data, LOCKED_BYTES)
    if code == 0:
        device.unlock(memory.ctypes.data)
        torch.accelerator.synchronize()
    return {"code": None if code == devices.CANNOT_LOCK else code}


def _try_workers(jpeg: bytes) -> dict[str, Any]:
    import numpy as np

    import gpuload as gl

    dataset = [(np.full((8, 8, 3), number, np.uint8), number) for number in range(4)]
    start_s = time.perf_counter()
    with gl.Loader(dataset, 4, num_workers=1, device="cpu") as loader:
        images, numbers = next(iter(loader))
        seconds = time.perf_counter() - start_s
    if numbers.tolist() != [0, 1, 2, 3] or images[:, 0, 0, 0].tolist() != [0, 1, 2, 3]:
        raise RuntimeError("a worker returned the wrong samples")
    return {"seconds": seconds}


def _try_triton(jpeg: bytes) -> None:
    from gpuload.stage import device as devices
    from gpuload.stage.fused import FusedBackend

    if not devices.is_available():
        return
    if (problem := FusedBackend.unmet_requirement(devices.current_device())) is not None:
        raise RuntimeError(problem)
    FusedBackend(devices.current_device())


def _try_dali(jpeg: bytes) -> None:
    import torch

    from gpuload.stage.dali import DaliBackend

    DaliBackend(torch.device("cpu"))


def _try_regions_without_core_dump(jpeg: bytes) -> dict[str, Any]:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dump if the decoder crashes
    return try_regions()


def try_regions() -> dict[str, Any]:
    """Check whether nvImageCodec's decoders on the GPU (or the CPU, if there is no GPU) decode a region to exactly the
    same pixels as in the entire image. A version of nvImageCodec is added to `EXACT_REGION_VERSIONS` once this check
    has passed on several kinds of GPUs.

    Returns:
        The ``version``, the ``device``, the ``faults`` (a description keyed by decoder, "" for no fault), and ``used``,
        the names of the decoders that gpuload uses for regions.
    """
    import torch

    from gpuload.decode.jpeg import load_nvimgcodec
    from gpuload.stage import device as devices
    from gpuload.stage.decode.nvimagecodec import CPU, ENGINE, EXACT_REGION_VERSIONS, GPU, NvImageCodec

    on_gpu = devices.is_available() and devices.supported_type() == "cuda" and torch.version.hip is None
    device, library = devices.current_device() if on_gpu else torch.device("cpu"), load_nvimgcodec()
    faults = {}
    for name in (ENGINE, GPU) if on_gpu else (CPU,):
        try:
            decoder = NvImageCodec(device, 1, library, exact_versions={name: (library.__version__,)}, only=name)
            faults[name] = find_fault(decoder, device)
        except RuntimeError as error:
            faults[name] = str(error)
    used_decoders = [name for name in faults if library.__version__ in EXACT_REGION_VERSIONS[name]]
    return {"version": library.__version__, "device": str(device), "faults": faults, "used": used_decoders}


def find_fault(decoder: Any, device: Any) -> str:
    """Return a description of the first fault in a decoder's regions; "" if there is none. Regions, decoded in one
    call, must be identical to the same parts of the entire picture. Pictures that the decoder refuses are ignored."""
    import numpy as np

    from gpuload.stage.decode.backend import EncodedRegion, Refusal, fetch

    compared_count = 0
    for data, grey in _make_pictures():
        file = np.frombuffer(data, np.uint8)
        sources = [EncodedRegion(file, HEIGHT, WIDTH, grey, region) for region in REGIONS]
        [image] = decoder.decode(sources[:1])
        if isinstance(image, Refusal):
            continue
        compared_count += 1
        entire = fetch(image, sources[0], device).astype(np.int64)
        for source, region in zip(sources, decoder.decode(sources), strict=True):
            if isinstance(region, Refusal):
                return f"it refuses a region: {region.reason}"
            top, left, height, width = source.region_tlhw
            error = np.abs(fetch(region, source, device) - entire[top : top + height, left : left + width]).max()
            if error:
                return f"the region {source.region_tlhw} differs from the entire picture by up to {error} of 255"
    return "" if compared_count else "it refuses all test pictures"


def _make_pictures() -> list[tuple[bytes, bool]]:
    """Create test JPEGs. Return pairs of the file's bytes and whether the picture is grey."""
    import numpy as np
    from PIL import Image

    coarse = np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8)
    picture = Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
    options: list[dict[str, Any]] = [{"subsampling": 2}, {"subsampling": 1}, {"subsampling": 0}]
    options.append({"subsampling": 2, "restart_marker_blocks": 4})
    pictures = []
    for grey, save_options in [*((False, color_options) for color_options in options), (True, {})]:
        file = io.BytesIO()
        (picture.convert("L") if grey else picture).save(file, "JPEG", quality=90, **save_options)
        pictures.append((file.getvalue(), grey))
    return pictures


ISOLATED: Final = ("nvImageCodec", "simplejpeg", "Pillow", "regions")  # one process each; all other steps share one
STEPS: Final[dict[str, Callable[[bytes], dict[str, Any] | None]]] = {
    "nvImageCodec": _make_decode_step("NvImageCodecRegions"),
    "simplejpeg": _make_decode_step("SimpleJpeg"),
    "Pillow": _try_pillow,
    "regions": _try_regions_without_core_dump,
    "torch": _try_torch,
    "page-locked memory": _try_page_locking,
    "workers": _try_workers,
    "Triton": _try_triton,
    "DALI": _try_dali,
}
