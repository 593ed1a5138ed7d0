"""Decoders, and packages that are optional: which are there, for which CUDA, whether they work. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpuload.cli.doctor.finding import Finding

__all__ = [
    "EXTRAS",
    "cuda_extra",
    "dali",
    "extras",
    "jpegtran",
    "nvimagecodec",
    "optional",
    "pillow",
    "regions",
    "simplejpeg",
]

CROPS: Final = "decodes a crop without the rest of the image"
EXTRAS: Final = {  # the modules that come with an extra
    "demo": ("skimage",),
    "hdf5": ("h5py",),
    "lmdb": ("lmdb",),
    "metrics": ("prometheus_client",),
    "parquet": ("pyarrow",),
    "ray": ("ray",),
    "remote": ("fsspec", "aiohttp"),
    "s3": ("s3fs",),
    "gs": ("gcsfs",),
    "hf": ("huggingface_hub",),
}


def cuda_extra(torch_cuda: str | None, others: Sequence[str] = ()) -> str:
    """The extra with NVIDIA's packages for this torch: ``"cu12"`` or ``"cu13"``. Without CUDA either works: it is that
    of `others` of NVIDIA's packages, which must be for the same one, else the newest."""
    if torch_cuda is not None:
        return "cu13" if torch_cuda.startswith("13") else "cu12"
    return others[0] if others else "cu13"


def nvimagecodec(
    *, installed: Mapping[str, str], tried: dict[str, Any] | None, torch_cuda: str | None, others: Sequence[str] = ()
) -> Finding:
    """nvImageCodec.

    Args:
        installed: versions by extra, ``{"cu12": "0.9.0"}``.
        tried: what came of decoding a crop; None: not tried.
        torch_cuda: the CUDA that torch was built for; None: the CPU.
        others: the extras that others of NVIDIA's packages are of.
    """
    name, extra = "nvImageCodec", cuda_extra(torch_cuda, others)
    install = f"pip install 'gpuload[{extra}]'"
    if not installed:
        return Finding(
            name,
            "improve",
            f"not installed. It {CROPS}; without it whole images are decoded, at about half the rate",
            install,
        )
    packages = [f"nvidia-nvimgcodec-{one}" for one in installed]
    found = " and ".join(f"{version} for CUDA {one[2:]}" for one, version in installed.items())
    again = f"pip uninstall -y {' '.join(packages)} && {install}"
    if len(installed) > 1:
        return Finding(name, "broken", f"{found} are both installed, and overwrite each other's files", again)
    if tried is not None and not tried["ok"]:
        return Finding(name, "broken", f"{found}: {tried['said']}. Whole images are decoded in its place", again)
    if torch_cuda is not None and extra not in installed:
        return Finding(
            name,
            "improve",
            f"{found}, but torch is built for CUDA {torch_cuda}. It {CROPS} on the CPU; decoding on the GPU, and "
            "others of NVIDIA's packages, need the same CUDA",
            again,
        )
    return Finding(name, "works", f"{found}: {CROPS}")


def regions(*, tried: dict[str, Any]) -> Finding:
    """Whether nvImageCodec decodes regions rightly on the device, for ``Decode(where="device")``; `tried` is what
    `gpuload.cli.doctor.regions.try_regions` found, or how its process ended."""
    whole = "Decode(where='device') decodes whole images"
    if not tried["ok"]:
        return Finding("regions", "not needed", f"{tried['said']}. On a GPU {whole}")
    faults, used = tried["faults"], tried["used"]
    found = f"{tried['version']} on {tried['device']}: " + "; ".join(
        f"{name}: {fault or 'its bits are those of whole images'}" for name, fault in faults.items()
    )
    if any(faults[name] for name in used):
        return Finding(
            "regions", "broken", found, "Decode(where='cpu'), and an issue at gpuload's with this version and GPU"
        )
    if len(used) < len(faults):
        found += f". {whole}, since this version is not among those that are known to be right"
    return Finding("regions", "works", found)


