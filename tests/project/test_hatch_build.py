"""hatch_build.py: the package's page, with and without the address of a repository."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from helpers import lacking

lacking.require("hatchling")
ROOT = Path(__file__).parents[2]
ADDRESS = "https://example.org/us/gpuload"
README = (
    "![rates](docs/a.svg)\n[page](docs/a.md#b), [out](https://pypi.org), [below](#c), `x[0](y)`\n```\nf[1](z)\n```\n"
)


@pytest.fixture(scope="module")
def hatch_build():
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_package_page_links_to_the_release_in_the_repository(hatch_build):
    assert hatch_build.package_page(README, ADDRESS, "v1.2") == README.replace(
        "(docs/a.svg)", f"({ADDRESS}/raw/v1.2/docs/a.svg)"
    ).replace("(docs/a.md#b)", f"({ADDRESS}/blob/v1.2/docs/a.md#b)")


def test_package_page_without_a_repository_has_no_links(hatch_build):
    page = hatch_build.package_page(README, "", "v1.2")
    assert page == README.replace("![rates](docs/a.svg)", "").replace("[page](docs/a.md#b)", "page")
    assert hatch_build.addresses("") == {}


def run_hook(hatch_build, tmp_path, repository):
    (tmp_path / "README.md").write_text("[a](b.md)")
    metadata = {"version": "1.2"}
    hatch_build.PageHook(str(tmp_path), {"repository": repository}).update(metadata)
    return metadata


def test_page_hook_sets_readme_and_urls(hatch_build, tmp_path):
    metadata = run_hook(hatch_build, tmp_path, f"{ADDRESS}/")
    assert metadata["readme"] == {"content-type": "text/markdown", "text": f"[a]({ADDRESS}/blob/v1.2/b.md)"}
    assert metadata["urls"]["Issues"] == f"{ADDRESS}/issues"


@pytest.mark.parametrize("repository", ["example.org/us/gpuload", "http://example.org/us", "https://example.org"])
def test_page_hook_with_a_wrong_address_raises_value_error(hatch_build, tmp_path, repository):
    with pytest.raises(ValueError, match=r"must be empty or an address as https://host/owner/gpuload, got '"):
        run_hook(hatch_build, tmp_path, repository)
