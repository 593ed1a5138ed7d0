"""The chains and datasets whose batches are recorded to the bit.

A case is a function that makes the arguments of a `gpuload.Loader` from `Samples`. Together, the cases cover all
transforms, the usual recipes, all kinds of samples, and most options. They use public names only.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bits.samples import DAMAGED, FILES, Samples, Stream, collate_to_lists
from transforms.specs import SPECS

import gpuload as gl
from gpuload import transforms as T

__all__ = ["CASES", "RUNS", "Case"]

RUNS = ("torch", "batched", "kornia", "dali", "fused")
UNFUSED = tuple(run for run in RUNS if run != "fused")  # kernels take long in Triton's interpreter
NORMALIZE = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CONVERSIONS = [T.ToDtype("float32", scale=True), NORMALIZE]
FILL = {gl.Image: (123, 117, 104), gl.Mask: 255}
CLASSES = 5


@dataclass(frozen=True)
class Case:
    """A loader whose batches are recorded.

    Attributes:
        name: the name of the function that makes it.
        make: returns the arguments of a Loader, including ``dataset`` and ``transforms``.
        runs: the backends, and ``"batched"``: the reference's runner for entire batches.
        epochs: how many consecutive epochs are run, from `first_epoch`; only one if kernels are interpreted.
        strides: whether the batches' strides are compared too.
        warns: whether the loader is expected to warn.
        drive: yields the batches, given `make`'s result; by default, a loader is iterated over.
    """

    name: str
    make: Callable[[Samples], dict[str, Any]]
    runs: tuple[str, ...] = RUNS
    epochs: int = 1
    first_epoch: int = 0
    strides: bool = False
    warns: bool = False
    drive: Callable[[dict[str, Any]], Iterator[Any]] | None = None


CASES: dict[str, Case] = {}


def case(**options: Any) -> Callable[[Callable[[Samples], dict[str, Any]]], Callable[[Samples], dict[str, Any]]]:

    def add(make: Callable[[Samples], dict[str, Any]]) -> Callable[[Samples], dict[str, Any]]:
        name = make.__name__
        assert name not in CASES, name
        CASES[name] = Case(name, make, **options)
        return make

    return add


def jpegs(samples: Samples, transforms: list[Any], **options: Any) -> dict[str, Any]:
    """Return options with a dataset of JPEGs and classes, whose last batch is smaller."""
    return {"dataset": samples.make(samples.labeled_jpeg, odd=True), "transforms": transforms, **options}


def even_jpegs(samples: Samples, transforms: list[Any], **options: Any) -> dict[str, Any]:
    """Return options with a dataset of an even number of JPEGs and classes."""
    return {"dataset": samples.make(samples.labeled_jpeg), "transforms": transforms, **options}


# -- recipes ----------------------------------------------------------------------------------------------------------


@case(epochs=2)
def classification(samples: Samples) -> dict[str, Any]:
    chain = [T.RandomResizedCrop(24), T.RandomHorizontalFlip(), *CONVERSIONS, T.RandomErasing(p=0.7)]
    return jpegs(samples, chain, shuffle=True)


@case()
def classification_evaluation(samples: Samples) -> dict[str, Any]:
    return jpegs(samples, [T.Resize(26, interpolation="bicubic"), T.CenterCrop(22), *CONVERSIONS])


@case()
def randaugment(samples: Samples) -> dict[str, Any]:
    chain = [T.RandomResizedCrop(24, interpolation="nearest"), T.RandomHorizontalFlip(), T.RandAugment(3), *CONVERSIONS]
    return jpegs(samples, chain)


@case()
def trivialaugment(samples: Samples) -> dict[str, Any]:
    chain = [T.RandomVerticalFlip(), T.TrivialAugmentWide(interpolation="bilinear", fill=(9, 8, 7)), T.CenterCrop(20)]
    return jpegs(samples, chain)


@case()
def autoaugment(samples: Samples) -> dict[str, Any]:
    policies = [T.AutoAugment("imagenet", "bilinear"), T.AutoAugment("svhn", fill=(1, 2, 3))]
    return jpegs(samples, [T.RandomResizedCrop(24), T.RandomChoice(policies, p=(2, 1)), *CONVERSIONS])


@case()
def augmix(samples: Samples) -> dict[str, Any]:
    return jpegs(samples, [T.RandomResizedCrop(20), T.AugMix(), *CONVERSIONS])


@case()
def timm(samples: Samples) -> dict[str, Any]:
    chain = [
        T.RandomResizedCrop(24, interpolation="random"),
        T.RandomHorizontalFlip(),
        T.TimmRandAugment("rand-m9-mstd0.5-inc1"),
        NORMALIZE,
        T.RandomErasing(0.7, mode="pixel", max_count=3),
    ]
    return jpegs(samples, chain)


@case()
def timm_strings(samples: Samples) -> dict[str, Any]:
    strings = ("rand-n3-m7-p1", "rand-n2-p1-mstdinf-t3aw", "rand-n2-m5-tweights")
    chain = [T.RandomCropOrPad(24), T.RandomChoice([T.TimmRandAugment(string) for string in strings])]
    return even_jpegs(samples, chain)


@case()
def timm_policies(samples: Samples) -> dict[str, Any]:
    policies = [T.TimmAutoAugment("original-mstd0.5"), T.TimmAutoAugment("3a"), T.TimmAugMix("augmix-m5-w4-d2")]
    return even_jpegs(samples, [T.RandomCropOrPad(24), T.RandomChoice(policies)])


class Inverted(T.Custom):
    """A custom transform that inverts images and their masks with probability 0.5."""

    moves_pixels = False

    def draw(self, uniforms: Any, sizes_hw: np.ndarray) -> np.ndarray:
        return (uniforms(1)[:, 0] < 0.5).astype(np.uint8)

    def apply(self, images: Any, params: Any) -> Any:
        return images ^ (255 * params)[:, None, None, None]

    apply_masks = apply


@case()
def own(samples: Samples) -> dict[str, Any]:
    chain = [T.RandomResizedCrop(24), Inverted(), T.Lambda(_doubled), T.RandomHorizontalFlip(), *CONVERSIONS]
    return jpegs(samples, chain)


def _doubled(images: Any) -> Any:
    return images * 2


@case()
def compressed(samples: Samples) -> dict[str, Any]:
    chain = [T.RandomResizedCrop(24, interpolation="lanczos"), T.JPEG((20, 80)), T.GaussianNoise(clip=False)]
    return jpegs(samples, chain)


@case()
def light(samples: Samples) -> dict[str, Any]:
    chain = [
        T.RandomResizedCrop(24),
        T.GaussianIllumination((0.2, 0.8), p=0.8),
        T.RandomHorizontalFlip(),
        T.PlanckianJitter(p=0.8),
        T.RandomGamma((50, 200), p=0.8),
    ]
    return jpegs(samples, chain)


@case(runs=UNFUSED)
def shadow(samples: Samples) -> dict[str, Any]:
    chain = [T.Resize((24, 28)), T.RandomShadow(p=0.8), T.MotionBlur((3, 9), p=0.8), T.CLAHE(p=0.8), *CONVERSIONS]
    return jpegs(samples, chain)


@case(runs=UNFUSED)
def elastic(samples: Samples) -> dict[str, Any]:
    chain = [T.Resize((30, 26), "bicubic", antialias=False), T.ElasticTransform((60.0, 90.0), 2.0), NORMALIZE]
    return jpegs(samples, chain)


@case()
def timm_keep_ratio(samples: Samples) -> dict[str, Any]:
    scale = {"random_scale_prob": 0.8, "random_scale_range": (0.8, 1.2), "random_scale_area": True}
    aspect = {"random_aspect_prob": 0.8, "random_aspect_range": (0.7, 1.5)}
    chain = [
        T.TrimBorder(2),
        T.ResizeKeepRatio(24, longest=0.5, interpolation="random", **scale, **aspect),
        T.RandomCropOrPad((22, 26), padding_mode="reflect"),
        *CONVERSIONS,
    ]
    return jpegs(samples, chain)


@case(runs=UNFUSED)
def timm_evaluation(samples: Samples) -> dict[str, Any]:
    chain = [T.ResizeKeepRatio(26, 1, "bicubic"), T.CenterCropOrPad(24, fill=(1, 2, 3)), NORMALIZE]
    return jpegs(samples, chain)


@case(epochs=2)
def cifar(samples: Samples) -> dict[str, Any]:
    chain = [
        T.RandomCrop(32, padding=4, padding_mode="reflect"),
        T.RandomHorizontalFlip(),
        T.AutoAugment("cifar10"),
        *CONVERSIONS,
        T.RandomErasing(0.5, scale=(0.05, 0.3), value=(0.1, 0.2, 0.3)),
    ]
    dataset = samples.make(lambda number: (samples.array(number, size=(32, 32)), np.int64(number)))
    return {"dataset": dataset, "transforms": chain, "shuffle": True}


@case()
def simclr(samples: Samples) -> dict[str, Any]:
    view = [
        T.RandomResizedCrop(20),
        T.RandomHorizontalFlip(),
        T.RandomApply([T.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8),
        T.RandomGrayscale(p=0.2),
        T.RandomApply([T.GaussianBlur(5, sigma=(0.1, 2.0))], p=0.5),
    ]
    return jpegs(samples, [T.MultiView([view, view]), *CONVERSIONS])


@case(runs=UNFUSED)
def dino(samples: Samples) -> dict[str, Any]:
    def view(size: int, scale: tuple[float, float], blur_p: float, solarize_p: float) -> list[Any]:
        return [
            T.RandomResizedCrop(size, scale=scale, interpolation="bicubic"),
            T.RandomHorizontalFlip(),
            T.RandomApply([T.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8),
            T.RandomApply([T.GaussianBlur(5)], p=blur_p),
            T.RandomSolarize(128, p=solarize_p),
        ]

    global_crop, local_crop = (22, (0.4, 1.0)), (12, (0.05, 0.4))
    views = [view(*global_crop, 1, 0), view(*global_crop, 0.1, 0.5), *[view(*local_crop, 0.5, 0)] * 2]
    return jpegs(samples, [T.MultiView(views), *CONVERSIONS])


# -- masks, boxes and keypoints ---------------------------------------------------------------------------------------


@case()
def detection(samples: Samples) -> dict[str, Any]:
    """Augment as SSD does."""
    chain = [
        T.RandomPhotometricDistort(),
        T.RandomZoomOut(fill=FILL, side_range=(1, 1.5)),
        T.RandomIoUCrop(),
        T.RandomHorizontalFlip(),
        T.ToDtype("float32", scale=True),
        T.ConvertBoundingBoxFormat("XYXY"),
        T.SanitizeBoundingBoxes(),
    ]
    dataset = samples.make(partial(samples.scene, box_format="cxcywh"), odd=True)
    return {"dataset": dataset, "transforms": chain, "ragged": "list"}


def _instances(sample: Any) -> Any:
    """Get the fields with one entry per box."""
    return sample[1]["labels"], sample[1]["keypoints"]


@case()
def detection_jitter(samples: Samples) -> dict[str, Any]:
    """Use large scale jittering, with keypoints of the instances."""
    chain = [
        T.ScaleJitter((32, 32), (0.4, 1.6)),
        T.RandomCrop(28, pad_if_needed=True, fill=FILL),
        T.RandomVerticalFlip(),
        T.SanitizeBoundingBoxes(min_size=3, labels_getter=_instances),
        *CONVERSIONS,
    ]
    dataset = samples.make(partial(samples.scene, box_format="xywh", points=True))
    return {"dataset": dataset, "transforms": chain}


@case()
def detection_masks(samples: Samples) -> dict[str, Any]:
    """Augment as Mask R-CNN does, with padded images."""
    chain = [
        T.RandomShortestSize([18, 22, 26], max_size=36),
        T.RandomIoUCrop(trials=20),
        T.RandomRotation(20),
        T.ClampBoundingBoxes(),
        T.ConvertBoundingBoxFormat("cxcywh"),
        T.SanitizeBoundingBoxes(),
        NORMALIZE,
    ]
    dataset = samples.make(partial(samples.scene, masks=True, points=True), odd=True)
    return {"dataset": dataset, "transforms": chain, "ragged": "pad"}


@case()
def segmentation(samples: Samples) -> dict[str, Any]:
    chain = [
        T.RandomResize(16, 40),
        T.RandomHorizontalFlip(),
        T.RandomCrop(26, pad_if_needed=True, fill={gl.Image: 0, gl.Mask: 255}),
        T.ToDtype({gl.Image: "float32", gl.Mask: "int64"}, scale=True),
        NORMALIZE,
    ]
    dataset = samples.make(
        lambda number: (gl.Encoded(samples.png(number)), gl.Mask(gl.Encoded(samples.png(number, "P")))), odd=True
    )
    return {"dataset": dataset, "transforms": chain}


@case(runs=UNFUSED)
def masks_of_all_dtypes(samples: Samples) -> dict[str, Any]:
    """Transform masks in nested dicts by warps and borders."""

    def sample(number: int) -> dict[str, Any]:
        kinds = (np.uint8, np.bool_, np.int16, np.int32, np.int64, np.float32, np.float64)
        masks = {np.dtype(kind).name: gl.Mask(samples.masks(number, 2, kind)) for kind in kinds}
        return {
            "inputs": {"image": samples.array(number), "semantic": gl.Mask(samples.masks(number, 1)[0])},
            "masks": [masks, gl.Mask(samples.masks(number, 1, np.float16))],
            "points": gl.Keypoints(samples.points(number, 4)),
            "name": f"sample {number}",
        }

    chain = [
        T.RandomAffine(30, (0.1, 0.1), (0.7, 1.3), 10, "bilinear", {gl.Image: 9, gl.Mask: 1}),
        T.RandomPerspective(0.4, 0.7, fill={gl.Image: (1, 2, 3), gl.Mask: 1}),
        T.Pad((2, 5), fill={gl.Image: 4, gl.Mask: 1}),
        T.Resize((20, 24)),
        NORMALIZE,
    ]
    return {"dataset": samples.make(sample, odd=True), "transforms": chain}


@case(runs=UNFUSED)
def targets_in_branches(samples: Samples) -> dict[str, Any]:
    """Apply transforms to integer boxes and masks of some samples only, and make two views."""

    def sample(number: int) -> Any:
        boxes = gl.Boxes(samples.boxes(number, "xywh", np.int64), "xywh")
        return gl.Encoded(samples.png(number)), gl.Mask(samples.masks(number, 1)[0]), boxes

    flips_and_rotation = [
        T.RandomHorizontalFlip(1),
        T.RandomRotation((5, 40), "bilinear", fill=FILL),
        T.RandomVerticalFlip(1),
    ]
    chain = [
        T.RandomApply([T.RandomOrder(flips_and_rotation)], 0.7),
        T.MultiView([[T.Resize((18, 22)), T.RandomChoice(flips_and_rotation)], T.RandomResizedCrop(16)]),
    ]
    return {"dataset": samples.make(sample, odd=True), "transforms": chain}


# -- mixing, erasing, nested transforms --------------------------------------------------------------------------------


@case(epochs=2)
def mixup(samples: Samples) -> dict[str, Any]:
    chain = [T.RandomResizedCrop(20), *CONVERSIONS, T.MixUp(alpha=0.4, num_classes=CLASSES)]
    return even_jpegs(samples, chain, shuffle=True)


@case()
def cutmix(samples: Samples) -> dict[str, Any]:
    chain = [T.Resize((20, 24)), T.ToDtype("float32", scale=True), T.CutMix(num_classes=CLASSES)]
    return even_jpegs(samples, chain)


@case(epochs=2)
def mixup_or_cutmix(samples: Samples) -> dict[str, Any]:
    mixing = T.RandomChoice([T.MixUp(alpha=0.8, num_classes=CLASSES), T.CutMix(num_classes=CLASSES)])
    chain = [T.CenterCropOrPad(22), NORMALIZE, T.RandomErasing(value="random"), T.RandomHorizontalFlip(), mixing]
    return even_jpegs(samples, chain, drop_last=True, dtype="float16")


@case()
def nested(samples: Samples) -> dict[str, Any]:
    color = T.RandomApply([T.ColorJitter(0.5), T.RandomInvert(0.5)], 0.6)
    chain = [
        T.Compose([T.RandomResizedCrop(30), T.Identity()]),
        T.RandomChoice([T.RandomCrop(20), T.Compose([color, T.CenterCrop(20)]), T.Resize((20, 20))], p=(1, 2, 1)),
        T.RandomOrder([T.RandomHorizontalFlip(0.5), color, T.RandomApply([T.RandomOrder([T.GaussianBlur(3), color])])]),
        NORMALIZE,
    ]
    return even_jpegs(samples, chain)


@case()
def erasing_of_levels(samples: Samples) -> dict[str, Any]:
    """Erase before and after `ToDtype`, with transforms of levels in between."""
    chain = [
        T.RandomResizedCrop(22),
        T.RandomErasing(0.8, value=(3, 200, 77), max_count=3),
        T.RandomAutocontrast(),
        T.ToDtype("float32", scale=True),
        T.RandomErasing(0.8, value=0.25),
        T.ColorJitter(0.4),
    ]
    return jpegs(samples, chain)


@case()
def erasing_of_finished_images(samples: Samples) -> dict[str, Any]:
    chain = [
        T.CenterCropOrPad(24, padding_mode="symmetric"),
        NORMALIZE,
        T.RandomErasing(0.7, value="random"),
        T.RandomErasing(0.7, mode="rand", min_count=1, max_count=2),
        T.RandomErasing(0.7, value=(0.5, -1, 2)),
        T.RandomVerticalFlip(),
    ]
    return jpegs(samples, chain)


# -- other transforms -----------------------------------------------------------------------------------------------


@case()
def colours(samples: Samples) -> dict[str, Any]:
    chain = [
        T.CenterCropOrPad(24),
        T.ColorJitter(0.4, 0.4, 0.4, 0.2),
        T.RandomGrayscale(0.3),
        T.RandomPhotometricDistort(p=0.7),
    ]
    return jpegs(samples, chain)


@case()
def tones(samples: Samples) -> dict[str, Any]:
    chain = [
        T.CenterCropOrPad(24),
        T.RandomAutocontrast(),
        T.RandomAdjustSharpness(2.3),
        T.RandomSolarize(100, 0.3),
        T.RandomInvert(0.3),
        T.RandomEqualize(0.4),
        T.RandomPosterize(3, 0.4),
    ]
    return jpegs(samples, chain)


@case()
def mosaics(samples: Samples) -> dict[str, Any]:
    """Combine samples with boxes, masks and keypoints; the last two samples lack partners."""
    dataset = samples.make(partial(samples.scene, masks=True, points=True)) * 2
    chain = [
        T.RandomHorizontalFlip(),
        T.Mosaic((44, 40), p=0.8, fill={gl.Image: (114, 9, 0), gl.Mask: 3}),
        T.RandomAffine(15, (0.1, 0.1), (0.7, 1.3), interpolation="bilinear"),
        T.CenterCropOrPad(36),
        T.ColorJitter(0.3),
        T.SanitizeBoundingBoxes(min_size=2),
        *CONVERSIONS,
    ]
    return {"dataset": dataset, "transforms": chain}


@case(runs=("torch",))
def keypoints_left_out(samples: Samples) -> dict[str, Any]:
    dataset = samples.make(partial(samples.scene, points=True))
    chain = [T.RandomCrop(24, pad_if_needed=True), T.SanitizeKeyPoints(), T.RandomRotation(40), T.ClampKeyPoints()]
    return {"dataset": dataset, "transforms": chain}


@case(runs=("torch",))
def frames_of_clips(samples: Samples) -> dict[str, Any]:
    """Use clips as an array and as a list of files."""
    clip = np.stack([samples.array(number, size=(30, 34)) for number in range(5)])
    files = [gl.Encoded(samples.jpeg(number)) for number in range(4)]
    return {
        "dataset": [{"clip": gl.Image(clip), "files": files}] * 4,
        "transforms": [T.UniformTemporalSubsample(3), T.RandomResizedCrop(20)],
    }


@case()
def pasted_instances(samples: Samples) -> dict[str, Any]:
    """Paste instances of images of different sizes, and combine the images as mosaics."""
    dataset = samples.make(partial(samples.scene, box_format="cxcywh", masks=True), odd=True) * 3
    chain = [T.CopyPaste(0.8), T.Mosaic(60), T.RandomResizedCrop(28), T.RandomVerticalFlip()]
    return {"dataset": dataset, "transforms": chain, "shuffle": True}


@case()
def channels(samples: Samples) -> dict[str, Any]:
    return jpegs(samples, [T.CenterCropOrPad(24), T.RandomChannelPermutation()])


@case()
def colours_of_floats(samples: Samples) -> dict[str, Any]:
    chain = [
        T.ToDtype("float32", scale=True),
        T.RandomResizedCrop(22),
        T.ColorJitter((0.5, 1.5), (0.5, 1.5), (0.5, 1.5), (-0.1, 0.3)),
        T.RandomSolarize(0.5),
        T.RandomAdjustSharpness(0.2),
        T.GaussianBlur((3, 5)),
        NORMALIZE,
    ]
    return jpegs(samples, chain)


@case()
def blur_and_noise(samples: Samples) -> dict[str, Any]:
    chain = [T.RandomCropOrPad((20, 26), fill=77), T.GaussianBlur((5, 3), (0.3, 2.5)), T.GaussianNoise(0.05, 0.1)]
    return jpegs(samples, chain)


@case()
def warps(samples: Samples) -> dict[str, Any]:
    shear = (-20, 20, -5, 5)
    chain = [
        T.RandomAffine((-30, 60), (0.2, 0.1), (0.6, 1.4), shear, "bicubic", fill=(10, 20, 30), center=(12.5, 9)),
        T.RandomPerspective(0.6, 0.8, "nearest", 5),
        T.RandomRotation(45, "bilinear", center=(3, 4), fill=99),
        T.CenterCropOrPad(22),
    ]
    return jpegs(samples, chain)


@case()
def quarter_turns(samples: Samples) -> dict[str, Any]:
    """Turn images, masks, boxes and keypoints before and after crops."""
    dataset = samples.make(partial(samples.scene, masks=True, points=True), odd=True)
    chain = [
        T.RandomRotate90(0.9),
        T.RandomResizedCrop((26, 20)),
        T.RandomTranspose(),
        T.RandomEqualize(),
        T.RandomCrop(18),
        T.RandomRotate90(),
        NORMALIZE,
        T.RandomErasing(0.7, value="random"),
    ]
    return {"dataset": dataset, "transforms": chain}


@case()
def expanding_rotation(samples: Samples) -> dict[str, Any]:
    chain = [T.Resize(16, max_size=24), T.RandomRotation((-90, 90), "bicubic", expand=True, fill=(1, 2, 3)), NORMALIZE]
    return jpegs(samples, chain, ragged="list")


@case()
def borders(samples: Samples) -> dict[str, Any]:
    """Pad images and masks in all padding modes."""

    def sample(number: int) -> Any:
        return gl.Encoded(samples.png(number)), gl.Mask(samples.masks(number, 2, np.int32))

    chain = [
        T.RandomChoice(
            [
                T.Pad((3, -2, 4, 5), fill={gl.Image: (1, 2, 3), gl.Mask: 300}),
                T.Pad(6, padding_mode="edge"),
                T.Pad((9, 4), padding_mode="reflect"),
                T.Pad((1, 8, 3, 2), padding_mode="symmetric"),
            ]
        ),
        T.RandomZoomOut({gl.Image: 50, gl.Mask: -1}, (1, 1.3)),
        T.RandomCrop((24, 20), padding=3, padding_mode="edge", pad_if_needed=True),
    ]
    return {"dataset": samples.make(sample), "transforms": chain}


@case()
def resizings(samples: Samples) -> dict[str, Any]:
    """Resize up and down with each of the filters."""
    chain = [
        T.RandomResize(18, 30, "random"),
        T.RandomShortestSize((17, 23), None, "nearest"),
        T.ScaleJitter((26, 20), (0.5, 1.5), "bicubic"),
        T.RandomResizedCrop((19, 23), (0.2, 1), (0.5, 2)),
    ]
    return jpegs(samples, chain)


# -- kinds of images and batches --------------------------------------------------------------------------------------


@case()
def grey(samples: Samples) -> dict[str, Any]:
    """Decode files to one channel, change colors, and convert to three channels."""
    dataset = samples.make(
        lambda number: {"x": gl.Encoded(samples.jpeg(number), mode="L"), "y": float(number)}, odd=True
    )
    chain = [T.RandomResizedCrop(20), T.ColorJitter(0.3, 0.3, 0.3, 0.1), T.RandomEqualize(), T.Grayscale(3), NORMALIZE]
    return {"dataset": dataset, "transforms": chain}


@case()
def to_grey(samples: Samples) -> dict[str, Any]:
    chain = [T.RandomResizedCrop(20), T.Grayscale(), T.RandAugment(1), T.Normalize((0.5,), (0.25,))]
    return jpegs(samples, chain, dtype=torch.bfloat16)


@case()
def four_channels(samples: Samples) -> dict[str, Any]:
    dataset = samples.make(lambda number: gl.Encoded(samples.png(number, "RGBA"), mode="RGBA"), odd=True)
    chain = [T.RandomResizedCrop((18, 22)), T.RandomHorizontalFlip(), T.Pad(1, 5), T.ToDtype("float32", scale=True)]
    return {"dataset": dataset, "transforms": chain}


@case()
def several_images(samples: Samples) -> dict[str, Any]:
    """Use several images per sample, with different channels, sizes and formats."""

    def sample(number: int) -> dict[str, Any]:
        next_number = (number + 1) % samples.count
        return {
            "photo": gl.Encoded(samples.jpeg(number)),
            "more": [
                gl.Encoded(samples.png(next_number, "L"), mode="unchanged"),
                gl.Encoded(samples.png(next_number, "RGBA")),
            ],
            "planes": gl.Image(samples.array(number).transpose(2, 0, 1), layout="CHW"),
            "grey": gl.Image(samples.array(number, 1)[:, :, 0]),
            "label": number,
        }

    chain = [T.RandomResizedCrop(18), T.RandomInvert(), T.RandomRotation(30)]
    return {"dataset": samples.make(sample, odd=True), "transforms": chain}


@case(runs=("torch", "fused"))
def draws_for_each_image(samples: Samples) -> dict[str, Any]:
    """Use images with ``draws=``, and a mask and keypoints of the second image."""

    def sample(number: int) -> dict[str, Any]:
        array = samples.array(number)
        return {
            "anchor": gl.Image(array),
            "positive": gl.Image(array, draws=1),
            "mask": gl.Mask(array[:, :, 0], draws=1),
            "points": gl.Keypoints([[3.0, 4.0]], draws=1),
            "negative": gl.Encoded(samples.jpeg((number + 1) % samples.count), draws=2),
            "label": number,
        }

    chain = [T.RandomResizedCrop(18), T.RandomHorizontalFlip(), T.ColorJitter(0.3), T.RandomErasing(), NORMALIZE]
    return {"dataset": samples.make(sample), "transforms": chain}


@case()
def ragged_list(samples: Samples) -> dict[str, Any]:
    return jpegs(samples, [T.RandomShortestSize((15, 20)), T.ColorJitter(0.3), NORMALIZE], ragged="list")


@case(runs=UNFUSED)
def ragged_pad(samples: Samples) -> dict[str, Any]:
    return jpegs(samples, [T.RandomResize(14, 22), T.RandomHorizontalFlip(), NORMALIZE], ragged="pad")


@case(strides=True)
def channels_last(samples: Samples) -> dict[str, Any]:
    chain = [T.RandomResizedCrop(20), T.RandomHorizontalFlip(), *CONVERSIONS, T.RandomErasing(value="random")]
    return jpegs(samples, chain, memory_format="channels_last", dtype="float16")


@case(strides=True)
def levels_channels_last(samples: Samples) -> dict[str, Any]:
    chain = [T.RandomCropOrPad(24), T.RandomGrayscale(0.5), T.RandomAffine(20)]
    return jpegs(samples, chain, memory_format=torch.channels_last, decode=gl.Decode(exif=True))


# -- loading, which does not depend on the backend --------------------------------------------------------

CROP = [T.RandomResizedCrop(16), T.RandomHorizontalFlip(), NORMALIZE]
TORCH_ONLY = ("torch",)


@case(runs=TORCH_ONLY, epochs=2)
def user_collation(samples: Samples) -> dict[str, Any]:
    return jpegs(samples, [T.RandomShortestSize((15, 20))], collate_fn=collate_to_lists, num_workers=2)


@case(runs=TORCH_ONLY, warns=True)  # about boxes that are not transformed
def padded_collation(samples: Samples) -> dict[str, Any]:
    dataset = samples.make(
        lambda number: {
            "image": gl.Encoded(samples.jpeg(number)),
            "words": np.arange(number),
            "boxes": np.ones((number, 4)),
        }
    )
    collate = partial(gl.pad_collate, to={"boxes": (9, None)}, value={"words": -1, "boxes": 0.5, "image": 3})
    return {"dataset": dataset, "transforms": [T.RandomResize(12, 20), NORMALIZE], "collate_fn": collate}


@case(runs=TORCH_ONLY)
def single_samples(samples: Samples) -> dict[str, Any]:
    def sample(number: int) -> dict[str, Any]:
        return {
            "image": gl.Encoded(samples.jpeg(number)),
            "vector": np.arange(number, dtype=np.int16),
            "name": str(number),
        }

    return {"dataset": samples.make(sample), "transforms": [T.RandomResize(14, 20), *CONVERSIONS], "batch_size": None}


@case(runs=TORCH_ONLY, epochs=2)
def blocks(samples: Samples) -> dict[str, Any]:
    """Load arrays, strings and numbers together with images in workers."""

    def sample(number: int) -> Any:
        rng = np.random.default_rng(number)
        arrays = {
            "vector": rng.integers(0, 99, 7),
            "half": rng.integers(0, 99, (2, 3)).astype(np.float16),
            "scalar": np.float64(number / 7),
        }
        return gl.Encoded(samples.jpeg(number)), arrays, f"name {number}", number, number / 3, number % 2 == 0

    return {"dataset": samples.make(sample, odd=True), "transforms": CROP, "shuffle": True, "num_workers": 2}


@case(runs=TORCH_ONLY)
def arrays_alone(samples: Samples) -> dict[str, Any]:
    """Load arrays and tensors without images, some of them long."""

    def sample(number: int) -> Any:
        large_array = np.random.default_rng(number).integers(0, 9, (300, 300))
        bfloat16 = torch.full((2, 2), number / 3, dtype=torch.bfloat16)
        return large_array, {"text": "x" * number, "tensor": torch.arange(4) * number, "brain": bfloat16}

    return {"dataset": samples.make(sample, odd=True), "transforms": [], "shuffle": True}


@case(runs=TORCH_ONLY, epochs=2, warns=True)
def skipped(samples: Samples) -> dict[str, Any]:
    options = even_jpegs(samples, CROP, on_error="skip", num_workers=2, info=True, shuffle=True)
    options["dataset"][3] = gl.Encoded(DAMAGED), 3
    return options


@case(runs=TORCH_ONLY, epochs=2, warns=True)
def replaced(samples: Samples) -> dict[str, Any]:
    options = even_jpegs(samples, CROP, faults=gl.Faults(on_error="replace"), info=True, shuffle=True)
    options["dataset"][5] = gl.Encoded(DAMAGED), 5
    return options


@case(runs=TORCH_ONLY)
def stream(samples: Samples) -> dict[str, Any]:
    return {"dataset": Stream(samples.make(samples.labeled_jpeg)), "transforms": CROP, "info": True}


@case(runs=TORCH_ONLY)
def streams_of_workers(samples: Samples) -> dict[str, Any]:
    mixing = [*CROP, T.MixUp(num_classes=CLASSES)]
    return {"dataset": Stream(samples.make(samples.labeled_jpeg)), "transforms": mixing, "info": True, "num_workers": 2}


@case(runs=TORCH_ONLY)
def own_orders(samples: Samples) -> dict[str, Any]:
    """Use a batch sampler with batches of different sizes and repeated keys."""
    return even_jpegs(samples, CROP, batch_sampler=[[6, 1], [0, 0, 4, 2, 7], [3]], batch_size=1, info=True)


def batches_of_ranks(options: dict[str, Any]) -> Iterator[Any]:
    """Yield the number of batches and the batches of each of two ranks."""
    for rank in range(2):
        with gl.Loader(**options, rank=rank, world_size=2) as loader:
            loader.set_epoch(3)
            yield len(loader)
            yield from loader


@case(runs=TORCH_ONLY, drive=batches_of_ranks)
def ranks(samples: Samples) -> dict[str, Any]:
    """Divide the samples among ranks of different lengths, so that each sample is loaded once."""
    return jpegs(samples, CROP, uneven="exact", info=True, shuffle=True, batch_size=2)


@case(runs=TORCH_ONLY, drive=batches_of_ranks)
def repeats(samples: Samples) -> dict[str, Any]:
    return even_jpegs(samples, CROP, repeats=3, shuffle=True, info=True, batch_size=3)


@case(runs=TORCH_ONLY, epochs=2, first_epoch=3)
def weights(samples: Samples) -> dict[str, Any]:
    return even_jpegs(samples, CROP, weights=np.arange(1, samples.count + 1), sampler=None, info=True, batch_size=3)


def resumed_batches(options: dict[str, Any]) -> Iterator[Any]:
    """Yield one batch of a loader, and the remaining batches from a second loader that resumes from its state."""
    with gl.Loader(**options) as loader:
        yield next(iter(loader))
        state = loader.state_dict()
    with gl.Loader(**options) as loader:
        loader.load_state_dict(state)
        yield from loader
        yield from loader


@case(runs=TORCH_ONLY, drive=resumed_batches)
def resumption(samples: Samples) -> dict[str, Any]:
    return even_jpegs(samples, [*CROP, T.CutMix(num_classes=CLASSES)], sampler=[5, 2, 7, 0, 1, 6, 3, 4], info=True)


def batches_of_files(options: dict[str, Any]) -> Iterator[Any]:
    """Yield the batches of an `ImageFolder` and of `ImageFiles`, made from files in folders of classes."""
    with tempfile.TemporaryDirectory() as root:
        for number, path in enumerate(sorted(FILES.glob("?.jpg"))):
            folder = Path(root) / f"class {number % 3}"
            folder.mkdir(exist_ok=True)
            (folder / path.name).write_bytes(path.read_bytes())
        dataset = gl.ImageFolder(root)
        yield dataset.classes
        with gl.Loader(dataset, **options) as loader:
            yield from loader
        with gl.Loader(gl.ImageFiles(root), **options) as loader:
            yield from loader


@case(runs=TORCH_ONLY, drive=batches_of_files)
def files(samples: Samples) -> dict[str, Any]:
    return {"transforms": CROP, "shuffle": True, "num_workers": 1, "decode": gl.Decode(exif=True)}


class Noise(torch.nn.Module):
    """A module at the end of the transforms, which draws from torch's generator."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch + torch.randint(-3, 4, batch.shape) / 8


