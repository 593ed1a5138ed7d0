"""Automatic augmentation has torchvision's arguments, draws, operations and mixtures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import peers
from helpers.operation_draws import described, p_value, program
from PIL import Image
from scipy import stats

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages, compile_stage
from gpuload.transforms.policies import (
    AUTO_SPACE,
    KINDS,
    MIX_SPACES,
    POLICIES,
    RAND_SPACE,
    TORCHVISION,
    WIDE_SPACE,
    policy,
)
from gpuload.transforms.program.ops import NOTHING, OPS, VALUES, ChainMixture, Ops

HEIGHT, WIDTH = 60, 47


def draw(transform: T.Transform, count: int = 6_000) -> Any:
    return (
        T.Chain([transform]).draw(epoch_key(8, 0), np.arange(count), np.tile([[HEIGHT, WIDTH]], (count, 1))).records[0]
    )


@pytest.fixture(scope="module")
def v2():
    return peers.torchvision().transforms.v2


def record_operations(original) -> list[Any]:
    """Replace the operations of torchvision's transform by a function that only records them in the returned list."""
    applied: list[Any] = []

    def record(image, transform_id, magnitude, interpolation, fill):
        applied.append((transform_id, int(magnitude) if transform_id.startswith("Translate") else magnitude))
        return image

    original._apply_image_or_video_transform = record
    return applied


def encode(operations: list[tuple[str, float]], per_image: int) -> list[tuple]:
    """Convert torchvision's operations to the format of `described`."""
    kinds = np.array([KINDS.index(kind) for kind, _ in operations], np.int64).reshape(-1, per_image)
    magnitudes = np.array([magnitude for _, magnitude in operations]).reshape(-1, per_image)
    sizes = np.tile([[HEIGHT, WIDTH]], (len(kinds), 1))
    return described(Ops(*TORCHVISION.encode_operations(kinds, magnitudes, sizes)))


def simulate(original, count: int = 6_000) -> list[tuple]:
    """Return the operations that torchvision's transform applies to `count` images, in the format of `described`."""
    image, applied, results = Image.new("RGB", (WIDTH, HEIGHT)), record_operations(original), []
    with torch.random.fork_rng():
        torch.manual_seed(4)
        for _ in range(count):
            applied.clear()
            original(image)
            results += encode(applied, len(applied)) if applied else [()]
    return results


@pytest.mark.parametrize("name", POLICIES)
def test_policy_table_equals_torchvisions(v2, name):
    kinds, bins, probabilities = policy(TORCHVISION, POLICIES[name])
    ours = [
        tuple((KINDS[kinds[row, i]], probabilities[row, i], int(bins[row, i])) for i in (0, 1))
        for row in range(len(kinds))
    ]
    theirs = v2.AutoAugment(v2.AutoAugmentPolicy(name))._policies
    assert ours == [tuple((kind, p, bin_ or 0) for kind, p, bin_ in pair) for pair in theirs]


@pytest.mark.parametrize("size", [(224, 224), (33, 100), (375, 500), (1, 1)])
@pytest.mark.parametrize("bins", [2, 7, 10, 30, 31])
def test_space_magnitudes_equal_torchvisions(v2, bins, size):
    spaces = (
        (AUTO_SPACE, v2.AutoAugment._AUGMENTATION_SPACE),
        (RAND_SPACE, v2.RandAugment._AUGMENTATION_SPACE),
        (WIDE_SPACE, v2.TrivialAugmentWide._AUGMENTATION_SPACE),
        (MIX_SPACES[True], v2.AugMix._AUGMENTATION_SPACE),
        (MIX_SPACES[False], v2.AugMix._PARTIAL_AUGMENTATION_SPACE),
    )
    bin_indices, sizes = np.arange(bins)[:, None], np.tile([size], (bins, 1))
    for space, theirs in spaces:
        assert space.names == tuple(theirs)
        for kind, (magnitudes, signed) in theirs.items():
            kind_index = KINDS.index(kind)
            expected = magnitudes(bins, *size)
            expected = np.zeros(bins) if expected is None else expected.double().numpy()
            ours = space.magnitudes(np.full((bins, 1), kind_index), bins, bin_indices, sizes)[:, 0]
            if kind.startswith("Translate"):
                expected = np.trunc(expected)
            # The last bits depend on the CPU's instructions, which torch selects.
            assert np.allclose(ours, expected, rtol=1e-6, atol=1e-7), kind
            assert signed == TORCHVISION.signed[kind_index], kind


