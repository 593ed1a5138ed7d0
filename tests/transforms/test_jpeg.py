"""JPEG: what is drawn, what is refused, and that batches become what libjpeg makes of single images."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
import torch
from pictures import smooth_image
from PIL import Image

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages, compile_stage
from gpuload.stage.reference.jpeg import compress


def test_qualities_are_uniform():
    chain = T.Chain([T.JPEG((30, 39))])
    values = chain.draw(epoch_key(1, 0), np.arange(20_000), np.full((20_000, 2), 8)).records[0].values[:, 0, 0]
    assert (np.bincount(values.astype(int), minlength=100)[30:40] > 1800).all()
    assert set(values) == set(range(30, 40))


@pytest.mark.parametrize("size", [(64, 64), (37, 53), (28, 30), (16, 17), (9, 3), (5, 4), (1, 1)])
@pytest.mark.parametrize("channels", [1, 3])
def test_batches_are_coded_as_by_libjpeg(size, channels):
    rng = np.random.default_rng(3)
    smooth = np.stack([smooth_image(*size, number) for number in range(3)])
    noise = rng.integers(0, 256, (3, *size, 3), np.uint8)
    images = np.concatenate([smooth, noise])[..., :channels]
    for quality in (1, 7, 30, 50, 75, 96, 100):
        levels = torch.from_numpy(images).permute(0, 3, 1, 2).float()
        found = compress(levels, np.full((6, 8), quality, np.float64)).permute(0, 2, 3, 1).numpy()
        for image, result in zip(images, found, strict=True):
            file = io.BytesIO()
            Image.fromarray(image[:, :, 0] if channels == 1 else image).save(file, "JPEG", quality=quality)
            assert np.array_equal(np.asarray(Image.open(file)).reshape(image.shape), result), quality


def test_four_channels_are_refused():
    images = RaggedImages.from_arrays([np.zeros((8, 8, 4), np.uint8)])
    for runner in ("single", "batched"):
        chain = T.Chain([T.JPEG(50)])
        program = chain.draw(epoch_key(1, 0), np.arange(1), np.full((1, 2), 8))
        with pytest.raises(ValueError, match="JPEG takes images of 1 or 3 channels, but image 0 has 4"):
            compile_stage(chain, device="cpu", runner=runner)(images, program)


@pytest.mark.parametrize("quality", [0, 101, (20, 10), (1, 2, 3), (0, 5)])
def test_wrong_qualities(quality):
    with pytest.raises(ValueError, match=re.escape("JPEG(quality=…) must")):
        T.JPEG(quality)
