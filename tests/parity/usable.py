"""Which backends can be run here. One that cannot is skipped, but on a machine that tests every change, where all must
be."""

from __future__ import annotations

from functools import cache

import torch
from helpers import lacking
from parity.case import BATCHES

from gpuload import transforms as T
from gpuload.errors import BackendError
from gpuload.stage import compile_stage

__all__ = ["needs", "why_not"]


@cache
def why_not(run: str) -> str | None:
    """Why a backend cannot be used on this machine's CPU; None where it can."""
    if run in ("torch", BATCHES):
        return None
    try:
        compile_stage(T.Chain([T.CenterCrop(8)]), device=torch.device("cpu"), backend=run)
    except BackendError as error:
        return str(error)
    return None


def needs(run: str) -> None:
    """Skip a test where a backend cannot be used; fail it where ``CI`` is set, as it is on GitHub's machines."""
    if (reason := why_not(run)) is not None:
        lacking.backend(run, reason)
