"""What a backend is: it applies programs to pixels, and says beforehand which records it can apply.

A backend is made once for a stage and asked for runners, one for each run of neighbouring transforms that it has; see
`gpuload.stage.segments`. It draws nothing, and sees no transform: all that it may know is in
`gpuload.transforms.program`. All backends give the levels of `gpuload.stage.reference`, within the tolerances of
``docs/parity.md``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch

from gpuload.stage.finish import Finish, Outputs
from gpuload.stage.ragged import RaggedImages
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.fusing.plan import Fusing
from gpuload.transforms.program.ops import Outline
from gpuload.workers.planned import PlannedBatch

__all__ = ["Backend", "Compiled", "Form", "Late", "Levels"]

# Changes finished images in place, with the arguments of `gpuload.stage.finish.apply_late`.
Late = Callable[[Outputs, Program, np.ndarray | None], None]


@dataclass(frozen=True)
class Form:
    """Facts about the results of a run that are known before there are any.

    Attributes:
        channels: how many pixels have at most on the way, and in the end.
        dtype: of the results.
        column: how far apart their columns are in memory, in numbers.
        erases: whether boxes are erased of them as they are written; both, if that depends on what is drawn.
    """

    channels: tuple[int, int]
    dtype: torch.dtype
    column: int
    erases: tuple[bool, ...] = (False,)


class Levels(Protocol):
    """Takes images through a run of transforms that work on levels."""

    def __call__(
        self,
        images: RaggedImages,
        program: Program,
        windows_tlhw: tuple[np.ndarray, ...],
        outputs: Outputs,
        on_finished: Program | None,
    ) -> Program | None:
        """Apply what was drawn.

        Args:
            images: they cover at least the first of the windows.
            program: of this run.
            windows_tlhw: the windows of the images before each record, and of the results.
            outputs: image i is finished and written to ``outputs[i]``, C×H×W.
            on_finished: the program of the transforms right after, which work on finished images, if this backend has
                them too.

        Returns:
            The part of `on_finished` that is still to be done.
        """
        ...


@runtime_checkable
class Compiled(Levels, Protocol):
    """A runner that compiles kernels, and whose batches may be planned elsewhere."""

    def kernels(self, steps: Sequence[Sequence[Outline]], form: Form) -> set[Any]:
        """Return the kernels that it may launch, from the outlines of each transform of its run, for this form."""
        ...

    def fusing(self, *, channels_last: bool) -> Fusing:
        """Return what plans batches, with dense results in this memory format."""
        ...

    def launch_planned(self, planned: PlannedBatch, pixels: torch.Tensor, outputs: Outputs) -> None:
        """Make a batch of such a plan, whose arrays lie behind the pixels."""
        ...


class Backend(ABC):
    """Applies programs.

    Args:
        device: where the images are.

    Attributes:
        name: the value of a Loader's `backend`.

    Raises:
        BackendError: it cannot be used here; the message says what is missing.
    """

    name: ClassVar[str]

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        """Return what it needs on a device and does not find, and what to do; None if nothing is missing. Imports
        nothing large."""
        return None

    @abstractmethod
    def lacks(self, outline: Outline, *, on_finished: bool = False) -> str | None:
        """Return why the reference runs these records instead, in a few words; None if they run here.

        Args:
            on_finished: they are applied to finished images.
        """

    @abstractmethod
    def levels(self, finish: Finish) -> Levels:
        """A runner of records that work on levels, which finishes the results."""

    @abstractmethod
    def on_finished(self) -> Late:
        """A runner of records that work on finished images."""

    def late_kernels(self, steps: Sequence[Sequence[Outline]], form: Form) -> set[Any]:
        """The kernels that a runner of these may launch on finished images."""
        return set()

    def compile(self, kernels: set[Any]) -> None:  # noqa: B027  most have nothing to compile
        """Compile kernels, and wait until that is done."""
