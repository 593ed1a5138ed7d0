"""Declares which transforms Kornia runs, and why the reference runs the others. Kornia is only imported when a backend
is created, because that takes half a second."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from typing import ClassVar, Final

import torch

from gpuload.errors import BackendError
from gpuload.stage.backend import Backend, LevelRunner
from gpuload.stage.finish import Finish
from gpuload.transforms.program.ops import CHANGES_PIXELS, Box, Elastic, Erase, PartnerMix, RecordOutline
from gpuload.transforms.program.windows import SMOOTHING

__all__ = ["UNSUPPORTED", "KorniaBackend"]

MISSING: Final = "the backend 'kornia' needs Kornia, which cannot be imported here; run `pip install 'gpuload[kornia]'`"
FINISHED: Final = "torch changes finished images in place"

# The operations in `gpuload.transforms.program.ops.OPS` for which Kornia has no function that takes the parameters.
UNSUPPORTED: Final = {
    "noise": "Kornia draws its own noise",
    "permute": "Kornia draws its own order of channels",
    "pillow_blur": "Kornia has no box blur with a fractional radius",
    "shadow": "Kornia draws its own shadows, which are not polygons",
    "illumination": "Kornia draws its own illumination",
    "jpeg": "Kornia's JPEG gives an image other bits in a batch than alone",
}


class KorniaBackend(Backend):
    """The backend of Kornia's operators, applied with gpuload's random parameters; raises a BackendError if Kornia
    cannot be imported."""

    name: ClassVar[str] = "kornia"
    takes_floats: ClassVar[bool] = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        try:
            from gpuload.stage.kornia.runner import KorniaRunner
        except ImportError as error:
            raise BackendError(f"{MISSING} ({error})") from error
        self._runner = KorniaRunner

    @classmethod
    def unmet_requirement(cls, device: torch.device) -> str | None:
        if find_spec("kornia") is None:
            return MISSING
        number = version("kornia")
        if tuple(map(int, number.split(".")[:2])) >= (0, 9):
            return None
        # Older versions misplace the pixels of warps with `align_corners=False`.
        return f"the backend 'kornia' needs Kornia 0.9 or later, but {number} is installed; run `pip install -U kornia`"

    def why_unsupported(self, outline: RecordOutline, *, is_late: bool, follows_own: bool) -> str | None:
        if outline.kind is PartnerMix or (is_late and not follows_own and issubclass(outline.kind, CHANGES_PIXELS)):
            return FINISHED
        if outline.kind is Elastic:
            return "Kornia's elastic deformation gives an image other bits in a batch than alone"
        if outline.kind is Erase and outline.written != "const":
            return "Kornia erases only with constants"
        if "lanczos" in outline.filters:
            return "Kornia has no Lanczos filter"
        return next((f"{name}: {UNSUPPORTED[name]}" for name in outline.operations if name in UNSUPPORTED), None)

    def note(self, outline: RecordOutline) -> str | None:
        is_smoothed = outline.kind is Box and outline.padding_mode is None and set(outline.filters) & set(SMOOTHING)
        return "not antialiased" if is_smoothed else None

    def level_runner(self, finish: Finish) -> LevelRunner:
        return self._runner(finish, self.device)
