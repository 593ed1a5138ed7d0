"""Fixtures of tests of datasets: a folder of images, a cache of indices, the log, and other libraries' datasets."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from helpers import peers
from helpers.generated_images import jpeg_bytes, smooth_image

from gpuload.datasets.stores import cached


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """root/{ant,bee,cat}/*.jpg, 10 images, one of them deeper."""
    root = tmp_path_factory.mktemp("folder")
    for number in range(10):
        path = root / ("ant", "bee", "cat")[number % 3] / ("deep" if number == 4 else "") / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(jpeg_bytes(smooth_image(20 + number, 30, number)))
    return root


@pytest.fixture
def index_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for this test alone, in which gpuload stores indices of any size."""
    monkeypatch.setenv("GPULOAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cached, "LEAST_BYTES", 0)
    return tmp_path / "cache"


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Returns the messages that datasets have logged since the last call."""
    caplog.set_level(logging.INFO, "gpuload.datasets")

    def messages() -> list[str]:
        texts = [record.getMessage() for record in caplog.records if record.name == "gpuload.datasets"]
        caplog.clear()
        return texts

    return messages


@pytest.fixture(scope="module")
def vision() -> ModuleType:
    """The module torchvision.datasets."""
    return peers.torchvision().datasets


@pytest.fixture(scope="module")
def hf() -> ModuleType:
    """Hugging Face's module datasets."""
    return importlib.import_module("datasets")
