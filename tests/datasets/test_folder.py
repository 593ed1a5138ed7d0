"""`ImageFolder` and `ImageFiles`: images, their order and labels, links, errors, memory, and cached scans."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from helpers.file_descriptors import open_below
from helpers.patterns import exactly, starting
from helpers.programs import run_python
from hypothesis import given, settings
from hypothesis import strategies as st

import gpuload as gl
from gpuload.datasets import folder as folder_module
from gpuload.datasets.cached import Cached
from gpuload.datasets.folder import ImageFiles, ImageFolder
from gpuload.datasets.joined import Joined
from gpuload.datasets.sample import Encoded
from gpuload.datasets.scan import Scanner

ENDINGS = ".jpg, .jpeg, .png, .ppm, .bmp, .pgm, .tif, .tiff, .webp"


def write_files(root: Path, *names: str | bytes) -> Path:
    """Write files that contain their own relative path."""
    for name in names:
        raw = os.fsencode(name)
        path = os.path.join(os.fsencode(root), raw)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(raw)
    return root


def relative_paths(dataset: ImageFolder | ImageFiles) -> list[str]:
    return [os.path.relpath(path, dataset.root) for path in dataset.paths]


def torchvision_samples(root: Path, extensions: tuple[str, ...]) -> list[tuple[str, int]]:
    """List the samples as torchvision's ImageFolder (0.23) documents and orders them."""
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    samples = []
    for label, name in enumerate(classes):
        for directory, _, files in sorted(os.walk(root / name, followlinks=True)):
            samples += [
                (os.path.join(directory, file), label) for file in sorted(files) if file.lower().endswith(extensions)
            ]
    return samples


@pytest.mark.parametrize("kind", [ImageFolder, ImageFiles])
@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("transform", r"gpuload\.Loader\(dataset, transforms=\[…\]\)$"),
        ("target_transform", r"dataset\.labels = table\[dataset\.labels\]$"),
        ("loader", r"decode=gpuload\.Decode\(…\) sets the options$"),
        ("is_valid_file", r"extensions=\('\.jpg', …\) selects the"),
        ("allow_empty", r"pass classes=\[…\] with the names of all classes; a class may then have no images$"),
        ("rot", r"did you mean root\?$"),
        ("depth", "its arguments: root, (classes, )?extensions, follow_links, mode, storage_options$"),
    ],
)
def test_folder_refuses_arguments_of_torchvision_with_their_replacement(kind, name, remedy, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=f"^{kind.__name__} has no argument '{name}'; .*{remedy}"):
        kind(tmp_path, **{name: None})


@pytest.mark.parametrize("kind", [ImageFolder, ImageFiles, gl.FileList, gl.LMDB])
def test_datasets_refuse_a_list_or_none_as_path(kind: type) -> None:
    for path, got in (
        (["a", "b"], "['a', 'b'] (list); create one dataset per path, and join them with +"),
        (None, "None (NoneType)"),
    ):
        with pytest.raises(TypeError, match=exactly(f"expected a path, a str or pathlib.Path, got {got}")):
            kind(path)


@pytest.mark.parametrize(
    ("splits", "suggested_split"),
    [(("train", "val", "test"), "train"), (("Training", "validation"), "Training"), (("test", "valid"), "test")],
)
def test_image_folder_warns_if_all_classes_are_names_of_splits(splits, suggested_split, tmp_path: Path) -> None:
    write_files(tmp_path, *(f"{split}/ant/1.jpg" for split in splits))
    names = sorted(splits)
    text = (
        f"the classes of {str(tmp_path)!r} are {', '.join(map(repr, names))}, which are names of splits, so "
        f"that labels number the splits; write gpuload.ImageFolder({str(tmp_path / suggested_split)!r}), or pass "
        f"classes={names!r} if they are classes"
    )
    with pytest.warns(UserWarning, match=exactly(text)):
        assert ImageFolder(tmp_path).classes == names
    assert ImageFolder(tmp_path, classes=names).classes == names


def test_image_folder_does_not_warn_if_some_classes_are_names_of_splits(tmp_path: Path) -> None:
    assert ImageFolder(write_files(tmp_path / "vehicles", "bus/1.jpg", "train/2.jpg")).classes == ["bus", "train"]
    assert ImageFolder(write_files(tmp_path / "one", "train/2.jpg")).classes == ["train"]


