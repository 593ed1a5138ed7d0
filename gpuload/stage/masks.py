"""Applies the geometry of a chain to masks, with nearest-pixel sampling, which leaves the values unchanged.

A mask is represented as an image whose channels are the bytes of the mask's values (N masks of 8-byte values have 8 N
channels). The runner for images applies the records of the program that move pixels, with the bytes of the mask fill;
then the bytes are viewed as values again. So all dtypes and any number of masks share one code path.

This module runs in the stage's process; the runner of a `MaskStage` keeps scratch memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gpuload.stage.finish import UNCHANGED, Outputs
from gpuload.stage.ragged import RaggedImages, complete_images, rows_by_key
from gpuload.stage.reference.backend import Runner, TorchBackend
from gpuload.stage.segments import CallRunner
from gpuload.stage.user_code import run_call
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import Box, Call, Elastic, Flip, Numbers, Record, Turn, Warp

__all__ = ["MaskStage", "check_fill", "pack_masks"]


class MaskStage:
    """The stage for the masks of a batch.

    Args:
        device: the device of the masks.
        runner: the name of the reference's runner to use; None chooses by device.
    """

    def __init__(self, device: torch.device, runner: Runner | None = None) -> None:
        self._backend = TorchBackend(device, runner)
        self._runner = self._backend.level_runner(UNCHANGED)
        self._device = device

    def __call__(
        self, masks: RaggedImages, program: Program, formats: Sequence[tuple[str, int]]
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Apply a program to masks.

        Args:
            masks: the decoded regions, with the bytes of their values as channels.
            program: the program of the images that the masks belong to.
            formats: each mask's numpy dtype name and number of axes: 2 for H×W, 3 for N×H×W.

        Returns:
            The masks, converted if a `ToDtype` sets a dtype for masks; and all masks as one tensor, or None if they
            differ in dtype or shape.

        Raises:
            ValueError: a mask's dtype cannot hold the fill.
        """
        dtype_names = [record.mask_dtype for record in program.records if isinstance(record, Numbers)]
        final_dtype = next((getattr(torch, name) for name in reversed(dtype_names) if name is not None), None)
        groups = rows_by_key(zip(formats, masks.shapes[:, 2].tolist(), strict=True))
        results: list[torch.Tensor] = [torch.empty(0, device="cpu")] * len(formats)
        outputs: Outputs = []
        with torch.inference_mode(False), torch.no_grad():
            for ((name, axes), channels), rows in groups.items():
                dtype = np.dtype(name)
                outputs = self._transform_group(masks, program, rows, dtype, channels)
                outputs = _map_masks(
                    outputs, lambda levels, dtype=dtype, axes=axes: _view_as_values(levels, dtype, axes)
                )
                outputs = outputs if final_dtype is None else _map_masks(outputs, lambda values: values.to(final_dtype))
                for row, result in zip(rows.tolist(), outputs, strict=True):
                    results[row] = result
        return results, outputs if isinstance(outputs, torch.Tensor) and len(groups) == 1 else None

    def _transform_group(
        self, masks: RaggedImages, program: Program, rows: np.ndarray, dtype: np.dtype, channels: int
    ) -> Outputs:
        """Apply a program to masks with equal dtype and number of channels; return their bytes, as one tensor if all
        results have one size."""
        program = _mask_program(program if len(rows) == len(program) else program.take(rows), dtype, channels)
        sizes = program.results_hw.tolist()
        outputs: Outputs
        if all(size == sizes[0] for size in sizes):
            outputs = torch.empty((len(rows), channels, *sizes[0]), dtype=torch.uint8, device=self._device)
        else:
            outputs = [torch.empty((channels, *size), dtype=torch.uint8, device=self._device) for size in sizes]
        if channels:
            self._transform(masks.take(rows), program, outputs, dtype)
        return outputs

    def _transform(self, masks: RaggedImages, program: Program, outputs: Outputs, dtype: np.dtype[Any]) -> None:
        if not any(isinstance(record, Call) for record in program.records):
            self._runner(masks, program, program.windows_tlhw, outputs, None)
            return

        def call(record: Call, planes: Outputs, write: Any = None) -> None:
            values = _map_masks(planes, lambda levels: _view_as_values(levels, dtype, 3))
            run_call(record, values, "apply_masks")
            if dtype.itemsize > 1:
                for plane, plane_values in zip(planes, values, strict=True):
                    plane.copy_(_view_as_bytes(plane_values))
            if write is not None:
                write(np.arange(len(planes)), planes)

        CallRunner(self._backend, call)(masks, program, outputs)


