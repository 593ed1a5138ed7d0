"""Declares which transforms DALI supports, and why the reference runs the other transforms. DALI is only imported when
a backend is created."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from gpuload.errors import BackendError
from gpuload.stage.backend import Backend, LateRunner, LevelRunner
from gpuload.stage.finish import Finish
from gpuload.transforms.program.ops import Box, Elastic, Erase, Mix, Mixture, Outline, Turn, Warp
from gpuload.transforms.program.windows import filter_fallback_reason

if TYPE_CHECKING:
    from gpuload.stage.dali.engine import Engine

__all__ = ["UNSUPPORTED", "DaliBackend"]

INSTALL: Final = "run pip install 'gpuload[dali-cu13]' (CUDA 13, or no GPU) or 'gpuload[dali-cu12]' (CUDA 12)"
NEAREST: Final = "DALI takes the next pixel on a tie, which shifts an image whose size is doubled"
BICUBIC: Final = "DALI does not clamp bicubic overshoots between the two resizing passes: up to 23 levels from Pillow"
WARP: Final = "DALI's warp computes coordinates in float32, and blends the fill with the image along its border"
NO_OPERATOR: Final = "DALI has no such operator"

# The operations in `gpuload.transforms.program.ops.OPS` that DALI implements differently from Pillow, or not at all.
UNSUPPORTED: Final = {
    "contrast": "DALI scales around a constant, Pillow around the mean of the image",
    "saturation": "DALI scales in YIQ, Pillow blends with the grey levels",
    "hue": "DALI rotates in YIQ, Pillow in 8-bit HSV",
    "grayscale": "DALI reduces three channels to one, and differs by a level from Pillow for one colour in 770",
    "equalize": "DALI uses OpenCV's algorithm, not Pillow's",
    "jpeg": "DALI's compression differs from libjpeg's",
    "noise": "DALI draws its own noise",
    "warp": WARP,
    "pillow_blur": "DALI has no box blur",
    "sharpness": NO_OPERATOR,
    "solarize": NO_OPERATOR,
    "solarize_add": NO_OPERATOR,
    "posterize": NO_OPERATOR,
    "autocontrast": NO_OPERATOR,
    "invert": NO_OPERATOR,
    "permute": NO_OPERATOR,
}
UNSUPPORTED_KINDS: Final = {
    Elastic: "DALI has no elastic deformation",
    Mix: "DALI's operators process each image separately",
    Mixture: "DALI does not mix the results of several chains of operations",
    Turn: "DALI transposes all images of a batch, or none",
    Warp: WARP,
}


class DaliBackend(Backend):
    """The backend of NVIDIA's DALI; raises a BackendError if DALI is not installed, or has no dynamic mode."""

    name: ClassVar[str] = "dali"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        if (message := self.unmet_requirement(device)) is not None:
            raise BackendError(message)
        try:
            from gpuload.stage.dali.engine import Engine
        except ImportError as error:
            raise BackendError(
                f"backend='dali' needs DALI with its dynamic mode, which cannot be imported here ({error}); {INSTALL}"
            ) from error
        self._engine: Engine = Engine(device)

    @classmethod
    def unmet_requirement(cls, device: torch.device) -> str | None:
        return None if _is_installed() else f"backend='dali' needs NVIDIA's DALI, which is not installed; {INSTALL}"

    def why_unsupported(self, outline: Outline, *, is_late: bool = False, follows_own: bool = True) -> str | None:
        if outline.kind in UNSUPPORTED_KINDS:
            return UNSUPPORTED_KINDS[outline.kind]
        if outline.kind is Erase and outline.written != "const":
            return "DALI erases only with constants"
        if outline.kind is Box and outline.padding_mode not in (None, "constant"):
            return "DALI pads only with constants"
        if outline.kind is Box and outline.padding_mode is None and outline.filters != ("bilinear",):
            reason = filter_fallback_reason(outline.filters)
            return reason or (NEAREST if "nearest" in outline.filters else BICUBIC)
        return next((f"{name}: {UNSUPPORTED[name]}" for name in outline.operations if name in UNSUPPORTED), None)

    def level_runner(self, finish: Finish) -> LevelRunner:
        from gpuload.stage.dali.runner import DaliLevels

        return DaliLevels(self._engine, finish)

    def late_runner(self) -> LateRunner:
        from gpuload.stage.dali.runner import DaliLate

        return DaliLate(self._engine)


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec("nvidia.dali") is not None
    except ModuleNotFoundError:  # no package `nvidia` is installed
        return False
