"""``gpuload bench``: rates, the bottleneck, the recommended setting, the comparison, and the command."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from helpers.generated_images import jpeg_bytes, smooth_image
from typer.testing import CliRunner

import gpuload as gl
from gpuload.cli.app import app
from gpuload.cli.bench import (
    Bench,
    Row,
    comparison_table,
    explain_suggestion,
    find_bottleneck,
    images_of,
    measure_settings,
    medians,
    part_rows,
    recommend,
    repeat_epochs,
    worker_counts,
)
from gpuload.errors import LimitError
from gpuload.loader.stats import DecodeStats, Part

CPU = torch.device("cpu")


def rate(images_per_s: float, cpu_s_per_1000: float = 0.0) -> Row:
    return Row(images_per_s=images_per_s, cpu_s_per_1000=cpu_s_per_1000)


def setting(workers: int, prefetch: int, images_per_s: float, suggested: tuple[int, int] | None = None) -> Row:
    where = f"{workers} workers, prefetch {prefetch}"
    options: dict[str, Any] = {"num_workers": workers, "prefetch_factor": prefetch, "images_per_s": images_per_s}
    return Row(name="Loader", where=where, suggested_setting=suggested, **options)


def test_images_of_finds_the_first_image_tensor_of_a_batch() -> None:
    images, labels = torch.zeros(4, 3, 8, 8), torch.zeros(4)
    for batch in (images, (images, labels), {"cls": labels, "jpg": images}, [labels, [images, images]]):
        assert images_of(batch) is images
    assert images_of({"cls": labels, "text": ["a"]}) is labels
    with pytest.raises(ValueError, match="a batch has no tensors; it is a list"):
        images_of(["a", "b"])


def test_repeat_epochs_continues_with_the_next_epoch_and_refuses_empty_ones() -> None:
    batches = repeat_epochs([torch.zeros(1), torch.zeros(2)])
    assert [len(next(batches)) for _ in range(5)] == [1, 2, 1, 2, 1]
    for epoch in ([], [torch.zeros(0, 3, 4, 4)]):
        with pytest.raises(ValueError, match="an epoch has no images: no sample can be loaded; run gpuload inspect"):
            list(repeat_epochs(epoch))


def test_measure_skips_the_first_batches() -> None:
    requests: list[int] = []

    def batches() -> Iterator[torch.Tensor]:
        while True:
            requests.append(1)
            yield torch.zeros(8, 3, 4, 4)

    bench = Bench(dataset=[], transforms=[], batch_size=8, device=CPU, seconds=0.0)
    row = bench.measure(Row(name="Loader", num_workers=3), batches(), skip=3)
    assert (len(requests), row.name, row.num_workers, row.image_bytes) == (4, "Loader", 3, None)
    assert row.images_per_s > 0
    assert row.cpu_s_per_1000 is not None


# -- the verdict ------------------------------------------------------------------------------------------------------


def stats(read_s: float, decode_s: float, stage_s: float, read_in: Any = "workers", stage_in: Any = "main") -> gl.Stats:
    """Make statistics of 1,000 images from the seconds of each part, and from the processes or device that did it."""
    parts = (
        Part("read", read_in, read_s, 1000),
        Part("header", read_in, decode_s / 4, 1000),
        Part("decode", read_in, decode_s * 3 / 4, 1000),
        Part("stage", stage_in, stage_s, 10),
    )
    decoded = DecodeStats(read_bytes=130_000_000, bytes=500_000_000)
    return gl.Stats(images=1000, batches=10, parts=parts, decode=decoded)


@pytest.mark.parametrize(
    ("seconds", "workers", "device", "rates", "name"),
    [
        ((0.1, 1.9, 0.2), 2, "cpu", (20_000, 1_053, 5_000), "decoding"),
        ((1.9, 0.1, 0.2), 2, "cpu", (1_053, 20_000, 5_000), "reading"),
        ((0.1, 1.9, 2.5), 2, "cpu", (20_000, 1_053, 400), "augmenting"),
        ((0.1, 1.9, 0.2), 2, "cuda", (20_000, 1_053, 5_000), "decoding"),
        ((0.1, 0.9, 0.2), 0, "cpu", (10_000, 1_111, 5_000), "decoding"),
    ],
)
def test_find_bottleneck_returns_the_slowest_part(
    seconds: Any, workers: int, device: str, rates: tuple[int, ...], name: str
) -> None:
    where = {"read_in": "workers" if workers else "main", "stage_in": "main" if device == "cpu" else "device"}
    row = replace(setting(workers, 2, 900), stats=stats(*seconds, **where))
    parts = part_rows(row, torch.device(device))
    assert tuple(round(part.images_per_s) for part in parts) == rates
    assert [part.where for part in parts] == ["2 workers" if workers else "this process"] * 2 + [device.upper()]
    assert [part.image_bytes for part in parts] == [130_000, 500_000, None]
    bottleneck, text = find_bottleneck(row, parts)
    assert bottleneck == name
    with_workers = "with 2 workers, " if workers else ""
    assert text.startswith(f"{name} is the bottleneck: {with_workers}reading and decoding alone would reach 1,000 ")
    assert f"augmenting alone {rates[2]:,}" in text


def test_part_rows_drop_parts_that_take_no_time() -> None:
    row = replace(setting(0, 2, 900), stats=stats(0.0, 0.9, 0.0, read_in="main"))  # arrays that are in memory
    parts = part_rows(row, CPU)
    assert [part.name for part in parts] == ["decode"]
    assert find_bottleneck(row, parts) == (
        "decoding", "decoding is the bottleneck: reading and decoding would reach 1,111 images/s"
    )  # fmt: skip
    stage_only = replace(setting(2, 2, 900), stats=stats(0.0, 0.0, 0.2))
    _, text = find_bottleneck(stage_only, part_rows(stage_only, CPU))
    assert text == "augmenting is the bottleneck: with 2 workers, augmenting alone 5,000"
    empty = replace(setting(2, 2, 900), stats=gl.Stats())
    assert (part_rows(empty, CPU), find_bottleneck(empty, [])) == ([], ("", ""))


def test_recommend_takes_the_fewest_workers_that_are_nearly_as_fast() -> None:
    settings = [setting(1, 2, 500), setting(4, 2, 985), setting(8, 2, 1000), setting(4, 4, 990)]
    assert recommend(settings) is settings[1]
    assert recommend([setting(4, 2, 900), setting(4, 4, 1000)]).prefetch_factor == 4


@pytest.mark.parametrize(
    ("suggested", "message"),
    [
        (None, ""),
        ((1, 4), ""),
        ((2, 2), "With 1 worker, loader.stats() may suggest 2 workers, but this is an estimate. "
                 "Measured: 2 workers load 879 images/s"),
        ((9, 2), "With 1 worker, loader.stats() may suggest 9 workers. That number "
                 "was not measured: try --workers 9"),
    ],
)  # fmt: skip
def test_explain_suggestion_puts_measurements_before_estimates(suggested: tuple[int, int] | None, message: str) -> None:
    settings = [setting(1, 2, 956, suggested), setting(2, 2, 879, (4, 2)), setting(3, 2, 431)]
    assert recommend(settings) is settings[0]
    assert explain_suggestion(settings[0], settings) == message


@pytest.mark.parametrize(("cpus", "counts"), [(1, [1, 2]), (2, [1, 2, 3]), (8, [1, 4, 7, 8, 12])])
def test_worker_counts_are_around_the_number_of_cpus(cpus: int, counts: list[int]) -> None:
    assert worker_counts(cpus, max(1, cpus - 1)) == counts


def test_row_as_dict_drops_empty_fields() -> None:
    read = Row(name="read", where="1 worker", images_per_s=1000, cpu_s_per_1000=0.1, image_bytes=130_000)
    assert read.as_dict() == {
        "name": "read", "where": "1 worker", "images_per_s": 1000, "cpu_s_per_1000": 0.1, "image_bytes": 130_000,
        "mb_per_s": 130,
    }  # fmt: skip
    assert rate(1000).mb_per_s is None
    loader = Row(name="Loader", where="0 workers", images_per_s=500, prefetch_factor=2, stats=gl.Stats())
    assert loader.as_dict() == {
        "name": "Loader", "where": "0 workers", "images_per_s": 500, "num_workers": 0, "prefetch_factor": 2,
    }  # fmt: skip


class BenchOfWaitingWorkers:
    """A machine with two CPUs, whose workers wait for a disk nearly all the time; at most 40 workers can be started."""

    def __init__(self) -> None:
        self.tried: list[tuple[int, int]] = []

    def measure_setting(self, name: str, workers: int, prefetch: int) -> Row:
        self.tried.append((workers, prefetch))
        if workers > 40:
            raise LimitError("too few open files")
        return setting(workers, prefetch, 45.0 * workers, (4 * workers, max(2, workers // 2)))


def test_measure_settings_tries_the_setting_that_stats_suggest() -> None:
    bench, measured, remarks = BenchOfWaitingWorkers(), [], []
    rows = measure_settings(cast(Bench, bench), [1, 2, 3], lambda row: measured.append(row) or row, remarks.append)
    assert bench.tried == [(1, 2), (2, 2), (3, 2), (12, 2), (48, 6), (12, 4)]
    assert remarks == ["too few open files"]
    assert measured == rows
    assert rows[-1].num_workers == 12


def test_measure_settings_of_one_count_tries_only_that_count() -> None:
    bench = BenchOfWaitingWorkers()
    measure_settings(cast(Bench, bench), [3], lambda row: row, lambda remark: None)
    assert bench.tried == [(3, 2), (3, 4)]
    with pytest.raises(LimitError):
        measure_settings(cast(Bench, bench), [50], lambda row: row, lambda remark: None)


# -- the comparison with the DataLoader -------------------------------------------------------------------------------


def test_medians_takes_ratios_within_rounds() -> None:
    gpuload_rows = [rate(1000, 1.0), rate(500, 2.0), rate(900, 1.2)]
    peer_rows = [rate(400, 3.0), rate(250, 6.0), rate(300, 3.0)]
    assert medians(list(zip(gpuload_rows, peer_rows, strict=True))) == {
        "images_per_s": 900, "peer_images_per_s": 300, "rate_ratio": 2.5,
        "cpu_s_per_1000": 1.2, "peer_cpu_s_per_1000": 3.0, "cpu_ratio": 3.0,
    }  # fmt: skip
    assert medians([(rate(1), rate(1))])["cpu_ratio"] == 0
    assert medians([(rate(1), rate(1, 2.0))])["cpu_ratio"] == 1


def test_comparison_table_has_a_column_per_loader_and_the_ratio() -> None:
    peer = Row(name="DataLoader", images_per_s=0, num_workers=2)
    table = comparison_table(setting(1, 2, 0), peer, [(rate(1000, 1), rate(400, 3))])
    cells = [list(column.cells) for column in table.columns]
    assert cells == [["images/s", "CPU s per 1,000 images"], ["1,000", "1.00"], ["400", "3.00"], ["2.50", "3.00"]]
    headers = [str(column.header) for column in table.columns]
    assert headers[1:] == ["gpuload,\n1 worker", "DataLoader,\n2 workers", "ratio"]


# -- the command ------------------------------------------------------------------------------------------------------


def run_bench(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["bench", *map(str, arguments), "--device", "cpu", "--seconds", "0.1"])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.slow
@pytest.mark.processes
def test_bench_skips_damaged_files_in_both_loaders_and_counts_them_once(
    jpeg_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuload.cli.bench.usable_cpus", lambda: 1)
    data = Path(shutil.copytree(jpeg_folder, tmp_path / "data"))
    for path in sorted(data.glob("*/*.jpg"))[:2]:
        path.write_bytes(path.read_bytes()[:100])
    path = tmp_path / "bench.json"
    options = ["--workers", "1", "--batch-size", "8", "--rounds", "2", "--json", path]
    status, stdout, stderr = run_bench(data, *options)
    assert (status, stderr) == (0, ""), stdout
    report = json.loads(path.read_text())
    assert report["failed"] == 2
    assert [(row["num_workers"], row["prefetch_factor"]) for row in report["settings"]] == [(1, 2), (1, 4)]
    assert (report["peer"]["decoder"][:12], len(report["peer"]["rounds"])) == ("simplejpeg 1", 2)
    assert report["peer"]["rate_ratio"] > 0
    assert [row["name"] for row in report["peer"]["settings"]] == ["DataLoader"]
    for text in (
        "The DataLoader does the same work with simplejpeg 1.",
        "7 of 7 measurements, DataLoader, 1 worker: ",
        f"\n2 samples cannot be loaded, and were skipped; find them with gpuload inspect {data}\n",
        "CPU s per 1,000 images",
    ):
        assert text in stdout, stdout
    assert re.search(r"DataLoader,\s+head to head +1 worker +1 worker +ratio", stdout)


@pytest.mark.slow
@pytest.mark.processes
def test_bench_of_a_recipe_measures_no_peer(jpeg_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuload.cli.bench.usable_cpus", lambda: 1)
    (tmp_path / "recipe.py").write_text(
        "from gpuload import transforms as T\ntrain = [T.RandomResizedCrop(24), T.ToDtype('float32', True)]\n"
    )
    recipe = f"{tmp_path}/recipe.py:train"
    status, stdout, stderr = run_bench(jpeg_folder, "--recipe", recipe, "--batch-size", 16, "--json", "-")
    assert status == 0, stderr
    report = json.loads(stdout)
    assert [part["name"] for part in report["parts"]] == ["read", "decode", "augment"]
    assert min(part["images_per_s"] for part in report["parts"]) > 0
    sizes = [path.stat().st_size for path in jpeg_folder.glob("*/*.jpg")]
    assert report["parts"][0]["image_bytes"] == pytest.approx(sum(sizes) / len(sizes), rel=0.5)
    assert [(row["num_workers"], row["prefetch_factor"]) for row in report["settings"]][:2] == [(1, 2), (2, 2)]
    assert report["recommended"]["num_workers"] in (1, 2)
    assert report["bound"] in ("reading", "decoding", "augmenting")
    assert (report["images"], report["batch_size"], report["recipe"], report["failed"]) == (48, 16, recipe, 0)
    assert "peer" not in report
    for text in (
        "ImageFolder(", f"batches of 16, {recipe}", "it supports only the default recipe",
        "3 of 3 measurements", "Recommended: num_workers=",
    ):  # fmt: skip
        assert text in stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "'nowhere' does not exist; expected a folder of images, shards, or a file of a store"),
        (["{root}/a.zip"], "is unknown: expected a folder of images, or a name that ends in .tar"),
        (["{root}/one", "--fields", "jpg"], "--fields applies to TarShards"),
        (["{root}/bad", "--workers", "0"], "could not be replaced: all substitutes failed"),
    ],
)
def test_bench_of_an_unreadable_source_or_with_wrong_options_fails(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "a.zip").touch()
    for folder, data in (("one", jpeg_bytes(smooth_image(40, 40, 0))), ("bad", b"nothing")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jpg").write_bytes(data)
    status, stdout, stderr = run_bench(*(argument.format(root=tmp_path) for argument in arguments))
    assert status == 1
    assert stdout == "" or "ImageFiles" in stdout  # the source, if it could be opened
    assert message in stderr
    assert "Traceback" not in stderr
