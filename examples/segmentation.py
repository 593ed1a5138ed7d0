"""Train a small U-Net on data in Pascal VOC's format; the masks move with their images.

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

CLASSES = 21  # VOC's classes, with the background as 0
VOID = 255  # pixels that the loss ignores: VOC's outlines, and padding
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class VOC:
    """Images and masks, as bytes: workers decode only the region that the crop needs, and the transforms move both."""

    def __init__(self, root: Path, part: str) -> None:
        self.root = root
        self.names = (root / "ImageSets" / "Segmentation" / f"{part}.txt").read_text().split()

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[gl.Encoded, gl.Mask]:
        name = self.names[index]
        image = gl.read(self.root / "JPEGImages" / f"{name}.jpg")
        return image, gl.Mask(gl.read(self.root / "SegmentationClass" / f"{name}.png"))  # class numbers, not colours


def loader(root: Path, part: str, args: Any) -> gl.Loader:
    """Load images N×3×size×size, and masks uint8 N×size×size."""
    crop = [
        T.RandomResize(args.size * 3 // 4, args.size * 3 // 2),
        T.RandomCrop(args.size, pad_if_needed=True, fill={gl.Image: (124, 116, 104), gl.Mask: VOID}),
        T.RandomHorizontalFlip(),
        T.ColorJitter(0.3, 0.3, 0.3),
    ]
    resize = [T.Resize((args.size, args.size))]
    return gl.Loader(
        VOC(root, part),
        args.batch_size,
        shuffle=part == "train",
        transforms=[*(crop if part == "train" else resize), T.Normalize(MEAN, STD)],
        num_workers=args.workers,
        device=args.device,
    )


class UNet(nn.Module):
    """A network that reduces images to an eighth of their size and enlarges them again, with skip connections."""

    def __init__(self, classes: int, widths: tuple[int, ...] = (16, 24, 32, 48)) -> None:
        super().__init__()

        def block(inputs: int, outputs: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.ReLU())

        self.down = nn.ModuleList(map(block, (3, *widths[:-1]), widths))
        self.up = nn.ModuleList(block(a + b, a) for a, b in pairwise(widths))
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return scores N×classes×H×W."""
        skips: list[torch.Tensor] = []
        for block in self.down:
            images = block(F.max_pool2d(images, 2) if skips else images)
            skips.append(images)
        for block, skip in zip(reversed(self.up), reversed(skips[:-1]), strict=True):
            images = block(torch.cat([skip, F.interpolate(images, size=skip.shape[2:])], 1))
        return self.head(images)


@torch.no_grad()
def mean_iou(model: nn.Module, loader: gl.Loader) -> float:
    """Return the mean intersection over union of the classes that occur."""
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
