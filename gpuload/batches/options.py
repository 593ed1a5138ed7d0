"""How samples are put together: a group of a `Loader`'s options that checks itself. Main process; no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from gpuload.order.options import check_flag
from gpuload.transforms import Chain

__all__ = ["BatchOptions"]

Ragged = Literal["error", "list", "pad"]


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How batches are made.

    Args:
        collate_fn, ragged, pin_memory: as for `Loader`.
        chain, seed, single, planned: from other groups: the transforms, the seed of their draws, whether samples come
            one by one, whether gpuload itself decides which sample is at which position.

    Raises:
        TypeError, ValueError: an argument is wrong, or two exclude each other.
    """

    collate_fn: Callable[[Any], Any] | None
    ragged: Ragged
    pin_memory: bool
    chain: Chain
    seed: int
    single: bool
    planned: bool

    def __post_init__(self) -> None:
        if self.collate_fn is not None and not callable(self.collate_fn):
            raise TypeError(
                f"collate_fn must be callable or None, got {type(self.collate_fn).__name__}: {self.collate_fn!r}"
            )
        if self.ragged not in get_args(Ragged):
            raise ValueError(f"ragged must be one of {', '.join(map(repr, get_args(Ragged)))}, got {self.ragged!r}")
        if self.by_row and self.ragged != "error":
            raise ValueError(
                f"ragged={self.ragged!r} has no meaning with {'batch_size=None' if self.single else 'a collate_fn'}, "
                "which gets each image with its own size; leave it out (gpuload.pad_collate pads)"
            )
        object.__setattr__(self, "pin_memory", check_flag("pin_memory", self.pin_memory))

    @property
    def by_row(self) -> bool:
        """Whether each sample is put together by itself, for a collate_fn or batch_size=None."""
        return self.collate_fn is not None or self.single
