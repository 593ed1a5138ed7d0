"""Train a classifier in plain PyTorch: two loaders, and the training loop that you already have.

python examples/plain.py                     on small generated pictures, in seconds
python examples/plain.py PATH --epochs 10    on your images: PATH/train/CLASS/….jpg and PATH/val/CLASS/….jpg
"""

from __future__ import annotations

import time

import small
import torch
import torch.nn.functional as F

import gpuload as gl
from gpuload import transforms as T

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def main() -> None:
    args = small.arguments(small.parser(__doc__), small.folder)
    training = gl.Loader(
        gl.ImageFolder(args.data / "train"),
        args.batch_size,
        shuffle=True,
        transforms=[
            T.RandomResizedCrop(args.size),
            T.RandomHorizontalFlip(),
            T.ColorJitter(0.4, 0.4, 0.4),
            T.Normalize(MEAN, STD),
        ],
        num_workers=args.workers,
        device=args.device,
    )
    validation = gl.Loader(
        gl.ImageFolder(args.data / "val"),
        args.batch_size,
        transforms=[T.Resize(args.size * 8 // 7), T.CenterCrop(args.size), T.Normalize(MEAN, STD)],
        num_workers=args.workers,
        device=args.device,
    )
    torch.manual_seed(0)
    model = small.network(len(training.dataset.classes)).to(training.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with training, validation:  # ends the workers of both
        for epoch in range(args.epochs):
            start = time.perf_counter()
            loss = train(model, training, optimizer)
            seconds = time.perf_counter() - start
            accuracy = evaluate(model, validation)
            rate = len(training.dataset) / seconds
            print(f"epoch {epoch + 1}: loss {loss:.3f}, {rate:,.0f} images/s, validation accuracy {accuracy:.1%}")


def train(model: torch.nn.Module, loader: gl.Loader, optimizer: torch.optim.Optimizer) -> float:
    """Train for one epoch and return the mean loss."""
    model.train()
    losses = torch.zeros((), device=loader.device)
    for images, labels in loader:  # float32 N×3×size×size and int64 N, already on the device
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses += loss.detach()  # .item() here would make the CPU wait for the GPU in each step
    return losses.item() / len(loader)


@torch.no_grad()
def evaluate(model: torch.nn.Module, loader: gl.Loader) -> float:
    """Return the fraction of images that the model classifies correctly."""
    model.eval()
    correct = torch.zeros((), device=loader.device)
    for images, labels in loader:
        correct += (model(images).argmax(1) == labels).sum()
    return correct.item() / len(loader.dataset)


if __name__ == "__main__":
    main()
