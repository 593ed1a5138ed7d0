"""The gallery has a picture of each transform, of the code that it shows."""

from __future__ import annotations

import re

import gallery
import pytest
from helpers import lacking

lacking.require("skimage")


@pytest.mark.parametrize("name", gallery.CODE)
def test_a_picture_shows_what_its_code_does(name):
    assert re.match(rf"T\.{name}\(", gallery.CODE[name])
    photographs, made = gallery.results(name)
    before = {(image.size, image.tobytes()) for image in photographs}
    assert {(image.size, image.tobytes()) for image in made} - before
    assert gallery.picture(photographs, made).width <= gallery.WIDTH_PX


def test_the_page_has_the_code_above_the_picture():
    text = "\n\n".join(gallery.page({"Crops": ["CenterCrop", "Normalize"]}))
    assert "### CenterCrop\n\n```python\nT.CenterCrop(112)\n```\n\n```{image} gallery/CenterCrop.jpg" in text
    assert "Normalize" not in text
