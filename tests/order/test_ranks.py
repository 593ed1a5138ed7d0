"""The rank of a process, and options that ranks compare through the store of their process group."""

from __future__ import annotations

import inspect

import pytest
import torch.distributed as dist

import gpuload as gl
from gpuload.order.ranks import announce, check_rank, exchange, find_caller, find_group, find_rank


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (3, 8)),
        ({"RANK": "3"}, (0, 1)),
        ({"WORLD_SIZE": "8"}, (0, 1)),
    ],
)
def test_find_rank_reads_torchruns_environment(monkeypatch, environment, expected):
    set_ranks(monkeypatch, environment)
    assert find_rank() == expected


def set_ranks(monkeypatch, environment):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def test_find_rank_prefers_torch_distributed_to_the_environment(monkeypatch, group):
    set_ranks(monkeypatch, {"RANK": "3", "WORLD_SIZE": "8"})
    assert find_rank() == (0, 1)


def test_without_a_process_group_announce_returns_its_own_number():
    assert (find_group(), announce("a", 3)) == (None, 3)


def test_announce_returns_the_first_announcement_of_a_key(group):
    assert find_group() == ("gloo", 0, 1)
    assert [announce("a", 3), announce("a", 2), announce("b", 2)] == [3, 3, 2]


@pytest.mark.parametrize(("rank", "world_size"), [("8", "8"), ("-1", "2"), ("a", "2"), ("0", "0")])
def test_invalid_rank_in_the_environment_is_refused(monkeypatch, rank, world_size):
    set_ranks(monkeypatch, {"RANK": rank, "WORLD_SIZE": world_size})
    expected = f"the environment has RANK='{rank}' and WORLD_SIZE='{world_size}'.*pass rank= and world_size="
    with pytest.raises(ValueError, match=expected):
        find_rank()


@pytest.mark.parametrize(
    ("rank", "world_size", "text"),
    [
        (0, None, "must be given together, got rank=0, world_size=None; pass both or neither"),
        (None, 2, "must be given together, got rank=None, world_size=2; pass both or neither"),
        (2, 2, "rank must be at least 0 and less than 2, got 2"),
    ],
)
def test_invalid_rank_and_world_size_are_refused(rank, world_size, text):
    with pytest.raises(ValueError, match=f"{text}$"):
        check_rank(rank, world_size)


def test_check_rank_accepts_both_arguments_or_neither():
    check_rank(None, None)
    check_rank(1, 2)


def test_exchange_returns_the_texts_that_other_ranks_have_written(group):
    assert exchange("a", "of rank 1", 1, 3) == {}
    assert exchange("a", "of rank 0", 0, 3) == {1: "of rank 1"}
    assert exchange("b", "of rank 2", 2, 3) == {}
    assert exchange("a", "of rank 2", 2, 3) == {0: "of rank 0", 1: "of rank 1"}


def test_exchange_without_a_store_returns_nothing(group, monkeypatch):
    def fail():
        raise RuntimeError("no store")

    exchange("a", "of rank 1", 1, 2)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", fail)
    assert exchange("a", "of rank 0", 0, 2) == {}


def test_find_caller_returns_the_users_line_and_counts_its_calls():
    callers = [find_caller() for _ in range(2)]
    place = f"test_ranks.py:{inspect.currentframe().f_lineno - 1}"
    assert callers == [f"{place}, call 1", f"{place}, call 2"]
    assert gl.Loader([1], num_workers=0)._options.order.caller == f"test_ranks.py:{line_of_caller()}, call 1"


def line_of_caller():
    return inspect.currentframe().f_back.f_lineno


def begin_epoch(rank, dataset, **options):
    """Begin an epoch as a rank of a program that creates one `Loader`."""
    with gl.Loader(dataset, 2, num_workers=0, device="cpu", rank=rank, world_size=2, **options) as loader:
        object.__setattr__(loader._options.order, "caller", "train.py:7, call 1")  # the same on all ranks
        iter(loader)


def test_ranks_with_the_same_options_do_not_warn(group):
    begin_epoch(0, range(46))
    begin_epoch(1, range(46))


def test_ranks_with_different_seeds_are_refused(group):
    begin_epoch(1, range(46), seed=43)
    text = (
        r"seed=43 on rank 1, and seed=42 on rank 0 \(created at train\.py:7, call 1\): .* Pass the same seed and order"
    )
    with pytest.raises(ValueError, match=text):
        begin_epoch(0, range(46), seed=42)


def test_ranks_with_different_numbers_of_batches_are_refused(group):
    begin_epoch(1, range(46))
    text = r"the dataset has 46 samples on rank 1, and 40 on rank 0 .*, which gives 12 and 10 batches, .* forever"
    with pytest.raises(ValueError, match=text):
        begin_epoch(0, range(40))


def test_ranks_with_different_lengths_are_warned_of(group):
    begin_epoch(1, range(46))
    text = r"has 46 samples on rank 1, and 45 on rank 0 .*: each rank takes its share"
    with pytest.warns(RuntimeWarning, match=text):
        begin_epoch(0, range(45))


def test_ranks_with_samplers_may_have_different_lengths_and_seeds(group):
    begin_epoch(1, range(46), sampler=range(4), seed=1)
    begin_epoch(0, range(40), sampler=range(8), seed=2)
