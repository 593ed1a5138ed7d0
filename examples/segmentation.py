"""Trains a small U-Net on data in Pascal VOC's format; the masks move with their images.

python examples/segmentation.py
python examples/segmentation.py PATH --epochs 50    PATH/JPEGImages, PATH/SegmentationClass, PATH/ImageSets/…
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import small
import torch
import torch.nn.functional as F
from torch import nn

import gpuload as gl
from gpuload import transforms as T

CLASSES = 21  # VOC's, with the background as 0
VOID = 255  # pixels that count for nothing: VOC's outlines, and what is padded
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class VOC:
    """Images and masks, as bytes: workers decode of each what the crop needs, and the transforms move both."""

    def __init__(self, root: Path, part: str) -> None:
        self.root = root
        self.names = (root / "ImageSets" / "Segmentation" / f"{part}.txt").read_text().split()

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[gl.Encoded, gl.Mask]:
        name = self.names[index]
        image = gl.read(self.root / "JPEGImages" / f"{name}.jpg")
        return image, gl.Mask(gl.read(self.root / "SegmentationClass" / f"{name}.png"))  # the classes, not the colours


def loader(root: Path, part: str, args: Any) -> gl.Loader:
    """Images N×3×size×size, and masks uint8 N×size×size."""
    crop = [
        T.RandomResize(args.size * 3 // 4, args.size * 3 // 2),
        T.RandomCrop(args.size, pad_if_needed=True, fill={gl.Image: (124, 116, 104), gl.Mask: VOID}),
        T.RandomHorizontalFlip(),
        T.ColorJitter(0.3, 0.3, 0.3),
    ]
    whole = [T.Resize((args.size, args.size))]
    return gl.Loader(
        VOC(root, part),
        args.batch_size,
        shuffle=part == "train",
        transforms=[*(crop if part == "train" else whole), T.Normalize(MEAN, STD)],
        num_workers=args.workers,
        device=args.device,
    )


class UNet(nn.Module):
    """Down to an eighth of the size and up again, with what was seen on the way down."""

    def __init__(self, classes: int, widths: tuple[int, ...] = (16, 24, 32, 48)) -> None:
        super().__init__()

        def block(inputs: int, outputs: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.ReLU())

        self.down = nn.ModuleList(map(block, (3, *widths[:-1]), widths))
        self.up = nn.ModuleList(block(a + b, a) for a, b in pairwise(widths))
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """N×classes×H×W."""
        seen: list[torch.Tensor] = []
        for block in self.down:
            images = block(F.max_pool2d(images, 2) if seen else images)
            seen.append(images)
        for block, side in zip(reversed(self.up), reversed(seen[:-1]), strict=True):
            images = block(torch.cat([side, F.interpolate(images, size=side.shape[2:])], 1))
        return self.head(images)


@torch.no_grad()
def mean_iou(model: nn.Module, loader: gl.Loader) -> float:
    """The intersection over union of each class that occurs, on average."""
    counts = torch.zeros(CLASSES**2, dtype=torch.int64, device=loader.device)
    for images, masks in loader:
        truth = masks.long()
        pairs = truth * CLASSES + model(images).argmax(1)
        counts += torch.bincount(pairs[truth != VOID], minlength=CLASSES**2)
    table = counts.view(CLASSES, CLASSES)
    union = table.sum(0) + table.sum(1) - table.diag()
    return (table.diag()[union > 0] / union[union > 0]).mean().item()


def main() -> None:
    parser = small.parser(__doc__)
    parser.set_defaults(epochs=5, batch_size=16)
    args = small.arguments(parser, small.voc)
    training, validation = (loader(args.data, part, args) for part in ("train", "val"))
    torch.manual_seed(0)
    model = UNet(CLASSES).to(training.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with training, validation:
        for epoch in range(args.epochs):
            losses = []
            for images, masks in training:
                loss = F.cross_entropy(model(images), masks.long(), ignore_index=VOID)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            iou = mean_iou(model, validation)
            print(f"epoch {epoch + 1}: loss {torch.stack(losses).mean():.3f}, mean IoU {iou:.1%}")


if __name__ == "__main__":
    main()
