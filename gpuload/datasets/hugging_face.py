"""Wrapped Hugging Face datasets, which yield the bytes of images: the results of `gpuload.datasets.wrap`.

`datasets` is not imported here. Workers get the parts of a table and read them with pyarrow alone
(`gpuload.datasets.arrow_rows`) if this gives the same values as `datasets`; otherwise they get the dataset itself. For
a stream, each worker always gets the dataset itself.
"""

from __future__ import annotations

import copy
import errno
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, SupportsIndex

from gpuload.checks import integer, one_of
from gpuload.datasets.file_id import FileMappings
from gpuload.datasets.files import read_file
from gpuload.datasets.joined import Dataset
from gpuload.datasets.kinds import type_name
from gpuload.datasets.recognise import BOX_NAME, MASK_NAME, POINT_NAME
from gpuload.datasets.sample import MODES, Encoded, Mode
from gpuload.datasets.stores.opening import display_path, read_files, remote_options
from gpuload.datasets.worker import get_worker_info
from gpuload.errors import one_line

__all__ = ["StreamPass", "WrappedRows", "WrappedStream"]

ANNOTATION_NAME: Final = re.compile(r"annotation|label|target|ground_?truth|^gt$", re.IGNORECASE)


class WrappedRows(Dataset):
    """A Hugging Face dataset wrapped by `wrap`: yields dicts of its columns, with `Encoded` for each image.

    A pickled copy reads the dataset's tables without importing `datasets`, if that gives the same samples. On the first
    access to its attribute `dataset`, it unpickles the dataset, and reads from the dataset from then on.

    Attributes:
        dataset: the wrapped dataset, with the decoding of images disabled.
        features: the dataset's features.
        column_names: the names of the dataset's columns.
        exif: see `Encoded`.
    """

    def __init__(self, dataset: Any, mode: Mode | None, prefix: str) -> None:
        _check_format(dataset.format["type"], prefix)
        self.dataset = copy.deepcopy(dataset)  # shares the tables, but not the features, which change below
        columns = _sample_columns(self.dataset)
        features = {name: self.dataset.info.features[name] for name in columns}
        self.exif = _choose_exif(features)
        self._plan = _build_plan(features, mode, self.exif)
        _check_images(self._plan, columns, prefix)

    @property
    def features(self) -> Any:
        return self.dataset.features

    @property
    def column_names(self) -> list[str]:
        return self.dataset.column_names if "dataset" in vars(self) else list(self._column_names)

    def __len__(self) -> int:
        return len(self.dataset if "dataset" in vars(self) else self._rows)

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:
        rows = self.dataset if "dataset" in vars(self) else self._rows
        return _convert_images(self._plan, rows[integer("an index", index)], _read_local)

    def __getstate__(self) -> dict[str, Any]:
        state = vars(self).copy()
        if "dataset" not in state:
            return state
        from gpuload.datasets import arrow_rows  # imports pyarrow, which only Hugging Face's datasets need

        columns, copies, mappings = _sample_columns(self.dataset), {}, FileMappings()
        try:
            state["_rows"] = arrow_rows.ArrowRows.from_dataset(self.dataset, columns, copies, mappings)
        except arrow_rows.Unsuitable as reason:
            import logging  # slow to import, and seldom needed

            logging.getLogger("gpuload.datasets").info(
                "workers import datasets to read a datasets.Dataset: %s", one_line(str(reason), 200)
            )
            return state
        state["_column_names"] = self.column_names
        state["_pickled"] = arrow_rows.PickledDataset(state.pop("dataset"), copies, mappings)
        return state

    def __copy__(self) -> WrappedRows:
        clone = type(self).__new__(type(self))
        vars(clone).update(vars(self))
        return clone

    def __deepcopy__(self, memo: dict[int, Any]) -> WrappedRows:
        clone = copy.copy(self)
        vars(clone).update(copy.deepcopy(vars(self), memo))
        return clone

    def __getattr__(self, name: str) -> Any:
        if name != "dataset" or "_pickled" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        self.dataset = self._pickled.load()
        return self.dataset

    def __repr__(self) -> str:
        return f"wrap(datasets.Dataset: {len(self)} rows of {', '.join(map(repr, self.column_names))})"


