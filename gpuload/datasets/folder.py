"""Image files in folders, with the folder as the label (`ImageFolder`) or without labels (`ImageFiles`).

A dataset scans its folder once, in the main process, and is copied to the workers, which read the files. It holds no
open files and no list of objects: paths are one byte buffer (`gpuload.datasets.scan`), labels an integer array. Ten
million ImageNet-like paths with their labels take 360 MB.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.datasets.base import ImageFileDataset, LabelledPaths, existing_folder
from gpuload.datasets.classes import Classes, check_known, class_names, shown
from gpuload.datasets.files import EXTENSIONS
from gpuload.datasets.names import dataset_arguments
from gpuload.datasets.sample import Encoded, Mode, check_mode
from gpuload.datasets.scan import Paths, Scanner
from gpuload.datasets.stores.opening import client, remote_for

if TYPE_CHECKING:
    from gpuload.datasets.stores.remote import Remote, StorageOptions

__all__ = ["ImageFiles", "ImageFolder"]


class ImageFolder(ImageFileDataset):
    """Images labelled by the folder that they are in: ``root/class/image.jpg``, at any depth below the class.

    Yields ``(Encoded, label)``. Indices and labels are the same as with torchvision's ImageFolder; classes are sorted
    by name. What other programs keep there is left out, and counted in a line of the log: ``.ipynb_checkpoints``,
    ``@eaDir``, ``__MACOSX``, bins, files whose names begin with ``._``.

    Labels number the folders that are there, so a split that lacks a class has other labels from there on, unless it
    takes the classes of the train split: ``gl.ImageFolder("birds/val", classes=train)``.

    Args:
        root: the folder that holds one folder per class; or a URL of one, such as ``s3://bucket/train``.
        classes: the names of all classes, in the order of their labels; or a data set whose `classes` they are.
            `root` may lack some of them, but a folder of another name is an error.
        extensions: the endings of image files' names; case does not matter.
        follow_links: whether symbolic links may lead out of `root`; links that stay inside are always followed.
        mode: what the pixels become, see `Encoded`.
        storage_options: of a URL, what fsspec takes, or a `Remote`.

    Attributes:
        classes: the names of the classes, sorted, or those that were given.
        class_to_idx: the label of each class.
        paths: the full path of each image: a sequence that makes each str when it is asked for.
        labels: the label of each image, as an array of the smallest unsigned type; also `targets`.
        samples: the path and the label of each image, in pairs; also `imgs`.

    Raises:
        TypeError: an argument is not known; of torchvision's the message says what takes its place.
        FileNotFoundError: `root` is missing or has no folders in it; a class has no images, without `classes`.
        NotADirectoryError: `root` is a file.
        ValueError: a folder is not among `classes`; a link leaves the root or leads in a circle; `classes`,
            `extensions` or `mode` is not valid.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     for name in ("cat/1.jpg", "cat/2.jpg", "dog/1.jpg"):
        ...         path = pathlib.Path(root, name)
        ...         path.parent.mkdir(exist_ok=True)
        ...         size = path.write_bytes(b"...")
        ...     dataset = ImageFolder(root)
        ...     image, label = dataset[2]
        >>> dataset.classes, dataset.labels, len(image.data), label
        (['cat', 'dog'], array([0, 0, 1], dtype=uint8), 3, 1)
    """

    @dataset_arguments
    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        classes: Classes | None = None,
        extensions: str | Iterable[str] = EXTENSIONS,
        follow_links: bool = False,
        mode: Mode = "RGB",
        storage_options: StorageOptions = None,
    ) -> None:
        given = class_names(classes)
        self.mode = check_mode(mode)
        folder, endings = existing_folder(root), _checked_extensions(extensions)
        self._remote = remote_for(root, storage_options)
        scanner = _scanner(folder, self._remote, endings, follow_links)

        def scan() -> dict[str, np.ndarray]:
            names, pieces = _classes_in(scanner, folder)
            paths = Paths.pack(folder, pieces)
            counts = np.array([len(lengths) for _, lengths in pieces])
            return {"names": np.frombuffer(b"\0".join(names), np.uint8), "counts": counts, **_arrays(paths)}

        found = self._scanned(scanner, folder, ["classes", endings, follow_links], scan)
        folders = [os.fsdecode(name) for name in found["names"].tobytes().split(b"\0")]
        counts: np.ndarray = found["counts"]
        if given is None and not counts.all():
            _refuse_empty(folder, [name for name, count in zip(folders, counts, strict=True) if not count], endings)
        self.classes = folders if given is None else given
        self.class_to_idx = {name: label for label, name in enumerate(self.classes)}
        for name in folders:
            check_known(name, self.class_to_idx, f"the folder {folder!r}")
        if not counts.any():
            raise FileNotFoundError(f"{folder!r} has no images in it: {_looked_for(endings)}")
        self.paths = Paths(folder, found["data"], found["offsets"])
        kind = np.min_scalar_type(len(self.classes) - 1)
        self.labels = np.repeat(np.array([self.class_to_idx[name] for name in folders], kind), counts)

    @property
    def targets(self) -> np.ndarray:
        """The labels, under torchvision's name."""
        return self.labels

    @property
    def samples(self) -> Sequence[tuple[str, int]]:
        """``(path, label)`` of each image: a sequence that makes each pair when it is asked for."""
        return LabelledPaths(self.paths, self.labels)

    @property
    def imgs(self) -> Sequence[tuple[str, int]]:
        """The samples, under torchvision's other name."""
        return self.samples

    def _with(self, number: int, image: Encoded) -> tuple[Encoded, int]:
        return image, int(self.labels[number])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ImageFolder):
            return NotImplemented
        return (
            self.mode == other.mode
            and self.classes == other.classes
            and self.paths == other.paths
            and np.array_equal(self.labels, other.labels)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ImageFolder({self.root!r}: {len(self)} images in {len(self.classes)} classes)"


class ImageFiles(ImageFileDataset):
    """All images in a folder, at any depth, without labels.

    Yields `Encoded`. Folders come in the order of their paths, files of one folder in the order of their names. What
    other programs keep there is left out, as by `ImageFolder`.

    Args and errors: as for `ImageFolder`; FileNotFoundError also if there are no images at all.

    Attributes:
        paths: the full path of each image: a sequence that makes each str when it is asked for.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     size = pathlib.Path(root, "1.JPG").write_bytes(b"...")
        ...     dataset = ImageFiles(root, mode="L")
        ...     image = dataset[0]
        >>> len(dataset), len(image.data), image.mode
        (1, 3, 'L')
    """

    @dataset_arguments
    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        extensions: str | Iterable[str] = EXTENSIONS,
        follow_links: bool = False,
        mode: Mode = "RGB",
        storage_options: StorageOptions = None,
    ) -> None:
        self.mode = check_mode(mode)
        folder, endings = existing_folder(root), _checked_extensions(extensions)
        self._remote = remote_for(root, storage_options)
        scanner = _scanner(folder, self._remote, endings, follow_links)

        def scan() -> dict[str, np.ndarray]:
            piece = scanner.images()
            if not len(piece[1]):
                raise FileNotFoundError(f"{folder!r} has no images in it: {_looked_for(endings)}")
            return _arrays(Paths.pack(folder, [piece]))

        found = self._scanned(scanner, folder, ["files", endings, follow_links], scan)
        self.paths = Paths(folder, found["data"], found["offsets"])

    def _with(self, number: int, image: Encoded) -> Encoded:
        return image

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ImageFiles):
            return NotImplemented
        return self.mode == other.mode and self.paths == other.paths

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ImageFiles({self.root!r}: {len(self)} images)"


