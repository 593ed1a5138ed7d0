"""Names, arguments and defaults are torchvision's, and docs/transforms.md says what they are."""

from __future__ import annotations

import enum
import inspect

import originals
import pytest
from transforms.catalogue import BEGIN, END, NOTES, PAGE, names, table

from gpuload import transforms as T

# Not in torchvision; and arguments that it does not have, all of which are optional.
OURS = {
    "CenterCropOrPad",
    "CopyPaste",
    "Custom",
    "Mosaic",
    "MultiView",
    "RandomCropOrPad",
    "RandomRotate90",
    "RandomTranspose",
    "ResizeKeepRatio",
    "TimmAugMix",
    "TimmAutoAugment",
    "TimmRandAugment",
    "TrimBorder",
}
MORE = {
    "CutMix": ["label_smoothing"],
    "MixUp": ["label_smoothing"],
    "RandomErasing": ["mode", "min_count", "max_count"],
    "ToDtype": ["mask_dtype"],
}


def test_the_table_is_up_to_date():
    text = PAGE.read_text()
    found = text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip()
    assert found == table(), f"{PAGE} is out of date, run `python tests/transforms/catalogue.py`"


def test_notes_are_of_transforms_that_there_are():
    assert set(NOTES) <= set(names())


@pytest.mark.parametrize("name", sorted(set(names()) - OURS - {"Lambda"}))  # torchvision's is of kinds of inputs
def test_arguments_and_defaults_are_torchvisions(name):
    def described(kind: type) -> list[tuple]:
        return [
            (key, value.default.value if isinstance(value.default, enum.Enum) else value.default, value.kind)
            for key, value in inspect.signature(kind).parameters.items()
        ]

    ours = described(getattr(T, name))
    theirs = described(getattr(originals.torchvision().transforms.v2, name))
    count = len(ours) - len(MORE.get(name, []))
    assert ours[:count] == theirs
    assert [key for key, _, _ in ours[count:]] == MORE.get(name, [])
    assert all(default is not inspect.Parameter.empty for _, default, _ in ours[count:])


def test_what_is_ours_alone():
    v2 = originals.torchvision().transforms.v2
    assert {name for name in names() if not hasattr(v2, name)} == OURS
