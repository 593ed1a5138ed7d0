"""What a backend is: something that applies draws to pixels, and says beforehand which transforms it can do that for.

A backend is made once for a stage and asked for runners, one for each run of neighbouring transforms that it has; see
`gpuload.stage.segments`. It draws nothing. All backends give the same levels within the tolerances of
``docs/parity.md``, of which `gpuload.stage.reference.backend` is the middle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

import numpy as np
import torch

from gpuload.rng.philox import epoch_key
from gpuload.stage.finish import Finish
from gpuload.stage.finished import Outputs
from gpuload.stage.ragged import RaggedImages
from gpuload.transforms import Draws
from gpuload.transforms.base import Transform, Uniforms
from gpuload.transforms.composite import flat
from gpuload.transforms.program.ops import Params

__all__ = ["Backend", "Late", "Levels", "kind_of"]

LARGE = 1 << 20  # pixels of a side: no transform refuses an image of this size


class Levels(Protocol):
    """Takes images through neighbouring transforms that work on levels."""

    def __call__(
        self,
        images: RaggedImages,
        draws: Draws,
        windows_tlhw: tuple[np.ndarray, ...],
        outputs: Outputs,
        late: Draws | None,
    ) -> Draws | None:
        """Apply what was drawn.

        Args:
            images: of which the first of the windows is there, at least.
            draws: for the transforms of this run.
            windows_tlhw: of the input of each, and of the result: what is wanted of it.
            outputs: image i is finished and written to ``outputs[i]``, C×H×W.
            late: for the transforms right behind, which work on finished images, and which this backend has too.

        Returns:
            What of `late` is still to be done.
        """
        ...


class Late(Protocol):
    """Changes finished images, where they lie."""

    def __call__(self, outputs: Outputs, late: Draws, partners: np.ndarray | None) -> None:
        """Apply what was drawn; arguments as for `gpuload.stage.finished.apply_late`."""
        ...


class Backend(ABC):
    """What applies transforms.

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

    def lacks(self, transform: Transform, *, late: bool = False) -> str | None:
        """Why the reference runs a transform in its place, in some words; None where it runs here.

        One that holds others runs where all of these can. `late`: it is applied to finished images.
        """
        if transform.children:
            reasons = ((inner, self.lacks(inner, late=late)) for inner in flat(transform.children))
            return next((f"{type(inner).__name__}: {reason}" for inner, reason in reasons if reason), None)
        kind = kind_of(transform)
        if kind is None:
            return None
        return (self._lacks_late(transform, kind) if late else None) or self._lacks(transform, kind)

    @abstractmethod
    def _lacks(self, transform: Transform, kind: type[Params]) -> str | None:
        """The same, for a transform that holds no others and draws parameters of this kind."""

    def _lacks_late(self, transform: Transform, kind: type[Params]) -> str | None:
        """What it lacks on finished images only."""
        return None

    @abstractmethod
    def levels(self, finish: Finish) -> Levels:
        """What runs transforms that work on levels, and finishes the results."""

    @abstractmethod
    def late(self) -> Late:
        """What runs transforms that work on finished images."""


def kind_of(transform: Transform) -> type[Params] | None:
    """The kind of parameters that a transform draws; None for one that draws none.

    It is asked to draw for an image: so there is no second place that says it.
    """
    boxes = [np.array([[0.0, 0.0, LARGE, LARGE]])] if transform.reads_boxes else None
    uniforms = Uniforms(epoch_key(0, 0), np.zeros(1, np.int64), 0, boxes)
    drawn = transform.draw(uniforms, np.full((1, 2), LARGE, np.int64))
    return None if drawn is None else type(drawn)
