"""Which operations are made of DALI's, and that no other is passed over in silence."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpuload.stage.dali.backend import LACKING
from gpuload.stage.dali.engine import Engine, ndd
from gpuload.stage.dali.images import Images
from gpuload.stage.dali.operations import OPERATIONS, operate
from gpuload.transforms.program.ops import NOTHING, OPS, VALUES, Ops, code

IMAGES = np.random.default_rng(0).integers(0, 256, (3, 5, 7, 3), np.uint8)


def operated(codes: list[int]) -> list[np.ndarray]:
    """What is made of the images, of which each has one operation."""
    with Engine(torch.device("cpu")).running():
        given = Images(ndd.as_batch(list(IMAGES), layout="HWC"))
        found = operate(given, Ops(np.array(codes)[:, None], np.zeros((3, 1, VALUES))))
        return [sample.torch().numpy().copy() for sample in found.batch]


def test_all_others_are_lacking():
    assert set(OPS) - set(OPERATIONS) == set(LACKING)


def test_nothing_and_identity_leave_an_image_as_it_is():
    found = operated([NOTHING, code("identity"), code("invert")])
    np.testing.assert_array_equal(found, [IMAGES[0], IMAGES[1], 255 - IMAGES[2]])


@pytest.mark.parametrize("name", LACKING)
def test_an_operation_that_is_lacking_is_refused(name):
    with pytest.raises(TypeError, match=f"DALI has no operators for {name}"):
        operated([NOTHING, code("invert"), code(name)])
