"""`Coco`: a folder of images with a file of annotations in COCO's format, read without pycocotools or torchvision.

A file of annotations is parsed and checked once, which for COCO's own takes many seconds; what it says is kept in
arrays, and read from there the next time.
"""

from __future__ import annotations

import errno
import json
import os
import warnings
from collections.abc import Collection
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal, SupportsIndex

import numpy as np

from gpuload.datasets.base import ImageFileDataset, existing_folder
from gpuload.datasets.coco import (
    CocoTargets,
    JsonLists,
    as_lists,
    chosen,
    image_path,
    is_in,
    unknown_categories,
    unmatched,
    whole,
)
from gpuload.datasets.names import dataset_arguments
from gpuload.datasets.paths import Paths
from gpuload.datasets.sample import Encoded, Mode, check_mode
from gpuload.datasets.stores.cached import cached
from gpuload.datasets.stores.opening import is_url, open_stream, remote_for, scope_of
from gpuload.datasets.stores.store import existing_file, stamp

if TYPE_CHECKING:
    from gpuload.datasets.stores.remote import Remote, StorageOptions

__all__ = ["Coco"]

INDEX: Final = 2  # which form an index has; one of another form is built anew
HOW: Final = "gpuload.Coco(…, targets={!r})"  # how a user chooses targets


class Coco(ImageFileDataset):
    """Images with boxes, labels, masks and keypoints, from COCO's JSON.

    Yields ``(Encoded, target)``, the target as `gpuload.wrap` makes it of torchvision's CocoDetection: a dict with
    ``"boxes"``, ``"labels"``, ``"image_id"``, and what else the annotations have. Images come in the order of their
    ids, annotations of one in the file's order; images without annotations have targets too, with no objects. Masks of
    polygons need pycocotools when they are made.

    Args:
        images: the folder of images.
        annotations: the JSON file.
        targets: which of ``"masks"`` and ``"keypoints"`` to make, default those that the annotations have; ``()`` for
            neither; ``"raw"``: the list of annotations as the file has it.
        crowds: False leaves out annotations of crowds (``iscrowd``).
        mode: what the pixels become, see `Encoded`.
        storage_options: of a folder or file at a URL, what fsspec takes, or a `Remote`.

    Attributes:
        ids: the id of each image in the file.
        paths: the full path of each image: a sequence that makes each str when it is asked for.
        targets: the target of each image: a sequence that makes each when it is asked for.
        categories: the name of each category, by its id.

    Raises:
        FileNotFoundError: there is no such folder or file.
        ValueError: the file is not COCO's format; a file name leads out of the folder; a box is missing or has a
            negative size. The message names the image or annotation.

    While reading, FileNotFoundError names an image that is listed but not there, ValueError a bad polygon.
    """

    @dataset_arguments
    def __init__(
        self,
        images: str | os.PathLike[str],
        annotations: str | os.PathLike[str],
        *,
        targets: Literal["raw"] | Collection[str] | None = None,
        crowds: bool = True,
        mode: Mode = "RGB",
        storage_options: StorageOptions = None,
    ) -> None:
        if not isinstance(crowds, bool):
            raise TypeError(f"crowds must be True or False, got {crowds!r}")
        names = chosen(targets, "targets")
        self.mode: Mode = check_mode(mode)
        remote = remote_for([images, annotations], storage_options)
        root = existing_folder(images)
        self._remote = remote if is_url(root) else None
        self.annotations = existing_file(annotations, "COCO's annotations, a JSON file")
        asked = (root, names, crowds)
        known = stamp(self.annotations, remote)
        found = cached(
            self.annotations,
            [INDEX, *known, *scope_of(remote), *asked],
            lambda: _index(self.annotations, *asked, remote),
        )
        told = json.loads(found["told"].tobytes())
        self.ids = found["ids"]
        self.paths = Paths(root, found["paths"], found["path_offsets"])
        self.categories: dict[int, str] = dict(told.pop("categories"))
        for remark in told.pop("remarks"):
            warnings.warn(remark, stacklevel=3)
        self.targets: Any = JsonLists(found["lists"], found["list_offsets"])
        if names != "raw":
            sizes = found["sizes_hw"].reshape(-1, 2)
            self.targets = CocoTargets.again(ids=self.ids, sizes_hw=sizes, lists=self.targets, how=HOW, **told)

    def __getitem__(self, index: SupportsIndex) -> tuple[Encoded, Any]:
        number = self._from_start(index)
        try:
            image = self._encoded(number)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                errno.ENOENT,
                f"image {self.ids[number]} of {self.annotations!r} is not in the folder; copy it there, or leave it "
                "out of the file",
                error.filename,
            ) from None
        return self._with(number, image)

    def _with(self, number: int, image: Encoded) -> tuple[Encoded, Any]:
        return image, self.targets[number]

    def __repr__(self) -> str:
        return f"Coco({self.root!r}: {len(self)} images)"


