from __future__ import annotations

import pickle
import re

import pytest

from gpuload.decode import Decode


def test_defaults_are_those_of_torchvision_and_pillow():
    limits = {"max_scan_pixels": 1 << 31, "max_bytes": 1 << 30, "max_memory": 2 << 30}
    assert Decode() == Decode(scale="exact", exif=None, max_pixels=178_956_970, max_scans=256, **limits)
    assert pickle.loads(pickle.dumps(Decode(exif=True))) == Decode(exif=True)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"exif": 1}, TypeError, "Decode(exif=…) must be True, False or None, got 1"),
        ({"index": None}, TypeError, "Decode(index=…) must be True or False, got None"),
        ({"scale": "half"}, ValueError, "Decode(scale=…) must be 'exact' or 'fast', got 'half'"),
        ({"scale": True}, ValueError, "Decode(scale=…) must be 'exact' or 'fast', got True"),
        ({"max_pixels": 0}, ValueError, "Decode(max_pixels=…) must be at least 1, or None for no limit, got 0"),
        ({"max_scans": -3}, ValueError, "Decode(max_scans=…) must be at least 1, or None for no limit, got -3"),
        ({"max_pixels": 1e8}, TypeError, "Decode(max_pixels=…) must be an int or None, got 100000000.0"),
        ({"max_scan_pixels": 0}, ValueError, "Decode(max_scan_pixels=…) must be at least 1, or None for no limit"),
        ({"max_bytes": "1G"}, TypeError, "Decode(max_bytes=…) must be an int or None, got '1G'"),
        ({"max_memory": 0.5}, TypeError, "Decode(max_memory=…) must be an int or None, got 0.5"),
        ({"max_scans": True}, TypeError, "Decode(max_scans=…) must be an int or None, got True"),
        ({"scale": "fast", "where": "device"}, ValueError, "workers: it needs where='cpu', got where='device'"),
        ({"where": "gpu"}, ValueError, "Decode(where=…) must be 'cpu', 'device' or 'both', got 'gpu'"),
        ({"device_memory": None}, TypeError, "Decode(device_memory=…) must be an int, got None"),
        ({"device_memory": 0}, ValueError, "Decode(device_memory=…) must be at least 1, got 0"),
        ({"where": "both", "device_share": "half"}, TypeError, "Decode(device_share=…) must be a number above 0 and"),
        ({"where": "both", "device_share": True}, TypeError, "must be a number above 0 and below 1, got True"),
        ({"where": "both", "device_share": 1.0}, ValueError, "must be above 0 and below 1, got 1.0; to decode all"),
        ({"where": "device", "device_share": 0.5}, ValueError, "needs where='both', got where='device': pass where"),
        (
            {"where": "both"},
            ValueError,
            "needs device_share=…, the share of the samples that the device decodes. Compute",
        ),
    ],
)
def test_bad_options_are_refused_when_built(options, error, text):
    with pytest.raises(error, match=re.escape(text)):
        Decode(**options)
