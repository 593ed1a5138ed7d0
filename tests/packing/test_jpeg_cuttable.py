from __future__ import annotations

import io
import shutil
from pathlib import Path

import lacking
import numpy as np
import pytest
from cuts import always
from pictures import encode
from PIL import Image
from restarts import header_of

from gpuload.datasets.sample import Encoded
from gpuload.decode import Decode, Decoder
from gpuload.decode.cut import cut, is_cuttable
from gpuload.errors import GpuloadError
from gpuload.packing.jpeg_cuttable import make_cuttable

needs_jpegtran = lacking.mark("jpegtran", shutil.which("jpegtran") is None)


def grains(height: int, width: int) -> np.ndarray:
    """Less than noise, which Pillow does not write with tables of its own."""
    noise = np.random.default_rng(0).integers(0, 256, (height // 2, width // 2, 3), np.uint8)
    return np.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC))


def whole(jpeg: bytes) -> np.ndarray:
    decoder = Decoder(Decode())
    return decoder.decode(Encoded(jpeg), decoder.header(Encoded(jpeg)))


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A program of the name jpegtran, the only one on PATH."""
    program = folder / "jpegtran"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.processes
@pytest.mark.parametrize(
    "options",
    [
        {"subsampling": 0},
        {"subsampling": 2},
        {"mode": "L"},
        {"optimize": True},
        pytest.param({"progressive": True}, marks=needs_jpegtran),
        pytest.param({"restart_marker_blocks": 3}, marks=needs_jpegtran),
    ],
)
def test_pixels_and_metadata_stay_as_they_are(options):
    noise = grains(240, 320)
    exif = Image.Exif()
    exif[0x0112] = 6
    jpeg = encode(noise, "JPEG", quality=70, exif=exif, icc_profile=b"an ICC profile", comment=b"a comment", **options)
    made = make_cuttable(jpeg + b"another picture")
    assert is_cuttable(made, header_of(made))
    with always:
        assert cut(made, header_of(made), (100, 100, 60, 60)) is not None
    np.testing.assert_array_equal(whole(made), whole(jpeg))
    with Image.open(io.BytesIO(made)) as image:
        assert image.getexif()[0x0112] == 6
        assert image.info["icc_profile"] == b"an ICC profile"
        assert image.info["comment"] == b"a comment"
    assert make_cuttable(made) == made


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
def test_what_cannot_be_made_cuttable_is_kept(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, "exit 1")
    noise, picture = grains(320, 240), grains(84, 122)
    progressive = encode(noise, "JPEG", progressive=True)
    sound = encode(noise, "JPEG")
    middle = header_of(sound).first_scan + 900
    files = {
        "nothing": b"",
        "no image": b"neither a JPEG nor another image",
        "PNG": encode(picture, "PNG"),
        "CMYK": encode(noise, "JPEG", mode="CMYK"),
        "too small": encode(picture, "JPEG"),
        "its header alone": sound[:200],
        "cut off": sound[:-400],
        "a marker": sound[:middle] + b"\xff\xd3" + sound[middle:],
        "zeros": sound[:middle] + bytes(300) + sound[-2:],
        "bytes too many": sound[:-2] + b"abc" + sound[-2:],
        "bytes too few": sound[:-12] + sound[-2:],
        "incomplete progressive": progressive[: progressive.rindex(b"\xff\xda")] + b"\xff\xd9",
        "cuttable by markers": encode(picture, "JPEG", restart_marker_blocks=2),
        "cuttable": make_cuttable(sound),
    }
    for name, data in files.items():
        assert make_cuttable(data) == data, name
    assert make_cuttable(sound) != sound


@pytest.mark.processes
@pytest.mark.parametrize(
    "script",
    [
        "/bin/cat sound; exit 2",
        "/bin/cat sound; echo Premature end >&2",
        "/bin/cat",
        "echo else",
        "/bin/cat other",
    ],
)
def test_what_jpegtran_complains_about_is_kept(tmp_path, monkeypatch, script):
    noise = grains(320, 240)
    jpeg = encode(noise, "JPEG", progressive=True)
    (tmp_path / "sound").write_bytes(encode(noise, "JPEG"))
    (tmp_path / "other").write_bytes(encode(noise[1:], "JPEG"))
    stand_in(tmp_path, monkeypatch, f"cd {tmp_path}\n{script}")
    assert make_cuttable(jpeg) == jpeg
    stand_in(tmp_path, monkeypatch, f"cd {tmp_path}\n/bin/cat sound")
    assert make_cuttable(jpeg) == make_cuttable(encode(noise, "JPEG"))


def test_an_index_that_does_not_fit_is_made_anew():
    noise = grains(320, 240)
    jpeg = encode(noise, "JPEG", comment=b"a comment")
    made = make_cuttable(jpeg)
    at = header_of(made).index_at
    damaged = made[: at + 900] + bytes((made[at + 900] ^ 1,)) + made[at + 901 :]
    assert not is_cuttable(damaged, header_of(damaged))
    assert make_cuttable(damaged) == made


def test_the_error_names_the_package_that_is_missing(tmp_path, monkeypatch):
    """Only where it is needed."""
    monkeypatch.setenv("PATH", str(tmp_path))
    noise = grains(320, 240)
    made = make_cuttable(encode(noise, "JPEG"))
    assert is_cuttable(made, header_of(made))
    with pytest.raises(GpuloadError, match=r"needs the program jpegtran, .* libjpeg-turbo-progs \(Debian, Ubuntu\)"):
        make_cuttable(encode(noise, "JPEG", progressive=True))
