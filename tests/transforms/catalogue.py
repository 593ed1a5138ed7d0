"""The table in docs/transforms.md: each transform's arguments, the values it works on, and how torchvision differs.

``python tests/transforms/catalogue.py`` rewrites the table between its marks; a test compares the page with it.
Arguments, defaults and states are read from the code; the notes are below.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from gpuload import transforms as T
from gpuload.transforms.base import Transform

__all__ = ["BEGIN", "END", "NOTES", "PAGE", "names", "signature", "table"]

PAGE = Path(__file__).parents[2] / "docs" / "transforms.md"
BEGIN, END = "<!-- table: python tests/transforms/catalogue.py -->", "<!-- end of table -->"

ANTIALIASED = "`antialias=False` works like torch's `interpolate`; bilinear, bicubic, lanczos, nearest"
FILLED = "`fill` in levels, or a dict by type: `{gl.Image: …, gl.Mask: …}`"
LEVELS = "works on levels after `ToDtype` too"
CLASSIFICATION = "a sample with masks, boxes or keypoints is refused, as in torchvision"
TIMM = "timm's; not in torchvision"
ALBUMENTATIONS = "albumentations'; not in torchvision; swaps height and width"

# Differences from torchvision, and other remarks; "" means the same, with a draw for each sample.
NOTES: dict[str, str] = {
    "AugMix": f"{CLASSIFICATION}",
    "AutoAugment": f"`policy` can also be a string; {CLASSIFICATION}",
    "CenterCropOrPad": TIMM,
    "ClampBoundingBoxes": "all clamping modes give the same result, since boxes are never rotated",
    "ColorJitter": f"the order is drawn for each sample too; {LEVELS}",
    "Compose": "the same as listing its transforms in its place; accepted wherever a list of transforms is",
    "ConvertBoundingBoxFormat": "",
    "CopyPaste": "combines with the neighbour in the epoch's order; in torchvision's references, not in the package",
    "Custom": "not in torchvision: the base class for your own transforms",
    "CutMix": "mixes with the neighbour in the epoch's order (with `Loader(repeats=…)`, with the sample half a batch "
    "away); λ and box are drawn for each sample; comes after `ToDtype` or `Normalize`; "
    "`label_smoothing` is timm's",
    "GaussianBlur": "σ is drawn for each sample; weights are multiples of 2⁻¹⁶",
    "GaussianNoise": "`mean` and `sigma` are on the scale 0 … 1, and the noise is added to levels; the same numbers on "
    "every device",
    "Grayscale": "",
    "Identity": "",
    "Lambda": "calls a function with a batch or with each image, or a module; only images are passed",
    "MixUp": "mixes with the neighbour in the epoch's order (with `Loader(repeats=…)`, with the sample half a batch "
    "away); λ is drawn for each sample; comes after `ToDtype` or `Normalize`; "
    "`label_smoothing` is timm's",
    "Mosaic": "YOLO's; not in torchvision; combines with three neighbours in the epoch's order",
    "MultiView": "not in torchvision: several views of an image, decoded once",
    "Normalize": "accepts uint8 images too, and scales them by 1/255; a mean in levels is refused, unless "
    "`ToDtype('float32')` without `scale` comes before it; `inplace` has no effect",
    "Pad": FILLED,
    "RandAugment": f"{CLASSIFICATION}",
    "RandomAffine": FILLED,
    "RandomCrop": FILLED,
    "RandomCropOrPad": TIMM,
    "RandomErasing": "`mode`, `min_count`, `max_count` are timm's; before `ToDtype`, `value` is a level",
    "RandomIoUCrop": "immediately drops boxes whose centres are outside, with their labels and masks",
    "RandomPerspective": FILLED,
    "RandomResize": ANTIALIASED,
    "RandomResizedCrop": f'{ANTIALIASED}; `interpolation="random"` is timm\'s',
    "RandomRotate90": ALBUMENTATIONS,
    "RandomRotation": FILLED,
    "RandomShortestSize": ANTIALIASED,
    "RandomSolarize": "`threshold` in levels; after `ToDtype(scale=True)` in 0 … 1, as in torchvision",
    "RandomTranspose": ALBUMENTATIONS,
    "RandomZoomOut": FILLED,
    "Resize": ANTIALIASED,
    "ResizeKeepRatio": TIMM,
    "SanitizeBoundingBoxes": "`labels_getter` gets the sample as the dataset yields it",
    "SanitizeKeyPoints": "`labels_getter` gets the sample as the dataset yields it",
    "ScaleJitter": ANTIALIASED,
    "TimmAugMix": TIMM,
    "TimmAutoAugment": TIMM,
    "TimmRandAugment": f"timm's strings, such as `rand-m9-mstd0.5-inc1`; {CLASSIFICATION}",
    "ToDtype": "float32, float16, bfloat16, uint8; `mask_dtype`, or a dict by type, for masks",
    "TrimBorder": TIMM,
    "UniformTemporalSubsample": "for clips T×H×W×C and lists of frames; chooses frames before they are decoded",
    "TrivialAugmentWide": f"{CLASSIFICATION}",
}


def names() -> list[str]:
    """Return the names of all transforms."""
    return [name for name in T.__all__ if inspect.isclass(kind := getattr(T, name)) and issubclass(kind, Transform)]


def signature(kind: type) -> str:
    """Return the arguments with their defaults."""
    shown, keyword_only = [], False
    for name, parameter in inspect.signature(kind).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
            shown.append("*")
            keyword_only = True
        shown.append(name if parameter.default is inspect.Parameter.empty else f"{name}={plain(parameter.default)}")
    return f"{kind.__name__}({', '.join(shown)})"


def plain(value: Any) -> str:
    if isinstance(value, tuple) and any(isinstance(number, float) for number in value):
        return f"({', '.join(f'{number:.4g}' for number in value)})"
    return repr(value)


def states(kind: Any) -> str:
    """Return the kinds of values that a transform works on."""
    if not isinstance(kind.works_on, tuple):
        return "levels" if kind is T.ToDtype else "as the contained transforms"
    short = {"uint8": "levels", "float": "floats", "normalized": "normalised"}
    return ", ".join(short[state] for state in kind.works_on)


def table() -> str:
    """Return the table, in Markdown."""
    rows = ["| transform | works on | compared with torchvision |", "| --- | --- | --- |"]
    for name in names():
        kind = getattr(T, name)
        rows.append(f"| `{signature(kind)}` | {states(kind)} | {NOTES.get(name) or 'the same'} |")
    return "\n".join(rows)


def main() -> None:
    text = PAGE.read_text()
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    PAGE.write_text(f"{text[:start]}\n\n{table()}\n\n{text[end:]}")


if __name__ == "__main__":
    main()
