"""Schedules the batches of a user's sampler, and saves the sampler's state. This module runs in the main
process, in the thread that iterates."""

from __future__ import annotations

import base64
import contextlib
import copy
import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from gpuload.checks import integer, pair
from gpuload.order.options import OrderOptions
from gpuload.order.place import Place
from gpuload.order.ranks import exchange
from gpuload.order.spec import BatchSpec
from gpuload.rng import generators
from gpuload.rng.streams import SAMPLER_POSITIONS

__all__ = ["SamplerSchedule"]


class SamplerSchedule:
    """A schedule of the batches of a user's sampler, which yields only this rank's samples.

    Sample k on this rank has the position k × ranks + rank. The numbers that the sampler draws from the global
    generators depend only on (seed, epoch), since a sampler may select this rank's share of an order that all ranks
    share; those of torch's own random samplers also depend on the rank. The generators' states are restored between
    batches. A `batch_sampler` yields lists of keys; a `sampler` yields keys, which are grouped into batches according
    to `batch_size` and `drop_last`. The lists of a `batch_sampler` can have an attribute ``size_hw``, the size of the
    batch's images.
    """

    def __init__(self, order: OrderOptions, rank: int, world_size: int) -> None:
        self._order, self._rank, self._world_size = order, rank, world_size
        self._yields_batches = order.batch_sampler is not None
        self._sampler: Any = order.batch_sampler if self._yields_batches else order.sampler

    def steps(self, place: Place) -> int | None:
        try:
            length = len(self._sampler)
        except (TypeError, NotImplementedError):
            return None
        if self._yields_batches:
            return max(0, length - (place.sampler or {}).get("batches", 0))
        remaining = max(0, length - place.position // self._world_size)
        size = self._order.size
        return remaining // size if self._order.drop_last else -(-remaining // size)

    def batches(self, place: Place) -> Iterator[BatchSpec]:
        entry = place.sampler or {}
        position = SAMPLER_POSITIONS[self._rank if _draws_samples_of_rank(self._sampler) else 0]
        sampler_pass = _SamplerPass(self._sampler, (self._order.seed, place.epoch, position), entry)
        size, drop_last = None if self._yields_batches else self._order.size, self._order.drop_last
        step, sample_count = entry.get("batches", 0), place.position // self._world_size
        if not sampler_pass.is_restored:
            sampler_pass.skip(step if self._yields_batches else sample_count)
        keys = sampler_pass.read_keys(size, drop_last)
        warning = "" if keys is None else self._warn_of_common_batch(keys, sampler_pass)
        while keys is not None:
            count, state = len(keys), sampler_pass.state()
            positions = (np.arange(count, dtype=np.int64) + sample_count) * self._world_size + self._rank
            step, sample_count = step + 1, sample_count + count
            size_hw = self._check_size(sampler_pass.size_hw, step - 1)
            next_keys = sampler_pass.read_keys(size, drop_last)
            if next_keys is not None:
                after = Place(place.epoch, sample_count * self._world_size, sampler=sampler_pass.entry(step, state))
            else:
                after = Place(place.epoch + 1, 0, sampler=sampler_pass.last_entry(sampler_pass.state()))
            yield BatchSpec(
                step - 1,
                place.epoch,
                positions,
                _as_indices(keys),
                after=after,
                size_hw=size_hw,
                may_be_dropped=self._world_size == 1,
                warning=warning,
            )
            keys, warning = next_keys, ""

    def _check_size(self, size_hw: object, step: int) -> tuple[int, int] | None:
        """Return the size that the sampler gives a batch."""
        subject = f"batch {step} of the batch_sampler, a {type(self._sampler).__name__},"
        if size_hw is not None:
            name = f"the size_hw of {subject}"
            return pair(name, size_hw, form="(height, width)", entry=integer, minimum=1)
        if self._order.sized_argument:
            raise ValueError(
                f"{subject} has no size_hw, but {self._order.sized_argument} is bucket_size; yield an instance of a "
                "subclass of list with an attribute size_hw, (height, width), or pass a fixed size"
            )
        return None

    def _warn_of_common_batch(self, keys: list[Any], sampler_pass: _SamplerPass) -> str:
        """Return a warning if the sampler does not depend on the rank: if all other ranks have begun with the same
        batch, of at least two different keys."""
        if self._world_size < 2 or "common batch" in self._order.issued_warnings:
            return ""
        if len(set(map(repr, keys))) < 2 or not sampler_pass.has_drawn():
            return ""
        self._order.issued_warnings.add("common batch")  # only the first batch of a loader is compared
        digest = hashlib.blake2b(repr(keys).encode(), digest_size=16).hexdigest()
        digests = exchange(f"sampler at {self._order.caller}", digest, self._rank, self._world_size)
        if len(digests) < self._world_size - 1 or set(digests.values()) != {digest}:
            return ""
        return (
            f"all {self._world_size} ranks began with the same batch of {type(self._sampler).__name__}, which draws "
            "from the global generators. gpuload seeds these equally on all ranks, so that a sampler can select the "
            "rank's share of a common order, which this sampler does not. Let it select its share, or draw from a "
            "generator of its own that is seeded with the rank"
        )

    def place_after(self, epoch: int) -> Place:
        return Place(epoch + 1, 0)


class _SamplerPass:
    """A pass over a user's sampler, with separate states of the global generators.

    A sampler is restored with ``load_state_dict`` if it or its iterator has this method and ``state_dict``. Any other
    sampler is run again from the beginning of the pass; if it has a `torch.Generator`, the generator is first reset to
    its state at that point.
    """

    def __init__(self, sampler: Any, seeds: tuple[int, int, int], entry: dict[str, Any]) -> None:
        self._sampler = sampler
        self._seeds = seeds  # the seed, the epoch, and the position of this pass
        self._generator_states: generators.GeneratorStates | None = None
        self._states_at_start: generators.GeneratorStates | None = None
        self._generator = _find_generator(sampler)
        self.size_hw: object = None
        saved = entry.get("own")
        self.is_restored = saved is not None
        with self._use_sampler_generators():
            if self._generator is not None and entry.get("generator") is not None:
                _set_state(self._generator, entry["generator"])
            self._first_state = None if self._generator is None else _get_state(self._generator)
            if saved is not None and saved["of"] != "iterator":
                owner = sampler if saved["of"] == "sampler" else sampler.sampler
                owner.load_state_dict(copy.deepcopy(saved["state"]))
            self._iterator: Any = iter(sampler)
            if saved is not None and saved["of"] == "iterator":
                self._iterator.load_state_dict(copy.deepcopy(saved["state"]))
            if entry.get("over"):  # saved at the end of an epoch: the sampler may already have begun the next epoch
                first_key = list(itertools.islice(self._iterator, 1))
                self._iterator = itertools.chain(first_key, self._iterator) if first_key else iter(sampler)

    @contextlib.contextmanager
    def _use_sampler_generators(self) -> Iterator[None]:
        """Set the sampler's states of the global generators within a context, and restore the outer states on exit."""
        outer_states = generators.states()
        try:
            if self._generator_states is None:
                generators.seed_generators(*self._seeds)
                self._states_at_start = generators.states()
            else:
                generators.restore_states(self._generator_states)
            yield
        finally:
            self._generator_states = generators.states()
            generators.restore_states(outer_states)

    def has_drawn(self) -> bool:
        """Return whether the sampler has drawn from the global generators."""
        return _to_comparable(self._generator_states) != _to_comparable(self._states_at_start)

    def skip(self, count: int) -> None:
        """Skip `count` keys or batches, which were used before the state was saved."""
        with self._use_sampler_generators():
            next(itertools.islice(self._iterator, count, count), None)

    def read_keys(self, size: int | None, drop_last: bool) -> list[Any] | None:
        """Read the keys of the next batch from the sampler, and set `size_hw` to its own; return None at the end."""
        with self._use_sampler_generators():
            if size is None:
                batch = next(self._iterator, None)
                if batch is None:
                    return None
                self.size_hw = getattr(batch, "size_hw", None)
                keys = list(batch)
                if not keys:
                    raise ValueError("batch_sampler yielded an empty batch; each batch must have at least one key")
                return keys
            keys = list(itertools.islice(self._iterator, size))
        return keys if len(keys) == size or (keys and not drop_last) else None

    def state(self) -> dict[str, Any] | None:
        """Return the state of the iterator, the sampler or its inner sampler; None if none of these has a state."""
        owners: dict[str, Any] = {"iterator": self._iterator, "sampler": self._sampler}
        from torch.utils.data import BatchSampler  # here, because this package does not import torch

        if type(self._sampler) is BatchSampler:  # a subclass might read ahead from its inner sampler
            owners["inner"] = self._sampler.sampler
        for name, owner in owners.items():
            if callable(getattr(owner, "state_dict", None)) and callable(getattr(owner, "load_state_dict", None)):
                return {"of": name, "state": copy.deepcopy(owner.state_dict())}
        return None

    def entry(self, batches: int, state: dict[str, Any] | None) -> dict[str, Any]:
        """Return the sampler's entry in a loader state that is saved within an epoch, after `batches` batches."""
        return {"batches": batches, "own": state, "generator": self._first_state}

    def last_entry(self, state: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the sampler's entry in a loader state that is saved at the end of an epoch; None if the next epoch
        does not depend on it."""
        if state is None and self._generator is None:
            return None
        generator_state = None if self._generator is None else _get_state(self._generator)
        return {"batches": 0, "own": state, "generator": generator_state, "over": True}


def _draws_samples_of_rank(sampler: Any) -> bool:
    """Whether a sampler draws any samples of the dataset from the global generators: whether it, or the sampler of a
    `BatchSampler`, is one of torch's random samplers without a generator of its own."""
    from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

    inner: Any = sampler.sampler if type(sampler) is BatchSampler else sampler
    is_random = type(inner) in (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    return is_random and inner.generator is None


def _find_generator(sampler: object) -> Any:
    """Return the `torch.Generator` of a sampler or of a sampler nested in it; None if there is none."""
    for _ in range(4):
        generator = getattr(sampler, "generator", None)
        if generator is not None and hasattr(generator, "get_state") and hasattr(generator, "set_state"):
            return generator
        sampler = getattr(sampler, "sampler", None)
    return None


def _to_comparable(states: Any) -> Any:
    """Return the states of the global generators as a value that can be compared."""
    python_state, (_, numbers, *numpy_rest), torch_state = states
    return python_state, numbers.tolist(), numpy_rest, torch_state is not None and torch_state.tolist()


def _get_state(generator: Any) -> str:
    return base64.b64encode(generator.get_state().numpy().tobytes()).decode()


def _set_state(generator: Any, state: str) -> None:
    import torch

    generator.set_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8))


def _as_indices(keys: list[Any]) -> np.ndarray | list[Any]:
    """Return keys as int64 (N,) if all are integers, otherwise unchanged."""
    if all((type(key) is int and -(2**63) <= key < 2**63) or isinstance(key, np.integer) for key in keys):
        return np.array(keys, np.int64)
    return keys
