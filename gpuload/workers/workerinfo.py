"""What ``torch.utils.data.get_worker_info()`` says in a gpuload worker: the same as in a DataLoader's.

Runs in workers alone. torch is only touched where the user's own dataset has imported it: a worker that reads image
files knows nothing of it.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["install_worker_info", "worker_info_was_asked"]

_asked = False


def worker_info_was_asked() -> bool:
    """Whether anybody read something of it."""
    return _asked


def install_worker_info(worker: int, workers: int, seed: int, dataset: Any, *, needed: bool) -> None:
    """Let torch tell whoever asks which of how many workers this is.

    Args:
        worker, workers: which of how many.
        seed: what `WorkerInfo.seed` says.
        dataset: this worker's copy.
        needed: import torch for it; else only where somebody else did.
    """
    if not needed and "torch" not in sys.modules:
        return
    from torch.utils.data._utils import worker as place

    class WorkerInfo(place.WorkerInfo):
        """torch's own, which notes that it was asked."""

        def __getattribute__(self, name: str) -> Any:
            global _asked
            if not name.startswith("_"):
                _asked = True
            return super().__getattribute__(name)

    place._worker_info = WorkerInfo(id=worker, num_workers=workers, seed=seed, dataset=dataset)
