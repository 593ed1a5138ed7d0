from __future__ import annotations

from pathlib import Path

import pytest
from helpers.generated_images import jpeg_bytes, smooth_image


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """root/{ant,bee,cat}/*.jpg, 10 images, one of them deeper."""
    root = tmp_path_factory.mktemp("folder")
    for number in range(10):
        path = root / ("ant", "bee", "cat")[number % 3] / ("deep" if number == 4 else "") / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(jpeg_bytes(smooth_image(20 + number, 30, number)))
    return root
