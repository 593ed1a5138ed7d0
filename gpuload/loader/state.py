"""The saved state of a `Loader`, for resuming: a place in an epoch, and everything that the place depends on.

A state is a small dict that JSON can represent. It has a position in the epoch's order and nothing about workers,
chunks or ranks, so training can resume with different numbers of workers and ranks. Random parameters depend on (seed,
epoch, position), so no generators are saved. The entire state is validated when it is loaded.

The state_dict() of a user's sampler or dataset keeps its types. JSON types are written unchanged; any other value
becomes a dict with a tag for its type as the only key, such as ``{"$tuple": [1, 2]}``. So both `json` and
``torch.save`` with ``weights_only=True`` can store a state, and loading never unpickles. The functions are pure, and
run in the main process.
"""

from __future__ import annotations

import base64
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np
import torch

from gpuload.order.place import Place
from gpuload.stage.stage import explain_backend_change

__all__ = ["State", "adapt_to_workers", "add_states", "from_json", "to_json"]

OPTIONAL_KEYS: Final = frozenset({"backend", "completed", "division", "sampler", "stream"})
# The tags of the types of values in a user's state_dict().
SEQUENCES: Final[dict[str, type]] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}
MAPPINGS: Final[dict[str, type]] = {"$dict": dict, "$OrderedDict": OrderedDict}
BYTES: Final[dict[str, type]] = {"$bytes": bytes, "$bytearray": bytearray}
TAGS: Final = {value_type: tag for table in (SEQUENCES, MAPPINGS, BYTES) for tag, value_type in table.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A loader's place in its epoch, and the settings that the place depends on.

    Attributes:
        place: the epoch and position of the next batch, and the progress of the sampler or iterable dataset.
        samples: the number of samples in the dataset, or None.
        seed: the loader's seed, which determines the order and the random parameters.
        order: the kind of sample order.
        transforms: the chain's fingerprint.
        backend: the name of the backend; None without transforms, and in states of earlier versions.
        completed: the epoch whose last batch was the last one before the state was saved, within the loop over it.
    """

    VERSION: ClassVar[int] = 1

    place: Place
    samples: int | None
    seed: int
    order: str
    transforms: str
    backend: str | None = None
    completed: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a dict for JSON, with a version; raise a TypeError if the state_dict() of a sampler or
        dataset contains an unsupported type."""
        place, sampler, stream = self.place, self.place.sampler, self.place.iterable_progress
        if sampler is not None and (saved := sampler["own"]) is not None:
            sampler = {**sampler, "own": {**saved, "state": to_json(saved["state"], "the state_dict() of the sampler")}}
        if stream is not None:
            stream = {
                **stream,
                "workers": [{**item, "state": _states_to_json(item["state"])} for item in stream["workers"]],
            }
        state = {
            "version": self.VERSION,
            "epoch": place.epoch,
            "position": place.position,
            "samples": self.samples,
            "seed": self.seed,
            "order": self.order,
            "transforms": self.transforms,
            "backend": self.backend,
            "completed": self.completed,
            "sampler": sampler,
            "stream": stream,
            "division": place.division,
        }
        return {name: value for name, value in state.items() if value is not None or name not in OPTIONAL_KEYS}

    @classmethod
    def from_dict(cls, state: object) -> State:
        """Create a state from the result of `to_dict`; raise a TypeError or ValueError if this version of gpuload
        cannot read it."""
        if not isinstance(state, Mapping):
            raise TypeError(f"a state must be a dict from state_dict(), got {type(state).__name__}")
        if "version" not in state:
            raise ValueError(
                f"the state, with the keys {sorted(map(str, state))}, is no state of a gpuload Loader; pass a dict "
                "from its state_dict()"
            )
        version = state["version"]
        if version != cls.VERSION:
            raise ValueError(
                f"the state has version {version!r}, but this gpuload reads version {cls.VERSION}; "
                "load it with the version of gpuload that saved it"
            )
        if missing_keys := READERS.keys() - state.keys() - OPTIONAL_KEYS:
            raise ValueError(
                f"the state lacks {', '.join(sorted(missing_keys))}; pass a complete dict from state_dict()"
            )

        def read(name: str) -> Any:
            value = state.get(name)
            return None if value is None and name in {"samples", *OPTIONAL_KEYS} else READERS[name](name, value)

        values = {name: read(name) for name in READERS}
        place = Place(*(values.pop(name) for name in ("epoch", "position", "sampler", "stream", "division")))
        return cls(place=place, **values)

    def check(self, current: State, *, strict: bool) -> None:
        """If the settings differ from those of the `current` state, raise a ValueError if `strict`, otherwise warn. If
        only the backend differs, warn in any case."""
        differences = [
            f"{name} was {getattr(self, name)!r} and is {getattr(current, name)!r}"
            for name in ("samples", "seed", "order", "transforms")
            if getattr(self, name) != getattr(current, name)
        ]
        position, samples = self.place.position, current.samples
        if samples is not None and self.place.sampler is None and self.place.division is None and position > samples:
            raise ValueError(
                f"the state is at position {position:,}, but the dataset has only {samples:,} samples; "
                "use the dataset with which the state was saved"
            )
        if self.backend and current.backend and self.backend != current.backend:
            warnings.warn(explain_backend_change(self.backend, current.backend), RuntimeWarning, stacklevel=3)
        if not differences:
            return
        text = f"the state was saved by a different loader: {'; '.join(differences)}"
        if strict:
            raise ValueError(
                f"{text}. The rest of the epoch would not match the original run; restore the loader's settings, or "
                "pass strict=False"
            )
        warnings.warn(f"{text}; resuming anyway, since strict=False", RuntimeWarning, stacklevel=3)


def add_states(place: Place, samples: int, states: dict[str, bytes | str] | None) -> Place:
    """Return the place with the states of this process's iterable dataset and iterator after `samples` samples. If the
    place is at another sample, or there are no states, return the place unchanged; the iterator then rereads the
    samples."""
    stream = place.iterable_progress or {
        "turn": 0,
        "step": 0,
        "workers": [{"samples": 0, "ended": False, "state": None}],
    }
    worker = stream["workers"][0]
    if states is None or worker["samples"] != samples:
        return place
    return replace(place, iterable_progress={**stream, "workers": [{**worker, "state": states}]})


def adapt_to_workers(place: Place, num_workers: int) -> Place:
    """Return the place in an iterable dataset with one progress entry per worker of this loader.

    Raise a ValueError if the number of workers has changed, unless all workers have the same state and no samples yet.
    """
    if place.iterable_progress is None:
        return place
    workers, count = place.iterable_progress["workers"], max(1, num_workers)
    if len(workers) == count:
        return place
    first_worker = workers[0]
    has_begun = first_worker["samples"] or first_worker["ended"] or "iterator" in (first_worker["state"] or ())
    if has_begun or any(worker != first_worker for worker in workers):
        raise ValueError(
            f"the state is from an iterable dataset read with num_workers={len(workers)}, but this loader has "
            f"num_workers={num_workers}: use num_workers={len(workers)}"
        )
    return replace(place, iterable_progress={**place.iterable_progress, "workers": [first_worker] * count})


def _states_to_json(states: dict[str, bytes | str] | None) -> dict[str, Any] | None:
    """Return the states of a dataset and its iterator as JSON. In a `Place`, each is either pickled
    or, if it could not be pickled, an error message."""
    if states is None:
        return None
    unpickled = {}
    for owner, pickled in states.items():
        if isinstance(pickled, str):
            raise TypeError(pickled)
        # This program pickled the state of the user's object. Nothing that `from_dict` reads is ever unpickled.
        unpickled[owner] = to_json(pickle.loads(pickled), f"the state_dict() of the {owner}")
    return unpickled


# -- readers, which check each value of a loaded state and name it in the error ---------------------------------------


def _read_stream(name: str, stream: Any) -> dict[str, Any]:
    _expect(type(stream) is dict, name, "of type dict", stream)
    workers, turn = stream.get("workers"), stream.get("turn")
    _expect(isinstance(workers, list) and len(workers) > 0, "stream: workers", "a list of one dict per worker", workers)
    workers = [_read_worker(index, worker) for index, worker in enumerate(workers)]
    is_turn = type(turn) is int and 0 <= turn < len(workers)
    _expect(is_turn, "stream: turn", f"an integer below {len(workers)}", turn)
    return {"turn": turn, "step": _check_count("stream: step", stream.get("step")), "workers": workers}


def _read_worker(index: int, worker: Any) -> dict[str, Any]:
    _expect(isinstance(worker, dict), f"stream: worker {index}", "a dict", worker)
    location = f"stream, worker {index}"
    samples, ended, states = (worker.get(name) for name in ("samples", "ended", "state"))
    _check_count(f"{location}: samples", samples)
    _expect(isinstance(ended, bool), f"{location}: ended", "true or false", ended)
    is_valid = states is None or (isinstance(states, dict) and states.keys() <= {"iterator", "dataset"})
    _expect(is_valid, f"{location}: state", "None, or a dict of iterator and dataset", states)
    pickled = states and {
        owner: pickle.dumps(from_json(state, f"the state's {location}: {owner}"), 5) for owner, state in states.items()
    }
    return {"samples": samples, "ended": ended, "state": pickled}


def _read_sampler(name: str, entry: Any) -> dict[str, Any]:
    _expect(type(entry) is dict, name, "of type dict", entry)
    batches, saved, generator = (entry.get(key) for key in ("batches", "own", "generator"))
    _check_count("sampler: batches", batches)
    if saved is not None:
        is_valid = isinstance(saved, dict) and saved.get("of") in ("iterator", "sampler", "inner") and "state" in saved
        _expect(is_valid, "sampler: own", 'None, or a dict with the keys "of" and "state"', saved)
        saved = {**saved, "state": from_json(saved["state"], "the state's sampler: own")}
    if generator is not None:
        try:
            raw_bytes = bytearray(base64.b64decode(generator, validate=True))
            torch.Generator().set_state(torch.frombuffer(raw_bytes, dtype=torch.uint8))
        except Exception:
            _expect(False, "sampler: generator", "the state of a torch.Generator", generator)
    return {**entry, "batches": batches, "own": saved, "generator": generator}


def _check_text(name: str, value: object) -> str:
    return _expect(type(value) is str, name, "of type str", value)


def _check_count(name: str, value: Any, bits: int = 63) -> int:
    """Check a non-negative integer; 63 bits is the range of `set_epoch`, 62 that of positions."""
    return _expect(type(value) is int and 0 <= value < 2**bits, name, f"an integer in 0 … 2**{bits} - 1", value)


def _expect(condition: bool, name: str, expected: str, value: object) -> Any:
    if not condition:
        shown_value = repr(value)
        shown_value = shown_value if len(shown_value) <= 100 else f"{shown_value[:99]}…"
        raise ValueError(
            f"the state's {name} must be {expected}, got {shown_value}; pass an unchanged dict from state_dict()"
        )
    return value


READERS: Final[dict[str, Callable[[str, Any], Any]]] = {
    "epoch": _check_count,
    "position": partial(_check_count, bits=62),
    "samples": _check_count,
    "seed": partial(_check_count, bits=64),
    "order": _check_text,
    "transforms": _check_text,
    "backend": _check_text,
    "completed": _check_count,
    "sampler": _read_sampler,
    "stream": _read_stream,
    "division": _check_text,
}


# -- the state_dict() of a user's sampler or dataset ---------------------------------------------------------------


def to_json(value: Any, path: str) -> Any:
    """Convert a user's state_dict() to JSON.

    Args:
        value: numbers, strings, None, bytes, arrays, CPU tensors, and tuples, lists, sets and dicts of these.
        path: the location of the value, for the error.

    Raises:
        TypeError: a value has another type; the message says where.
    """
    cls = type(value)
    if value is None or cls in (bool, int, float, str):
        return value
    if cls is list:
        return [to_json(entry, f"{path}[{i}]") for i, entry in enumerate(value)]
    if (
        cls is dict
        and all(type(key) is str for key in value)
        and not (len(value) == 1 and next(iter(value))[:1] == "$")
    ):
        return {key: to_json(entry, f"{path}[{key!r}]") for key, entry in value.items()}
    tag = TAGS.get(cls, "")
    if tag in MAPPINGS:
        pairs = value.items()
        return {
            tag: [[to_json(key, f"{path}, key {key!r}"), to_json(entry, f"{path}[{key!r}]")] for key, entry in pairs]
        }
    if tag in SEQUENCES:
        entries = value if cls is tuple else sorted(value, key=repr)
        return {tag: [to_json(entry, f"{path}[{i}]") for i, entry in enumerate(entries)]}
    if tag in BYTES:
        return {tag: base64.b64encode(value).decode()}
    if cls is complex:
        return {"$complex": [value.real, value.imag]}
    if cls is torch.Tensor and value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized:
        raw_bytes = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
        return {"$tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), _encode_bytes(raw_bytes)]}
    if (cls is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in "biufcmMSU":
        tag = "$array" if cls is np.ndarray else "$scalar"
        return {tag: [value.dtype.str, list(value.shape), _encode_bytes(value)]}
    location = f" on {value.device}" if isinstance(value, torch.Tensor) and value.device.type != "cpu" else ""
    raise TypeError(
        f"{path} is of type {cls.__module__}.{cls.__qualname__}{location}, which cannot be saved; use only "
        "numbers, strings, bytes, arrays, tensors on the CPU, and tuples, lists, sets and dicts of these"
    )


def from_json(value: object, path: str) -> Any:
    """Reverse `to_json`.

    Raises:
        ValueError: a value is not from `to_json`; the message says where.
    """
    if isinstance(value, list):
        return [from_json(entry, f"{path}[{i}]") for i, entry in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    tag = next(iter(value)) if len(value) == 1 else ""
    if not (isinstance(tag, str) and tag[:1] == "$"):
        return {key: from_json(entry, f"{path}[{key!r}]") for key, entry in value.items()}
    try:
        return _decode(tag, value[tag], lambda entry: from_json(entry, f"{path}[{tag!r}]"))
    except Exception as error:
        raise ValueError(f"{path} is not from state_dict(): {tag} cannot be read ({error})") from None


def _decode(tag: str, content: Any, decode_entry: Callable[[Any], Any]) -> Any:
    if tag in SEQUENCES:
        return SEQUENCES[tag](decode_entry(content))
    if tag in MAPPINGS:
        return MAPPINGS[tag]((decode_entry(key), decode_entry(entry)) for key, entry in content)
    if tag in BYTES:
        return BYTES[tag](_decode_bytes(content))
    if tag == "$complex":
        return complex(*content)
    if tag == "$tensor":
        dtype, shape, text = content
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        if raw_bytes := _decode_bytes(text):
            tensor.reshape(-1).view(torch.uint8).copy_(torch.frombuffer(raw_bytes, dtype=torch.uint8))
        return tensor
    if tag in ("$array", "$scalar"):
        dtype, shape, text = content
        array = np.frombuffer(_decode_bytes(text), np.dtype(dtype)).reshape(shape)
        return array if tag == "$array" else array[()]
    raise ValueError("unknown tag")


def _encode_bytes(raw_bytes: Any) -> str:
    return base64.b64encode(raw_bytes.tobytes()).decode()


def _decode_bytes(text: str) -> bytearray:
    return bytearray(base64.b64decode(text, validate=True))
