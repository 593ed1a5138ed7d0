"""The backend ``"fused"``: Triton kernels that take each image through a whole chain in one pass, or in a few.

They run on a GPU. If ``TRITON_INTERPRET=1`` was set before Python started, they run on the CPU in Triton's interpreter,
thousands of times as slow, which is what tests do.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, ClassVar, Final

import numpy as np
import torch

from gpuload.errors import CompilerError
from gpuload.stage.backend import Backend, Form, Late, Levels
from gpuload.stage.finish import Finish, Outputs, apply_late
from gpuload.stage.ragged import RaggedImages
from gpuload.stage.reference.backend import TorchBackend
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.fusing import passes
from gpuload.transforms.program.fusing.plan import CHANNELS, Fusing, leading_erasing
from gpuload.transforms.program.ops import Elastic, Flip, Mixture, Outline
from gpuload.transforms.program.windows import rare_filter
from gpuload.workers.planned import PlannedBatch

__all__ = ["FusedBackend"]

# Operations that are not a map of single pixels, of a small neighbourhood, or of a statistic.
LACKING: Final = {
    "jpeg": "blocks are coded by torch",
    "noise": "a normal number for each pixel and channel is drawn by torch",
    "pillow_blur": "three box blurs along each axis are six passes",
}


class FusedBackend(Backend):
    """Fused kernels, for images of 1 or 3 channels: all transforms except noise, Pillow's blur and AugMix."""

    name: ClassVar[str] = "fused"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        if device.type != "cpu" and (reason := self._cannot_compile(device)):
            raise CompilerError(reason)

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        if find_spec("triton") is None:
            return "the backend 'fused' needs Triton, which is not installed; use `pip install triton`"
        try:
            interpreted = _interpreted()
        except Exception as error:  # whatever a broken installation raises
            return f"the backend 'fused' needs Triton, which cannot be imported: {type(error).__name__}: {error}"
        if device.type == "cpu" and not interpreted:
            return (
                f"the backend 'fused' runs on a GPU, got device {str(device)!r}; use backend='torch' there (or set "
                "TRITON_INTERPRET=1 before Python starts, to try it slowly)"
            )
        return None

    def lacks(self, outline: Outline, *, late: bool = False) -> str | None:
        if late and outline.kind is Flip:
            return "finished images are moved by torch"
        if outline.kind is Elastic:
            return "fields are smoothed by torch"
        if outline.kind is Mixture:
            return "several results of an image are mixed by torch"
        if outline.numbers is not None and len(outline.numbers.mean) not in (0, *CHANNELS):
            return f"images of {len(outline.numbers.mean)} channels are left to torch"
        if not outline.operations:
            return rare_filter(outline.filters)
        lacking = (name for name in outline.operations if name not in passes.OPERATIONS)
        return next((LACKING.get(name, f"the kernels do not know {name}") for name in lacking), None)

    def levels(self, finish: Finish) -> Levels:
        if finish.channels not in (None, *CHANNELS):
            return TorchBackend(self.device).levels(finish)
        return FusedLevels(finish, self.device)

    def late(self) -> Late:
        from gpuload.stage.fused.late import apply

        def run(outputs: Outputs, late: Program, partners: np.ndarray | None) -> None:
            if outputs[0].shape[0] not in CHANNELS:
                apply_late(outputs, late, partners=partners)
            else:
                apply(outputs, late, partners)

        return run

    def late_kernels(self, steps: Sequence[Sequence[Outline]], form: Form) -> set[Any]:
        from gpuload.stage.fused.variants import late_variants

        outlines = [outline for own in steps for outline in own]
        if form.channels[1] not in CHANNELS:
            return set()
        return late_variants(
            outlines, channels=form.channels[1], dtype=form.dtype, channels_last=form.column == form.channels[1]
        )

    def compile(self, kernels: set[Any]) -> None:
        from gpuload.stage.fused.variants import compile_all

        compile_all(kernels, self.device)

    @staticmethod
    def _cannot_compile(device: torch.device) -> str | None:
        """Why kernels cannot be compiled here, found by trying it."""
        try:
            if not _interpreted() and not (os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang", "cc")))):
                return (
                    "Triton needs a C compiler, and neither gcc nor clang is there; install one, or set CC to its path"
                )
            from gpuload.stage.fused.late import trial

            trial(device)
        except torch.OutOfMemoryError:  # not the compiler's fault; the user has to know
            raise
        except Exception as error:  # whatever a compiler, a driver, an assembler or a broken installation raises
            return f"Triton cannot compile a kernel for {device}: {type(error).__name__}: {error}"
        return None


class FusedLevels:
    """Runs the kernels, or the reference for images of other numbers of channels."""

    def __init__(self, finish: Finish, device: torch.device) -> None:
        from gpuload.stage.fused.runner import FusedRunner  # Triton is imported where it is used

        self._runner = FusedRunner(finish, device)
        self._others = TorchBackend(device).levels(finish)

    def __call__(
        self,
        images: RaggedImages,
        program: Program,
        windows_tlhw: tuple[np.ndarray, ...],
        outputs: Outputs,
        late: Program | None,
    ) -> Program | None:
        if int(images.shapes[0, 2]) not in CHANNELS:
            return self._others(images, program, windows_tlhw, outputs, late)
        erasing, runner = leading_erasing(late), self._runner
        runner.launch(runner.prepare(images, program, windows_tlhw, outputs, erasing), images.pixels, outputs)
        if late is None or len(erasing) == len(late.records):
            return None
        return late.part(len(erasing), len(late.records))

    def fusing(self, *, channels_last: bool) -> Fusing:
        """What plans batches for `launch_planned` elsewhere, with dense results in this memory format."""
        return Fusing(self._runner.tile, channels_last)

    def launch_planned(self, planned: PlannedBatch, pixels: torch.Tensor, outputs: Outputs) -> None:
        """Make a batch that was planned elsewhere, whose arrays lie behind the pixels."""
        self._runner.launch_planned(planned, pixels, outputs)

    def kernels(self, steps: Sequence[Sequence[Outline]], form: Form) -> set[Any]:
        """As `gpuload.stage.backend.Levels` has it."""
        from gpuload.stage.fused.variants import level_variants, operations_in

        self._runner.operates = operations_in(steps)
        if not {*form.channels} <= {*CHANNELS}:
            return set()
        return level_variants(steps, form=form, tile=self._runner.tile)


def _interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)