@case(runs=TORCH_ONLY, epochs=2)
def module(samples: Samples) -> dict[str, Any]:
    return even_jpegs(samples, [*CROP, Noise()], shuffle=True)


@case(runs=("torch", "batched"))
def floats(samples: Samples) -> dict[str, Any]:
    """Use float32 images with 13 channels."""
    chain = [T.RandomResizedCrop(24), T.RandomVerticalFlip(), T.RandomRotation(20, interpolation="bilinear", fill=-9.5)]
    dataset = samples.make(lambda number: (gl.Image(samples.array(number, 13) / np.float32(7)), number))
    return {"dataset": dataset, "transforms": [*chain, T.Normalize((0.5,) * 13, (0.9,) * 13), T.RandomErasing(p=0.7)]}


@case(runs=("torch", "batched"))
def sixteen_bits(samples: Samples) -> dict[str, Any]:
    """Use uint16 images with 4 channels, which keep their dtype."""
    chain = [T.Resize(26, interpolation="bicubic"), T.RandomCrop(30, pad_if_needed=True, fill=40_000)]
    dataset = samples.make(lambda number: (gl.Image(samples.array(number, 4) * np.uint16(257)), number))
    return {"dataset": dataset, "transforms": [*chain, T.RandomPerspective(p=1.0)]}


@case(runs=("torch", "batched"))
def clips(samples: Samples) -> dict[str, Any]:
    """Use frames as one array, as a list, and as masks."""

    def make(number: int) -> Any:
        frames = np.stack([samples.array(number, size=(40, 50))[:, ::step] for step in (1, -1, 1)])
        return {
            "clip": gl.Image(frames),
            "list": [gl.Image(frame) for frame in frames],
            "masks": gl.Mask(frames[..., 0]),
        }

    return {"dataset": samples.make(make), "transforms": [*CROP[:2], T.ColorJitter(0.4), *CONVERSIONS], "batch_size": 4}


# Each transform that no chain above contains gets a case of its own.
CODE_ABOVE = Path(__file__).read_text()
for name, spec in SPECS.items():
    if spec.code and f"T.{name}(" not in CODE_ABOVE:
        CASES[name] = Case(name, partial(jpegs, transforms=[eval(spec.code), T.CenterCropOrPad(24)]))
