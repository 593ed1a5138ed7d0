"""Train with timm: model and data configuration, RandAugment, MixUp and CutMix, optimizer, schedule.

    python examples/with_timm.py
    python examples/with_timm.py PATH --model resnet50d --pretrained --epochs 50    PATH/train/CLASS/….jpg, PATH/val/…

`gl.ImageFolder`, `gl.Loader` and two transforms, which draw for each image and not for each batch, replace timm's
create_dataset, create_loader and Mixup.
"""

from __future__ import annotations

import small
import timm
import torch
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, ModelEmaV3, accuracy

import gpuload as gl
from gpuload import transforms as T


def main() -> None:
    parser = small.parser(__doc__)
    parser.add_argument("--model", default="resnet10t", help="the name of a timm model (%(default)s)")
    parser.add_argument("--pretrained", action="store_true")
    parser.add_argument("--lr", type=float, default=2e-3)
    args = small.arguments(parser, small.folder)
    images = gl.ImageFolder(args.data / "train")
    classes = len(images.classes)
    torch.manual_seed(0)
    model = timm.create_model(args.model, pretrained=args.pretrained, num_classes=classes)
    config = timm.data.resolve_model_data_config(model) | {"input_size": (3, args.size, args.size)}
    augmentation = T.from_timm(config, is_training=True, auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.25)
    mixing = [T.MixUp(alpha=0.8, num_classes=classes), T.CutMix(alpha=1.0, num_classes=classes)]
    training = gl.Loader(
        images,
        args.batch_size,
        shuffle=True,
        drop_last=True,
        transforms=[*augmentation, T.RandomChoice(mixing)],
        num_workers=args.workers,
        device=args.device,
    )
    validation = gl.Loader(
        gl.ImageFolder(args.data / "val"),
        args.batch_size,
        transforms=T.from_timm(config),
        num_workers=args.workers,
        device=args.device,
    )
    model = model.to(training.device)
    average = ModelEmaV3(model, decay=0.99)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=args.lr, weight_decay=0.05)
    schedule, epochs = create_scheduler_v2(
        optimizer, num_epochs=args.epochs, warmup_epochs=0, updates_per_epoch=len(training), step_on_epochs=False
    )
    criterion = SoftTargetCrossEntropy()  # labels are mixed: float32 N×classes

    step = 0
    with training, validation:
        for epoch in range(epochs):
            model.train()
            losses = []
            for pictures, labels in training:
                loss = criterion(model(pictures), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                schedule.step_update(step)
                average.update(model, step=step)
                losses.append(loss.detach())
            top1 = evaluate(average.module, validation)
            print(f"epoch {epoch + 1}: loss {torch.stack(losses).mean():.3f}, validation accuracy {top1:.1f}%")


@torch.no_grad()
def evaluate(model: torch.nn.Module, loader: gl.Loader) -> float:
    model.eval()
    top1 = AverageMeter()
    for pictures, labels in loader:
        top1.update(accuracy(model(pictures), labels)[0].item(), len(labels))
    return top1.avg


if __name__ == "__main__":
    main()
