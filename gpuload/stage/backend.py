"""The interface of a backend, which applies programs to pixels, and declares in advance which records it can apply.

A backend is created once per stage. It creates a runner for each segment, a sequence of consecutive transforms that it
executes; see `gpuload.stage.segments`. A backend draws no random numbers and sees no transforms, only programs
(`gpuload.transforms.program`). `fused` produces the same pixel values as `gpuload.stage.reference`, within the
tolerances in ``docs/parity.md``; `kornia` and `dali` produce those that their library defines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch

from gpuload.stage.finish import Finish, Outputs, apply_late
from gpuload.stage.ragged import RaggedImages
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.fusing.plan import Fusing
from gpuload.transforms.program.ops import RecordOutline
from gpuload.workers.batch import PlannedBatch

__all__ = ["Backend", "CompiledRunner", "LateRunner", "LevelRunner", "ResultFormat"]

# A function that changes finished images in place. It takes the arguments of `gpuload.stage.finish.apply_late`.
LateRunner = Callable[[Outputs, Program, np.ndarray | None], None]


@dataclass(frozen=True)
class ResultFormat:
    """The properties of a segment's results that are known before the first batch.

    Attributes:
        channels: the maximum number of channels within the segment, and the results' number of channels.
        dtype: the dtype of the results.
        column_stride: the stride between columns of the results, in elements.
        erases: whether boxes are erased while the results are written; both values if random parameters decide.
    """

    channels: tuple[int, int]
    dtype: torch.dtype
    column_stride: int
    erases: tuple[bool, ...] = (False,)


class LevelRunner(Protocol):
    """A runner for a segment whose transforms work on levels, the pixel values before normalization.

    A runner with a true attribute `reads_planes` reads strided images (`RaggedImages.steps`) in place; all others get
    interleaved images.
    """

    def __call__(
        self,
        images: RaggedImages,
        program: Program,
        windows_tlhw: tuple[np.ndarray, ...],
        outputs: Outputs,
        late_program: Program | None,
    ) -> Program | None:
        """Apply a program, and convert the images to results.

        Args:
            images: the images; each covers at least its window before the first record. Windows are parts of complete
                images, of which only the regions in `RaggedImages.regions_tlhw` are in memory.
            program: the program of this segment.
            windows_tlhw: the windows of the images before each record, and the windows of the results.
            outputs: the result for image i is written to ``outputs[i]``, C×H×W.
            late_program: the program of the following transforms, which work on finished images; None if there are
                none, or if another backend runs them.

        Returns:
            The part of `late_program` that remains to be applied.
        """
        ...


@runtime_checkable
class CompiledRunner(LevelRunner, Protocol):
    """A runner that compiles kernels, and whose batches can be planned by workers."""

    def kernels(self, steps: Sequence[Sequence[RecordOutline]], result_format: ResultFormat) -> set[Any]:
        """Return the kernels that the runner may launch; `steps` has the outlines of each transform of its segment."""
        ...

    def batch_planner(self, *, channels_last: bool) -> Fusing:
        """Return the planner for batches with dense results in this memory format."""
        ...

    def launch_planned(self, planned: PlannedBatch, pixels: torch.Tensor, outputs: Outputs) -> None:
        """Launch the kernels of a batch that a worker planned; the plan's arrays are stored after the batch's
        pixels."""
        ...


class Backend(ABC):
    """The base class of backends, which apply programs.

    Args:
        device: the device of the images.

    Attributes:
        name: the backend's name in the `backend` option of a Loader.
        takes_floats: whether its runners also take float32 images; the reference runs those of other backends.

    Raises:
        BackendError: the backend cannot be used here; the message says what is missing.
    """

    name: ClassVar[str]
    takes_floats: ClassVar[bool] = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @classmethod
    def unmet_requirement(cls, device: torch.device) -> str | None:
        """Return an error message with the remedy if the backend lacks a requirement on this device; else None. Does
        not import large libraries."""
        return None

    @abstractmethod
    def why_unsupported(self, outline: RecordOutline, *, is_late: bool, follows_own: bool) -> str | None:
        """Return a short reason why the reference runs these records instead; None if this backend runs them.

        Args:
            outline: describes the records.
            is_late: whether the records are applied to finished images.
            follows_own: for such records, whether this backend also ran everything since the images were finished, so
                that a `LevelRunner` gets them as its `late_program`.
        """

    def note(self, outline: RecordOutline) -> str | None:
        """Return what users should know about how this backend runs these records, if anything."""
        return None

    @abstractmethod
    def level_runner(self, finish: Finish) -> LevelRunner:
        """Return a runner that applies records to levels, and converts the levels to results with `finish`."""

    def late_runner(self) -> LateRunner:
        """Return a runner that applies records to finished images; the reference's, unless a backend has its own."""
        return apply_late

    def late_kernels(self, steps: Sequence[Sequence[RecordOutline]], result_format: ResultFormat) -> set[Any]:
        """Return the kernels that a runner for finished images may launch for these outlines."""
        return set()

    def compile(self, kernels: set[Any]) -> None:  # noqa: B027  most backends have nothing to compile
        """Compile kernels, and wait until all are compiled."""
