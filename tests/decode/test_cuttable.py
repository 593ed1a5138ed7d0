from __future__ import annotations

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from restarts import header_of

from gpuload.datasets.sample import Encoded
from gpuload.decode import Decode, Decoder
from gpuload.decode.cut import cut, find_intervals, grid_of
from gpuload.decode.cuttable import choose_interval, make_cuttable
from gpuload.errors import GpuloadError

needs_jpegtran = pytest.mark.skipif(shutil.which("jpegtran") is None, reason="jpegtran is not installed")


def whole(jpeg: bytes) -> np.ndarray:
    decoder = Decoder(Decode())
    return decoder.decode(Encoded(jpeg), decoder.header(Encoded(jpeg)))


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A program of the name jpegtran, the only one on PATH."""
    program = folder / "jpegtran"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.parametrize(
    ("width", "height", "sampling", "intervals"),
    [
        (500, 375, "4:4:4", {3, 7, 9}),
        (500, 375, "4:2:0", {2, 4, 8}),
        (376, 500, "4:4:4", {None}),
        (24, 24, "4:2:0", {None}),
    ],
)
def test_the_interval_divides_the_mcus_of_a_row(encode, width, height, sampling, intervals):
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    jpeg = encode(noise, "JPEG", quality=50, subsampling=sampling)
    assert choose_interval(jpeg, header_of(jpeg)) in intervals


def test_a_larger_picture_has_longer_intervals(encode):
    found = []
    for width in (192, 768, 3072):
        jpeg = encode(np.full((256, width, 3), 128, np.uint8), "JPEG", subsampling="4:4:4")
        jpeg = jpeg[:-2] + bytes(64 * width) + jpeg[-2:]  # of half a byte for a pixel
        found.append(choose_interval(jpeg, header_of(jpeg)))
    assert found == sorted(found)
    assert found[0] < found[-1]


@pytest.mark.processes
@needs_jpegtran
@pytest.mark.parametrize("options", [{"subsampling": 0}, {"subsampling": 2}, {"progressive": True}, {"mode": "L"}])
def test_pixels_and_metadata_stay_as_they_are(encode, options):
    noise = np.random.default_rng(0).integers(0, 256, (240, 320, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    jpeg = encode(noise, "JPEG", quality=70, exif=exif, icc_profile=b"an ICC profile", comment=b"a comment", **options)
    made = make_cuttable(jpeg)
    assert grid_of(made, header_of(made)).columns > 1
    assert find_intervals(made, header_of(made)) is not None
    assert cut(made, header_of(made), (100, 100, 60, 60)) is not None
    np.testing.assert_array_equal(whole(made), whole(jpeg))
    with Image.open(io.BytesIO(made)) as image:
        assert image.getexif()[0x0112] == 6
        assert image.info["icc_profile"] == b"an ICC profile"
        assert image.info["comment"] == b"a comment"
    assert make_cuttable(made) == made


@pytest.mark.processes
@needs_jpegtran
def test_crops_of_photographs_made_cuttable_are_those_of_the_originals(photos):
    rng, decoder, were_cut = np.random.default_rng(1), Decoder(Decode()), 0
    for path in photos[::16]:
        jpeg = path.read_bytes()
        made = make_cuttable(jpeg)
        header, made_header = (decoder.header(Encoded(data)) for data in (jpeg, made))
        for _ in range(4):
            height, width = (int(rng.integers(size // 4, size // 2)) for size in (header.height, header.width))
            top = int(rng.integers(header.height - height + 1))
            region = (top, int(rng.integers(header.width - width + 1)), height, width)
            were_cut += cut(made, made_header.jpeg, region) is not None
            np.testing.assert_array_equal(
                decoder.decode(Encoded(made), made_header, region), decoder.decode(Encoded(jpeg), header, region)
            )
    assert were_cut > 8


@pytest.mark.processes
def test_what_cannot_be_made_cuttable_is_kept(tmp_path, picture, encode, monkeypatch):
    (tmp_path / "cuttable").write_bytes(encode(picture, "JPEG", restart_marker_blocks=4))
    stand_in(tmp_path, monkeypatch, f"exec /bin/cat {tmp_path / 'cuttable'}")
    noise = np.random.default_rng(0).integers(0, 256, (64, 47 * 8, 3), np.uint8)
    progressive = encode(picture, "JPEG", progressive=True)
    files = {
        "nothing": b"",
        "no image": b"neither a JPEG nor another image",
        "PNG": encode(picture, "PNG"),
        "CMYK": encode(picture, "JPEG", mode="CMYK"),
        "47 MCUs in a row": encode(noise, "JPEG", subsampling=0),
        "its header alone": encode(picture, "JPEG")[:200],
        "incomplete progressive": progressive[: progressive.rindex(b"\xff\xda")] + b"\xff\xd9",
        "cuttable": encode(picture, "JPEG", restart_marker_blocks=2),
    }
    for name, data in files.items():
        assert make_cuttable(data) == data, name
    assert make_cuttable(encode(picture, "JPEG")) == (tmp_path / "cuttable").read_bytes()


@pytest.mark.processes
@pytest.mark.parametrize(
    "script",
    [
        "/bin/cat cuttable; exit 2",
        "/bin/cat cuttable; echo Premature end >&2",
        "/bin/cat",
        "echo else",
        "/bin/cat other",
    ],
)
def test_what_jpegtran_complains_about_is_kept(tmp_path, picture, encode, monkeypatch, script):
    jpeg = encode(picture, "JPEG")
    (tmp_path / "cuttable").write_bytes(encode(picture, "JPEG", restart_marker_blocks=4))
    (tmp_path / "other").write_bytes(encode(picture[1:], "JPEG", restart_marker_blocks=4))
    stand_in(tmp_path, monkeypatch, f"cd {tmp_path}\n{script}")
    assert make_cuttable(jpeg) == jpeg


@pytest.mark.processes
@needs_jpegtran
def test_a_damaged_jpeg_is_kept(picture, encode):
    jpeg = encode(picture, "JPEG")
    middle = header_of(jpeg).first_scan + 900
    for damaged in (jpeg[:-400], jpeg[:middle] + b"\xff\xd3" + jpeg[middle:], jpeg[:middle] + bytes(300) + jpeg[-2:]):
        assert make_cuttable(damaged) == damaged


def test_the_error_names_the_package_that_is_missing(tmp_path, picture, encode, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GpuloadError, match=r"needs the program jpegtran, .* libjpeg-turbo-progs \(Debian, Ubuntu\)"):
        make_cuttable(encode(picture, "JPEG"))
