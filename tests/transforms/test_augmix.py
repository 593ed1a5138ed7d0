"""AugMix: its arguments, its draws against torchvision's own, and the mixture against torchvision's sum."""

from __future__ import annotations

from typing import Any

import numpy as np
import originals
import pytest
import torch
from drawn import alike, described, program
from PIL import Image
from scipy import stats

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages, compile_stage
from gpuload.transforms.policies import KINDS, operations
from gpuload.transforms.program.ops import NOTHING, OPS, VALUES, Mixture, Ops

N = 2_500
HEIGHT, WIDTH = 60, 47


def draw(transform: T.AugMix, n: int = N) -> Any:
    return T.Chain([transform]).draw(epoch_key(8, 0), np.arange(n), np.tile([[HEIGHT, WIDTH]], (n, 1))).records[0]


@pytest.fixture(scope="module")
def v2():
    return originals.torchvision().transforms.v2


def simulated(original, n: int) -> tuple[list[tuple], list[tuple[int, ...]], np.ndarray]:
    """What torchvision's transform draws for n images: operations, the depths of the chains, and the shares."""
    image = torch.zeros(3, HEIGHT, WIDTH, dtype=torch.uint8)
    marks: list[object] = []
    sample = original._sample_dirichlet

    def note(image, transform_id, magnitude, interpolation, fill):
        marks.append((transform_id, magnitude))
        return image

    def note_dirichlet(parameters):
        shares = sample(parameters)
        marks.append(shares.numpy().ravel().copy())
        return shares

    original._apply_image_or_video_transform = note
    original._sample_dirichlet = note_dirichlet
    made, counts, weights = [], [], []
    with torch.random.fork_rng():
        torch.manual_seed(4)
        for _ in range(n):
            marks.clear()
            original(image)
            own, shares, *found = marks
            weights.append([own[0], *(own[1] * shares)])
            made += found
            counts.append(len(found))
    kinds = np.array([[KINDS.index(kind)] for kind, _ in made])
    magnitudes = np.array([[magnitude] for _, magnitude in made])
    described_ = described(Ops(*operations(kinds, magnitudes, np.tile([[HEIGHT, WIDTH]], (len(kinds), 1)))))
    return [entry for (entry,) in described_], counts, np.array(weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [{}, {"severity": 10, "mixture_width": 2, "chain_depth": 2, "alpha": 0.4, "all_ops": False}]
)
def test_draws(v2, arguments):
    theirs, counts, weights = simulated(v2.AugMix(**arguments), N)
    params = draw(T.AugMix(**arguments))
    flat = Ops(params.codes.reshape(-1, 1), params.values.reshape(-1, 1, VALUES))
    ours = [entry[0] for entry in described(flat) if entry]
    assert alike(ours, theirs) > 0.01
    found = (params.codes != NOTHING).sum(axis=(1, 2)).tolist()
    assert set(found) == set(counts) == {4} if arguments else alike(found, counts) > 0.01
    assert params.weights.shape == weights.shape
    for column in range(weights.shape[1]):
        assert stats.ks_2samp(params.weights[:, column], weights[:, column]).pvalue > 0.001


@pytest.mark.slow
@pytest.mark.parametrize(("width", "alpha"), [(3, 1.0), (2, 0.4), (5, 3.0)])
def test_shares(width, alpha):
    n = 30_000
    rng = np.random.default_rng(5)
    shares = draw(T.AugMix(mixture_width=width, alpha=alpha), n).weights
    own = rng.beta(alpha, alpha, (n, 1))
    expected = np.concatenate([own, (1 - own) * rng.dirichlet([alpha] * width, n)], axis=1)
    assert np.allclose(shares.sum(axis=1), 1)
    for column in range(1 + width):
        assert stats.ks_2samp(shares[:, column], expected[:, column]).pvalue > 0.01
    assert np.allclose(np.cov(shares.T), np.cov(expected.T), atol=0.003)
    # The image itself against the rest, and how the rest is shared, are drawn by themselves.
    within = shares[:, 1] / np.maximum(shares[:, 1:].sum(axis=1), 1e-300)
    assert abs(stats.spearmanr(shares[:, 0], within).statistic) < 0.02


def test_depths_are_uniform_and_chains_have_no_gaps():
    done = draw(T.AugMix(mixture_width=4)).codes != NOTHING
    depths = done.sum(axis=2)
    for chain in range(4):
        assert stats.chisquare(np.bincount(depths[:, chain], minlength=4)[1:]).pvalue > 0.01
    assert set(depths.ravel().tolist()) == {1, 2, 3}
    assert np.array_equal(done, np.arange(3) < depths[:, :, None])


