"""The global generators: seeded for each sample as far as its dataset draws, and put back."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from gpuload.rng.generators import (
    LEARNING_SAMPLES,
    MIN_UNSEEDED_CHUNK,
    Seeding,
    current_sample,
    restore_states,
    seed_generators,
    seeds_of,
    states,
)

POSITIONS = np.arange(100, 100 + LEARNING_SAMPLES)


@pytest.fixture(autouse=True)
def preserved():
    saved = states()
    yield
    restore_states(saved)


def draws():
    return random.random(), np.random.rand(), torch.rand(()).item()


def chunk(seeding, sample, positions=POSITIONS):
    """Read a chunk as workers do; what its samples are, and whether it has to be read again."""
    seed, samples = seeding.begin(0, positions), []
    for row in range(len(positions)):
        seed(row)
        samples.append(sample(row))
        if seeding.is_learning:
            seeding.learn()
    return samples, seeding.has_drawn_unseeded()


def seeded_one_by_one(position):
    seed_generators(7, 0, position)
    return draws()


def test_each_sample_draws_its_own_numbers():
    found, again = chunk(Seeding(7), lambda row: draws())
    assert found == [seeded_one_by_one(position) for position in POSITIONS.tolist()]
    assert not again


def test_generators_that_nobody_draws_from_are_left_alone_but_for_torchs():
    seeding = Seeding(7)
    assert chunk(seeding, lambda row: None) == ([None] * LEARNING_SAMPLES, False)
    before = random.getstate(), np.random.get_state()[1].tolist()
    found, again = chunk(seeding, lambda row: (torch.initial_seed(), torch.rand(()).item(), current_sample()))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    seeds = seeds_of(7, 0, POSITIONS)
    assert [seed for seed, _, _ in found] == seeds
    assert [drawn for _, drawn, _ in found] == [seeded_one_by_one(at)[2] for at in POSITIONS.tolist()]
    assert found[3][2] == (7, 0, 103)
    assert not again


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: random.gauss(0, 1), lambda: random.seed(3)])
def test_one_that_is_drawn_from_late_has_the_chunk_read_again_with_seeds(draw):
    seeding = Seeding(7)
    chunk(seeding, lambda row: None)
    assert chunk(seeding, lambda row: draw() if row == 5 else None)[1]
    found, again = chunk(seeding, lambda row: draws())
    assert found == [seeded_one_by_one(position) for position in POSITIONS.tolist()]
    assert not again


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_a_draw_among_the_first_samples_is_remembered(draw):
    seeding = Seeding(7)
    chunk(seeding, lambda row: draw() if row == LEARNING_SAMPLES - 1 else None)
    assert not seeding.is_learning
    found, again = chunk(seeding, lambda row: draws())
    assert found == [seeded_one_by_one(position) for position in POSITIONS.tolist()]
    assert not again


def test_short_chunks_and_those_that_are_not_to_learn_are_seeded_for():
    seeding = Seeding(7)
    chunk(seeding, lambda row: None)
    found, _ = chunk(seeding, lambda row: draws(), POSITIONS[: MIN_UNSEEDED_CHUNK - 1])
    assert found[2] == seeded_one_by_one(102)
    strict = Seeding(7, is_learning=False)
    chunk(strict, lambda row: None)
    assert chunk(strict, lambda row: draws())[0][2] == seeded_one_by_one(102)


def test_a_short_chunk_between_does_not_look_like_a_draw():
    seeding = Seeding(7)
    chunk(seeding, lambda row: None)
    assert not chunk(seeding, lambda row: None)[1]
    chunk(seeding, lambda row: None, POSITIONS[:2])
    assert not chunk(seeding, lambda row: None)[1]


def test_draws_between_chunks_are_nobodys():
    """As those of a dataset's own set_epoch(), which may fail, so that no chunk begins."""
    seeding = Seeding(7)
    chunk(seeding, lambda row: None)
    chunk(seeding, lambda row: None)
    random.random()
    assert not seeding.has_drawn_unseeded()


@pytest.mark.parametrize("sample", [draws, lambda: None, torch.rand])
def test_the_users_own_numbers_go_on_as_if_nothing_had_been_read(sample):
    seeding = Seeding(7)
    expected = states()[0], states()[1][1].tolist(), states()[2].tolist()
    for _ in range(3):
        with seeding.preserve_states():
            chunk(seeding, lambda row: sample() if sample is not torch.rand else torch.rand(2).tolist())
        found = states()
        assert (found[0], found[1][1].tolist(), found[2].tolist()) == expected
        assert current_sample() is None
    random.random()  # moves between chunks, which is none of their draws
    with seeding.preserve_states():
        assert not chunk(seeding, lambda row: None)[1]


def test_they_are_put_back_after_a_chunk_that_failed_too():
    seeding = Seeding(7)
    chunk(seeding, lambda row: None)
    random.seed(5)
    expected = random.random()
    random.seed(5)
    with pytest.raises(ZeroDivisionError), seeding.preserve_states():
        chunk(seeding, lambda row: random.random() / 0)
    assert random.random() == expected


@pytest.mark.filterwarnings("ignore:get_state and legacy:RuntimeWarning")
def test_another_kind_of_numpys_generator_is_seen_as_drawn_from():
    kept = np.random.get_bit_generator()
    seeding = Seeding(7)
    chunk(seeding, lambda row: None)
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        assert chunk(seeding, lambda row: None)[1]
    finally:
        np.random.set_bit_generator(kept)
