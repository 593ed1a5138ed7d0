"""All public arguments accept NumPy scalars and 0-d tensors, and refuse wrong types with the same wording.

The arguments are those of all names in ``gpuload`` and ``gpuload.transforms``; their types are read from annotations.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import lacking
from helpers.generated_images import encode
from transforms.specs import SPECS

import gpuload as gl
from gpuload import transforms as T

IDENTITY = [T.Identity()]
IMAGES = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)


def make_loader(files: Any, **options: Any) -> Any:
    return gl.Loader(list(range(8)), **{"num_workers": 0, "device": "cpu", **options})


def make_augment(files: Any, **options: Any) -> Any:
    return gl.Augment([T.CenterCrop(4)], device="cpu", **options)


def pack(files: Any, **options: Any) -> Any:
    folder = files.root / f"packed-{len(list(files.root.iterdir()))}"
    return gl.pack(gl.ImageFiles(files.folder), folder, **{"to": "tar", "workers": 0, **options})


# For each public name, a function that calls it with its required arguments. It gets the test files and the argument
# under test.
CALLS: dict[str, Callable[..., Any]] = {
    "ArrayFile": lambda files, **options: gl.ArrayFile(files.raw, dtype="uint8", **{"shape": (2, 4, 4, 3), **options}),
    "Augment": make_augment,
    "Augment.forward": lambda files, **options: make_augment(files)(IMAGES, **options),
    "Augment.set_epoch": lambda files, **options: make_augment(files).set_epoch(**options),
    "Boxes": lambda files, **options: gl.Boxes([[0, 0, 1, 1]], **options),
    "Buckets": lambda files, **options: gl.Buckets(
        [[8, 8]], **{**({"max_pixels": 4096} if "shapes" not in options else {}), **options}
    ),
    "Cached": lambda files, **options: gl.Cached([0, 1], **{"bytes_limit": 1 << 20, **options}),
    "Coco": lambda files, **options: gl.Coco(files.folder, files.coco, **options),
    "Decode": lambda files, **options: gl.Decode(**({"where": "both"} if "device_share" in options else {}), **options),
    "Encoded": lambda files, **options: gl.Encoded(b"data", **options),
    "FileList": lambda files, **options: gl.FileList(files.csv, **options),
    "HDF5": lambda files, **options: gl.HDF5(hdf5_file(files.root), **options),
    "Image": lambda files, **options: gl.Image(np.zeros((4, 4, 3), np.uint8), **options),
    "ImageFiles": lambda files, **options: gl.ImageFiles(files.folder, **options),
    "ImageFolder": lambda files, **options: gl.ImageFolder(files.root / "images", **options),
    "LMDB": lambda files, **options: gl.LMDB(packed(files.root, "lmdb"), **options),
    "Loader": make_loader,
    "Loader.load_state_dict": lambda files, **options: make_loader(files).load_state_dict(
        make_loader(files).state_dict(), **options
    ),
    "Loader.replay": lambda files, **options: make_loader(files).replay(**{"epoch": 0, "position": 0, **options}),
    "Loader.set_epoch": lambda files, **options: make_loader(files).set_epoch(**options),
    "Mix": lambda files, **options: gl.Mix([[0], [1]], **{"weights": [1, 2], **options}),
    "Parquet": lambda files, **options: gl.Parquet(next(packed(files.root, "parquet").glob("*.parquet")), **options),
    "RayWorkers": lambda files, **options: gl.RayWorkers(**{"count": 1, **options}),
    "TarShards": lambda files, **options: gl.TarShards(files.tar, **options),
    "image_sizes": lambda files, **options: gl.image_sizes(gl.ImageFiles(files.folder), **options),
    "headspace": lambda files, **options: gl.headspace([0], **options),
    "keep": lambda files, **options: gl.keep("meta", **options),
    "pack": pack,
    "pad": lambda files, **options: gl.pad("caption", **options),
    "pad_collate": lambda files, **options: gl.pad_collate([np.zeros(2)], **options),
    "verify": lambda files, **options: gl.verify(files.packed, **options),
    "wrap": lambda files, **options: gl.wrap(gl.ImageFiles(files.folder), **options),
    "Lambda": lambda files, **options: T.Lambda(**{"fn": abs, **options}),
    "Normalize": lambda files, **options: T.Normalize(**{"mean": (0.5,), "std": (0.5,), **options}),
    "Resize": lambda files, **options: T.Resize(**{"size": 8, **options}),
    "ToDtype": lambda files, **options: T.ToDtype(**{"dtype": "float32", **options}),
    "apply": lambda files, **options: T.apply(IDENTITY, gl.Image(np.zeros((4, 4, 3), np.uint8)), **options),
    "from_timm": lambda files, **options: T.from_timm(
        **{"is_training": not any(name.startswith("crop") for name in options), **options}
    ),
    "Window": lambda files, **options: T.Window(**{"center": 40, "width": 400, **options}),
    "read": lambda files, **options: gl.read(files.folder / "1.png", **options),
}
# Values of arguments that cannot be 1, True or (0.5, 1).
VALUES: dict[str, Any] = {
    "ArrayFile.shape": (2, 4, 4, 3),
    "Boxes.canvas_hw": (4, 4),
    "Buckets.max_pixels": 4096,
    "Cached.bytes_limit": 1 << 20,
    "Decode.device_share": 0.5,
    "ColorJitter.hue": 0.5,
    "MotionBlur.blur_limit": 5,
    "Normalize.mean": (0.5,),
    "Normalize.std": (0.5,),
    "RandomChoice.p": (0.5, 0.25, 0.25),
    "Resize.max_size": 16,
    "Window.width": 400.0,
}
# Public names that only gpuload calls, or that have no arguments to check.
MADE_BY_GPULOAD = {
    "BatchInfo", "Chain", "CollateError", "Compose", "ErrorRecord", "Keypoints", "Mask", "Padded",
    "Program", "SampleError", "Stats", "Uniforms", "WorkerError",
}  # fmt: skip
# Arguments whose annotation does not give the type, or that need other arguments.
CHECKED_ELSEWHERE = {
    "Loader.rank", "Loader.world_size", "Loader.pad_to", "Augment.pad_to", "RandomErasing.value",
    "from_timm.color_jitter", "RandomErasing.max_count", "pad.value", "pad_collate.value", "Loader.repeats",
    "Loader.on_error", "pack.short_side", "pack.cuttable", "pack.exif",
}  # fmt: skip
ACCEPT_NONE = {"antialias", "apply.seed"}
NUMBERS = {"int": "an integer", "float": "a number", "bool": "True or False"}
CHOICES = {"BoxFormat", "Interpolation", "Layout", "Mode", "OnError", "PaddingMode", "Per", "Scale", "Store", "Uneven"}
# Annotations that are not checked here: objects, names, paths, and option classes, which check themselves.
OTHER_ANNOTATIONS = re.compile(
    r"Any$|str\b|bytes$|object$|Sequence\[(Any|object|str|tuple|Transform|Sequence)|Collection|Iterable|Mapping"
    r"|tuple\[int, \.\.\.\]|dict\[|torch\.|StorageOptions|Classes|Shape|Patterns|Progress|RayWorkers|Decode|Faults"
    r"|Literal\['raw'\]"
)
# Values just out of bounds, by class or function and argument.
OUT_OF_BOUNDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "Augment": {"seed": (-1, 2**64)},
    "AugMix": {"alpha": (0,), "mixture_width": (0,), "severity": (0, 11)},
    "BlockShuffle": {"block": (0,), "window": (0,)},
    "Buckets": {"max_pixels": (0,), "multiple_of": (0,)},
    "Cached": {"bytes_limit": (2**20 - 1,)},
    "CLAHE": {"clip_limit": (0.5, (0.5, 2)), "tile_grid_size": (0,)},
    "CenterCrop": {"size": (0,)},
    "ColorJitter": {"contrast": (-0.1, (-0.1, 1)), "hue": (-0.1, 0.6, (-0.6, 0))},
    "Decode": {
        **dict.fromkeys(("device_memory", "max_bytes", "max_memory", "max_pixels", "max_scans"), (0,)),
        "device_share": (0, 1),
        "max_scan_pixels": (0,),
    },
    "ElasticTransform": {"alpha": (-1,)},
    "Faults": {"max_error_rate": (-0.1, 1.1), "max_restarts": (-1,)},
    "GaussianBlur": {"kernel_size": (0,), "sigma": (-1, (0, 1))},
    "GaussianIllumination": {
        "center_range": ((-0.1, 1), (0, 1.1)),
        "intensity_range": ((-0.1, 1), (0, 1.1)),
        "sigma_range": ((0, 1),),
    },
    "GaussianNoise": {"sigma": (-0.1,)},
    "HDF5": {"cache_bytes": (-1,)},
    "JPEG": {"quality": (0, 101, (50, 101))},
    "Loader": {
        **dict.fromkeys(("batch_size", "prefetch_factor", "repeats", "ring_bytes"), (0,)),
        "chunk_size": (0, 4097),
        "num_workers": (-1,),
        "seed": (-1, 2**64),
        "timeout": (-1,),
    },
    "Loader.replay": {"epoch": (-1, 2**63), "position": (-1,)},
    "Loader.set_epoch": {"epoch": (-1, 2**63)},
    "Mix": {"length": (0,), "weights": ([1, 0],)},
    "MixUp": {"alpha": (0,), "label_smoothing": (-0.1, 1), "num_classes": (0,)},
    "MotionBlur": {"blur_limit": (2, (2, 5)), "direction_range": ((-1.1, 0), (0, 1.1))},
    "Mosaic": {"center_range": ((0.5, 1.5),), "size": (0,)},
    "Normalize": {"std": ((0.0,),)},
    "Parquet": {"cache_bytes": (-1,)},
    "RandAugment": {"magnitude": (-1,), "num_magnitude_bins": (1,), "num_ops": (-1,)},
    "RandomAdjustSharpness": {"sharpness_factor": (-1,)},
    "RandomAffine": {"degrees": (-1,), "scale": ((0, 1),), "translate": ((0.5, 2),)},
    "RandomCrop": {"padding": (-1,)},
    "RandomErasing": {"min_count": (0,), "ratio": ((0, 1),), "scale": ((-0.1, 0.2), (0.2, 1.1))},
    "RandomGamma": {"gamma_limit": (0, (0, 100))},
    "RandomIoUCrop": {"trials": (0,)},
    "RandomPerspective": {"distortion_scale": (-0.1, 1.1)},
    "RandomPhotometricDistort": {"contrast": ((-1, 1),), "hue": ((-1, 0),)},
    "RandomPosterize": {"bits": (-1, 9)},
    "RandomResize": {"min_size": (0,)},
    "RandomResizedCrop": {"ratio": ((0, 1),), "size": (0,)},
    "RandomShadow": {
        "num_shadows_limit": ((0, 2),),
        "shadow_dimension": (2,),
        "shadow_intensity_range": ((-0.1, 1), (0, 1.1)),
        "shadow_roi": ((0, 0, 1, 1.1), (-0.1, 0, 1, 1)),
    },
    "RandomShortestSize": {"max_size": (0,), "min_size": (0,)},
    "RandomSolarize": {"threshold": (-1, 256)},
    "RandomZoomOut": {"side_range": ((0.5, 2),)},
    "RayWorkers": {"count": (0,), "cpus_per_worker": (-1,), "workers_per_actor": (0,)},
    "Remote": {"cache_bytes": (-1,), "gap_bytes": (-1,), "in_flight": (0,), "retries": (-1,), "timeout_s": (0,)},
    "Resize": {"size": (0,)},
    "ResizeKeepRatio": {"longest": (-0.1, 1.1), "random_aspect_range": ((0, 1),), "random_scale_prob": (1.1,)},
    "SanitizeBoundingBoxes": {"min_area": (0,), "min_size": (0,)},
    "ScaleJitter": {"scale_range": ((0, 1),), "target_size": ((64, 0),)},
    "TarShards": {"shuffle_buffer": (-1,)},
    "TrimBorder": {"border_size": (-1,)},
    "TrivialAugmentWide": {"num_magnitude_bins": (1,)},
    "UniformTemporalSubsample": {"num_samples": (0,)},
    "Window": {"width": (1.0,)},
    "headspace": {"steps": (0,)},
    "pack": {"quality": (0, 101), "shard_bytes": (0,), "short_side": (0, 65_501), "workers": (-1, 4097)},
}
ZERO_D_CONVERTERS = (np.asarray, torch.tensor)
INVALID: dict[str, tuple[Any, ...]] = {
    "int": (True, np.True_, torch.tensor(True), 1.5, np.float32(1.5), torch.tensor(1.5), "3"),
    "float": (True, np.True_, torch.tensor(True), "0.5"),
    "bool": (2, 1.5, np.float32(1), torch.tensor(0.5), "no"),
}
SCALARS: dict[str, tuple[Callable[[Any], Any], ...]] = {
    "int": (np.int64, *ZERO_D_CONVERTERS),
    "float": (np.float32, np.float64, *ZERO_D_CONVERTERS),
    "bool": (np.bool_, int, *ZERO_D_CONVERTERS),
}


def kind_of(annotation: str, name: str = "") -> str | None:
    """Classify an annotation: a number, numbers, a choice, a function, or something else; None if it is unknown."""
    if name == "fill":
        return name
    first_type = annotation.removeprefix("ForwardRef('").split(" | ")[0]
    if first_type in NUMBERS or first_type in CHOICES:
        return first_type
    if numbers := re.match(r"(?:tuple|Sequence)\[(int|float)(, (int|float|\.\.\.))?\]", annotation):
        return f"{numbers[1]}s"
    if first_type.startswith("Literal") and "'raw'" not in first_type:
        return "choice"
    if first_type.startswith("Callable"):
        return "function"
    return "other" if OTHER_ANNOTATIONS.match(annotation) else None


def public_callables() -> Iterator[tuple[str, Any]]:
    for module in (gl, T):
        for name in module.__all__:
            member = getattr(module, name)
            if (
                callable(member)
                and name not in MADE_BY_GPULOAD
                and not (isinstance(member, type) and issubclass(member, BaseException))
            ):
                yield name, member
    for name in ("Augment.forward", "Augment.set_epoch", "Loader.load_state_dict", "Loader.replay", "Loader.set_epoch"):
        owner, method = name.split(".")
        yield name, getattr(getattr(gl, owner), method)


ARGUMENTS = [
    (name, parameter.name, str(parameter.annotation), parameter.default)
    for name, member in public_callables()
    for parameter in inspect.signature(member).parameters.values()
    if parameter.name != "self" and parameter.kind is not parameter.VAR_POSITIONAL
]
# The optional packages of datasets.
PACKAGES = {"HDF5": ["h5py"], "LMDB": ["lmdb"], "Parquet": ["pyarrow"]}
CASES = [
    pytest.param(owner, name, annotation, default, id=f"{owner}.{name}", marks=lacking.needs(*PACKAGES.get(owner, ())))
    for owner, name, annotation, default in ARGUMENTS
    if kind_of(annotation, name) not in ("other", None) and not {name, f"{owner}.{name}"} & CHECKED_ELSEWHERE
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("arguments")
    folder = root / "images" / "cat"
    folder.mkdir(parents=True)
    (folder / "1.png").write_bytes(encode(np.zeros((4, 4, 3), np.uint8), "PNG"))
    (root / "raw.bin").write_bytes(bytes(2 * 4 * 4 * 3))
    (root / "files.csv").write_text("path,label\nimages/cat/1.png,0\n")
    image = {"id": 1, "file_name": "1.png", "width": 4, "height": 4}
    (root / "coco.json").write_text(json.dumps({"images": [image], "annotations": [], "categories": []}))
    return SimpleNamespace(
        root=root, folder=folder, raw=root / "raw.bin", csv=root / "files.csv", coco=root / "coco.json",
        tar=packed(root, "tar") / "shard-00000.tar", packed=root / "tar",
    )  # fmt: skip


def hdf5_file(root: Path) -> Path:
    import h5py

    with h5py.File(root / "images.h5", "w") as file:
        file["images"], file["labels"] = np.zeros((2, 4, 4, 3), np.uint8), [0, 1]
    return root / "images.h5"


def packed(root: Path, store: str) -> Path:
    if not (root / store).exists():
        gl.pack(gl.ImageFolder(root / "images"), root / store, to=store, workers=0)
    return root / store


def call(owner: str, files: Any, **options: Any) -> Any:
    """Call a class or function with the argument, and a transform also with the arguments of its example (`SPECS`)."""
    if owner in CALLS:
        return CALLS[owner](files, **options)
    if owner in SPECS and SPECS[owner].code:
        return dataclasses.replace(eval(SPECS[owner].code), **options)
    return getattr(gl if owner in gl.__all__ else T, owner)(**options)


def value_of(owner: str, name: str, kind: str, default: Any) -> Any:
    """Return a value of this kind that the argument accepts."""
    transform = eval(SPECS[owner].code) if owner in SPECS and SPECS[owner].code else None
    types: Any = {"int": int, "float": (int, float), "bool": bool}.get(kind, (tuple, list))
    for value in (VALUES.get(f"{owner}.{name}"), getattr(transform, name, None), default):
        if isinstance(value, types) and (kind == "bool" or not isinstance(value, bool)):
            return value
    return {"int": 1, "float": 1.0, "bool": True, "ints": (1, 1), "floats": (0.5, 1.0)}[kind]


def test_the_annotation_of_each_public_argument_is_known():
    unknown = {
        f"{owner}.{name}: {annotation}" for owner, name, annotation, _ in ARGUMENTS if kind_of(annotation) is None
    }
    assert not unknown, "add these annotations to NUMBERS, CHOICES or OTHER_ANNOTATIONS in tests/test_arguments.py"
    assert len(CASES) > 180, "fewer arguments than expected are tested: were annotations or names lost?"


@pytest.mark.parametrize(("owner", "name", "annotation", "default"), CASES)
def test_public_arguments_accept_numpy_and_torch_scalars_and_refuse_wrong_types(
    files, owner, name, annotation, default
):
    kind = kind_of(annotation, name)
    takes_none = "None" in annotation or bool({name, f"{owner}.{name}"} & ACCEPT_NONE)
    none_if_refused = () if takes_none else (None,)
    if kind in NUMBERS:
        valid_value = value_of(owner, name, kind, default)
        for scalar in SCALARS[kind]:
            stored, expected = (
                repr(getattr(call(owner, files, **{name: value}), name, None))
                for value in (scalar(valid_value), np.asarray(scalar(valid_value)).item())
            )
            assert stored == expected, "the value must be stored as a plain number"
        wording, invalid = rf"{name}\b.* must be {NUMBERS[kind]}, got ", (*INVALID[kind], *none_if_refused)
    elif kind in ("ints", "floats"):
        valid_value = value_of(owner, name, kind, default)
        for scalars in ([torch.tensor(number) for number in valid_value], np.array(valid_value)):
            call(owner, files, **{name: scalars})
        if annotation.startswith("tuple[float, float]") and valid_value[0] < valid_value[1]:
            with pytest.raises(ValueError, match=rf"{name}\b.* must be \(low, high\) with low ≤ high"):
                call(owner, files, **{name: valid_value[::-1]})
        wording, invalid = rf"{name}\b.* must be (a |an )", ("ab", 1.5, ["x"] * len(valid_value))
    elif kind == "fill":
        wording, invalid = rf"{name}\b.* must be a number, got ", ("black", True, [1, "2"])
    elif kind == "function":
        wording, invalid = rf"{name}\b.* must be callable, got ", (3, "x", *none_if_refused)
    else:
        wording, invalid = rf"{name}\b.* must be one of '", (3.5, b"x")
        with pytest.raises(ValueError, match=wording):
            call(owner, files, **{name: "nothing like this"})
    for value in invalid:
        with pytest.raises(TypeError, match=wording):
            call(owner, files, **{name: value})


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        pytest.param(owner, name, marks=lacking.needs(*PACKAGES.get(owner, ())))
        for owner, values in OUT_OF_BOUNDS.items()
        for name in values
    ],
)
def test_arguments_refuse_values_out_of_bounds_with_the_same_wording(files, owner, name):
    for value in OUT_OF_BOUNDS[owner][name]:
        with pytest.raises(ValueError, match=rf"{name}\b.* must be (at (least|most)|greater than|less than) .*, got "):
            call(owner, files, **{name: value})


@pytest.mark.parametrize("owner", [owner for owner, name, _, _ in ARGUMENTS if name == "p" and owner != "RandomChoice"])
def test_probabilities_outside_0_to_1_raise_value_error(files, owner):
    for value in (-0.1, 1.1):
        with pytest.raises(ValueError, match=re.escape(f"{owner}(p=…) must be at least 0 and at most 1, got {value}")):
            call(owner, files, p=value)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: T.GaussianNoise(float("nan")), "GaussianNoise(mean=…) must be finite, got nan"),
        (lambda: T.JPEG((90, 30)), "JPEG(quality=…) must be (low, high) with low ≤ high, got (90, 30)"),
        (lambda: T.Pad((1, 2, 3)), "Pad(padding=…) must be a number or 2 or 4 numbers, got (1, 2, 3)"),
        (
            lambda: T.CenterCrop((1, 2, 3)),
            "CenterCrop(size=…) must be a number or a pair (height, width), got (1, 2, 3)",
        ),
        (lambda: T.RandomShortestSize([]), "(min_size=…) must be a number or a list of numbers, got []"),
        (lambda: T.Normalize((), ()), "Normalize(mean=…) must be a list of numbers, got ()"),
    ],
)
def test_arguments_refuse_nan_reversed_ranges_and_wrong_lengths(make, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        make()