def test_image_folder_yields_encoded_bytes_with_path_and_label(tmp_path: Path) -> None:
    dataset = ImageFolder(write_files(tmp_path, "dog/1.jpg", "cat/2.png", "cat/1.jpeg"))
    assert dataset.classes == ["cat", "dog"]
    assert dataset.class_to_idx == {"cat": 0, "dog": 1}
    assert list(dataset.paths) == [f"{tmp_path}/cat/1.jpeg", f"{tmp_path}/cat/2.png", f"{tmp_path}/dog/1.jpg"]
    assert dataset.labels.tolist() == dataset.targets.tolist() == [0, 0, 1]
    assert list(dataset.samples) == list(dataset.imgs) == list(zip(dataset.paths, [0, 0, 1], strict=True))
    assert dataset.samples[1:] == list(dataset.samples)[1:]
    assert type(dataset.samples[2][1]) is int
    image, label = dataset[2]
    assert image == Encoded(b"dog/1.jpg", "RGB", f"{tmp_path}/dog/1.jpg")
    assert label == 1
    assert type(label) is int
    unchanged_image, _ = ImageFolder(tmp_path, mode="unchanged")[2]
    assert unchanged_image.mode == "unchanged"
    assert len(dataset) == 3
    assert repr(dataset) == f"ImageFolder('{tmp_path}': 3 images in 2 classes)"
    assert [image.data for image, _ in dataset] == [b"cat/1.jpeg", b"cat/2.png", b"dog/1.jpg"]


def test_image_files_yields_encoded_bytes_without_labels(tmp_path: Path) -> None:
    dataset = ImageFiles(write_files(tmp_path, "b.jpg", "sub/deep/a.jpg", "a.jpg", "notes.txt"), mode="L")
    assert relative_paths(dataset) == ["a.jpg", "b.jpg", "sub/deep/a.jpg"]
    assert dataset[1] == Encoded(b"b.jpg", "L", f"{tmp_path}/b.jpg")
    assert len(dataset) == 3
    assert repr(dataset) == f"ImageFiles('{tmp_path}': 3 images)"


def test_image_files_reads_default_extensions_in_any_case_only(tmp_path: Path) -> None:
    images = ["a.JPG", "b.jpeg", "c.PnG", "d.ppm", "e.bmp", "f.pgm", "g.tif", "h.TIFF", "i.webp"]
    write_files(tmp_path, *images, "j.gif", "k.txt", "l.jpg.part", "jpg", "mjpg")
    assert relative_paths(ImageFiles(tmp_path)) == images


@pytest.mark.parametrize("extensions", [".gif", (".GIF",), [".gif", ".avif"], {".gif"}])
def test_image_files_reads_the_selected_extensions_only(tmp_path: Path, extensions: object) -> None:
    write_files(tmp_path, "a.gif", "b.Gif", "c.jpg")
    assert relative_paths(ImageFiles(tmp_path, extensions=extensions)) == ["a.gif", "b.Gif"]


@pytest.mark.parametrize(
    "name",
    ["with space.jpg", "new\nline.jpg", "ümlaut-☃-\U0001f600.jpg", b"\xff\xfe not utf-8.jpg", "'\"\\.jpg", ".jpg"],
)
def test_image_folder_reads_files_and_classes_with_unusual_names(tmp_path: Path, name: str | bytes) -> None:
    text = os.fsdecode(b"\xe9t\xe9/") + os.fsdecode(name)
    dataset = ImageFolder(write_files(tmp_path, text, "z\nz/1.jpg"))
    image, _ = dataset[1]
    assert dataset.classes == ["z\nz", os.fsdecode(b"\xe9t\xe9")]
    assert relative_paths(dataset) == ["z\nz/1.jpg", text]
    assert image.data == os.fsencode(text)
    assert image.source == f"{tmp_path}/{text}"
    assert pickle.loads(pickle.dumps(dataset)) == dataset


def test_image_files_ignores_folders_and_fifos_named_like_images(tmp_path: Path) -> None:
    write_files(tmp_path, "a.jpg", "folder.jpg/b.jpg")
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "link to pipe.jpg").symlink_to("pipe.jpg")
    assert relative_paths(ImageFiles(tmp_path)) == ["a.jpg", "folder.jpg/b.jpg"]


