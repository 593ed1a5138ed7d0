"""Damaged files are refused if the damage reaches into the region, with the message of each decoder; and libraries
print nothing."""

from __future__ import annotations

import re

import numpy as np
import pytest
from helpers import lacking
from helpers.decoders import pillow_pixels
from helpers.programs import run_python
from PIL import ImageFile

from gpuload.datasets.sample import Encoded
from gpuload.decode import Decode, Decoder
from gpuload.decode.pillow_images import strict_pillow
from gpuload.errors import DecodeError


def decode(decoder: Decoder, data: bytes, region: tuple[int, int, int, int] | None = None) -> np.ndarray:
    encoded = Encoded(data)
    return decoder.decode(encoded, decoder.header(encoded), region)


def truncate(jpeg: bytes, fraction: float) -> bytes:
    """Keep the header and a fraction of the last scan."""
    scan = jpeg.rindex(b"\xff\xda")
    return jpeg[: scan + int((len(jpeg) - scan) * fraction)]


@pytest.mark.parametrize("options", [{"subsampling": 0}, {"subsampling": 2}, {"mode": "L"}, {"restart_marker_rows": 1}])
def test_truncated_jpeg_decodes_only_above_the_damage(decoder, picture, encode, options):
    jpeg = encode(picture, "JPEG", quality=90, **options)
    intact = decode(decoder, jpeg)
    truncated = truncate(jpeg, 0.6)
    intact_rows = 0
    for bottom in range(1, 84):
        region = (max(0, bottom - 7), 11, min(7, bottom), 90)
        try:
            pixels = decode(decoder, truncated, region)
        except DecodeError:
            break
        np.testing.assert_array_equal(pixels, intact[region[0] : bottom, 11:101])
        intact_rows = bottom
    assert 24 <= intact_rows <= 0.75 * 83  # of 83 rows; 60% of the scan is left
    for bottom in range(intact_rows + 1, 84):
        with pytest.raises(DecodeError, match="the damage extends into the needed rows of the file"):
            decode(decoder, truncated, (0, 0, bottom, 122))


def test_jpeg_filled_up_with_zeros_is_truncated(decoder, picture, encode):
    jpeg = encode(picture, "JPEG", quality=90)
    truncated = truncate(jpeg, 0.5)
    zeroed = truncated + bytes(len(jpeg) - len(truncated))
    np.testing.assert_array_equal(decode(decoder, zeroed, (0, 0, 16, 122)), decode(decoder, jpeg, (0, 0, 16, 122)))
    with pytest.raises(DecodeError, match="truncated"):
        decode(decoder, zeroed, (0, 0, 70, 122))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"subsampling": 0}, {"subsampling": 2}, {"mode": "L"}, {"restart_marker_rows": 1}])
@pytest.mark.parametrize("appended", [b"", b"junk without an end" * 3, bytes(60)], ids=["the end", "junk", "zeros"])
def test_marker_within_a_scan_is_refused_or_decoded_like_pillow(picture, encode, options, appended):
    """At a marker, libjpeg fills up the image with gray. Each marker is tried at some cuts, and some at each cut."""
    jpeg = encode(picture[:40, :24], "JPEG", quality=30, **options)
    decoder = Decoder(Decode())
    intact = decode(decoder, jpeg)
    top, height = 2, 13
    outcomes = {"refused": 0, "above the damage": 0, "as Pillow": 0}
    scan = jpeg.rindex(b"\xff\xda") + (10 if "mode" in options else 14)  # after the header of one or three components
    for length in range(scan, len(jpeg) - 2):
        for marker in range(1, 255) if length % 50 == 0 else (0x02, 0xC0 + length % 64):
            damaged = jpeg[:length] + bytes((0xFF, marker)) + appended
            try:
                expected = pillow_pixels(damaged)
            except (OSError, SyntaxError):
                expected = None
            if expected is not None:
                np.testing.assert_array_equal(decode(decoder, damaged), expected)
                outcomes["as Pillow"] += 1
                continue
            with pytest.raises(DecodeError, match=r"; Pillow: "):
                decode(decoder, damaged)
            try:
                pixels = decode(decoder, damaged, (top, 0, height, 24))
            except DecodeError:
                outcomes["refused"] += 1
                continue
            np.testing.assert_array_equal(pixels, intact[top : top + height])
            outcomes["above the damage"] += 1
    assert min(outcomes.values()) > 15, outcomes


