"""``gpuload bench``: rates, the verdict by rates as machines have them, the comparison, and the command."""

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


def setting(workers: int, prefetch: int, images_per_s: float, better: tuple[int, int] | None = None) -> Row:
    where = f"{workers} workers, prefetch {prefetch}"
    options: dict[str, Any] = {"num_workers": workers, "prefetch_factor": prefetch, "images_per_s": images_per_s}
    return Row(name="Loader", where=where, suggested_setting=better, **options)


def test_the_images_of_a_batch_are_found() -> None:
    images, labels = torch.zeros(4, 3, 8, 8), torch.zeros(4)
    for batch in (images, (images, labels), {"cls": labels, "jpg": images}, [labels, [images, images]]):
        assert images_of(batch) is images
    assert images_of({"cls": labels, "text": ["a"]}) is labels
    with pytest.raises(ValueError, match="a batch has no tensors; it is a list"):
        images_of(["a", "b"])


def test_one_epoch_comes_after_the_other() -> None:
    batches = repeat_epochs([torch.zeros(1), torch.zeros(2)])
    assert [len(next(batches)) for _ in range(5)] == [1, 2, 1, 2, 1]
    for empty in ([], [torch.zeros(0, 3, 4, 4)]):
        with pytest.raises(
            ValueError, match="an epoch has no images: no sample can be loaded; run gpuload inspect to see why"
        ):
            list(repeat_epochs(empty))


def test_the_first_steps_do_not_count() -> None:
    taken: list[int] = []

    def batches() -> Iterator[torch.Tensor]:
        while True:
            taken.append(1)
            yield torch.zeros(8, 3, 4, 4)

    bench = Bench(dataset=[], transforms=[], batch_size=8, device=CPU, seconds=0.0)
    row = bench.measure(Row(name="Loader", num_workers=3), batches(), skip=3)
    assert (len(taken), row.name, row.num_workers, row.image_bytes) == (4, "Loader", 3, None)
    assert row.images_per_s > 0
    assert (row.cpu_s_per_1000 or 0) >= 0


# -- the verdict ------------------------------------------------------------------------------------------------------


def stats(read_s: float, decode_s: float, stage_s: float, where: Any = "main", workers: Any = "workers") -> gl.Stats:
    """Of 1,000 images: the seconds of all workers for reading and decoding, and of a device or the main process."""
    parts = (
        Part("read", workers, read_s, 1000),
        Part("header", workers, decode_s / 4, 1000),
        Part("decode", workers, decode_s * 3 / 4, 1000),
        Part("stage", where, stage_s, 10),
    )
    decoded = DecodeStats(read_bytes=130_000_000, bytes=500_000_000)
    return gl.Stats(images=1000, batches=10, parts=parts, decode=decoded)


@pytest.mark.parametrize(
    ("figures", "device", "rates", "name", "why"),
    [
        ((0.1, 1.9, 0.2), "cpu", (20_000, 1_053, 5_000), "decoding",
         "decoding is the bottleneck: with 2 workers, reading and decoding alone would reach 1,000 images/s, "
         "augmenting alone 5,000"),
        ((1.9, 0.1, 0.2), "cpu", (1_053, 20_000, 5_000), "reading",
         "reading is the bottleneck: with 2 workers, reading and decoding alone would reach 1,000 images/s, "
         "augmenting alone 5,000"),
        ((0.1, 1.9, 2.5), "cpu", (20_000, 1_053, 400), "augmenting",
         "augmenting is the bottleneck: with 2 workers, reading and decoding alone would reach 1,000 images/s, "
         "augmenting alone 400"),
        ((0.1, 1.9, 0.2), "cuda", (20_000, 1_053, 5_000), "decoding", "decoding is the bottleneck: with 2 workers, "),
    ],
)  # fmt: skip
def test_the_slowest_part_is_the_bottleneck(
    figures: Any, device: str, rates: tuple[int, ...], name: str, why: str
) -> None:
    row = replace(setting(2, 2, 900), stats=stats(*figures, where="main" if device == "cpu" else "device"))
    parts = part_rows(row, torch.device(device))
    assert tuple(round(part.images_per_s) for part in parts) == rates
    assert [part.where for part in parts] == ["2 workers", "2 workers", device.upper()]
    assert [part.image_bytes for part in parts] == [130_000, 500_000, None]
    found = find_bottleneck(row, parts)
    assert found[0] == name
    assert found[1].startswith(why)


def test_parts_of_a_loader_without_workers() -> None:
    row = replace(setting(0, 2, 900), stats=stats(0.1, 0.9, 0.2, workers="main"))
    parts = part_rows(row, CPU)
    assert [(part.where, round(part.images_per_s)) for part in parts] == [
        ("this process", 10_000), ("this process", 1_111), ("CPU", 5_000),
    ]  # fmt: skip
    assert find_bottleneck(row, parts)[1].startswith(
        "decoding is the bottleneck: reading and decoding alone would reach 1,000 "
    )


