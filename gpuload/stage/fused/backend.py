"""The backend ``"fused"``: Triton kernels that apply an entire chain to each image in one or a few passes.

Kernels run on a GPU. If ``TRITON_INTERPRET=1`` was set before Python started, they run on the CPU in Triton's
interpreter, thousands of times slower; tests use this.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, ClassVar, Final

import torch

from gpuload.errors import CompilerError
from gpuload.stage.backend import Backend, LateRunner, LevelRunner, ResultFormat
from gpuload.stage.finish import Finish
from gpuload.stage.reference.backend import TorchBackend
from gpuload.transforms.program.fusing import passes
from gpuload.transforms.program.fusing.plan import CHANNELS
from gpuload.transforms.program.ops import ChainMixture, Elastic, Flip, RecordOutline
from gpuload.transforms.program.windows import FILTERS

__all__ = ["FusedBackend"]

# Operations that are not functions of single pixels, of a small neighbourhood, or of a statistic.
UNSUPPORTED: Final = {
    "clahe": "tiles are equalized by torch",
    "illumination": "torch computes the brightness of each place in the image",
    "jpeg": "blocks are encoded by torch",
    "motion_blur": "torch convolves with a kernel that is not a product of one per axis",
    "noise": "a normal number for each pixel and channel is drawn by torch",
    "pillow_blur": "three box blurs along each axis would need six passes",
    "shadow": "torch draws polygons",
}


class FusedBackend(Backend):
    """The backend of fused kernels, for images with 1 or 3 channels. The kernels support all transforms except noise,
    Pillow's blur, motion blur, shadows, illumination, CLAHE, AugMix, elastic deformation, JPEG, and resampling with
    lanczos or without antialiasing."""

    name: ClassVar[str] = "fused"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        if device.type != "cpu" and (reason := self._try_compiling(device)):
            raise CompilerError(reason)

    @classmethod
    def unmet_requirement(cls, device: torch.device) -> str | None:
        if find_spec("triton") is None:
            return "the backend 'fused' needs Triton, which is not installed; run `pip install triton`"
        try:
            is_interpreted = _is_interpreted()
        except Exception as error:  # a broken installation can raise anything
            return f"the backend 'fused' needs Triton, which cannot be imported: {type(error).__name__}: {error}"
        if device.type == "cpu" and not is_interpreted:
            return (
                f"the backend 'fused' requires a GPU, got device {str(device)!r}; use backend='torch' on this device "
                "(or set TRITON_INTERPRET=1 before Python starts, to run the kernels slowly on the CPU)"
            )
        return None

    def why_unsupported(self, outline: RecordOutline, *, is_late: bool, follows_own: bool) -> str | None:
        if is_late and outline.kind is Flip:
            return "finished images are moved by torch"
        if outline.kind is Elastic:
            return "fields are smoothed by torch"
        if outline.kind is ChainMixture:
            return "several results of an image are mixed by torch"
        if outline.numbers is not None and len(outline.numbers.mean) not in (0, *CHANNELS):
            return f"images with {len(outline.numbers.mean)} channels are left to torch"
        if not outline.operations:
            lacking_name = next((name for name in outline.filters if name not in FILTERS[:3]), None)
            return None if lacking_name is None else f"the kernels have no {lacking_name} resampling"
        lacking_names = (name for name in outline.operations if name not in passes.OPERATIONS)
        return next((UNSUPPORTED.get(name, f"the kernels do not support {name}") for name in lacking_names), None)

    def level_runner(self, finish: Finish) -> LevelRunner:
        if finish.channels not in (None, *CHANNELS):
            return TorchBackend(self.device).level_runner(finish)
        from gpuload.stage.fused.runner import FusedRunner  # imports Triton, which is optional and slow to import

        return FusedRunner(finish, self.device)

    def late_runner(self) -> LateRunner:
        from gpuload.stage.fused.runner import change_finished

        return change_finished

    def late_kernels(self, steps: Sequence[Sequence[RecordOutline]], result_format: ResultFormat) -> set[Any]:
        from gpuload.stage.fused.variants import late_variants

        return late_variants(steps, result_format=result_format) if result_format.channels[1] in CHANNELS else set()

    def compile(self, kernels: set[Any]) -> None:
        from gpuload.stage.fused.variants import compile_all

        compile_all(kernels, self.device)

    @staticmethod
    def _try_compiling(device: torch.device) -> str | None:
        """Try to compile a kernel; return an error message if this fails, else None."""
        try:
            if not _is_interpreted() and not (os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang", "cc")))):
                return (
                    "Triton needs a C compiler, but neither gcc nor clang was found; install one, or set CC to its path"
                )
            from gpuload.stage.fused.runner import compile_trial_kernel

            compile_trial_kernel(device)
        except torch.OutOfMemoryError:  # not an error of the compiler; the user has to see it
            raise
        except Exception as error:  # compilers, drivers, assemblers and broken installations can raise anything
            return f"Triton cannot compile a kernel for {device}: {type(error).__name__}: {error}"
        return None


def _is_interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)