def test_image_folder_takes_a_relative_root_and_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, "data/c/1.jpg")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    relative, in_home = ImageFolder("data"), ImageFolder("~/data")
    monkeypatch.chdir("/")
    assert relative.root == in_home.root == str(tmp_path / "data")
    image, _ = relative[0]
    assert image.data == b"data/c/1.jpg"


def test_image_folder_order_equals_torchvisions_where_files_and_folders_share_prefixes(tmp_path: Path) -> None:
    write_files(
        tmp_path, *(f"c/{name}.jpg" for name in ("a/1", "a-b/1", "a", "b", "a/z/2", "a0/1", "B")), "a/10.jpg", "a/9.jpg"
    )
    dataset = ImageFolder(tmp_path)
    assert relative_paths(dataset) == [
        *("a/10.jpg", "a/9.jpg"),
        *("c/B.jpg", "c/a.jpg", "c/b.jpg", "c/a/1.jpg", "c/a-b/1.jpg", "c/a/z/2.jpg", "c/a0/1.jpg"),
    ]
    expected = torchvision_samples(tmp_path, folder_module.EXTENSIONS)
    assert list(zip(dataset.paths, dataset.labels.tolist(), strict=True)) == expected


FILE_NAMES = st.text(st.sampled_from("aAb-. 0é☃\U0001f600\ufffd\n"), min_size=1, max_size=4).filter(
    lambda name: name.strip(".") != ""
)
TREES = st.lists(st.lists(FILE_NAMES, min_size=1, max_size=3), min_size=1, max_size=12)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(tree=TREES)
def test_order_is_torchvisions_for_any_tree(tmp_path_factory: pytest.TempPathFactory, tree: list[list[str]]) -> None:
    root = tmp_path_factory.mktemp("tree")
    for path_parts in tree:
        folder = root.joinpath("class " + path_parts[0], *path_parts[1:-1])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / (path_parts[-1] + ".jpg")).touch()
    dataset = ImageFolder(root)
    expected = torchvision_samples(root, folder_module.EXTENSIONS)
    assert list(zip(dataset.paths, dataset.labels.tolist(), strict=True)) == expected


def test_image_folder_order_does_not_depend_on_scandir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, *(f"{c}/{d}/{f}.jpg" for c in "zyx" for d in "321" for f in ("b", "a", "é")))
    expected = relative_paths(ImageFolder(tmp_path))
    original = os.scandir

    @contextlib.contextmanager
    def scandir(path: bytes) -> Iterator[list[os.DirEntry]]:
        with original(path) as entries:
            yield sorted(entries, key=lambda entry: entry.name, reverse=True)

    monkeypatch.setattr(os, "scandir", scandir)
    assert relative_paths(ImageFolder(tmp_path)) == expected


@pytest.mark.processes
def test_image_folder_order_does_not_depend_on_the_locale(tmp_path: Path) -> None:
    write_files(tmp_path, "c/é.jpg", "c/e.jpg", "c/f.jpg", "c/E.jpg", b"c/\xff.jpg")
    code = "import sys; import gpuload as gl; print(bytes(gl.ImageFolder(sys.argv[1]).paths.data).hex())"
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    outputs = {
        run_python(code, tmp_path, flags=flags, env={"LC_ALL": locale, **environment})
        for locale, flags in [("C", ("-X", "utf8=0")), ("C.UTF-8", ())]
    }
    assert len(outputs) == 1


def test_image_files_takes_negative_indices_and_numpy_integers(tmp_path: Path) -> None:
    dataset = ImageFiles(write_files(tmp_path, "1.jpg", "2.jpg", "3.jpg"))
    for index in (-3, -1, 0, 2, np.int64(1), np.uint8(2)):
        assert dataset[index].data == [b"1.jpg", b"2.jpg", b"3.jpg"][index]
    for index, got in ((0.0, "0.0 (float)"), (slice(0, 1), "slice(0, 1, None) (slice)")):
        with pytest.raises(TypeError, match=exactly(f"an index must be an integer, got {got}")):
            dataset[index]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", [ImageFolder, ImageFiles])
@pytest.mark.parametrize("index", [3, -4, 10**30])
def test_folder_refuses_an_index_out_of_range(tmp_path: Path, kind: Callable, index: int) -> None:
    dataset = kind(write_files(tmp_path, "a/1.jpg", "a/2.jpg", "b/3.jpg"))
    text = f"index {index} is out of range: {kind.__name__}({str(tmp_path)!r}) has 3 images"
    with pytest.raises(IndexError, match=exactly(text)):
        dataset[index]


