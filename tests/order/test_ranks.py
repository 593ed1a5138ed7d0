"""Which of how many ranks a process is."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from gpuload.order.ranks import announce, check_rank, find_group, find_rank


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (3, 8)),
        ({"RANK": "3"}, (0, 1)),
        ({"WORLD_SIZE": "8"}, (0, 1)),
    ],
)
def test_torchruns_environment_is_read(environment, expected):
    assert find_rank(environment) == expected


def test_torch_distributed_comes_before_the_environment(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert find_rank({"RANK": "3", "WORLD_SIZE": "8"}) == (0, 1)
    finally:
        dist.destroy_process_group()
    assert find_rank({"RANK": "3", "WORLD_SIZE": "8"}) == (3, 8)


def test_the_first_of_the_ranks_that_said_something_is_known_without_waiting(tmp_path):
    assert (find_group(), announce("a", 3)) == (None, 3)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert find_group() == ("gloo", 0, 1)
        assert [announce("a", 3), announce("a", 2), announce("b", 2)] == [
            3,
            3,
            2,
        ]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("rank", "world_size"), [("8", "8"), ("-1", "2"), ("a", "2"), ("0", "0")])
def test_an_environment_that_cannot_be_is_refused(rank, world_size):
    expected = f"the environment has RANK='{rank}' and WORLD_SIZE='{world_size}'.*pass rank= and world_size="
    with pytest.raises(ValueError, match=expected):
        find_rank({"RANK": rank, "WORLD_SIZE": world_size})


@pytest.mark.parametrize(
    ("rank", "world_size", "kind", "text"),
    [
        (
            0,
            None,
            ValueError,
            "rank and world_size must be given together, got rank=0, world_size=None; pass both or neither",
        ),
        (
            None,
            2,
            ValueError,
            "rank and world_size must be given together, got rank=None, world_size=2; pass both or neither",
        ),
        ("0", 2, TypeError, "rank must be an integer, got '0'"),
        (0, True, TypeError, "world_size must be an integer, got True"),
        (2, 2, ValueError, "rank must be in 0 … world_size-1 = 1, got 2"),
        (0, 0, ValueError, "world_size must be at least 1, got 0"),
    ],
)
def test_arguments_that_cannot_be_are_refused(rank, world_size, kind, text):
    with pytest.raises(kind) as caught:
        check_rank(rank, world_size)
    assert str(caught.value) == text


def test_both_or_neither():
    check_rank(None, None)
    check_rank(1, 2)
