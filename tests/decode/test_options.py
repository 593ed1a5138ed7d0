"""`Decode`: its defaults, pickling, and options that contradict each other."""

from __future__ import annotations

import pickle
import re

import pytest

from gpuload.decode import Decode


def test_decode_has_its_defaults_and_equals_its_unpickled_copy():
    limits = {"max_scan_pixels": 1 << 31, "max_bytes": 1 << 30, "max_memory": 2 << 30}
    assert Decode() == Decode(scale="exact", exif=None, max_pixels=178_956_970, max_scans=256, **limits)
    assert pickle.loads(pickle.dumps(Decode(exif=True))) == Decode(exif=True)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"scale": "fast", "where": "device"}, "workers: it needs where='cpu', got where='device'"),
        ({"where": "device", "device_share": 0.5}, "needs where='both', got where='device': pass where"),
        ({"where": "both"}, "needs device_share=…, the share of the samples that the device decodes"),
    ],
)
def test_decode_with_contradictory_options_raises_value_error(options, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        Decode(**options)
