"""Trying what can crash, hang or take seconds, in processes of their own.

A process does one *trial* of several steps. For each it prints a line of JSON when it begins and one when it is done,
so that of a process which dies it is known where. In this process: `begin_trials` and `Trial`. In the others: `main`.
"""

from __future__ import annotations

import base64
import io
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Final

from gpuload.errors import one_line

__all__ = ["LOCKED_BYTES", "STEPS", "Trial", "begin", "main", "sample_jpeg"]

LIMIT_S: Final = 120.0
LOCKED_BYTES: Final = 64 << 20
NEAR: Final = 3  # levels that decoders may differ by
SIZE_WH: Final = (96, 64)
REGION_TLHW: Final = (16, 8, 32, 40)


class Trial:
    """A process that tries these steps; started at once."""

    def __init__(self, steps: Sequence[str], jpeg: bytes = b"") -> None:
        self.steps = list(steps)
        settings = {"path": sys.path, "steps": self.steps, "jpeg": base64.b64encode(jpeg).decode()}
        code = (
            "import json, sys; given = json.loads(sys.stdin.readline()); sys.path[:] = given['path']; "
            "from gpuload.cli.doctor.trial import main; main(given)"
        )
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(settings) + "\n")
        self._process.stdin.flush()

    def results(self, limit_s: float = LIMIT_S) -> dict[str, dict[str, Any]]:
        """What came of each step: ``ok``, ``said`` (why not), and what the step found. Waits until all are done."""
        try:
            told, complaint = self._process.communicate(timeout=max(1.0, self._started + limit_s - time.monotonic()))
            ending = _ending(self._process.returncode, complaint)
        except subprocess.TimeoutExpired:
            self._process.kill()
            told, _ = self._process.communicate()
            ending = f"it was not done after {limit_s:.0f} seconds"
        return _results(self.steps, told, ending)


def _results(steps: Sequence[str], told: str, ending: str) -> dict[str, dict[str, Any]]:
    """The lines of a process, and how it ended, as results."""
    results: dict[str, dict[str, Any]] = {}
    at = ""
    for line in told.splitlines():
        if not line.startswith("{"):
            continue  # what some library prints
        record = json.loads(line)
        if "begin" in record:
            at = record["begin"]
        else:
            results[at] = record
    if at and at not in results:
        results[at] = {"ok": False, "said": ending}
    why = f"not tried, since {at}: {ending}" if at else ending
    return {step: results.get(step, {"ok": False, "said": why}) for step in steps}


def _ending(status: int, complaint: str) -> str:
    if status < 0:
        return f"the process crashed ({signal.Signals(-status).name})"
    last = next((line for line in reversed(complaint.splitlines()) if line.strip()), "")
    return one_line(f"the process ended with status {status}{': ' + last if last else ''}")


def begin(jpeg: bytes, steps: Sequence[str]) -> list[Trial]:
    """Processes for all these steps: one for each decoder and for regions, one for all else that imports torch."""
    decoders = [step for step in steps if step in DECODERS or step == "regions"]
    others = [step for step in steps if step not in decoders]
    return [*(Trial([step], jpeg) for step in decoders), *([Trial(others)] if others else [])]


def sample_jpeg() -> bytes:
    """A small photograph-like JPEG, 4:2:0."""
    from PIL import Image

    width, height = SIZE_WH
    image = Image.new("RGB", SIZE_WH)
    image.putdata([(2 * x, 3 * y, x + y) for y in range(height) for x in range(width)])
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    return file.getvalue()


def main(given: dict[str, Any]) -> None:
    """In the process: do the steps."""
    jpeg = base64.b64decode(given["jpeg"])
    for step in given["steps"]:
        print(json.dumps({"begin": step}), flush=True)
        try:
            found = {"ok": True, "said": "", **STEPS[step](jpeg)}
        except BaseException as error:  # whatever a broken installation raises, a SystemExit too
            found = {"ok": False, "said": one_line(f"{type(error).__name__}: {error}")}
        print(json.dumps(found), flush=True)


