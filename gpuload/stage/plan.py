"""Which backend runs which transform: decided from the declarations, before any image is seen, and shown to users."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpuload.stage.backend import Backend
from gpuload.stage.html import paragraph, shortened, table
from gpuload.transforms import Chain
from gpuload.transforms.base import Transform
from gpuload.transforms.program.ops import CHANGES_PIXELS, Call, Outline

__all__ = ["Plan", "PlanStep", "make_plan", "plan_line"]

REFERENCE = "torch"
OWN = "own"  # calls of the user's own
MODULE_GETS = "applied to the batch as it is; gets the images alone"


@dataclass(frozen=True)
class PlanStep:
    """Where one transform runs.

    Attributes:
        transform: the declaration.
        backend: the name of the backend that runs it; ``"own"``: a transform of the user's own.
        reason: why the reference runs it and not the chosen backend; else None.
    """

    transform: Transform
    backend: str
    reason: str | None = None


@dataclass(frozen=True)
class Plan:
    """Which backend runs which transform; ``print(loader.plan())`` shows it.

    Attributes:
        backend: the one that was chosen.
        device: where batches are made.
        views: the steps of each view; one, without a `MultiView`.
        module: the name of a module at the end of the transforms, which gets the batch's images; None without one.
        note: why another backend than the fastest is used; else None.
        decoder: who decodes images, and why, if the device was asked to (`Decode.where`); None: workers.
        placement: where workers and ring are on a machine with several NUMA nodes, or why they are anywhere; None for
            batches on the CPU.
        samples: where they are kept, if the dataset is a `DeviceCached`; else None.
        decode: what comes of ``Decode(scale="fast")`` with these transforms; None without it.
    """

    backend: str
    device: str
    views: tuple[tuple[PlanStep, ...], ...]
    module: str | None = None
    note: str | None = None
    decoder: str | None = None
    placement: str | None = None
    samples: str | None = None
    decode: str | None = None

    @property
    def steps(self) -> tuple[PlanStep, ...]:
        """The steps of all views, in order."""
        return tuple(step for view in self.views for step in view)

    def backend_of(self, name: str) -> str:
        """The backend that runs the first transform with this name, such as ``"ColorJitter"``.

        Raises:
            KeyError: there is none.
        """
        for step in self.steps:
            if type(step.transform).__name__ == name:
                return step.backend
        names = dict.fromkeys(type(step.transform).__name__ for step in self.steps)
        raise KeyError(f"no transform of the chain is called {name!r}; there are {', '.join(names) or 'none'}")

    def __str__(self) -> str:
        lines = [f"backend {self.backend} on {self.device}" + (f" ({self.note})" if self.note else "")]
        if self.decoder is not None:
            lines.append(f"decoder {self.decoder}")
        shown = [repr(step.transform) for step in self.steps] + ([self.module] if self.module else [])
        width = min(60, max(map(len, shown), default=0))
        for number, view in enumerate(self.views):
            if len(self.views) > 1:
                lines.append(f"view {number + 1}")
            lines += [_row(repr(step.transform), step.backend, step.reason, width) for step in view]
        if self.module:
            lines.append(_row(self.module, self._module_backend, MODULE_GETS, width))
        lines += [self.decode] if self.decode else []
        lines += [f"{name}: {text}" for name, text in self._told.items()]
        return "\n".join(line.rstrip() for line in lines)

    @property
    def _told(self) -> dict[str, str]:
        """What else is known, by name."""
        told = {"placement": self.placement, "samples": self.samples}
        return {name: text for name, text in told.items() if text}

    def _repr_html_(self) -> str:
        """The same for notebooks: a table for each view."""
        note = f" ({self.note})" if self.note else ""
        note += f"; decoder {self.decoder}" if self.decoder is not None else ""
        tables = []
        for number, view in enumerate(self.views):
            rows = [(shortened(repr(step.transform)), step.backend, step.reason or "") for step in view]
            if self.module:
                rows.append((shortened(self.module), self._module_backend, MODULE_GETS))
            of_view = f", view {number + 1}" if len(self.views) > 1 else ""
            caption = f"backend {self.backend} on {self.device}{note}{of_view}"
            tables.append(table(caption, ("transform", "backend", "why"), rows))
        told = [self.decode or "", *(f"{name}: {text}" for name, text in self._told.items())]
        return "\n".join([*tables, *map(paragraph, filter(None, told))])

    @property
    def _module_backend(self) -> str:
        return "own" if str(self.module).startswith("Lambda") else "module"


def make_plan(chain: Chain, backend: Backend, *, note: str | None = None) -> Plan:
    return Plan(
        backend=backend.name,
        device=str(backend.device),
        views=tuple(plan_line(line.transforms, backend) for line in chain.lines),
        module=None if chain.last is None else chain.last.removeprefix("the module "),
        note=note,
    )


def plan_line(transforms: Sequence[Transform], backend: Backend) -> tuple[PlanStep, ...]:
    """The steps for the transforms of a line."""
    end = next((number for number, transform in enumerate(transforms) if transform.late), len(transforms))
    reasons = [_lacking(transform, backend, late=number >= end) for number, transform in enumerate(transforms)]
    steps = [
        PlanStep(transform, backend.name if reason is None else REFERENCE, reason)
        for transform, reason in zip(transforms, reasons, strict=True)
    ]
    calls = [bool(outlines) and all(one.kind is Call for one in outlines) for outlines in _outlines(transforms)]
    steps = [replace(step, backend=OWN) if own else step for step, own in zip(steps, calls, strict=True)]
    last_call = max((number for number in range(end) if calls[number]), default=end)
    following = sum(_outlines(transforms[last_call + 1 : end]), ())
    if last_call < end and not any(issubclass(outline.kind, CHANGES_PIXELS) for outline in following):
        for number in range(last_call + 1, end):
            steps[number] = PlanStep(
                transforms[number], REFERENCE, f"done with {_shown(transforms[last_call])} before it"
            )
        return tuple(steps)
    # Images are finished by the run that writes them: the last one on levels.
    for number, transform in enumerate(transforms[:end]):
        if transform.makes and reasons[number] is not None:
            for later in range(number + 1, end):
                reason = reasons[later] or f"done with {type(transform).__name__} before it"
                steps[later] = PlanStep(transforms[later], REFERENCE, reason)
        last = steps[end - 1]
        if transform.makes and last.backend != steps[number].backend:
            reason = None if last.reason is None else f"done with {type(last.transform).__name__} after it"
            steps[number] = PlanStep(transform, last.backend, reason)
    return tuple(steps)


def _lacking(transform: Transform, backend: Backend, *, late: bool) -> str | None:
    """Why the reference runs a transform: the backend lacks it, or one of those that it holds."""
    if transform.gathers > 1 and backend.name != REFERENCE:
        return "puts images of several samples together"
    for outline in transform.outline:
        if outline.kind is Call:
            continue
        if late and outline.numbers is not None and outline.numbers.mean and backend.name != REFERENCE:
            return "finished images are normalised by torch"
        if reason := backend.lacks(outline, late=late):
            return f"{outline.name}: {reason}" if transform.children else reason
    return None


def _outlines(transforms: Sequence[Transform]) -> list[tuple[Outline, ...]]:
    return [transform.outline for transform in transforms]


def _shown(transform: Transform) -> str:
    return getattr(transform, "called", type(transform).__name__)


def _row(shown: str, backend: str, reason: str | None, width: int) -> str:
    cut = shown if len(shown) <= width else shown[: width - 1] + "…"
    return f"  {cut:<{width}}  {backend:<6}  {reason or ''}"
