"""``gpuload bench`` from end to end, on few small images."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from pictures import jpeg_bytes, smooth_image
from typer.testing import CliRunner

from gpuload.cli.app import app
from gpuload.loader import limits

PARTS = [("read", "1 worker"), ("decode", "1 worker"), ("augment", "CPU"), ("copy", "within memory")]


def bench(*arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["bench", *map(str, arguments), "--device", "cpu", "--seconds", "0.1"])
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.processes
def test_a_folder_is_measured(jpeg_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "usable_cpus", lambda: 1)
    (tmp_path / "recipe.py").write_text(
        "from gpuload import transforms as T\ntrain = [T.RandomResizedCrop(24), T.ToDtype('float32', True)]\n"
    )
    recipe, picture = f"{tmp_path}/recipe.py:train", tmp_path / "bench.png"
    options = ["--recipe", recipe, "--batch-size", 16, "--json", "-", "--plot", picture]
    status, out, told = bench(jpeg_folder, *options)
    assert status == 0, told
    found = json.loads(out)
    assert [(part["name"], part["where"]) for part in found["parts"]] == PARTS
    assert all(part["images_per_s"] > 0 and part["cpu_s_per_1000"] >= 0 for part in found["parts"])
    sizes = [path.stat().st_size for path in jpeg_folder.glob("*/*.jpg")]
    assert found["parts"][0]["image_bytes"] == pytest.approx(sum(sizes) / len(sizes), rel=0.2)
    assert [(one["num_workers"], one["prefetch_factor"]) for one in found["settings"]][:2] == [(1, 2), (2, 2)]
    assert found["recommended"]["num_workers"] in (1, 2)
    assert found["bound"] in ("reading", "decoding", "augmenting")
    assert (found["images"], found["batch_size"], found["recipe"]) == (48, 16, recipe)
    for text in ("ImageFolder(", f"batches of 16, {recipe}", "7 of 7 measurements", "Recommended: num_workers="):
        assert text in told
    assert max(map(len, told.splitlines()[5:-3])) <= 80 or len(recipe) > 60
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "'nowhere' does not exist; expected a folder of images, shards, or a file of a store"),
        (["{root}/a.zip"], "is of no kind that is known: expected a folder of images, or a name that ends in .tar"),
        (["{root}/empty"], "has no images"),
        (["{root}/one", "--recipe", "none.py:x"], "--recipe none.py:x: there is no file 'none.py'"),
        (["{root}/one", "--fields", "jpg"], "--fields is for TarShards"),
    ],
)
def test_what_cannot_be_measured(tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "a.zip").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.jpg").write_bytes(jpeg_bytes(smooth_image(40, 40, 0)))
    status, out, told = bench(*(argument.format(root=tmp_path) for argument in arguments))
    assert (status, out if "ImageFiles" not in out else "") == (1, "")
    assert said in told
    assert "Traceback" not in told


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    jpeg_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, told = bench(jpeg_folder, "--plot", "x.png")
    assert (status, out) == (1, "")
    assert told == "--plot needs matplotlib, which is not installed: pip install matplotlib\n"
