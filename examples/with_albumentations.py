"""Train with an Albumentations pipeline inside the dataset, run by the workers; other transforms run on the device.

    python examples/with_albumentations.py
    python examples/with_albumentations.py PATH --epochs 10    PATH/train/CLASS/….jpg

Use this for transforms that gpuload does not have, or while you migrate. Transforms that stay in Albumentations cost
the workers time, one image after the other; transforms in `transforms=` do not. Albumentations has its own random
generators. They are seeded here for each sample, so that a sample gets the same augmentation with any number of workers
and after a resume.
"""

from __future__ import annotations

from pathlib import Path

import albumentations as A
import numpy as np
import small
import torch
import torch.nn.functional as F
from PIL import Image

import gpuload as gl
from gpuload import transforms as T


class Augmented:
    """Arrays H×W×3 augmented by Albumentations, and labels."""

    def __init__(self, root: Path) -> None:
        self.images = gl.ImageFolder(root)  # only for its list of files
        self.pipeline = A.Compose([A.GridDropout(ratio=0.3, p=0.5), A.RandomFog(p=0.2), A.ChannelDropout(p=0.2)])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        pixels = np.asarray(Image.open(self.images.paths[index]).convert("RGB"))
        self.pipeline.set_random_seed(int(gl.sample_rng().integers(2**31)))
        return self.pipeline(image=pixels)["image"], int(self.images.labels[index])


def main() -> None:
    args = small.arguments(small.parser(__doc__), small.folder)
    data = Augmented(args.data / "train")
    loader = gl.Loader(
        data,
        args.batch_size,
        shuffle=True,
        transforms=[  # after Albumentations, on an entire batch at once
            T.RandomResizedCrop(args.size),
            T.RandomHorizontalFlip(),
            T.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
        ],
        num_workers=args.workers,
        device=args.device,
    )
    torch.manual_seed(0)
    model = small.network(len(data.images.classes)).to(loader.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with loader:
        for epoch in range(args.epochs):
            losses = []
            for images, labels in loader:
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            print(f"epoch {epoch + 1}: loss {torch.stack(losses).mean():.3f}")


if __name__ == "__main__":
    main()