class WrappedStream:
    """A wrapped Hugging Face streaming dataset: an iterable dataset that yields dicts of its columns, with `Encoded`
    for each image.

    Each rank reads its part according to `datasets.distributed.split_dataset_by_node`, unless the dataset has already
    been split; each worker reads the shards (files) of this part that `datasets` assigns to it.

    Attributes:
        dataset: the wrapped dataset, with the decoding of images disabled.
        exif: see `Encoded`.
    """

    def __init__(self, dataset: Any, mode: Mode | None, prefix: str) -> None:
        formatting = getattr(dataset, "_formatting", None)
        _check_format(None if formatting is None else formatting.format_type, prefix)
        if dataset.features is None:
            raise TypeError(
                f"{prefix} whose columns are unknown before it is read, as after map(); declare them with "
                "dataset.cast(datasets.Features({…})), with datasets.Image() for images"
            )
        features = copy.deepcopy(dataset.features)
        self.exif = _choose_exif(features)
        self._plan = _build_plan(features, mode, self.exif)
        _check_images(self._plan, list(features), prefix)
        self.dataset = dataset.decode(False)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch for the dataset's shuffling."""
        self.dataset.set_epoch(epoch)

    def __iter__(self) -> StreamPass:
        dataset, info = self.dataset, get_worker_info()
        if info is not None and info.world_size > 1 and getattr(dataset, "_distributed", None) is None:
            from datasets.distributed import split_dataset_by_node  # pyright: ignore[reportMissingImports]

            dataset = split_dataset_by_node(dataset, info.rank, info.world_size)
        return StreamPass(dataset, self._plan)

    def __repr__(self) -> str:
        return f"wrap(datasets.IterableDataset: {', '.join(map(repr, self.dataset.column_names))})"


class StreamPass:
    """A worker's pass over a `WrappedStream`: an iterator with the state of its dataset.

    A missing or damaged image raises an error for its sample, and the pass continues with the next sample. An error
    from `datasets` ends the pass, because its generators cannot continue after an exception.

    Attributes:
        broken: whether an error from `datasets` has ended the pass.
    """

    def __init__(self, dataset: Any, plan: Any) -> None:
        self._dataset, self._plan = dataset, plan
        self._rows: Iterator[Any] | None = None
        self.broken = False

    def __iter__(self) -> StreamPass:
        return self

    def __next__(self) -> dict[str, Any]:
        if self._rows is None:
            self._rows = iter(self._dataset)
        try:
            row = next(self._rows)
        except Exception as error:
            self.broken = not isinstance(error, StopIteration)
            raise
        return _convert_images(self._plan, row, _read_local_or_url)

    def state_dict(self) -> dict[str, Any]:
        """Return the dataset's state: its epoch, and its position in the shards."""
        return self._dataset.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state; the dataset warns if the content of its shuffle buffer is lost."""
        self._dataset.load_state_dict(state)


def _check_format(format_type: str | None, prefix: str) -> None:
    if format_type is not None:
        formatting = (
            "a transform (set_transform, with_transform)" if format_type == "custom" else f"the format {format_type!r}"
        )
        raise TypeError(
            f"{prefix} with {formatting}, which is applied after decoding: pass dataset.with_format(None), and "
            "transform images with Loader(transforms=…); gpuload's batches are tensors"
        )


def _check_images(plan: Any, columns: list[str], prefix: str) -> None:
    if plan is None:
        raise TypeError(
            f"{prefix} without images: none of its columns is a datasets.Image ({', '.join(map(repr, columns))}); "
            "declare one with dataset.cast_column(name, datasets.Image()), or pass the dataset to gpuload.Loader "
            "unchanged"
        )


def _sample_columns(dataset: Any) -> list[str]:
    """Return the names of a sample's columns, in the sample's order."""
    selected_names, all_names = dataset.format["columns"], [*dataset.info.features]
    names = [name for name in all_names if name in selected_names]
    return (
        names + [name for name in all_names if name not in selected_names]
        if dataset.format["output_all_columns"]
        else names
    )


class _ImagePlan(NamedTuple):
    """How the images of a column are decoded, see `Encoded`."""

    mode: Mode
    exif: bool | None


def _is_image(feature: Any) -> bool:
    return type_name(feature) == ("datasets.features.image", "Image")


def _item_feature(feature: Any) -> Any:
    """Return the feature of a list's entries; None if the feature is not a list."""
    return feature[0] if isinstance(feature, list | tuple) else getattr(feature, "feature", None)


