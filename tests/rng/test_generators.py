"""The global generators are seeded for each sample if its dataset draws from them, and are restored afterwards."""

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
def preserved_generators():
    saved = states()
    yield
    restore_states(saved)


def draw_from_each_generator():
    return random.random(), np.random.rand(), torch.rand(()).item()


def read_chunk(seeding, read_sample, positions=POSITIONS):
    """Read a chunk as workers do, and return its samples and whether it must be read again."""
    seed, samples = seeding.begin(0, positions), []
    for row in range(len(positions)):
        seed(row)
        samples.append(read_sample(row))
        if seeding.is_learning:
            seeding.learn()
    return samples, seeding.has_drawn_unseeded()


def draws_seeded_at(position):
    seed_generators(7, 0, position)
    return draw_from_each_generator()


def test_each_sample_draws_from_generators_seeded_by_its_position():
    samples, must_read_again = read_chunk(Seeding(7), lambda row: draw_from_each_generator())
    assert samples == [draws_seeded_at(position) for position in POSITIONS.tolist()]
    assert not must_read_again


def test_after_learning_only_torchs_generator_is_seeded_for_a_dataset_without_draws():
    seeding = Seeding(7)
    assert read_chunk(seeding, lambda row: None) == ([None] * LEARNING_SAMPLES, False)
    before = random.getstate(), np.random.get_state()[1].tolist()
    samples, must_read_again = read_chunk(
        seeding, lambda row: (torch.initial_seed(), torch.rand(()).item(), current_sample())
    )
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    seeds = seeds_of(7, 0, POSITIONS)
    assert [seed for seed, _, _ in samples] == seeds
    assert [(drawn, sample) for _, drawn, sample in samples] == [
        (draws_seeded_at(position)[2], (7, 0, position)) for position in POSITIONS.tolist()
    ]
    assert not must_read_again


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: random.gauss(0, 1), lambda: random.seed(3)])
def test_a_draw_after_learning_has_the_chunk_read_again_with_seeds(draw):
    seeding = Seeding(7)
    read_chunk(seeding, lambda row: None)
    _, must_read_again = read_chunk(seeding, lambda row: draw() if row == 5 else None)
    assert must_read_again
    samples, must_read_again = read_chunk(seeding, lambda row: draw_from_each_generator())
    assert samples == [draws_seeded_at(position) for position in POSITIONS.tolist()]
    assert not must_read_again


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_a_generator_drawn_from_while_learning_is_seeded_for_later_chunks(draw):
    seeding = Seeding(7)
    read_chunk(seeding, lambda row: draw() if row == LEARNING_SAMPLES - 1 else None)
    assert not seeding.is_learning
    samples, must_read_again = read_chunk(seeding, lambda row: draw_from_each_generator())
    assert samples == [draws_seeded_at(position) for position in POSITIONS.tolist()]
    assert not must_read_again


def test_short_chunks_and_chunks_without_learning_are_seeded():
    seeding = Seeding(7)
    read_chunk(seeding, lambda row: None)
    samples, _ = read_chunk(seeding, lambda row: draw_from_each_generator(), POSITIONS[: MIN_UNSEEDED_CHUNK - 1])
    assert samples[2] == draws_seeded_at(102)
    always_seeding = Seeding(7, is_learning=False)
    read_chunk(always_seeding, lambda row: None)
    assert read_chunk(always_seeding, lambda row: draw_from_each_generator())[0][2] == draws_seeded_at(102)


def test_seeding_a_short_chunk_does_not_count_as_a_draw():
    seeding = Seeding(7)
    read_chunk(seeding, lambda row: None)
    assert not read_chunk(seeding, lambda row: None)[1]
    read_chunk(seeding, lambda row: None, POSITIONS[:2])
    assert not read_chunk(seeding, lambda row: None)[1]


def test_draws_between_chunks_do_not_count_as_draws_of_a_chunk():
    """A dataset's `set_epoch` may draw and then fail, so that no chunk begins."""
    seeding = Seeding(7)
    read_chunk(seeding, lambda row: None)
    read_chunk(seeding, lambda row: None)
    random.random()
    assert not seeding.has_drawn_unseeded()


@pytest.mark.parametrize("read_sample", [draw_from_each_generator, lambda: None, lambda: torch.rand(2)])
def test_preserve_states_restores_the_global_generators(read_sample):
    seeding = Seeding(7)
    expected = states()[0], states()[1][1].tolist(), states()[2].tolist()
    for _ in range(3):
        with seeding.preserve_states():
            read_chunk(seeding, lambda row: read_sample())
        restored = states()
        assert (restored[0], restored[1][1].tolist(), restored[2].tolist()) == expected
        assert current_sample() is None
    random.random()  # a draw between chunks, which does not count as a draw of a chunk
    with seeding.preserve_states():
        assert not read_chunk(seeding, lambda row: None)[1]


def test_preserve_states_restores_generators_after_an_exception():
    seeding = Seeding(7)
    read_chunk(seeding, lambda row: None)
    random.seed(5)
    expected = random.random()
    random.seed(5)
    with pytest.raises(ZeroDivisionError), seeding.preserve_states():
        read_chunk(seeding, lambda row: random.random() / 0)
    assert random.random() == expected


@pytest.mark.filterwarnings("ignore:get_state and legacy:RuntimeWarning")
def test_replacing_numpys_bit_generator_counts_as_a_draw():
    original = np.random.get_bit_generator()
    seeding = Seeding(7)
    read_chunk(seeding, lambda row: None)
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        assert read_chunk(seeding, lambda row: None)[1]
    finally:
        np.random.set_bit_generator(original)
