"""The benchmark of the device's decoding: what it compares, and that it runs."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import device_decode
from benchmarks.device_decode import WAYS, Case, Timed, main, overheads, photographs


def test_the_librarys_calls_are_taken_off_and_what_is_left_is_for_one_image(monkeypatch):
    """Each round takes 7 s, of which the two decoders' calls take 2 each; the clock on the wall goes twice as fast."""
    now = 0.0

    def sleep(*codes: Any) -> list[Any]:
        nonlocal now
        now += 2
        return []

    def decode() -> None:
        nonlocal now
        now += 3
        for timed in case.timed:
            timed.decode([])

    monkeypatch.setattr(device_decode, "CLOCKS", {"cpu_us": lambda: now, "clock_us": lambda: 2 * now})
    case: Any = SimpleNamespace(decode=decode, timed=[Timed(SimpleNamespace(decode=sleep)) for _ in range(2)])
    assert overheads(case, rounds=2, images=3) == {"cpu_us": [1e6, 1e6], "clock_us": [2e6, 2e6]}


@pytest.mark.parametrize("way", WAYS)
def test_the_librarys_decoder_is_called_once_for_a_batch(way, monkeypatch):
    case = Case(way, photographs(5, (32, 48)), (32, 48), torch.device("cpu"))
    [timed] = case.timed
    shapes: list[Any] = []
    decode = timed.decode

    def noted(codes: Any, **given: Any) -> Any:
        images = decode(codes, **given)
        shapes.append([image.shape for image in images])
        return images

    monkeypatch.setattr(timed, "decode", noted)
    try:
        case.decode()
        case.decode()
        assert shapes == [[(16, 24, 3) if way == "regions alone" else (32, 48, 3)] * 5] * 2
        assert sum(len(part.decoded) for part in case.batch.parts) == 5 * 16 * 24 * 3
    finally:
        case.close()


def test_it_runs_and_writes_what_it_measured(tmp_path, capsys):
    main(["--rounds", "2", "--images", "4", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert {way: {name: len(values) for name, values in ways.items()} for way, ways in found["ways"].items()} == {
        way: {"cpu_us": 2, "clock_us": 2} for way in WAYS
    }
    assert "regions alone, cpu_us: " in capsys.readouterr().out
