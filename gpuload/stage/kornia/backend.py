"""Declares which transforms Kornia supports, and why the reference runs the other transforms. Kornia is only imported
when a backend is created, because that takes half a second."""

from __future__ import annotations

from importlib.util import find_spec
from typing import ClassVar, Final

import torch

from gpuload.errors import BackendError
from gpuload.stage.backend import Backend, LateRunner, LevelRunner
from gpuload.stage.finish import Finish, apply_late
from gpuload.transforms.program.ops import CHANGES_PIXELS, Box, Elastic, Outline, Turn, Warp

__all__ = ["UNSUPPORTED", "KorniaBackend"]

MISSING: Final = "the backend 'kornia' needs Kornia, which cannot be imported here; run `pip install 'gpuload[kornia]'`"
FINISHED: Final = "torch changes finished images in place"
RESIZE: Final = "Kornia's resize differs by up to 87 levels from Pillow's"
NEAREST: Final = "Kornia's nearest resize takes the pixel at the corner, Pillow's the pixel at the centre"
BICUBIC: Final = "Kornia's bicubic filter is not Pillow's (a = -0.75, not -1): a difference of up to 28 levels"

# The operations in `gpuload.transforms.program.ops.OPS` that Kornia implements differently from Pillow, or not at all.
# The differences in levels were measured on photographs of 220×180 and on random images.
UNSUPPORTED: Final = {
    "contrast": "Kornia multiplies the levels (up to 143 levels from Pillow), or blends with an unrounded mean",
    "saturation": "Kornia works in HSV (up to 195 levels from Pillow), or does not round the grey levels",
    "hue": "Kornia does not round hue and saturation to 8 bits, as Pillow does: a difference of up to 17 levels",
    "sharpness": "Kornia does not round the smoothed image, as Pillow does",
    "autocontrast": "Kornia turns a channel with a single level black, and rounds in a different order than Pillow",
    "noise": "Kornia draws its own noise",
    "permute": "Kornia draws its own order of channels",
    "solarize_add": "Kornia has no solarize that only adds",
    "pillow_blur": "Kornia has no box blur with a fractional radius",
    "jpeg": "Kornia's JPEG rounds smoothly, for gradients",
}


class KorniaBackend(Backend):
    """The backend of Kornia's operators, applied with gpuload's random parameters; raises a BackendError if Kornia
    cannot be imported."""

    name: ClassVar[str] = "kornia"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        try:
            from gpuload.stage.kornia.runner import KorniaRunner
        except ImportError as error:
            raise BackendError(f"{MISSING} ({error})") from error
        self._runner = KorniaRunner

    @classmethod
    def unmet_requirement(cls, device: torch.device) -> str | None:
        return None if find_spec("kornia") else MISSING

    def why_unsupported(self, outline: Outline, *, is_late: bool = False, follows_own: bool = True) -> str | None:
        if is_late and issubclass(outline.kind, CHANGES_PIXELS):
            return FINISHED
        if outline.kind is Box and outline.padding_mode is None:
            return NEAREST if "nearest" in outline.filters else RESIZE
        if outline.kind is Turn:
            return "Kornia rotates with a warp, and has no transposition"
        if outline.kind is Elastic:
            return "Kornia draws its own fields"
        if outline.kind is Warp and "bicubic" in outline.filters:
            return BICUBIC
        return next((f"{name}: {UNSUPPORTED[name]}" for name in outline.operations if name in UNSUPPORTED), None)

    def level_runner(self, finish: Finish) -> LevelRunner:
        return self._runner(finish, self.device)

    def late_runner(self) -> LateRunner:
        return apply_late  # only for records that change no pixels; the reference runs all others
