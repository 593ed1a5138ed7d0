"""The state of a `Loader`, from which another goes on: a place in an epoch, and everything that the place depends on.

Small JSON. It has a position in the epoch's order and nothing about workers, chunks or ranks, so training may go on
with other numbers of them. Draws depend on (seed, epoch, position), so there are no generators to save. What a user's
sampler or dataset has as its own state is kept with its types (`own_state`). All of a state is checked when it is read.
"""

from __future__ import annotations

import base64
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Final

import torch

from gpuload.loader.own_state import from_json, to_json
from gpuload.order.place import IterablePlace, Place
from gpuload.workers.source import own_state

__all__ = ["State", "begun", "first_states", "for_workers", "one_worker", "with_first_states"]

OPTIONAL: Final = frozenset({"sampler", "stream", "device_share"})
MOST: Final = 2**63  # above all numbers that `set_epoch` takes, and that orders count
COUNT: Final = "an integer in 0 … 2**63 - 1"
LIMITS: Final = {"seed": 2**64}
KINDS: Final[dict[str, type]] = {
    "epoch": int,
    "position": int,
    "samples": int,
    "seed": int,
    "order": str,
    "transforms": str,
    "sampler": dict,
    "stream": dict,
    "device_share": float,
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
        device_share: of the decoding, if it was measured.
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
    device_share: float | None = None

    @property
    def place(self) -> Place:
        """Where the next batch is."""
        return Place(self.epoch, self.position, self.sampler, self.stream)

    def to_dict(self) -> dict[str, Any]:
        """As JSON, with a version; TypeError if the own state of a sampler or dataset holds what cannot be kept."""
        state: dict[str, Any] = {"version": self.VERSION}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in OPTIONAL and value is None:
                continue
            if field.name == "sampler" and value["own"] is not None:
                own = value["own"]
                value = {**value, "own": {**own, "state": to_json(own["state"], "the state_dict() of the sampler")}}
            if field.name == "stream":
                value = {**value, "workers": [{**one, "state": _unpacked(one["state"])} for one in value["workers"]]}
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
            if type(value) is not kind or (isinstance(value, int) and not 0 <= value < LIMITS.get(name, MOST)):
                raise ValueError(
                    f"the state's {name} must be an integer in 0 … 2**{64 if name in LIMITS else 63} - 1, got {value!r}"
                    if kind is int
                    else f"the state's {name} must be of type {kind.__name__}, got {value!r}"
                )
        if (share := found.get("device_share")) is not None:
            _expect(0 < share < 1, "decoding", "device_share", "above 0 and below 1", share)
        if found.get("sampler") is not None:
            found["sampler"] = _read_sampler(found["sampler"])
        if found.get("stream") is not None:
            found["stream"] = _read_stream(found["stream"])
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


def first_states(dataset: Any) -> dict[str, bytes | str] | None:
    """The own state of an iterable dataset that nobody has iterated over yet, or None."""
    state = own_state(dataset, "dataset")
    return {"dataset": state} if isinstance(state, bytes) else None  # some have one only once they are iterated over


def with_first_states(place: Place, dataset: Any) -> Place:
    """A place that nobody has left yet, with the own state of the iterable dataset: it may be its own iterator, and
    nobody else puts it back to its beginning."""
    states = first_states(dataset)
    return place if states is None else replace(place, iterable=one_worker(states))


def one_worker(states: dict[str, bytes | str]) -> dict[str, Any]:
    """The place of a single iterator that has given nothing."""
    return {"turn": 0, "step": 0, "workers": [{"samples": 0, "ended": False, "state": states}]}


def begun(place: Place, begin: IterablePlace | None) -> Place:
    """The place where a single iterator begins, with the own state that it and the dataset have there."""
    if begin is None or begin.state is None:
        return place
    entry = place.iterable or one_worker({})
    if entry["workers"][0]["samples"] != begin.samples:  # it has to run through the samples before
        return place
    workers = [{**entry["workers"][0], "state": begin.state}]
    return replace(place, iterable={**entry, "workers": workers})


def for_workers(stream: dict[str, Any], num_workers: int) -> dict[str, Any]:
    """The same for this loader's workers; ValueError if they are more or fewer, and the state is not the same for all
    of them, from before the first sample."""
    workers, wanted = stream["workers"], max(1, num_workers)
    if len(workers) == wanted:
        return stream
    one = workers[0]
    if one["samples"] or one["ended"] or "iterator" in (one["state"] or ()) or any(other != one for other in workers):
        raise ValueError(
            f"the state is of an iterable dataset read with num_workers={len(workers)}, but this loader has "
            f"num_workers={num_workers}: use num_workers={len(workers)}"
        )
    return {**stream, "workers": [one] * wanted}


def _unpacked(states: dict[str, bytes | str] | None) -> dict[str, Any] | None:
    """The own states of a dataset and its iterator as JSON; in a `Place` they are pickled, or say what went wrong."""
    if states is None:
        return None
    found = {}
    for whose, packed in states.items():
        if isinstance(packed, str):
            raise TypeError(packed)
        # Pickled in this program, from the user's own object. What `from_dict` reads is never unpickled.
        found[whose] = to_json(pickle.loads(packed), f"the state_dict() of the {whose}")
    return found


def _read_stream(stream: Any) -> dict[str, Any]:
    workers = stream.get("workers")
    _expect(
        isinstance(workers, list) and len(workers) > 0, "stream", "workers", "a list with an entry for each", workers
    )
    read = []
    for number, worker in enumerate(workers):
        where = f"stream, worker {number}"
        _expect(isinstance(worker, dict), "stream", f"worker {number}", "a dict", worker)
        samples, ended, states = (worker.get(name) for name in ("samples", "ended", "state"))
        _expect(_is_count(samples), where, "samples", COUNT, samples)
        _expect(isinstance(ended, bool), where, "ended", "true or false", ended)
        known = states is None or (isinstance(states, dict) and states.keys() <= {"iterator", "dataset"})
        _expect(known, where, "state", "None, or a dict of iterator and dataset", states)
        own = states and {
            whose: pickle.dumps(from_json(state, f"the state's {where}: {whose}"), 5) for whose, state in states.items()
        }
        read.append({"samples": samples, "ended": ended, "state": own})
    turn, step = stream.get("turn"), stream.get("step")
    _expect(_is_count(turn) and turn < len(workers), "stream", "turn", f"an integer below {len(workers)}", turn)
    _expect(_is_count(step), "stream", "step", COUNT, step)
    return {"turn": turn, "step": step, "workers": read}


def _read_sampler(entry: Any) -> dict[str, Any]:
    batches, own, generator = (entry.get(name) for name in ("batches", "own", "generator"))
    _expect(_is_count(batches), "sampler", "batches", COUNT, batches)
    if own is not None:
        known = isinstance(own, dict) and own.get("of") in ("iterator", "sampler", "inner") and "state" in own
        _expect(known, "sampler", "own", 'None, or a dict of "of" and "state"', own)
        own = {**own, "state": from_json(own["state"], "the state's sampler: own")}
    if generator is not None:
        try:
            bits = bytearray(base64.b64decode(generator, validate=True))
            torch.Generator().set_state(torch.frombuffer(bits, dtype=torch.uint8))
        except Exception:
            _expect(False, "sampler", "generator", "the state of a torch.Generator", generator)
    return {**entry, "batches": batches, "own": own, "generator": generator}


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST


def _expect(condition: bool, where: str, name: str, expected: str, got: Any) -> None:
    if not condition:
        shown = repr(got)
        shown = shown if len(shown) <= 100 else f"{shown[:99]}…"
        raise ValueError(f"the state's {where}: {name} must be {expected}, got {shown}")