def _decode(module: str, name: str) -> Callable[[bytes], dict[str, Any]]:
    """A crop of the JPEG by one of gpuload's decoders, compared with what the JPEG was made of."""

    def step(jpeg: bytes) -> dict[str, Any]:
        from gpuload.decode import Decode
        from gpuload.decode.header import read_header

        decoder = getattr(import_module(module), name)()
        pixels, said = decoder.decode(jpeg, read_header(jpeg, Decode()).jpeg, False, REGION_TLHW)
        if pixels is None:
            raise RuntimeError(said)
        _compare(pixels)
        return {}

    return step


def _by_pillow(jpeg: bytes) -> dict[str, Any]:
    import numpy as np
    from PIL import Image

    top, left, height, width = REGION_TLHW
    _compare(np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB"))[top : top + height, left : left + width])
    return {}


def _compare(pixels: Any) -> None:
    import numpy as np

    top, left, height, width = REGION_TLHW
    ys, xs = np.mgrid[top : top + height, left : left + width]
    off = float(np.abs(np.stack([2 * xs, 3 * ys, xs + ys], axis=2) - pixels.astype(np.int64)).mean())
    if off > NEAR:
        raise RuntimeError(f"it decodes wrong pixels: {off:.0f} levels off on average")


def _torch(jpeg: bytes) -> dict[str, Any]:
    import torch

    from gpuload.stage import device as devices

    found: dict[str, Any] = {"version": str(torch.__version__), "cuda": torch.version.cuda, "other": "", "devices": []}
    if torch.version.hip:
        found["other"] = f"ROCm {torch.version.hip}"
    elif torch.xpu._is_compiled():
        found["other"] = "XPU"
    try:
        if torch.version.cuda and not torch.cuda.is_available():
            torch.cuda.init()  # says why
        for number in range(torch.accelerator.device_count() if torch.accelerator.is_available() else 0):
            told = torch.get_device_module().get_device_properties(number)
            address = devices.pci_address(torch.device(devices.usual_type(), number))
            found["devices"].append({"name": told.name, "bytes": told.total_memory, "address": address})
    except (RuntimeError, AssertionError) as error:
        found["said"] = one_line(str(error))
    return found


def _page_locking(jpeg: bytes) -> dict[str, Any]:
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
    return {"code": None if code == devices.NO_LOCKS else code}


def _workers(jpeg: bytes) -> dict[str, Any]:
    import numpy as np

    import gpuload as gl

    dataset = [(np.full((8, 8, 3), number, np.uint8), number) for number in range(4)]
    started = time.perf_counter()
    with gl.Loader(dataset, 4, num_workers=1, device="cpu") as loader:
        images, numbers = next(iter(loader))
        seconds = time.perf_counter() - started
    if numbers.tolist() != [0, 1, 2, 3] or images[:, 0, 0, 0].tolist() != [0, 1, 2, 3]:
        raise RuntimeError("a worker gave other samples than it was asked for")
    return {"seconds": seconds}


def _triton(jpeg: bytes) -> dict[str, Any]:
    from gpuload.stage import device as devices
    from gpuload.stage.fused import FusedBackend

    if not devices.is_available():
        return {}
    if (missing := FusedBackend.missing(devices.current_device())) is not None:
        raise RuntimeError(missing)
    FusedBackend(devices.current_device())
    return {}


def _regions(jpeg: bytes) -> dict[str, Any]:
    from gpuload.cli.doctor.regions import try_regions

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it may crash
    return try_regions()


def _dali(jpeg: bytes) -> dict[str, Any]:
    import torch

    from gpuload.stage.dali import DaliBackend

    DaliBackend(torch.device("cpu"))
    return {}


def _import(module: str) -> Callable[[bytes], dict[str, Any]]:
    def step(jpeg: bytes) -> dict[str, Any]:
        import_module(module)
        return {}

    return step


DECODERS: Final = {
    "nvImageCodec": _decode("gpuload.decode.jpeg", "NvImageCodec"),
    "simplejpeg": _decode("gpuload.decode.jpeg", "SimpleJpeg"),
    "Pillow": _by_pillow,
}
STEPS: Final[dict[str, Callable[[bytes], dict[str, Any]]]] = {
    **DECODERS,
    "regions": _regions,
    "torch": _torch,
    "page-locked memory": _page_locking,
    "workers": _workers,
    "Triton": _triton,
    "kornia": _import("kornia"),
    "torchvision": _import("torchvision"),
    "DALI": _dali,
}
