"""PyTorch's own ImageNet training example, with gpuload in place of DataLoader.

    python examples/imagenet.py
    python examples/imagenet.py PATH -a resnet18 --epochs 90 --batch-size 256    PATH/train/CLASS/…, PATH/val/CLASS/…
    torchrun --nproc-per-node 8 examples/imagenet.py PATH -a resnet50 --epochs 90 --batch-size 32

The changes from the original:

- `gl.ImageFolder`, `gl.Loader` and `gpuload.transforms` replace torchvision's ImageFolder, DataLoader and transforms.
- There is no DistributedSampler, no set_epoch(), no pin_memory and no .to(device): a loader returns each process's
  part of each batch, on its device, and counts the epochs.
- Validation on several GPUs is exact (`uneven="exact"`); in the original, every GPU evaluates the remainder.
- A checkpoint includes the loader's state, so a run can resume in the middle of an epoch.
- torchrun starts the processes, so there are no options for mp.spawn().
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import small
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torchvision import models

import gpuload as gl
from gpuload import transforms as T

NORMALIZE = T.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def options() -> Any:
    parser = small.parser(__doc__)
    parser.add_argument("-a", "--arch", default="resnet18", help="a torchvision classifier (%(default)s)")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate for a global batch of 256 images")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--wd", type=float, default=1e-4)
    parser.add_argument("-p", "--print-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--save-every", type=int, default=500, metavar="STEPS")
    parser.add_argument(
        "--resume", type=Path, default=Path("imagenet.pt"), help="checkpoint to write, and to resume from"
    )
    parser.add_argument("-e", "--evaluate", action="store_true", help="only evaluate")
    return small.arguments(parser, small.folder)


def main() -> None:
    args = options()
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    common: dict[str, Any] = {"num_workers": args.workers, "device": args.device}
    crop = [T.RandomResizedCrop(args.size), T.RandomHorizontalFlip(), NORMALIZE]
    evaluation = [T.Resize(args.size * 8 // 7), T.CenterCrop(args.size), NORMALIZE]
    training = gl.Loader(gl.ImageFolder(args.data / "train"), args.batch_size, True, transforms=crop, **common)
    validation = gl.Loader(
        gl.ImageFolder(args.data / "val"), args.batch_size, transforms=evaluation, uneven="exact", info=True, **common
    )
    torch.manual_seed(0)
    model = models.get_model(args.arch, num_classes=len(training.dataset.classes)).to(training.device)
    if ranks > 1:
        model = DistributedDataParallel(model)
    rate = args.lr * args.batch_size * ranks / 256
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=args.momentum, weight_decay=args.wd)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": training}
    if args.resume.exists():
        saved = torch.load(args.resume, map_location=training.device)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        say(f"resuming from {args.resume}, in epoch {training.state_dict()['epoch'] + 1}")

    with training, validation:
        while not args.evaluate and (epoch := training.state_dict()["epoch"]) < args.epochs:
            train(model, training, optimizer, epoch, args, parts)
            schedule.step()
            save(parts, args.resume)
            say(f"epoch {epoch + 1}: {validate(model, validation):.2%} correct")
        if args.evaluate:
            say(f"{validate(model, validation):.2%} correct")


def train(model: Any, loader: gl.Loader, optimizer: Any, epoch: int, args: Any, parts: dict[str, Any]) -> None:
    model.train()
    start, images_seen = time.perf_counter(), 0
    for step, (images, labels) in enumerate(loader, 1):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        images_seen += len(images)
        if step % args.print_every == 0:
            rate = images_seen / (time.perf_counter() - start)
            say(f"epoch {epoch + 1}, step {step} of {len(loader)}: loss {loss.item():.3f}, {rate:,.0f} images/s")
        if step % args.save_every == 0 and step < len(
            loader
        ):  # at the end of an epoch, main() saves after schedule.step()
            save(parts, args.resume)


@torch.no_grad()
def validate(model: Any, loader: gl.Loader) -> float:
    """Return the fraction of images classified correctly. Each image counts once, with any number of processes."""
    model.eval()
    counts = torch.zeros(2, device=loader.device)  # correct, total
    for (images, labels), info in loader:
        valid = torch.as_tensor(info.valid, device=loader.device)  # False for rows that only fill up a batch
        counts += torch.stack([((model(images).argmax(1) == labels) & valid).sum(), valid.sum()])
    if dist.is_initialized():
        dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def say(text: str) -> None:
    if is_first():
        print(text, flush=True)


def save(parts: dict[str, Any], path: Path) -> None:
    """Write a checkpoint that is complete at any moment."""
    if is_first():
        part = path.with_suffix(".part")
        torch.save({name: each.state_dict() for name, each in parts.items()}, part)
        part.replace(path)


if __name__ == "__main__":
    main()
