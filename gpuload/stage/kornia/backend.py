"""Which transforms Kornia has, and why it lacks the rest. Kornia is imported when a backend is made, not before: it
takes half a second."""

from __future__ import annotations

from importlib.util import find_spec
from typing import ClassVar, Final

import torch

from gpuload.errors import BackendError
from gpuload.stage.backend import Backend, Late, Levels
from gpuload.stage.finish import Finish
from gpuload.stage.reference.backend import levels_of
from gpuload.transforms.program.ops import Box, Elastic, Outline, Turn, Warp

__all__ = ["KorniaBackend"]

MISSING: Final = "the backend 'kornia' needs Kornia, which cannot be imported here; run `pip install 'gpuload[kornia]'`"
RESIZE: Final = "Kornia's resize lies up to 87 levels from Pillow's"
NEAREST: Final = "Kornia's nearest resize takes the pixel at the corner, Pillow's that at the centre"
BICUBIC: Final = "Kornia's bicubic filter is not Pillow's (a = -0.75, not -1): up to 28 levels"
LACKING: Final = {
    "jpeg": "Kornia's JPEG rounds smoothly, for gradients",
    "pillow_blur": "Kornia has no box blur of a fractional radius",
}


class KorniaBackend(Backend):
    """Kornia's functional operators with our draws; BackendError if Kornia cannot be imported."""

    name: ClassVar[str] = "kornia"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        try:
            from gpuload.stage.kornia.late import run_late
            from gpuload.stage.kornia.runner import KorniaRunner
        except ImportError as error:
            raise BackendError(f"{MISSING} ({error})") from error
        self._runner = KorniaRunner
        self._late = run_late

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        return None if find_spec("kornia") else MISSING

    def lacks(self, outline: Outline, *, late: bool = False) -> str | None:
        if outline.kind is Box and outline.padding_mode is None:
            return NEAREST if "nearest" in outline.filters else RESIZE
        if outline.kind is Turn:
            return "Kornia turns by a warp, and has no transposition"
        if outline.kind is Elastic:
            return "Kornia draws its own fields"
        for operation in outline.operations:
            if operation in LACKING:
                return LACKING[operation]
        warps = outline.kind is Warp or "warp" in outline.operations
        return BICUBIC if warps and "bicubic" in outline.filters else None

    def levels(self, finish: Finish) -> Levels:
        return levels_of(self._runner(finish, self.device))

    def late(self) -> Late:
        return self._late
