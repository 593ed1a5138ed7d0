"""Train on pairs of images and captions, as CLIP does: tokens of different lengths are padded in the batch.

    python examples/image_text.py
    python examples/image_text.py PATH --epochs 30    PATH/captions.csv with the columns file and caption

Workers tokenize the captions when they read the images. Here a word is a token; with a Hugging Face tokenizer,
`tokenize` is `lambda caption: tokenizer(caption)["input_ids"]`.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import small
import torch
import torch.nn.functional as F
from torch import nn

import gpuload as gl
from gpuload import transforms as T


class Pairs:
    """Images and the tokens of their captions."""

    def __init__(self, root: Path) -> None:
        self.root = root
        with open(root / "captions.csv", newline="") as file:
            self.rows = [(row["file"], row["caption"]) for row in csv.DictReader(file)]
        words = sorted({word for _, caption in self.rows for word in caption.lower().split()})
        self.number = {word: number for number, word in enumerate(words, 1)}  # 0 is padding

    def tokenize(self, caption: str) -> list[int]:
        return [self.number[word] for word in caption.lower().split()]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        file, caption = self.rows[index]
        return {"image": gl.read(self.root / file), "tokens": self.tokenize(caption), "caption": caption}


class TwoTowers(nn.Module):
    """A network that maps images and captions to features in a common space."""

    def __init__(self, words: int, width: int = 64) -> None:
        super().__init__()
        self.image = small.network(width)
        self.words = nn.Embedding(words, width, padding_idx=0)
        self.text = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return how well each image (rows) matches each caption (columns): N×N."""
        sums = self.words(tokens).sum(1)  # the embedding of the padding is zero
        texts = F.normalize(self.text(sums / lengths), dim=1)
        return F.normalize(self.image(images), dim=1) @ texts.T * self.scale.exp()


def main() -> None:
    parser = small.parser(__doc__)
    parser.set_defaults(epochs=6)
    args = small.arguments(parser, small.captions)
    pairs = Pairs(args.data)
    loader = gl.Loader(
        pairs,
        args.batch_size,
        shuffle=True,
        drop_last=True,
        transforms=[
            T.RandomResizedCrop(args.size, scale=(0.7, 1.0)),
            T.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
        ],
        collate_fn=gl.pad("tokens"),  # everything else is collated by default_collate
        num_workers=args.workers,
        device=args.device,
    )
    torch.manual_seed(0)
    model = TwoTowers(len(pairs.number) + 1).to(loader.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with loader:
        for epoch in range(args.epochs):
            losses, correct, total = [], 0, 0
            for batch in loader:
                tokens = batch["tokens"]  # .data int64 N×longest, .sizes (N, 1), .padding: the fraction of padding
                scores = model(batch["image"], tokens.data, tokens.sizes)
                matches = torch.arange(len(scores), device=scores.device)
                loss = (F.cross_entropy(scores, matches) + F.cross_entropy(scores.T, matches)) / 2
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
                # Several images in a batch may have the same caption.
                correct += (tokens.data[scores.argmax(1)] == tokens.data).all(1).sum()
                total += len(scores)
            mean = torch.stack(losses).mean()
            print(f"epoch {epoch + 1}: loss {mean:.3f}, {correct / total:.1%} of the images matched with their caption")


if __name__ == "__main__":
    main()
