"""The counter-based generator gives the published answers, is uniform, and depends only on its documented inputs."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuload.rng import philox
from gpuload.rng.philox import Key, epoch_key, philox4x32, uniforms, words

# From Random123 1.14, tests/kat_vectors, the lines "philox4x32 10": counter, key, answer.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]

UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)
KEYS = st.builds(Key, UINT32, UINT32)


def exactly(text: str) -> str:
    return f"^{re.escape(text)}$"


def parse_words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def philox_in_python(counter: list[int], key: Key) -> list[int]:
    """Compute Philox4x32-10 as in the paper, for one counter, in Python's integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox4x32_gives_the_published_known_answers(counter: str, key: str, answer: str) -> None:
    random_words = philox4x32(np.array(parse_words(counter), np.uint32), Key(*parse_words(key)))
    assert random_words.dtype == np.uint32
    assert random_words.tolist() == parse_words(answer)


def test_philox4x32_gives_a_known_answer_anywhere_in_a_large_array() -> None:
    counter, key, answer = (parse_words(text) for text in KNOWN_ANSWERS[2])
    counters = np.random.default_rng(0).integers(0, 2**32, (5, 700, 4), np.uint32)
    indices = [(0, 0), (1, 323), (1, 324), (2, 5), (4, 699)]  # (1, 324) begins the second piece: 700 + 324 = 1024
    for index in indices:
        counters[index] = counter
    random_words = philox4x32(counters, Key(*key))
    assert random_words.shape == counters.shape
    for index in indices:
        assert random_words[index].tolist() == answer


@pytest.mark.slow
@settings(deadline=None)
@given(counters=st.lists(st.lists(UINT32, min_size=4, max_size=4), max_size=9), key=KEYS)
def test_philox4x32_equals_the_algorithm_in_plain_integers(counters: list[list[int]], key: Key) -> None:
    random_words = philox4x32(np.array(counters, np.uint32).reshape(-1, 4), key)
    assert random_words.tolist() == [philox_in_python(counter, key) for counter in counters]


@settings(deadline=None)
@given(key=KEYS, position=st.integers(0, 2**63 - 1), lane=UINT32, count=st.integers(0, 19))
def test_words_are_philox_of_position_lane_and_block(key: Key, position: int, lane: int, count: int) -> None:
    low, high = position & 0xFFFFFFFF, position >> 32
    expected = [word for block in range(5) for word in philox_in_python([low, high, lane, block], key)][:count]
    assert words(key, np.array([position]), lane, count).tolist() == [expected]


@settings(deadline=None, max_examples=30)
@given(key=KEYS, size=st.integers(1, 3000), count=st.integers(1, 9), data=st.data())
def test_uniforms_of_a_position_do_not_depend_on_other_positions_or_count(
    key: Key, size: int, count: int, data: st.DataObject
) -> None:
    positions = np.arange(size) * 977
    expected = uniforms(key, positions, 3, count)
    row = data.draw(st.integers(0, size - 1))
    assert (uniforms(key, positions[row : row + 1], 3, count)[0] == expected[row]).all()
    assert (uniforms(key, positions[::-1], 3, count)[::-1] == expected).all()
    assert (uniforms(key, positions, 3, count + 5)[:, :count] == expected).all()


def test_uniforms_and_philox4x32_return_new_memory_and_keep_their_arguments() -> None:
    positions = np.arange(4)
    result = uniforms(Key(1, 2), positions, 0, 4)
    copy = result.copy()
    uniforms(Key(3, 4), positions, 0, 4)
    assert (result == copy).all()
    assert positions.tolist() == [0, 1, 2, 3]
    counters = np.ones((3, 4), np.uint32)
    philox4x32(counters, Key(1, 2))
    assert (counters == 1).all()


def test_uniforms_differ_between_seeds_epochs_lanes_and_positions() -> None:
    positions = np.arange(1000)
    drawn = [
        uniforms(epoch_key(seed, epoch), positions, lane, 4)
        for seed, epoch, lane in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 2**31), (2**32, 0, 0)]
    ]
    assert len(np.unique(np.concatenate(drawn).ravel())) > 0.999 * len(drawn) * drawn[0].size


