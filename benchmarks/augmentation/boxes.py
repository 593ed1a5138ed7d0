"""The command that compares `gpuload.Augment` and Kornia on batches with boxes, on the CPU (one thread) and on CUDA.

    python -m benchmarks.augmentation.boxes [--rounds N] [--batch-size N]

Both get the same uint8 images, N×3×384×384, and N×16×4 boxes on the device, and return normalised floats and boxes.
Kornia's `AugmentationSequential(data_keys=["input", "bbox_xyxy"])` starts from floats: the conversion is included in
its time. gpuload also drops boxes that are too small (`SanitizeBoundingBoxes`). Both run in this process, one after the
other in every round. The figures are medians over the rounds, of CPU time (on CUDA, of the device's time), and of the
ratios within rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.augmentation.contenders import Contender, Contenders
from benchmarks.augmentation.measuring import clock_of, measure
from benchmarks.peers.protocol import MEAN, STD
from benchmarks.running import format_table, make_parser
from gpuload import Augment, Boxes
from gpuload import transforms as T

BOXES, SIZE = 16, 384
SANITIZE, NORMALIZE = T.SanitizeBoundingBoxes(labels_getter=None), T.Normalize(MEAN, STD)
CASES = {
    "flip": [T.RandomHorizontalFlip(1.0)],
    "flip, affine": [T.RandomHorizontalFlip(1.0), T.RandomAffine(10, (0.1, 0.1), (0.8, 1.2), interpolation="bilinear")],
    "resized crop, flip": [T.RandomResizedCrop(256, scale=(0.3, 1)), T.RandomHorizontalFlip(1.0)],
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report."""
    parser = make_parser("augmentation.boxes", __doc__, rounds=9, batch_size=16)
    options = parser.parse_args(arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for device in ["cpu", *["cuda"][: torch.cuda.is_available()]]:
            lines = []
            for name in CASES:
                contenders = _contenders(name, options.batch_size, torch.device(device))
                rows = measure(contenders, clock_of(torch.device(device)), options.rounds)
                ours, theirs = ([reading.ms for reading in row.readings] for row in rows.values())
                ratio = statistics.median(their / our for our, their in zip(ours, theirs, strict=True))
                lines.append([name, *(f"{statistics.median(ms):.2f}" for ms in (ours, theirs)), f"{ratio:.2f}"])
            print(format_table([f"ms per batch, {device}", "gl.Augment", "Kornia", "Kornia / gl.Augment"], lines))
    finally:
        torch.set_num_threads(threads)
    return 0


def _contenders(name: str, count: int, device: torch.device) -> Contenders:
    random, size = np.random.default_rng(0), SIZE
    images = torch.from_numpy(random.integers(0, 256, (count, 3, size, size), np.uint8)).to(device)
    start = random.uniform(0, 0.6 * size, (count, BOXES, 2))
    array = np.concatenate([start, start + random.uniform(0.1, 0.4, (count, BOXES, 2)) * size], axis=2)
    boxes = torch.from_numpy(array.astype(np.float32)).to(device)
    valid = torch.from_numpy(random.integers(1, BOXES + 1, count)).to(device)
    augment = Augment([*CASES[name], SANITIZE, NORMALIZE])
    kornia_run = _kornia(name).to(device)
    mean_std = [torch.tensor(values, device=device).view(3, 1, 1) for values in (MEAN, STD)]

    def run_kornia(turn: int) -> Any:
        results = kornia_run(images.float() / 255, boxes)
        return (results[0] - mean_std[0]) / mean_std[1], results[1]

    ours = Contender(lambda turn: augment(images, Boxes(boxes, valid=valid)))
    return {"gl.Augment": ours, "Kornia": Contender(run_kornia)}


def _kornia(name: str) -> Any:
    from kornia import augmentation as K

    modules: dict[str, list[Any]] = {
        "flip": [K.RandomHorizontalFlip(p=1.0)],
        "flip, affine": [K.RandomHorizontalFlip(p=1.0), K.RandomAffine(10, (0.1, 0.1), (0.8, 1.2), p=1.0)],
        "resized crop, flip": [
            K.RandomResizedCrop((256, 256), scale=(0.3, 1), p=1.0),
            K.RandomHorizontalFlip(p=1.0),
        ],
    }
    return K.AugmentationSequential(*modules[name], data_keys=["input", "bbox_xyxy"])


if __name__ == "__main__":
    raise SystemExit(main())
