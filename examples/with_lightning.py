"""Train with Lightning: a LightningDataModule with two loaders, whose state is saved in checkpoints and restored.

    python examples/with_lightning.py
    python examples/with_lightning.py PATH --epochs 10 --folder runs    PATH/train/CLASS/….jpg, PATH/val/CLASS/….jpg

The same command again resumes from runs/last.ckpt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import small
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import ModelCheckpoint

import gpuload as gl
from gpuload import transforms as T

NORMALIZE = T.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


class Images(pl.LightningDataModule):
    def __init__(self, root: Path, batch_size: int, size: int, workers: int | None = None) -> None:
        super().__init__()
        self.root, self.batch_size, self.size, self.workers = root, batch_size, size, workers

    def setup(self, stage: str) -> None:  # called when ranks and devices are known, and before a checkpoint is loaded
        crop = [T.RandomResizedCrop(self.size), T.RandomHorizontalFlip(), NORMALIZE]
        center = [T.Resize(self.size * 8 // 7), T.CenterCrop(self.size), NORMALIZE]
        self.train_loader = self.loader("train", crop, shuffle=True)
        self.val_loader = self.loader("val", center, shuffle=False)

    def loader(self, part: str, transforms: list[Any], *, shuffle: bool) -> gl.Loader:
        device = self.trainer.strategy.root_device if self.trainer else None
        data = gl.ImageFolder(self.root / part)
        return gl.Loader(data, self.batch_size, shuffle, transforms=transforms, num_workers=self.workers, device=device)

    def train_dataloader(self) -> gl.Loader:
        return self.train_loader

    def val_dataloader(self) -> gl.Loader:
        return self.val_loader

    def state_dict(self) -> dict[str, Any]:
        return self.train_loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.train_loader.load_state_dict(state_dict)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch  # already on the device

    def teardown(self, stage: str) -> None:
        self.train_loader.close()
        self.val_loader.close()


class Classifier(pl.LightningModule):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.network = small.network(classes)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.network(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        accuracy = (self.network(images).argmax(1) == labels).float().mean()
        self.log("accuracy", accuracy, prog_bar=True, batch_size=len(images), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = small.parser(__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="folder for checkpoints (%(default)s)")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    args = small.arguments(parser, small.folder)
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        max_epochs=args.epochs,
        accelerator="cpu" if args.device == "cpu" else "auto",
        callbacks=[ModelCheckpoint(args.folder, every_n_train_steps=args.save_every, save_last=True)],
        default_root_dir=args.folder,
        logger=False,
    )
    data = Images(args.data, args.batch_size, args.size, args.workers)
    last = args.folder / "last.ckpt"
    classes = len(gl.ImageFolder(args.data / "train").classes)
    trainer.fit(Classifier(classes), datamodule=data, ckpt_path=last if last.exists() else None)
    print({name: round(value.item(), 3) for name, value in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()