def _index(path: str, root: str, names: Any, crowds: bool, remote: Remote | None) -> dict[str, np.ndarray]:
    """What a file says, checked, in arrays; what is short as JSON."""
    listed, objects, categories = _parts(path, remote)
    listed.sort(key=lambda image: image["id"])
    own: dict[int, list[Any]] = {image["id"]: [] for image in listed}
    if len(own) < len(listed):
        twice = next(a["id"] for a, b in pairwise(listed) if a["id"] == b["id"])
        raise ValueError(f"{path!r} lists two images with the id {twice!r}; an id names one image")
    remarks = [unmatched(objects, "image_id", own, repr(path))]
    for one in objects:
        if is_in(one.get("image_id"), own) and (crowds or not one.get("iscrowd")):
            own[one["image_id"]].append(one)
    # A URL is no path, but what goes on after it is checked like one.
    folder = root if not is_url(root) else "/" + root.partition("://")[2]
    paths = Paths.below(folder, [image_path(image["file_name"], image["id"], folder) for image in listed])
    told: dict[str, Any] = {"categories": [(one["id"], one["name"]) for one in categories]}
    arrays = {"ids": np.array(list(own), np.int64), "paths": paths.data, "path_offsets": paths.offsets}
    if names == "raw":
        lists: Any = as_lists(own.values())
    else:
        targets = CocoTargets(list(own.values()), list(own), listed, names, how=HOW)
        remarks.append(unknown_categories([one for ones in own.values() for one in ones], categories, repr(path)))
        lists = targets.lists
        told |= {"names": targets.names, "points": targets.points, "more": targets.more}
        arrays["sizes_hw"] = targets.sizes_hw.ravel()
    told["remarks"] = list(filter(None, remarks))
    arrays |= {"lists": lists.data, "list_offsets": lists.offsets}
    return {**arrays, "told": np.frombuffer(json.dumps(told).encode(), np.uint8)}


def _parts(path: str, remote: Remote | None) -> tuple[list[Any], list[Any], list[Any]]:
    """Images, annotations and categories of a file."""
    try:
        with open_stream(path, remote) as file:
            found = json.loads(file.read().decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path!r} is no JSON, or is cut off: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(found.get(name), list) for name in ("images", "annotations")):
        raise ValueError(
            f"{path!r} has no lists of images and annotations; expected COCO's format, as in instances_val2017.json"
        )
    for image in found["images"]:
        if (
            not isinstance(image, dict)
            or type(image.get("id")) is not int
            or whole(image["id"]) is None  # more than 64 bits
            or not isinstance(image.get("file_name"), str)
        ):
            raise ValueError(f"an image of {path!r} lacks an integer id or a file_name: {repr(image)[:200]}")
    for kind in ("annotations", "categories"):
        for one in found.get(kind) or ():
            if not isinstance(one, dict) or (kind == "categories" and not _is_category(one)):
                raise ValueError(f"one of the {kind} of {path!r} is {repr(one)[:200]}, which is not COCO's format")
    categories = found.get("categories") or []
    names: dict[Any, Any] = {}
    for one in categories:
        if names.setdefault(one["id"], one["name"]) != one["name"]:
            raise ValueError(
                f"{path!r} has two categories with the id {one['id']!r}, {names[one['id']]!r} and {one['name']!r}; an "
                "id names one category"
            )
    return found["images"], found["annotations"], categories


def _is_category(one: dict[str, Any]) -> bool:
    return isinstance(one.get("id"), int | str) and "name" in one
