"""The datasets that workers get: others' samples, looked at, measured, or picked for pictures. No torch."""

from __future__ import annotations

import json
from typing import Any, Final, Literal

import numpy as np

from gpuload.datasets.sample import Encoded, Image
from gpuload.decode.decoder import Decoder
from gpuload.decode.options import Decode
from gpuload.inspection.files import DAMAGED, cause_of, look_at, take_apart
from gpuload.inspection.pixels import PIXELS, measure

__all__ = ["Picked", "Seen"]

FIELDS: Final = 11  # numbers of a `ROW` that workers fill in


class Seen:
    """A dataset of what workers see in samples of others.

    Args:
        datasets: the data sets.
        which, indices: for each sample, its data set and its index there.
        how: ``"files"``: `look_at`; ``"pixels"``: `measure`.
    """

    def __init__(
        self, datasets: list[Any], which: np.ndarray, indices: np.ndarray, how: Literal["files", "pixels"]
    ) -> None:
        self._datasets, self._which, self._indices, self._how = datasets, which, indices, how
        self._decoder: Decoder | None = None

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, number: int) -> tuple[int, np.ndarray, str]:
        self._decoder = self._decoder or Decoder(Decode())
        files = self._how == "files"
        try:
            sample = self._datasets[self._which[number]][int(self._indices[number])]
            return number, *(look_at if files else measure)(sample, self._decoder)
        except Exception as error:  # whatever a dataset raises for a sample that it cannot read
            told = json.dumps({"cause": cause_of(error), "source": getattr(error, "filename", None)})
            numbers = np.zeros(FIELDS if files else PIXELS.itemsize // 8, np.int64)
            numbers[0] = DAMAGED if files else 0
            return number, numbers if files else numbers[None], told

    def will_need(self, numbers: list[int]) -> None:
        """Let data sets that can have the kernel read these samples, which are asked for soon."""
        for number in numbers:
            dataset = self._datasets[self._which[number]]
            if (will_need := getattr(dataset, "will_need", None)) is not None:
                will_need([int(self._indices[number])])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_decoder": None}


class Picked:
    """A dataset of some images of others, each with its label, or 0 if that is no number.

    Args:
        datasets, which, indices: as for `Seen`.
        deep: for each sample, whether its image is decoded as it is stored, as it has more than 8 bits.
    """

    def __init__(self, datasets: list[Any], which: np.ndarray, indices: np.ndarray, deep: np.ndarray) -> None:
        self._datasets, self._which, self._indices, self._deep = datasets, which, indices, deep

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, number: int) -> tuple[Encoded | Image, int]:
        image, label = take_apart(self._datasets[self._which[number]][int(self._indices[number])])
        if isinstance(image, Encoded) and self._deep[number]:
            image = Encoded(image.data, "unchanged", image.source)
        return image, label if isinstance(label, int) else 0
