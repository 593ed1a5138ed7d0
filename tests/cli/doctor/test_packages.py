"""Decoders and optional packages: absent, broken, for another CUDA, twice."""

from __future__ import annotations

import pytest

from gpuload.cli.doctor import packages
from gpuload.cli.doctor.finding import summary

OK = {"ok": True, "said": ""}
BAD = {"ok": False, "said": "ImportError: libnvjpeg.so.12"}


@pytest.mark.parametrize(
    ("cuda", "others", "extra"),
    [
        ("12.6", [], "cu12"),
        ("13.0", [], "cu13"),
        ("13.0", ["cu12"], "cu13"),
        (None, [], "cu13"),
        (None, ["cu12"], "cu12"),
    ],
)
def test_the_extra_is_that_of_torchs_cuda(cuda: str | None, others: list[str], extra: str) -> None:
    assert packages.cuda_extra(cuda, others) == extra


def test_no_nvimagecodec_is_named() -> None:
    found = packages.nvimagecodec(installed={}, tried=None, torch_cuda="13.0")
    assert (found.state, found.mend) == ("improve", "pip install 'gpuload[cu13]'")
    assert "What holds it back most is nvImageCodec: not installed" in summary([found])
    assert packages.simplejpeg(version="1.9.0", tried=OK, first=True).found == "1.9.0: decodes all JPEGs here"


def test_one_that_works() -> None:
    found = packages.nvimagecodec(installed={"cu12": "0.9.0"}, tried=OK, torch_cuda="12.6")
    assert (found.state, found.mend) == ("works", "")
    assert packages.nvimagecodec(installed={"cu12": "0.9.0"}, tried=OK, torch_cuda=None).state == "works"


def test_one_for_another_cuda() -> None:
    found = packages.nvimagecodec(installed={"cu12": "0.9.0"}, tried=OK, torch_cuda="13.0")
    assert found.state == "improve"
    assert "0.9.0 for CUDA 12, but torch is built for CUDA 13.0" in found.found
    assert found.mend == "pip uninstall -y nvidia-nvimgcodec-cu12 && pip install 'gpuload[cu13]'"


def test_both_at_once_and_one_that_does_not_decode() -> None:
    both = packages.nvimagecodec(installed={"cu12": "0.9.0", "cu13": "0.9.1"}, tried=OK, torch_cuda="12.6")
    assert (both.state, both.found) == (
        "broken", "0.9.0 for CUDA 12 and 0.9.1 for CUDA 13 are both installed, and overwrite each other's files"
    )  # fmt: skip
    assert both.mend == (
        "pip uninstall -y nvidia-nvimgcodec-cu12 nvidia-nvimgcodec-cu13 && pip install 'gpuload[cu12]'"
    )
    broken = packages.nvimagecodec(installed={"cu12": "0.9.0"}, tried=BAD, torch_cuda="12.6")
    assert broken.state == "broken"
    assert "libnvjpeg.so.12. Whole images are decoded in its place" in broken.found


def test_the_decoders_that_are_always_there() -> None:
    assert packages.simplejpeg(version="1.9.0", tried=OK, first=False).state == "works"
    assert packages.simplejpeg(version="1.9.0", tried=BAD, first=True).state == "broken"
    assert packages.simplejpeg(version=None, tried=None, first=True).mend == "pip install --force-reinstall simplejpeg"
    assert packages.pillow(version="13.0", tried=OK).state == "works"
    assert packages.pillow(version="13.0", tried=BAD).found == "13.0: ImportError: libnvjpeg.so.12"


def test_dali() -> None:
    assert packages.dali(installed={}, tried=None, torch_cuda="13.0").found.endswith("pip install 'gpuload[dali-cu13]'")
    assert packages.dali(installed={}, tried=None, torch_cuda="12.6").found.endswith("pip install 'gpuload[dali-cu12]'")
    assert packages.dali(installed={"cu12": "2.4"}, tried=OK, torch_cuda="12.6").state == "works"
    other = packages.dali(installed={"cu12": "2.4"}, tried=OK, torch_cuda="13.0")
    assert (other.state, other.mend) == (
        "improve", "pip uninstall -y nvidia-dali-cuda120 && pip install 'gpuload[dali-cu13]'"
    )  # fmt: skip
    assert packages.dali(installed={"cu12": "2.4"}, tried=BAD, torch_cuda=None).state == "broken"
    assert packages.dali(installed={"cu12": "2", "cu13": "2"}, tried=OK, torch_cuda=None).state == "broken"


def test_dali_and_nvimagecodec_for_different_cudas() -> None:
    mixed = packages.dali(installed={"cu12": "2.4"}, tried=OK, torch_cuda=None, others=["cu13"])
    assert (mixed.state, mixed.found, mixed.mend) == (
        "improve",
        "2.4 for CUDA 12, but nvImageCodec is for CUDA 13; both need the same CUDA",
        "pip uninstall -y nvidia-dali-cuda120 && pip install 'gpuload[dali-cu13]'",
    )
    assert packages.dali(installed={"cu12": "2.4"}, tried=OK, torch_cuda=None, others=["cu12"]).state == "works"
    assert packages.dali(installed={}, tried=None, torch_cuda=None, others=["cu12"]).found.endswith("[dali-cu12]'")


def test_what_is_optional_never_breaks() -> None:
    names = {"name": "kornia", "use": "for the backend 'kornia'", "install": "pip install kornia"}
    assert packages.optional(version=None, tried=None, **names).found == (
        "not installed; for the backend 'kornia': pip install kornia"
    )
    broken = packages.optional(version="0.9", tried=BAD, **names)
    assert (broken.state, broken.mend) == ("not needed", "pip install kornia")
    assert broken.found.startswith("0.9 is installed, but cannot be used: ImportError")
    assert packages.optional(version="0.9", tried=OK, **names).state == "works"
    assert packages.jpegtran(path=None).state == "not needed"
    assert packages.jpegtran(path="/usr/bin/jpegtran").state == "works"
    assert packages.extras({"lmdb": True, "ray": False}).found == (
        "installed: lmdb; not installed: ray, each by pip install 'gpuload[NAME]'"
    )
    assert packages.extras({"lmdb": False}).found.startswith("installed: none; ")
