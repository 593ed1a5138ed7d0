"""`wrap`: the datasets of torchvision and Hugging Face, yielding the bytes of images instead of decoded ones.

Runs in the main process; the result is copied to the workers, which read. Neither library is imported here: their
classes are recognised by name. Of a torchvision dataset only the data is kept, in few buffers: paths packed
(`gpuload.datasets.scan`), labels as an array, COCO's annotations as JSON (`gpuload.datasets.coco`). So workers import
no torch for it, and share one copy. Hugging Face's are in `gpuload.datasets.hugging_face`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, Literal

import numpy as np

from gpuload.datasets.base import ImageFileDataset, pack_labels
from gpuload.datasets.classes import warn_of_other_classes
from gpuload.datasets.coco import WrappedCoco, chosen
from gpuload.datasets.hugging_face import WrappedRows, WrappedStream
from gpuload.datasets.kinds import check_dataset, is_iterable
from gpuload.datasets.sample import Encoded, Mode, check_mode
from gpuload.datasets.scan import Paths
from gpuload.errors import one_line

__all__ = ["WrappedFolder", "wrap"]

FOLDER: Final = "torchvision.datasets.folder"
COCO: Final = "torchvision.datasets.coco"
TENSORS: Final = ("torchvision.tv_tensors._dataset_wrapper", "VisionDatasetTVTensorWrapper")
TORCH: Final = "torch.utils.data.dataset"
ROWS: Final = "datasets.arrow_dataset"
STREAM: Final = "datasets.iterable_dataset"
CONTAINERS: Final = {(TORCH, "Subset"), (TORCH, "ConcatDataset")}
SEQUENCE: Final = ("__getitem__", "__len__", "__getitems__")
# Loaders that only read an image: nothing is lost when its bytes are read instead.
LOADERS: Final = {
    (FOLDER, "default_loader"),
    (FOLDER, "pil_loader"),
    (FOLDER, "accimage_loader"),
    ("gpuload.datasets.sample", "read"),
}

TAKEN = (
    "gpuload.wrap() takes torchvision's ImageFolder, DatasetFolder, CocoDetection and CocoCaptions, Hugging Face's "
    "datasets.Dataset and IterableDataset, and torch's Subset and ConcatDataset of these"
)
OWN = "For any other dataset, return gpuload.read(path) instead of the image from a __getitem__ of your own"


def wrap(
    dataset: Any,
    *,
    mode: Mode | None = None,
    annotations: Literal["raw"] | Collection[str] | None = None,
    crowds: bool = True,
) -> Any:
    """Make a dataset of torchvision or Hugging Face yield `Encoded` bytes instead of decoded images.

    Length, order and structure of the samples stay: ``(image, label)``, ``(image, target)``, or a dict of columns::

        loader = gl.Loader(gl.wrap(torchvision.datasets.ImageFolder(root)), batch_size=256, transforms=[…])

    Args:
        dataset: torchvision's ImageFolder, DatasetFolder, CocoDetection or CocoCaptions, or a subclass that reads its
            samples as they do; their `target_transform` is applied as before. Or a ``datasets.Dataset``, or
            ``datasets.IterableDataset`` (``streaming=True``), with columns of ``datasets.Image``, also in lists and
            dicts. Or torch's Subset or ConcatDataset of these. gpuload's own datasets come back as they are.
        mode: what the pixels become, see `Encoded`. Default: what ``datasets.Image(mode=…)`` says, else ``"RGB"``.
        annotations: what a CocoDetection's target is. Default: a dict with ``"boxes"`` (`Boxes`, float32, left, top,
            right, bottom), ``"labels"`` (the category ids as the file has them, int64), ``"image_id"``; ``"area"``
            (float32) and ``"iscrowd"`` (int64) where all annotations have them; and where some have them ``"masks"``
            (`Mask`, uint8 n×H×W) and ``"keypoints"`` (`Keypoints`, float32 n×k×2, zeros where none are labelled) with
            ``"visibility"`` (int64 n×k, COCO's 0, 1 or 2). It is the same for images without annotations, with n = 0.
            Or which of ``"masks"`` and ``"keypoints"`` to make: ``()`` for neither, as boxes alone are faster. Or
            ``"raw"``: the list of annotations, as torchvision gives it; so it is by default if the dataset has a
            `target_transform`, which takes that list.
        crowds: False leaves out annotations of crowds (``iscrowd``), which no detector is trained on.

    Workers read a ``datasets.Dataset`` with pyarrow alone, where that gives the same samples; a stream they read with
    `datasets`, which divides it among ranks and workers, and whose state is kept (docs/data.md).

    Hugging Face turns images upright by their EXIF tag, torchvision does not: to get Hugging Face's pixels, give the
    Loader ``decode=Decode(exif=True)``. Missing images (None) stay None. While reading, OSError names a missing file.

    Raises:
        TypeError: the dataset is of another kind, has a transform or a format, or its class reads samples in its own
            way; the message says which, and what to do.
        ValueError: a COCO file name leads out of the dataset's root; annotations lack a box, or masks where others have
            some; an argument is not valid.

    Example:
        >>> wrap([1, 2])
        Traceback (most recent call last):
        TypeError: got a builtins.list; gpuload.wrap() takes torchvision's ImageFolder, ...
    """
    if not isinstance(crowds, bool):
        raise TypeError(f"crowds must be True or False, got {crowds!r}")
    coco = {"annotations": chosen(annotations), "crowds": crowds}
    return _wrap(dataset, mode if mode is None else check_mode(mode), coco, "")


def _wrap(dataset: Any, mode: Mode | None, coco: dict[str, Any], where: str) -> Any:
    cls = type(dataset)
    name = f"{cls.__module__}.{cls.__qualname__}"
    known = {(base.__module__, base.__name__) for base in cls.__mro__}
    got = f"got a {name}{where}"
    detection = (COCO, "CocoDetection") in known and (COCO, "CocoCaptions") not in known
    if coco != {"annotations": None, "crowds": True} and not detection and not known & CONTAINERS:
        raise TypeError(f"{got}; annotations= and crowds= are for torchvision's CocoDetection, so leave them out")
    if cls.__module__.startswith("gpuload.datasets."):
        return dataset
    if TENSORS in known and known & {(FOLDER, "DatasetFolder"), (COCO, "CocoDetection")}:
        inner = cls.__bases__[1].__name__  # it has the wrapper's class and that of the dataset as bases
        targets = ", which has boxes, labels and masks in its targets too" if detection else ""
        raise TypeError(
            f"{got}, which torchvision's wrap_dataset_for_transforms_v2() made, and which decodes images; wrap the "
            f"{inner} itself, as in gpuload.wrap({inner}(…)){targets}"
        )
    if (FOLDER, "DatasetFolder") in known:
        _check_methods(cls, FOLDER, SEQUENCE, got)
        _check_transforms(dataset, got)
        _check_loader(dataset.loader, got)
        return WrappedFolder(dataset, mode or "RGB")
    if (COCO, "CocoDetection") in known:
        _check_methods(cls, COCO, (*SEQUENCE, "_load_image", "_load_target"), got)
        _check_transforms(dataset, got)
        return WrappedCoco(dataset, mode or "RGB", coco["annotations"] if detection else "raw", coco["crowds"])
    if known & CONTAINERS:
        _check_methods(cls, TORCH, SEQUENCE, got)
        container = copy.copy(dataset)
        if (TORCH, "Subset") in known:
            container.dataset = _wrap(dataset.dataset, mode, coco, f" in a {cls.__name__}{where}")
        else:
            parts = enumerate(dataset.datasets)
            container.datasets = [_wrap(part, mode, coco, f" at {i} in a {cls.__name__}{where}") for i, part in parts]
            warn_of_other_classes(container.datasets)
        return container
    if (ROWS, "Dataset") in known:
        _check_methods(cls, ROWS, ("__getitem__", "__len__", "_getitem"), got)
        return WrappedRows(dataset, mode, got)
    if (STREAM, "IterableDataset") in known:
        _check_methods(cls, STREAM, ("__iter__",), got)
        return WrappedStream(dataset, mode, got)
    if known & {("datasets.dataset_dict", "DatasetDict"), ("datasets.dataset_dict", "IterableDatasetDict")}:
        raise TypeError(f"{got}, which holds several datasets; wrap one of them, as in gpuload.wrap(dataset['train'])")
    check_dataset(dataset)
    if is_iterable(dataset):
        raise TypeError(
            f"{got}, an iterable dataset, which needs no wrap(): pass it to gpuload.Loader as it is. To leave decoding "
            "to gpuload, let it yield gpuload.Encoded(bytes) instead of images"
        )
    raise TypeError(f"{got}; {TAKEN}. {OWN}")


class WrappedFolder(ImageFileDataset):
    """An ImageFolder wrapped by `wrap`: yields ``(Encoded, label)``.

    Attributes:
        classes, class_to_idx: as in the dataset that was wrapped.
        paths: the absolute path of each image: a sequence that makes each str when it is asked for.
        targets: the label of each image, as an array of the smallest integer type; a list if labels are no integers.
        target_transform: what is applied to a label before it is yielded, or None.
    """

    def __init__(self, dataset: Any, mode: Mode) -> None:
        self.mode = mode
        self.paths = Paths.below(dataset.root, [path for path, _ in dataset.samples])
        self.targets = pack_labels([target for _, target in dataset.samples])
        self.classes: list[str] = list(dataset.classes)
        self.class_to_idx: dict[str, int] = dict(dataset.class_to_idx)
        self.target_transform: Callable[[Any], Any] | None = dataset.target_transform
        self._name = type(dataset).__name__

    def _with(self, number: int, image: Encoded) -> tuple[Encoded, Any]:
        target = self.targets[number]
        if isinstance(self.targets, np.ndarray):
            target = int(target)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target

    def __repr__(self) -> str:
        return f"wrap({self._name}({self.root!r}): {len(self)} images in {len(self.classes)} classes)"


def _check_methods(cls: type, module: str, names: Sequence[str], got: str) -> None:
    for name in names:
        method = getattr(cls, name, None)
        if method is not None and getattr(method, "__module__", None) != module:
            if module == TORCH:
                why, advice = "which may not know Encoded", "Give it gpuload.wrap() of the dataset inside, yourself"
            else:
                why = "and what that does to images would be lost"
                advice = "Return gpuload.read(path) from it instead of the image; that needs no wrap()"
            raise TypeError(f"{got}, whose class has a {name} of its own, {why}. {advice}")


def _check_transforms(dataset: Any, got: str) -> None:
    joint = dataset.transforms
    if (type(joint).__module__, type(joint).__name__) == ("torchvision.datasets.vision", "StandardTransform"):
        joint = joint.transform  # its target_transform stays
    for name, function in (("transform", dataset.transform), ("transforms", joint)):
        if function is not None:
            raise TypeError(
                f"{got} with {name}={one_line(repr(function), 100)}, which takes decoded images: move it to "
                "Loader(transforms=…), with the transforms of gpuload.transforms, and pass the dataset without it"
            )


def _check_loader(loader: Any, got: str) -> None:
    if (getattr(loader, "__module__", None), getattr(loader, "__name__", None)) not in LOADERS:
        raise TypeError(
            f"{got} with loader={one_line(repr(loader), 100)}: what that does to images would be lost. If it only "
            "reads an image, set dataset.loader = gpuload.read"
        )
