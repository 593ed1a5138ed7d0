"""The peer TurboLoader: its labels, and the work that it saves according to docs/performance.md."""

# pyright: reportMissingImports=false
from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from helpers import lacking
from helpers.generated_images import jpeg_bytes
from PIL import Image

from benchmarks.peers.protocol import Recipe

lacking.require("turboloader")

pytestmark = pytest.mark.slow


@pytest.fixture
def cpu_counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of CPUs to which the process would have been bound."""
    counts: list[int] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: counts.append(len(cpus)))
    return counts


def test_turboloader_peer_pairs_labels_with_images(tmp_path: Path, cpu_counts: list[int]) -> None:
    from benchmarks.peers.turboloader import turboloader as build

    for number in range(24):
        folder = tmp_path / "train" / f"class_{number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:02d}.jpg").write_bytes(jpeg_bytes(np.full((90, 120, 3), 40 + 60 * (number % 3), np.uint8)))
    peer = build(Recipe(root=str(tmp_path / "train"), batch_size=10, size=48, workers=1))
    orders = []
    for _ in range(2):
        batches = list(peer.epoch())
        assert [tuple(images.shape) for images, _ in batches] == [(10, 3, 48, 48)] * 2
        for images, labels in batches:
            levels = (images[:, 0].mean((1, 2)) * 0.229 + 0.485) * 255
            assert np.abs(levels.numpy() - (40 + 60 * labels.numpy())).max() < 3
        orders.append([label for _, labels in batches for label in labels.tolist()])
    assert orders[0] != orders[1], "both epochs have the same order"
    assert cpu_counts == [1]


def test_turboloader_peer_refuses_jitter(tmp_path: Path) -> None:
    from benchmarks.peers.turboloader import turboloader as build

    with pytest.raises(SystemExit, match="without jitter; got Recipe"):
        build(Recipe(root=str(tmp_path), jitter=0.4))


def test_turboloader_decodes_with_the_fast_dct() -> None:
    import simplejpeg
    import turboloader

    noise = np.random.default_rng(0).integers(0, 256, (120, 160, 3), np.uint8)
    data = jpeg_bytes(noise)
    decoded = turboloader.decode_jpeg(data)
    np.testing.assert_array_equal(decoded, simplejpeg.decode_jpeg(data, fastdct=True))
    assert np.abs(decoded.astype(int) - simplejpeg.decode_jpeg(data)).max() > 2


def test_turboloader_crops_from_an_image_decoded_at_half_size(tmp_path: Path) -> None:
    """A checkerboard of single pixels disappears at half the size, but an enlarged crop of the full size shows it."""
    import turboloader

    y, x = np.mgrid[0:512, 0:512]
    board = np.repeat(np.where((x + y) % 2, 228, 28).astype(np.uint8)[..., None], 3, 2)
    file = io.BytesIO()
    Image.fromarray(board).save(file, "JPEG", quality=100, subsampling="4:4:4")
    with tarfile.open(tmp_path / "boards.tar", "w") as archive:
        for number in range(32):
            member = tarfile.TarInfo(f"{number:02d}.jpg")
            member.size = len(file.getvalue())
            archive.addfile(member, io.BytesIO(file.getvalue()))
    options = {"batch_size": 32, "output_format": "pytorch", "train_aug": True, "antialias": True}
    contrast = {}
    for size in (224, 500):  # half the size is 256, which suffices for 224, but not for 500
        ((images, _),) = turboloader.DataLoader(str(tmp_path / "boards.tar"), image_size=size, **options)
        contrast[size] = 255 * images.std((1, 2, 3)).max()
    assert contrast[224] < 3
    assert contrast[500] > 15
