"""Train without labels: several views of each image, read and decoded once, with SimCLR's loss.

    python examples/self_supervised.py
    python examples/self_supervised.py PATH --local 8 --epochs 100    PATH/train/CLASS/….jpg

Each image has two large views and --local small views, as in SwAV and DINO. Each view must identify the large views of
its own image among those of all other images. The classes are only used to check what was learned.
"""

from __future__ import annotations

from typing import Any

import small
import torch
import torch.nn.functional as F
from torch import nn

import gpuload as gl
from gpuload import transforms as T

NORMALIZE = T.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def view(size: int, scale: tuple[float, float]) -> list[T.Transform]:
    """Return SimCLR's augmentation."""
    return [
        T.RandomResizedCrop(size, scale=scale),
        T.RandomHorizontalFlip(),
        T.RandomApply([T.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
        T.RandomGrayscale(p=0.2),
        T.RandomApply([T.GaussianBlur(size // 20 * 2 + 1, sigma=(0.1, 2.0))], p=0.5),
    ]


def agreement(views: list[torch.Tensor], temperature: float = 0.2) -> torch.Tensor:
    """Return the InfoNCE loss of each view against the first two views, N×D each; matches are of the same image."""
    views = [F.normalize(each, dim=1) for each in views]
    matches = torch.arange(len(views[0]), device=views[0].device)
    pairs = [(one, wide) for wide in (0, 1) for one in range(len(views)) if one != wide]
    losses = [F.cross_entropy(views[one] @ views[wide].T / temperature, matches) for one, wide in pairs]
    return torch.stack(losses).mean()


@torch.no_grad()
def neighbours(body: nn.Module, loader: gl.Loader) -> float:
    """Return the fraction of images whose nearest neighbour, by features, has the same class."""
    outputs = [(F.normalize(body(images), dim=1), labels) for images, labels in loader]
    features, labels = (torch.cat(part) for part in zip(*outputs, strict=True))
    nearest = (features @ features.T).fill_diagonal_(-1).argmax(1)
    return (labels[nearest] == labels).float().mean().item()


def main() -> None:
    parser = small.parser(__doc__)
    parser.set_defaults(epochs=4)
    parser.add_argument("--local", type=int, default=2, metavar="VIEWS", help="small views of each image (%(default)s)")
    args = small.arguments(parser, small.folder)
    wide, local = view(args.size, (0.3, 1.0)), view(args.size // 2, (0.08, 0.4))
    images = gl.ImageFolder(args.data / "train")
    common: dict[str, Any] = {"num_workers": args.workers, "device": args.device}
    training = gl.Loader(
        images,
        args.batch_size,
        shuffle=True,
        drop_last=True,
        transforms=[T.MultiView([wide, wide, *[local] * args.local]), NORMALIZE],
        **common,
    )
    center = [T.Resize(args.size), T.CenterCrop(args.size), NORMALIZE]
    evaluation = gl.Loader(images, args.batch_size, transforms=center, **common)
    torch.manual_seed(0)
    body = small.network(64).to(training.device)
    head = nn.Sequential(nn.ReLU(), nn.Linear(64, 32)).to(training.device)
    optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=3e-3)
    with training, evaluation:
        for epoch in range(args.epochs):
            losses = []
            for views, _ in training:  # a list: two N×3×size×size, then N×3×size/2×size/2
                loss = agreement([head(body(each)) for each in views])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            print(f"epoch {epoch + 1}: loss {torch.stack(losses).mean():.3f}")
        print(f"{neighbours(body, evaluation):.1%} of nearest neighbours have the same class")


if __name__ == "__main__":
    main()