def test_uniforms_are_in_the_open_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    def extremes(even: np.ndarray, odd: np.ndarray, key: Key) -> np.ndarray:
        return np.repeat(np.array([0, 2**32 - 1], np.uint32), len(odd))  # words 0 and 2, words 1 and 3

    monkeypatch.setattr(philox, "_run_rounds", extremes)
    drawn = uniforms(Key(0, 0), np.arange(2), 0, 4)
    assert drawn.dtype == np.float64
    assert drawn.min() > 0
    assert drawn.max() < 1
    assert drawn[0, 0] == 1 - drawn[0, 1] == 2.0**-33


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    drawn = uniforms(epoch_key(5, 7), np.arange(250_000), 1, 4)
    for column in drawn.T:
        counts = np.histogram(column, bins=256, range=(0, 1))[0]
        chi2 = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
        assert 130 < chi2 < 400  # 255 degrees of freedom: 5.5 and 6.4 standard deviations
    correlations = np.corrcoef(np.concatenate([drawn[:-1].T, drawn[1:].T])) - np.eye(8)
    assert np.abs(correlations).max() < 5.5 / np.sqrt(250_000)


def test_uniforms_of_no_positions_or_no_numbers_are_empty() -> None:
    assert uniforms(Key(0, 0), np.arange(0), 0, 3).shape == (0, 3)
    assert uniforms(Key(0, 0), np.arange(3), 0, 0).shape == (3, 0)
    assert philox4x32(np.zeros((2, 0, 4), np.uint32), Key(0, 0)).shape == (2, 0, 4)


@settings(deadline=None)
@given(seed=UINT64, epoch=UINT64)
def test_epoch_key_is_philox_of_the_epoch_under_the_seed(seed: int, epoch: int) -> None:
    key = Key(seed & 0xFFFFFFFF, seed >> 32)
    assert list(epoch_key(seed, epoch)) == philox_in_python([epoch & 0xFFFFFFFF, epoch >> 32, 0, 0], key)[:2]


def test_epoch_keys_differ_between_seeds_and_epochs_and_repeat() -> None:
    pairs = [(seed, epoch) for seed in [*range(40), 2**32, 2**64 - 1] for epoch in [*range(40), 2**32]]
    keys = [epoch_key(*pair) for pair in pairs]
    assert len(set(keys)) == len(pairs)
    assert keys == [epoch_key(*pair) for pair in pairs]
    assert epoch_key(np.int64(3), np.uint8(4)) == epoch_key(3, 4)  # type: ignore[arg-type]


def test_seed_of_epoch_key_that_is_not_an_integer_is_refused() -> None:
    with pytest.raises(TypeError, match=exactly("seed must be an integer, got 1.5 (float)")):
        epoch_key(1.5, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("positions", "lane", "count", "text"),
    [
        (np.zeros(3), 0, 1, "positions must be a one-dimensional array of integers, got float64 of shape (3,)"),
        (np.zeros((3, 1), np.int64), 0, 1, "positions must be a one-dimensional array of integers, got int64 of shape"),
        (np.arange(3), -1, 1, "lane must lie in 0 … 2**32 - 1, got -1"),
        (np.arange(3), 2**32, 1, "lane must lie in 0 … 2**32 - 1, got 4294967296"),
        (np.arange(3), 0, -1, "count must not be negative, got -1"),
    ],
)
def test_bad_positions_lanes_and_counts_of_uniforms_are_refused(
    positions: np.ndarray, lane: int, count: int, text: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        uniforms(Key(0, 0), positions, lane, count)


def test_counters_of_a_wrong_shape_for_philox4x32_are_refused() -> None:
    text = "counters must be uint32 of shape … × 4, got uint32 of shape (2, 3)"
    with pytest.raises(ValueError, match=exactly(text)):
        philox4x32(np.zeros((2, 3), np.uint32), Key(0, 0))
