"""Train a small detector on data in COCO's format; the boxes move with their images.

    python examples/detection.py
    python examples/detection.py PATH --epochs 50    PATH/train2017/….jpg, PATH/annotations/instances_train2017.json, …

The detector has no anchors: each cell of a grid predicts the class of the box centred there, and the extent of the box.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import small
import torch
import torch.nn.functional as F
from torch import nn

import gpuload as gl
from gpuload import transforms as T

STRIDE = 8  # pixels per cell
NORMALIZE = T.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def loader(root: Path, part: str, args: Any) -> gl.Loader:
    """Load images N×3×size×size, and a dict per image: "boxes" (n, 4), as left, top, right, bottom, and "labels"."""
    augmentation = [T.RandomPhotometricDistort(), T.RandomHorizontalFlip(), T.RandomIoUCrop()]
    data = gl.Coco(
        root / f"{part}2017",
        root / "annotations" / f"instances_{part}2017.json",
        targets=(),  # only boxes and labels
        crowds=False,
    )
    return gl.Loader(
        data,
        args.batch_size,
        shuffle=part == "train",
        transforms=[
            *(augmentation if part == "train" else []),
            T.Resize((args.size, args.size)),
            T.SanitizeBoundingBoxes(),  # drops boxes that are almost entirely outside, with their labels
            NORMALIZE,
        ],
        num_workers=args.workers,
        device=args.device,
    )


class Detector(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs, stride in ((3, 32, 2), (32, 64, 2), (64, 96, 2), (96, 96, 1)):
            layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.GroupNorm(8, outputs), nn.ReLU()]
        self.body, self.head = nn.Sequential(*layers), nn.Conv2d(96, classes + 4, 1)
        nn.init.constant_(self.head.bias, -3)  # few cells contain the centre of a box
        nn.init.constant_(self.head.bias[-4:], 0.5)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores N×cells×classes, and boxes N×cells×4 in pixels."""
        output = self.head(self.body(images))
        y, x = ((torch.arange(n, device=output.device) + 0.5) * STRIDE for n in output.shape[2:])
        centre = torch.stack(torch.meshgrid(x, y, indexing="xy")).flatten(1).T
        output = output.flatten(2).transpose(1, 2)
        reach = output[..., -4:].exp() * STRIDE
        return output[..., :-4], torch.cat([centre - reach[..., :2], centre + reach[..., 2:]], -1)


def overlap(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the intersection over union of each pair of boxes."""
    low, high = torch.maximum(one[..., :2], other[..., :2]), torch.minimum(one[..., 2:], other[..., 2:])
    common = (high - low).clamp(min=0).prod(-1)
    areas = [(boxes[..., 2:] - boxes[..., :2]).prod(-1) for boxes in (one, other)]
    return common / (areas[0] + areas[1] - common + 1e-6)


def loss_of(scores: torch.Tensor, boxes: torch.Tensor, targets: list[Any], cells_per_row: int) -> torch.Tensor:
    """Return the focal loss of the scores plus 1 - IoU of the boxes in cells that contain the centre of a true box."""
    expected, misses = torch.zeros_like(scores), []
    for row, target in enumerate(targets):
        centre = (target["boxes"][:, :2] + target["boxes"][:, 2:]) / 2
        x, y = (centre / STRIDE).long().clamp(max=cells_per_row - 1).unbind(1)
        cells = y * cells_per_row + x
        expected[row, cells, target["classes"]] = 1
        misses.append(1 - overlap(boxes[row, cells], target["boxes"]))
    missed = torch.cat(misses)
    cross_entropy = F.binary_cross_entropy_with_logits(scores, expected, reduction="none")
    focal = (cross_entropy * (scores.sigmoid() - expected).square()).sum()
    return (focal + missed.sum()) / max(len(missed), 1)


def found_in(scores: torch.Tensor, boxes: torch.Tensor, target: Any) -> int:
    """Count the boxes of an image that are among its best predictions: the right class, and an IoU above a half."""
    best = scores.flatten().topk(2 * len(target["boxes"])).indices
    cells, classes = best // scores.shape[1], best % scores.shape[1]
    hit = overlap(boxes[cells][None], target["boxes"][:, None]) > 0.5
    return int((hit & (classes == target["classes"][:, None])).any(1).sum())


def main() -> None:
    parser = small.parser(__doc__)
    parser.set_defaults(epochs=8, batch_size=16)
    args = small.arguments(parser, small.coco)
    training, validation = (loader(args.data, part, args) for part in ("train", "val"))
    ids = torch.tensor(sorted(training.dataset.categories), device=training.device)  # COCO's ids have gaps
    torch.manual_seed(0)
    model = Detector(len(ids)).to(training.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with training, validation:
        for epoch in range(args.epochs):
            losses, found_boxes, total = [], 0, 0
            for images, targets in training:
                for target in targets:
                    target["classes"] = torch.searchsorted(ids, target["labels"])
                loss = loss_of(*model(images), targets, images.shape[3] // STRIDE)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            with torch.no_grad():
                for images, targets in validation:
                    for scores, boxes, target in zip(*model(images), targets, strict=True):
                        target["classes"] = torch.searchsorted(ids, target["labels"])
                        found_boxes += found_in(scores, boxes, target)
                        total += len(target["boxes"])
            print(f"epoch {epoch + 1}: loss {torch.stack(losses).mean():.3f}, {found_boxes} of {total} boxes found")


if __name__ == "__main__":
    main()
