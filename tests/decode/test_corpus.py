"""Unusual and damaged files of other projects decode like in Pillow, or are refused with a message."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.decoders import NAMES, decoder_by, pillow_pixels
from helpers.programs import run_python

from gpuload.datasets.sample import read
from gpuload.errors import DecodeError

NOT_IMAGES = ("container", "tar")
# Files that gpuload decodes and Pillow refuses ("decodes: why"), or the other way round ("refuses: why"). These are
# entire images; gpuload also decodes regions above the damage of a truncated JPEG.
DEVIATIONS: dict[str, str] = {"png/16bit__image-png__oi1n0g16.png": "refuses: Pillow clips 16 bits to white"}
# Measured: 150 to 270 MB, of which 75 MB are the interpreter with all decoders. The remainder is for a JPEG of
# 31,237×193 pixels that each decoder tries in turn. Files that are refused from their header would take gigabytes.
MAX_PEAK_BYTES = 400 << 20


@pytest.fixture(scope="module")
def files(corpus: Path) -> list[Path]:
    paths = [path for path in sorted(corpus.glob("*/*")) if path.parent.name not in NOT_IMAGES and path.suffix != ".sh"]
    assert len(paths) > 100
    return paths


@pytest.mark.parametrize("exif", [False, True])
def test_each_corpus_file_decodes_like_pillow_or_is_refused(corpus, files, exif):
    deviations: dict[str, str] = {}
    outcomes = {"decoded": 0, "refused": 0}
    for path in files:
        try:
            expected = pillow_pixels(path.read_bytes(), exif=exif)
        except Exception:  # Pillow raises many kinds of errors
            expected = None
        for decoder_name in NAMES:
            decoder, encoded = decoder_by(decoder_name, exif=exif), read(path)
            name = str(path.relative_to(corpus))
            try:
                header = decoder.header(encoded)
                pixels = decoder.decode(encoded, header)
            except DecodeError as error:
                outcomes["refused"] += 1
                if expected is not None:
                    deviations[name] = f"refuses: {error}"
                continue
            outcomes["decoded"] += 1
            if expected is None:
                deviations[name] = "decodes"
                continue
            assert pixels.shape == (*decoder.size_hw(header), 3) == expected.shape, (name, decoder_name)
            assert np.abs(pixels.astype(int) - expected).max() <= 2, (name, decoder_name)
    outcomes_by_name = {name: outcome.partition(":")[0] for name, outcome in deviations.items()}
    expected_by_name = {name: outcome.partition(":")[0] for name, outcome in DEVIATIONS.items()}
    assert outcomes_by_name == expected_by_name, f"edit DEVIATIONS: {deviations}"
    assert min(outcomes.values()) > 60, f"too few files to test both outcomes: {outcomes}"


@pytest.mark.slow
def test_regions_of_each_corpus_file_are_slices(files):
    rng = np.random.default_rng(13)
    decoders = [decoder_by(name, exif=True) for name in NAMES]
    compared = 0
    for path in files:
        encoded = read(path)
        try:
            height, width = decoders[0].size_hw(decoders[0].header(encoded))
            image = decoders[0].decode(encoded, decoders[0].header(encoded))
        except DecodeError:
            continue
        h, w = int(rng.integers(1, height + 1)), int(rng.integers(1, width + 1))
        top, left = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1))
        for decoder in decoders:
            region = decoder.decode(encoded, decoder.header(encoded), (top, left, h, w))
            difference = np.abs(region.astype(int) - image[top : top + h, left : left + w]).max()
            assert difference <= 2, (path.name, (top, left, h, w))
        compared += 1
    assert compared > 60, "too few files were decoded"


@pytest.mark.processes
def test_no_corpus_file_crashes_hangs_or_exceeds_memory(files):
    """Decode all files twice in one process, like a worker, within limits that the kernel enforces."""
    code = (
        "import json, resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (40, 40))\n"
        "from gpuload.decode import Decode, Decoder\nfrom gpuload.errors import DecodeError\n"
        "from gpuload.datasets.sample import read\n"
        "decoder, counts = Decoder(Decode()), {'decoded': 0, 'refused': 0}\n"
        "for path in json.load(sys.stdin) * 2:\n"
        "    encoded = read(path)\n"
        "    try:\n        decoder.decode(encoded, decoder.header(encoded))\n        counts['decoded'] += 1\n"
        "    except DecodeError:\n        counts['refused'] += 1\n"
        # not ru_maxrss, which starts with the peak of the process that started this one
        "with open('/proc/self/status') as status:\n"
        "    peak = next(line for line in status if line.startswith('VmHWM'))\n"
        "print(json.dumps([counts, int(peak.split()[1]) * 1024]))\n"
    )
    output, errors = run_python(code, flags=("-W", "error"), input=json.dumps([str(path) for path in files]))
    assert errors == ""
    counts, peak_bytes = json.loads(output)
    assert sum(counts.values()) == 2 * len(files)
    assert peak_bytes < MAX_PEAK_BYTES
