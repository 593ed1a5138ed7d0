"""Names of torch and torchvision that gpuload does not have: the error says what to write instead."""

from __future__ import annotations

import subprocess
import sys

import pytest
from originals import torchvision

import gpuload as gl
from gpuload import transforms as T


@pytest.mark.parametrize(
    ("module", "name", "text"),
    [
        (gl, "DataLoader", "write gpuload.Loader, which takes its arguments"),
        (gl, "IterableDataset", "use torch.utils.data.IterableDataset, which gpuload.Loader takes as it is"),
        (gl, "BoundingBoxes", "write gpuload.Boxes(array, format)"),
        (gl, "Resize", "write gpuload.transforms.Resize"),
        (
            T,
            "ToTensor",
            "write ToDtype('float32', scale=True); Normalize scales by itself, and tensors are what a batch",
        ),
        (T, "ToPILImage", "leave it out: batches hold tensors, whatever the dataset returns"),
        (T, "InterpolationMode", "write its name, as in Resize(224, interpolation='bicubic')"),
        (T, "FiveCrop", "it makes five images of one; write MultiView([...]) with a chain for each"),
        (T, "Loader", "write gpuload.Loader"),
    ],
)
def test_a_name_of_theirs_is_told_what_it_is_here(module, name, text):
    with pytest.raises(AttributeError) as caught:
        getattr(module, name)
    assert str(caught.value).startswith(f"module {module.__name__!r} has no attribute {name!r}; {text}")


@pytest.mark.parametrize("module", [gl, T])
@pytest.mark.parametrize("name", ["nothing", "_private", "__wrapped__"])
def test_other_names_are_missing_as_ever(module, name):
    with pytest.raises(AttributeError, match=f"^module {module.__name__!r} has no attribute {name!r}$"):
        getattr(module, name)


def test_all_of_torchvisions_transforms_are_here_or_have_an_answer():
    torchvision()
    from torchvision.transforms import v2

    classes = [name for name, value in vars(v2).items() if isinstance(value, type)]
    assert len(classes) > 50
    silent = []
    for name in set(classes) - set(T.__all__):
        with pytest.raises(AttributeError) as caught:
            getattr(T, name)
        if ";" not in str(caught.value):
            silent.append(name)
    assert silent == []


def test_all_that_users_take_from_torch_utils_data_has_an_answer():
    from torch.utils import data

    internal = {"DFIterDataPipe", "DataChunk", "IterDataPipe", "MapDataPipe", "default_convert", "get_worker_info"}
    for name in set(data.__all__) - internal:
        if name[0] != "_" and (name[0].isupper() or name in ("default_collate", "random_split")):
            with pytest.raises(AttributeError, match=f"has no attribute {name!r}; "):
                getattr(gl, name)


@pytest.mark.parametrize("module", [gl, T])
def test_completion_shows_public_names_alone(module):
    assert dir(module) == sorted(module.__all__)


@pytest.mark.processes
def test_a_slip_of_the_pen_is_told_the_name_that_is_near():
    code = "import gpuload; gpuload.Laoder"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.rstrip().endswith("has no attribute 'Laoder'. Did you mean: 'Loader'?")