@pytest.mark.parametrize("kind", KINDS)
def test_each_operation_gives_torchvisions_pixels_on_pillow_images(v2, kind):
    """The stage on the CPU applies each magnitude, with both signs."""
    noise = np.random.default_rng(6).integers(0, 256, (6, 5, 3), np.uint8)
    picture = Image.fromarray(noise).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
    original = v2.TrivialAugmentWide(interpolation="bilinear", fill=[3, 90, 200])
    transform = T.TrivialAugmentWide(interpolation="bilinear", fill=(3, 90, 200))
    kind_index = KINDS.index(kind)
    sizes = np.tile([[HEIGHT, WIDTH]], (31, 1))
    strengths = WIDE_SPACE.magnitudes(np.full((31, 1), kind_index), 31, np.arange(31)[:, None], sizes)
    signs = (1, -1) if TORCHVISION.signed[kind_index] else (1,)
    magnitudes = np.concatenate([strengths * sign for sign in signs])
    count = len(magnitudes)
    sizes = np.tile([[HEIGHT, WIDTH]], (count, 1))
    params = Ops(*TORCHVISION.encode_operations(np.full((count, 1), kind_index), magnitudes, sizes))
    draws = program(transform, params, sizes)
    results = compile_stage(T.Chain([transform]), device="cpu")(
        RaggedImages.from_arrays([np.asarray(picture)] * count), draws
    )
    for row, magnitude in enumerate(magnitudes[:, 0].tolist()):
        expected = original._apply_image_or_video_transform(
            picture, kind, magnitude, v2.InterpolationMode.BILINEAR, original._fill
        )
        difference = abs(results[row].permute(1, 2, 0).numpy().astype(int) - np.asarray(expected))
        assert difference.max() <= 1, (kind, magnitude)
        assert kind == "Contrast" or difference.mean() < 0.01, (kind, magnitude)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "argument"),
    [*(("AutoAugment", policy) for policy in POLICIES), *(("TrivialAugmentWide", bins) for bins in (31, 5))],
)
def test_auto_and_trivial_augment_draw_operations_like_torchvision(v2, name, argument):
    theirs = simulate(getattr(v2, name)(v2.AutoAugmentPolicy(argument) if name == "AutoAugment" else argument), 8000)
    assert p_value(described(draw(getattr(T, name)(argument), 8000)), theirs) > 0.01


def test_auto_augment_applies_the_operations_of_a_pair_independently():
    params = draw(T.AutoAugment("svhn"), 40_000)
    *_, probabilities = policy(TORCHVISION, POLICIES["svhn"])
    applied = params.codes != NOTHING
    assert abs(applied.mean(axis=0) - probabilities.mean(axis=0)).max() < 0.01
    both_probability = np.mean(probabilities[:, 0] * probabilities[:, 1])
    assert abs(applied.all(axis=1).mean() - both_probability) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(("num_ops", "magnitude", "bins"), [(1, 9, 31), (2, 4, 10), (3, 30, 31)])
def test_rand_augment_draws_operations_like_torchvision(v2, num_ops, magnitude, bins):
    theirs = simulate(v2.RandAugment(num_ops, magnitude, bins), 3000)
    ours = described(draw(T.RandAugment(num_ops, magnitude, bins), 3000))
    assert {len(sample) for sample in ours} == {num_ops}
    for index in range(num_ops):
        assert p_value([sample[index] for sample in ours], [sample[index] for sample in theirs]) > 0.01
    if num_ops > 1:
        assert p_value([sample[:2] for sample in ours], [sample[:2] for sample in theirs]) > 0.01


def test_rand_augment_with_num_ops_0_draws_no_operation():
    assert draw(T.RandAugment(0), 5).codes.shape == (5, 0)


def test_rand_augment_scales_shifts_by_the_size_of_each_image():
    sizes = np.array([[331, 662], [662, 331]] * 400)
    params = T.Chain([T.RandAugment(1, 30)]).draw(epoch_key(1, 0), np.arange(800), sizes).records[0]
    values = params.values[:, 0]
    is_shift = (params.codes[:, 0] == OPS.index("warp")) & (values[:, [0, 1, 3, 4]] == [1, 0, 0, 1]).all(axis=1)
    # The largest shift of RandAugment is 150 pixels of an image of 331 pixels.
    shifts_yx, expected = np.abs(values[is_shift][:, [5, 2]]), np.trunc(sizes[is_shift] * 150 / 331)
    axis = np.argmax(shifts_yx, axis=1)[:, None]
    assert np.array_equal(np.take_along_axis(shifts_yx, axis, 1), np.take_along_axis(expected, axis, 1))
    assert (np.take_along_axis(shifts_yx, 1 - axis, 1) == 0).all()
    assert min(np.bincount(axis[:, 0])) > 30


