"""Image files in folders, with the folder as the label (`ImageFolder`) or without labels (`ImageFiles`).

A dataset scans its folder once, in the main process, and is copied to the workers, which read the files. It has no
open files and no list of objects: the paths are packed into one byte buffer (`gpuload.datasets.scan`), and the labels
into an integer array. Ten million ImageNet-like paths with their labels take 360 MB.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from gpuload.checks import flag, one_of
from gpuload.datasets.base import ImageFileDataset, LabelledPaths, existing_folder
from gpuload.datasets.classes import Classes, check_known_class, class_names, format_names
from gpuload.datasets.files import EXTENSIONS
from gpuload.datasets.litter import log_skipped_files
from gpuload.datasets.names import dataset_arguments
from gpuload.datasets.sample import MODES, Encoded, Mode
from gpuload.datasets.scan import Paths, Scanner
from gpuload.datasets.stores.opening import client, remote_options

if TYPE_CHECKING:
    from gpuload.datasets.stores.remote import StorageOptions

__all__ = ["ImageFiles", "ImageFolder"]

SPLITS: Final = frozenset({"train", "training", "val", "valid", "validation", "test", "testing"})


class _ScannedFolder(ImageFileDataset):
    def _scan(
        self,
        root: str | os.PathLike[str],
        extensions: str | Iterable[str],
        follow_links: bool,
        storage_options: StorageOptions,
        *,
        by_class: bool,
    ) -> tuple[list[str], np.ndarray, str]:
        """Find the images in each folder of the root, or in the root itself. Return the names of these folders, the
        number of images in each, and a description of the search for error messages."""
        folder, endings = existing_folder(root), _check_extensions(extensions)
        follow_links = flag("follow_links", follow_links)
        self._remote = remote_options(root, storage_options)
        if self._remote is None:
            scanner = Scanner(folder, extensions=endings, follow_links=follow_links)
        else:
            from gpuload.datasets.stores.remote import RemoteScanner

            scanner = RemoteScanner(client(self._remote), folder, extensions=endings)

        def scan() -> dict[str, np.ndarray]:
            names = scanner.find_folders() if by_class else [b""]
            if not names:
                hint = " There are images directly in it: gpuload.ImageFiles reads those, without labels."
                raise FileNotFoundError(
                    f"{folder!r} has no subfolders; ImageFolder expects one per class, as in root/class/image.jpg."
                    f"{hint if len(scanner.find_images()) else ''}"
                )
            images = [scanner.find_images(name) for name in names]
            paths = Paths.concatenate(folder, images)
            return {
                "names": np.frombuffer(b"\0".join(names), np.uint8),
                "counts": np.array(list(map(len, images))),
                "data": paths.data,
                "offsets": paths.offsets,
                "left_out": np.frombuffer(str(scanner.skipped_files).encode(), np.uint8),
            }

        is_local = isinstance(scanner, Scanner)
        arrays = scanner.load_or_build([by_class, endings, follow_links], scan) if is_local else scan()
        log_skipped_files(folder, arrays["left_out"].tobytes().decode())
        self.paths = Paths(folder, arrays["data"], arrays["offsets"])
        names = [os.fsdecode(name) for name in arrays["names"].tobytes().split(b"\0")]
        return names, arrays["counts"], f"searched at any depth for names that end in {', '.join(endings)}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _ScannedFolder):
            return NotImplemented
        own_attributes, other_attributes = vars(self), vars(other)
        are_equal = all(own_attributes.get(name) == other_attributes.get(name) for name in ("mode", "classes", "paths"))
        return are_equal and np.array_equal(own_attributes.get("labels", ()), other_attributes.get("labels", ()))

    __hash__ = None  # type: ignore[assignment]


class ImageFolder(_ScannedFolder):
    """Images labelled by the folder that contains them: ``root/class/image.jpg``, at any depth below the class.

    Yields ``(Encoded, label)``. Indices and labels are the same as in torchvision's ImageFolder; classes are sorted by
    name. Files of other programs are skipped and counted in one log line: ``.ipynb_checkpoints``, ``@eaDir``,
    ``__MACOSX``, recycle bins, files whose names begin with ``._``.

    By default, labels number the existing folders, so in a split that lacks a class, all later classes have different
    labels. To avoid this, pass the classes of the train split: ``gl.ImageFolder("birds/val", classes=train)``. If all
    folders have names of splits, such as ``train`` and ``val``, a warning says so.

    Args:
        root: the folder that contains one folder per class, or its URL, such as ``s3://bucket/train``.
        classes: the names of all classes, in the order of their labels, torchvision's `class_to_idx`, or a dataset
            that has `classes`. `root` may lack some of them, but a folder with any other name is an error.
        extensions: the endings of image files' names; case does not matter.
        follow_links: whether symbolic links may point outside `root`; links inside it are always followed.
        mode: the channels to decode to, see `Encoded`.
        storage_options: for a URL: options for fsspec, or a `Remote`.

    Attributes:
        classes: the sorted names of the classes, or the names in the argument `classes`.
        class_to_idx: the label of each class.
        paths: the full path of each image, in a sequence that builds each str on access.
        labels: the label of each image, in an array of the smallest unsigned type; `targets` is an alias.
        samples: a pair of path and label for each image; `imgs` is an alias.

    Raises:
        TypeError: an argument is unknown; for a torchvision argument, the message names the replacement.
        FileNotFoundError: `root` is missing or has no subfolders; there are no images at all; a class has no images
            and `classes` is not passed.
        NotADirectoryError: `root` is a file.
        ValueError: a folder is not among `classes`; a link points outside the root or is circular; `classes`,
            `extensions` or `mode` is invalid.

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
        names = class_names(classes)
        self.mode = one_of("mode", mode, MODES)
        folders, counts, search_text = self._scan(root, extensions, follow_links, storage_options, by_class=True)
        if names is None and len(folders) > 1 and SPLITS.issuperset(name.lower() for name in folders):
            train = os.path.join(self.root, max(folders, key=lambda name: name.lower().startswith("train")))
            warnings.warn(
                f"the classes of {self.root!r} are {format_names(folders)}, which are names of splits, so that "
                f"labels number the splits; write gpuload.ImageFolder({train!r}), or pass classes={folders!r} if "
                "they are classes",
                stacklevel=3,
            )
        if names is None and not counts.all():
            _refuse_empty(self.root, [folders[label] for label in np.flatnonzero(counts == 0)], search_text)
        self.classes = folders if names is None else names
        self.class_to_idx = {name: label for label, name in enumerate(self.classes)}
        for name in folders:
            check_known_class(name, self.class_to_idx, f"the folder {self.root!r}")
        if not len(self.paths):
            raise FileNotFoundError(f"{self.root!r} has no images in it: {search_text}")
        dtype = np.min_scalar_type(len(self.classes) - 1)
        self.labels = np.repeat(np.array([self.class_to_idx[name] for name in folders], dtype), counts)

    @property
    def targets(self) -> np.ndarray:
        """The labels, under torchvision's name."""
        return self.labels

    @property
    def samples(self) -> Sequence[tuple[str, int]]:
        """``(path, label)`` of each image, in a sequence that builds each pair on access."""
        return LabelledPaths(self.paths, self.labels)

    @property
    def imgs(self) -> Sequence[tuple[str, int]]:
        """The samples, under torchvision's other name."""
        return self.samples

    def _make_sample(self, index: int, image: Encoded) -> tuple[Encoded, int]:
        return image, int(self.labels[index])

    def __repr__(self) -> str:
        return f"ImageFolder({self.root!r}: {len(self)} images in {len(self.classes)} classes)"