def test_image_files_reads_a_file_completely_in_short_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jpg").write_bytes(bytes(range(256)))
    dataset = ImageFiles(tmp_path)
    read = os.read
    monkeypatch.setattr(os, "read", lambda descriptor, count: read(descriptor, min(count, 100)))
    assert dataset[0].data == bytes(range(256))
    (tmp_path / "a.jpg").write_bytes(b"")
    assert dataset[0].data == b""


@pytest.mark.parametrize("kind", [ImageFolder, ImageFiles])
def test_folder_refuses_a_missing_root_and_a_file_as_root(tmp_path: Path, kind: Callable) -> None:
    text = f"'{tmp_path}/no' does not exist; expected a folder of images (got '{tmp_path}/no')"
    with pytest.raises(FileNotFoundError, match=exactly(text)):
        kind(f"{tmp_path}/no")
    text = f"'{write_files(tmp_path, 'a.jpg')}/a.jpg' is a file; expected a folder of images"
    with pytest.raises(NotADirectoryError, match=exactly(text)):
        kind(tmp_path / "a.jpg")


@pytest.mark.parametrize("kind", [ImageFolder, ImageFiles])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"extensions": (".png", "jpg")}, "extensions must be endings with their dot, such as '.jpg', got 'jpg'"),
        ({"extensions": ()}, "extensions must name at least one ending, such as '.jpg'"),
        ({"mode": "BGR"}, "mode must be one of 'RGB', 'L', 'RGBA', 'unchanged', got 'BGR'"),
    ],
)
def test_folder_refuses_wrong_extensions_and_modes(
    tmp_path: Path, kind: Callable, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=exactly(text)):
        kind(tmp_path, **options)


