"""What DALI has of the transforms, and why it does not have the rest. Imports no DALI before a backend is made."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from gpuload.errors import BackendError
from gpuload.stage.backend import Backend, Late, Levels
from gpuload.stage.finish import Finish
from gpuload.transforms import RandomPerspective
from gpuload.transforms.base import Transform
from gpuload.transforms.program.ops import Box, Erase, Flip, Mix, Mixture, Ops, Params, Warp

if TYPE_CHECKING:
    from gpuload.stage.dali.engine import Engine

__all__ = ["LACKING", "DaliBackend"]

INSTALL: Final = "pip install 'gpuload[dali]' (CUDA 12, or no GPU) or 'gpuload[dali-cu13]' (CUDA 13)"

# Of `gpuload.transforms.program.ops.OPS`, what DALI has no operators to build from.
LACKING: Final = {
    "equalize": "DALI's equalize is OpenCV's, not Pillow's",
    "noise": "DALI draws its own noise",
    "pillow_blur": "DALI has no box blur",
    "warp": "DALI's warp has no bicubic filter, and one filter for a batch",
}


class DaliBackend(Backend):
    """DALI, as a stage on a device.

    Args:
        device: where the images are.

    Raises:
        BackendError: DALI is not installed, or has no dynamic mode.
    """

    name: ClassVar[str] = "dali"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        if (missing := self.missing(device)) is not None:
            raise BackendError(missing)
        try:
            from gpuload.stage.dali.engine import Engine
        except ImportError as error:
            raise BackendError(
                f"backend='dali' needs DALI with its dynamic mode, and what is installed cannot be used ({error}); "
                f"{INSTALL}"
            ) from error
        self._engine: Engine = Engine(device)

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        return None if _installed() else f"backend='dali' needs NVIDIA's DALI, which is not installed: {INSTALL}"

    def _lacks(self, transform: Transform, kind: type[Params]) -> str | None:
        described: Any = transform
        if issubclass(kind, Mix):
            return "DALI's operators see one image at a time"
        if issubclass(kind, Ops | Mixture):
            lacking = next((f"{name}: {LACKING[name]}" for name in transform.operations if name in LACKING), None)
            return lacking or ("mixtures are not built from DALI's operators" if issubclass(kind, Mixture) else None)
        if issubclass(kind, Warp):
            return _lacks_warp(described)
        if issubclass(kind, Box) and not transform.pads and getattr(described, "interpolation", None) == "nearest":
            return "DALI takes the next pixel on a tie, which shifts an image that is doubled"
        if issubclass(kind, Box) and transform.pads and described.padding_mode in ("reflect", "symmetric"):
            return "DALI does not mirror what it pads with"
        return None if issubclass(kind, Box | Flip | Erase) else f"{kind.__name__} is nothing that DALI knows"

    def levels(self, finish: Finish) -> Levels:
        from gpuload.stage.dali.runner import DaliLevels

        return DaliLevels(self._engine, finish)

    def late(self) -> Late:
        from gpuload.stage.dali.runner import DaliLate

        return DaliLate(self._engine)


def _lacks_warp(transform: Any) -> str | None:
    if isinstance(transform, RandomPerspective):
        return "DALI's warp is affine"
    return "DALI's warp has no bicubic filter" if transform.interpolation == "bicubic" else None


def _installed() -> bool:
    try:
        return importlib.util.find_spec("nvidia.dali") is not None
    except ModuleNotFoundError:  # no package of NVIDIA's at all
        return False
