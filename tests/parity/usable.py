"""The backends that can run on this machine. Tests of all other backends are skipped, or fail in CI."""

from __future__ import annotations

from functools import cache

import torch
from helpers import lacking
from parity.case import BATCHES

from gpuload import transforms as T
from gpuload.errors import BackendError
from gpuload.stage import compile_stage

__all__ = ["needs", "unusable_reason"]


@cache
def unusable_reason(run: str) -> str | None:
    """Return why a backend cannot be used on this machine's CPU, or None."""
    if run in ("torch", BATCHES):
        return None
    try:
        compile_stage(T.Chain([T.CenterCrop(8)]), device=torch.device("cpu"), backend=run)
    except BackendError as error:
        return str(error)
    return None


def needs(run: str) -> None:
    """Skip a test if a backend cannot be used; fail it if ``CI`` is set, as on GitHub's machines."""
    if (reason := unusable_reason(run)) is not None:
        lacking.backend(run, reason)
