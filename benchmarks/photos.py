"""The folder of photographs that is read: real files under distinct names, in classes, in the page cache.

The files are copies, not links: a loader must not profit from reading the same inode again.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

__all__ = ["copy_photos", "warm"]

CLASSES = 10
SUFFIXES = (".jpg", ".jpeg")


def copy_photos(source: Path, cache: Path, count: int) -> Path:
    """Copy the JPEGs of `source` under distinct names to `count` files in classes; a finished folder is used again.

    Returns the folder, ``cache/photos-…/class_0/00000.jpg`` and so on.
    """
    files = sorted(path for path in source.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not files:
        raise SystemExit(f"no JPEGs (*.jpg, *.jpeg) in {source}")
    key = hashlib.sha256(repr([count, *((str(path), path.stat().st_size) for path in files)]).encode()).hexdigest()[:12]
    root = cache / f"photos-{key}"
    if (root / "complete").exists():
        return root / "train"
    shutil.rmtree(root, ignore_errors=True)
    for number in range(count):
        folder = root / "train" / f"class_{number % CLASSES}"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(files[number % len(files)], folder / f"{number:05d}.jpg")
    (root / "complete").touch()
    return root / "train"


def warm(root: Path) -> tuple[int, float]:
    """Read every file once, so that the page cache holds them all. Returns how many there are and their mean KB."""
    sizes = [len(path.read_bytes()) for path in root.rglob("*.jpg")]
    return len(sizes), sum(sizes) / len(sizes) / 1000