def test_auto_augment_accepts_torchvisions_policy_enum(v2):
    for member in v2.AutoAugmentPolicy:
        assert T.AutoAugment(member) == T.AutoAugment(member.value)


def test_policies_have_torchvisions_defaults_and_order_of_arguments():
    assert [repr(transform) for transform in (T.AutoAugment(), T.AugMix())] == ["AutoAugment()", "AugMix()"]
    assert repr(T.RandAugment(3, 5, 20, "bilinear", 7)) == (
        "RandAugment(num_ops=3, magnitude=5, num_magnitude_bins=20, interpolation='bilinear', fill=(7,))"
    )
    assert (T.TrivialAugmentWide().interpolation, T.AugMix().interpolation) == ("nearest", "bilinear")
    assert T.TrivialAugmentWide().outside.image == (0,)
    for transform in (T.AutoAugment(), T.RandAugment(), T.TrivialAugmentWide(), T.AugMix()):
        assert transform.image_only, transform


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    "transform",
    [T.RandAugment(3, 20, interpolation="bilinear"), T.AugMix(), T.TimmRandAugment("rand-n3-p1-mstd2-inc1")],
    ids=lambda transform: type(transform).__name__,
)
def test_crop_after_a_policy_gives_the_crop_of_the_complete_result(transform, batched):
    rng = np.random.default_rng(1)
    image = rng.integers(0, 256, (40, 52, 3), np.uint8)
    sizes = np.tile([image.shape[:2]], (20, 1))
    results = []
    for chain in (
        T.Chain([T.RandomApply([transform], 0.7), T.CenterCrop((17, 23))]),
        T.Chain([T.RandomApply([transform], 0.7)]),
    ):
        draws = chain.draw(epoch_key(3, 0), np.arange(20), sizes)
        stage = compile_stage(chain, device="cpu", runner="batched" if batched else "single")
        results.append(stage(RaggedImages.from_arrays([image] * 20), draws))
    cropped, complete = results
    box = T.Chain([T.CenterCrop((17, 23))]).draw(epoch_key(3, 0), np.arange(1), sizes[:1]).records[0].box_tlhw[0]
    top, left = box[:2].tolist()
    assert torch.equal(cropped, complete[:, :, top : top + 17, left : left + 23])
    unchanged = [bool((image_result.permute(1, 2, 0).numpy() == image).all()) for image_result in complete]
    assert 1 < sum(unchanged) < 15  # the policy is applied to about 70 % of 20 images


MIXTURES = 2_500  # draws per test


def simulate_mixture(original, count: int) -> tuple[list[tuple], list[tuple[int, ...]], np.ndarray]:
    """Return the operations, their numbers per image and the weights that torchvision's transform draws."""
    image = torch.zeros(3, HEIGHT, WIDTH, dtype=torch.uint8)
    calls, sample = record_operations(original), original._sample_dirichlet

    def record_dirichlet(parameters):
        shares = sample(parameters)
        calls.append(shares.numpy().ravel().copy())
        return shares

    original._sample_dirichlet = record_dirichlet
    operations, counts, weights = [], [], []
    with torch.random.fork_rng():
        torch.manual_seed(4)
        for _ in range(count):
            calls.clear()
            original(image)
            image_shares, shares, *applied = calls
            weights.append([image_shares[0], *(image_shares[1] * shares)])
            operations += applied
            counts.append(len(applied))
    return [entry for (entry,) in encode(operations, 1)], counts, np.array(weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [{}, {"severity": 10, "mixture_width": 2, "chain_depth": 2, "alpha": 0.4, "all_ops": False}]
)
def test_aug_mix_draws_operations_depths_and_weights_like_torchvision(v2, arguments):
    theirs, their_counts, weights = simulate_mixture(v2.AugMix(**arguments), MIXTURES)
    params = draw(T.AugMix(**arguments), MIXTURES)
    flat = Ops(params.codes.reshape(-1, 1), params.values.reshape(-1, 1, VALUES))
    ours = [entry[0] for entry in described(flat) if entry]
    assert p_value(ours, theirs) > 0.01
    our_counts = (params.codes != NOTHING).sum(axis=(1, 2)).tolist()
    if arguments:  # a mixture_width of 2 and a chain_depth of 2
        assert set(our_counts) == set(their_counts) == {4}
    else:
        assert p_value(our_counts, their_counts) > 0.01
    assert params.weights.shape == weights.shape
    for column in range(weights.shape[1]):
        assert stats.ks_2samp(params.weights[:, column], weights[:, column]).pvalue > 0.001