def test_parts_that_take_no_time_are_left_out() -> None:
    row = replace(setting(0, 2, 900), stats=stats(0.0, 0.9, 0.0, workers="main"))  # arrays that are in memory
    parts = part_rows(row, CPU)
    assert [part.name for part in parts] == ["decode"]
    assert find_bottleneck(row, parts) == (
        "decoding", "decoding is the bottleneck: reading and decoding would reach 1,111 images/s"
    )  # fmt: skip
    alone = replace(setting(2, 2, 900), stats=stats(0.0, 0.0, 0.2))
    assert (
        find_bottleneck(alone, part_rows(alone, CPU))[1]
        == "augmenting is the bottleneck: with 2 workers, augmenting alone 5,000"
    )
    none = replace(setting(2, 2, 900), stats=gl.Stats())
    assert (part_rows(none, CPU), find_bottleneck(none, [])) == ([], ("", ""))


def test_the_fewest_workers_that_are_nearly_as_fast_are_recommended() -> None:
    settings = [setting(1, 2, 500), setting(4, 2, 985), setting(8, 2, 1000), setting(4, 4, 990)]
    assert recommend(settings) is settings[1]
    assert recommend([setting(4, 2, 900), setting(4, 4, 1000)]).prefetch_factor == 4


@pytest.mark.parametrize(
    ("better", "said"),
    [
        (None, ""),
        ((1, 4), ""),
        ((2, 2), "With 1 worker, loader.stats() may suggest 2 workers, but this is an estimate. "
                 "Measured: 2 workers load 879 images/s"),
        ((9, 2), "With 1 worker, loader.stats() may suggest 9 workers. That number "
                 "was not measured: try --workers 9"),
    ],
)  # fmt: skip
def test_what_was_measured_goes_before_what_the_statistics_reckon(better: tuple[int, int] | None, said: str) -> None:
    settings = [setting(1, 2, 956, better), setting(2, 2, 879, (4, 2)), setting(3, 2, 431)]
    assert recommend(settings) is settings[0]
    assert explain_suggestion(settings[0], settings) == said


@pytest.mark.parametrize(("cpus", "tried"), [(1, [1, 2]), (2, [1, 2, 3]), (8, [1, 4, 7, 8, 12])])
def test_numbers_of_workers_around_the_cpus_are_tried(cpus: int, tried: list[int]) -> None:
    assert worker_counts(cpus, max(1, cpus - 1)) == tried


def test_rows_as_json() -> None:
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