def simplejpeg(*, version: str | None, tried: dict[str, Any] | None, first: bool) -> Finding:
    """simplejpeg, the decoder of whole JPEGs; `first`: nvImageCodec does not work, so it decodes everything."""
    install = "pip install --force-reinstall simplejpeg"
    role = "decodes all JPEGs here" if first else "decodes whole images, and what nvImageCodec refuses"
    if version is None:
        return Finding("simplejpeg", "broken", "not installed, although gpuload depends on it", install)
    if tried is not None and not tried["ok"]:
        return Finding("simplejpeg", "broken", f"{version}: {tried['said']}. Pillow does its work, slower", install)
    return Finding("simplejpeg", "works", f"{version}: {role}")


def pillow(*, version: str | None, tried: dict[str, Any] | None) -> Finding:
    """Pillow, the decoder of all other formats."""
    install = "pip install --force-reinstall pillow"
    if version is None or (tried is not None and not tried["ok"]):
        why = "not installed" if version is None or tried is None else f"{version}: {tried['said']}"
        return Finding("Pillow", "broken", why, install)
    return Finding("Pillow", "works", f"{version}: decodes PNG, WebP, TIFF and others, and damaged JPEGs")


def dali(
    *, installed: Mapping[str, str], tried: dict[str, Any] | None, torch_cuda: str | None, others: Sequence[str] = ()
) -> Finding:
    """NVIDIA's DALI, an optional backend; arguments as for `nvimagecodec`, which is one of `others`."""
    name = "DALI"
    extra = f"dali-{cuda_extra(torch_cuda, others)}"
    if not installed:
        return Finding(
            name, "not needed", f"not installed; the backend 'dali' is optional: pip install 'gpuload[{extra}]'"
        )
    found = " and ".join(f"{version} for CUDA {one[2:]}" for one, version in installed.items())
    packages = " ".join(f"nvidia-dali-cuda{one[2:]}0" for one in installed)
    again = f"pip uninstall -y {packages} && pip install 'gpuload[{extra}]'"
    if len(installed) > 1:
        return Finding(name, "broken", f"{found} are both installed, and overwrite each other's files", again)
    if tried is not None and not tried["ok"]:
        return Finding(name, "broken", f"{found}: {tried['said']}", again)
    if torch_cuda is not None and cuda_extra(torch_cuda) not in installed:
        return Finding(name, "improve", f"{found}, but torch is built for CUDA {torch_cuda}", again)
    if others and not installed.keys() & set(others):
        versions = " and ".join(f"CUDA {one[2:]}" for one in others)
        return Finding(name, "improve", f"{found}, but nvImageCodec is for {versions}; both need the same CUDA", again)
    return Finding(name, "works", f"{found}: the backend 'dali' can be used")


def optional(name: str, *, version: str | None, tried: dict[str, Any] | None, use: str, install: str) -> Finding:
    """A package that one part of gpuload uses: `use` says which."""
    if version is None:
        return Finding(name, "not needed", f"not installed; {use}: {install}")
    if tried is not None and not tried["ok"]:
        return Finding(
            name, "not needed", f"{version} is installed, but cannot be used: {tried['said']}; {use}", install
        )
    return Finding(name, "works", f"{version}; {use}")


def jpegtran(*, path: str | None) -> Finding:
    """The program that writes progressive JPEGs as sequential ones."""
    use = "for gpuload pack --cuttable, of progressive JPEGs"
    if path is None:
        return Finding("jpegtran", "not needed", f"not installed; {use}: apt-get install libjpeg-turbo-progs")
    return Finding("jpegtran", "works", f"{path}, {use}")


def extras(installed: Mapping[str, bool]) -> Finding:
    """Extras for kinds of data, by whether all of their packages are there."""
    there = [name for name, found in installed.items() if found]
    absent = [name for name, found in installed.items() if not found]
    found = f"installed: {', '.join(there) or 'none'}"
    if absent:
        found += f"; not installed: {', '.join(absent)}, each by pip install 'gpuload[NAME]'"
    return Finding("extras", "works" if there else "not needed", found)
