"""The rows to measure, in order of importance in case the time runs out, and the duration of each.

This module imports nothing heavy, since the driver, which does not load torch, imports it too.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Feed:
    """A loader that is measured alone, then feeding networks.

    Attributes:
        label: the name in the tables.
        peer: the name of the peer, as in `benchmarks.peers.protocol`.
        variant: the recipe's variant.
        needs_gpu: whether the loader cannot run on the CPU.
    """

    label: str
    peer: str
    variant: str = "auto"
    needs_gpu: bool = False

    @property
    def is_gpuload(self) -> bool:
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
# The networks to feed, by torchvision's names.
NETWORKS = {"resnet18": "ResNet-18", "resnet50": "ResNet-50"}
# The upper bounds in this run; they are measured first.
CEILINGS = {
    "decoder": "the CPU's decoder alone, on all cores",
    "device": "copies, and the networks on one resident batch",
    "device_decoder": "nvImageCodec alone, on the device",
}
# gpuload's parts alone, each compared with an upper bound.
PARTS = {
    "stage": "the fused stage",
    "workers": "gpuload's workers, batches discarded",
    "arrays": "arrays in memory, to the device",
    "array_file": "an ArrayFile of 256×256, to the device",
    "resident": "a resident CIFAR-10 (DeviceCached)",
    "light_workers": "gpuload, fused, light photographs",
    "light_device": "gpuload, light photographs, decoded on the GPU",
}
# The parts that read light photographs, with gpuload's variant.
LIGHT = {"light_workers": "fused", "light_device": "fused/device"}


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The duration of a row.

    Attributes:
        warm_s: warm-up seconds before the first round of each phase.
        round_s, rounds: the seconds per round, and the rounds per phase.
        steps: the minimum number of steps in a round.
        small: use a small network instead of the ResNets.
        alone: feed no network.
    """

    warm_s: float = 1.0
    round_s: float = 1.0
    rounds: int = 3
    steps: int = 3
    small: bool = False
    alone: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))
