"""Train with accelerate, on one device or many; its checkpoints save and restore the loader.

    accelerate launch examples/with_accelerate.py
    accelerate launch examples/with_accelerate.py PATH --epochs 10 --checkpoint run    PATH/train/CLASS/….jpg

The same command again resumes from the checkpoint. `python` in place of `accelerate launch` runs one process.
"""

from __future__ import annotations

from pathlib import Path

import small
import torch
import torch.nn.functional as F
from accelerate import Accelerator

import gpuload as gl
from gpuload import transforms as T


def main() -> None:
    parser = small.parser(__doc__)
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("checkpoint"), help="folder to write, and to resume from (%(default)s)"
    )
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    args = small.arguments(parser, small.folder)
    accelerator = Accelerator(cpu=args.device == "cpu")
    loader = gl.Loader(
        gl.ImageFolder(args.data / "train"),
        args.batch_size,
        shuffle=True,
        transforms=[
            T.RandomResizedCrop(args.size),
            T.RandomHorizontalFlip(),
            T.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
        ],
        num_workers=args.workers,
        device=accelerator.device,
    )
    torch.manual_seed(0)
    model = small.network(len(loader.dataset.classes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)  # the loader does not need to be prepared
    accelerator.register_for_checkpointing(loader)  # save_state() and load_state() then include it
    if args.checkpoint.exists():
        accelerator.load_state(str(args.checkpoint))
        accelerator.print(f"resuming from {args.checkpoint}, in epoch {loader.state_dict()['epoch'] + 1}")

    step = 0
    with loader:
        while (epoch := loader.state_dict()["epoch"]) < args.epochs:
            losses = []
            for images, labels in loader:
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
                step += 1
                if step % args.save_every == 0:
                    accelerator.save_state(str(args.checkpoint))
            accelerator.print(f"epoch {epoch + 1}: loss {torch.stack(losses).mean():.3f}")
    accelerator.save_state(str(args.checkpoint))
    accelerator.end_training()


if __name__ == "__main__":
    main()
