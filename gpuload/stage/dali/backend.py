"""Which transforms DALI has, and why it lacks the rest. DALI is imported when a backend is made, not before."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from gpuload.errors import BackendError
from gpuload.stage.backend import Backend, Late, Levels
from gpuload.stage.finish import Finish
from gpuload.transforms.program.ops import Box, Elastic, Mix, Mixture, Outline, Turn, Warp
from gpuload.transforms.program.windows import rare_filter

if TYPE_CHECKING:
    from gpuload.stage.dali.engine import Engine

__all__ = ["LACKING", "DaliBackend"]

INSTALL: Final = "pip install 'gpuload[dali-cu13]' (CUDA 13, or no GPU) or 'gpuload[dali-cu12]' (CUDA 12)"

# The operations of `gpuload.transforms.program.ops.OPS` that DALI's operators cannot be combined to.
LACKING: Final = {
    "equalize": "DALI's equalize is OpenCV's, not Pillow's",
    "jpeg": "DALI's JPEG distortion is not libjpeg's",
    "noise": "DALI draws its own noise",
    "pillow_blur": "DALI has no box blur",
    "warp": "DALI's warp has no bicubic filter, and one filter for a batch",
}


class DaliBackend(Backend):
    """NVIDIA's DALI; BackendError if it is not installed, or has no dynamic mode."""

    name: ClassVar[str] = "dali"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        if (missing := self.missing(device)) is not None:
            raise BackendError(missing)
        try:
            from gpuload.stage.dali.engine import Engine
        except ImportError as error:
            raise BackendError(
                f"backend='dali' needs DALI with its dynamic mode; this one cannot be used ({error}): {INSTALL}"
            ) from error
        self._engine: Engine = Engine(device)

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        return None if _installed() else f"backend='dali' needs NVIDIA's DALI, which is not installed: {INSTALL}"

    def lacks(self, outline: Outline, *, late: bool = False) -> str | None:
        if lacking := [f"{name}: {LACKING[name]}" for name in outline.operations if name in LACKING]:
            return lacking[0]
        if outline.kind is Turn:
            return "DALI transposes all images of a batch, or none"
        if outline.kind is Elastic:
            return "DALI has no elastic deformation"
        if outline.kind is Mixture:
            return "mixtures are not built from DALI's operators"
        if outline.kind is Mix:
            return "DALI's operators see one image at a time"
        if outline.kind is Warp and not outline.affine:
            return "DALI's warp is affine"
        if outline.kind is Warp and "bicubic" in outline.filters:
            return "DALI's warp has no bicubic filter"
        if outline.kind is not Box:
            return None
        if (rare := rare_filter(outline.filters)) is not None:
            return rare
        if outline.padding_mode is None and "nearest" in outline.filters:
            return "DALI takes the next pixel on a tie, which shifts an image that is doubled"
        return "DALI does not mirror what it pads with" if outline.padding_mode in ("reflect", "symmetric") else None

    def levels(self, finish: Finish) -> Levels:
        from gpuload.stage.dali.runner import DaliLevels

        return DaliLevels(self._engine, finish)

    def late(self) -> Late:
        from gpuload.stage.dali.runner import DaliLate

        return DaliLate(self._engine)


def _installed() -> bool:
    try:
        return importlib.util.find_spec("nvidia.dali") is not None
    except ModuleNotFoundError:  # there is no `nvidia` package
        return False
