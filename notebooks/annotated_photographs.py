"""Annotations for four of scikit-image's photographs, and pictures of images with their targets.

They were annotated by hand. The notebook detection_and_segmentation.ipynb makes its datasets of these annotations.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from PIL import Image

import gpuload as gl

Outline = Sequence[tuple[float, float]]
"""Points (x, y), in pixels."""


def ellipse(left: float, top: float, right: float, bottom: float, turned: float = 0.0, points: int = 48) -> Outline:
    """Return the outline of an ellipse in a box, rotated by some degrees."""
    angle = np.linspace(0, 2 * np.pi, points, endpoint=False)
    x, y = (right - left) / 2 * np.cos(angle), (bottom - top) / 2 * np.sin(angle)
    turn = np.deg2rad(turned)
    x, y = x * np.cos(turn) - y * np.sin(turn), x * np.sin(turn) + y * np.cos(turn)
    return list(zip((x + (left + right) / 2).tolist(), (y + (top + bottom) / 2).tolist(), strict=True))


# fmt: off
HEAD = [
    (230, 15), (195, 28), (165, 52), (153, 85), (162, 112), (182, 130), (188, 165), (212, 183), (240, 185), (255, 175),
    (268, 138), (288, 122), (301, 95), (299, 62), (282, 35), (258, 20),
]
HELMET = [
    (380, 349), (400, 344), (440, 351), (470, 380), (488, 415), (497, 452), (511, 470), (511, 511), (279, 511),
    (281, 470), (292, 430), (310, 395), (340, 365),
]
SHUTTLE = [
    (415, 0), (398, 18), (394, 45), (387, 40), (380, 60), (379, 180), (354, 213), (355, 231), (374, 232), (366, 272),
    (385, 268), (395, 286), (432, 286), (436, 270), (459, 266), (457, 60), (444, 38), (437, 45), (432, 15), (422, 0),
]
CUP = [
    (175, 90), (190, 60), (215, 35), (250, 21), (290, 17), (330, 22), (365, 40), (392, 70), (407, 105), (404, 145),
    (388, 195), (365, 240), (340, 265), (310, 283), (275, 283), (250, 272), (222, 305), (203, 298), (196, 275),
    (212, 238), (190, 205), (178, 150),
]
SPOON = [
    (397, 72), (410, 66), (421, 72), (423, 82), (414, 115), (392, 195), (383, 235), (400, 255), (406, 275), (398, 300),
    (378, 321), (355, 324), (335, 312), (326, 288), (332, 265), (350, 247), (368, 238), (376, 215), (402, 140),
    (407, 110),
]
# fmt: on

CLASSES = ("head", "helmet", "shuttle", "eye", "nose", "saucer", "cup", "spoon", "wheel", "lamp")
# For each photograph: its objects with their classes and outlines, and its keypoints.
ANNOTATED: dict[str, tuple[list[tuple[str, Outline]], Outline]] = {
    "astronaut": (
        [("head", HEAD), ("helmet", HELMET), ("shuttle", SHUTTLE)],
        [(202, 101), (246, 103), (226, 125), (205, 142), (242, 142)],
    ),
    "cat": (
        [
            ("eye", ellipse(137, 85, 205, 147)),
            ("eye", ellipse(294, 109, 342, 165)),
            ("nose", [(230, 226), (262, 229), (293, 231), (282, 250), (262, 264), (250, 250)]),
        ],
        [(172, 112), (313, 132), (262, 240)],
    ),
    "coffee": (
        [("saucer", ellipse(76, 48, 479, 390)), ("cup", CUP), ("spoon", SPOON)],
        [(291, 150), (365, 283), (412, 72)],
    ),
    "motorcycle": (
        [
            ("wheel", ellipse(122, 237, 284, 403)),
            ("wheel", ellipse(520, 270, 682, 452, -14)),
            ("lamp", ellipse(508, 122, 562, 188)),
        ],
        [(205, 320), (590, 370), (537, 155)],
    ),
}


def bounds(mask: np.ndarray) -> np.ndarray | None:
    """Return the smallest box around a mask (H×W, bool) as left, top, right, bottom; None if the mask is empty."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]) if len(rows) else None


def png(image: Image.Image) -> gl.Encoded:
    """Encode an image, losslessly."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return gl.Encoded(buffer.getvalue())


COLORS = plt.get_cmap("tab10")(range(10))[:, :3]


def draw(axis: Axes, image: torch.Tensor, target: dict[str, torch.Tensor]) -> None:
    """Draw an image with its targets: masks as colour, boxes with their classes, keypoints as dots."""
    pixels = image.permute(1, 2, 0).cpu().numpy().astype(np.float32) / 255
    boxes, labels = target["boxes"].cpu().numpy(), target["labels"].cpu().numpy()
    for mask, label in zip(target["masks"].cpu().numpy().astype(bool), labels, strict=True):
        pixels[mask] = 0.62 * pixels[mask] + 0.38 * COLORS[label]
    axis.imshow(pixels)
    # imshow puts the centre of the first pixel at 0.
    for (left, top, right, bottom), label in zip(boxes - 0.5, labels, strict=True):
        axis.add_patch(
            Rectangle((left, top), right - left, bottom - top, fill=False, color=COLORS[label], linewidth=1.6)
        )
        place = "bottom" if top > 0.12 * len(pixels) else "top"  # above its box, if there is room
        style = {"color": "white", "fontsize": 6, "va": place, "ha": "left", "clip_on": True}
        axis.text(left, top, CLASSES[label], bbox={"color": COLORS[label], "pad": 0.8, "linewidth": 0}, **style)
    height, width = pixels.shape[:2]
    for x, y in target["keypoints"].cpu().numpy():
        if 0 <= x < width and 0 <= y < height:  # the other keypoints are outside the image
            axis.plot(x - 0.5, y - 0.5, "o", color="white", markeredgecolor="black", markersize=3.5)
    axis.set_xlim(-0.5, width - 0.5)
    axis.set_ylim(height - 0.5, -0.5)
    axis.set_xticks([])
    axis.set_yticks([])


def show(rows: Mapping[str, Sequence[tuple[torch.Tensor, dict[str, torch.Tensor]]]], width: float = 2.3) -> None:
    """Show rows of images with their targets, keyed by title; `width` is that of an image, in inches."""
    columns = max(map(len, rows.values()))
    figure, axes = plt.subplots(len(rows), columns, figsize=(width * columns, width * len(rows) * 0.86), squeeze=False)
    for line, (title, entries) in zip(axes, rows.items(), strict=True):
        for axis, (image, target) in zip(line, entries, strict=False):
            draw(axis, image, target)
        for axis in line[len(entries) :]:
            axis.axis("off")
        line[0].set_ylabel(title, fontsize=8)
    figure.tight_layout(pad=0.3)
    plt.show()
