"""The networks that are fed: torchvision's ResNets in bfloat16, or a small one where the script is only tried out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

__all__ = ["training_step"]

CLASSES = 1000


def training_step(
    name: str, device: torch.device, *, small: bool, channels_last: bool, light: bool = False
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """A function of (images, labels) that trains the network for a step, and waits for nothing. `light`: without
    torch's optimiser, whose import takes as long as all else of a row that is only tried out."""
    torch.manual_seed(0)
    if small:
        network: nn.Module = _small_network(CLASSES)
    else:
        from benchmarks.peers.torchvision_import import torchvision

        network = torchvision.models.get_model(name, weights=None, num_classes=CLASSES)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    network = network.to(device, memory_format=layout).train()  # pyright: ignore[reportCallIssue]
    optimiser = None if light else torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    torch.backends.cudnn.benchmark = True

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(network(images), labels)
        network.zero_grad(set_to_none=True)
        loss.backward()
        if optimiser is not None:
            optimiser.step()

    return step


def _small_network(classes: int) -> nn.Module:
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
