"""Makes the tutorials' pictures, from the photographs in scikit-image's wheel: `python docs/pictures/tutorials.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

import gpuload as gl
from gpuload import transforms as T
from gpuload.cli.pictures import photographs

FOLDER = Path(__file__).parent
GAP = 6
COLOURS = ((255, 205, 40), (60, 200, 255), (255, 90, 150), (130, 230, 90))
BOXES = {  # left, top, right, bottom
    "astronaut": {"face": (172, 62, 290, 190), "helmet": (278, 344, 511, 511), "shuttle": (356, 0, 472, 288)},
    "coffee": {"saucer": (77, 63, 480, 388), "cup": (173, 18, 409, 308), "spoon": (326, 66, 425, 327)},
    "motorcycle": {"wheel": (122, 236, 280, 403), "wheel ": (516, 296, 685, 452), "lamp": (503, 122, 562, 188)},
    "cat": {"eye": (135, 85, 210, 147), "eye ": (294, 109, 343, 164), "nose": (240, 226, 292, 266)},
}


def photograph(name: str) -> Image.Image:
    return Image.open(photographs()[name]).convert("RGB")


def shown(image: torch.Tensor) -> Image.Image:
    """A tensor C×H×W of levels as a picture."""
    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())


def rows(pictures: list[list[Image.Image]], name: str) -> None:
    """Write rows of pictures side by side."""
    width = max(sum(each.width + GAP for each in row) for row in pictures) - GAP
    sheet = Image.new("RGB", (width, sum(max(e.height for e in row) + GAP for row in pictures) - GAP), "white")
    top = 0
    for row in pictures:
        left = 0
        for each in row:
            sheet.paste(each, (left, top))
            left += each.width + GAP
        top += max(each.height for each in row) + GAP
    sheet.save(FOLDER / name, quality=82, optimize=True)


def boxed(picture: Image.Image, boxes: Any, labels: Any, names: list[str]) -> Image.Image:
    """With its boxes drawn in, each in the colour of its label, under its name."""
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(13)
    for (left, top, right, bottom), label in zip(boxes.tolist(), labels.tolist(), strict=True):
        colour = COLOURS[label % len(COLOURS)]
        draw.rectangle((left, top, right - 1, bottom - 1), outline=colour, width=2)
        text = draw.textbbox((left + 4, top + 2), names[label].strip(), font)
        draw.rectangle((text[0] - 3, text[1] - 2, text[2] + 3, text[3] + 2), fill=colour)
        draw.text((left + 4, top + 2), names[label].strip(), (20, 20, 20), font)
    return picture


def classification() -> None:
    """Draw a photograph as a classifier sees it in fourteen epochs."""
    chain = [T.RandomResizedCrop(128), T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4, 0.4)]
    pictures = [shown(T.apply(chain, photograph("cat"), seed=seed)) for seed in range(14)]
    rows([pictures[:7], pictures[7:]], "classification.jpg")


def views() -> None:
    """DINO's two global and eight local views."""
    wide, local = T.RandomResizedCrop(224, scale=(0.4, 1.0)), T.RandomResizedCrop(96, scale=(0.05, 0.4))
    change = [
        T.RandomHorizontalFlip(),
        T.RandomApply([T.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8),
        T.RandomGrayscale(p=0.2),
        T.RandomApply([T.GaussianBlur(9, sigma=(0.1, 2.0))], p=0.3),
    ]
    pictures = [shown(view) for view in T.apply([T.MultiView([[wide], [wide], *[[local]] * 8]), *change],
                                             photograph("astronaut"), seed=4)]  # fmt: skip
    small = Image.new("RGB", (4 * 96 + 3 * GAP, 224), "white")
    for number, picture in enumerate(pictures[2:]):
        small.paste(picture, (number % 4 * (96 + GAP), number // 4 * 128))
    rows([[*pictures[:2], small]], "views.jpg")


def detection_sample(name: str) -> tuple[Image.Image, dict[str, Any], list[str]]:
    boxes = BOXES[name]
    return photograph(name), {"boxes": gl.Boxes(list(boxes.values())), "labels": np.arange(len(boxes))}, list(boxes)


def detection() -> None:
    """A photograph with its boxes, and three times augmented; below, mosaics of four."""
    image, target, names = detection_sample("coffee")
    size = T.Resize((180, 240))
    chain = [T.RandomPhotometricDistort(p=1.0), T.RandomHorizontalFlip(), T.RandomIoUCrop(), size]
    row = []
    for seed in (None, 1, 2, 6):
        transformed, boxed_target = T.apply([size] if seed is None else chain, (image, target), seed=seed or 0)
        row.append(boxed(shown(transformed), boxed_target["boxes"], boxed_target["labels"], names))
    rows([row], "detection.jpg")
    samples = [detection_sample(name) for name in BOXES]
    data = [(image, {**target, "labels": target["labels"] + 3 * n}) for n, (image, target, _) in enumerate(samples)]
    everything = [name for _, _, names in samples for name in names]
    chain = [T.Resize(None, max_size=240), T.Mosaic(320, fill={gl.Image: 114}), T.SanitizeBoundingBoxes(min_size=8)]
    with gl.Loader(data, 4, transforms=chain, num_workers=0, device="cpu", seed=5) as loader:
        images, targets = next(iter(loader))
    pairs = zip(images[:3], targets[:3], strict=True)
    rows(
        [[boxed(shown(transformed), each["boxes"], each["labels"], everything) for transformed, each in pairs]],
        "mosaic.jpg",
    )


def coffee_mask() -> Image.Image:
    """Return the mask of the saucer (1), the cup (2) and the spoon (3)."""
    mask = Image.new("L", photograph("coffee").size)
    draw = ImageDraw.Draw(mask)
    draw.ellipse((77, 63, 480, 390), fill=1)
    draw.polygon([(397, 72), (412, 66), (424, 78), (386, 244), (370, 240)], fill=3)
    draw.ellipse((326, 244, 406, 327), fill=3)
    draw.polygon([(173, 115), (409, 110), (398, 178), (356, 246), (300, 283), (240, 276), (190, 215)], fill=2)
    draw.ellipse((173, 18, 409, 208), fill=2)
    draw.ellipse((196, 228, 262, 308), fill=2)
    return mask


def segmentation() -> None:
    """A photograph and its mask, and three times augmented."""
    image, mask = photograph("coffee"), coffee_mask()
    size = T.Resize((160, 240))
    fill = {gl.Image: (124, 116, 104), gl.Mask: 255}
    chain = [
        T.RandomAffine(25, scale=(0.7, 1.4), interpolation="bilinear", fill=fill),
        T.RandomHorizontalFlip(),
        T.ColorJitter(0.4, 0.4, 0.4),
        size,
    ]
    palette = torch.full((256, 3), 160, dtype=torch.uint8)
    palette[:4] = torch.tensor([(40, 40, 44), (190, 70, 60), (240, 220, 200), (80, 160, 230)])
    above, below = [], []
    for seed in (None, 1, 2, 3):
        transformed, moved = T.apply(
            [size] if seed is None else chain, (image, gl.Mask(np.asarray(mask))), seed=seed or 0
        )
        above.append(shown(transformed))
        below.append(shown(palette[moved.long()].permute(2, 0, 1)))
    rows([above, below], "segmentation.jpg")


if __name__ == "__main__":
    classification()
    views()
    detection()
    segmentation()
