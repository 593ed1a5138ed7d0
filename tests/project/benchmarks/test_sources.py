"""The benchmarks of stores: equal batches are called equal and others are not, ratios are within rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import lacking
from helpers.http_server import served
from helpers.jpeg_dataset import jpegs

import gpuload as gl
from benchmarks.sources import __main__ as rates
from benchmarks.sources import equal
from benchmarks.sources.__main__ import judge
from benchmarks.sources.stores import STORES, write

COUNT = 12


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small photographs of three classes, in the order of their names, and all stores of them."""
    base = tmp_path_factory.mktemp("sources")
    for number, data in enumerate(jpegs()[:COUNT]):
        folder = base / "train" / f"class_{number // 4}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:05d}.jpg").write_bytes(data)
    write(base)
    return base


@pytest.mark.processes
@pytest.mark.parametrize("name", ["TarShards, stream", "Coco"])
def test_the_same_photographs_are_the_same_batches(base: Path, name: str) -> None:
    found = equal.Comparison(base, batch_size=3, size=16).of(name, "local", str(base), {})
    assert (found.error, found.equal, found.batches, found.good) == ("", (True,) * 4, 4, True)


@pytest.mark.processes
def test_the_same_photographs_over_http_are_the_same_batches(base: Path) -> None:
    lacking.require("aiohttp")
    files = {str(path.relative_to(base)): path.read_bytes() for path in base.rglob("*") if path.is_file()}
    with served(files) as server:
        found = equal.Comparison(base, batch_size=3, size=16).of("TarShards", "http", server.url, {})
    assert (found.error, found.equal) == ("", (True,) * 4)


@pytest.mark.processes
def test_other_pixels_and_other_targets_are_told(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Changed:
        """One class, in one sample, is another."""

        def __init__(self, dataset: Any) -> None:
            self.dataset = dataset

        def __len__(self) -> int:
            return len(self.dataset)

        def __getitem__(self, number: int) -> Any:
            image, label = self.dataset[number]
            return image, label + (number == 7)

    real = STORES["ImageFolder"]
    changed = real._replace(open=lambda base: Changed(real.open(base)))
    monkeypatch.setitem(STORES, "ImageFolder", changed)
    found = equal.Comparison(base, batch_size=3, size=16).of("ImageFolder", "local", str(base), {})
    assert not any(found.equal[:2])
    assert not found.good
    absent = real._replace(open=lambda base: gl.ImageFolder(base + "/nowhere"))
    monkeypatch.setitem(STORES, "ImageFolder", absent)
    found = equal.Comparison(base, batch_size=3, size=16).of("ImageFolder", "local", str(base), {})
    assert "FileNotFoundError" in found.error
    assert not found.good


def one_round(**rates: float) -> dict[str, Any]:
    return {
        name: {"raw, random": {"cold": None, "warm": {"images_per_s": rate, "cpu_us": 1, "disk_mb": 0}}}
        for name, rate in rates.items()
    }


@pytest.mark.parametrize(("own", "met"), [(199, False), (200, True)])
def test_the_fastest_of_others_is_the_measure(own: float, met: bool) -> None:
    """A machine half as fast in the second round changes nothing."""
    rounds = [one_round(TarShards=own, LitData=200, WebDataset=100)] * 2 + [one_round(TarShards=own / 2, LitData=100)]
    (verdict,) = judge(rounds, ["LitData", "WebDataset", "Mosaic Streaming"])
    assert verdict.met == met
    assert verdict.text.endswith(f"{own / 200:.2f} times the fastest other (LitData)")


@pytest.mark.parametrize(("own", "met"), [(79, False), (80, True)])
def test_arrays_are_measured_by_memcpy(own: float, met: bool) -> None:
    (verdict,) = judge([one_round(ArrayFile=own, memcpy=100)], [])
    assert (verdict.met, verdict.text) == (met, f"ArrayFile, random, warm: at least 80% of memcpy: {own}%")


@pytest.mark.processes
def test_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also that a reader whose package is absent says so, and fails nothing."""
    photos = tmp_path / "photos"
    photos.mkdir()
    for number, data in enumerate(jpegs()[:4]):
        (photos / f"{number}.jpg").write_bytes(data)
    asked = ["--photos", str(photos), "--cache", str(tmp_path / "cache"), "--files", "10", "--quick"]
    assert rates.main([*asked, "--only", "TarShards; ArrayFile; memcpy; Mosaic Streaming"]) == 0
    told = capsys.readouterr().out
    rows = {line.split("  ")[0]: line for line in told.splitlines() if "  " in line}
    assert rows["Mosaic Streaming"].count("not installed") == 4
    assert all(rows[name].count("(") == 4 for name in ("TarShards", "ArrayFile", "memcpy"))
    assert "of memcpy" in told
