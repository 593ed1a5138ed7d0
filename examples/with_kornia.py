"""Train with Kornia in two roles: as a module among the transforms, and as the backend of gpuload's own transforms.

    python examples/with_kornia.py
    python examples/with_kornia.py PATH --backend kornia    PATH/train/CLASS/….jpg

A module in `transforms=` gets the entire batch on the device. So colours are jittered by Kornia's definition, on every
backend; `T.ColorJitter` would have the definition of the backend. `--backend` selects the library that runs the other
transforms, with the same draws for each library.
"""

from __future__ import annotations

import kornia.augmentation as K
import small
import torch
import torch.nn.functional as F

import gpuload as gl
from gpuload import transforms as T


def main() -> None:
    parser = small.parser(__doc__)
    parser.add_argument("--backend", default="auto", choices=("auto", "torch", "kornia", "dali", "fused"))
    args = small.arguments(parser, small.folder)
    loader = gl.Loader(
        gl.ImageFolder(args.data / "train"),
        args.batch_size,
        shuffle=True,
        transforms=[
            T.RandomResizedCrop(args.size),
            T.RandomHorizontalFlip(),
            T.RandomGrayscale(0.1),
            T.ToDtype("float32", scale=True),  # Kornia's augmentations expect 0 … 1
            K.AugmentationSequential(K.ColorJitter(0.4, 0.4, 0.4), K.RandomPlanckianJitter(p=0.5)),
            T.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
        ],
        backend=args.backend,
        num_workers=args.workers,
        device=args.device,
    )
    print(loader.plan())
    torch.manual_seed(0)
    model = small.network(len(loader.dataset.classes)).to(loader.device)
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
