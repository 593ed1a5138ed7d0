"""Lost chunks whose slots may still be written to."""

from __future__ import annotations

from gpuload.workers.engine import Freed
from gpuload.workers.limbo import Limbo


def test_a_slot_is_free_once_no_worker_can_have_its_chunk():
    limbo = Limbo()
    assert limbo.add(7, 0, [1, 2]) == []
    assert limbo.clear(1) == []
    assert limbo.clear(1) == []
    assert limbo.clear(2) == [Freed(7, 0)]
    assert limbo.clear(2) == []


def test_without_a_suspect_it_is_free_at_once():
    assert Limbo().add(7, 3, []) == [Freed(7, 3)]


def test_a_chunk_that_was_done_after_all_is_freed_by_its_reply_alone():
    limbo = Limbo()
    limbo.add(7, 0, [1])
    limbo.add(8, 0, [1])
    limbo.clear(2, (7, 0))
    assert limbo.clear(1) == [Freed(8, 0)]
