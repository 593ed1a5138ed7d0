"""The cursor of a loader and the progress of an epoch, without dataset or workers."""

from __future__ import annotations

import gc

import pytest

import gpuload as gl
from gpuload.loader.epoch import Cursor, Progress
from gpuload.order.place import Place


class Schedule:
    """A schedule with batches of one position each. If `samples` is None, the length of an epoch is unknown."""

    def __init__(self, samples: int | None = 10) -> None:
        self.samples = samples

    def steps(self, place):
        return None if self.samples is None else self.samples - place.position

    def batches(self, place):
        raise AssertionError("no batch should be requested")

    def place_after(self, epoch):
        return Place(epoch + 1, 0)


NEW_CURSOR = Cursor()


def advance(progress: Progress, count: int) -> None:
    """Count batches as an iterator over an epoch of 10 does."""
    progress.has_begun = True
    for _ in range(count):
        progress.remaining_batches = None if progress.remaining_batches is None else progress.remaining_batches - 1
        position = progress.place.position + 1
        progress.place = Place(progress.place.epoch, position) if position < 10 else Place(progress.place.epoch + 1, 0)


def begin(cursor: Cursor, schedule: Schedule | None = None) -> tuple[Cursor, Progress]:
    progress = cursor.start_progress(schedule or Schedule())
    return cursor.begin(progress), progress


def test_epoch_begins_where_the_previous_one_ended():
    cursor = NEW_CURSOR
    for epoch in range(3):
        cursor, progress = begin(cursor)
        assert (cursor.epoch, progress.start, progress.remaining_batches) == (epoch, Place(epoch, 0), 10)
        advance(progress, 10)
        assert cursor.place == Place(epoch + 1, 0)


def test_epoch_left_early_is_saved_at_its_place_and_the_next_is_complete():
    cursor, progress = begin(NEW_CURSOR)
    advance(progress, 4)
    assert cursor.place == Place(0, 4)
    assert cursor.start_progress(Schedule()).start == Place(1, 0)


def test_iterator_without_a_batch_does_not_advance_the_cursor():
    cursor = NEW_CURSOR.go_to(Place(3, 7), is_running=False)
    for _ in range(3):
        cursor, progress = begin(cursor)
        assert (cursor.epoch, progress.start, progress.remaining_batches) == (3, Place(3, 7), 3)
    _, progress = begin(cursor.set_epoch(5, is_running=True))
    assert progress.start == Place(5, 0)


def test_set_epoch_keeps_the_place_in_the_loaded_epoch_and_begins_any_other_epoch():
    loaded = NEW_CURSOR.go_to(Place(3, 7), is_running=False)
    assert loaded.set_epoch(3, is_running=False).start_progress(Schedule()).start == Place(3, 7)
    assert loaded.set_epoch(4, is_running=False).start_progress(Schedule()).start == Place(4, 0)
    assert (loaded.epoch_sent, loaded.set_epoch(4, is_running=False).epoch_sent) == (-1, 4)


@pytest.mark.parametrize(("running", "epoch"), [(False, 7), (True, 0)])
def test_epoch_number_stays_while_a_session_is_running(running, epoch):
    cursor, progress = begin(NEW_CURSOR)
    advance(progress, 1)
    assert cursor.set_epoch(7, is_running=running).epoch == epoch
    assert cursor.go_to(Place(7, 2), is_running=running).epoch == epoch


def test_place_of_set_epoch_is_saved_once_the_open_epoch_has_ended():
    cursor, progress = begin(NEW_CURSOR)
    advance(progress, 2)
    cursor = cursor.set_epoch(8, is_running=True)
    assert cursor.place == Place(0, 2)
    progress.end_reason = "its iterator was collected"
    assert cursor.place == Place(8, 0)


def test_end_keeps_the_first_reason():
    NEW_CURSOR.end("before any epoch")
    cursor, progress = begin(NEW_CURSOR)
    assert cursor.is_open
    cursor.end("a reason")
    cursor.end("another")
    assert (progress.end_reason, cursor.is_open) == ("a reason", False)


def test_sampler_state_at_the_end_of_an_epoch_goes_to_the_next_epoch_only():
    end = Place(1, 0, sampler={"over": True, "own": 5})
    cursor, progress = begin(NEW_CURSOR)
    advance(progress, 10)
    progress.place, progress.end_reason = end, ""
    assert cursor.place == end
    assert cursor.start_progress(Schedule()).place == end
    assert cursor.set_epoch(1, is_running=True).place == end
    assert cursor.set_epoch(2, is_running=True).place == Place(2, 0)


def test_place_at_the_end_of_an_epoch_is_the_beginning_of_the_next():
    progress = NEW_CURSOR.go_to(Place(2, 10), is_running=False).start_progress(Schedule())
    assert (progress.remaining_batches, progress.place) == (0, Place(3, 0))
    assert NEW_CURSOR.start_progress(Schedule(None)).remaining_batches is None


def test_cursor_is_immutable():
    cursor, _ = begin(NEW_CURSOR)
    cursor.set_epoch(9, is_running=False)
    cursor.go_to(Place(9, 9), is_running=False)
    assert cursor.next_place == Place(0, 0)
    assert Cursor() == NEW_CURSOR
    with pytest.raises(AttributeError):
        cursor.epoch = 5  # pyright: ignore[reportAttributeAccessIssue]


def test_iterator_that_is_collected_ends_its_epoch():
    loader = gl.Loader(range(6), 2, num_workers=0, device="cpu")
    with loader:
        batches = iter(loader)
        next(batches)
        loader.set_epoch(8)
        assert loader.state_dict()["position"] == 2
        del batches
        gc.collect()
        assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (8, 0)