def pack_masks(masks: torch.Tensor | Sequence[torch.Tensor]) -> tuple[RaggedImages, list[tuple[str, int]]]:
    """Return masks in the layout that workers send, as images whose channels are the masks' bytes; and the masks'
    formats (see `MaskStage`).

    Args:
        masks: an H×W or K×H×W tensor per image; or one N×H×W or N×K×H×W tensor, which is copied in one operation.
    """
    flat: list[torch.Tensor] = []
    shapes: list[list[int]] = []
    formats: list[tuple[str, int]] = []
    for stack in [masks] if isinstance(masks, torch.Tensor) else [mask[None] for mask in masks]:
        planes = stack if stack.dim() == 4 else stack[:, None]
        flat.append(planes.permute(0, 2, 3, 1).contiguous().reshape(-1).view(torch.uint8))
        shapes += [[*planes.shape[2:], planes.shape[1] * planes.element_size()]] * len(stack)
        formats += [(str(stack.dtype).removeprefix("torch."), stack.dim() - 1)] * len(stack)
    shapes_hwc = np.array(shapes, np.int64)
    sizes = shapes_hwc.prod(axis=1)
    table = complete_images(np.cumsum(sizes) - sizes, shapes_hwc)
    pixels = flat[0] if len(flat) == 1 else torch.cat(flat)
    return RaggedImages(pixels, table, [f"mask {index}" for index in range(len(formats))]), formats


def _map_masks(masks: Outputs, change: Callable[[torch.Tensor], torch.Tensor]) -> Outputs:
    return change(masks) if isinstance(masks, torch.Tensor) else [change(mask) for mask in masks]


def _view_as_bytes(values: torch.Tensor) -> torch.Tensor:
    """View N×H×W values as (N · itemsize)×H×W bytes."""
    count, height, width = values.shape
    return values.contiguous().view(torch.uint8).view(count, height, width, -1).movedim(-1, 1).flatten(0, 1)


def _view_as_values(levels: torch.Tensor, dtype: np.dtype, axes: int) -> torch.Tensor:
    """View …×(N · itemsize)×H×W bytes as …×N×H×W values, or as …×H×W values for masks with two axes."""
    torch_dtype, size = getattr(torch, dtype.name), dtype.itemsize
    *batch_axes, channels, height, width = levels.shape
    if not levels.numel():  # no masks; an empty tensor's strides may not allow a view as another dtype
        return levels.new_empty((*batch_axes, 0, height, width), dtype=torch_dtype)
    values = levels.view(*batch_axes, channels // size, size, height, width).movedim(-3, -1)
    # The tensor is flattened first: if its last axes have length 1, its strides may not allow a view as another dtype.
    values = values.reshape(-1).view(torch_dtype).view(values.shape[:-1])
    return values.squeeze(-3) if axes == 2 else values


def _mask_program(program: Program, dtype: np.dtype[Any], channels: int) -> Program:
    """Return the records of a program that move pixels, with nearest-pixel sampling and the bytes of the mask fill."""
    records: list[Record] = []
    for record in program.records:
        if isinstance(record, Box | Elastic | Warp):
            check_fill(record.name, record.mask_fill, dtype)
            fill = np.frombuffer(np.array(record.mask_fill, dtype).tobytes(), np.uint8)
            fill = tuple(np.tile(fill, channels // dtype.itemsize).tolist())
            records.append(replace(record, filters="nearest", fill=fill or (0,)))
        elif isinstance(record, Flip | Turn) or (isinstance(record, Call) and record.transform.has("apply_masks")):
            records.append(record)
    return replace(program, records=tuple(records), late_from=None)


def check_fill(name: str, fill: float, dtype: np.dtype) -> None:
    """Raise if a mask dtype cannot hold the fill of the transform with this name."""
    if fill and not _can_hold(dtype, fill):
        raise ValueError(
            f"{name}(fill=…) fills masks with {fill}, which a mask of dtype {dtype.name} cannot hold; use masks of "
            "another dtype, or set another fill={gpuload.Image: …, gpuload.Mask: …}"
        )


def _can_hold(dtype: np.dtype, fill: float) -> bool:
    """Return whether a dtype can hold a fill. Floats may round it; bool accepts any integer."""
    if dtype.kind == "f":
        return abs(fill) <= float(np.finfo(dtype).max) or fill in (math.inf, -math.inf) or fill != fill
    if not isinstance(fill, int):
        return False
    return dtype == np.bool_ or np.iinfo(dtype).min <= fill <= np.iinfo(dtype).max
