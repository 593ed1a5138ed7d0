"""The table of docs/transforms.md: what each transform takes, where it may stand, and what differs from torchvision.

``python tests/transforms/catalogue.py`` writes the table anew, between its marks; a test holds the page against it.
Arguments, defaults and states are read from the code, notes stand here.
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

ANTIALIASED = "`antialias=False` as torch's `interpolate`; bilinear, bicubic, lanczos, nearest"
FILLED = "`fill` in levels, also by type: `{gl.Image: …, gl.Mask: …}`"
LEVELS = "on levels also behind `ToDtype`"
CLASSIFICATION = "a sample with masks, boxes or keypoints is refused, as in torchvision"
TIMM = "timm's; not in torchvision"
ALBUMENTATIONS = "albumentations'; not in torchvision; height and width change places"

# What differs from torchvision, or needs saying; nothing: the same, with a draw for each sample.
NOTES: dict[str, str] = {
    "AugMix": f"{CLASSIFICATION}",
    "AutoAugment": f"`policy` also as a string; {CLASSIFICATION}",
    "CenterCropOrPad": TIMM,
    "ClampBoundingBoxes": "boxes that are not rotated have one way of clamping",
    "ColorJitter": f"the order is drawn for each sample too; {LEVELS}",
    "Compose": "the same as writing its transforms there; taken wherever a list of transforms is",
    "ConvertBoundingBoxFormat": "",
    "CopyPaste": "with the neighbour in the epoch's order; in torchvision's references, not in the package",
    "Custom": "not in torchvision: the base of transforms of your own",
    "CutMix": "with the neighbour in the epoch's order (with `Loader(repeats=…)` half a batch away), "
    "λ and box for each sample; behind `ToDtype` or `Normalize`; "
    "`label_smoothing` is timm's",
    "GaussianBlur": "σ for each sample; weights are multiples of 2⁻¹⁶",
    "GaussianNoise": "in 0 … 1, added to levels; the same numbers on every device",
    "Grayscale": "",
    "Identity": "",
    "Lambda": "a function of a batch or of each image, or a module; it gets images alone",
    "MixUp": "with the neighbour in the epoch's order (with `Loader(repeats=…)` half a batch away), "
    "λ for each sample; behind `ToDtype` or `Normalize`; "
    "`label_smoothing` is timm's",
    "Mosaic": "YOLO's; not in torchvision; with three neighbours in the epoch's order",
    "MultiView": "not in torchvision: several views of an image, decoded once",
    "Normalize": "takes uint8 images too, which it scales by 1/255; a mean of levels is refused, unless they stay "
    "levels by `ToDtype('float32')`; `inplace` changes nothing",
    "Pad": FILLED,
    "RandAugment": f"{CLASSIFICATION}",
    "RandomAffine": FILLED,
    "RandomCrop": FILLED,
    "RandomCropOrPad": TIMM,
    "RandomErasing": "`mode`, `min_count`, `max_count` are timm's; before `ToDtype` the value is a level",
    "RandomIoUCrop": "drops boxes whose centres are outside at once, with their labels and masks",
    "RandomPerspective": FILLED,
    "RandomResize": ANTIALIASED,
    "RandomResizedCrop": f'{ANTIALIASED}; `interpolation="random"` is timm\'s',
    "RandomRotate90": ALBUMENTATIONS,
    "RandomRotation": FILLED,
    "RandomShortestSize": ANTIALIASED,
    "RandomSolarize": "`threshold` in levels; behind `ToDtype(scale=True)` in 0 … 1, as torchvision has it",
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
    "UniformTemporalSubsample": "of clips T×H×W×C and lists of frames, before they are decoded",
    "TrivialAugmentWide": f"{CLASSIFICATION}",
}


def names() -> list[str]:
    """The transforms."""
    return [name for name in T.__all__ if inspect.isclass(kind := getattr(T, name)) and issubclass(kind, Transform)]


def signature(kind: type) -> str:
    """The arguments with their defaults."""
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
    """Where it may stand."""
    if not isinstance(kind.works_on, tuple):
        return "levels" if kind is T.ToDtype else "as what it holds"
    short = {"uint8": "levels", "float": "floats", "normalized": "normalised"}
    return ", ".join(short[state] for state in kind.works_on)


def table() -> str:
    """The table, in Markdown."""
    rows = ["| transform | stands on | beside torchvision |", "| --- | --- | --- |"]
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
