"""The end of a chain: from levels to the numbers, dtype and channels that a batch has, and what the reference does to
finished images.

`ToDtype` and `Normalize` come to one affine map per channel, y = a · level + b, worked out in float64 and applied in
float32. Made once for a chain and a dtype of images. Levels are whole numbers, 0 … 255 for images of uint8, 0 … 65535
for uint16; those of float32 are any numbers, which nothing rounds, clamps or scales.

`apply_late` erases, flips and mixes finished images in place: it applies the late records of a program one after the
other to the whole batch, in its memory, on its device; nothing is kept. Other backends leave to it what they lack. The
arithmetic is in float32, rounded to the batch's dtype once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from gpuload.stage.device import upload
from gpuload.stage.noise import batch_normals, normals
from gpuload.transforms.base import Transform
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import Erase, Flip, Mix, Numbers
from gpuload.transforms.program.windows import boxes_within

__all__ = ["TOPS", "UNCHANGED", "Finish", "Outputs", "apply_late", "erase_levels", "neighbours", "random_numbers"]

Outputs = torch.Tensor | Sequence[torch.Tensor]  # N×C×H×W, or C×H×W each
TOPS: Final[dict[str, int | None]] = {"uint8": 255, "uint16": 65535, "float32": None}  # the highest level, by dtype
PIECE: Final = 16  # images whose random pixels are made at once on a GPU: each pixel takes some 100 numbers of 64 bits


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
        """Return what these transforms ask for; `dtype` is of float results, None means what `ToDtype` says, else
        float32. What is late is not part of it, but has its channels.

        Raises:
            ValueError: they make uint8 of other images.
        """
        factor, named, normalize, later = None, None, None, None
        unit = 1 / (TOPS[levels] or 1)
        outlines = ((transform.works_on_finished, outline) for transform in transforms for outline in transform.outline)
        for on_finished, record in (
            (on_finished, outline.numbers) for on_finished, outline in outlines if outline.numbers is not None
        ):
            if on_finished:
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
        scale, bias = (torch.tensor(numbers, dtype=torch.float32, device=device) for numbers in (self.scale, self.bias))
        return scale[:, None, None], bias[:, None, None]

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


UNCHANGED: Final = Finish(torch.uint8, (1.0,), (0.0,), None)  # results are levels


def neighbours(count: int) -> np.ndarray:
    """The partners if none are given: rows 2k and 2k + 1; int64 (count,), a row's own number if it has none."""
    rows = np.arange(count, dtype=np.int64)
    partners = rows ^ 1
    return np.where(partners < count, partners, rows)


def apply_late(outputs: Outputs, on_finished: Program, partners: np.ndarray | None) -> None:
    """Apply what was drawn to finished images.

    Args:
        outputs: N×C×H×W, or a list of C×H×W; they are changed.
        on_finished: the program of the transforms that work on finished images, see `Program.split`.
        partners: int64 (N,), the row of each image's partner in MixUp and CutMix, its own if it has none; partners are
            mutual. None means `neighbours`.
    """
    for record in on_finished.records:
        rows = np.arange(len(on_finished), dtype=np.int64) if record.rows is None else record.rows
        match record:
            case Flip():
                _flip(outputs, rows[record.flipped], (-2, -1)[record.axis])
            case Erase():
                _erase(outputs, rows, record)
            case Mix():
                _mix(outputs, record, neighbours(len(on_finished)) if partners is None else partners)
            case Numbers() if record.mean:
                _normalize(outputs, record)


def _normalize(outputs: Outputs, record: Numbers) -> None:
    """Normalise what a call of the user's own came before; the images are floats already."""
    device = outputs[0].device
    mean, std = (upload(np.array(numbers, np.float32)[:, None, None], device) for numbers in (record.mean, record.std))
    at_once = isinstance(outputs, torch.Tensor) and device.type != "cpu"
    for output in [outputs] if at_once else outputs:
        assert isinstance(output, torch.Tensor)
        if output.dtype == torch.float32:
            output.sub_(mean).div_(std)
        else:
            output.copy_(output.to(torch.float32).sub_(mean).div_(std))


def erase_levels(levels: torch.Tensor, record: Erase, windows_tlhw: np.ndarray, dtype: str = "uint8") -> torch.Tensor:
    """Windows of images of a dtype, N×C×H×W, levels (float32 if they are not uint8), with boxes erased: a copy."""
    levels, boxes = levels.clone(), boxes_within(record.boxes_tlhw, windows_tlhw)
    kind = np.uint8 if dtype == "uint8" else np.float32
    constant = upload(np.array(record.levels(TOPS[dtype]), kind)[:, None, None], levels.device)
    for row, number in np.argwhere(boxes[:, :, 2:].all(axis=2)).tolist():
        _inside(levels[row], boxes[row, number].tolist()).copy_(constant)
    return levels


def _flip(outputs: Outputs, rows: np.ndarray, axis: int) -> None:
    if isinstance(outputs, torch.Tensor) and outputs.device.type != "cpu":
        index = upload(rows, outputs.device)
        outputs[index] = outputs[index].flip(axis)
        return
    for row in rows.tolist():
        outputs[row].copy_(outputs[row].flip(axis))


