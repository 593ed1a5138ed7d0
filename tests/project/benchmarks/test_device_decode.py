"""The benchmark of the device's decoding: what it compares, and that it runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from benchmarks import device_decode
from benchmarks.device_decode import WAYS, Case, differences, main, photographs


class Clock:
    """Each call of `own` takes 7 s, of `bare` 4 s."""

    def __init__(self) -> None:
        self.now = 0.0

    def own(self) -> None:
        self.now += 7

    def bare(self) -> None:
        self.now += 4


def test_the_bare_call_is_taken_off_and_what_is_left_is_for_one_image(monkeypatch):
    case: Any = Clock()
    monkeypatch.setattr(device_decode.time, "thread_time", lambda: case.now)
    monkeypatch.setattr(device_decode.time, "perf_counter", lambda: 2 * case.now)
    assert differences(case, pairs=2, images=3) == {"cpu_us": [1e6, 1e6], "clock_us": [2e6, 2e6]}


@pytest.mark.parametrize("way", WAYS)
def test_the_bare_call_decodes_the_same_code_streams(way):
    case = Case(way, photographs(5, (32, 48)), (32, 48), torch.device("cpu"))
    try:
        [(decoder, codes, given)] = case.calls
        expected = (16, 24, 3) if way == "regions alone" else (32, 48, 3)
        assert [image.shape for image in decoder.decode(codes, **given)] == [expected] * 5
        case.own()
        assert sum(len(part.decoded) for part in case.batch.parts) == 5 * 16 * 24 * 3
    finally:
        case.close()


def test_it_runs_and_writes_what_it_measured(tmp_path, capsys):
    main(["--pairs", "2", "--images", "4", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert {way: {name: len(values) for name, values in ways.items()} for way, ways in found["ways"].items()} == {
        way: {"cpu_us": 2, "clock_us": 2} for way in WAYS
    }
    assert "regions alone, cpu_us: " in capsys.readouterr().out
