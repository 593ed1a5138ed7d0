"""A network small enough to train on two CPU cores while one watches, and its training step."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["Trainer", "small_network"]


def small_network(classes: int) -> nn.Module:
    """Four convolutions, of 8×8 patches and then 3×3: about 6 million multiplications for 224×224 pixels."""

    def block(inputs: int, outputs: int, kernel: int, stride: int, padding: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]

    return nn.Sequential(
        *block(3, 24, 8, 8, 0),
        *block(24, 32, 3, 2, 1),
        *block(32, 48, 3, 2, 1),
        *block(48, 64, 3, 2, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


class Trainer:
    """Owns the network and its optimiser; `step` takes one batch."""

    def __init__(self, classes: int, device: torch.device, seed: int = 0) -> None:
        with torch.random.fork_rng(devices=[]):  # the same weights each time, and no change to the user's generator
            torch.manual_seed(seed)
            self.network = small_network(classes).to(device).train()
        self.optimiser = torch.optim.AdamW(self.network.parameters(), lr=3e-3)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[float, int]:
        """Train on one batch. Returns the loss, and how many images were classified correctly before the step."""
        scores = self.network(images)
        loss = nn.functional.cross_entropy(scores, labels)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        self.optimiser.step()
        return loss.item(), int((scores.argmax(1) == labels).sum())
