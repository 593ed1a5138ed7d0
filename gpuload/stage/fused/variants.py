"""Determines which kernels a segment of transforms may launch, so that all of them can be compiled when a session
starts. Compiling a kernel takes seconds, during which the GPU would otherwise wait in the
middle of an epoch.

Triton compiles a variant of a kernel for each set of constants and pointer types, and for numbers that are 1 or
divisible by 16. Which variants can occur depends on the chain, the batch's dtype and memory format, and the number of
channels. The possible geometries of passes are found by following all possible states of an image's pass through the
outlines, as `gpuload.transforms.program.fusing.passes` does for records: whatever is drawn, no other variant is
launched, and nearly every variant is launched for some draw and some size of the images. This module runs in the main
process.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from gpuload.stage.backend import ResultFormat
from gpuload.stage.fused import erasing, kernel, mixing, separable, statistics
from gpuload.stage.fused.kernel import compiler_options
from gpuload.stage.fused.pixels import INTERPRETED
from gpuload.transforms.program.fusing import jobs as R
from gpuload.transforms.program.fusing.jobs import COLUMNS
from gpuload.transforms.program.fusing.passes import STATISTICS
from gpuload.transforms.program.fusing.plan import Features, KernelTile
from gpuload.transforms.program.ops import Box, Call, Erase, Flip, Ops, PartnerMix, RecordOutline, Turn, Warp

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

# The effect of a record, or of one of its operations, on an image's pass: a kind of geometry, if it reads the image in
# this way; "select" (pixels, which only changes what the pass reads or writes), "change" (single pixels), "count"
# (levels), or "call" (the user's code, which ends the program); None means no effect. Of a round, an image gets one
# effect.
Effect = int | str | None
Round = frozenset[Effect]
SELECTS: Final[Round] = Round(["select"])
MAX_REPEATS: Final = 3  # more of the same round reach no other state: two effects, and a change between them


class PassState(NamedTuple):
    """The state of an image's last pass.

    Attributes:
        kind: the kind of its geometry.
        is_open: whether it has only selected pixels so far; if so, `kind` is COPY.
        is_whole: whether it is also certain that it reads the entire image, so that levels can be counted.
    """

    kind: int = R.COPY
    is_open: bool = False
    is_whole: bool = False


START: Final = PassState(is_open=True, is_whole=True)


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


def level_variants(
    steps: Sequence[Sequence[RecordOutline]], *, result_format: ResultFormat, tile: KernelTile
) -> set[Variant]:
    """Return the variants that a segment may launch whose transforms work on levels.

    Args:
        steps: the outlines of each of the segment's transforms.
        result_format: the format of the segment's results.
        tile: the device's tile.
    """
    (channels, out_channels), dtype = result_format.channels, result_format.dtype
    last_kinds, earlier_kinds, has_counts = _possible_geometries(steps)
    features = Features.of_outlines(outline for outlines in steps for outline in outlines)
    column_stride = 0 if features.has_transposes else result_format.column_stride
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
        constants |= {"FILTERS": features.filters_of(kind), "OPERATIONS": features.operations, "FINISHED": is_finished}
        constants |= {"ERASES": erases, "ROWS": tile.rows, "COLUMNS": tile.columns}
        variants.add(
            _make_variant("one_pass", (*pointers, out_dtype), **constants, **compiler_options(kind, tile.warps))
        )
    for kind in (last_kinds | earlier_kinds) & {R.RESIZE, R.BLUR}:
        constants = {"GEOMETRY": kind, "FILTERS": features.filters_of(kind), "ROWS": tile.rows, "COLUMNS": COLUMNS}
        variants.add(_make_variant("weigh", (I64, F64, I32), **constants, **separable.OPTIONS))
    if has_counts:
        variants.add(_make_variant("count", (U8, I64, I32), CHANNELS=channels, BLOCK=statistics.BLOCK))
        variants.add(_make_variant("tabulate", (I32, I64, F64, U8), CHANNELS=channels, **statistics.OPTIONS))
    return variants


def late_variants(steps: Iterable[Sequence[RecordOutline]], *, result_format: ResultFormat) -> set[Variant]:
    """Return the variants that a segment may launch whose transforms work on N×C×H×W batches of finished images. The
    arguments are those of `level_variants`."""
    variants: set[Variant] = set()
    channels, dtype = result_format.channels[1], result_format.dtype
    for outline in (outline for outlines in steps for outline in outlines):
        if outline.kind is PartnerMix:
            constants = {"CHANNELS": channels, "CHANNELS_LAST": 1 < channels == result_format.column_stride}
            for is_aligned in (False, True):
                constants |= {"ALIGNED": is_aligned, "BLOCK": mixing.BLOCK}
                variants.add(_make_variant("mix", (dtype, I64, NUMBER, NUMBER), **constants, **mixing.OPTIONS))
        elif outline.kind is Erase:
            constants = {"CHANNELS": channels, "ROWS": erasing.ROWS, "COLUMNS": erasing.COLUMNS}
            args = (dtype, I64, I64, NUMBER, F32, NUMBER, NUMBER, NUMBER, NUMBER, result_format.column_stride)
            variants.add(_make_variant("erase_images", args, **constants, **erasing.OPTIONS))
    return variants


def compile_all(variants: Iterable[Variant], device: torch.device) -> None:
    """Compile the variants that have not been compiled yet, in parallel threads, because compilers run outside Python.
    Errors are ignored: a kernel that failed to compile raises the error again when it is launched."""
    # The slowest come first, so that no thread is left with one of them at the end.
    unique = sorted(dict.fromkeys(variants), key=_is_quick)
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


def _is_quick(variant: Variant) -> bool:
    """Return whether a variant takes much less time to compile than a pass that resamples."""
    return variant.kernel != "one_pass" or dict(variant.options)["GEOMETRY"] == R.COPY


def _make_variant(name: str, args: tuple[torch.dtype | int, ...], **options: object) -> Variant:
    return Variant(name, args, tuple(options.items()))


def _possible_geometries(steps: Sequence[Sequence[RecordOutline]]) -> tuple[set[int], set[int], bool]:
    """Return the kinds of geometry that the last pass of a program can have, the kinds that earlier passes can have,
    and whether levels may be counted.

    Each step is one transform. The rounds of a transform that contains others are taken in any order.
    """
    states, min_hw = {START}, (1, 1)
    last_kinds, earlier_kinds, has_counts = set[int](), set[int](), False
    for outlines in steps:
        is_certain = len(outlines) == 1 and not outlines[0].is_optional
        rounds = Counter(
            effects for outline in outlines for effects in _rounds(outline, min_hw if is_certain else (1, 1))
        )
        # A call for some images of a batch ends the program of all images, wherever these are on their paths.
        splits = not is_certain and any("call" in effects for effects in rounds)
        counts = tuple(min(count, MAX_REPEATS) for count in rounds.values())
        todo = [(state, counts) for state in states]
        seen = set(todo)
        while todo:
            state, counts = todo.pop()
            choices: list[tuple[tuple[int, ...], Effect]] = [(counts, "call")] if splits else []
            for index, effects in enumerate(rounds):
                if counts[index]:
                    remaining = (*counts[:index], counts[index] - 1, *counts[index + 1 :])
                    choices += [(remaining, effect) for effect in effects]
            for remaining, effect in choices:
                if effect == "call":
                    last_kinds.add(state.kind)
                elif (effect == "count" and not state.is_whole) or (isinstance(effect, int) and not state.is_open):
                    earlier_kinds.add(state.kind)
                has_counts |= effect == "count"
                entry = _follow(state, effect), remaining
                if entry not in seen:
                    seen.add(entry)
                    todo.append(entry)
        states = {state for state, remaining in seen if not any(remaining)}
        if any(outline.kind in (Box, Turn, Warp, Call) for outline in outlines):
            min_hw = outlines[0].min_hw if is_certain else (1, 1)
    return last_kinds | {state.kind for state in states}, earlier_kinds, has_counts


def _follow(state: PassState, effect: Effect) -> PassState:
    """Return the state of an image's last pass after an effect."""
    if isinstance(effect, int):
        return PassState(effect)
    if effect is None or (effect == "select" and not state.is_open):
        return state
    return PassState(state.kind) if effect == "change" else PassState(is_open=effect != "count")


