"""The contenders: gpuload's stage on each backend, torchvision v2 per sample and per batch, and Kornia; on dense
batches gpuload's `Augment`, called as users call it, and DALI's dynamic mode.

A contender is a function of the turn number, which determines gpuload's draws, and ends with a complete batch. Where a
case has no such contender, a string with the reason takes its place, so that every gap in a table is explained.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.augmentation.cases import CLASSES, Case, Start
from benchmarks.augmentation.photographs import Photographs
from benchmarks.peers.protocol import MEAN, STD
from benchmarks.peers.torchvision_import import v2
from gpuload import Augment
from gpuload import transforms as T
from gpuload.errors import BackendError
from gpuload.rng.philox import epoch_key
from gpuload.stage import Plan, compile_stage
from gpuload.transforms.program.draws import Program

NO_KERNELS = "Triton runs on the CPU in its interpreter only, whose speed means nothing"
BACKENDS = ("torch", "kornia", "dali", "fused")
PEERS = {
    "pillow": "torchvision v2 per sample, Pillow",
    "tensors": "torchvision v2 per sample",
    "batch": "torchvision v2 per batch",
    "kornia": "Kornia AugmentationSequential",
    "dali": "DALI's dynamic mode",
}


@dataclass(frozen=True)
class Contender:
    """A function that makes the batch of turn n. `falls_back`: names of transforms that the torch backend runs
    instead."""

    run: Callable[[int], Any]
    falls_back: tuple[str, ...] = ()


Contenders = dict[str, Contender | str]
"""Contenders by name; a string is the reason why there is none."""
Run = Callable[[int], Any]


class Ours:
    """gpuload's chain and images of a case; `program` makes the draws for turn n."""

    def __init__(self, case: Case, photographs: Photographs) -> None:
        self.chain = T.Chain(case.ours)
        self.images = photographs.ragged(case.start)
        self._boxes = photographs.boxes if case.boxes else None

    def program(self, turn: int) -> Program:
        return self.chain.draw(epoch_key(0, turn), np.arange(len(self.images)), self.images.sizes_hw, self._boxes)


def contenders(case: Case, photographs: Photographs, backends: Sequence[str], peers: Sequence[str]) -> Contenders:
    """Build the contenders of a case, by their names in the tables: gpuload's `backends`, then `peers`."""
    entry, build = ("gl.Augment", _augment) if case.section == "dense" else ("gpuload", _stage)
    ours: Contenders = {f"{entry} {name}": _planned(case, photographs, name, build) for name in backends}
    makers = {"pillow": _pillow, "tensors": _tensors, "batch": _batch, "kornia": _kornia}
    if case.section == "dense":
        makers["dali"] = _dali
    return ours | {PEERS[name]: makers[name](case, photographs) for name in peers if name in makers}


def least_bytes(case: Case, photographs: Photographs, turns: Sequence[int]) -> int:
    """Return the minimum bytes to move for a batch, as a mean over turns: the required part of each image, read once,
    and the batch, written once."""
    ours, channels = Ours(case, photographs), 3
    size = torch.empty(0, dtype=getattr(torch, case.dtype) if case.floats else torch.uint8).element_size()
    totals = []
    for turn in turns:
        program = ours.program(turn)
        read = int(program.windows_tlhw[0][:, 2:].prod(axis=1).sum()) * channels
        totals.append(read + int(program.results_hw.prod(axis=1).sum()) * channels * size)
    return round(sum(totals) / len(totals))


def _stage(case: Case, photographs: Photographs, **options: Any) -> tuple[Plan, Run]:
    ours = Ours(case, photographs)
    stage = compile_stage(ours.chain, **options)
    return stage.plan, lambda turn: stage(ours.images, ours.program(turn))


def _augment(case: Case, photographs: Photographs, **options: Any) -> tuple[Plan, Run]:
    """Build `Augment`, which draws as a `Loader` does for the first batch of an epoch."""
    augment, batch = Augment(case.ours, **options), photographs.dense(case.start)

    def run(turn: int) -> torch.Tensor:
        augment.set_epoch(turn)
        return augment(batch)

    return augment.plan(), run


def _planned(case: Case, photographs: Photographs, backend: str, build: Callable[..., Any]) -> Contender | str:
    """Build gpuload's contender, if the backend runs the chain."""
    if backend == "fused" and photographs.device.type == "cpu":
        return NO_KERNELS
    try:
        plan, run = build(
            case,
            photographs,
            device=photographs.device,
            backend=backend,
            dtype=case.dtype if case.floats else None,
            memory_format="channels_last" if case.channels_last else "contiguous_format",
        )
    except BackendError as error:
        return " ".join(str(error).split())
    fallbacks = [type(step.transform).__name__ for step in plan.steps if step.backend != backend]
    if fallbacks and backend in ("kornia", "dali"):  # the time would not be the backend's alone
        return f"torch runs {', '.join(fallbacks)}"
    return Contender(run, tuple(fallbacks))