class Waits:
    """A machine with two CPUs, where each worker waits for a disk nearly all the time, up to 40 of them at once."""

    def __init__(self) -> None:
        self.tried: list[tuple[int, int]] = []

    def measure_setting(self, name: str, workers: int, prefetch: int) -> Row:
        self.tried.append((workers, prefetch))
        if workers > 40:
            raise LimitError("too few open files")
        return setting(workers, prefetch, 45.0 * workers, (4 * workers, max(2, workers // 2)))


def test_the_setting_that_stats_names_is_tried() -> None:
    bench, done, remarks = Waits(), [], []
    rows = measure_settings(cast(Bench, bench), [1, 2, 3], lambda row: done.append(row) or row, remarks.append)
    assert bench.tried == [(1, 2), (2, 2), (3, 2), (12, 2), (48, 6), (12, 4)]
    assert remarks == ["too few open files"]
    assert done == rows
    assert rows[-1].num_workers == 12


def test_a_number_that_was_asked_for_is_measured_alone() -> None:
    bench = Waits()
    measure_settings(cast(Bench, bench), [3], lambda row: row, lambda remark: None)
    assert bench.tried == [(3, 2), (3, 4)]
    with pytest.raises(LimitError):
        measure_settings(cast(Bench, bench), [50], lambda row: row, lambda remark: None)


# -- beside the DataLoader --------------------------------------------------------------------------------------------


def test_medians_and_ratios_within_rounds() -> None:
    mine = [rate(1000, 1.0), rate(500, 2.0), rate(900, 1.2)]
    peer = [rate(400, 3.0), rate(250, 6.0), rate(300, 3.0)]
    assert medians(list(zip(mine, peer, strict=True))) == {
        "images_per_s": 900, "peer_images_per_s": 300, "rate_ratio": 2.5,
        "cpu_s_per_1000": 1.2, "peer_cpu_s_per_1000": 3.0, "cpu_ratio": 3.0,
    }  # fmt: skip
    assert medians([(rate(1), rate(1))])["cpu_ratio"] == 0
    assert medians([(rate(1), rate(1, 2.0))])["cpu_ratio"] == 1


def test_the_comparison_is_a_table() -> None:
    peer = Row(name="DataLoader", images_per_s=0, num_workers=2)
    table = comparison_table(setting(1, 2, 0), peer, [(rate(1000, 1), rate(400, 3))])
    cells = [list(column.cells) for column in table.columns]
    assert cells == [["images/s", "CPU s per 1,000 images"], ["1,000", "1.00"], ["400", "3.00"], ["2.50", "3.00"]]
    assert [str(column.header) for column in table.columns][1:] == [
        "gpuload,\n1 worker",
        "DataLoader,\n2 workers",
        "ratio",
    ]


# -- the command ------------------------------------------------------------------------------------------------------


def bench(*arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["bench", *map(str, arguments), "--device", "cpu", "--seconds", "0.1"])
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.processes
def test_a_damaged_file_is_counted_once_and_left_out_on_both_sides(
    jpeg_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuload.cli.bench.usable_cpus", lambda: 1)
    data = Path(shutil.copytree(jpeg_folder, tmp_path / "data"))
    for path in sorted(data.glob("*/*.jpg"))[:2]:
        path.write_bytes(path.read_bytes()[:100])
    path = tmp_path / "bench.json"
    options = ["--workers", "1", "--batch-size", "8", "--rounds", "2", "--json", path]
    status, out, told = bench(data, *options)
    assert (status, told) == (0, ""), out
    found = json.loads(path.read_text())
    assert found["failed"] == 2
    assert [(row["num_workers"], row["prefetch_factor"]) for row in found["settings"]] == [(1, 2), (1, 4)]
    assert (found["peer"]["decoder"][:12], len(found["peer"]["rounds"])) == ("simplejpeg 1", 2)
    assert found["peer"]["rate_ratio"] > 0
    assert [row["name"] for row in found["peer"]["settings"]] == ["DataLoader"]
    for text in (
        "The DataLoader does the same work with simplejpeg 1.",
        "7 of 7 measurements, DataLoader, 1 worker: ",
        f"\n2 samples cannot be loaded, and were skipped; find them with gpuload inspect {data}\n",
        "CPU s per 1,000 images",
    ):
        assert text in out, out
    assert re.search(r"DataLoader,\s+head to head +1 worker +1 worker +ratio", out)


@pytest.mark.slow
@pytest.mark.processes
def test_a_recipe_is_measured_alone(jpeg_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuload.cli.bench.usable_cpus", lambda: 1)
    (tmp_path / "recipe.py").write_text(
        "from gpuload import transforms as T\ntrain = [T.RandomResizedCrop(24), T.ToDtype('float32', True)]\n"
    )
    recipe = f"{tmp_path}/recipe.py:train"
    status, out, told = bench(jpeg_folder, "--recipe", recipe, "--batch-size", 16, "--json", "-")
    assert status == 0, told
    found = json.loads(out)
    assert [part["name"] for part in found["parts"]] == ["read", "decode", "augment"]
    assert all(part["images_per_s"] > 0 for part in found["parts"])
    sizes = [path.stat().st_size for path in jpeg_folder.glob("*/*.jpg")]
    assert found["parts"][0]["image_bytes"] == pytest.approx(sum(sizes) / len(sizes), rel=0.5)
    assert [(row["num_workers"], row["prefetch_factor"]) for row in found["settings"]][:2] == [(1, 2), (2, 2)]
    assert found["recommended"]["num_workers"] in (1, 2)
    assert found["bound"] in ("reading", "decoding", "augmenting")
    assert (found["images"], found["batch_size"], found["recipe"], found["failed"]) == (48, 16, recipe, 0)
    assert "peer" not in found
    for text in (
        "ImageFolder(", f"batches of 16, {recipe}", "it supports only the default recipe",
        "3 of 3 measurements", "Recommended: num_workers=",
    ):  # fmt: skip
        assert text in told


def test_data_of_which_nothing_can_be_loaded_is_an_error(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.jpg").write_bytes(b"nothing")
    status, _, told = bench(tmp_path, "--workers", "0")
    assert status == 1
    assert "could not be replaced: all substitutes failed" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "'nowhere' does not exist; expected a folder of images, shards, or a file of a store"),
        (["{root}/a.zip"], "is unknown: expected a folder of images, or a name that ends in .tar"),
        (["{root}/one", "--fields", "jpg"], "--fields applies to TarShards"),
    ],
)
def test_what_cannot_be_measured(tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "a.zip").touch()
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.jpg").write_bytes(jpeg_bytes(smooth_image(40, 40, 0)))
    status, out, told = bench(*(argument.format(root=tmp_path) for argument in arguments))
    assert (status, out if "ImageFiles" not in out else "") == (1, "")
    assert said in told
    assert "Traceback" not in told
