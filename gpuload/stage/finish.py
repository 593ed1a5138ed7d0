"""The end of a chain: from levels to the numbers, dtype and channels that a batch has.

`ToDtype` and `Normalize` come to one affine map per channel, y = a · level + b, worked out in float64 and applied in
float32. Made once for a chain and a dtype of images. Levels are whole numbers, 0 … 255 for images of uint8, 0 … 65535
for uint16; those of float32 are any numbers, which nothing rounds, clamps or scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from gpuload.transforms.base import Transform

__all__ = ["TOPS", "UNCHANGED", "Finish", "Outputs"]

Outputs = torch.Tensor | Sequence[torch.Tensor]  # N×C×H×W, or C×H×W each
TOPS: Final[dict[str, int | None]] = {"uint8": 255, "uint16": 65535, "float32": None}  # the highest level, by dtype


@dataclass(frozen=True)
class Finish:
    """How levels become results.

    Attributes:
        dtype: of the results.
        scale, bias: a and b, one for each channel of `Normalize`, or one for all.
        channels: how many channels `Normalize` needs, or None.
        levels: the dtype of the images.
    """

    dtype: torch.dtype
    scale: tuple[float, ...]
    bias: tuple[float, ...]
    channels: int | None
    levels: str = "uint8"

    @classmethod
    def of(cls, transforms: Iterable[Transform], dtype: str | None, levels: str = "uint8") -> Finish:
        """What these transforms ask for; `dtype` is of float results, None: what `ToDtype` says, else float32. What is
        late is not part of it, but has its channels.

        Raises:
            ValueError: they make uint8 of other images.
        """
        factor, named, normalize, later = None, None, None, None
        unit = 1 / (TOPS[levels] or 1)
        outlines = ((transform.late, outline) for transform in transforms for outline in transform.outline)
        for late, record in ((late, outline.numbers) for late, outline in outlines if outline.numbers is not None):
            if late:
                later = len(record.mean) or later
            elif record.mean:
                normalize = record
                factor = unit if factor is None else factor
            elif record.dtype == "uint8" != levels:
                raise ValueError(
                    f"ToDtype('uint8') leaves uint8 images as they are, but these are {levels}; leave it out, or "
                    "convert them in the dataset"
                )
            elif record.dtype not in (None, "uint8"):
                factor, named = unit if record.scale else 1.0, record.dtype
        if factor is None:
            return cls(getattr(torch, levels), (1.0,), (0.0,), None, levels)
        result = getattr(torch, dtype or named or "float32")
        if normalize is None:
            return cls(result, (factor,), (0.0,), later, levels)
        pairs = list(zip(normalize.mean, normalize.std, strict=True))
        scale, bias = tuple(factor / s for _, s in pairs), tuple(-m / s for m, s in pairs)
        return cls(result, scale, bias, len(pairs), levels)

    @property
    def is_identity(self) -> bool:
        """Whether numbers are the levels themselves."""
        return set(self.scale) == {1.0} and set(self.bias) == {0.0}

    def check(self, channels: int, label: str) -> None:
        """Refuse images that `Normalize` does not fit."""
        if self.channels is not None and channels != self.channels:
            raise ValueError(
                f"Normalize has {self.channels} means and stds, but {label} has {channels} "
                f"channel{'s' if channels > 1 else ''}; give one for each channel, drop or convert channels in the "
                "dataset, or decode to another mode"
            )

    def constants(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """a and b as float32 tensors of shape (C or 1, 1, 1)."""
        if self.is_identity:  # nothing reads them, and they are made once a batch: no copy that the host waits for
            return torch.ones(1, 1, 1, device=device), torch.zeros(1, 1, 1, device=device)
        return _constant(self.scale, device), _constant(self.bias, device)

    def write(self, levels: Outputs, outputs: Outputs, constants: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Finish images C×H×W, one by one on the CPU, and write them to the batch; `constants` are those of the
        device."""
        scale, bias = constants
        at_once = isinstance(levels, torch.Tensor) and isinstance(outputs, torch.Tensor) and not levels.is_cpu
        for image, output in [(levels, outputs)] if at_once else zip(levels, outputs, strict=True):
            assert isinstance(image, torch.Tensor)
            assert isinstance(output, torch.Tensor)
            if self.is_identity:
                output.copy_(image)
            elif output.dtype == image.dtype == torch.float32:
                torch.mul(image, scale, out=output).add_(bias)
            else:
                output.copy_(image.to(torch.float32).mul_(scale).add_(bias))


def _constant(numbers: Sequence[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=device)[:, None, None]


UNCHANGED: Final = Finish(torch.uint8, (1.0,), (0.0,), None)  # results are levels