def _erase(outputs: Outputs, rows: np.ndarray, record: Erase) -> None:
    there = np.flatnonzero(record.boxes_tlhw[:, :, 2].any(axis=1))
    if not len(there):
        return
    boxes, first = record.boxes_tlhw.tolist(), outputs[0]
    if record.kind == "const":
        constant = upload(np.array(record.numbers, np.float32)[:, None, None], first.device)
        for index in there.tolist():
            for box in boxes[index]:
                if box[2]:
                    _inside(outputs[int(rows[index])], box).copy_(constant)
        return
    channels, per_pixel = first.shape[0], record.kind == "pixel"
    step = 1 if first.device.type == "cpu" else PIECE
    for start in range(0, len(there), step):
        rows_there = there[start : start + step]
        areas = record.boxes_tlhw[rows_there, :, 2:].prod(axis=2)
        counts = channels * (areas if per_pixel else areas > 0)
        most = int(counts.sum(axis=1).max())
        for index, numbers in zip(
            rows_there.tolist(), random_numbers(record.keys[rows_there], most, first.device), strict=True
        ):
            at = 0
            for box in boxes[index]:
                if box[2]:
                    shape = (channels, *(box[2:] if per_pixel else (1, 1)))
                    count = int(np.prod(shape))
                    _inside(outputs[int(rows[index])], box).copy_(numbers[at : at + count].view(shape))
                    at += count


def random_numbers(keys: np.ndarray, count: int, device: torch.device) -> torch.Tensor:
    """Standard normal numbers, float32 (N, count), for keys (N, 2); the same bits on every device."""
    if device.type == "cpu":
        return torch.from_numpy(np.stack([normals((int(k0), int(k1)), count) for k0, k1 in keys.tolist()]))
    return batch_normals(upload(keys.astype(np.int64), device), count)


def _inside(image: torch.Tensor, box_tlhw: Sequence[int]) -> torch.Tensor:
    """A view of a box of an image C×H×W."""
    top, left, height, width = box_tlhw
    return image[:, top : top + height, left : left + width]


def _mix(outputs: Outputs, mix: Mix, partners: np.ndarray) -> None:
    assert isinstance(outputs, torch.Tensor), "images are mixed in a batch of one size"
    if outputs.device.type != "cpu":
        _mix_at_once(outputs, mix, partners)
        return
    shares, boxes = mix.share.tolist(), mix.box_tlhw.tolist()
    for row, partner in enumerate(partners.tolist()):
        if row < partner:  # both of a pair at once: each needs the other as it was
            one, other = outputs[row], outputs[partner]
            first = _mixed(one, other, shares[row], boxes[row])
            second = _mixed(other, one, shares[partner], boxes[partner])
            for target, change in (first, second):
                target.copy_(change)


def _mixed(
    image: torch.Tensor, other: torch.Tensor, share: float, box_tlhw: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A view of the part of an image that changes, and its new numbers in memory of their own."""
    if box_tlhw[2]:
        return _inside(image, box_tlhw), _inside(other, box_tlhw).clone()
    if share == 1:
        return image[:0], image[:0]
    ours, other_share = float(np.float32(share)), float(np.float32(1 - share))
    return image, (other.to(torch.float32) * other_share).add_(image.to(torch.float32) * ours)


def _mix_at_once(batch: torch.Tensor, mix: Mix, partners: np.ndarray) -> None:
    """Mix with batched operations, which round as single ones do."""
    paired = partners != np.arange(len(partners))
    blended = np.flatnonzero(paired & (mix.box_tlhw[:, 2] == 0) & (mix.share < 1))
    pasted = np.flatnonzero(paired & (mix.box_tlhw[:, 2] > 0))
    changes = []
    if len(blended):
        image = batch[upload(blended, batch.device)].to(torch.float32)
        other = batch[upload(partners[blended], batch.device)].to(torch.float32)
        ours, other_shares = (
            upload(numbers[blended].astype(np.float32), batch.device)[:, None, None, None]
            for numbers in (mix.share, 1 - mix.share)
        )
        changes.append((blended, other.mul_(other_shares).add_(image.mul_(ours)).to(batch.dtype)))
    if len(pasted):
        boxes = upload(mix.box_tlhw[pasted], batch.device)[:, :, None]
        y, x = (torch.arange(length, device=batch.device) for length in batch.shape[2:])
        down = (y >= boxes[:, 0]) & (y < boxes[:, 0] + boxes[:, 2])
        across = (x >= boxes[:, 1]) & (x < boxes[:, 1] + boxes[:, 3])
        inside = (down[:, :, None] & across[:, None, :])[:, None]
        image, other = (batch[upload(chosen, batch.device)] for chosen in (pasted, partners[pasted]))
        changes.append((pasted, torch.where(inside, other, image)))
    for rows, change in changes:
        batch[upload(rows, batch.device)] = change
