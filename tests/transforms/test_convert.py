"""Where `Normalize` may stand: what is meant for levels is refused for 0 … 1, and the other way round."""

from __future__ import annotations

import numpy as np
import pytest

import gpuload as gl
from gpuload import transforms as T

LEVELS = T.Normalize((123.675, 116.28, 103.53), (58.395, 57.12, 57.375))
FLOATS = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize("before", [[], [T.ToDtype("float32", scale=True)], [T.CenterCrop(8)]])
def test_a_mean_of_levels_is_refused_where_images_are_scaled(before):
    text = (
        r"is for images in 0 … 255, but uint8 images are scaled to 0 … 1 before it; divide mean and std by 255, or "
        r"put ToDtype\('float32'\), which does not scale, right before it"
    )
    for normalize in (LEVELS, T.Normalize((0.0,) * 3, (255.0,) * 3)):
        with pytest.raises(ValueError, match=text):
            T.Chain([*before, normalize])


def test_a_mean_of_0_to_1_is_refused_where_levels_are_converted_as_they_are():
    text = r"is for images in 0 … 1, but a ToDtype without scale=True leaves 0 … 255; set scale=True, or"
    with pytest.raises(ValueError, match=text):
        T.Chain([T.ToDtype("float32"), T.RandomHorizontalFlip(), FLOATS])


def test_what_the_messages_say_gives_the_same_numbers():
    image = np.random.default_rng(3).integers(0, 256, (8, 8, 3), np.uint8)
    found = []
    for chain in ([T.ToDtype("float32"), LEVELS], [FLOATS], [T.ToDtype("float32", scale=True), FLOATS]):
        with gl.Loader([image], transforms=chain, num_workers=0, device="cpu") as loader:
            found += loader
    for other in found[1:]:
        np.testing.assert_allclose(found[0].numpy(), other.numpy(), atol=2e-6)


@pytest.mark.parametrize(
    "normalize", [T.Normalize((0.0,) * 3, (1.0,) * 3), T.Normalize((0.0,) * 3, (2.0,) * 3), T.Normalize((1.0,), (1.0,))]
)
@pytest.mark.parametrize("before", [[], [T.ToDtype("float32")], [T.ToDtype("float32", scale=True)]])
def test_what_may_be_meant_is_taken(before, normalize):
    T.Chain([*before, normalize])
