"""Fixtures that run an example like a user, but in the test process, and record its training steps."""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

FOLDER = Path(__file__).parents[3] / "examples"


class Steps(NamedTuple):
    """The loss and the number of images of each training step."""

    losses: list[float]
    sizes: list[int]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    recorded, original = Steps([], []), F.cross_entropy

    def cross_entropy(scores: torch.Tensor, labels: torch.Tensor, *args, **options) -> torch.Tensor:
        loss = original(scores, labels, *args, **options)
        if torch.is_grad_enabled():
            recorded.losses.append(loss.item())
            recorded.sizes.append(len(labels))
        return loss

    monkeypatch.setattr(F, "cross_entropy", cross_entropy)
    return recorded


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """`run("plain", "--epochs", 2)` runs the example and returns its output."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")  # albumentations would look for a newer version of itself
    # One thread for the transforms of small images: next to other tests, two threads wait for each other.
    monkeypatch.setattr("gpuload.loader.options.usable_cpus", lambda: 1)

    def run(name: str, *options: object) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--workers", "0", "--device", "cpu", *map(str, options)])
        importlib.import_module(name).main()
        return capsys.readouterr().out

    return run
