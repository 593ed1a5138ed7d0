"""The folder of photographs that benchmarks read: real files with distinct names, in class folders, in the page cache.

The files are copies, not links: a loader must not benefit from reading the same inode again.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

import gpuload as gl
from gpuload.cli.pictures import PhotographsMissing, make_folder
from gpuload.decode.header import INDEX
from gpuload.packing.jpeg_cuttable import make_cuttable

CLASSES = 10
SUFFIXES = (".jpg", ".jpeg")
GENERATED_COUNT = 200  # photographs to generate
PACKED_SIDE = 256


def find_photos(cache: Path, photos: Path | None = None) -> tuple[Path, str]:
    """Return the folder of JPEGs to measure with, and a description of it. Use `photos` unless it is None; otherwise
    variations of scikit-image's photographs if scikit-image is installed; otherwise synthetic images. Generate missing
    folders."""
    if photos is not None:
        return photos, str(photos)
    try:
        return make_folder(cache / "varied-photographs", count=GENERATED_COUNT), "scikit-image's photographs, varied"
    except PhotographsMissing:
        photos = make_synthetic_photos(cache / "made-up-photographs", count=GENERATED_COUNT)
        return photos, "synthetic: smooth colours and noise"


def make_synthetic_photos(root: Path, *, count: int, height: int = 375, width: int = 500) -> Path:
    """Write `count` synthetic JPEGs about as large as photographs; a complete folder is reused."""
    if not (root / "complete").exists():
        root.mkdir(parents=True, exist_ok=True)
        for i in range(count):
            Image.fromarray(_synthesize(i, height, width)).save(root / f"{i:04d}.jpg", quality=90)
        (root / "complete").touch()
    return root


def _synthesize(i: int, height: int, width: int) -> np.ndarray:
    """Generate an image of smooth colours and noise that depends only on `i` and the size."""
    rng = np.random.default_rng([zlib.crc32(b"made up"), i])
    cells = rng.integers(0, 256, (2 + height // 40, 2 + width // 40, 3), np.uint8)
    smooth = Image.fromarray(cells).resize((width, height), Image.Resampling.BICUBIC)
    return np.clip(np.asarray(smooth) + rng.normal(0, 9, (height, width, 3)), 0, 255).astype(np.uint8)


def list_jpegs(folder: Path) -> list[Path]:
    """Return the JPEGs below a folder, sorted by name; SystemExit if there are none."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not files:
        raise SystemExit(f"no JPEGs (*.jpg, *.jpeg) in {folder}")
    return files


def copy_photos(source: Path, cache: Path, count: int) -> Path:
    """Copy the JPEGs of `source` to `count` files with distinct names in class folders; a complete folder is reused.

    Return the folder, ``cache/photos-…/class_0/00000.jpg`` and so on.
    """
    files = list_jpegs(source)
    key = hashlib.sha256(repr([count, *((str(path), path.stat().st_size) for path in files)]).encode()).hexdigest()[:12]
    root = cache / f"photos-{key}"
    if (root / "complete").exists():
        return root / "train"
    shutil.rmtree(root, ignore_errors=True)
    for i in range(count):
        folder = root / "train" / f"class_{i % CLASSES}"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(files[i % len(files)], folder / f"{i:05d}.jpg")
    (root / "complete").touch()
    return root / "train"


def cuttable_copy(root: Path) -> Path:
    """Copy the tree `root` to a sibling folder, with its JPEGs made cuttable; a complete folder is reused."""
    return _copy_changed(root, f"indexed-{INDEX[-1]}", make_cuttable)  # an index of another version is ignored


def tar_copy(root: Path) -> tuple[Path, list[str]]:
    """Write the JPEGs of the tree `root` to a tar archive next to it, sorted by name, and read the archive once; a
    complete archive is reused.

    Return the archive and the names of its members, ``class_0/00000.jpg`` and so on.
    """
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.jpg"))
    archive = root.parent / f"{root.name}.tar"
    if not archive.exists():
        unfinished = archive.with_suffix(".unfinished")
        with tarfile.open(unfinished, "w") as file:
            for name in names:
                file.add(root / name, name)
        unfinished.rename(archive)
    archive.read_bytes()  # into the page cache
    return archive, names


def light_copy(root: Path) -> Path:
    """Copy the tree `root` to a sibling folder, with its JPEGs re-encoded at quality 90 and 4:2:0 (which shrank
    photographs of 500×375 from 130 KB to 65 KB on average); a complete folder is reused."""
    return _copy_changed(root, "light", _reencode)


def packed_copy(root: Path, *, cuttable: bool) -> tuple[Path, float]:
    """Pack the tree `root` into tar shards in a sibling folder, resized to a short side of 256, and read the shards
    once; finished shards are reused. Return the folder and the mean size of an image in KB."""
    target = root.parent / f"{root.name}-packed{'-cuttable' * cuttable}"
    packed = gl.pack(gl.ImageFolder(root), target, to="tar", short_side=PACKED_SIDE, cuttable=cuttable)
    for shard in target.glob("*.tar"):
        shard.read_bytes()  # into the page cache
    return target, packed.nbytes / packed.samples / 1000


def _reencode(data: bytes) -> bytes:
    file = io.BytesIO()
    Image.open(io.BytesIO(data)).convert("RGB").save(file, "JPEG", quality=90, subsampling="4:2:0")
    return file.getvalue()


def _copy_changed(root: Path, name: str, change: Callable[[bytes], bytes]) -> Path:
    target = root.parent / f"{root.name}-{name}"
    if not (target / "complete").exists():
        shutil.rmtree(target, ignore_errors=True)
        changed_by_hash: dict[bytes, bytes] = {}  # the same photographs occur many times
        for path in sorted(root.rglob("*.jpg")):
            data = path.read_bytes()
            key = hashlib.sha256(data).digest()
            if key not in changed_by_hash:
                changed_by_hash[key] = change(data)
            copy = target / path.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(changed_by_hash[key])
        (target / "complete").touch()
    return target


def warm_page_cache(root: Path) -> tuple[int, float]:
    """Read every file once, so that the page cache holds all files. Return the number of files and their mean size in
    KB."""
    sizes = [len(path.read_bytes()) for path in root.rglob("*.jpg")]
    return len(sizes), sum(sizes) / len(sizes) / 1000