def test_unreadable_subfolder_raises_permission_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, "a/1.jpg", "a/b/1.jpg")
    original = os.scandir

    def scandir(path: bytes) -> object:
        if path.endswith(b"/a/b"):  # the tests may run as the superuser, who may read everything
            raise PermissionError(13, "Permission denied", path)
        return original(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(PermissionError, match="a/b"):
        ImageFolder(tmp_path)


def test_image_folder_refuses_a_root_without_subfolders(tmp_path: Path) -> None:
    text = f"'{tmp_path}' has no subfolders; ImageFolder expects one per class, as in root/class/image.jpg."
    with pytest.raises(FileNotFoundError, match=exactly(text)):
        ImageFolder(tmp_path)
    text += " There are images directly in it: gpuload.ImageFiles reads those, without labels."
    with pytest.raises(FileNotFoundError, match=exactly(text)):
        ImageFolder(write_files(tmp_path, "a.jpg"))


def test_image_folder_refuses_classes_without_images(tmp_path: Path) -> None:
    write_files(tmp_path, "cat/1.jpg", "dog/notes.txt")
    text = (
        f"a class has no images in '{tmp_path}': 'dog'; searched at any depth for names that end in {ENDINGS}. "
        "Pass other endings with extensions=. If this split lacks a class, do not remove its folder, which would "
        "change the labels of the classes after it: pass classes=train, the dataset of the train split, or a list "
        "of all classes. If a folder is not a class, move it elsewhere"
    )
    with pytest.raises(FileNotFoundError, match=exactly(text)):
        ImageFolder(tmp_path)
    write_files(tmp_path, *(f"{name}/1.gif" for name in "abef"))
    text = f"5 classes have no images in '{tmp_path}': 'a', 'b', 'dog' and 2 more; searched at any depth"
    with pytest.raises(FileNotFoundError, match=starting(text)):
        ImageFolder(tmp_path)


@pytest.mark.parametrize("source", ["dataset", "list", "cached"])
def test_image_folder_with_classes_keeps_the_labels_of_a_split_that_lacks_some(tmp_path: Path, source: str) -> None:
    train = ImageFolder(write_files(tmp_path / "train", "ant/1.jpg", "bee/1.jpg", "cat/1.jpg", "dog/1.jpg"))
    write_files(tmp_path / "val", "bee/2.jpg", "dog/3.jpg", "dog/4.jpg", "cat/notes.txt")
    classes = {"dataset": train, "list": ["ant", "bee", "cat", "dog"], "cached": Cached(train, 1 << 20)}[source]
    val = ImageFolder(tmp_path / "val", classes=classes)
    assert (val.classes, val.class_to_idx) == (train.classes, train.class_to_idx)
    assert relative_paths(val) == ["bee/2.jpg", "dog/3.jpg", "dog/4.jpg"]
    assert [label for _, label in val] == val.labels.tolist() == [1, 3, 3]
    assert val.samples[0] == (f"{tmp_path}/val/bee/2.jpg", 1)
    assert repr(val) == f"ImageFolder('{tmp_path}/val': 3 images in 4 classes)"


def test_image_folder_labels_are_indices_into_classes(tmp_path: Path) -> None:
    write_files(tmp_path, "ant/1.jpg", "bee/2.jpg", "cat/3.jpg")
    names = np.array(["cat", "ant", *(f"other {n}" for n in range(300)), "bee"])  # bee is class 302
    dataset = ImageFolder(tmp_path, classes=names)
    assert relative_paths(dataset) == ["ant/1.jpg", "bee/2.jpg", "cat/3.jpg"]
    assert (dataset.labels.tolist(), dataset.labels.dtype) == ([1, 302, 0], np.uint16)
    assert type(dataset.classes[0]) is str


def test_image_folder_refuses_a_folder_that_is_not_in_classes(tmp_path: Path) -> None:
    write_files(tmp_path, "ant/1.jpg", "bee/2.jpg", "eel/1.jpg")
    text = (
        f"the folder '{tmp_path}' has the class 'eel', which is not among the 5 names in classes= ('ant', 'bee', "
        "'cat' and 2 more); append it to that list, so that the other labels stay the same, or remove it"
    )
    with pytest.raises(ValueError, match=exactly(text)):
        ImageFolder(tmp_path, classes=["ant", "bee", "cat", "dog", "emu"])
    write_files(tmp_path / "bare", "ant/notes.txt")
    with pytest.raises(FileNotFoundError, match=r"^.*/bare' has no images in it: searched at any depth"):
        ImageFolder(tmp_path / "bare", classes=["ant", "bee"])


@pytest.mark.usefixtures("index_cache")
def test_image_folder_cached_scan_serves_any_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = set_folder_times(write_files(tmp_path / "root", "ant/1.jpg", "bee/notes.txt", "cat/1.jpg"))
    assert ImageFolder(root, classes=["cat", "bee", "ant"]).labels.tolist() == [2, 0]
    monkeypatch.setattr(Scanner, "find_images", None)
    assert ImageFolder(root, classes=["ant", "bee", "cat"]).labels.tolist() == [0, 2]
    with pytest.raises(FileNotFoundError, match=r"^a class has no images in .*: 'bee'"):
        ImageFolder(root)


def test_image_files_without_images_are_refused(tmp_path: Path) -> None:
    text = f"'{tmp_path}' has no images in it: searched at any depth for names that end in .png"
    with pytest.raises(FileNotFoundError, match=exactly(text)):
        ImageFiles(write_files(tmp_path, "a.jpg"), extensions=".png")


class TestLinks:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        write_files(tmp_path, "outside/1.jpg", "root/a/1.jpg", "root/a/sub/2.jpg", "root-2/3.jpg")
        return tmp_path / "root"

    @pytest.mark.parametrize("kind", [ImageFolder, ImageFiles])
    @pytest.mark.parametrize(
        ("link", "target"),
        [
            ("a/link.jpg", "../../outside/1.jpg"),
            ("a/link.jpg", "../../root-2/3.jpg"),  # begins as the root does
            ("a/link.jpg", "../../outside/missing.jpg"),
            ("a/link", "../../outside"),
            ("b", "../outside"),
            ("b", ".."),
        ],
    )
    def test_links_out_of_the_root_are_refused(self, root: Path, kind: Callable, link: str, target: str) -> None:
        (root / link).symlink_to(target)
        text = (
            f"'{root}/{link}' is a link that points outside '{root}', to "
            f"'{os.path.realpath(root / link)}'. To follow such links, pass follow_links=True"
        )
        with pytest.raises(ValueError, match=exactly(text)):
            kind(root)

    @pytest.mark.parametrize("root_name", ["root", "alias"])
    def test_links_inside_the_root_are_followed(self, root: Path, root_name: str) -> None:
        (root.parent / "alias").symlink_to("root")
        (root / "a/0.jpg").symlink_to("missing.jpg")
        (root / "a/link.jpg").symlink_to(root / "a/1.jpg")
        (root / "b").symlink_to(root / "a" / "sub")
        (root / "a/notes.txt").symlink_to("../../outside/1.jpg")  # is not an image
        dataset = ImageFolder(root.parent / root_name)
        assert relative_paths(dataset) == ["a/0.jpg", "a/1.jpg", "a/link.jpg", "a/sub/2.jpg", "b/2.jpg"]
        assert dataset.classes == ["a", "b"]
        with pytest.raises(FileNotFoundError, match=re.escape(f"No such file or directory: '{dataset.paths[0]}'")):
            dataset[0]
        assert dataset[1][0].data == b"root/a/1.jpg"

    def test_links_out_of_the_root_are_followed_with_follow_links(self, root: Path) -> None:
        (root / "a/link.jpg").symlink_to(root.parent / "outside/1.jpg")
        (root / "b").symlink_to("../outside")
        dataset = ImageFolder(root, follow_links=True)
        assert relative_paths(dataset) == ["a/1.jpg", "a/link.jpg", "a/sub/2.jpg", "b/1.jpg"]
        assert [dataset[i][0].data for i in (1, 3)] == [b"outside/1.jpg"] * 2

    @pytest.mark.parametrize("kind", [ImageFolder, ImageFiles])
    @pytest.mark.parametrize("follow_links", [False, True])
    @pytest.mark.parametrize(
        ("link", "target"),
        [
            ("a/sub/up", ".."),
            ("a/sub/up", "../.."),
            ("a/here", "."),
            ("a/self.jpg", "self.jpg"),
            ("self", "self"),
            ("me", "."),
        ],
    )
    def test_circular_links_are_refused(
        self, root: Path, kind: Callable, follow_links: bool, link: str, target: str
    ) -> None:
        (root / link).symlink_to(target)
        text = f"'{root}/{link}' is a circular link (to '{target}'); remove it"
        with pytest.raises(ValueError, match=exactly(text)):
            kind(root, follow_links=follow_links)

    def test_circular_links_through_two_folders_or_from_outside_are_refused(self, root: Path) -> None:
        (root / "a/to-b").symlink_to("../b")
        (root / "b").mkdir()
        (root / "b/to-a").symlink_to("../a")
        with pytest.raises(ValueError, match="is a circular link"):
            ImageFolder(root)
        (root / "b/to-a").unlink()
        (root / "b/1.jpg").touch()
        assert relative_paths(ImageFolder(root)) == ["a/1.jpg", "a/sub/2.jpg", "a/to-b/1.jpg", "b/1.jpg"]
        (root / "a/out").symlink_to(root.parent)
        with pytest.raises(ValueError, match="is a circular link"):
            ImageFolder(root, follow_links=True)


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory: pytest.TempPathFactory) -> ImageFolder:
    """20 classes of 100 files with names as long as ImageNet's."""
    root = tmp_path_factory.mktemp("many")
    write_files(root, *(f"n{1440764 + c:08d}/n{1440764 + c:08d}_{7 * i}.JPEG" for c in range(20) for i in range(100)))
    return ImageFolder(root)


