"""Decides which backend runs each transform, before any image is read, and displays this plan.

`StageOptions` holds the options of a `Loader` that determine how and where images are processed. The tables for
notebooks set no colours or fonts, so that they are readable in dark and light themes; they load no resources, and all
their text is escaped. Runs in the main process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import torch

from gpuload.checks import plain
from gpuload.stage import device as devices
from gpuload.stage.backend import Backend
from gpuload.transforms import Chain
from gpuload.transforms.base import Transform
from gpuload.transforms.program.ops import CHANGES_PIXELS, Call

__all__ = [
    "MAX_CELL_CHARACTERS",
    "Plan",
    "PlanStep",
    "StageOptions",
    "check_device",
    "make_plan",
    "paragraph",
    "plan_steps",
    "shorten",
    "table",
]


REFERENCE = "torch"
CUSTOM = "own"  # shown as the backend of a custom transform
MODULE_NOTE = "applied to the finished batch; gets only the images"
MAX_CELL_CHARACTERS = 100  # the longest text in a table cell


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """Options that determine which transforms run, where, and what they return; `check_stage` checks whether a backend
    can run them.

    Args:
        transforms, device, dtype, memory_format, backend: as for `Loader`.

    Attributes:
        transforms: a `Chain`.
        device: the device; None if it is chosen at the first `iter()`.
    """

    transforms: Chain
    device: Any
    dtype: str | None
    memory_format: str
    backend: str

    def __post_init__(self) -> None:
        transforms: Any = self.transforms
        checked = {
            "transforms": transforms if isinstance(transforms, Chain) else Chain(transforms),
            "device": None if self.device is None else check_device(self.device),
            "dtype": None if self.dtype is None else str(self.dtype).removeprefix("torch."),
            "memory_format": str(self.memory_format).removeprefix("torch."),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def check_device(device: object) -> torch.device:
    """Return the CPU, CUDA or XPU device that an argument names, whether it exists or not. An integer is the
    index of a device of the type that torch was built for; the index of a CPU is dropped, because torch ignores it.

    Raises:
        TypeError, ValueError: the argument does not name such a device.
    """
    message = f"device must be 'cpu', 'cuda', 'cuda:0', 'xpu' or a torch.device of one of these types, got {device!r}"
    device = plain(device)
    if isinstance(device, bool) or not isinstance(device, str | int | torch.device):
        raise TypeError(message)
    try:
        parsed = (
            torch.device(devices.supported_type() or "cuda", device)
            if isinstance(device, int)
            else torch.device(device)
        )
    except (RuntimeError, ValueError):  # torch's message would list all of its device types
        raise ValueError(message) from None
    if parsed.type not in ("cpu", *devices.DEVICE_TYPES):
        raise ValueError(message)
    return torch.device("cpu") if parsed.type == "cpu" else parsed


@dataclass(frozen=True)
class PlanStep:
    """A transform and the backend that runs it.

    Attributes:
        transform: the declaration.
        backend: the name of the backend; ``"own"`` for a custom transform.
        reason: why the reference runs the transform instead of the chosen backend; or what users should know about how
            the backend runs it; else None.
    """

    transform: Transform
    backend: str
    reason: str | None = None


@dataclass(frozen=True)
class Plan:
    """The plan of a loader: the backend that runs each transform. ``print(loader.plan())`` shows it.

    Attributes:
        backend: the chosen backend.
        device: the device on which batches are made.
        views: the steps of each view; without a `MultiView` there is one view.
        modules: the names of the modules at the end of the transforms, which get the batch's images.
        note: why a slower backend is used as a fallback; else None.
        decoder: what decodes images, and why, if `Decode.where` requested the device; else None.
        placement: the NUMA node of the workers and the ring, or why they are not bound to a node; None if batches are
            made on the CPU.
        decode: the effect of ``Decode(scale="fast")`` with these transforms; None without this option.
        images: how an `Augment` reads images; None for a Loader.
    """

    backend: str
    device: str
    views: tuple[tuple[PlanStep, ...], ...]
    modules: tuple[str, ...] = ()
    note: str | None = None
    decoder: str | None = None
    placement: str | None = None
    decode: str | None = None
    images: str | None = None

    @property
    def steps(self) -> tuple[PlanStep, ...]:
        """All steps of all views, in order."""
        return tuple(step for view in self.views for step in view)

    def backend_of(self, name: str) -> str:
        """Return the backend that runs the first transform with this name, such as ``"ColorJitter"``.

        Raises:
            KeyError: no transform has this name.
        """
        for step in self.steps:
            if type(step.transform).__name__ == name:
                return step.backend
        names = dict.fromkeys(type(step.transform).__name__ for step in self.steps)
        raise KeyError(f"the chain has no transform called {name!r}; its transforms: {', '.join(names) or 'none'}")

    def __str__(self) -> str:
        lines = [f"backend {self.backend} on {self.device}" + (f" ({self.note})" if self.note else "")]
        if self.decoder is not None:
            lines.append(f"decoder {self.decoder}")
        width = min(60, max((len(text) for text, *_ in [*_rows(self.steps), *self._module_rows]), default=0))
        for index, view in enumerate(self.views):
            lines += [f"view {index + 1}"] * (len(self.views) > 1)
            lines += [_format_row(*row, width) for row in _rows(view)]
        lines += [_format_row(*row, width) for row in self._module_rows]
        return "\n".join(line.rstrip() for line in [*lines, *self._notes])

    def _repr_html_(self) -> str:
        """Render the plan for notebooks, with one table per view."""
        note = f" ({self.note})" if self.note else ""
        note += f"; decoder {self.decoder}" if self.decoder is not None else ""
        tables = []
        for index, view in enumerate(self.views):
            rows = [(shorten(text), *row) for text, *row in [*_rows(view), *self._module_rows]]
            suffix = f", view {index + 1}" if len(self.views) > 1 else ""
            caption = f"backend {self.backend} on {self.device}{note}{suffix}"
            tables.append(table(caption, ("transform", "backend", "why"), rows))
        return "\n".join([*tables, *map(paragraph, self._notes)])

    @property
    def _module_rows(self) -> list[tuple[str, str, str]]:
        return [(name, CUSTOM if name.startswith("Lambda") else "module", MODULE_NOTE) for name in self.modules]

    @property
    def _notes(self) -> list[str]:
        """Additional notes, one per line."""
        labeled_notes = {"placement": self.placement, "images": self.images}
        return [*filter(None, [self.decode]), *(f"{name}: {text}" for name, text in labeled_notes.items() if text)]


def _rows(steps: Sequence[PlanStep]) -> list[tuple[str, str, str]]:
    return [(repr(step.transform), step.backend, step.reason or "") for step in steps]


def _format_row(text: str, backend: str, reason: str, width: int) -> str:
    cell = text if len(text) <= width else text[: width - 1] + "…"
    return f"  {cell:<{width}}  {backend:<6}  {reason}"


def make_plan(chain: Chain, backend: Backend, *, note: str | None = None) -> Plan:
    return Plan(
        backend=backend.name,
        device=str(backend.device),
        views=tuple(plan_steps(line.transforms, backend) for line in chain.lines),
        modules=tuple(name.removeprefix("the module ") for name in chain.module_names),
        note=note,
    )


def plan_steps(transforms: Sequence[Transform], backend: Backend) -> tuple[PlanStep, ...]:
    """Return the steps for a sequence of transforms."""
    end = next((index for index, transform in enumerate(transforms) if transform.works_on_finished), len(transforms))
    steps = _plan_level_steps(transforms[:end], backend)
    follows_own = bool(steps) and steps[-1].backend == backend.name
    for transform in transforms[end:]:
        steps.append(_plan_step(transform, backend, is_late=True, follows_own=follows_own))
        follows_own = follows_own and steps[-1].backend == backend.name
    return tuple(steps)


def _plan_level_steps(transforms: Sequence[Transform], backend: Backend) -> list[PlanStep]:
    """Return the steps for transforms that work on levels."""
    steps = [_plan_step(transform, backend) for transform in transforms]
    reasons = [None if step.backend != REFERENCE else step.reason for step in steps]
    end, is_call = len(steps), [step.backend == CUSTOM for step in steps]
    last_call = max((index for index in range(end) if is_call[index]), default=end)
    later_kinds = [outline.kind for transform in transforms[last_call + 1 :] for outline in transform.outline]
    if last_call < end and not any(issubclass(kind, CHANGES_PIXELS) for kind in later_kinds):
        name = transforms[last_call].display_name
        for index in range(last_call + 1, end):
            steps[index] = PlanStep(transforms[index], REFERENCE, f"combined with {name} before it")
        return steps
    # The last segment that works on levels also finishes and writes the images.
    for index, transform in enumerate(transforms):
        if transform.output_state and reasons[index] is not None:
            for later_index in range(index + 1, end):
                reason = reasons[later_index] or f"combined with {type(transform).__name__} before it"
                steps[later_index] = PlanStep(transforms[later_index], REFERENCE, reason)
        last_step = steps[end - 1]
        if transform.output_state and last_step.backend != steps[index].backend:
            reason = (
                None if last_step.reason is None else f"combined with {type(last_step.transform).__name__} after it"
            )
            steps[index] = PlanStep(transform, last_step.backend, reason)
    return steps


def _plan_step(transform: Transform, backend: Backend, *, is_late: bool = False, follows_own: bool = True) -> PlanStep:
    """Return the step for a transform: the reference runs it if the backend lacks it or one of its children. The last
    two arguments are those of `Backend.why_unsupported`."""
    outlines = [outline for outline in transform.outline if outline.kind is not Call]
    if transform.outline and not outlines:
        return PlanStep(transform, CUSTOM)
    if backend.name == REFERENCE:
        return PlanStep(transform, REFERENCE)
    if transform.group_size > 1:
        return PlanStep(transform, REFERENCE, "combines images of several samples")
    for outline in outlines:
        if is_late and outline.numbers is not None and outline.numbers.mean:
            return PlanStep(transform, REFERENCE, "finished images are normalised by torch")
        if reason := backend.why_unsupported(outline, is_late=is_late, follows_own=follows_own):
            return PlanStep(transform, REFERENCE, f"{outline.name}: {reason}" if transform.children else reason)
    return PlanStep(transform, backend.name, next(filter(None, map(backend.note, outlines)), None))


def table(caption: str, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Render a table. With `headers`, cells that begin with a digit are right-aligned; without `headers`, the first
    cell of each row is a header cell."""
    lines = ["<table>"]
    if caption:
        lines.append(f'<caption style="text-align: left">{escape(caption)}</caption>')
    if headers:
        lines.append(f"<thead><tr>{''.join(_cell(head, 'th') for head in headers)}</tr></thead>")
    lines.append("<tbody>")
    for row in rows:
        cells = [_cell(text, right=bool(headers) and text[:1].isdigit()) for text in row]
        lines.append(f"<tr>{''.join(cells if headers else [_cell(row[0], 'th'), *cells[1:]])}</tr>")
    return "\n".join([*lines, "</tbody></table>"])


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def shorten(text: str) -> str:
    """Shorten a text to fit into a table cell."""
    return text if len(text) <= MAX_CELL_CHARACTERS else f"{text[: MAX_CELL_CHARACTERS - 1]}…"


def _cell(text: str, tag: str = "td", *, right: bool = False) -> str:
    return f'<{tag} style="text-align: {"right" if right else "left"}">{escape(text)}</{tag}>'
