"""Declares which transforms DALI supports, and why the reference runs the other transforms. DALI is only imported when
a backend is created."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from gpuload.errors import BackendError
from gpuload.stage.backend import Backend, LevelRunner
from gpuload.stage.finish import Finish
from gpuload.transforms.program.ops import CHANGES_PIXELS, Box, ChainMixture, Elastic, Erase, PartnerMix, RecordOutline

if TYPE_CHECKING:
    from gpuload.stage.dali.engine import DaliEngine

__all__ = ["UNSUPPORTED", "DaliBackend"]

INSTALL: Final = "run pip install 'gpuload[dali-cu13]' (CUDA 13, or no GPU) or 'gpuload[dali-cu12]' (CUDA 12)"

# Operations in `gpuload.transforms.program.ops.OPS`.
UNSUPPORTED: Final = {
    "permute": "DALI has no operator that reorders each image's channels",
    **dict.fromkeys(
        ("gamma", "white_balance", "illumination", "shadow", "motion_blur", "clahe"),
        "DALI has no such operator for all devices",
    ),
}
UNSUPPORTED_KINDS: Final = {
    Elastic: "DALI has no elastic deformation",
    PartnerMix: "DALI's operators process each image separately",
    ChainMixture: "DALI does not mix the results of several chains of operations",
}
TWISTS: Final = {"brightness", "contrast", "saturation", "hue"}


class DaliBackend(Backend):
    """The backend of NVIDIA's DALI; raises a BackendError if DALI is not installed, or has no dynamic mode."""

    name: ClassVar[str] = "dali"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        if (message := self.unmet_requirement(device)) is not None:
            raise BackendError(message)
        try:
            from gpuload.stage.dali.engine import DaliEngine
        except ImportError as error:
            raise BackendError(
                f"backend='dali' needs DALI with its dynamic mode, which cannot be imported here ({error}); {INSTALL}"
            ) from error
        self._engine: DaliEngine = DaliEngine(device)

    @classmethod
    def unmet_requirement(cls, device: torch.device) -> str | None:
        return None if _is_installed() else f"backend='dali' needs NVIDIA's DALI, which is not installed; {INSTALL}"

    def why_unsupported(self, outline: RecordOutline, *, is_late: bool, follows_own: bool) -> str | None:
        if outline.kind in UNSUPPORTED_KINDS:
            return UNSUPPORTED_KINDS[outline.kind]
        if outline.kind is Erase and outline.written != "const":
            return "DALI erases only with constants"
        if outline.kind is Box and outline.padding_mode not in (None, "constant"):
            return "DALI pads only with constants"
        if is_late and not follows_own and issubclass(outline.kind, CHANGES_PIXELS):
            return "torch changes finished images in place"
        return next((f"{name}: {UNSUPPORTED[name]}" for name in outline.operations if name in UNSUPPORTED), None)

    def note(self, outline: RecordOutline) -> str | None:
        is_ordered = len(TWISTS & {*outline.operations}) > 1
        return "in DALI's order: hue, saturation, contrast, brightness" if is_ordered else None

    def level_runner(self, finish: Finish) -> LevelRunner:
        from gpuload.stage.dali.runner import DaliLevels

        return DaliLevels(self._engine, finish)


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec("nvidia.dali") is not None
    except ModuleNotFoundError:  # no package `nvidia` is installed
        return False
