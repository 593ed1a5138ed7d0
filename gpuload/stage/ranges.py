"""Names for what the main process does to a batch: in torch's profiler, and by ``emit_nvtx`` in NVIDIA's.

Four of them, each at most a few times a batch. A range costs microseconds even where nobody records it, so there is one
only while a profiler runs. Runs in the main process, in the thread that iterates.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final

from torch.autograd import profiler

__all__ = ["COPY", "DECODE", "STAGE", "WAIT", "named"]

WAIT: Final = "gpuload::wait"  # for the chunks of the batch that is due
DECODE: Final = "gpuload::decode"  # in this process: reading and decoding with num_workers=0; decoding on the device
STAGE: Final = "gpuload::stage"  # draws, transforms, collation; the copy is within it
COPY: Final = "gpuload::copy"  # slots → device

_NOTHING: Final = contextlib.nullcontext()


def named(name: str) -> contextlib.AbstractContextManager[Any]:
    """A range of this name while a profiler runs, else nothing."""
    # Where torch no longer says whether one does, the range is always there, as are those of torch's own DataLoader.
    return profiler.record_function(name) if getattr(profiler, "_is_profiler_enabled", True) else _NOTHING