class ImageFiles(_ScannedFolder):
    """All images in a folder, at any depth, without labels.

    Yields `Encoded`. Folders are sorted by path, and files in a folder by name. Files of other programs are skipped, as
    in `ImageFolder`.

    The arguments (except `classes`) and errors are the same as for `ImageFolder`; a folder without images raises
    FileNotFoundError.

    Attributes:
        paths: the full path of each image, in a sequence that builds each str on access.

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
        self.mode = one_of("mode", mode, MODES)
        *_, search_text = self._scan(root, extensions, follow_links, storage_options, by_class=False)
        if not len(self.paths):
            raise FileNotFoundError(f"{self.root!r} has no images in it: {search_text}")

    def _make_sample(self, index: int, image: Encoded) -> Encoded:
        return image

    def __repr__(self) -> str:
        return f"ImageFiles({self.root!r}: {len(self)} images)"


def _check_extensions(extensions: str | Iterable[str]) -> tuple[str, ...]:
    endings = (extensions,) if isinstance(extensions, str) else tuple(extensions)
    if not endings:
        raise ValueError("extensions must name at least one ending, such as '.jpg'")
    for ending in endings:
        if not isinstance(ending, str) or len(ending) < 2 or not ending.startswith("."):
            raise ValueError(f"extensions must be endings with their dot, such as '.jpg', got {ending!r}")
    return tuple(ending.lower() for ending in endings)


def _refuse_empty(folder: str, names: list[str], search_text: str) -> None:
    raise FileNotFoundError(
        f"{'a class has' if len(names) == 1 else f'{len(names)} classes have'} no images in {folder!r}: "
        f"{format_names(names)}; {search_text}. Pass other endings with extensions=. If this split lacks a class, do "
        "not remove its folder, which would change the labels of the classes after it: pass classes=train, the dataset "
        "of the train split, or a list of all classes. If a folder is not a class, move it elsewhere"
    )