@pytest.mark.parametrize(("classes", "dtype"), [(256, np.uint8), (257, np.uint16)])
def test_image_folder_labels_have_the_smallest_unsigned_dtype(tmp_path: Path, classes: int, dtype: type) -> None:
    dataset = ImageFolder(write_files(tmp_path, *(f"{name:03d}/1.jpg" for name in range(classes))))
    assert dataset.labels.dtype == dtype
    assert dataset.labels.tolist() == list(range(classes))


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
def test_image_folder_takes_under_40_bytes_and_pickles_out_of_band(large_folder: ImageFolder, dumps: Callable) -> None:
    assert (len(large_folder), large_folder.labels.dtype) == (2000, np.uint8)
    assert (large_folder.paths.nbytes + large_folder.labels.nbytes) / 2000 < 40
    buffers: list[pickle.PickleBuffer] = []
    stream = dumps(large_folder, protocol=5, buffer_callback=buffers.append)
    assert len(stream) < 1500  # the names of the classes, once
    assert sum(buffer.raw().nbytes for buffer in buffers) == large_folder.paths.nbytes + large_folder.labels.nbytes
    unpickled = pickle.loads(stream, buffers=[bytearray(buffer.raw()) for buffer in buffers])
    assert unpickled == large_folder
    assert unpickled.class_to_idx == large_folder.class_to_idx
    assert unpickled[1999] == large_folder[1999]