@pytest.mark.slow
@pytest.mark.parametrize(("width", "alpha"), [(3, 1.0), (2, 0.4), (5, 3.0)])
def test_aug_mix_draws_weights_from_beta_and_dirichlet(width, alpha):
    count = 30_000
    rng = np.random.default_rng(5)
    shares = draw(T.AugMix(mixture_width=width, alpha=alpha), count).weights
    image_share = rng.beta(alpha, alpha, (count, 1))
    expected = np.concatenate([image_share, (1 - image_share) * rng.dirichlet([alpha] * width, count)], axis=1)
    assert np.allclose(shares.sum(axis=1), 1)
    for column in range(1 + width):
        assert stats.ks_2samp(shares[:, column], expected[:, column]).pvalue > 0.01
    assert np.allclose(np.cov(shares.T), np.cov(expected.T), atol=0.003)
    # The weight of the image, and the relative weights of the chains, are independent.
    first_chain_share = shares[:, 1] / np.maximum(shares[:, 1:].sum(axis=1), 1e-300)
    assert abs(stats.spearmanr(shares[:, 0], first_chain_share).statistic) < 0.02


def test_aug_mix_draws_uniform_depths_without_gaps_in_its_chains():
    applied = draw(T.AugMix(mixture_width=4), MIXTURES).codes != NOTHING
    depths = applied.sum(axis=2)
    for chain in range(4):
        assert stats.chisquare(np.bincount(depths[:, chain], minlength=4)[1:]).pvalue > 0.01
    assert set(depths.ravel().tolist()) == {1, 2, 3}
    assert np.array_equal(applied, np.arange(3) < depths[:, :, None])


def test_aug_mix_with_a_chain_depth_draws_chains_of_this_length():
    assert draw(T.AugMix(chain_depth=5), 9).codes.shape == (9, 3, 5)
    assert (draw(T.AugMix(chain_depth=5), 9).codes != NOTHING).all()
    assert draw(T.AugMix(chain_depth=0), 9).codes.shape == (9, 3, 3)


def test_aug_mix_of_severity_1_has_magnitudes_without_effect():
    # The first of 10 magnitudes has no effect, except for the 4 bits of posterize.
    params = draw(T.AugMix(severity=1), MIXTURES)
    codes, values = params.codes, params.values
    assert (values[codes == OPS.index("warp")][:, :6] == [1, 0, 0, 0, 1, 0]).all()
    assert (values[codes == OPS.index("brightness")][:, 0] == 1).all()
    assert (values[codes == OPS.index("posterize")][:, 0] == 4).all()


def run_mixture(params: ChainMixture, image: np.ndarray, transform: T.AugMix, *, batched: bool) -> np.ndarray:
    count = len(params.codes)
    sizes = np.tile([image.shape[:2]], (count, 1))
    draws = program(transform, params, sizes)
    stage = compile_stage(T.Chain([transform]), device="cpu", runner="batched" if batched else "single")
    results = stage(RaggedImages.from_arrays([image] * count), draws)
    return results.permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize("batched", [False, True])
def test_aug_mix_of_an_image_with_itself_gives_the_image(batched):
    # In torchvision, the result loses a level if the sum of the weights in float32 is below 1.
    rng = np.random.default_rng(3)
    image = rng.integers(0, 256, (21, 34, 3), np.uint8)
    params = draw(T.AugMix(), 60)
    unchanged = ChainMixture(np.full_like(params.codes, OPS.index("identity")), params.values, params.weights)
    assert (run_mixture(unchanged, image, T.AugMix(), batched=batched) == image).all()


@pytest.mark.parametrize("batched", [False, True])
def test_aug_mix_blends_chains_like_torchvision(v2, batched):
    """torchvision gets gpuload's weights, and chains of an operation that gives equal results."""
    image = np.random.default_rng(4).integers(0, 256, (21, 34, 3), np.uint8)
    params = draw(T.AugMix(), 20)
    inverted = ChainMixture(np.full((20, 3, 1), OPS.index("invert")), np.zeros((20, 3, 1, VALUES)), params.weights)
    results = run_mixture(inverted, image, T.AugMix(), batched=batched)
    original = v2.AugMix(chain_depth=1)
    original._apply_image_or_video_transform = lambda image, *_, **__: v2.functional.invert(image)
    for row, weights in enumerate(torch.from_numpy(params.weights).float()):
        shares = iter([torch.stack([weights[0], 1 - weights[0]])[None], (weights[1:] / (1 - weights[0]))[None]])
        original._sample_dirichlet = lambda _, shares=shares: next(shares)
        expected = np.asarray(original(Image.fromarray(image))).astype(int)
        assert abs(results[row] - expected).max() <= 1
        assert abs(results[row] - expected).mean() < 0.02
