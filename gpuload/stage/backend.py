"""What a backend is: something that applies a program to pixels, and says beforehand which records it can do that for.

A backend is made once for a stage and asked for runners, one for each run of neighbouring transforms that it has; see
`gpuload.stage.segments`. It draws nothing, and sees no transform: all that it may know stands in
`gpuload.transforms.program`. All backends give the same levels within the tolerances of ``docs/parity.md``, of which
`gpuload.stage.reference` is the middle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

import numpy as np
import torch

from gpuload.stage.finish import Finish
from gpuload.stage.finished import Outputs
from gpuload.stage.ragged import RaggedImages
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import Outline

__all__ = ["Backend", "Late", "Levels"]


class Levels(Protocol):
    """Takes images through neighbouring transforms that work on levels."""

    def __call__(
        self,
        images: RaggedImages,
        program: Program,
        windows_tlhw: tuple[np.ndarray, ...],
        outputs: Outputs,
        late: Program | None,
    ) -> Program | None:
        """Apply what was drawn.

        Args:
            images: of which the first of the windows is there, at least.
            program: of this run.
            windows_tlhw: before each record, and of the result: what is wanted of it.
            outputs: image i is finished and written to ``outputs[i]``, C×H×W.
            late: of the transforms right behind, which work on finished images, and which this backend has too.

        Returns:
            What of `late` is still to be done.
        """
        ...


class Late(Protocol):
    """Changes finished images, where they lie."""

    def __call__(self, outputs: Outputs, late: Program, partners: np.ndarray | None) -> None:
        """Apply what was drawn; arguments as for `gpuload.stage.finished.apply_late`."""
        ...


class Backend(ABC):
    """What applies programs.

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
        """What is missing to use it on a device, and what to do; None where nothing is. Imports nothing large."""
        return None

    @abstractmethod
    def lacks(self, outline: Outline, *, late: bool = False) -> str | None:
        """Why the reference runs such a record in its place, in some words; None where it runs here.

        `late`: it is applied to finished images.
        """

    @abstractmethod
    def levels(self, finish: Finish) -> Levels:
        """What runs records that work on levels, and finishes the results."""

    @abstractmethod
    def late(self) -> Late:
        """What runs records that work on finished images."""