def test_folders_are_equal_only_if_kind_files_and_mode_are_equal(tmp_path: Path) -> None:
    class Birds(ImageFolder):
        pass

    write_files(tmp_path, "a/1.jpg", "a/2.jpg", "b/1.jpg")
    assert ImageFolder(tmp_path) == Birds(tmp_path) == ImageFolder(tmp_path)
    assert ImageFiles(tmp_path) == ImageFiles(tmp_path)
    assert ImageFiles(tmp_path) != ImageFolder(tmp_path)
    assert ImageFolder(tmp_path) != ImageFolder(tmp_path, mode="L")
    dataset = ImageFiles(tmp_path)
    write_files(tmp_path, "a/3.jpg")
    assert dataset != ImageFiles(tmp_path)


@pytest.mark.processes
def test_image_folder_is_read_without_torch_pillow_and_torchvision(large_folder: ImageFolder) -> None:
    code = (
        "import sys; from gpuload.datasets.folder import ImageFolder; import gpuload.order.permutation\n"
        "ImageFolder(sys.argv[1])[0]\n"
        "print([name for name in ('torch', 'PIL', 'torchvision') if name in sys.modules])"
    )
    assert run_python(code, large_folder.root, env={"PYTHONPATH": os.pathsep.join(sys.path)})[0] == "[]\n"


@pytest.fixture
def cached_folder(tmp_path: Path, index_cache: Path) -> Path:
    """A folder of images whose scan is cached, since it did not change recently."""
    return set_folder_times(write_files(tmp_path / "root", "ant/1.jpg", "ant/deep/2.jpg", b"\xe9t\xe9/1.jpg"))


def set_folder_times(root: Path, when: float = 1e9) -> Path:
    for folder, _, _ in os.walk(root):
        os.utime(folder, (when, when))
    return root


@pytest.mark.parametrize("kind", [ImageFolder, ImageFiles])
def test_folder_scan_is_cached_until_a_change(kind, cached_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = kind(cached_folder)
    with monkeypatch.context() as patch:
        patch.setattr(Scanner, "find_images", lambda *_: pytest.fail("an unchanged folder was scanned again"))
        assert kind(cached_folder) == dataset
        assert kind(cached_folder)[-1] == dataset[-1]
    (cached_folder / "ant" / "deep" / "3.jpg").touch()
    assert len(kind(cached_folder)) == len(dataset) + 1
    (cached_folder / "ant" / "deep" / "2.jpg").rename(cached_folder / "ant" / "deep" / "4.jpg")
    set_folder_times(cached_folder / "ant" / "deep", 1e9 + 1)
    assert [os.path.basename(path) for path in kind(cached_folder).paths].count("4.jpg") == 1


def test_folder_scan_is_repeated_for_different_extensions_or_kinds(cached_folder: Path) -> None:
    (cached_folder / "ant" / "3.png").touch()
    set_folder_times(cached_folder)
    for endings, count in ((".jpg", 3), ((".jpg", ".png"), 4), (".jpg", 3)):
        assert len(ImageFolder(cached_folder, extensions=endings)) == count
    assert len(ImageFiles(cached_folder)) == 4


def test_folder_scan_of_a_recently_changed_folder_is_not_cached(cached_folder: Path, index_cache: Path) -> None:
    (cached_folder / "ant" / "3.jpg").touch()
    assert len(ImageFolder(cached_folder)) == 4
    assert not index_cache.exists(), "a file that is written within the same tick of the clock would be missed"


def test_will_need_advises_the_kernel_of_existing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, advised = ImageFiles(write_files(tmp_path, "a.jpg", "b.jpg", "c.jpg")), []
    (tmp_path / "b.jpg").unlink()
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, *how: advised.append((os.readlink(f"/proc/self/fd/{fd}"), *how))
    )
    dataset.will_need([2, 1, -3])  # c.jpg, the missing b.jpg, and a.jpg
    expected = [(f"{tmp_path}/{name}", 0, 0, os.POSIX_FADV_WILLNEED) for name in ("c.jpg", "a.jpg")]
    assert advised == expected
    Joined([["not on a disk"], dataset]).will_need([0, 3, 1])
    assert advised == expected * 2
    assert open_below(tmp_path) == 0
