"""Train with Hugging Face's Trainer: it gets its batches from gpuload, and its checkpoints include the loader's state.

    python examples/with_trainer.py
    python examples/with_trainer.py PATH --model google/vit-base-patch16-224 --folder runs    PATH/train/CLASS/….jpg, …

The same command again resumes from the last checkpoint. To use a Hugging Face dataset instead of `Labelled`:

    data = load_dataset(…)["train"].rename_columns({"image": "pixel_values", "label": "labels"})
    gl.Loader(gl.wrap(data), …)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import small
import transformers
from transformers import AutoModelForImageClassification, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import gpuload as gl
from gpuload import transforms as T

NORMALIZE = T.Normalize(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


class Labelled:
    """Images and labels under the names that models expect."""

    def __init__(self, root: Path) -> None:
        self.images = gl.ImageFolder(root)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label = self.images[index]
        return {"pixel_values": image, "labels": label}


class LoaderTrainer(Trainer):
    """A Trainer that uses these loaders, which already divide samples among ranks and put batches on the device."""

    def __init__(self, train_loader: gl.Loader, val_loader: gl.Loader, **options: Any) -> None:
        options |= {"callbacks": [SaveLoader(train_loader)], "eval_dataset": val_loader.dataset}
        super().__init__(**options)
        self.train_loader, self.val_loader = train_loader, val_loader

    def get_train_dataloader(self) -> Any:
        return self.train_loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self.val_loader


class SaveLoader(TrainerCallback):
    """Writes the loader's state next to each checkpoint."""

    def __init__(self, loader: gl.Loader) -> None:
        self.loader = loader

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.is_world_process_zero:
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / "loader.json"
            path.write_text(json.dumps(self.loader.state_dict()))


def main() -> None:
    parser = small.parser(__doc__)
    parser.add_argument("--model", help="a model on the Hugging Face hub; default: a small untrained ResNet")
    parser.add_argument("--folder", default="runs", help="folder for checkpoints (%(default)s)")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    args = small.arguments(parser, small.folder)
    options = TrainingArguments(
        args.folder,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch_size,
        learning_rate=1e-3,
        save_steps=args.save_every,
        eval_strategy="epoch",
        ignore_data_skip=True,  # the loader resumes by itself, and reads nothing twice
        report_to="none",
        use_cpu=args.device == "cpu",
    )
    common: dict[str, Any] = {"num_workers": args.workers, "device": options.device}
    crop = [T.RandomResizedCrop(args.size), T.RandomHorizontalFlip(), NORMALIZE]
    center = [T.Resize(args.size), T.CenterCrop(args.size), NORMALIZE]
    training = gl.Loader(Labelled(args.data / "train"), args.batch_size, True, transforms=crop, **common)
    validation = gl.Loader(Labelled(args.data / "val"), args.batch_size, transforms=center, **common)
    last = get_last_checkpoint(args.folder) if Path(args.folder).is_dir() else None
    if last is not None:
        training.load_state_dict(json.loads((Path(last) / "loader.json").read_text()))

    transformers.set_seed(0)
    classes = len(training.dataset.images.classes)
    if args.model:
        model = AutoModelForImageClassification.from_pretrained(
            args.model, num_labels=classes, ignore_mismatched_sizes=True
        )
    else:
        shape = {"embedding_size": 16, "hidden_sizes": [16, 32, 64], "depths": [1, 1, 1], "layer_type": "basic"}
        model = AutoModelForImageClassification.from_config(transformers.ResNetConfig(num_labels=classes, **shape))
    trainer = LoaderTrainer(
        training,
        validation,
        model=model,
        args=options,
        compute_metrics=lambda output: {"accuracy": (output.predictions.argmax(1) == output.label_ids).mean()},
    )
    with training, validation:
        trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
