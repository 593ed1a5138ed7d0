"""Converts levels (pixel values before normalization) to the batch's values and dtype at the end of a chain, and
applies the reference's operations to
finished images: images with their final values and dtype.

`ToDtype` and `Normalize` are combined into one affine map per channel, y = a · level + b, computed in float64 and
applied in float32. The map is computed once per chain and image dtype. Levels are integers, 0 … 255 for uint8
images and 0 … 65535 for uint16; float32 images have arbitrary values, which are never rounded, clamped or scaled.

`apply_late` erases, flips, mixes and normalises finished images in place: it applies the late records of a program one
after the other to the entire batch, on its device, and keeps no state. Other backends use it for operations that they
lack. It computes in float32, and rounds to the batch's dtype once.
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
from gpuload.transforms.program.ops import Erase, Flip, Numbers, PartnerMix
from gpuload.transforms.program.windows import clip_to_windows

__all__ = [
    "MAX_LEVELS",
    "UNCHANGED",
    "Finish",
    "Outputs",
    "apply_late",
    "default_partners",
    "erase_levels",
    "random_numbers",
]

Outputs = torch.Tensor | Sequence[torch.Tensor]  # N×C×H×W, or C×H×W each
MAX_LEVELS: Final[dict[str, int | None]] = {"uint8": 255, "uint16": 65535, "float32": None}  # by image dtype
RANDOM_IMAGES: Final = 16  # images that a GPU fills with random pixels at a time; each pixel takes about 800 bytes


@dataclass(frozen=True)
class Finish:
    """The conversion of levels to results.

    Attributes:
        dtype: the dtype of the results.
        scale, bias: a and b, one value per channel if there is a `Normalize`, else one value for all channels.
        channels: the number of channels that `Normalize` requires, or None.
        image_dtype: the dtype of the images before the conversion.
    """

    dtype: torch.dtype
    scale: tuple[float, ...]
    bias: tuple[float, ...]
    channels: int | None
    image_dtype: str = "uint8"

    @classmethod
    def of(cls, transforms: Iterable[Transform], dtype: str | None, image_dtype: str = "uint8") -> Finish:
        """Return the conversion that transforms describe. `dtype` is the dtype of float results; None means the dtype
        of `ToDtype`, or float32. A `Normalize` of finished images contributes only its `channels`.

        Raises:
            ValueError: the transforms convert images of another dtype to uint8.
        """
        factor, dtype_of_chain, normalize, late_channels = None, None, None, None
        unit = 1 / (MAX_LEVELS[image_dtype] or 1)
        outlines = ((transform.works_on_finished, outline) for transform in transforms for outline in transform.outline)
        for is_late, outline in outlines:
            if (record := outline.numbers) is None:
                continue
            if is_late:
                late_channels = _channels_of(record) if record.mean else late_channels
            elif record.mean:
                normalize = record
                factor = unit if factor is None else factor
            elif record.dtype == "uint8" != image_dtype:
                raise ValueError(
                    f"ToDtype('uint8') accepts only uint8 images, but these images are {image_dtype}; put "
                    "ToDtype('uint8', scale=True) first, before all transforms that change pixels, or remove it"
                )
            elif record.dtype not in (None, "uint8"):
                factor, dtype_of_chain = unit if record.scale else 1.0, record.dtype
        if factor is None:
            return cls(getattr(torch, image_dtype), (1.0,), (0.0,), None, image_dtype)
        result_dtype = getattr(torch, dtype or dtype_of_chain or "float32")
        if normalize is None:
            return cls(result_dtype, (factor,), (0.0,), late_channels, image_dtype)
        pairs = list(zip(normalize.mean, normalize.std, strict=True))
        scale, bias = tuple(factor / s for _, s in pairs), tuple(-m / s for m, s in pairs)
        return cls(result_dtype, scale, bias, _channels_of(normalize), image_dtype)

    @property
    def is_identity(self) -> bool:
        """Whether the conversion leaves values unchanged."""
        return set(self.scale) == {1.0} and set(self.bias) == {0.0}

    def check(self, channels: int, label: str) -> None:
        """Raise unless the number of channels fits `Normalize`."""
        if self.channels is not None and channels != self.channels:
            raise ValueError(
                f"Normalize has {self.channels} means and stds, but {label} has {channels} "
                f"channel{'s' if channels > 1 else ''}; give a mean and a std for each channel, drop or convert "
                "channels in the dataset, or decode to another mode"
            )

    def constants(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a and b as float32 tensors of shape (C or 1, 1, 1)."""
        if self.is_identity:  # created on the device, without a copy that the host would wait for; nothing reads them
            return torch.ones(1, 1, 1, device=device), torch.zeros(1, 1, 1, device=device)
        scale, bias = (torch.tensor(numbers, dtype=torch.float32, device=device) for numbers in (self.scale, self.bias))
        return scale[:, None, None], bias[:, None, None]

    def write(self, levels: Outputs, outputs: Outputs, constants: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Convert C×H×W images, and write them to the batch; on the CPU, one by one. `constants` is the result of the
        method `constants` for the images' device."""
        scale, bias = constants
        is_batched = isinstance(levels, torch.Tensor) and isinstance(outputs, torch.Tensor) and not levels.is_cpu
        for image, output in [(levels, outputs)] if is_batched else zip(levels, outputs, strict=True):
            assert isinstance(image, torch.Tensor)
            assert isinstance(output, torch.Tensor)
            if self.is_identity:
                output.copy_(image)
            elif output.dtype == image.dtype == torch.float32:
                torch.mul(image, scale, out=output).add_(bias)
            else:
                output.copy_(image.to(torch.float32).mul_(scale).add_(bias))


def _channels_of(normalize: Numbers) -> int | None:
    """Return the number of channels that a `Normalize` requires; None if it has one mean and std for any number."""
    return len(normalize.mean) if len(normalize.mean) > 1 else None


UNCHANGED: Final = Finish(torch.uint8, (1.0,), (0.0,), None)  # leaves uint8 levels unchanged


def default_partners(count: int) -> np.ndarray:
    """Return the default partners, int64 (count,): images 2k and 2k + 1 are partners; a last image without a partner is
    its own partner."""
    rows = np.arange(count, dtype=np.int64)
    partners = rows ^ 1
    return np.where(partners < count, partners, rows)


def apply_late(outputs: Outputs, late_program: Program, partners: np.ndarray | None) -> None:
    """Apply a program to finished images.

    Args:
        outputs: the images, N×C×H×W or a list of C×H×W; changed in place.
        late_program: the program of the transforms that work on finished images, see `Program.split`.
        partners: int64 (N,), the index of each image's partner in MixUp and CutMix, or the image's own index if it has
            no partner; partners are mutual. None means `default_partners`.
    """
    for record in late_program.records:
        rows = np.arange(len(late_program), dtype=np.int64) if record.rows is None else record.rows
        match record:
            case Flip():
                _flip(outputs, rows[record.flipped], (-2, -1)[record.axis])
            case Erase():
                _erase(outputs, rows, record)
            case PartnerMix():
                _mix(outputs, record, default_partners(len(late_program)) if partners is None else partners)
            case Numbers() if record.mean:
                _normalize(outputs, record)


def _normalize(outputs: Outputs, record: Numbers) -> None:
    """Normalise images that a custom transform has changed after `ToDtype`, so they are already floats."""
    device = outputs[0].device
    mean, std = (upload(np.array(numbers, np.float32)[:, None, None], device) for numbers in (record.mean, record.std))
    is_batched = isinstance(outputs, torch.Tensor) and device.type != "cpu"
    for output in [outputs] if is_batched else outputs:
        assert isinstance(output, torch.Tensor)
        if output.dtype == torch.float32:
            output.sub_(mean).div_(std)
        else:
            output.copy_(output.to(torch.float32).sub_(mean).div_(std))


def erase_levels(levels: torch.Tensor, record: Erase, windows_tlhw: np.ndarray, dtype: str) -> torch.Tensor:
    """Return a copy of an N×C×H×W batch of windows, with boxes erased. `dtype` is the images' dtype; `levels` are
    float32 unless `dtype` is uint8."""
    levels, boxes = levels.clone(), clip_to_windows(record.boxes_tlhw, windows_tlhw)
    level_dtype = np.uint8 if dtype == "uint8" else np.float32
    constant = upload(np.array(record.values_for(MAX_LEVELS[dtype]), level_dtype)[:, None, None], levels.device)
    for row, box_index in np.argwhere(boxes[:, :, 2:].all(axis=2)).tolist():
        _view_box(levels[row], boxes[row, box_index].tolist()).copy_(constant)
    return levels


def _flip(outputs: Outputs, rows: np.ndarray, axis: int) -> None:
    if isinstance(outputs, torch.Tensor) and outputs.device.type != "cpu":
        index = upload(rows, outputs.device)
        outputs[index] = outputs[index].flip(axis)
        return
    for row in rows.tolist():
        outputs[row].copy_(outputs[row].flip(axis))


def _erase(outputs: Outputs, rows: np.ndarray, record: Erase) -> None:
    erased_indices = np.flatnonzero(record.boxes_tlhw[:, :, 2].any(axis=1))
    if not len(erased_indices):
        return
    boxes, first_image = record.boxes_tlhw.tolist(), outputs[0]
    if record.kind == "const":
        constant = upload(np.array(record.numbers, np.float32)[:, None, None], first_image.device)
        for index in erased_indices.tolist():
            for box in boxes[index]:
                if box[2]:
                    _view_box(outputs[int(rows[index])], box).copy_(constant)
        return
    channels, per_pixel = first_image.shape[0], record.kind == "pixel"
    step = 1 if first_image.device.type == "cpu" else RANDOM_IMAGES
    for start in range(0, len(erased_indices), step):
        piece = erased_indices[start : start + step]
        areas = record.boxes_tlhw[piece, :, 2:].prod(axis=2)
        counts = channels * (areas if per_pixel else areas > 0)
        max_count = int(counts.sum(axis=1).max())
        for index, numbers in zip(
            piece.tolist(),
            random_numbers(record.keys[piece], max_count, first_image.device),
            strict=True,
        ):
            offset = 0
            for box in boxes[index]:
                if box[2]:
                    shape = (channels, *(box[2:] if per_pixel else (1, 1)))
                    count = int(np.prod(shape))
                    _view_box(outputs[int(rows[index])], box).copy_(numbers[offset : offset + count].view(shape))
                    offset += count


def random_numbers(keys: np.ndarray, count: int, device: torch.device) -> torch.Tensor:
    """Return `count` standard normal numbers per key, float32 (N, count), for keys (N, 2); the same bits on every
    device."""
    if device.type == "cpu":
        return torch.from_numpy(np.stack([normals((int(k0), int(k1)), count) for k0, k1 in keys.tolist()]))
    return batch_normals(upload(keys.astype(np.int64), device), count)


def _view_box(image: torch.Tensor, box_tlhw: Sequence[int]) -> torch.Tensor:
    """Return a view of a box in a C×H×W image."""
    top, left, height, width = box_tlhw
    return image[:, top : top + height, left : left + width]


def _mix(outputs: Outputs, mix: PartnerMix, partners: np.ndarray) -> None:
    assert isinstance(outputs, torch.Tensor), "only images of one size can be mixed"
    if outputs.device.type != "cpu":
        _mix_batched(outputs, mix, partners)
        return
    shares, boxes = mix.share.tolist(), mix.box_tlhw.tolist()
    for row, partner in enumerate(partners.tolist()):
        if row < partner:  # compute both images before writing either: each needs the other's original pixels
            image, other = outputs[row], outputs[partner]
            change = _compute_mix(image, other, shares[row], boxes[row])
            other_change = _compute_mix(other, image, shares[partner], boxes[partner])
            for target, pixels in (change, other_change):
                target.copy_(pixels)


def _compute_mix(
    image: torch.Tensor, other: torch.Tensor, share: float, box_tlhw: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a view of the part of an image that changes, and a tensor with the part's new pixels."""
    if box_tlhw[2]:
        return _view_box(image, box_tlhw), _view_box(other, box_tlhw).clone()
    if share == 1:
        return image[:0], image[:0]
    image_share, other_share = float(np.float32(share)), float(np.float32(1 - share))
    return image, (other.to(torch.float32) * other_share).add_(image.to(torch.float32) * image_share)


def _mix_batched(batch: torch.Tensor, mix: PartnerMix, partners: np.ndarray) -> None:
    """Mix with batched operations, which give the same bits as mixing pair by pair."""
    is_paired = partners != np.arange(len(partners))
    blended_rows = np.flatnonzero(is_paired & (mix.box_tlhw[:, 2] == 0) & (mix.share < 1))
    pasted_rows = np.flatnonzero(is_paired & (mix.box_tlhw[:, 2] > 0))
    changes = []
    if len(blended_rows):
        image = batch[upload(blended_rows, batch.device)].to(torch.float32)
        other = batch[upload(partners[blended_rows], batch.device)].to(torch.float32)
        image_shares, other_shares = (
            upload(numbers[blended_rows].astype(np.float32), batch.device)[:, None, None, None]
            for numbers in (mix.share, 1 - mix.share)
        )
        changes.append((blended_rows, other.mul_(other_shares).add_(image.mul_(image_shares)).to(batch.dtype)))
    if len(pasted_rows):
        boxes = upload(mix.box_tlhw[pasted_rows], batch.device)[:, :, None]
        y, x = (torch.arange(length, device=batch.device) for length in batch.shape[2:])
        is_inside_y = (y >= boxes[:, 0]) & (y < boxes[:, 0] + boxes[:, 2])
        is_inside_x = (x >= boxes[:, 1]) & (x < boxes[:, 1] + boxes[:, 3])
        is_inside = (is_inside_y[:, :, None] & is_inside_x[:, None, :])[:, None]
        image, other = (batch[upload(index, batch.device)] for index in (pasted_rows, partners[pasted_rows]))
        changes.append((pasted_rows, torch.where(is_inside, other, image)))
    for rows, change in changes:
        batch[upload(rows, batch.device)] = change
