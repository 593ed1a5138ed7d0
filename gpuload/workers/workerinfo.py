"""``torch.utils.data.get_worker_info()`` in a gpuload worker: the same as in a DataLoader's.

Runs only in workers. torch is used only if the user's dataset has imported it: a worker that reads image files never
does.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["install_worker_info", "worker_info_was_asked"]

_asked = False


def worker_info_was_asked() -> bool:
    """Whether any of it was read."""
    return _asked


def install_worker_info(worker: int, workers: int, seed: int, dataset: Any, *, needed: bool) -> None:
    """Make torch's ``get_worker_info()`` describe this worker.

    Args:
        worker, workers: its number, and how many there are.
        seed: for `WorkerInfo.seed`.
        dataset: this worker's copy.
        needed: import torch for it; else do nothing unless torch is already imported.
    """
    if not needed and "torch" not in sys.modules:
        return
    from torch.utils.data._utils import worker as torch_worker

    class WorkerInfo(torch_worker.WorkerInfo):
        """torch's own, which notes that it was read."""

        def __getattribute__(self, name: str) -> Any:
            global _asked
            if not name.startswith("_"):
                _asked = True
            return super().__getattribute__(name)

    torch_worker._worker_info = WorkerInfo(id=worker, num_workers=workers, seed=seed, dataset=dataset)
