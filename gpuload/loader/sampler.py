"""What a `Loader` has in the place of a DataLoader's sampler, where gpuload itself decides the order. Main process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

from torch.utils.data import SequentialSampler

from gpuload.order.schedule import shares_of

__all__ = ["OwnSampler", "refuse_rebuilding", "sampler_of"]

# Functions of frameworks that make a DataLoader of a loader's dataset, sampler and arguments, without its transforms.
REBUILDING: Final = {
    ("accelerate", "prepare_data_loader"): (
        "leave the call out, or call accelerator.prepare(loader): a gpuload.Loader puts batches on the device and "
        "divides samples among ranks by itself"
    ),
    ("accelerate", "skip_first_batches"): (
        "leave the call out: loader.load_state_dict(state), or accelerator.load_state() after "
        "accelerator.register_for_checkpointing(loader), goes on at the batch where the state was saved"
    ),
    ("lightning", "_resolve_overfit_batches"): (
        "write Trainer(limit_train_batches=…) in place of overfit_batches, and gpuload.Loader(shuffle=False), whose "
        "epochs all begin with the same samples"
    ),
}
CALLED: Final = {"_resolve_overfit_batches": "overfit_batches"}


def sampler_of(loader: Any) -> Any:
    """What `Loader.sampler` is; a TypeError as `refuse_rebuilding` raises it."""
    order = loader._options.order
    if order.batch_sampler is not None:
        found = getattr(order.batch_sampler, "sampler", None)
    else:
        found = OwnSampler(loader) if order.sampler is None else order.sampler
    refuse_rebuilding(3, is_sequential=isinstance(found, SequentialSampler))
    return found


def refuse_rebuilding(depth: int = 2, *, is_sequential: bool = False) -> None:
    """Refuse to be asked for an attribute by a function that makes a DataLoader of a loader: its batches would come
    without the transforms, and nothing would tell. Only the frame that asks, at `depth` of the stack, shows it, since
    other code reads the same attributes. All such functions read `sampler`; but with an iterable dataset, accelerate's
    may read `prefetch_factor` alone.

    Raises:
        TypeError: such a function asks; not Lightning's if the sampler `is_sequential`, since it leaves the loader as
            it is then.
    """
    caller = sys._getframe(depth)
    package = str(caller.f_globals.get("__name__")).partition(".")[0].removeprefix("pytorch_")
    function = caller.f_code.co_qualname.partition(".")[0]
    instead = REBUILDING.get((package, function))
    if instead is not None and not (is_sequential and function in CALLED):
        raise TypeError(
            f"{CALLED.get(function, function)} makes a torch DataLoader of a loader, and a gpuload.Loader is none: its "
            f"batches would come without the transforms; {instead}"
        )


class OwnSampler:
    """This rank's part of an epoch, as a `DistributedSampler` gives it.

    Iterating gives the indices of the whole epoch that the next `iter()` of the loader begins, in their order; its
    length is their number, the same on each rank. With ``drop_last=True`` those that are left out do not count; with
    ``uneven="exact"`` rows that only fill up do.

    Raises:
        TypeError: when it is asked for one of these, with an iterable dataset.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """As `Loader.set_epoch`."""
        self._loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        batches = self._shares().batches(self._loader._cursor.following.epoch)
        return (index for rows in batches for index in rows.indices.tolist())

    def __len__(self) -> int:
        return self._shares().rows

    def _shares(self) -> Any:
        order = self._loader._options.order
        if order.iterable:
            raise TypeError("an iterable dataset says itself what comes next, so the Loader's sampler has no indices")
        return shares_of(order)

    def __repr__(self) -> str:
        return f"<sampler of {self._loader!r}>"
