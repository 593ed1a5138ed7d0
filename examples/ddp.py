"""Train on several GPUs with DistributedDataParallel; a run that is killed at any moment resumes where it stopped.

    torchrun --nproc-per-node 2 examples/ddp.py --checkpoint run.pt
    torchrun --nproc-per-node 8 --max-restarts 3 examples/ddp.py PATH --batch-size 256 --checkpoint run.pt

Images are in PATH/train/CLASS/….jpg. The same command again resumes from the checkpoint, in the middle of an epoch,
with the same batches and augmentations as an uninterrupted run. You can change the number of processes if you also
change --batch-size so that all processes together process the same number of images per step.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import small
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import gpuload as gl
from gpuload import transforms as T


def main() -> None:
    parser = small.parser(__doc__)
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("checkpoint.pt"), help="file to write, and to resume from"
    )
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    args = small.arguments(parser, small.folder)
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 examples/ddp.py …")
    gpus = torch.cuda.is_available() and args.device != "cpu"
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpus else "gloo")

    loader = gl.Loader(  # no DistributedSampler: each process gets its part of every global batch
        gl.ImageFolder(args.data / "train"),
        args.batch_size,
        shuffle=True,
        transforms=[
            T.RandomResizedCrop(args.size),
            T.RandomHorizontalFlip(),
            T.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
        ],
        num_workers=args.workers,
        device=args.device,
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(small.network(len(loader.dataset.classes)).to(loader.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = 0
    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location=loader.device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])  # the next loop returns the remaining batches of that epoch
        step = saved["step"]
        if dist.get_rank() == 0:
            print(f"resuming from {args.checkpoint}, after step {step}", flush=True)

    with loader:
        while (epoch := loader.state_dict()["epoch"]) < args.epochs:
            for images, labels in loader:
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if step % args.save_every == 0 or step % len(loader) == 0:
                    mean = loss.detach() / dist.get_world_size()
                    dist.all_reduce(mean)
                    if dist.get_rank() == 0:
                        states = {"model": model, "optimizer": optimizer, "loader": loader}
                        saved = {name: part.state_dict() for name, part in states.items()}
                        save({**saved, "step": step}, args.checkpoint)
                        print(f"epoch {epoch + 1}, step {step}: loss {mean:.6f}", flush=True)
    dist.destroy_process_group()


def save(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint that is complete at any moment."""
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


if __name__ == "__main__":
    main()
