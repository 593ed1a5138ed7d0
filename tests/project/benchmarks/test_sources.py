"""The benchmarks of stores: comparisons of their batches, verdicts, and a short run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import lacking
from helpers.http_server import served
from helpers.jpeg_dataset import jpegs

import gpuload as gl
from benchmarks.sources import __main__ as benchmark
from benchmarks.sources import equal
from benchmarks.sources.__main__ import judge
from benchmarks.sources.stores import STORES, write

COUNT = 12
ALL_EQUAL = (True,) * len(equal.WAYS)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small photographs of three classes, and each store with the same photographs."""
    base = tmp_path_factory.mktemp("sources")
    for number, data in enumerate(jpegs()[:COUNT]):
        folder = base / "train" / f"class_{number // 4}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:05d}.jpg").write_bytes(data)
    write(base)
    return base


@pytest.mark.processes
@pytest.mark.parametrize("name", ["TarShards, stream", "Coco"])
def test_comparison_of_a_store_with_the_folder_is_equal(base: Path, name: str) -> None:
    comparison = equal.Comparison(base, batch_size=3, size=16).of(name, "local", str(base), {})
    assert (comparison.error, comparison.equal, comparison.batches, comparison.good) == ("", ALL_EQUAL, 4, True)


@pytest.mark.processes
def test_comparison_of_a_store_over_http_is_equal(base: Path) -> None:
    lacking.require("aiohttp")
    files = {str(path.relative_to(base)): path.read_bytes() for path in base.rglob("*") if path.is_file()}
    with served(files) as server:
        comparison = equal.Comparison(base, batch_size=3, size=16).of("TarShards", "http", server.url, {})
    assert (comparison.error, comparison.equal) == ("", ALL_EQUAL)


@pytest.mark.processes
def test_comparison_reports_changed_labels_and_errors(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ChangedLabel:
        """A dataset in which the label of sample 7 is changed."""

        def __init__(self, dataset: Any) -> None:
            self.dataset = dataset

        def __len__(self) -> int:
            return len(self.dataset)

        def __getitem__(self, number: int) -> Any:
            image, label = self.dataset[number]
            return image, label + (number == 7)

    original_store = STORES["ImageFolder"]
    changed_store = original_store._replace(open=lambda base: ChangedLabel(original_store.open(base)))
    monkeypatch.setitem(STORES, "ImageFolder", changed_store)
    comparison = equal.Comparison(base, batch_size=3, size=16).of("ImageFolder", "local", str(base), {})
    assert comparison.equal[:2] == (False, False)  # a resumed half may not contain sample 7
    assert not comparison.good
    absent_store = original_store._replace(open=lambda base: gl.ImageFolder(base + "/nowhere"))
    monkeypatch.setitem(STORES, "ImageFolder", absent_store)
    comparison = equal.Comparison(base, batch_size=3, size=16).of("ImageFolder", "local", str(base), {})
    assert "FileNotFoundError" in comparison.error
    assert not comparison.good


def one_round(**rates: float) -> dict[str, Any]:
    return {
        name: {"raw, random": {"cold": None, "warm": {"images_per_s": rate, "cpu_us": 1, "disk_mb": 0}}}
        for name, rate in rates.items()
    }


@pytest.mark.parametrize(("own_rate", "met"), [(199, False), (200, True)])
def test_judge_compares_with_the_fastest_peer(own_rate: float, met: bool) -> None:
    """The machine is half as fast in the last round."""
    rounds = [one_round(TarShards=own_rate, LitData=200, WebDataset=100)] * 2 + [
        one_round(TarShards=own_rate / 2, LitData=100)
    ]
    (verdict,) = judge(rounds, ["LitData", "WebDataset", "Mosaic Streaming"])
    assert verdict.met == met
    assert verdict.text.endswith(f"{own_rate / 200:.2f} times the fastest other (LitData)")


@pytest.mark.parametrize(("own_rate", "met"), [(79, False), (80, True)])
def test_judge_compares_arrays_with_memcpy(own_rate: float, met: bool) -> None:
    (verdict,) = judge([one_round(ArrayFile=own_rate, memcpy=100)], [])
    assert (verdict.met, verdict.text) == (met, f"ArrayFile, random, warm: at least 80% of memcpy: {own_rate}%")


@pytest.mark.processes
def test_sources_benchmark_runs_and_names_missing_packages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for number, data in enumerate(jpegs()[:4]):
        (photos / f"{number}.jpg").write_bytes(data)
    arguments = ["--photos", str(photos), "--cache", str(tmp_path / "cache"), "--files", "10", "--quick"]
    assert benchmark.main([*arguments, "--only", "TarShards; ArrayFile; memcpy; Mosaic Streaming"]) == 0
    output = capsys.readouterr().out
    rows = {line.split("  ")[0]: line for line in output.splitlines() if "  " in line}
    assert rows["Mosaic Streaming"].count("not installed") == 4
    for name in ("TarShards", "ArrayFile", "memcpy"):
        assert rows[name].count("(") == 4, rows[name]  # a rate (and CPU time) for each order, cold and warm
    assert "of memcpy" in output
