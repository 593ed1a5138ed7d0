"""Normalising, erasing and mixing by Kornia: what they give, and their gradients."""

from __future__ import annotations

import numpy as np
import torch

from gpuload.stage.kornia.finished import blended, erased, inside, normalized, weighted

BOXES = np.array([[1, 2, 3, 4], [0, 0, 0, 0], [4, 6, 2, 1]])


def images(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()


def test_normalising():
    given, means, stds = images(3, 2, 6, 7), torch.tensor([0.5, 0.2]), torch.tensor([0.25, 2.0])
    found = normalized(given, means, stds)
    torch.testing.assert_close(found, (given - means.view(2, 1, 1)) / stds.view(2, 1, 1))
    found.sum().backward()
    torch.testing.assert_close(given.grad, (1 / stds).view(1, 2, 1, 1).expand_as(given))


def test_boxes_end_where_they_say():
    mask = inside(BOXES, (6, 7), torch.device("cpu"))
    assert mask.shape == (3, 1, 6, 7)
    for row, (top, left, height, width) in enumerate(BOXES.tolist()):
        expected = torch.zeros(6, 7, dtype=torch.bool)
        expected[top : top + height, left : left + width] = True
        assert torch.equal(mask[row, 0], expected)


def test_erasing():
    given = images(3, 2, 6, 7)
    numbers = torch.tensor([3.0, -1.0]).view(2, 1, 1)
    found = erased(given, BOXES, numbers)
    mask = inside(BOXES, (6, 7), given.device).expand_as(given)
    assert torch.equal(found[~mask], given[~mask])
    assert torch.equal(found[mask], numbers.expand_as(given)[mask])
    found.sum().backward()
    assert torch.equal(given.grad, (~mask).float())


def test_mixing():
    one, other, shares = images(2, 1, 3, 4), images(2, 1, 3, 4) * 2, np.array([0.25, 1.0])
    other.retain_grad()
    found = blended(one, other, shares)
    torch.testing.assert_close(found[0], 0.25 * one[0] + 0.75 * other[0])
    assert torch.equal(found[1], one[1])
    found.sum().backward()
    assert other.grad[:, 0, 0, 0].tolist() == [0.75, 0]
    # Of `one` itself, and of twice it in the other.
    assert one.grad[:, 0, 0, 0].tolist() == [0.25, 1]
    half = blended(one.half(), other.half(), shares)
    assert half.dtype == torch.float16


def test_weights_are_numbers_or_broadcast():
    one, other = images(2, 3, 2, 2), torch.rand(2, 1, 2, 2)
    share, more = torch.tensor([0.5, 2.0]).view(2, 1, 1, 1), torch.arange(6.0).view(2, 3, 1, 1)
    found = weighted(one, share, other, 0.25, more)
    torch.testing.assert_close(found, one * share + other * 0.25 + more)
    torch.testing.assert_close(weighted(one, 1.0, other, share), one + other * share)
