"""The pages that are made from the code at each build: the reference, the gallery, and the repository's own pages.

The reference has every public name, grouped by where it lives: a new name comes to its page by itself.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import gallery

import gpuload
from gpuload import transforms

__all__ = ["OUTSIDE", "groups", "write"]

ROOT = Path(__file__).parents[1]

# What lies outside docs/, and the page that it becomes.
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

# Page and title, and the modules whose names stand there; the first that fits.
PAGES = (
    ("observing", "Statistics and exporters", ("gpuload.loader.stats", "gpuload.exporters")),
    ("samples", "What a dataset returns", ("gpuload.datasets.sample", "gpuload.datasets.worker", "gpuload.rng")),
    ("datasets", "Datasets", ("gpuload.datasets",)),
    ("packing", "Packing", ("gpuload.packing",)),
    ("errors", "Errors", ("gpuload.errors",)),
    ("loader", "The loader", ("gpuload",)),
)
FIRST = ("Loader", "Augment", "ImageFolder", "ImageFiles", "Encoded", "read", "GpuloadError")  # on their pages

# What public names of a page return, and its module.
RETURNED = {
    "observing": ("gpuload.loader.stats", ("Part", "WorkerStats")),
    "loader": ("gpuload.loader.headspace", ("Headspace", "HeadspaceRates")),
}

# The transforms' families, and the modules whose names stand there.
FAMILIES = (
    ("Crops, sizes, flips", "geometry resizing"),
    ("Warps", "warps"),
    ("Colour, blur, noise", "colour blur_noise"),
    ("Policies", "policies timm_policies"),
    ("To numbers, frames of clips", "convert"),
    ("Erasing and mixing", "erasing mixing gathering"),
    ("Boxes and keypoints", "targets"),
    ("Choosing and combining", "composite chain"),
    ("From other libraries", "interop"),
    ("Your own, and trying", "custom base program.draws apply"),
)


def groups() -> dict[str, tuple[str, list[str]]]:
    """The names of gpuload on each page of the reference: its title, and the names."""
    made: dict[str, tuple[str, list[str]]] = {page: (title, []) for page, title, _ in PAGES}
    for name in gpuload.__all__:
        if name in ("transforms", "__version__"):
            continue
        home = gpuload._HOMES[name]
        page = next(page for page, _, modules in PAGES if home.startswith(modules))
        made[page][1].append(name)
    for _, names in made.values():
        names.sort(key=lambda name: (name not in FIRST, FIRST.index(name) if name in FIRST else 0, name.lower()))
    return made


def families() -> dict[str, list[str]]:
    """The names of gpuload.transforms in each family."""
    made: dict[str, list[str]] = {title: [] for title, _ in FAMILIES}
    for name in sorted(transforms.__all__, key=str.lower):
        home = transforms._HOMES.get(name, name)
        made[next(title for title, modules in FAMILIES if home in modules.split())].append(name)
    return made


def write(folder: Path) -> None:
    """Write all of them; a file that has not changed is left alone, so that it is not built again."""
    for page, (title, names) in groups().items():
        module, returned = RETURNED.get(page, ("", ()))
        made = [f"# {title}", *map(_entry("gpuload"), names), *map(_entry(module), returned)]
        _put(folder / "reference" / f"{page}.md", "\n\n".join(made) + "\n")
    _put(folder / "reference" / "transforms.md", "\n\n".join(_transforms()) + "\n")
    _put(folder / "reference" / "gallery.md", "\n\n".join(gallery.page(families())) + "\n")
    gallery.write(folder / "reference")
    for name, page in OUTSIDE.items():
        if page.startswith("project/") and (ROOT / name).exists():
            _put(folder / page, _moved((ROOT / name).read_text(encoding="utf-8"), (ROOT / name).parent))


def _transforms() -> Iterator[str]:
    common = "What they have in common, and a table of all: [Transforms](../transforms.md)."
    yield f"# Transforms\n\n`from gpuload import transforms as T`. {common}"
    for title, names in families().items():
        yield f"## {title}"
        yield from map(_entry("gpuload.transforms"), names)


def _entry(module: str) -> Callable[[str], str]:
    def entry(name: str) -> str:
        value = getattr(importlib.import_module(module), name)
        if isinstance(value, ModuleType):
            return f"```{{eval-rst}}\n.. automodule:: {value.__name__}\n   :members:\n   :imported-members:\n```"
        kind = "autoclass" if isinstance(value, type) else "autofunction"
        members = (
            "\n   :members:\n   :exclude-members: __new__, extra_repr"
            if kind == "autoclass" and module != "gpuload.transforms"
            else ""
        )
        return f"```{{eval-rst}}\n.. currentmodule:: {module}\n\n.. {kind}:: {name}{members}\n```"

    return entry


def _moved(text: str, home: Path) -> str:
    """A page that lies outside docs/: its links lead to the site's pages, or to files that can be downloaded."""

    def link(found: re.Match[str]) -> str:
        words, path, anchor = found.groups()
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
