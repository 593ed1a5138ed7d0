"""Calls when an object is gone."""

from __future__ import annotations

import gc

import numpy as np

from gpuload.ring import gone
from gpuload.ring.gone import when_gone


def test_it_is_called_once_with_its_arguments():
    called, array = [], np.zeros(3)
    when_gone(array, called.append, 1)
    when_gone(array, called.append, 2)
    assert called == []
    del array
    assert sorted(called) == [1, 2]


def test_it_is_not_called_once_it_was_called_off():
    called, arrays = [], [np.zeros(3), np.zeros(3)]
    off = [when_gone(array, called.append, number) for number, array in enumerate(arrays)]
    off[0]()
    off[0]()
    arrays.clear()
    assert called == [1]
    off[1]()  # too late, and no error


def test_nothing_is_kept():
    gc.collect()  # what earlier tests left behind would be taken off the list meanwhile
    before = len(gone._waiting)
    for _ in range(100):
        when_gone(np.zeros(3), list)
    gc.collect()
    assert len(gone._waiting) == before


def test_nothing_is_called_once_the_interpreter_ends():
    called, array, others = [], np.zeros(3), dict(gone._waiting)
    when_gone(array, called.append, 1)
    gone._waiting.clear()  # which it does at exit
    gone._waiting.update(others)
    del array
    assert called == []
