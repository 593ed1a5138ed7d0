"""The device's share of the decoding: measured, kept in the state, the same for all ranks."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest
import torch
from simulated.decoder import ENGINE, OTHER, FakeDecoder, decoding_with
from stage.decode.test_images import Photos, photo

import gpuload as gl
from gpuload.decode.options import device_rows
from gpuload.loader import options
from gpuload.stage.decode import choose, share
from gpuload.stage.decode.share import measure_share, share_of

BOTH = gl.Decode(where="both")


def test_a_share_is_in_hundredths_and_leaves_something_to_each():
    assert share_of(9000, 3000) == 0.75
    assert share_of(1, 1e9) == 0.01
    assert share_of(1e9, 1) == 0.99


def test_it_comes_from_the_rates_of_both(monkeypatch):
    rates = iter([3000.0, 500.0])
    calls: list[Any] = []
    monkeypatch.setattr(share, "_rate", lambda call: calls.append(call()) or next(rates))
    decoder = FakeDecoder(torch.device("cpu"))
    assert measure_share(decoder, 4) == 0.6
    assert calls == [64, 1]
    assert decoder.calls == [64]


def test_a_rate_counts_what_was_done(monkeypatch):
    now = iter(np.arange(100) * 0.02)
    monkeypatch.setattr(share, "perf_counter", lambda: next(now))
    assert share._rate(lambda: 3) == pytest.approx(6 / 0.06)


def test_a_device_that_refuses_the_picture_has_no_share():
    decoder = FakeDecoder(torch.device("cpu"), refuses=lambda data: "no JPEGs today")
    with pytest.raises(RuntimeError, match="the device refuses a plain JPEG: no JPEGs today"):
        measure_share(decoder, 1)


def loader(**given: Any) -> gl.Loader:
    files = Photos([photo(number) for number in range(12)])
    options = {"batch_size": 3, "num_workers": 0, "device": "cpu", "transforms": [], "ragged": "list", "decode": BOTH}
    return gl.Loader(files, **options | given)


def decoded(made: gl.Loader) -> int:
    """By the device."""
    counts = made.stats().decoders
    return counts.get(ENGINE, 0) + counts.get(OTHER, 0)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What measurements will find, one after the other."""
    coming = [0.25, 0.75]
    monkeypatch.setattr(options, "measure_share", lambda decoder, workers: coming.pop(0))
    return coming


def test_it_is_measured_once_and_resuming_keeps_it(measured):
    with decoding_with():
        assert "a share of the samples, to be measured" in str(loader().plan())
        with loader() as first:
            assert "device_share" not in first.state_dict()
            iterator = iter(first)
            for _ in range(2):
                next(iterator)
            state = json.loads(json.dumps(first.state_dict()))
            assert state["device_share"] == 0.25
            assert "25% of the samples" in str(first.plan())
            list(iterator)
            assert decoded(first) == device_rows(np.arange(12), 0.25).sum()
        with loader() as second:
            second.load_state_dict(state)
            list(second)
            assert decoded(second) == device_rows(np.arange(6, 12), 0.25).sum()
            second.replay(0, 3)
    assert measured == [0.75]


def test_a_share_from_a_state_applies_to_the_next_epoch_of_a_loader_that_runs(measured):
    with decoding_with(), loader() as made:
        list(made)
        made.load_state_dict({**made.state_dict(), "device_share": 0.5})
        list(made)
        assert decoded(made) == device_rows(np.arange(12), 0.5).sum()
    assert measured == [0.75]


def test_a_share_by_hand_is_kept_against_that_of_a_state(measured):
    with decoding_with(), loader(decode=gl.Decode(where="both", device_share=0.5)) as made:
        made.load_state_dict({**made.state_dict(), "device_share": 0.9})
        list(made)
        assert decoded(made) == device_rows(np.arange(12), 0.5).sum()
        assert "device_share" not in made.state_dict()
    assert measured == [0.25, 0.75]


def test_ranks_have_to_be_given_one(measured):
    with decoding_with():
        with (
            loader(rank=0, world_size=2) as made,
            pytest.raises(ValueError, match=r"each of 2 ranks would find another one; give it: device_share=0\.5"),
        ):
            iter(made)
        with loader(rank=0, world_size=2) as made:  # all of them resume from one state
            made.load_state_dict({**made.state_dict(), "device_share": 0.5})
            list(made)
    assert measured == [0.25, 0.75]


@pytest.mark.parametrize("value", [1.0, 0.0, -0.5])
def test_a_state_with_no_such_share_is_refused(value):
    with loader() as made, pytest.raises(ValueError, match=r"decoding: device_share must be above 0 and below 1, got"):
        made.load_state_dict({**made.state_dict(), "device_share": value})


def test_nothing_is_measured_where_the_device_cannot_decode(measured, monkeypatch):
    def none(device: Any, threads: int, backend: str) -> Any:
        raise RuntimeError("no decoder today")

    monkeypatch.setattr(sys.modules[choose.__module__], "find_decoder", none)
    with loader() as made:
        with pytest.warns(RuntimeWarning, match="cpu cannot .* CPUs decode all images: no decoder today"):
            iterator = iter(made)
        assert len(list(iterator)) == 4
        assert "device_share" not in made.state_dict()
    assert measured == [0.25, 0.75]
