"""`SharedBytes`, a list of bytes that workers share, behaves like a list."""

from __future__ import annotations

import json
import operator

import numpy as np
import pytest

from gpuload.workers.job import SharedBytes


def shared(items: list[bytes]) -> SharedBytes:
    return SharedBytes(np.frombuffer(b"".join(items), np.uint8), np.cumsum([len(item) for item in items]))


ITEMS = [b"ab", b"", b"cde"]


@pytest.mark.parametrize("use", [
    lambda a: list(a),
    lambda a: (len(a), a[0], a[-1], a[1:], [*reversed(a)], a.index(b"cde"), a.count(b"x"), b"ab" in a),
    lambda a: (
        operator.add(a, [b"x"]),
        operator.add([b"x"], a),
        a * 2,
        a == ITEMS,
        a != ITEMS,
        a < [b"b"],
        sorted(a),
        repr(a),
        a.copy(),
    ),
    lambda a: (b"".join(a), tuple(a), {*a}, [*a], dict(enumerate(a)), list(zip(a, a, strict=True))),
    lambda a: (a.append(b"x"), a.sort(), a.pop(), a.insert(0, b"y"), a.__setitem__(1, b"z"), len(a), list(a)),
    lambda a: (a.extend([b"x"]), a.reverse(), a.remove(b""), a[::2], len(a), a),
    lambda a: (json.dumps([item.decode() for item in a]), max(a), a == shared(ITEMS)),
], ids=["iteration", "access", "operators", "conversion", "mutation", "removal", "json"])  # fmt: skip
def test_shared_bytes_behaves_like_a_list(use):
    assert use(shared(ITEMS)) == use(list(ITEMS))


def test_shared_bytes_reads_items_and_slices_without_copying_the_list():
    items = shared(ITEMS)
    assert (items[1:], items[0], list(items)) == (ITEMS[1:], ITEMS[0], ITEMS)
    assert items._data is not None, "reading copied the shared bytes into a list"


def test_shared_bytes_raises_index_error_past_its_end():
    with pytest.raises(IndexError):
        shared(ITEMS)[3]
