"""`wrap`: makes torchvision and Hugging Face datasets yield the bytes of images instead of decoded images.

Runs in the main process; the result is copied to the workers, which read the files. Neither library is imported here:
their classes are recognised by name. A wrapped torchvision dataset consists of a few buffers: packed paths
(`gpuload.datasets.scan`), an array of labels, and COCO's annotations as JSON (`gpuload.datasets.coco`). So workers
share one copy, and do not import torch to read it. `gpuload.datasets.hugging_face` wraps Hugging Face's datasets.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, Literal

import numpy as np

from gpuload.checks import flag, one_of, optional
from gpuload.datasets.base import ImageFileDataset, pack_labels
from gpuload.datasets.classes import warn_of_class_conflicts
from gpuload.datasets.coco import WrappedCoco, check_selection
from gpuload.datasets.hugging_face import WrappedRows, WrappedStream
from gpuload.datasets.kinds import check_dataset, is_iterable, type_name
from gpuload.datasets.sample import MODES, Encoded, Mode
from gpuload.datasets.scan import Paths
from gpuload.errors import short_repr

__all__ = ["WrappedFolder", "wrap"]

FOLDER: Final = "torchvision.datasets.folder"
COCO: Final = "torchvision.datasets.coco"
TV_TENSOR_WRAPPER: Final = ("torchvision.tv_tensors._dataset_wrapper", "VisionDatasetTVTensorWrapper")
TORCH: Final = "torch.utils.data.dataset"
ROWS: Final = "datasets.arrow_dataset"
STREAM: Final = "datasets.iterable_dataset"
CONTAINERS: Final = {(TORCH, "Subset"), (TORCH, "ConcatDataset")}
SEQUENCE: Final = ("__getitem__", "__len__", "__getitems__")
# Loaders that do nothing but load the image, so nothing is lost if its bytes are read instead.
LOADERS: Final = {
    (FOLDER, "default_loader"),
    (FOLDER, "pil_loader"),
    (FOLDER, "accimage_loader"),
    ("gpuload.datasets.sample", "read"),
}

SUPPORTED = (
    "gpuload.wrap() takes torchvision's ImageFolder, DatasetFolder, CocoDetection and CocoCaptions, Hugging Face's "
    "datasets.Dataset and IterableDataset, and torch's Subset and ConcatDataset of these"
)
OTHER_DATASETS = "For any other dataset, make its __getitem__ return gpuload.read(path) instead of the image"


def wrap(
    dataset: Any,
    *,
    mode: Mode | None = None,
    annotations: Literal["raw"] | Collection[str] | None = None,
    crowds: bool = True,
) -> Any:
    """Make a torchvision or Hugging Face dataset yield `Encoded` bytes instead of decoded images.

    The length, order and structure of the samples stay the same: ``(image, label)``, ``(image, target)``, or a dict of
    columns::

        loader = gl.Loader(gl.wrap(torchvision.datasets.ImageFolder(root)), batch_size=256, transforms=[…])

    Args:
        dataset: one of these:

            - torchvision's ImageFolder, DatasetFolder, CocoDetection or CocoCaptions, or a subclass that does not
              change how samples are read; the `target_transform` is still applied
            - a ``datasets.Dataset`` or ``datasets.IterableDataset`` (``streaming=True``) with ``datasets.Image``
              columns, which may be inside lists and dicts
            - torch's Subset or ConcatDataset of these
            - a gpuload dataset, which is returned unchanged
        mode: the channels to decode to, see `Encoded`. Default: the mode of ``datasets.Image(mode=…)``, else ``"RGB"``.
        annotations: the structure of a CocoDetection's target. By default, the target is a dict with ``"boxes"``
            (`Boxes`, float32, left, top, right, bottom), ``"labels"`` (the category ids in the file, int64) and
            ``"image_id"``. ``"area"`` (float32) and ``"iscrowd"`` (int64) are added if all annotations have them.
            ``"masks"`` (`Mask`, uint8 n×H×W) are added if any annotation has them, and so are ``"keypoints"``
            (`Keypoints`, float32 n×k×2, zeros for unlabelled points) with ``"visibility"`` (int64 n×k, COCO's 0, 1 or
            2). Images without annotations have the same fields, with n = 0. To select optional fields, pass a tuple of
            ``"masks"``, ``"keypoints"`` or both; ``()`` selects neither, which is faster. ``"raw"`` keeps torchvision's
            list of annotations; it is the default if the dataset has a `target_transform`, which takes that list.
        crowds: False skips crowd annotations (``iscrowd``), which detectors are not trained on.

    Workers read a ``datasets.Dataset`` with pyarrow alone if that gives the same samples. They read a stream with
    `datasets`, which divides it among ranks and workers; its state is part of the loader's state (docs/data.md).

    Hugging Face's images are turned upright according to their EXIF tags, as `datasets` does, unless there are masks,
    boxes or keypoints beside them, of which a warning tells; torchvision's are not. ``Decode(exif=…)`` in the Loader
    decides otherwise. Missing images (None) stay None. Reading a missing file
    raises an OSError that names it.

    Raises:
        TypeError: the dataset has an unsupported type, a transform or a format, or its class overrides a method that
            reads samples; the message says which, with a remedy.
        ValueError: a COCO file name points outside the dataset's root; annotations lack a box, or lack masks that
            other annotations have; an argument is invalid.

    Example:
        >>> wrap([1, 2])
        Traceback (most recent call last):
        TypeError: got a builtins.list; gpuload.wrap() takes torchvision's ImageFolder, ...
    """
    coco = {"annotations": check_selection(annotations), "crowds": flag("crowds", crowds)}
    return _wrap(dataset, optional(one_of, "mode", mode, choices=MODES), coco, "")


def _wrap(dataset: Any, mode: Mode | None, coco: dict[str, Any], context: str) -> Any:
    cls = type(dataset)
    name = f"{cls.__module__}.{cls.__qualname__}"
    base_classes = {(base.__module__, base.__name__) for base in cls.__mro__}
    prefix = f"got a {name}{context}"
    is_detection = (COCO, "CocoDetection") in base_classes and (COCO, "CocoCaptions") not in base_classes
    if coco != {"annotations": None, "crowds": True} and not is_detection and not base_classes & CONTAINERS:
        raise TypeError(f"{prefix}; annotations= and crowds= apply to torchvision's CocoDetection only; remove them")
    if cls.__module__.startswith("gpuload.datasets."):
        return dataset
    if TV_TENSOR_WRAPPER in base_classes and base_classes & {(FOLDER, "DatasetFolder"), (COCO, "CocoDetection")}:
        inner = cls.__bases__[1].__name__  # its bases are the wrapper's class and the dataset's class
        targets = ", which has boxes, labels and masks in its targets too" if is_detection else ""
        raise TypeError(
            f"{prefix}, which comes from torchvision's wrap_dataset_for_transforms_v2() and decodes images; wrap the "
            f"{inner} itself, as in gpuload.wrap({inner}(…)){targets}"
        )
    if (FOLDER, "DatasetFolder") in base_classes:
        _check_methods(cls, FOLDER, SEQUENCE, prefix)
        _check_transforms(dataset, prefix)
        _check_loader(dataset.loader, prefix)
        return WrappedFolder(dataset, mode or "RGB")
    if (COCO, "CocoDetection") in base_classes:
        _check_methods(cls, COCO, (*SEQUENCE, "_load_image", "_load_target"), prefix)
        _check_transforms(dataset, prefix)
        return WrappedCoco(dataset, mode or "RGB", coco["annotations"] if is_detection else "raw", coco["crowds"])
    if base_classes & CONTAINERS:
        _check_methods(cls, TORCH, SEQUENCE, prefix)
        container = copy.copy(dataset)
        if (TORCH, "Subset") in base_classes:
            container.dataset = _wrap(dataset.dataset, mode, coco, f" in a {cls.__name__}{context}")
        else:
            parts = enumerate(dataset.datasets)
            container.datasets = [_wrap(part, mode, coco, f" at {i} in a {cls.__name__}{context}") for i, part in parts]
            warn_of_class_conflicts(container.datasets)
        return container
    if (ROWS, "Dataset") in base_classes:
        _check_methods(cls, ROWS, ("__getitem__", "__len__", "_getitem"), prefix)
        return WrappedRows(dataset, mode, prefix)
    if (STREAM, "IterableDataset") in base_classes:
        _check_methods(cls, STREAM, ("__iter__",), prefix)
        return WrappedStream(dataset, mode, prefix)
    if base_classes & {("datasets.dataset_dict", "DatasetDict"), ("datasets.dataset_dict", "IterableDatasetDict")}:
        raise TypeError(f"{prefix}, which contains several datasets; wrap one of them: gpuload.wrap(dataset['train'])")
    check_dataset(dataset)
    if is_iterable(dataset):
        raise TypeError(
            f"{prefix}, an iterable dataset, which does not need wrap(): pass it to gpuload.Loader unchanged. To leave "
            "decoding to gpuload, have it yield gpuload.Encoded(bytes) instead of images"
        )
    raise TypeError(f"{prefix}; {SUPPORTED}. {OTHER_DATASETS}")


class WrappedFolder(ImageFileDataset):
    """An ImageFolder wrapped by `wrap`: yields ``(Encoded, label)``.

    Attributes:
        classes, class_to_idx: the same as in the wrapped dataset.
        paths: the absolute path of each image, in a sequence that builds each str on access.
        targets: the label of each image, as an array of the smallest integer type; a list if labels are not integers.
        target_transform: the function that is applied to each label, or None.
    """

    def __init__(self, dataset: Any, mode: Mode) -> None:
        self.mode = mode
        self.paths = Paths.pack_absolute(dataset.root, [path for path, _ in dataset.samples])
        self.targets = pack_labels([target for _, target in dataset.samples])
        self.classes: list[str] = list(dataset.classes)
        self.class_to_idx: dict[str, int] = dict(dataset.class_to_idx)
        self.target_transform: Callable[[Any], Any] | None = dataset.target_transform
        self._name = type(dataset).__name__

    def _make_sample(self, index: int, image: Encoded) -> tuple[Encoded, Any]:
        target = self.targets[index]
        if isinstance(self.targets, np.ndarray):
            target = int(target)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target

    def __repr__(self) -> str:
        return f"wrap({self._name}({self.root!r}): {len(self)} images in {len(self.classes)} classes)"


def _check_methods(cls: type, module: str, names: Sequence[str], prefix: str) -> None:
    for name in names:
        method = getattr(cls, name, None)
        if method is not None and getattr(method, "__module__", None) != module:
            if module == TORCH:
                problem, advice = "may not support Encoded", "Wrap the inner dataset with gpuload.wrap() instead"
            else:
                problem = "would be bypassed"
                advice = "Make __getitem__ return gpuload.read(path) instead of the image, and omit wrap()"
            raise TypeError(f"{prefix}, but its class overrides {name}, which {problem}. {advice}")


def _check_transforms(dataset: Any, prefix: str) -> None:
    joint_fn = dataset.transforms
    if type_name(joint_fn) == ("torchvision.datasets.vision", "StandardTransform"):
        joint_fn = joint_fn.transform  # its target_transform stays
    for name, function in (("transform", dataset.transform), ("transforms", joint_fn)):
        if function is not None:
            raise TypeError(
                f"{prefix} with {name}={short_repr(function)}, which takes decoded images: replace it with "
                "gpuload.transforms in Loader(transforms=…), and pass the dataset without it"
            )


def _check_loader(loader: object, prefix: str) -> None:
    if (getattr(loader, "__module__", None), getattr(loader, "__name__", None)) not in LOADERS:
        raise TypeError(
            f"{prefix} with loader={short_repr(loader)}, which would be bypassed. If it only reads an "
            "image, set dataset.loader = gpuload.read; otherwise, make the dataset return gpuload.Image(array), and "
            "omit wrap()"
        )
