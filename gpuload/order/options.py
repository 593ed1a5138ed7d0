"""How samples become batches: which ways exclude each other. Runs in the main process."""

from __future__ import annotations

from typing import Any

from gpuload.transforms import Chain

__all__ = ["check_batches", "check_pairs"]


def check_batches(
    *,
    iterable: bool,
    batch_size: int | None,
    shuffle: bool | None,
    sampler: Any,
    batch_sampler: Any,
    drop_last: bool,
    uneven: str,
    weights: Any,
    repeats: int,
    info: bool,
) -> None:
    """Refuse ways to make batches that exclude each other.

    Raises:
        ValueError: the message names the two, and what to do.
    """
    given = {
        "shuffle=True": bool(shuffle),
        "sampler": sampler is not None,
        "batch_sampler": batch_sampler is not None,
        "weights": weights is not None,
        f"repeats={repeats}": repeats != 1,
        f"uneven={uneven!r}": uneven != "pad",
    }
    named = [name for name, is_given in given.items() if is_given]
    if iterable and named:
        raise ValueError(
            f"{named[0]} has no meaning for an iterable dataset, which says itself what comes next; leave it out"
        )
    if sampler is not None and batch_sampler is not None:
        raise ValueError("sampler and batch_sampler are both given; a batch_sampler has a sampler of its own")
    others = [name for name in named if name not in ("sampler", "batch_sampler")]
    if (sampler is not None or batch_sampler is not None) and others:
        what = "sampler" if sampler is not None else "batch_sampler"
        raise ValueError(
            f"{others[0]} has no meaning with a {what}, which says itself what comes next; leave one of them out"
        )
    if batch_sampler is not None and (batch_size not in (1, None) or drop_last):
        what = "drop_last=True" if drop_last else f"batch_size={batch_size}"
        raise ValueError(f"{what} has no meaning with a batch_sampler, which gives whole batches; leave it out")
    if batch_size is None and batch_sampler is None and drop_last:
        raise ValueError("drop_last=True has no meaning with batch_size=None: samples come one by one")
    if weights is not None and shuffle:
        raise ValueError("weights draw the samples at random already; leave shuffle out")
    if repeats != 1 and not shuffle and weights is None:
        raise ValueError(
            f"repeats={repeats} needs shuffle=True or weights: an epoch has as many positions as the dataset has "
            "samples, so in their own order the last ones would never come"
        )
    if uneven == "exact" and (weights is not None or repeats != 1):
        raise ValueError("uneven='exact' counts every sample once; it does not go with weights or repeats")
    if uneven == "exact" and not info:
        raise ValueError(
            "uneven='exact' needs info=True: rows that only fill up are told by BatchInfo.valid, and must not count"
        )


def check_pairs(chain: Chain, batch_size: int | None, batch_sampler: Any) -> None:
    """MixUp and CutMix need whole pairs of samples; a batch_sampler's batches may be of any size."""
    if chain.mixing is None or batch_sampler is not None or (batch_size is not None and batch_size % 2 == 0):
        return
    name = type(chain.mixing).__name__
    if batch_size is None:
        raise ValueError(
            f"batch_size=None gives samples one by one, so {name} has no neighbour to mix them with; give an even "
            "batch_size"
        )
    raise ValueError(
        f"batch_size must be even with {name}, which mixes the samples of a batch in pairs, got {batch_size}; use "
        f"batch_size={batch_size + 1}" + (f" or {batch_size - 1}" if batch_size > 1 else "")
    )