def _rounds(outline: RecordOutline, min_hw: tuple[int, int]) -> Iterator[Round]:
    """Yield the rounds of effects that the records of an outline have on an image of at least this size."""
    no_effect = Round([None] if outline.is_optional else [])
    if outline.kind is Ops:
        rounds = [_operation_effects(name, outline.filters) for name in outline.operations]
        if outline.depth is not None:
            rounds = [Round().union(*rounds)] * outline.depth
        yield from (effects | no_effect for effects in rounds)
    elif outline.kind is Box and outline.padding_mode is not None:
        needed_hw = outline.min_input_hw
        stays_inside = needed_hw is not None and needed_hw[0] <= min_hw[0] and needed_hw[1] <= min_hw[1]
        yield no_effect | (SELECTS if stays_inside else SELECTS | {R.COPY})
    elif outline.kind is Box:  # a box that already has the right size is not resampled
        kinds = {R.COPY if name == "nearest" else R.RESIZE for name in outline.filters}
        yield no_effect | SELECTS | kinds
    elif outline.kind is Warp:
        yield no_effect | SELECTS | _operation_effects("warp", outline.filters)
    elif outline.kind in (Flip, Turn):
        yield no_effect | SELECTS
    elif outline.kind is Erase:
        yield Round([None, "change"])
    elif outline.kind is Call:
        yield no_effect | {"call"}


def _operation_effects(name: str, filters: Sequence[str]) -> Round:
    """Return the possible effects of an operation. A warp of nearest pixels that only scales and shifts is a copy."""
    if name == "warp":
        return Round([R.WARP, R.COPY] if "nearest" in filters else [R.WARP])
    if name in STATISTICS:
        return Round(["count"])
    kinds: dict[str, Effect] = {"blur": R.BLUR, "sharpness": R.SHARPNESS, "identity": None}
    return Round([kinds.get(name, "change")])
