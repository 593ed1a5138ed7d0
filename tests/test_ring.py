from __future__ import annotations

import itertools
import os

import numpy as np
import pytest

from gpuload.ring import GRANULE_BYTES, Ring, Slot, map_ring


@pytest.fixture
def ring():
    ring = Ring(1 << 20)
    yield ring
    ring.close()


def resident_bytes(ring: Ring) -> int:
    return os.fstat(ring.fd).st_blocks * 512


def test_a_slot_is_shared_with_other_mappings_of_the_descriptor(ring: Ring):
    slot = ring.acquire(100)
    assert slot is not None
    ring.view(slot)[:3] = (1, 2, 3)
    other = map_ring(ring.fd, ring.ring_bytes)
    assert other[slot.offset : slot.offset + 3] == b"\x01\x02\x03"
    other.close()


def test_memory_is_taken_only_when_it_is_written(ring: Ring):
    slot = ring.acquire(512 * 1024)
    assert resident_bytes(ring) == 0
    ring.view(slot)[: 256 * 1024] = 1
    assert resident_bytes(ring) == 256 * 1024


def test_the_slot_released_last_is_handed_out_first(ring: Ring):
    first, second = ring.acquire(1000), ring.acquire(1000)
    ring.release(first)
    ring.release(second)
    assert ring.acquire(1000) is second
    assert ring.acquire(1000) is first


def test_slots_in_use_never_overlap_and_never_exceed_the_ring():
    rng = np.random.default_rng(0)
    ring = Ring(4 << 20)
    used: list[Slot] = []
    for _ in range(3000):
        if used and rng.random() < 0.5:
            ring.release(used.pop(rng.integers(len(used))))
        elif (slot := ring.acquire(int(rng.integers(1, 1 << 20)))) is not None:
            used.append(slot)
        spans = sorted((s.offset, s.offset + s.capacity_bytes) for s in used)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert all(end <= ring.ring_bytes for _, end in spans)
        assert ring.slot_bytes <= ring.ring_bytes
    ring.close()


def test_a_full_ring_gives_none_until_a_slot_is_released(ring: Ring):
    slots = [ring.acquire(256 * 1024) for _ in range(4)]
    assert ring.acquire(1) is None
    ring.release(slots[2])
    assert ring.acquire(1) is slots[2]


def test_free_slots_that_are_too_small_make_room_for_a_larger_one_and_give_their_pages_back(ring: Ring):
    slots = [ring.acquire(256 * 1024) for _ in range(4)]
    for slot in slots:
        ring.view(slot)[:] = 7
        ring.release(slot)
    whole = ring.acquire(ring.ring_bytes)
    assert whole is not None
    assert (whole.offset, whole.capacity_bytes) == (0, ring.ring_bytes)
    assert resident_bytes(ring) == 0
    assert ring.slots == 1


def test_more_than_the_whole_ring_is_an_error(ring: Ring):
    with pytest.raises(ValueError, match=r"^1048577 bytes do not fit into a ring of 1048576 bytes$"):
        ring.acquire((1 << 20) + 1)


def test_ring_bytes_must_be_positive():
    with pytest.raises(ValueError, match="ring_bytes must be positive, got 0"):
        Ring(0)


def test_new_and_retired_slots_are_announced():
    events: list[tuple[str, int]] = []
    ring = Ring(
        2 * GRANULE_BYTES,
        on_new=lambda slot: events.append(("new", slot.offset)),
        on_retire=lambda slot: events.append(("retired", slot.offset)),
    )
    ring.release(ring.acquire(10))
    ring.release(ring.acquire(10))
    assert events == [("new", 0)]
    ring.release(ring.acquire(2 * GRANULE_BYTES))
    ring.close()
    assert events == [("new", 0), ("retired", 0), ("new", 0), ("retired", 0)]


def test_close_frees_descriptor_and_mapping():
    before = len(os.listdir("/proc/self/fd"))
    ring = Ring(1 << 20)
    ring.release(ring.acquire(10))
    ring.close()
    ring.close()
    assert len(os.listdir("/proc/self/fd")) == before
    with open("/proc/self/maps") as maps:
        assert "gpuload-ring" not in maps.read()


def test_a_forked_child_neither_maps_the_ring_nor_frees_its_pages(ring: Ring):
    slot = ring.acquire(1000)
    ring.view(slot)[:] = 5
    ring.release(slot)
    pid = os.fork()
    if pid == 0:
        with open("/proc/self/maps") as maps:
            mapped = "gpuload-ring" in maps.read()
        ring.close()
        os._exit(1 if mapped else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert ring.view(slot)[0] == 5
