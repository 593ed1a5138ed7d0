"""Rotations, affine maps and perspectives have torchvision's arguments and maps."""

from __future__ import annotations

import re

import numpy as np
import pytest
from helpers import peers
from transforms.drawing import KEY, TO_FLOAT, draw

import gpuload as gl
from gpuload import transforms as T
from gpuload.transforms.warps import affine_coefficients, perspective_coefficients, rotation_coefficients


def map_forward(points_xy: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    """Map points of the image to the result, given the coefficients of the inverse map."""
    inverse = np.append(coefficients, 1).reshape(3, 3)
    homogeneous = np.append(points_xy, np.ones((len(points_xy), 1)), 1) @ np.linalg.inv(inverse).T
    return homogeneous[:, :2] / homogeneous[:, 2:]


def test_equivalent_arguments_give_equal_warps():
    assert T.RandomRotation(10) == T.RandomRotation((-10, 10)) == T.RandomRotation([-10.0, 10.0], 0)
    assert T.RandomAffine(0, shear=10) == T.RandomAffine((0, 0), shear=(-10, 10))
    text = "RandomRotation(degrees=(-10.0, 10.0), interpolation='bilinear', fill=(0,))"
    assert repr(T.RandomRotation(10, "bilinear")) == text
    filled = T.RandomAffine(5, fill={gl.Image: (1, 2, 3), gl.Mask: 255})
    assert filled.outside.image == (1, 2, 3)
    assert filled.outside.mask == 255
    assert T.RandomAffine(5, fill=(1, 2, 3)).outside.mask == 0


@pytest.mark.parametrize("is_nested", [False, True])
def test_chain_refuses_a_fill_in_levels_after_to_dtype(is_nested):
    for transform in (T.RandomRotation(5, fill=9), T.Pad(2, fill=9), T.RandomCrop(8, fill=9, pad_if_needed=True)):
        name = type(transform).__name__
        text = (
            f"{name}(fill=(9,)) is a pixel value in 0 … 255, but comes after ToDtype, which scales images to 0 … 1; put"
        )
        entry = T.RandomApply([transform]) if is_nested else transform
        with pytest.raises(ValueError, match=re.escape(text)):
            T.Chain([TO_FLOAT, entry])
        T.Chain([entry, TO_FLOAT])
        T.Chain([T.ToDtype("float32"), entry])  # not scaled
    T.Chain([TO_FLOAT, T.RandomRotation(5), T.Pad(2)])


def test_affine_coefficients_equal_torchvisions():
    functional = peers.torchvision().transforms.functional
    rng = np.random.default_rng(0)
    sizes = rng.integers(2, 300, (200, 2))
    angle, scale = rng.uniform(-180, 180, 200), rng.uniform(0.3, 3, 200)
    translate, shear = rng.integers(-30, 30, (200, 2)), rng.uniform(-40, 40, (200, 2))
    for center in (None, (3.0, 40.5)):
        coefficients = affine_coefficients(
            angle, translate, scale, shear, None if center is None else np.array(center), sizes
        )
        for row, (height, width) in enumerate(sizes.tolist()):
            center_xy = [width * 0.5, height * 0.5] if center is None else list(center)
            expected = functional._get_inverse_affine_matrix(
                center_xy, angle[row], translate[row].tolist(), scale[row], shear[row].tolist()
            )
            np.testing.assert_allclose(coefficients[row], [*expected, 0, 0], rtol=0, atol=1e-10)


def test_perspective_coefficients_equal_torchvisions():
    functional = peers.torchvision().transforms.functional
    rng = np.random.default_rng(0)
    sizes = rng.integers(20, 300, (200, 2))
    inward = (rng.uniform(0, 0.4, (200, 4, 2)) * sizes[:, None, ::-1]).astype(np.int64)
    signs = np.array([[0, 0], [1, 0], [1, 1], [0, 1]])
    starts = signs * (sizes[:, None, ::-1] - 1)
    ends = np.where(signs, starts - inward, inward)
    coefficients, is_invertible = perspective_coefficients(sizes, ends)
    assert is_invertible.all()
    for row in range(200):
        expected = functional._get_perspective_coeffs(starts[row].tolist(), ends[row].tolist())
        np.testing.assert_allclose(
            coefficients[row], expected, rtol=1e-5, atol=1e-6
        )  # torchvision's are rounded to float32
        np.testing.assert_allclose(map_forward(starts[row], coefficients[row]), ends[row], atol=1e-6)


def test_perspective_coefficients_of_collinear_corners_are_the_identity():
    sizes = np.array([[40, 40], [1, 30], [30, 1], [40, 40]])
    corners = np.array([[[0, 0], [39, 0], [39, 39], [0, 39]]] * 4)
    corners[0, 1] = [20, 20]  # so that top left, top right and bottom right are on one line
    coefficients, is_invertible = perspective_coefficients(sizes, corners)
    np.testing.assert_array_equal(is_invertible, [False, False, False, True])
    np.testing.assert_allclose(coefficients, np.tile([1.0, 0, 0, 0, 1, 0, 0, 0], (4, 1)), atol=1e-12)
    for height, width in ((1, 1), (1, 9), (2, 2), (3, 3)):
        record = draw(T.RandomPerspective(1.0, p=1.0), size_hw=(height, width), count=500).records[0]
        assert np.isfinite(record.coefficients).all()
        assert (np.linalg.det(np.append(record.coefficients, np.ones((500, 1)), 1).reshape(-1, 3, 3)) != 0).all()


def test_rotation_with_expand_enlarges_the_result_to_the_complete_image():
    sizes = np.random.default_rng(0).integers(5, 200, (300, 2))
    chain = T.Chain([T.RandomRotation(180, expand=True)])
    program = chain.draw(KEY, np.arange(300), sizes)
    for row, (height, width) in enumerate(sizes.tolist()):
        corners_xy = np.array([[0, 0], [width, 0], [width, height], [0, height]])
        corners = map_forward(corners_xy, program.records[0].coefficients[row])
        size_xy = program.results_hw[row][::-1]
        assert corners.min() > -1e-9
        assert (corners < size_xy + 1e-9).all()
        assert (size_xy - np.ptp(corners, axis=0) < 2).all()
    assert chain.output_size_hw is None
    assert T.Chain([T.Resize((8, 9)), T.RandomRotation(5)]).output_size_hw == (8, 9)
    for angle, size in ((90, (7, 5)), (270, (7, 5)), (180, (5, 7)), (0, (5, 7))):
        _, sizes_hw = rotation_coefficients(np.array([angle]), None, np.array([[5, 7]]), expand=True)
        assert tuple(sizes_hw[0]) == size


def test_warps_without_distortion_or_angle_warp_no_image():
    for transform in (T.RandomPerspective(0.0, p=0.7), T.RandomRotation(0)):
        assert not draw(transform, count=100).records[0].warped.any()
