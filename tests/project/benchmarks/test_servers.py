"""Datasets on real servers, if installed: nginx for HTTP, rclone for S3."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch
from helpers import lacking
from helpers.jpeg_dataset import jpegs
from helpers.tar_files import archive

import gpuload as gl
from benchmarks.servers import serve_folder
from gpuload import transforms as T

pytestmark = pytest.mark.processes


def load_batches(dataset: gl.TarShards | gl.ImageFolder, workers: int) -> list[torch.Tensor]:
    with gl.Loader(
        dataset, 4, shuffle=True, transforms=[T.RandomCrop(16)], num_workers=workers, device="cpu"
    ) as loader:
        return list(itertools.chain.from_iterable(loader))


def check_equal(tensors: list[torch.Tensor], expected_tensors: list[torch.Tensor]) -> None:
    for tensor, expected in zip(tensors, expected_tensors, strict=True):
        assert torch.equal(tensor, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["http", "s3"])
def test_datasets_on_a_server_equal_those_in_a_folder(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPULOAD_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "data"
    for number, data in enumerate(jpegs()):
        (root / "img" / f"class {number % 2}").mkdir(parents=True, exist_ok=True)
        (root / "img" / f"class {number % 2}" / f"{number:03d}.jpg").write_bytes(data)
    archive(
        root / "x.tar",
        [(f"{n}.{end}", data) for n, image in enumerate(jpegs()) for end, data in (("jpg", image), ("cls", b"1"))],
    )
    with serve_folder(root) as server_addresses:
        if kind not in server_addresses:
            lacking.skip("a server", kind)
        url, options = server_addresses[kind]
        lacking.require("s3fs" if kind == "s3" else "aiohttp")
        options = gl.Remote(options, cache_bytes=1 << 20, cache_folder=tmp_path / "blocks")
        local = gl.ImageFolder(root / "img")
        remote = gl.ImageFolder(f"{url}/img", storage_options=options)
        assert remote.classes == local.classes
        expected = load_batches(local, 0)
        for workers in (0, 2):
            check_equal(load_batches(remote, workers), expected)
        archives = gl.TarShards(f"{url}/*.tar", fields=("jpg", "cls"), storage_options=options)
        local_archives = gl.TarShards(root / "x.tar", fields=("jpg", "cls"))
        check_equal(load_batches(archives, 0), load_batches(local_archives, 0))
        with pytest.raises(FileNotFoundError, match="the file does not exist"):
            gl.read(f"{url}/none.jpg", storage_options=options)
        if kind == "s3":
            wrong_options = {**server_addresses[kind][1], "secret": "another"}
            with pytest.raises(PermissionError, match="permission denied"):
                gl.read(f"{url}/img/class 0/000.jpg", storage_options=wrong_options)
    assert os.path.exists(tmp_path / "blocks")
