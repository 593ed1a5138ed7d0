"""`wrap`: the datasets of torchvision and Hugging Face, yielding the bytes of images instead of decoded ones.

Runs in the main process; the result is copied to the workers, which read. Neither library is imported here: their
classes are recognised by name. Of a torchvision dataset only the data is kept, in few buffers: paths packed
(`gpuload.datasets.paths`), labels as an array, COCO's annotations as JSON. So workers import no torch for it, and share
one copy. A Hugging Face dataset is kept, with its image decoding switched off. Workers get its tables, and read them
with pyarrow alone (`gpuload.datasets.arrow_rows`) where `datasets` would add nothing; else the dataset itself.
"""

from __future__ import annotations

import copy
import errno
import operator
import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Literal, SupportsIndex

import numpy as np

from gpuload.datasets.base import ImageFileDataset, pack_labels
from gpuload.datasets.classes import warn_of_other_classes
from gpuload.datasets.coco import CocoTargets, as_lists, chosen, image_path, unknown_categories, unmatched
from gpuload.datasets.files import read_file
from gpuload.datasets.joined import Dataset
from gpuload.datasets.kinds import check_dataset, is_iterable
from gpuload.datasets.paths import Paths
from gpuload.datasets.sample import Encoded, Mode, check_mode
from gpuload.errors import one_line

__all__ = ["WrappedCoco", "WrappedFolder", "WrappedRows", "wrap"]

FOLDER: Final = "torchvision.datasets.folder"
COCO: Final = "torchvision.datasets.coco"
TENSORS: Final = ("torchvision.tv_tensors._dataset_wrapper", "VisionDatasetTVTensorWrapper")
TORCH: Final = "torch.utils.data.dataset"
ROWS: Final = "datasets.arrow_dataset"
CONTAINERS: Final = ((TORCH, "Subset"), (TORCH, "ConcatDataset"))
# Loaders that only read an image: nothing is lost when its bytes are read instead.
LOADERS: Final = {
    (FOLDER, "default_loader"),
    (FOLDER, "pil_loader"),
    (FOLDER, "accimage_loader"),
    ("gpuload.datasets.sample", "read"),
}

