"""What Kornia does to finished images is what the reference does, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage.finish import apply_late
from gpuload.stage.kornia.late import run_late
from gpuload.transforms.program.draws import Program

NORMALIZE = T.Normalize((0.5, 0.4, 0.3), (0.2, 0.25, 0.5))
ERASING = [
    T.RandomErasing(0.7, value=(1.0, -2.0, 0.5)),
    T.RandomErasing(0.7, value="random"),
    T.RandomErasing(0.9, mode="rand", max_count=3),
    T.RandomErasing(0.9, mode="pixel", min_count=2, max_count=3),
    T.RandomErasing(0.0),
]
LINES = [
    *([NORMALIZE, erasing] for erasing in ERASING),
    [NORMALIZE, T.RandomErasing(0.5, value=3), T.RandomHorizontalFlip(), T.RandomVerticalFlip()],
    [NORMALIZE, T.RandomApply([T.RandomErasing(0.9, value="random"), T.RandomHorizontalFlip()], 0.6)],
]
MIXING = [
    [NORMALIZE, T.MixUp(num_classes=5)],
    [NORMALIZE, T.CutMix(num_classes=5)],
    [NORMALIZE, T.RandomErasing(0.5, mode="rand"), T.MixUp(alpha=0.3, num_classes=5), T.RandomHorizontalFlip()],
    [NORMALIZE, T.RandomChoice([T.MixUp(num_classes=5), T.CutMix(num_classes=5)])],
]


def late_of(transforms: list[T.Transform], count: int) -> Program:
    late = T.Chain(transforms).draw(epoch_key(1, 2), np.arange(count), np.tile([17, 23], (count, 1))).split()[1]
    assert late is not None
    return late


def finished(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn((count, 3, 17, 23), generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("transforms", [*LINES, *MIXING], ids=str)
def test_as_the_reference(transforms, channels_last, dtype):
    late, given = late_of(transforms, 37), finished(37, dtype)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    found, expected = (given.clone(memory_format=layout) for _ in range(2))
    partners = np.arange(37) ^ 1
    partners[[36, 4, 5]] = 36, 4, 5  # the last one has none, nor have two whose neighbours were left out
    run_late(found, late, partners)
    apply_late(expected, late, partners=partners)
    assert found.is_contiguous(memory_format=layout)
    assert torch.equal(found, expected)
    assert torch.equal(found, given) == (transforms[-1] == ERASING[-1])


@pytest.mark.parametrize("transforms", LINES, ids=str)
def test_lists(transforms):
    late, given = late_of(transforms, 9), finished(9)
    found, expected = ([image.clone() for image in given] for _ in range(2))
    run_late(found, late, None)
    apply_late(expected, late, partners=None)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("transforms", MIXING[:2], ids=str)
def test_without_partners_neighbours_are_mixed(transforms):
    late, found, expected = late_of(transforms, 5), finished(5), finished(5)
    run_late(found, late, None)
    apply_late(expected, late, partners=np.array([1, 0, 3, 2, 4]))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("transforms", [*LINES, *MIXING], ids=str)
def test_gradients_are_those_of_the_reference(transforms):
    late, weights = late_of(transforms, 8), finished(8)
    gradients = []
    for run in (lambda batch: run_late(batch, late, None), lambda batch: apply_late(batch, late, partners=None)):
        given = finished(8).requires_grad_()
        batch = given * 1
        run(batch)
        (batch * weights).sum().backward()
        gradients.append(given.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-6, atol=1e-6)
    assert gradients[0].abs().sum() > 0
