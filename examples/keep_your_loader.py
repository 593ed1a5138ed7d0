"""Train a classifier with torch's own DataLoader, followed by gl.Augment: random crops, colours, MixUp.

    python examples/keep_your_loader.py --checkpoint run.pt
    python examples/keep_your_loader.py PATH --epochs 10 --checkpoint run.pt

Images are in PATH/train/CLASS/….jpg and PATH/val/CLASS/….jpg. The same command again resumes from the checkpoint, in
the middle of an epoch, with the same batches and augmentations as an uninterrupted run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import small
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import gpuload as gl
from gpuload import transforms as T

NORMALIZE = T.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


class Photographs(Dataset):
    """A typical dataset: entire images, uint8 C×H×W, and labels, without random transforms."""

    def __init__(self, root: Path) -> None:
        self.classes = sorted(path.name for path in root.iterdir())
        self.paths = sorted(root.glob("*/*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path = self.paths[index]
        pixels = np.array(Image.open(path).convert("RGB"))
        return torch.from_numpy(pixels).permute(2, 0, 1), self.classes.index(path.parent.name)


def collate(samples: list[tuple[torch.Tensor, int]]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Collate labels into a tensor and keep images in a list, since they differ in size."""
    images, labels = zip(*samples, strict=True)
    return list(images), torch.tensor(labels)


def loader(data: Photographs, batches: Any, args: Any) -> DataLoader:
    pin = args.device.type == "cuda"  # copies from page-locked memory do not block the CPU
    return DataLoader(data, batch_sampler=batches, collate_fn=collate, num_workers=args.workers or 0, pin_memory=pin)


def batches_of(epoch: int, count: int, size: int) -> list[list[int]]:
    """Return the batches of an epoch, the same on each call; an incomplete last batch is dropped."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
    return [batch.tolist() for batch in order.split(size) if len(batch) == size]


def main() -> None:
    parser = small.parser(__doc__)
    parser.add_argument("--checkpoint", type=Path, help="file to write, and to resume from")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    args = small.arguments(parser, small.folder)
    args.device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    training, validation = (Photographs(args.data / part) for part in ("train", "val"))
    augment = gl.Augment(
        [
            T.RandomResizedCrop(args.size),
            T.RandomHorizontalFlip(),
            T.ColorJitter(0.4, 0.4, 0.4),
            NORMALIZE,
            T.MixUp(alpha=0.2, num_classes=len(training.classes)),
        ],
        device=args.device,
    )
    prepare = gl.Augment([T.Resize(args.size * 8 // 7), T.CenterCrop(args.size), NORMALIZE], device=args.device)
    print(augment.plan())
    torch.manual_seed(0)
    model = small.network(len(training.classes)).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    states: dict[str, Any] = {"model": model, "optimizer": optimizer, "augment": augment}
    step, steps = 0, len(training) // args.batch_size  # steps per epoch
    if args.checkpoint is not None and args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location=args.device)
        for name, part in states.items():
            part.load_state_dict(saved[name])
        step = saved["step"]
        print(f"resuming from {args.checkpoint}, after step {step}")

    for epoch in range(step // steps, args.epochs):
        augment.set_epoch(epoch)  # keeps a position loaded from a checkpoint of this epoch
        batches = batches_of(epoch, len(training), args.batch_size)[step % steps :]
        losses = []
        for images, labels in loader(training, batches, args):
            images, labels = augment(images, labels)  # float32 N×3×size×size on the device, and labels N×classes
            loss = F.cross_entropy(model(images), labels.to(args.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            step += 1
            if args.checkpoint is not None and step % args.save_every == 0:
                saved = {name: part.state_dict() for name, part in states.items()}
                torch.save({**saved, "step": step}, args.checkpoint)
        accuracy = evaluate(model, prepare, validation, args)
        print(f"epoch {epoch + 1}: loss {torch.stack(losses).mean():.3f}, validation accuracy {accuracy:.1%}")


@torch.no_grad()
def evaluate(model: torch.nn.Module, prepare: gl.Augment, data: Photographs, args: Any) -> float:
    """Return the fraction of images that the model classifies correctly."""
    batches = [chunk.tolist() for chunk in torch.arange(len(data)).split(args.batch_size)]
    correct = torch.zeros((), device=args.device)
    for images, labels in loader(data, batches, args):
        correct += (model(prepare(images)).argmax(1) == labels.to(args.device)).sum()
    return correct.item() / len(data)


if __name__ == "__main__":
    main()