TAKEN = (
    "gpuload.wrap() takes torchvision's ImageFolder, DatasetFolder, CocoDetection and CocoCaptions, Hugging Face's "
    "datasets.Dataset, and torch's Subset and ConcatDataset of these"
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
            samples as they do; their `target_transform` is applied as before. Or a ``datasets.Dataset`` with columns
            of ``datasets.Image``, also in lists and dicts. Or torch's Subset or ConcatDataset of these: the same
            container, around the wrapped datasets. gpuload's own datasets come back as they are.
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

    Workers read a ``datasets.Dataset`` with pyarrow alone if all its columns are Image, Value or ClassLabel, or lists
    or dicts of these; times in nanoseconds or with a time zone need `datasets`. Which column does is logged.

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
    if coco != {"annotations": None, "crowds": True} and not detection and not known & {*CONTAINERS}:
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
        _check_methods(cls, FOLDER, ("__getitem__", "__len__", "__getitems__"), got)
        _check_transforms(dataset, got)
        _check_loader(dataset.loader, got)
        return WrappedFolder(dataset, mode or "RGB")
    if (COCO, "CocoDetection") in known:
        _check_methods(cls, COCO, ("__getitem__", "__len__", "__getitems__", "_load_image", "_load_target"), got)
        _check_transforms(dataset, got)
        return WrappedCoco(dataset, mode or "RGB", coco["annotations"] if detection else "raw", coco["crowds"])
    if (TORCH, "Subset") in known:
        _check_methods(cls, TORCH, ("__getitem__", "__len__", "__getitems__"), got)
        container = copy.copy(dataset)
        container.dataset = _wrap(dataset.dataset, mode, coco, f" in a {cls.__name__}{where}")
        return container
    if (TORCH, "ConcatDataset") in known:
        _check_methods(cls, TORCH, ("__getitem__", "__len__", "__getitems__"), got)
        container = copy.copy(dataset)
        parts = enumerate(dataset.datasets)
        container.datasets = [_wrap(part, mode, coco, f" at {i} in a {cls.__name__}{where}") for i, part in parts]
        warn_of_other_classes(container.datasets)
        return container
    if (ROWS, "Dataset") in known:
        _check_methods(cls, ROWS, ("__getitem__", "__len__", "_getitem"), got)
        return WrappedRows(dataset, mode, got)
    if known & {("datasets.dataset_dict", "DatasetDict"), ("datasets.dataset_dict", "IterableDatasetDict")}:
        raise TypeError(f"{got}, which holds several datasets; wrap one of them, as in gpuload.wrap(dataset['train'])")
    check_dataset(dataset)
    if is_iterable(dataset):
        raise TypeError(
            f"{got}, an iterable dataset, which needs no wrap(): pass it to gpuload.Loader as it is. To leave decoding "
            "to gpuload, let it yield gpuload.Encoded(bytes) instead of images; gpuload.wrap() is for datasets with a "
            "length, as load_dataset() without streaming=True gives them"
        )
    raise TypeError(f"{got}; {TAKEN}. {OWN}")


class WrappedFolder(ImageFileDataset):
    """What `wrap` makes of an ImageFolder: yields ``(Encoded, label)``.

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

    def __getitem__(self, index: SupportsIndex) -> tuple[Encoded, Any]:
        number = self._from_start(index)
        target = self.targets[number]
        if isinstance(self.targets, np.ndarray):
            target = int(target)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return self._encoded(number), target

    def __repr__(self) -> str:
        return f"wrap({self._name}({self.root!r}): {len(self)} images in {len(self.classes)} classes)"


class WrappedCoco(ImageFileDataset):
    """What `wrap` makes of a CocoDetection: yields ``(Encoded, target)``; of CocoCaptions, with a list of captions.

    Attributes:
        ids: the id of each image in the annotation file.
        paths: the absolute path of each image: a sequence that makes each str when it is asked for.
        targets: the target of each image: a sequence that makes each when it is asked for.
        target_transform: what is applied to a target before it is yielded, or None.
    """

    def __init__(self, dataset: Any, mode: Mode, annotations: Any, crowds: bool) -> None:
        self.mode = mode
        self.ids = pack_labels(dataset.ids)
        images = [dataset.coco.imgs[key] for key in dataset.ids]
        names = [
            image_path(image["file_name"], key, dataset.root) for image, key in zip(images, dataset.ids, strict=True)
        ]
        self.paths = Paths.below(os.path.abspath(dataset.root), names)
        self.target_transform: Callable[[Any], Any] | None = getattr(dataset.transforms, "target_transform", None)
        self._name = type(dataset).__name__
        source = f"{self._name}({self.root!r})"
        self._warn(unmatched(dataset.coco.anns.values(), "image_id", dataset.coco.imgs, source))
        targets = [dataset._load_target(key) for key in dataset.ids]
        if not crowds:
            targets = [[one for one in own if not one.get("iscrowd")] for own in targets]
        if annotations == "raw" or (annotations is None and self.target_transform is not None):
            self.targets = as_lists(targets)
        elif self.target_transform is None:
            self.targets = CocoTargets(targets, self.ids, images, annotations)
            every = [annotation for own in targets for annotation in own]
            self._warn(unknown_categories(every, dataset.coco.cats.values(), source))
        else:
            raise TypeError(
                f"annotations={annotations!r} makes targets of the annotations, but the dataset's target_transform "
                "takes them as they are; leave one of the two out"
            )

    def _warn(self, remark: str) -> None:
        if remark:
            warnings.warn(remark, stacklevel=5)  # where the user calls `wrap`

    def __getitem__(self, index: SupportsIndex) -> tuple[Encoded, Any]:
        number = self._from_start(index)
        target = self.targets[number]
        if self.target_transform is not None:
            target = self.target_transform(target)
        return self._encoded(number), target

    def __repr__(self) -> str:
        return f"wrap({self._name}({self.root!r}): {len(self)} images)"


class WrappedRows(Dataset):
    """What `wrap` makes of a Hugging Face dataset: yields dicts of its columns, with `Encoded` for each image.

    A copy that was pickled reads the dataset's tables without importing `datasets`, where that gives the same samples.
    It unpickles the dataset when somebody asks for it, and from then on reads by it.

    Attributes:
        dataset: the dataset that was wrapped, with the decoding of images switched off.
        features: its features; column_names: its columns.
    """

    def __init__(self, dataset: Any, mode: Mode | None, got: str) -> None:
        kind = dataset.format["type"]
        if kind is not None:
            how = "a transform (set_transform, with_transform)" if kind == "custom" else f"the format {kind!r}"
            raise TypeError(
                f"{got} with {how}, which takes decoded images: pass dataset.with_format(None), and move what it does "
                "to Loader(transforms=…); gpuload's batches are tensors"
            )
        self.dataset = copy.deepcopy(dataset)  # shares its tables, but not its features, so that they may change
        columns = _columns(self.dataset)
        self._plan = _plan({name: self.dataset.info.features[name] for name in columns}, mode)
        if self._plan is None:
            raise TypeError(
                f"{got} without images: none of its columns is a datasets.Image ({', '.join(map(repr, columns))}); "
                "say which is one with dataset.cast_column(name, datasets.Image())"
            )

    @property
    def features(self) -> Any:
        return self.dataset.features

    @property
    def column_names(self) -> list[str]:
        return self.dataset.column_names if "dataset" in vars(self) else list(self._column_names)

    def __len__(self) -> int:
        return len(self.dataset if "dataset" in vars(self) else self._rows)

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:
        try:
            number = operator.index(index)
        except TypeError:
            raise TypeError(f"an index must be an integer, got {index!r} ({type(index).__name__})") from None
        return _filled(self._plan, (self.dataset if "dataset" in vars(self) else self._rows)[number])

    def __getstate__(self) -> dict[str, Any]:
        state = vars(self).copy()
        if "dataset" not in state:
            return state
        from gpuload.datasets import arrow_rows  # imports pyarrow, which only a dataset of Hugging Face's needs

        columns, copies = _columns(self.dataset), {}
        try:
            state["_rows"] = arrow_rows.ArrowRows.of(self.dataset, columns, copies)
        except arrow_rows.Unsuitable as reason:
            import logging  # slow to import, and seldom needed

            logging.getLogger("gpuload.datasets").info(
                "workers import datasets to read a datasets.Dataset: %s", one_line(str(reason), 200)
            )
            return state
        state["_column_names"] = self.column_names
        state["_pickled"] = arrow_rows.PickledDataset(state.pop("dataset"), copies)
        return state

    def __copy__(self) -> WrappedRows:
        twin = type(self).__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> WrappedRows:
        twin = copy.copy(self)
        vars(twin).update((name, copy.deepcopy(value, memo)) for name, value in vars(self).items())
        return twin

    def __getattr__(self, name: str) -> Any:
        if name != "dataset" or "_pickled" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        self.dataset = self._pickled.load()
        return self.dataset

    def __repr__(self) -> str:
        return f"wrap(datasets.Dataset: {len(self)} rows of {', '.join(map(repr, self.column_names))})"


def _columns(dataset: Any) -> list[str]:
    """Return the columns of a sample, in its order."""
    asked, order = dataset.format["columns"], [*dataset.info.features]
    shown = [name for name in order if name in asked]
    return shown + [name for name in order if name not in asked] if dataset.format["output_all_columns"] else shown


def _plan(feature: Any, mode: Mode | None) -> Any:
    """Where images are in a column: their mode, a dict of plans, a list of one plan, or None. Switches decoding off."""
    if (type(feature).__module__, type(feature).__name__) == ("datasets.features.image", "Image"):
        feature.decode = False
        if mode is None and feature.mode is not None:
            try:
                return check_mode(feature.mode)
            except ValueError as error:
                raise TypeError(f"a column is a datasets.Image whose {error}; give wrap() a mode=") from None
        return mode or "RGB"
    if isinstance(feature, Mapping):
        plans = {name: _plan(part, mode) for name, part in feature.items()}
        return {name: plan for name, plan in plans.items() if plan is not None} or None
    inner = feature[0] if isinstance(feature, list | tuple) else getattr(feature, "feature", None)
    plan = None if inner is None else _plan(inner, mode)
    return None if plan is None else [plan]


def _filled(plan: Any, value: Any) -> Any:
    """A row of the table, or a part of it, with its images as `Encoded`."""
    if value is None:
        return None
    if isinstance(plan, dict):
        return {name: _filled(plan[name], part) if name in plan else part for name, part in value.items()}
    if isinstance(plan, list):
        return [_filled(plan[0], part) for part in value]
    data, path = value["bytes"], value["path"]
    if data is None:
        if path is None:
            raise ValueError("an image of the row has neither bytes nor a path")
        if "://" in path:
            raise FileNotFoundError(errno.ENOENT, "not a file on this machine; download it beforehand", path)
        data = read_file(path)
    return Encoded(data, plan, path)


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
    for name, given in (("transform", dataset.transform), ("transforms", joint)):
        if given is not None:
            raise TypeError(
                f"{got} with {name}={one_line(repr(given), 100)}, which takes decoded images: move it to "
                "Loader(transforms=…), with the transforms of gpuload.transforms, and pass the dataset without it"
            )


def _check_loader(loader: Any, got: str) -> None:
    if (getattr(loader, "__module__", None), getattr(loader, "__name__", None)) not in LOADERS:
        raise TypeError(
            f"{got} with loader={one_line(repr(loader), 100)}: what that does to images would be lost. If it only "
            "reads an image, set dataset.loader = gpuload.read"
        )