def _choose_exif(features: Mapping[str, Any]) -> bool | None:
    """Return whether images are turned upright, as `datasets` does. Masks, boxes and keypoints may have been made for
    the images as they are stored, so with these, return None and warn."""
    targets = list(_target_names(features))
    if not targets:
        return True
    warnings.warn(
        f"the images beside {', '.join(map(repr, targets))} are decoded as they are stored, since these may have been "
        "made for the stored images; if they were made for upright images, pass decode=gpuload.Decode(exif=True) to "
        "the Loader",
        RuntimeWarning,
        stacklevel=5,  # points at the caller of `wrap`
    )
    return None


def _target_names(feature: Any, name: str = "") -> Iterator[str]:
    """Yield the names of columns that seem to hold masks, boxes or keypoints."""
    if any(pattern.search(name) for pattern in (MASK_NAME, BOX_NAME, POINT_NAME)) or (
        _is_image(feature) and ANNOTATION_NAME.search(name)
    ):
        yield name
    elif isinstance(feature, Mapping):
        for key, part in feature.items():
            yield from _target_names(part, key)
    elif (item := _item_feature(feature)) is not None:
        yield from _target_names(item, name)


def _build_plan(feature: Any, mode: Mode | None, exif: bool | None) -> Any:
    """Return a plan that describes where a column has images, and disable the decoding of these images. A plan is an
    `_ImagePlan`, a dict of plans, a list of one plan, or None for no images."""
    if _is_image(feature):
        feature.decode = False
        if mode is None and feature.mode is not None:
            try:
                return _ImagePlan(one_of("mode", feature.mode, MODES), exif)
            except ValueError as error:
                raise TypeError(f"datasets.Image(mode={feature.mode!r}): {error}; pass mode= to wrap()") from None
        return _ImagePlan(mode or "RGB", exif)
    if isinstance(feature, Mapping):
        plans = {name: _build_plan(part, mode, exif) for name, part in feature.items()}
        return {name: plan for name, plan in plans.items() if plan is not None} or None
    item_feature = _item_feature(feature)
    plan = None if item_feature is None else _build_plan(item_feature, mode, exif)
    return None if plan is None else [plan]


def _convert_images(plan: Any, value: Any, read: Callable[[str], bytes]) -> Any:
    """Return a row of the table, or a part of a row, with its images as `Encoded`. `read` reads the file at a path."""
    if value is None:
        return None
    if isinstance(plan, dict):
        return {name: _convert_images(plan[name], part, read) if name in plan else part for name, part in value.items()}
    if isinstance(plan, list):
        return [_convert_images(plan[0], part, read) for part in value]
    if not isinstance(value, Mapping):  # an earlier map() of a stream has decoded the image
        return value
    data, path = value["bytes"], value["path"]
    if data is None:
        if path is None:
            raise ValueError("an image of the row has neither bytes nor a path; set it to None, or remove the row")
        data = read(path)
    return Encoded(data, plan.mode, path if path is None else display_path(path), plan.exif)


def _read_local(path: str) -> bytes:
    if "://" in path:
        raise FileNotFoundError(errno.ENOENT, "not a file on this machine; download it beforehand", path)
    return read_file(path)


def _read_local_or_url(path: str) -> bytes:
    """Read a file, or a URL through fsspec."""
    return read_files([path], remote_options(path, None))[0]
