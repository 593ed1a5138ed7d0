"""Determines which kernels a segment of transforms may launch, so that all of them can be compiled when a session
starts. Compiling a kernel takes seconds, during which the GPU would otherwise wait in the
middle of an epoch.

Triton compiles a variant of a kernel for each set of constants and pointer types, and for numbers that are 1 or
divisible by 16. The choice of variants does not depend on random parameters or on the images' sizes, only on the
chain, the batch's dtype and memory format, and the number of channels. The possible geometries of passes are found by
following all possible states of an image's pass through the outlines, as `gpuload.transforms.program.fusing.passes`
does for records. This module runs in the main process.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, Final

import torch

from gpuload.stage.backend import ResultFormat
from gpuload.stage.fused import erasing, kernel, mixing, separable, statistics
from gpuload.stage.fused.kernel import compiler_options
from gpuload.stage.fused.pixels import INTERPRETED
from gpuload.transforms.program.fusing import jobs as R
from gpuload.transforms.program.fusing.jobs import COLUMNS
from gpuload.transforms.program.fusing.passes import STATISTICS
from gpuload.transforms.program.fusing.plan import Tile
from gpuload.transforms.program.ops import Box, Erase, Mix, Ops, Outline, Turn, Warp

__all__ = ["Variant", "compile_all", "late_variants", "level_variants"]

KERNELS: Final = {
    "one_pass": kernel.one_pass,
    "weigh": separable._weigh,
    "count": statistics._count,
    "tabulate": statistics._tabulate,
    "mix": mixing._mix,
    "erase_images": erasing._erase_images,
}
U8, I32, I64, F32, F64 = torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64
NUMBER: Final = 23  # an arbitrary number that is neither 1 nor divisible by 16
QUIET_S: Final = 1.0  # show progress only if compiling takes longer

# The state of an image's pass: the kind of its geometry, and whether it has only selected pixels so far.
Pass = tuple[int, bool]
START: Final[Pass] = (R.COPY, True)


@dataclass(frozen=True)
class Variant:
    """A variant of a kernel to compile.

    Attributes:
        kernel: the kernel's name in `KERNELS`.
        args: the arguments of a launch: the dtype of a pointer, or a number.
        options: the kernel's constants, and the compiler's options.
    """

    kernel: str
    args: tuple[torch.dtype | int, ...]
    options: tuple[tuple[str, Any], ...]

    def compile(self) -> None:
        """Compile the variant for the current device, and load it there."""
        compiled: Any = KERNELS[self.kernel].warmup(*self.args, grid=(1, 1), **dict(self.options))
        try:
            compiled.run  # noqa: B018  this property loads the kernel
        except BaseException:
            compiled._run = None  # otherwise Triton would assume that the kernel is loaded
            raise


def level_variants(steps: Sequence[Sequence[Outline]], *, result_format: ResultFormat, tile: Tile) -> set[Variant]:
    """Return the variants that a segment may launch whose transforms work on levels.

    Args:
        steps: the outlines of each of the segment's transforms.
        result_format: the format of the segment's results.
        tile: the device's tile.
    """
    (channels, out_channels), dtype = result_format.channels, result_format.dtype
    last_kinds, earlier_kinds, has_counts = _possible_geometries(steps)
    operates, column_stride = has_operations(steps), 0 if has_transposes(steps) else result_format.column_stride
    pointers = (U8, I32, I64, F64, I64, F64, U8, I32, I64, F32, F32)
    variants: set[Variant] = set()
    passes = [
        (kind, dtype, out_channels, column_stride, dtype != U8, erases)
        for kind in last_kinds
        for erases in result_format.erases
    ]
    passes += [(kind, U8, channels, channels, False, False) for kind in earlier_kinds]
    for kind, out_dtype, pass_channels, stride, is_finished, erases in passes:
        constants = {"CHANNELS": channels, "OUT_CHANNELS": pass_channels, "OUT_COLUMN": stride, "GEOMETRY": kind}
        constants |= {"OPERATES": operates, "FINISHED": is_finished, "ERASES": erases}
        constants |= {"ROWS": tile.rows, "COLUMNS": tile.columns}
        variants.add(
            _make_variant("one_pass", (*pointers, out_dtype), **constants, **compiler_options(kind, tile.warps))
        )
    for kind in (last_kinds | earlier_kinds) & {R.RESIZE, R.BLUR}:
        constants = {"GEOMETRY": kind, "ROWS": tile.rows, "COLUMNS": COLUMNS}
        variants.add(_make_variant("weigh", (I64, F64, I32), **constants, **separable.OPTIONS))
    if has_counts:
        variants.add(_make_variant("count", (U8, I64, I32), CHANNELS=channels, BLOCK=statistics.BLOCK))
        variants.add(_make_variant("tabulate", (I32, I64, F64, U8), CHANNELS=channels, **statistics.OPTIONS))
    return variants


def has_operations(steps: Iterable[Sequence[Outline]]) -> bool:
    """Return whether records of a segment may contain operations on pixels."""
    return any(issubclass(outline.kind, Ops | Erase) for outlines in steps for outline in outlines)


def has_transposes(steps: Iterable[Sequence[Outline]]) -> bool:
    """Return whether records of a segment may swap rows and columns."""
    return any(outline.kind is Turn for outlines in steps for outline in outlines)


def late_variants(steps: Iterable[Sequence[Outline]], *, result_format: ResultFormat) -> set[Variant]:
    """Return the variants that a segment may launch whose transforms work on N×C×H×W batches of finished images. The
    arguments are those of `level_variants`."""
    variants: set[Variant] = set()
    channels, dtype = result_format.channels[1], result_format.dtype
    for outline in (outline for outlines in steps for outline in outlines):
        if outline.kind is Mix:
            constants = {
                "CHANNELS": channels,
                "DENSE": True,
                "CHANNELS_LAST": 1 < channels == result_format.column_stride,
            }
            for is_aligned in (False, True):
                constants |= {"ALIGNED": is_aligned, "BLOCK": mixing.BLOCK}
                variants.add(_make_variant("mix", (dtype, I64, *[NUMBER] * 6), **constants, **mixing.OPTIONS))
        elif outline.kind is Erase:
            constants = {"CHANNELS": channels, "ROWS": erasing.ROWS, "COLUMNS": erasing.COLUMNS}
            args = (dtype, I64, I64, NUMBER, F32, NUMBER, NUMBER, NUMBER, NUMBER, result_format.column_stride)
            variants.add(_make_variant("erase_images", args, **constants, **erasing.OPTIONS))
    return variants


def compile_all(variants: Iterable[Variant], device: torch.device) -> None:
    """Compile the variants that have not been compiled yet, in parallel threads, because compilers run outside Python.
    Errors are ignored: a kernel that failed to compile raises the error again when it is launched."""
    unique = list(dict.fromkeys(variants))
    if INTERPRETED.value or not unique:
        return
    start, is_shown = time.monotonic(), False
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    for name in {variant.kernel for variant in unique}:
        # Create the cache here: if two threads created it at the same time, Triton would lose one of the two.
        KERNELS[name].device_caches[index]

    def compile_variant(variant: Variant) -> None:
        with torch.accelerator.device_index(index):
            variant.compile()

    with ThreadPoolExecutor(min(len(unique), os.cpu_count() or 1), "gpuload-compile") as pool:
        try:
            for n, _ in enumerate(as_completed([pool.submit(compile_variant, variant) for variant in unique]), 1):
                if (is_shown or time.monotonic() - start > QUIET_S) and sys.stderr is not None and sys.stderr.isatty():
                    is_shown = True
                    print(f"\rgpuload: compiling kernels, {n} of {len(unique)}", end="", file=sys.stderr, flush=True)
        except BaseException:  # ctrl-C
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if is_shown:
        print(f" ({time.monotonic() - start:.0f} s; they are cached on disk)", file=sys.stderr, flush=True)


def _make_variant(name: str, args: tuple[torch.dtype | int, ...], **options: Any) -> Variant:
    return Variant(name, args, tuple(options.items()))


def _possible_geometries(steps: Sequence[Sequence[Outline]]) -> tuple[set[int], set[int], bool]:
    """Return the kinds of geometry that an image's last pass can have, the kinds that earlier passes can have, and
    whether levels may be counted."""
    states: set[Pass] = {START}
    earlier_kinds, has_counts = set[int](), False
    for outlines in steps:
        while True:  # a transform can have any of its effects, in any order, until no new state appears
            previous_count = len(states) + len(earlier_kinds)
            for outline in outlines:
                for kind, begins_pass in _possible_effects(outline):
                    has_counts |= kind is None
                    for state in list(states):
                        if kind is None or (begins_pass and not state[1]):
                            earlier_kinds.add(state[0])
                        states.add((R.COPY if kind is None else kind if begins_pass else state[0], False))
            if len(states) + len(earlier_kinds) == previous_count:
                break
    return {kind for kind, _ in states}, earlier_kinds, has_counts


def _possible_effects(outline: Outline) -> list[tuple[int | None, bool]]:
    """Return the possible effects of an outline's records on a pass: (kind, True) begins a pass with this kind of
    geometry, unless the current pass has only selected pixels and can adopt this geometry; (any kind, False) changes
    pixels within the current pass; (None, True) begins a pass for which levels are counted."""
    if outline.kind is Box:
        is_resize = outline.padding_mode is None and set(outline.filters) != {"nearest"}
        effects = [(R.RESIZE, True)] if is_resize else []
        return [*effects, (R.COPY, True)]
    if outline.kind is Warp:
        return [(R.WARP, True), (R.COPY, True)]
    if outline.kind is Erase:
        return [(R.COPY, False)]
    if outline.kind is not Ops:
        return []
    kinds: list[tuple[int | None, bool]] = [(R.COPY, False)]
    for name in outline.operations:
        if name in STATISTICS:
            kinds.append((None, True))
        elif name == "warp":
            kinds += [(R.WARP, True), (R.COPY, True)]
        elif name in ("blur", "sharpness"):
            kinds.append((R.BLUR if name == "blur" else R.SHARPNESS, True))
    return kinds
