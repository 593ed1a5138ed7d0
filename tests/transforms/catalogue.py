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

ANTIALIASED = (
    "supports bilinear, bicubic, lanczos and nearest; with `antialias=False`, behaves like torch's `interpolate`"
)
FILLED = "`fill` is a pixel value before `ToDtype`, or a dict that maps types to fills: `{gl.Image: …, gl.Mask: …}`"
INTEGERS = "computes on integers even after `ToDtype`"
CLASSIFICATION = "refuses samples with masks, boxes or keypoints, as in torchvision"
TIMM = "not in torchvision; from timm"
ALBUMENTATIONS = "not in torchvision; from albumentations; swaps height and width"

# Differences from torchvision, and other remarks; "" means the same, with random parameters for each sample.
NOTES: dict[str, str] = {
    "AugMix": f"{CLASSIFICATION}",
    "AutoAugment": f"also accepts a string as `policy`; {CLASSIFICATION}",
    "CenterCropOrPad": TIMM,
    "ClampBoundingBoxes": "all clamping modes have the same result, because boxes are never rotated",
    "ColorJitter": f"the order of operations is also random for each sample; {INTEGERS}",
    "Compose": "equivalent to listing its transforms directly; accepted wherever a list of transforms is",
    "ConvertBoundingBoxFormat": "",
    "CopyPaste": "combines the sample with its neighbour in the epoch's order; part of torchvision's "
    "references, not of the package",
    "Custom": "not in torchvision; base class for your own transforms",
    "CutMix": "mixes the sample with its neighbour in the epoch's order (or, with `Loader(repeats=…)`, with the sample "
    "half a batch away); the mixing ratio and the box are random for each sample; comes after `ToDtype` or "
    "`Normalize`; `label_smoothing` is from timm",
    "GaussianBlur": "σ is random for each sample; kernel weights are rounded to multiples of 2⁻¹⁶",
    "GaussianNoise": "`mean` and `sigma` are on the scale 0 … 1, and the noise is truncated to integers; the noise is "
    "the same on every device",
    "Grayscale": "",
    "Identity": "",
    "Lambda": "calls a function or module with a batch of images, or with each image; does not pass targets",
    "MixUp": "mixes the sample with its neighbour in the epoch's order (or, with `Loader(repeats=…)`, with the sample "
    "half a batch away); the mixing ratio is random for each sample; comes after `ToDtype` or `Normalize`; "
    "`label_smoothing` is from timm",
    "Mosaic": "not in torchvision; known from YOLO; combines the sample with three neighbours in the epoch's order",
    "MultiView": "not in torchvision; makes several views of an image, which is decoded once",
    "Normalize": "also accepts uint8 images, which it scales by 1/255; refuses a mean on the scale 0 … 255, unless "
    "`ToDtype('float32')` without `scale` comes before it; `inplace` has no effect",
    "Pad": FILLED,
    "RandAugment": f"{CLASSIFICATION}",
    "RandomAffine": FILLED,
    "RandomCrop": FILLED,
    "RandomCropOrPad": TIMM,
    "RandomErasing": "`mode`, `min_count` and `max_count` are from timm; before `ToDtype`, `value` is on "
    "the scale 0 … 255",
    "RandomIoUCrop": "drops boxes whose centres are outside the crop, with their labels and masks; in torchvision, "
    "`SanitizeBoundingBoxes` drops them",
    "RandomPerspective": FILLED,
    "RandomResize": ANTIALIASED,
    "RandomResizedCrop": f'{ANTIALIASED}; `interpolation="random"` is from timm',
    "RandomRotate90": ALBUMENTATIONS,
    "RandomRotation": FILLED,
    "RandomShortestSize": ANTIALIASED,
    "RandomSolarize": "`threshold` is on the scale 0 … 255, or 0 … 1 after `ToDtype(scale=True)`, as in torchvision",
    "RandomTranspose": ALBUMENTATIONS,
    "RandomZoomOut": FILLED,
    "Resize": ANTIALIASED,
    "ResizeKeepRatio": TIMM,
    "SanitizeBoundingBoxes": "`labels_getter` receives the sample as the dataset returned it",
    "SanitizeKeyPoints": "`labels_getter` receives the sample as the dataset returned it",
    "ScaleJitter": ANTIALIASED,
    "TimmAugMix": TIMM,
    "TimmAutoAugment": TIMM,
    "TimmRandAugment": "not in torchvision; accepts timm's strings, such as `rand-m9-mstd0.5-inc1`; refuses "
    "samples with masks, boxes or keypoints",
    "ToDtype": "converts to float32, float16, bfloat16 or uint8; converts masks if `mask_dtype` is set, or if `dtype` "
    "is a dict that maps types to dtypes",
    "TrimBorder": TIMM,
    "UniformTemporalSubsample": "accepts T×H×W×C clips and lists of frames; selects frames before they are decoded",
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
        return "integers" if kind is T.ToDtype else "as the contained transforms"
    short = {"uint8": "integers", "float": "floats", "normalized": "normalised"}
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
