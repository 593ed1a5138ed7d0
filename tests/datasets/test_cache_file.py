"""`Entries`: a cache in a file, its eviction and size, damage, and killed processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from gpuload.datasets import cache_file as cache_file_module
from gpuload.datasets.cache_file import ENTRY, PAGE, CacheLocation, Entries

MIB = 1 << 20


def make_entries(samples: int = 100, limit: int = MIB, folder: str = "", stored: int = 0) -> Entries:
    """Make a cache that contains the first `stored` samples."""
    cache = Entries(CacheLocation(samples, limit, bytes(range(16)), folder))
    for number in range(stored):
        cache.put(number, content(number))
    return cache


def content(number: int, nbytes: int = 5000) -> bytes:
    return np.random.default_rng(number).bytes(nbytes)


def get(cache: Entries, number: int) -> bytes | None:
    return cache.get(number, bytes)


@pytest.fixture
def read_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda fd, nbytes, offset: sizes.append(nbytes) or pread(fd, nbytes, offset))
    return sizes


def disk_bytes(cache: Entries) -> int:
    """Return the size of the file on disk without the table."""
    return os.fstat(cache._fd).st_blocks * 512 - cache._location.data_at


def entries_and_bytes(cache: Entries) -> tuple[int, int]:
    """Return the number of entries and their bytes."""
    totals = cache.totals()
    return totals["entries"], totals["bytes_used"]


def test_get_returns_what_was_put_and_totals_count() -> None:
    cache = make_entries()
    for number in (3, 99, 0):
        assert get(cache, number) is None
        cache.put(number, content(number))
    assert [get(cache, number) for number in (0, 3, 99)] == [content(0), content(3), content(99)]
    assert get(cache, 4) is None
    totals = cache.totals()
    assert [totals[name] for name in ("hits", "misses", "entries", "bytes_used")] == [3, 4, 3, 6 * PAGE]
    cache.put(1, bytes(MIB // 16))
    assert (get(cache, 1), cache.totals()["too_large"]) == (None, 1)


def test_put_evicts_the_least_recently_used_and_obeys_the_limit() -> None:
    cache = make_entries(400)
    for number in range(400):
        assert get(cache, number) is None  # as a dataset does first
        cache.put(number, content(number))
        get(cache, 7)
        assert cache.totals()["bytes_used"] <= MIB
        assert disk_bytes(cache) <= MIB + PAGE
    stored = [number for number in range(400) if cache._words[number]]
    assert stored[0] == 7
    assert stored[1:] == list(range(400 - len(stored) + 1, 400))
    assert len(stored) > 0.9 * MIB / (2 * PAGE)
    assert cache.totals()["evicted"] == 400 - len(stored)


def test_get_of_a_damaged_entry_returns_none() -> None:
    cache = make_entries()
    for byte in (0, 16, 24, 32, 40, 4000, 5030):  # in each field of the header, and in the content
        cache.put(5, content(5))
        page = int(cache._words[5]) >> 24
        offset = cache._location.data_at + page * PAGE + byte
        os.pwrite(cache._fd, bytes([os.pread(cache._fd, 1, offset)[0] ^ 1]), offset)
        assert get(cache, 5) is None, byte
        assert cache.totals()["entries"] == 0


# A word of the table is the entry's first page × 2**24 + its number of pages.
@pytest.mark.parametrize("word", [1 << 24 | (1 << 24) - 1, (1 << 40) - 1 << 24 | 2, 7 << 24, 2 << 24 | 1])
def test_get_with_a_damaged_table_reads_little_and_keeps_valid_entries(word: int, read_sizes: list[int]) -> None:
    cache = make_entries(limit=1 << 50, stored=10)
    cache._words[5] = word
    read_sizes.clear()
    assert get(cache, 5) is None
    assert max(read_sizes, default=0) < 2 * PAGE
    assert [get(cache, number) for number in range(10)] == [(n != 5 and content(n)) or None for n in range(10)]
    assert (*entries_and_bytes(cache), disk_bytes(cache)) == (9, 18 * PAGE, 18 * PAGE)


@pytest.mark.parametrize("has_rebooted", [True, False])
def test_first_process_after_a_reboot_frees_lost_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_rebooted: bool
) -> None:
    """After a crash of the machine, the disk may hold an entry only in part."""
    cache = make_entries(folder=str(tmp_path), stored=4)
    cache._words[2] = 0
    del cache
    if has_rebooted:
        monkeypatch.setattr(cache_file_module, "_boot_id", lambda: 5)
    cache = make_entries(folder=str(tmp_path))
    expected = (3, 6 * PAGE) if has_rebooted else (4, 8 * PAGE)  # the table is read only after a reboot
    assert entries_and_bytes(cache) == expected
    assert disk_bytes(cache) <= entries_and_bytes(cache)[1] + PAGE
    assert get(cache, 3) == content(3)


def test_drop_keeps_an_entry_that_was_put_again() -> None:
    cache = make_entries(stored=4)
    word = int(cache._words[3])
    assert not cache.drop(3, word + 1)
    assert get(cache, 3) == content(3)
    assert cache.drop(3, word)
    assert get(cache, 3) is None


@pytest.mark.parametrize("event", ["a machine stops", "an entry is evicted"])
def test_totals_ignore_a_damaged_table_beyond_the_file(event: str) -> None:
    cache = make_entries(400, stored=100)
    cache._words[50:60] = np.uint64((1 << 40) - 1 << 24 | 2)
    cache._words[60:70] = np.uint64((1 << 24) - 1)
    if event == "a machine stops":
        cache._head.dirty = 1
        assert entries_and_bytes(cache) == (80, 160 * PAGE)
        assert disk_bytes(cache) <= 160 * PAGE
    for number in range(100, 400):
        cache.put(number, content(number))
    entries, bytes_used = entries_and_bytes(cache)
    assert bytes_used == entries * 2 * PAGE <= MIB
    assert get(cache, 399) == content(399)


def test_get_does_not_read_a_length_beyond_the_file(read_sizes: list[int]) -> None:
    cache = make_entries(limit=1 << 50, stored=6)
    page = int(cache._words[5]) >> 24
    huge = ((1 << 24) - 1) * PAGE - ENTRY.size
    os.pwrite(cache._fd, ENTRY.pack(cache._location.key, 5, huge, 0), cache._location.data_at + page * PAGE)
    cache._words[5] = page << 24 | (1 << 24) - 1
    read_sizes.clear()
    assert get(cache, 5) is None
    assert max(read_sizes, default=0) < PAGE


def test_get_of_swapped_pages_half_an_entry_or_another_samples_returns_none() -> None:
    cache = make_entries()
    for number in (1, 2, 5):
        cache.put(number, content(number, 4 * PAGE))
    cache._words[3] = cache._words[1]  # the bytes name sample 1
    assert get(cache, 3) is None
    second, fifth = (cache._location.data_at + (int(cache._words[number]) >> 24) * PAGE for number in (2, 5))
    os.pwrite(cache._fd, bytes(PAGE), second + PAGE)
    assert get(cache, 2) is None
    pages = [os.pread(cache._fd, PAGE, fifth + offset) for offset in (PAGE, 2 * PAGE)]
    os.pwrite(cache._fd, pages[1] + pages[0], fifth + PAGE)
    assert get(cache, 5) is None


@pytest.mark.slow
def test_bytes_allowed_follow_the_hit_rate() -> None:
    """A cache that fits a 20th of the samples is useless, and shrinks; it grows again for samples that fit."""
    limit, fit = 1 << 18, 28  # 32 entries of two pages
    cache = make_entries(600, limit)

    def read(numbers: range, times: int) -> None:
        for number in [*numbers] * times:
            if not get(cache, number):
                cache.put(number, bytes(5000))

    read(range(600), 2)
    assert cache.totals()["bytes_allowed"] == limit // 2
    read(range(600), 4)
    assert cache.totals()["bytes_allowed"] == limit // 16
    read(range(fit), 100)  # which needs more than a 16th of the limit
    assert cache.totals()["bytes_allowed"] == limit
    hits_before = cache.totals()["hits"]
    read(range(fit), 1)
    assert cache.totals()["hits"] - hits_before == fit


def test_bytes_allowed_stay_at_the_limit_if_all_samples_fit() -> None:
    cache = make_entries(50)
    for _ in range(10):
        for number in range(50):
            if get(cache, number) is None:
                cache.put(number, content(number))
    totals = cache.totals()
    assert (totals["bytes_allowed"], totals["hits"], totals["misses"]) == (MIB, 450, 50)


def test_put_on_a_full_disk_shrinks_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_entries(stored=2)
    write = cache_file_module._write

    def write_half(fd: int, data: bytes, offset: int) -> None:
        write(fd, data[:4096], offset)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_file_module, "_write", write_half)
    cache.put(3, content(3))
    assert (*entries_and_bytes(cache), disk_bytes(cache)) == (2, 4 * PAGE, 4 * PAGE)
    assert cache.totals()["bytes_allowed"] < 4 * PAGE
    monkeypatch.undo()
    cache.put(3, content(3))
    assert get(cache, 3) is not None
    assert get(cache, 0) is None, "sample 0 must have been evicted to make room"


KILLED_PUT = """
    import os, signal, sys
    from gpuload.datasets import cache_file as module
    from gpuload.datasets.cache_file import CacheLocation

    cache = module.Entries(CacheLocation(100, 1 << 20, bytes(range(16)), sys.argv[1], -1))
    when, kill = sys.argv[2], lambda: os.kill(os.getpid(), signal.SIGKILL)
    write = module._write
    if when == "half-written":
        module._write = lambda fd, data, offset: (write(fd, data[:5000], offset), kill())
    elif when == "written":
        module._write = lambda fd, data, offset: (write(fd, data, offset), kill())
    elif when == "evicting":
        module._punch_hole = lambda *args: kill()
        with cache._hold_lock():
            cache._remove([3])
    cache.put(50, bytes(20000))
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["half-written", "written", "evicting"])
def test_process_killed_during_put_leaves_no_entry_and_no_lock(when: str, tmp_path: Path) -> None:
    cache = make_entries(folder=str(tmp_path), stored=10)
    process = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED_PUT), str(tmp_path), when], timeout=60)
    assert process.returncode == -9  # SIGKILL
    cache.put(60, content(60))  # the lock is free
    expected = 10 if when == "evicting" else 11
    assert entries_and_bytes(cache) == (expected, expected * 2 * PAGE)
    assert disk_bytes(cache) <= expected * 2 * PAGE + PAGE  # a file system needs a block for its own list
    assert get(cache, 50) is None
    for number in range(10):
        assert get(cache, number) == (None if when == "evicting" and number == 3 else content(number))