@lacking.needs("nvidia.nvimgcodec")
def test_decode_error_quotes_each_decoder(picture, encode):
    truncated = truncate(encode(picture, "JPEG"), 0.5)
    text = (
        r"the JPEG cannot be decoded: nvImageCodec: the file is truncated: it has no end-of-image marker; "
        r"simplejpeg: ValueError: Premature end of JPEG file; "
        r"Pillow: OSError: image file is truncated \(\d+ bytes not processed\); "
        r"the damage extends into the needed rows of the file, 0 to 83"
    )
    with pytest.raises(DecodeError, match=text):
        decode(Decoder(Decode()), truncated)


def test_truncated_progressive_jpeg_is_refused(decoder, picture, encode):
    with pytest.raises(DecodeError, match="image file is truncated"):
        decode(decoder, truncate(encode(picture, "JPEG", progressive=True), 0.5), (0, 0, 1, 1))


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP", "TIFF", "BMP"])
def test_truncated_file_of_another_format_is_refused(picture, encode, kind):
    data = encode(picture, kind)
    text = f"the {kind} (cannot be decoded: Pillow: |header cannot be read: Pillow says )"
    with pytest.raises(DecodeError, match=text):
        decode(Decoder(Decode()), data[: len(data) // 2])


@pytest.mark.parametrize("exif", [False, True])
def test_damaged_file_is_refused_each_time(picture, encode, exif):
    data = encode(picture, "PNG")
    decoder, encoded = Decoder(Decode(exif=exif)), Encoded(data[: len(data) // 2])
    header = decoder.header(encoded)
    for _ in range(2):
        with pytest.raises(DecodeError, match="the PNG cannot be decoded: Pillow: OSError"):
            decoder.decode(encoded, header)


def test_jpeg_with_flipped_bits_decodes_like_pillow(decoder, picture, encode):
    """libjpeg warns and continues; then gpuload drops the pixels of nvImageCodec and simplejpeg, and uses Pillow."""
    rng = np.random.default_rng(11)
    jpeg = encode(picture, "JPEG", quality=90, subsampling=2)
    scan = jpeg.rindex(b"\xff\xda") + 14  # after the scan's header
    decoded = 0
    for _ in range(60):
        damaged = bytearray(jpeg)
        for offset in rng.integers(scan, len(jpeg) - 2, 3):
            damaged[offset] ^= 1 << int(rng.integers(8))
        try:
            expected = pillow_pixels(damaged)
        except OSError:
            expected = None
        try:
            pixels = decode(decoder, bytes(damaged), (20, 30, 50, 60))
        except DecodeError:
            assert expected is None
            continue
        assert expected is not None
        np.testing.assert_array_equal(pixels, expected[20:70, 30:90])
        decoded += 1
    assert decoded > 30, "too few of the 60 files were decoded"


def test_random_bytes_give_pixels_or_a_decode_error(decoder, picture, encode):
    rng = np.random.default_rng(5)
    files = [encode(picture, kind) for kind in ("JPEG", "PNG", "GIF", "TIFF", "WEBP", "BMP", "PPM", "QOI")]
    files.append(encode(picture, "JPEG", progressive=True))
    refusals = []
    for file in files:
        for _ in range(25):
            damaged = bytearray(file)
            for offset in rng.integers(0, min(len(file), 400), 4):
                damaged[offset] = int(rng.integers(256))
            try:
                assert decode(decoder, bytes(damaged)).dtype == np.uint8
            except DecodeError as error:
                refusals.append(str(error))
    assert len(refusals) > 50, "too few files were refused"
    assert len(min(refusals, key=len)) > 30, min(refusals, key=len)


@pytest.mark.processes
def test_libraries_print_nothing_on_damaged_files(tmp_path, picture, encode):
    """Neither libjpeg, nor libtiff, nor nvImageCodec at its import, writes to file descriptor 2."""
    jpeg = encode(picture, "JPEG", quality=90)
    tiff = encode(picture, "TIFF", compression="tiff_lzw")
    scan = jpeg.rindex(b"\xff\xda") + 60
    files = {
        "end marker in the scan": jpeg[:scan] + b"\xff\xd9",
        "frame marker in the scan": jpeg[:scan] + b"\xff\xc1\x01" + jpeg[scan:],
        "truncated JPEG": truncate(jpeg, 0.5),
        "segment without its marker": jpeg[:2] + jpeg[6:],
        "zeros in a TIFF": tiff[:300] + bytes(900) + tiff[1200:],
        "truncated TIFF": tiff[: len(tiff) // 2],
        "two components in the scan": jpeg.replace(b"\xff\xda\x00\x0c\x03", b"\xff\xda\x00\x0c\x02"),
        "surplus bytes": jpeg[:-2] + bytes(50) + jpeg[-2:],
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    code = (
        "import sys\nfrom pathlib import Path\nfrom gpuload.decode import Decode, Decoder\n"
        "from gpuload.errors import DecodeError\nfrom gpuload.datasets.sample import read\n"
        "for name in ('nvImageCodec', 'simplejpeg', 'Pillow'):\n"
        "    decoder = Decoder(Decode(exif=True))\n"
        "    decoder.jpeg_decoders = [each for each in decoder.jpeg_decoders[0] if each.name == name], []\n"
        "    for path in sorted(Path(sys.argv[1]).iterdir()):\n"
        "        try:\n            decoder.decode(read(path), decoder.header(read(path)))\n"
        "        except DecodeError as error:\n            print(path.name, error)\n"
        "print('still here', file=sys.stderr)\n"
    )
    output, errors = run_python(code, tmp_path, flags=("-W", "error"))
    assert errors == "still here\n"
    assert re.search(r"^truncated JPEG the JPEG cannot be decoded", output, re.MULTILINE)


@pytest.mark.processes
@lacking.needs("nvidia.nvimgcodec")
def test_nvimagecodec_frees_the_memory_of_an_image_that_it_refused(tmp_path, picture, encode):
    """nvImageCodec warns, so Pillow decodes the image. nvImageCodec once did not free its memory then."""
    large = encode(np.zeros((6000, 6000, 3), np.uint8), "JPEG", quality=50)
    (tmp_path / "large").write_bytes(large[:-2] + bytes(50) + large[-2:])
    (tmp_path / "small").write_bytes(encode(picture))
    code = (
        "import sys\nfrom gpuload.decode import Decode, Decoder\nfrom gpuload.datasets.sample import read\n"
        "decoder = Decoder(Decode())\ndecoder.jpeg_decoders = decoder.jpeg_decoders[0][:1], []\n"
        "def resident():\n"
        "    with open('/proc/self/status') as status:\n"
        "        return next(int(line.split()[1]) << 10 for line in status if line.startswith('VmRSS'))\n"
        "def decode(name):\n    photo = read(f'{sys.argv[1]}/{name}')\n"
        "    return decoder.decode(photo, decoder.header(photo)).shape[0]\n"
        "import PIL.JpegImagePlugin, PIL.Image\ndecode('small')\nbefore = resident()\n"
        "assert decode('large') == 6000\ndecode('small')\nprint(resident() - before)\n"
    )
    assert int(run_python(code, tmp_path)[0]) < 30 << 20  # the image has 108 MB


@pytest.mark.parametrize("format", ["JPEG", "PNG", "BMP"])
def test_load_truncated_images_changes_only_the_advice(format, picture, encode, monkeypatch):
    """With the flag, Pillow would fill up the image in this process, but not in workers."""
    data = encode(picture, format)
    truncated = data[: len(data) // 2]
    with pytest.raises(DecodeError) as without_flag:
        decode(Decoder(Decode()), truncated)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(DecodeError) as with_flag:
        decode(Decoder(Decode()), truncated)
    advice = str(with_flag.value).removeprefix(str(without_flag.value))
    assert advice.startswith(". PIL.ImageFile.LOAD_TRUNCATED_IMAGES is set, but gpuload never fills in")
    assert 'on_error="skip"' in advice
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True
    decode(Decoder(Decode()), data)


def test_strict_pillow_in_two_threads_restores_load_truncated_images(monkeypatch):
    """The second context must not save the value that the first one set."""
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    first_context, second_context = strict_pillow(), strict_pillow()
    first_context.__enter__()
    second_context.__enter__()
    first_context.__exit__(None, None, None)
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False
    second_context.__exit__(None, None, None)
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True