def _pillow(case: Case, photographs: Photographs) -> Contender | str:
    if photographs.device.type != "cpu":
        return "Pillow's images are on the CPU"
    return "it accepts no Pillow images" if case.no_pillow else _sampled(case, photographs, photographs.pillow)


def _tensors(case: Case, photographs: Photographs) -> Contender | str:
    return _sampled(case, photographs, photographs.tensors)


def _sampled(case: Case, photographs: Photographs, images_of: Callable[[Start], Sequence[Any]]) -> Contender | str:
    """Build torchvision's transforms, called on one image after another and stacked to a batch."""
    if case.mixed and not case.image:
        return "the transform mixes the images of a batch"
    compose, floats, finish = _composed(case.image), _floats(case), _finish(case, photographs)
    images = images_of(case.start)
    if case.boxes:
        samples = _with_boxes(images, photographs)
        return Contender(lambda turn: finish(torch.stack([floats(compose(*sample)[0]) for sample in samples])))
    return Contender(lambda turn: finish(torch.stack([floats(compose(image)) for image in images])))


def _batch(case: Case, photographs: Photographs) -> Contender | str:
    """Build torchvision's transforms on a batch, where each transform draws once. If sizes differ, images are first
    cropped one by one."""
    if case.boxes:
        return "the crops depend on the boxes of each image"
    compose, floats, finish = _composed(case.image[case.leading :]), _floats(case), _finish(case, photographs)
    if case.leading:
        compose_image, images = _composed(case.image[: case.leading]), photographs.tensors(case.start)
        return Contender(lambda turn: finish(floats(compose(torch.stack([compose_image(image) for image in images])))))
    batch = photographs.dense(case.start)
    return Contender(lambda turn: finish(floats(compose(batch))))


def _kornia(case: Case, photographs: Photographs) -> Contender | str:
    if importlib.util.find_spec("kornia") is None:
        return "Kornia is not installed: pip install kornia"
    if isinstance(case.kornia, str):
        return case.kornia
    import kornia.augmentation as K

    sequential = K.AugmentationSequential(*case.kornia(K), data_keys=["input"]).to(photographs.device)
    if not case.floats:
        floats = photographs.floats(case.start)
        return Contender(lambda turn: sequential(floats).contiguous())
    batch, dtype, layout = photographs.dense(case.start), getattr(torch, case.dtype), _layout(case)

    def run(turn: int) -> torch.Tensor:
        augmented = sequential(batch.to(torch.float32).div_(255))
        return augmented.to(dtype, memory_format=layout)

    return Contender(run)


def _dali(case: Case, photographs: Photographs) -> Contender | str:
    if photographs.device.type != "cpu":
        return "the recipes with DALI's dynamic mode are for the CPU"
    try:
        from benchmarks.augmentation.dali import make_run
    except ImportError as error:
        return f"DALI with its dynamic mode cannot be imported: {error}"
    run = make_run(case.name, photographs.dense(case.start))
    return "DALI has policies only for its pipelines" if run is None else Contender(run)


def _layout(case: Case) -> torch.memory_format:
    return torch.channels_last if case.channels_last else torch.contiguous_format


def _composed(transforms: Sequence[Any]) -> Callable[..., Any]:
    return v2.Compose(list(transforms)) if transforms else lambda image: image


def _floats(case: Case) -> Callable[[Any], torch.Tensor]:
    """Make a function that turns an image or a batch into a tensor of levels or floats, as the case requires."""

    def tensor(image: Any) -> torch.Tensor:
        return image if isinstance(image, torch.Tensor) else v2.functional.pil_to_tensor(image)

    if not case.floats:
        return tensor
    floats = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD), *case.finished])
    dtype = getattr(torch, case.dtype)
    return lambda image: floats(tensor(image)).to(dtype)


def _finish(case: Case, photographs: Photographs) -> Callable[[torch.Tensor], torch.Tensor]:
    """Make the last step of torchvision's contenders: mix the images and bring the batch into the memory layout."""
    layout = _layout(case)
    if not case.mixed:
        return lambda batch: batch.contiguous(memory_format=layout)
    mix = v2.Compose(list(case.mixed))
    labels = torch.arange(len(photographs.pillow(case.start)), device=photographs.device) % CLASSES
    return lambda batch: mix(batch, labels)[0].contiguous(memory_format=layout)


def _with_boxes(images: Sequence[Any], photographs: Photographs) -> list[tuple[Any, dict[str, Any]]]:
    from torchvision import tv_tensors  # importable only after torchvision_import

    samples = []
    for image, photograph, boxes in zip(images, photographs.pillow("photographs"), photographs.boxes, strict=True):
        shown = tv_tensors.Image(image) if isinstance(image, torch.Tensor) else image
        corners = tv_tensors.BoundingBoxes(
            torch.from_numpy(boxes).float(),  # pyright: ignore[reportCallIssue]
            format="XYXY",
            canvas_size=(photograph.height, photograph.width),
        )
        samples.append((shown, {"boxes": corners, "labels": torch.zeros(len(boxes), dtype=torch.int64)}))
    return samples
