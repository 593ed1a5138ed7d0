"""The gallery shows a picture of each transform below its code."""

from __future__ import annotations

import re

import gallery
import pytest
from helpers import lacking

lacking.require("skimage")


@pytest.mark.parametrize("name", gallery.CODE)
def test_gallery_picture_differs_from_the_photographs(name):
    assert re.match(rf"T\.{name}\(", gallery.CODE[name])
    photographs, transformed = gallery.results(name)
    before = {(image.size, image.tobytes()) for image in photographs}
    after = {(image.size, image.tobytes()) for image in transformed}
    assert after - before, "no picture was transformed"
    assert gallery.picture(photographs, transformed).width <= gallery.WIDTH_PX


def test_gallery_page_has_code_above_each_picture():
    text = "\n\n".join(gallery.page({"Crops": ["CenterCrop", "Normalize"]}))
    assert "### CenterCrop\n\n```python\nT.CenterCrop(112)\n```\n\n```{image} gallery/CenterCrop.jpg" in text
    assert "Normalize" not in text
