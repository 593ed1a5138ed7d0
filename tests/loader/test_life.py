"""The states of a session: what leads where, and that nothing leads back from the end."""

from __future__ import annotations

import pytest

from gpuload.errors import WorkerError
from gpuload.loader.life import Life


def test_work_that_ends_leaves_it_open_and_so_does_what_was_raised_on_purpose():
    life = Life()
    with life.work(broken=False):
        assert life.is_torn  # for whoever comes in between
    assert life.is_open
    with pytest.raises(WorkerError, match="a reason"), life.work(broken=False):
        raise WorkerError("a reason")
    assert life.is_open


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_work_that_was_broken_off_is_told_by_the_next(error):
    life = Life()
    with pytest.raises(error), life.work(broken=False):
        raise error
    assert (life.is_open, life.is_torn, life.is_closed) == (False, True, False)
    expected = f"over: it was broken off by {error.__name__}, and a batch may be lost. Begin a new epoch"
    with pytest.raises(RuntimeError, match=expected), life.work(broken=False):
        raise AssertionError("no work is done")
    with life.work(broken=True):  # the engine's own reason is told
        pass


def test_it_is_closed_and_ended_once():
    life = Life()
    life.epoch = object()
    assert [life.close(), life.close()] == [True, False]
    assert life.epoch is not None
    assert [life.end(), life.end()] == [True, False]
    assert (life.epoch, life.is_open, life.is_closed) == (None, False, True)
    with pytest.raises(RuntimeError, match="this iterator is over: its Loader was closed"), life.work(broken=False):
        raise AssertionError("no work is done")


def test_closed_in_the_midst_of_work_it_stays_closed():
    life = Life()
    with pytest.raises(RuntimeError, match="its Loader was closed meanwhile"), life.work(broken=False):
        life.close()
    assert life.is_closed


def test_one_that_is_buried_is_closed_too():
    life = Life()
    life.bury()
    assert (life.is_buried, life.is_closed, life.close()) == (True, True, False)
