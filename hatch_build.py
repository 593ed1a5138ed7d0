"""The package's page and the project's addresses, from one setting.

README.md has relative links, which work in a clone and wherever the repository is shown. On the package's page they
would lead nowhere. So they are written out in full there, and the metadata get the project's addresses: all by
`repository` in pyproject.toml (``[tool.hatch.metadata.hooks.custom]``). While that is empty, a link is its words alone,
pictures are left out, and there are no addresses. hatchling imports this when it builds or installs gpuload.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

__all__ = ["PageHook", "addresses", "package_page"]

# Code, which stays as it is, or a picture or link.
PART = re.compile(r"```.*?```|`[^`\n]*`|(?P<picture>!?)\[(?P<words>[^\]]*)\]\((?P<target>[^)\s]+)\)", re.DOTALL)


class PageHook(MetadataHookInterface):
    """Fills the fields `readme` and `urls`; ValueError if `repository` is no address."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository = self.config["repository"].rstrip("/")
        if repository and not re.fullmatch(r"https://[\w.-]+(/[\w.-]+)+", repository):
            raise ValueError(
                "repository in pyproject.toml must be empty or an address as https://host/owner/gpuload, "
                f"got {repository!r}"
            )
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = package_page(readme, repository, f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = addresses(repository)


def package_page(readme: str, repository: str, tag: str) -> str:
    """`readme` with links that work anywhere: to the files of `tag` at `repository`, or none if that is empty.

    >>> package_page("see [docs](docs/a.md#b)", "https://example.org/us/gpuload", "v1.0")
    'see [docs](https://example.org/us/gpuload/blob/v1.0/docs/a.md#b)'
    """

    def in_full(part: re.Match[str]) -> str:
        target = part["target"]
        if target is None or "://" in target or target.startswith("#"):
            return part[0]
        if not repository:
            return "" if part["picture"] else part["words"]
        kind = "raw" if part["picture"] else "blob"
        return f"{part['picture']}[{part['words']}]({repository}/{kind}/{tag}/{target})"

    return PART.sub(in_full, readme)


def addresses(repository: str) -> dict[str, str]:
    """What the package's page lists beside the text; nothing without a repository."""
    if not repository:
        return {}
    return {
        "Repository": repository,
        "Documentation": f"{repository}/tree/main/docs",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
