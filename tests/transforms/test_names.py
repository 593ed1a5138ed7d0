"""Errors about names and arguments that only other libraries have say what to write instead."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from types import ModuleType

import pytest
from helpers import lacking
from helpers.peers import timm, torchvision

import gpuload as gl
from gpuload import transforms as T
from gpuload.transforms.base import Transform
from gpuload.transforms.names import ARGUMENTS, TRANSFORMS


@pytest.mark.parametrize(
    ("module", "name", "text"),
    [
        (gl, "DataLoader", "write gpuload.Loader, which takes its arguments"),
        (gl, "DeviceCached", "keep the images in a tensor for gpuload.Augment, as in docs/howto/dataset_in_memory.md"),
        (gl, "IterableDataset", "use torch.utils.data.IterableDataset, which works with gpuload.Loader"),
        (gl, "BoundingBoxes", "write gpuload.Boxes(array, format)"),
        (gl, "ImageNet", "write gpuload.ImageFolder(root / 'train'), and gpuload.ImageFolder(root / 'val', classes="),
        (gl, "CIFAR10", "use torchvision.datasets.CIFAR10, which works with gpuload.Loader"),
        (gl, "Resize", "write gpuload.transforms.Resize"),
        (T, "ToTensor",
         "write ToDtype('float32', scale=True), or leave it out: Normalize scales too, and batches hold"),
        (T, "ToPILImage", "leave it out: batches hold tensors, whatever the dataset returns"),
        (T, "InterpolationMode", "write its name, as in Resize(224, interpolation='bicubic')"),
        (T, "FiveCrop", "it makes five images from one; write MultiView([…]) with one chain per image"),
        (T, "Loader", "write gpuload.Loader"),
        (T, "Mixup", "write MixUp(num_classes=…), or RandomChoice([MixUp(num_classes=…), CutMix(num_classes=…)]) for"),
        (T, "Cutout", "write RandomErasing(p, scale, ratio=(1, 1))"),
        (T, "RandomFog", "call albumentations in the dataset's __getitem__ and return gpuload.Image(transform("),
        (T, "RandomResizedCropRGBImageDecoder", "write RandomResizedCrop(size)"),
        (T, "crop_mirror_normalize", "write CenterCrop(size) or RandomCrop(size), RandomHorizontalFlip(), Normalize("),
        (T, "RandomResizeCrop", "did you mean RandomResizedCrop?"),
        (T, "Invert", "did you mean RandomInvert?"),
        (T, "Solarize", "write RandomSolarize(threshold, p)"),
        (T, "random_crop", "did you mean RandomCrop?"),
        (gl, "Laoder", "did you mean Loader?"),
        (gl, "Imagefolder", "did you mean ImageFolder?"),
    ],
)  # fmt: skip
def test_name_of_another_library_raises_an_error_with_the_name_to_write(module, name, text):
    with pytest.raises(AttributeError) as caught:
        getattr(module, name)
    assert str(caught.value).startswith(f"module {module.__name__!r} has no attribute {name!r}; {text}")


@pytest.mark.parametrize("module", [gl, T])
@pytest.mark.parametrize("name", ["nothing", "_private", "__wrapped__"])
def test_unknown_name_raises_the_usual_attribute_error(module, name):
    with pytest.raises(AttributeError, match=f"^module {module.__name__!r} has no attribute {name!r}$"):
        getattr(module, name)


def test_each_public_name_of_torch_utils_data_has_a_hint():
    from torch.utils import data

    internal = {"DFIterDataPipe", "DataChunk", "IterDataPipe", "MapDataPipe", "default_convert", "get_worker_info"}
    for name in set(data.__all__) - internal:
        if name[0] != "_" and (name[0].isupper() or name in ("default_collate", "random_split")):
            with pytest.raises(AttributeError, match=f"has no attribute {name!r}; "):
                getattr(gl, name)


@pytest.mark.parametrize("module", [gl, T])
def test_dir_lists_only_public_names(module):
    assert dir(module) == sorted(module.__all__)


@pytest.mark.processes
@pytest.mark.parametrize(("name", "hint"), [("Laoder", "; did you mean Loader?"), ("nothing", "")])
def test_misspelled_name_gets_one_suggestion(name, hint):
    # Python also suggests names, but adds no second suggestion here.
    program = f"import gpuload; gpuload.{name}"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert process.stderr.rstrip().endswith(f"has no attribute {name!r}{hint}")


def missing_hints(modules: list[ModuleType], base: type = object) -> list[str]:
    """Return the names of classes that gpuload.transforms does not have, and for which it gives no hint."""
    classes = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    names = {kind.__name__ for kind in classes if issubclass(kind, base)}
    missing = []
    for name in names - set(T.__all__):
        with pytest.raises(AttributeError) as caught:
            getattr(T, name)
        if ";" not in str(caught.value):
            missing.append(name)
    return sorted(missing)


ADD_HINTS = "add a hint for each of these names to gpuload/transforms/names.py"


def test_each_torchvision_transform_exists_or_has_a_hint():
    assert missing_hints([torchvision().transforms.v2]) == [], ADD_HINTS


@lacking.needs("albumentations")
def test_each_albumentations_transform_exists_or_has_a_hint():
    import albumentations

    names = missing_hints([albumentations], albumentations.BasicTransform)
    assert [name for name in names if "3D" not in name] == [], ADD_HINTS


def test_each_timm_transform_exists_or_has_a_hint():
    timm()
    from timm.data import mixup, transforms

    names = missing_hints([mixup, transforms])
    assert [name for name in names if name[0].isupper()] == [], ADD_HINTS


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: T.Resize(224, antialiasing=True), "Resize has no argument 'antialiasing'; did you mean antialias?"),
        (lambda: T.RandomErasing(probability=1), "RandomErasing has no argument 'probability'; write p=…"),
        (lambda: T.RandomCrop(height=3, width=4), "RandomCrop has no argument 'height'; write size=(height, width)"),
        (lambda: T.ColorJitter(gamma=0.3),
         "ColorJitter has no argument 'gamma'; its arguments: brightness, contrast, saturation, hue"),
        (lambda: T.RandomChannelPermutation(p=1), "RandomChannelPermutation has no argument 'p'; its arguments: none"),
    ],
)  # fmt: skip
def test_argument_of_another_library_raises_an_error_with_the_name_to_write(make, text):
    with pytest.raises(TypeError) as caught:
        make()
    assert str(caught.value) == text


def test_signatures_of_transforms_have_no_variadic_parameters():
    assert str(inspect.signature(T.RandomErasing)).startswith("(p: 'float' = 0.5, scale: ")
    for name in T.__all__:
        if isinstance(value := getattr(T, name), type) and issubclass(value, Transform):
            kinds = {parameter.kind for parameter in inspect.signature(value).parameters.values()}
            assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}, name


def test_hints_are_only_for_names_that_gpuload_does_not_have():
    assert set(TRANSFORMS) & set(T.__all__) == set(), (
        "remove these names from TRANSFORMS in gpuload/transforms/names.py"
    )
    for name in T.__all__:
        if isinstance(value := getattr(T, name), type) and issubclass(value, Transform):
            mixing = {"label_smoothing"}
            exceptions = {
                "SanitizeBoundingBoxes": {"min_area"},
                "CutMix": mixing,
                "MixUp": mixing,
                "MotionBlur": {"blur_limit"},
                "Window": {"width"},
            }
            arguments = set(inspect.signature(value).parameters) & set(ARGUMENTS)
            assert arguments == exceptions.get(name, set()), (
                f"{name}: remove these arguments from ARGUMENTS in gpuload/transforms/names.py, or edit `exceptions`"
            )


def make_albumentations_class(name: str, base: type = object) -> type:
    return type(name, (base,), {"__module__": "albumentations.augmentations.any", "__call__": lambda self: None})


DATASET_REMEDY = (
    "call albumentations in the dataset's __getitem__ and return gpuload.Image(transform(image=array)['image'])"
)


@pytest.mark.parametrize("name", ["HorizontalFlip", "RandomCrop", "RandomFog", "Compose"])
def test_chain_refuses_a_transform_of_albumentations_with_a_remedy(name):
    with pytest.raises(TypeError) as caught:
        T.Chain([make_albumentations_class(name)()])
    assert str(caught.value) == (
        f"transforms[0] is albumentations' {name}, which takes a single image, a NumPy array; convert the chain with "
        f"gpuload.transforms.from_albumentations(…), or {DATASET_REMEDY}"
    )


def test_transform_of_albumentations_is_refused_wherever_transforms_are_passed():
    crop = make_albumentations_class("CropAndPad")
    subclass = type("Own", (crop,), {"__module__": "__main__"})
    for make, argument in [
        (lambda: T.Chain(crop()), "transforms"),
        (lambda: T.Chain([crop]), "transforms[0]"),
        (lambda: T.Chain([subclass()]), "transforms[0]"),
        (lambda: T.RandomApply([crop()]), "RandomApply(transforms=…)[0]"),
        (lambda: T.Lambda(crop(), per="image"), "Lambda(fn=…)"),
        (lambda: T.from_torchvision([crop()]), "from_torchvision: transforms[0]"),
    ]:
        with pytest.raises(TypeError, match=re.escape(f"{argument} is albumentations' ")) as caught:
            make()
        assert str(caught.value).endswith(DATASET_REMEDY)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: T.Resize(224, 200), "got 200; pass (height, width) as one argument, Resize((224, 200))"),
        (lambda: T.CenterCrop(8, 9), "were given; pass (height, width) as one argument, CenterCrop((8, 9))"),
        (lambda: T.RandomResizedCrop(8, 9), "(int); pass (height, width) as one argument, RandomResizedCrop((8, 9))"),
        (lambda: T.MultiView([T.Identity()], [T.Identity()]), "were given; pass one list, MultiView([…, …])"),
        (lambda: T.Compose(T.Identity(), T.Identity()), "were given; pass one list, Compose([…, …])"),
        (lambda: T.RandomApply(T.Identity(), T.Identity()), "got Identity(); pass one list, RandomApply([…, …])"),
    ],
)  # fmt: skip
def test_entries_of_one_argument_passed_separately_are_refused_with_a_remedy(make, text):
    with pytest.raises((TypeError, ValueError)) as caught:
        make()
    assert str(caught.value).endswith(text)


def test_errors_that_a_single_argument_would_not_fix_keep_their_text():
    with pytest.raises(ValueError, match=r"must be at least 0 and at most 1, got 1\.5$"):
        T.RandomApply([T.Identity()], 1.5)
    with pytest.raises(TypeError, match=r"got 'x' \(str\)$"):
        T.RandomErasing("x", 3)
