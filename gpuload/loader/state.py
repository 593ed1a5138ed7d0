"""The state of a `Loader`, from which another goes on: a place in an epoch, and everything that the place depends on.

Small JSON. It has a position in the epoch's order and nothing about workers, chunks or ranks, so training may go on
with other numbers of them. Draws depend on (seed, epoch, position), so there are no generators to save.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final

from gpuload.order.place import Place

__all__ = ["State"]

OPTIONAL: Final = frozenset({"sampler", "stream"})
KINDS: Final[dict[str, type]] = {
    "epoch": int,
    "position": int,
    "samples": int,
    "seed": int,
    "order": str,
    "transforms": str,
    "sampler": dict,
    "stream": dict,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Where a loader is.

    Attributes:
        epoch: the epoch of the next batch.
        position: how many positions of that epoch all ranks together have finished.
        samples: the dataset's length, or None.
        seed: of order and draws.
        order: how the samples are ordered.
        transforms: the chain's fingerprint.
        sampler, stream: `sampler` and `iterable` of its `Place`.
    """

    VERSION: ClassVar[int] = 1

    epoch: int
    position: int
    samples: int | None
    seed: int
    order: str
    transforms: str
    sampler: dict[str, Any] | None = None
    stream: dict[str, Any] | None = None

    @property
    def place(self) -> Place:
        """Where the next batch is."""
        return Place(self.epoch, self.position, self.sampler, self.stream)

    def to_dict(self) -> dict[str, Any]:
        """As JSON, with a version; TypeError if the user's sampler or dataset has a state that JSON cannot hold."""
        state: dict[str, Any] = {"version": self.VERSION}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in OPTIONAL:
                if value is None:
                    continue
                for worker in value.get("workers", ()):
                    if "failed" in (worker.get("state") or ()):
                        raise TypeError(worker["state"]["failed"])
                try:
                    json.dumps(value)
                except (TypeError, ValueError) as error:
                    whose = "sampler" if field.name == "sampler" else "dataset"
                    raise TypeError(
                        f"the state_dict() of the {whose} holds what JSON cannot ({error}); let it return numbers, "
                        "strings, lists and dicts"
                    ) from None
                value = copy.deepcopy(value)
            state[field.name] = value
        return state

    @classmethod
    def from_dict(cls, state: Any) -> State:
        """From JSON; TypeError or ValueError if this version of gpuload did not write it."""
        if not isinstance(state, Mapping):
            raise TypeError(f"a state is a dict, as state_dict() gives it, got {type(state).__name__}")
        version = state.get("version")
        if version != cls.VERSION:
            raise ValueError(
                f"the state has version {version!r}, this gpuload reads version {cls.VERSION}; "
                "load it with the gpuload that wrote it"
            )
        names = [field.name for field in fields(cls)]
        found = {name: state[name] for name in names if name in state}
        if missing := set(names) - found.keys() - OPTIONAL:
            raise ValueError(f"the state lacks {', '.join(sorted(missing))}; it is not what state_dict() gave")
        for name, value in found.items():
            kind = KINDS[name]
            if value is None and (name == "samples" or name in OPTIONAL):
                continue
            if type(value) is not kind or (isinstance(value, int) and value < 0):
                raise ValueError(
                    f"the state's {name} must be of type {kind.__name__} and not negative, got {value!r}"
                    if kind is int
                    else f"the state's {name} must be of type {kind.__name__}, got {value!r}"
                )
        return cls(**found)

    def check(self, now: State, *, strict: bool) -> None:
        """Raise a ValueError if `now` has other data and `strict`, else warn."""
        different = [
            f"{name} was {getattr(self, name)!r} and is {getattr(now, name)!r}"
            for name in ("samples", "seed", "order", "transforms")
            if getattr(self, name) != getattr(now, name)
        ]
        if now.samples is not None and self.sampler is None and self.position > now.samples:
            raise ValueError(
                f"the state is at position {self.position:,}, but the dataset has only {now.samples:,} samples"
            )
        if not different:
            return
        text = f"the state was saved by a loader with other data: {'; '.join(different)}"
        if strict:
            raise ValueError(
                f"{text}. The rest of the epoch would not be what it would have been; make the loader as it was, or "
                "pass strict=False"
            )
        warnings.warn(f"{text}; going on all the same, since strict=False", RuntimeWarning, stacklevel=3)
