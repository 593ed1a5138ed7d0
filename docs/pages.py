"""The pages generated at each build: the reference, the gallery, and copies of the repository's own pages.

The reference has every public name, grouped by its module, so a new name is added to its page automatically.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import gallery

from gpuload.public_names import modules_of_names

__all__ = ["OUTSIDE", "groups", "write"]

ROOT = Path(__file__).parents[1]

# Files outside docs/, and the pages generated from them.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "RELEASING.md": "project/releasing.md",
    "SECURITY.md": "project/security.md",
    "benchmarks/README.md": "project/benchmarks.md",
    "examples/README.md": "project/examples.md",
    "notebooks/README.md": "project/notebooks.md",
}

# Page, title, and the modules whose names are on that page; the first match counts.
PAGES = (
    ("observing", "Statistics and exporters", ("gpuload.loader.stats", "gpuload.exporters")),
    ("samples", "What a dataset returns", ("gpuload.datasets.sample", "gpuload.datasets.worker", "gpuload.rng")),
    ("datasets", "Datasets", ("gpuload.datasets",)),
    ("packing", "Packing", ("gpuload.packing",)),
    ("errors", "Errors", ("gpuload.errors",)),
    ("loader", "The loader", ("gpuload",)),
)
# At the top of their pages, in this order.
FIRST = ("Loader", "Augment", "ImageFolder", "ImageFiles", "Encoded", "read", "GpuloadError")

# Classes that the names on a page return, and their module.
RETURNED = {
    "observing": (
        "gpuload.loader.stats",
        ("Part", "WorkerStats", "CpuStats", "RingStats", "StageStats", "DecodeStats", "CacheStats", "FaultStats"),
    ),
    "loader": ("gpuload.loader.headspace", ("Headspace", "HeadspaceRates")),
}

# Families of transforms, and the modules that belong to them.
FAMILIES = (
    ("Crops, sizes, flips", "geometry resizing"),
    ("Warps", "warps"),
    ("Colour, blur, noise", "colour blur_noise lighting"),
    ("Policies", "policies timm_policies"),
    ("Conversions, and frames of clips", "convert"),
    ("Erasing and mixing", "erasing mixing combining"),
    ("Boxes and keypoints", "targets"),
    ("Composing transforms", "composite chain"),
    ("From other libraries", "interop interop_albumentations"),
    ("Arguments that change during training", "varying"),
    ("Custom transforms, and applying chains", "custom base program.draws gpuload.loader.loader"),
)


def groups() -> dict[str, tuple[str, list[str]]]:
    """Return the title and the public names for each page of the reference."""
    by_page: dict[str, tuple[str, list[str]]] = {page: (title, []) for page, title, _ in PAGES}
    for name, module in modules_of_names("gpuload").items():
        if name != "transforms":
            page = next(page for page, _, modules in PAGES if f"{module}.{name}".startswith(modules))
            by_page[page][1].append(name)
    for _, names in by_page.values():
        names.sort(key=lambda name: (name not in FIRST, FIRST.index(name) if name in FIRST else 0, name.lower()))
    return by_page


def families() -> dict[str, list[str]]:
    """Return the names in gpuload.transforms for each family."""
    by_family: dict[str, list[str]] = {title: [] for title, _ in FAMILIES}
    modules_of_transforms = modules_of_names("gpuload.transforms")
    for name in sorted(modules_of_transforms, key=str.lower):
        module = modules_of_transforms[name].removeprefix("gpuload.transforms.")
        by_family[next(title for title, modules in FAMILIES if module in modules.split())].append(name)
    return by_family


def write(folder: Path) -> None:
    """Write all generated pages. Unchanged files are not written, so that they are not built again."""
    for page, (title, names) in groups().items():
        module, returned = RETURNED.get(page, ("", ()))
        parts = [f"# {title}", *map(_entry("gpuload"), names), *map(_entry(module), returned)]
        _put(folder / "reference" / f"{page}.md", "\n\n".join(parts) + "\n")
    _put(folder / "reference" / "transforms.md", "\n\n".join(_transforms()) + "\n")
    _put(folder / "reference" / "gallery.md", "\n\n".join(gallery.page(families())) + "\n")
    gallery.write(folder / "reference")
    for name, page in OUTSIDE.items():
        if page.startswith("project/") and (ROOT / name).exists():
            _put(folder / page, _moved((ROOT / name).read_text(encoding="utf-8"), (ROOT / name).parent))


def _transforms() -> Iterator[str]:
    common = "[Transforms](../transforms.md) describes what they have in common, and has a table of all."
    yield f"# Transforms\n\n`from gpuload import transforms as T`. {common}"
    for title, names in families().items():
        yield f"## {title}"
        yield from map(_entry("gpuload.transforms"), names)


def _entry(module: str) -> Callable[[str], str]:
    def entry(name: str) -> str:
        value = getattr(importlib.import_module(module), name)
        if isinstance(value, ModuleType):
            return f"```{{eval-rst}}\n.. automodule:: {value.__name__}\n   :members:\n   :imported-members:\n```"
        kind = "autoclass" if isinstance(value, type) else "autofunction" if callable(value) else "autodata"
        members = (
            "\n   :members:\n   :exclude-members: __new__, extra_repr"
            if kind == "autoclass" and module != "gpuload.transforms"
            else ""
        )
        return f"```{{eval-rst}}\n.. currentmodule:: {module}\n\n.. {kind}:: {name}{members}\n```"

    return entry


def _moved(text: str, home: Path) -> str:
    """Adapt the links of a page from outside docs/: they lead to the site's pages, or to files to download."""

    def link(match: re.Match[str]) -> str:
        words, path, anchor = match.groups()
        target = (home / path).resolve()
        name = target.relative_to(ROOT).as_posix()
        if name in OUTSIDE and (ROOT / name).exists():
            return f"[{words}](../{OUTSIDE[name]}{anchor or ''})"
        if name.startswith("docs/"):
            return f"[{words}](../{name.removeprefix('docs/')}{anchor or ''})"
        return f"[{words}](../../{name})" if target.is_file() else words

    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!\w+:|#)([^)#]+)(#[^)]*)?\)", link, text)


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