def test_a_fixed_depth():
    assert draw(T.AugMix(chain_depth=5), 9).codes.shape == (9, 3, 5)
    assert (draw(T.AugMix(chain_depth=5), 9).codes != NOTHING).all()
    assert draw(T.AugMix(chain_depth=0), 9).codes.shape == (9, 3, 3)


def test_severity_1_moves_nothing():
    """Only the first of 10 magnitudes is drawn, which is none; but it keeps 4 bits, and equalizes."""
    codes = draw(T.AugMix(severity=1)).codes
    values = draw(T.AugMix(severity=1)).values
    assert (values[codes == OPS.index("warp")][:, :6] == [1, 0, 0, 0, 1, 0]).all()
    assert (values[codes == OPS.index("brightness")][:, 0] == 1).all()
    assert (values[codes == OPS.index("posterize")][:, 0] == 4).all()


def run(params: Mixture, image: np.ndarray, transform: T.AugMix, *, batched: bool) -> np.ndarray:
    count = len(params.codes)
    sizes = np.tile([image.shape[:2]], (count, 1))
    draws = program(transform, params, sizes)
    stage = compile_stage(T.Chain([transform]), device="cpu", runner="batched" if batched else "single")
    results = stage(RaggedImages.from_arrays([image] * count), draws)
    return results.permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize("batched", [False, True])
def test_an_image_mixed_with_itself_stays(batched):
    """The shares of a sample rarely have a sum of 1 in float32; torchvision loses a level to that."""
    rng = np.random.default_rng(3)
    image = rng.integers(0, 256, (21, 34, 3), np.uint8)
    params = draw(T.AugMix(), 60)
    still = Mixture(np.full_like(params.codes, OPS.index("identity")), params.values, params.weights)
    assert (run(still, image, T.AugMix(), batched=batched) == image).all()


@pytest.mark.parametrize("batched", [False, True])
def test_the_mixture_is_torchvisions(v2, batched):
    """torchvision, with our shares and our chains of an operation that both do alike."""
    image = np.random.default_rng(4).integers(0, 256, (21, 34, 3), np.uint8)
    params = draw(T.AugMix(), 20)
    inverted = Mixture(np.full((20, 3, 1), OPS.index("invert")), np.zeros((20, 3, 1, VALUES)), params.weights)
    results = run(inverted, image, T.AugMix(), batched=batched)
    original = v2.AugMix(chain_depth=1)
    original._apply_image_or_video_transform = lambda image, *_, **__: v2.functional.invert(image)
    for row, weights in enumerate(torch.from_numpy(params.weights).float()):
        shares = iter([torch.stack([weights[0], 1 - weights[0]])[None], (weights[1:] / (1 - weights[0]))[None]])
        original._sample_dirichlet = lambda _, shares=shares: next(shares)
        expected = np.asarray(original(Image.fromarray(image))).astype(int)
        assert abs(results[row] - expected).max() <= 1
        assert abs(results[row] - expected).mean() < 0.02


def test_defaults():
    assert repr(T.AugMix()) == "AugMix()"
    assert T.AugMix().interpolation == "bilinear"
    assert T.AugMix().image_only


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"severity": 0}, "AugMix(severity=…) must be at least 1, got 0"),
        ({"severity": 11}, "AugMix(severity=…) must lie in 1 … 10, got 11"),
        ({"mixture_width": 0}, "AugMix(mixture_width=…) must be at least 1, got 0"),
        ({"chain_depth": 1.5}, "AugMix(chain_depth=…) must be an integer, got 1.5"),
        ({"alpha": 0}, "AugMix(alpha=…) must be greater than 0, got 0"),
        ({"alpha": -1.5}, "AugMix(alpha=…) must be greater than 0, got -1.5"),
        ({"alpha": float("nan")}, "AugMix(alpha=…) must be finite, got nan"),
        ({"all_ops": "yes"}, "AugMix(all_ops=…) must be True or False, got 'yes'"),
        ({"fill": -1}, "AugMix(fill=…) is given in levels"),
    ],
)
def test_wrong_arguments(arguments, text):
    with pytest.raises((TypeError, ValueError)) as caught:
        T.AugMix(**arguments)
    assert text in str(caught.value)
