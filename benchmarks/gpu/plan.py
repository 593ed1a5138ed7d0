"""The rows of each command, in order of importance in case the time runs out, and the duration of each row.

This module imports nothing heavy, since the driver, which does not load torch, imports it too.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final, Literal

Files = Literal["plain", "light", "packed", "packed_cuttable"]
# The files that a row reads. Packed ones are tar shards.
FILES: Final[dict[Files, str]] = {
    "plain": "the photographs as they are",
    "light": "quality 90, 4:2:0",
    "packed": "packed, short side 256",
    "packed_cuttable": "packed, short side 256, cuttable",
}
BATCH: Final = 256
SMALL_BATCH: Final = 64


@dataclass(frozen=True)
class Feed:
    """A loader that is measured alone, then feeding networks.

    Attributes:
        label: the name in the tables.
        peer: the name of the peer, as in `benchmarks.peers.protocol`.
        variant: the recipe's variant.
        needs_gpu: whether the loader cannot run on the CPU.
        files: the files to read.
        batch_size: the images in a batch.
        feeds: whether to feed networks.
    """

    label: str
    peer: str
    variant: str = "auto"
    needs_gpu: bool = False
    files: Files = "plain"
    batch_size: int = BATCH
    feeds: bool = True

    @property
    def is_gpuload(self) -> bool:
        return self.peer == "gpuload"


FEEDS: Final = {
    "fused": Feed("gpuload, fused", "gpuload", "fused"),
    "device_decode": Feed("gpuload, decoding on the GPU", "gpuload", "fused/device"),
    "both_decode": Feed("gpuload, a share decoded on the GPU", "gpuload", "fused/both"),
    "packed_cuttable": Feed("gpuload, packed, cuttable", "gpuload", "fused", files="packed_cuttable"),
    "packed": Feed("gpuload, packed", "gpuload", "fused", files="packed"),
    "light_workers": Feed("gpuload, light photographs", "gpuload", "fused", files="light", feeds=False),
    "light_device": Feed(
        "gpuload, light photographs, decoded on the GPU", "gpuload", "fused/device", files="light", feeds=False
    ),
    "fused_64": Feed("gpuload, batches of 64", "gpuload", "fused", batch_size=SMALL_BATCH),
    "packed_cuttable_64": Feed(
        "gpuload, packed, cuttable, batches of 64",
        "gpuload",
        "fused",
        files="packed_cuttable",
        batch_size=SMALL_BATCH,
    ),
    "dali_mixed": Feed("DALI's pipeline, decoding on the GPU", "dali", "mixed", needs_gpu=True),
    "dali_cpu": Feed("DALI's pipeline, decoding on the CPU", "dali", "cpu"),
    "timm": Feed("timm's PrefetchLoader", "timm_prefetch"),
    "kornia_own": Feed("DataLoader, Kornia's AugmentationSequential", "torch_device", "kornia"),
    "cvcuda": Feed("DataLoader, CV-CUDA's Compose", "torch_device", "cvcuda", needs_gpu=True),
    "torch_pillow": Feed("DataLoader, torchvision v2 in its workers", "torch_pillow"),
    "torch_device": Feed("DataLoader, torchvision v2 on the device", "torch_device", "torchvision"),
    "torch": Feed("gpuload, torch", "gpuload", "torch"),
    "kornia": Feed("gpuload, kornia", "gpuload", "kornia"),
    "dali": Feed("gpuload, dali", "gpuload", "dali"),
}


@dataclass(frozen=True)
class Session:
    """A session of gpuload whose time is explained: the files, the images in a batch, and `prefetch_factor`, which is
    not given if None."""

    files: Files
    batch_size: int
    prefetch: int | None

    @property
    def label(self) -> str:
        ahead = "the default look-ahead" if self.prefetch is None else f"{self.prefetch} batches ahead"
        return f"batches of {self.batch_size}, {FILES[self.files]}, {ahead}"


SESSIONS: Final = {
    f"{files}_{batch_size}_{'default' if prefetch is None else prefetch}": Session(files, batch_size, prefetch)
    for prefetch in (None, 2)
    for batch_size in (BATCH, SMALL_BATCH)
    for files in ("plain", "packed_cuttable")
}
# The networks to feed, by torchvision's names.
NETWORKS: Final = {"resnet18": "ResNet-18", "resnet50": "ResNet-50"}
# The upper bounds in this run.
CEILINGS: Final = {
    "decoder": "the CPU's decoder alone, on all cores",
    "device": "copies, and the networks on one resident batch",
    "device_decoder": "nvImageCodec alone, on the device",
}
# gpuload's parts alone, each compared with an upper bound.
PARTS: Final = {
    "workers": "gpuload's workers, batches discarded",
    "arrays": "arrays in memory, to the device",
    "array_file": "an ArrayFile of 256×256, to the device",
    "resident": "a resident CIFAR-10",
}
COMMANDS: Final[dict[str, tuple[str, ...]]] = {
    "why": tuple(SESSIONS),
    "decoding": (
        "decoder", "device", "device_decoder", "device_decode", "both_decode", "fused", "packed_cuttable", "packed",
        "light_workers", "light_device", "fused_64", "packed_cuttable_64", *PARTS,
    ),
    "peers": (
        "fused", "dali_mixed", "dali_cpu", "timm", "kornia_own", "cvcuda", "torch_pillow", "torch_device", "torch",
        "kornia", "dali",
    ),
}  # fmt: skip
ROWS: Final = {
    **CEILINGS,
    **{name: feed.label for name, feed in FEEDS.items()},
    **PARTS,
    **{name: session.label for name, session in SESSIONS.items()},
}


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The duration of a row.

    Attributes:
        warm_s: warm-up seconds before the first round of each phase.
        round_s, rounds: the seconds per round, and the rounds per phase.
        steps: the minimum number of steps in a round.
        window_s, window_rounds: the seconds per window of a `Session`, and how often each way has a window.
        traced_batches: the batches of a session's trace.
        small: use a small network instead of the ResNets, and keep the device and the host busy only for a moment.
    """

    warm_s: float = 1.0
    round_s: float = 1.0
    rounds: int = 3
    steps: int = 3
    window_s: float = 3.0
    window_rounds: int = 2
    traced_batches: int = 20
    small: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))


SIMULATED_PACE: Final = Pace(
    warm_s=0, round_s=0, rounds=1, steps=2, window_s=0, window_rounds=1, traced_batches=2, small=True
)
