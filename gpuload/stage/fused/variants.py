"""Which kernels a run of transforms may launch, known before anything is drawn, so that all of them are compiled when a
session starts: one takes seconds, and in the middle of an epoch the GPU would wait for it.

Triton compiles a kernel again for each set of constants and of the pointers' types, and for numbers that are 1 or
divisible by 16. The kernels take none of those from a batch: what they take is of the chain, of the batch's dtype and
memory format, and of the number of channels. What geometries passes may have is found by going through the outlines
with all that an image's pass may be, as `gpuload.transforms.program.fusing.passes` goes through records. Runs
in the main process.
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

from gpuload.stage.backend import Form
from gpuload.stage.fused import erasing, kernel, mixing, separable, statistics
from gpuload.stage.fused.kernel import options_of
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
NUMBER: Final = 23  # any that is neither 1 nor divisible by 16
QUIET_S: Final = 1.0  # nothing is said of what takes no longer

# An image's pass: the kind of its geometry, and whether it only chooses pixels so far.
Pass = tuple[int, bool]
START: Final[Pass] = (R.COPY, True)


@dataclass(frozen=True)
class Variant:
    """A kernel as it is compiled.

    Attributes:
        kernel: its name in `KERNELS`.
        args: what it is launched with: for a pointer the dtype, else a number.
        options: its constants, and the compiler's options.
    """

    kernel: str
    args: tuple[torch.dtype | int, ...]
    options: tuple[tuple[str, Any], ...]

    def compile(self) -> None:
        """Compile it for the current device, and load it there."""
        compiled: Any = KERNELS[self.kernel].warmup(*self.args, grid=(1, 1), **dict(self.options))
        try:
            compiled.run  # noqa: B018  it loads the kernel
        except BaseException:
            compiled._run = None  # else Triton would take it for loaded
            raise


def level_variants(steps: Sequence[Sequence[Outline]], *, form: Form, tile: Tile) -> set[Variant]:
    """Return the variants that a run on levels may launch.

    Args:
        steps: the outlines of each of its transforms.
        form: of its results.
        tile: of the device.
    """
    (channels, out_channels), dtype = form.channels, form.dtype
    ended, going_on, counted = _passes(steps)
    operates, column = operations_in(steps), 0 if transposes_in(steps) else form.column
    pointers = (U8, I32, I64, F64, I64, F64, U8, I32, I64, F32, F32)
    variants: set[Variant] = set()
    ways = [(kind, dtype, out_channels, column, dtype != U8, box) for kind in ended for box in form.erases]
    ways += [(kind, U8, channels, channels, False, False) for kind in going_on]
    for kind, written, out, step, finished, box in ways:
        constants = {"CHANNELS": channels, "OUT_CHANNELS": out, "OUT_COLUMN": step, "GEOMETRY": kind}
        constants |= {"OPERATES": operates, "FINISHED": finished, "ERASES": box}
        constants |= {"ROWS": tile.rows, "COLUMNS": tile.columns}
        variants.add(_variant("one_pass", (*pointers, written), **constants, **options_of(kind, tile.warps)))
    for kind in (ended | going_on) & {R.RESIZE, R.BLUR}:
        constants = {"GEOMETRY": kind, "ROWS": tile.rows, "COLUMNS": COLUMNS}
        variants.add(_variant("weigh", (I64, F64, I32), **constants, **separable.OPTIONS))
    if counted:
        variants.add(_variant("count", (U8, I64, I32), CHANNELS=channels, BLOCK=statistics.BLOCK))
        variants.add(_variant("tabulate", (I32, I64, F64, U8), CHANNELS=channels, **statistics.OPTIONS))
    return variants


def operations_in(steps: Iterable[Sequence[Outline]]) -> bool:
    """Whether records of a run may hold operations on pixels."""
    return any(issubclass(outline.kind, Ops | Erase) for outlines in steps for outline in outlines)


def transposes_in(steps: Iterable[Sequence[Outline]]) -> bool:
    """Whether records of a run may swap rows and columns."""
    return any(outline.kind is Turn for outlines in steps for outline in outlines)


def late_variants(steps: Iterable[Sequence[Outline]], *, form: Form) -> set[Variant]:
    """Return the variants that a run on finished images, N×C×H×W, may launch; arguments as for `level_variants`."""
    variants: set[Variant] = set()
    channels, dtype = form.channels[1], form.dtype
    for outline in (known for outlines in steps for known in outlines):
        if outline.kind is Mix:
            constants = {"CHANNELS": channels, "DENSE": True, "CHANNELS_LAST": 1 < channels == form.column}
            for whole in (False, True):
                constants |= {"WHOLE": whole, "BLOCK": mixing.BLOCK}
                variants.add(_variant("mix", (dtype, I64, *[NUMBER] * 6), **constants, **mixing.OPTIONS))
        elif outline.kind is Erase:
            constants = {"CHANNELS": channels, "ROWS": erasing.ROWS, "COLUMNS": erasing.COLUMNS}
            args = (dtype, I64, I64, NUMBER, F32, NUMBER, NUMBER, NUMBER, NUMBER, form.column)
            variants.add(_variant("erase_images", args, **constants, **erasing.OPTIONS))
    return variants


def compile_all(variants: Iterable[Variant], device: torch.device) -> None:
    """Compile what is not compiled yet, several at a time: a compiler runs outside of Python. What fails, fails again
    where it is launched, if it ever is."""
    wanted = list(dict.fromkeys(variants))
    if INTERPRETED.value or not wanted:
        return
    begun, shown = time.monotonic(), False
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    for name in {variant.kernel for variant in wanted}:
        KERNELS[name].device_caches[index]  # made here: of two that threads make at once, Triton would lose one

    def compiled(variant: Variant) -> None:
        with torch.accelerator.device_index(index):
            variant.compile()

    with ThreadPoolExecutor(min(len(wanted), os.cpu_count() or 1), "gpuload-compile") as pool:
        try:
            for done, _ in enumerate(as_completed([pool.submit(compiled, variant) for variant in wanted]), 1):
                if (shown or time.monotonic() - begun > QUIET_S) and sys.stderr is not None and sys.stderr.isatty():
                    shown = True
                    print(f"\rgpuload: compiling kernels, {done} of {len(wanted)}", end="", file=sys.stderr, flush=True)
        except BaseException:  # ctrl-C
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if shown:
        print(f" ({time.monotonic() - begun:.0f} s; they are kept on disk)", file=sys.stderr, flush=True)


def _variant(name: str, args: tuple[torch.dtype | int, ...], **options: Any) -> Variant:
    return Variant(name, args, tuple(options.items()))


def _passes(steps: Sequence[Sequence[Outline]]) -> tuple[set[int], set[int], bool]:
    """The kinds of geometry that an image's last pass may have, and those of passes before others; and whether levels
    may be counted."""
    states: set[Pass] = {START}
    going_on, counted = set[int](), False
    for outlines in steps:
        while True:  # a transform may do several of these things, in any order
            before = len(states) + len(going_on)
            for outline in outlines:
                for kind, opens in _effects(outline):
                    counted |= kind is None
                    for state in list(states):
                        if kind is None or (opens and not state[1]):
                            going_on.add(state[0])
                        states.add((R.COPY if kind is None else kind if opens else state[0], False))
            if len(states) + len(going_on) == before:
                break
    return {kind for kind, _ in states}, going_on, counted


def _effects(outline: Outline) -> list[tuple[int | None, bool]]:
    """Return what an outline's records may do to a pass: begin one of a kind (and True), but for those that only choose
    pixels so far; do something to it (any kind, and False); or begin one in which levels are counted (None)."""
    if outline.kind is Box:
        resized = outline.padding_mode is None and set(outline.filters) != {"nearest"}
        effects = [(R.RESIZE, True)] if resized else []
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
