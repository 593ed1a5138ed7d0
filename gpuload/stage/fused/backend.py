"""The backend ``"fused"``: Triton kernels that take each image through a whole chain in one pass, or in a few.

On a GPU. Without one, and with ``TRITON_INTERPRET=1`` in the environment from the start, they run in Triton's
interpreter on the CPU, thousands of times as slow: what tests do.
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from typing import ClassVar, Final

import numpy as np
import torch

from gpuload.errors import CompilerError
from gpuload.stage.backend import Backend, Late, Levels
from gpuload.stage.finish import Finish
from gpuload.stage.finished import Outputs, apply_late
from gpuload.stage.ragged import RaggedImages
from gpuload.stage.reference.backend import TorchBackend
from gpuload.transforms import Draws, Normalize
from gpuload.transforms.base import Transform
from gpuload.transforms.program.ops import Box, Erase, Flip, Mix, Ops, Params, Warp

__all__ = ["FusedBackend"]

# What is not a map of single pixels, a neighbourhood of some pixels, or a statistic.
LACKING: Final = {
    "noise": "a normal number for each pixel and channel is drawn by torch",
    "pillow_blur": "three box blurs along each axis are six passes",
}
CHANNELS: Final = (1, 3)


class FusedBackend(Backend):
    """Fused kernels, for images of 1 or 3 channels: all transforms but noise, Pillow's blur and AugMix."""

    name: ClassVar[str] = "fused"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        if device.type == "cuda" and (reason := self._cannot_compile(device)):
            raise CompilerError(reason)

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        if find_spec("triton") is None:
            return "the backend 'fused' needs Triton, which is not installed; use `pip install triton`"
        try:
            interpreted = _interpreted()
        except Exception as error:  # whatever a broken installation may say
            return f"the backend 'fused' needs Triton, which cannot be imported: {type(error).__name__}: {error}"
        if device.type == "cpu" and not interpreted:
            return (
                f"the backend 'fused' runs on a GPU, got device {str(device)!r}; use backend='torch' there (or set "
                "TRITON_INTERPRET=1 before Python starts, to try it slowly)"
            )
        return None

    def lacks(self, transform: Transform, *, late: bool = False) -> str | None:
        if isinstance(transform, Normalize) and len(transform.mean) not in CHANNELS:
            return f"images of {len(transform.mean)} channels are left to torch"
        return super().lacks(transform, late=late)

    def _lacks(self, transform: Transform, kind: type[Params]) -> str | None:
        if issubclass(kind, Box | Flip | Warp | Erase | Mix):
            return None
        if issubclass(kind, Ops):
            from gpuload.stage.fused.passes import OPERATIONS  # it imports Triton

            lacking = (name for name in transform.operations if name not in OPERATIONS)
            return next((LACKING.get(name, f"the kernels do not know {name}") for name in lacking), None)
        return "several results of an image are mixed by torch"

    def _lacks_late(self, transform: Transform, kind: type[Params]) -> str | None:
        return "finished images are moved by torch" if issubclass(kind, Flip) else None

    def levels(self, finish: Finish) -> Levels:
        from gpuload.stage.fused.runner import FusedRunner  # Triton is imported where it is used

        others = TorchBackend(self.device).levels(finish)
        if finish.channels not in (None, *CHANNELS):
            return others
        runner = FusedRunner(finish, self.device)

        def run(
            images: RaggedImages,
            draws: Draws,
            windows_tlhw: tuple[np.ndarray, ...],
            outputs: Outputs,
            late: Draws | None,
        ) -> Draws | None:
            if int(images.shapes[0, 2]) not in CHANNELS:
                return others(images, draws, windows_tlhw, outputs, late)
            erasing, rest = _leading_erasing(late)
            runner.launch(runner.prepare(images, draws, windows_tlhw, outputs, erasing), images.pixels, outputs)
            return rest

        return run

    def late(self) -> Late:
        from gpuload.stage.fused.late import apply

        def run(outputs: Outputs, late: Draws, partners: np.ndarray | None) -> None:
            if outputs[0].shape[0] not in CHANNELS:
                apply_late(outputs, late, partners=partners)
            else:
                apply(outputs, late, partners)

        return run

    @staticmethod
    def _cannot_compile(device: torch.device) -> str | None:
        """Why kernels cannot be made here: one is made for a trial."""
        try:
            if not _interpreted() and not (os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang", "cc")))):
                return (
                    "Triton needs a C compiler, and neither gcc nor clang is there; install one, or set CC to its path"
                )
            from gpuload.stage.fused.late import trial

            trial(device)
        except torch.cuda.OutOfMemoryError:  # it says nothing of compilers, and is the user's to know
            raise
        except Exception as error:  # whatever a compiler, a driver, an assembler or a broken installation may say
            return f"Triton cannot compile a kernel for {device}: {type(error).__name__}: {error}"
        return None


def _interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)


def _leading_erasing(late: Draws | None) -> tuple[Draws | None, Draws | None]:
    """What is erased before anything else is done to finished images, and the rest."""
    if late is None:
        return None, None
    count = next((n for n, params in enumerate(late.params) if not isinstance(params, Erase)), len(late.params))
    if not count:
        return None, late
    first = Draws(late.transforms[:count], late.params[:count], late.sizes_hw[: count + 1])
    if count == len(late.params):
        return first, None
    return first, Draws(late.transforms[count:], late.params[count:], late.sizes_hw[count:])