def _classes_in(scanner: Any, folder: str) -> tuple[list[bytes], list[Any]]:
    """The names of the folders, and the images of each."""
    names = scanner.folders()
    if not names:
        hint = ""
        if len(scanner.images()[1]):
            hint = " There are images directly in it: gpuload.ImageFiles reads those, without labels."
        raise FileNotFoundError(
            f"{folder!r} has no folders in it; ImageFolder expects one per class, as in root/class/image.jpg.{hint}"
        )
    return names, [scanner.images(name) for name in names]


def _arrays(paths: Paths) -> dict[str, np.ndarray]:
    return {"data": paths.data, "offsets": paths.offsets}


def _scanner(folder: str, remote: Remote | None, endings: tuple[str, ...], follow_links: bool) -> Any:
    if remote is None:
        return Scanner(folder, extensions=endings, follow_links=follow_links)
    from gpuload.datasets.stores.remote import RemoteScanner

    return RemoteScanner(client(remote), folder, extensions=endings)


def _checked_extensions(extensions: str | Iterable[str]) -> tuple[str, ...]:
    endings = (extensions,) if isinstance(extensions, str) else tuple(extensions)
    if not endings:
        raise ValueError("extensions must name at least one ending, such as '.jpg'")
    for ending in endings:
        if not isinstance(ending, str) or len(ending) < 2 or not ending.startswith("."):
            raise ValueError(f"extensions must be endings with their dot, such as '.jpg', got {ending!r}")
    return tuple(ending.lower() for ending in endings)


def _refuse_empty(folder: str, empty: list[str], endings: tuple[str, ...]) -> None:
    raise FileNotFoundError(
        f"{'a class has' if len(empty) == 1 else f'{len(empty)} classes have'} no images in {folder!r}: "
        f"{shown(empty)}; {_looked_for(endings)}. Name other endings with extensions=. If this split lacks a class, do "
        "not remove its folder, which would change the labels of the classes after it: write classes=train, the data "
        "set of the train split, or the list of all classes. If a folder is no class, move it elsewhere"
    )


def _looked_for(endings: tuple[str, ...]) -> str:
    return f"looked at any depth for names that end in {', '.join(endings)}"
