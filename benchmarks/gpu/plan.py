"""What is to be measured: the rows, in the order of their weight, should the time be up; and how long each may take.
Imports nothing heavy: the driver, which loads no torch, imports it too."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Feed:
    """A loader that is measured alone, then feeding networks.

    Attributes:
        label: what the table calls it.
        peer: its module in `benchmarks.peers`.
        variant: of the recipe.
        needs_gpu: there is no such way on the CPU.
    """

    label: str
    peer: str
    variant: str = "auto"
    needs_gpu: bool = False

    @property
    def own(self) -> bool:
        return self.peer == "gpuload"


FEEDS = {
    "fused": Feed("gpuload, fused", "gpuload", "fused"),
    "device_decode": Feed("gpuload, decoding on the GPU", "gpuload", "fused/device"),
    "both_decode": Feed("gpuload, a share decoded on the GPU", "gpuload", "fused/both"),
    "dali_mixed": Feed("DALI's pipeline, decoding on the GPU", "dali", "mixed", needs_gpu=True),
    "dali_cpu": Feed("DALI's pipeline, decoding on the CPU", "dali", "cpu"),
    "torch_pillow": Feed("DataLoader, torchvision v2 in its workers", "torch_pillow"),
    "torch_device": Feed("DataLoader, torchvision v2 on the device", "torch_device", "torchvision"),
    "torch": Feed("gpuload, torch", "gpuload", "torch"),
    "timm": Feed("timm's PrefetchLoader", "timm_prefetch"),
    "kornia_own": Feed("DataLoader, Kornia's AugmentationSequential", "torch_device", "kornia"),
    "kornia": Feed("gpuload, kornia", "gpuload", "kornia"),
    "dali": Feed("gpuload, dali", "gpuload", "dali"),
}
# That are fed, by torchvision's names.
NETWORKS = {"resnet18": "ResNet-18", "resnet50": "ResNet-50"}
# What nothing can be faster than, in this run; they come first.
CEILINGS = {
    "decoder": "the CPU's decoder alone, on all cores",
    "device": "copies, and the networks on one batch that stays",
    "device_decoder": "nvImageCodec alone, on the device",
}
# gpuload's parts by themselves, each of which is held against a ceiling.
PARTS = {
    "stage": "the fused stage",
    "workers": "gpuload's workers, slots discarded",
    "arrays": "arrays in memory, to the device",
    "array_file": "an ArrayFile of 256×256, to the device",
    "resident": "a resident CIFAR-10 (DeviceCached)",
    "light_workers": "gpuload, fused, light photographs",
    "light_device": "gpuload, light photographs, decoded on the GPU",
}
# Of these, gpuload's variant; they read light photographs.
LIGHT = {"light_workers": "fused", "light_device": "fused/device"}


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long a row takes.

    Attributes:
        warm_s: before the first round, of each phase of a row.
        round_s, rounds: of each phase.
        steps: of a round, at least.
        small: a small network in the place of the ResNets.
        alone: no network is fed.
    """

    warm_s: float = 1.0
    round_s: float = 1.0
    rounds: int = 3
    steps: int = 3
    small: bool = False
    alone: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))
