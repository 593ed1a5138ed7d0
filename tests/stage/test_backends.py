"""The option `backend` of a Loader changes neither batches nor resumes; plans show it, and missing libraries raise."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import lacking
from helpers.programs import run_python
from PIL import Image

import gpuload as gl
from gpuload import transforms as T
from gpuload.stage.fused import FusedBackend

NORMALIZE = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
RECIPE = [T.RandomCrop(24), T.RandomHorizontalFlip(), T.RandomInvert(), NORMALIZE, T.RandomErasing(0.5)]


def make_loader(dataset, backend, **options):
    dataset = gl.ImageFolder(dataset) if isinstance(dataset, str | Path) else dataset
    defaults = {"batch_size": 8, "shuffle": True, "transforms": RECIPE, "num_workers": 0, "device": "cpu"}
    return gl.Loader(dataset, backend=backend, **defaults | options)


def assert_same_epoch(batches, reference):
    for (images, labels), (expected, expected_labels) in zip(batches, reference, strict=True):
        assert torch.equal(labels, expected_labels)
        torch.testing.assert_close(images, expected, atol=1e-5, rtol=0)


@pytest.fixture(params=["kornia", "dali", "fused"])
def backend(request) -> str:
    if request.param == "fused" and (reason := FusedBackend.unmet_requirement(torch.device("cpu"))):
        lacking.skip("Triton's interpreter", reason)
    return request.param


@pytest.mark.slow
def test_loader_gives_the_same_epoch_on_every_backend(jpeg_folder, backend):
    with make_loader(jpeg_folder, "torch") as reference, make_loader(jpeg_folder, backend) as loader:
        assert_same_epoch(loader, reference)


@pytest.mark.processes
def test_bits_of_a_backend_do_not_depend_on_workers(jpeg_folder, backend):
    with (
        make_loader(jpeg_folder, backend) as in_process,
        make_loader(jpeg_folder, backend, num_workers=2, chunk_size=3) as in_workers,
    ):
        for (images, _), (images_of_workers, _) in zip(in_process, in_workers, strict=True):
            assert torch.equal(images, images_of_workers)


LIBRARY_RECIPE = [
    T.RandomResizedCrop(24),
    T.RandomHorizontalFlip(),
    T.RandomApply([T.ColorJitter(0.4, 0.4, 0.4, 0.1)], 0.8),
    T.RandomRotation(20, "bilinear"),
    T.RandAugment(),
    NORMALIZE,
    T.RandomErasing(0.5),
]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("backend", ["kornia", "dali"], indirect=True)
def test_bits_of_an_image_do_not_depend_on_workers_batches_ranks_or_a_resume(jpeg_folder, backend):
    def load_images(**options):
        with make_loader(jpeg_folder, backend, transforms=LIBRARY_RECIPE, **options) as loader:
            return torch.cat([images for images, _ in loader])

    expected = load_images()
    for options in ({"num_workers": 1}, {"num_workers": 4, "chunk_size": 3}, {"batch_size": 1}, {"batch_size": 64}):
        assert torch.equal(load_images(**options), expected), options
    images_of_ranks = [load_images(batch_size=4, rank=rank, world_size=2) for rank in (0, 1)]
    for step, batch_images in enumerate(expected.split(8)):
        assert torch.equal(torch.cat([rank[4 * step : 4 * step + 4] for rank in images_of_ranks]), batch_images)
    with make_loader(jpeg_folder, backend, transforms=LIBRARY_RECIPE) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
    with make_loader(jpeg_folder, backend, transforms=LIBRARY_RECIPE, batch_size=3) as resumed_loader:
        resumed_loader.load_state_dict(state)
        assert torch.equal(torch.cat([images for images, _ in resumed_loader]), expected[8:])


def test_resume_with_another_backend_warns_and_continues_the_epoch(jpeg_folder, backend):
    with make_loader(jpeg_folder, "torch") as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        remaining = list(batches)
    text = "the state was saved with the backend 'torch', but the batches are now"
    with make_loader(jpeg_folder, backend) as resumed_loader:
        with pytest.warns(RuntimeWarning, match=text):
            resumed_loader.load_state_dict(state)
        assert_same_epoch(resumed_loader, remaining)


def test_masks_are_the_same_on_every_backend(jpeg_folder, backend):
    class MaskedFolder(gl.ImageFolder):
        def __getitem__(self, index):
            image, label = super().__getitem__(index)
            return image, gl.Mask(np.asarray(Image.open(io.BytesIO(image.data)).convert("L"))), label

    options = {"transforms": [T.RandomCrop(24), T.RandomHorizontalFlip()], "shuffle": False}
    dataset = MaskedFolder(jpeg_folder)
    with make_loader(dataset, backend, **options) as loader, make_loader(dataset, "auto", **options) as reference:
        torch.testing.assert_close(next(iter(loader)), next(iter(reference)), rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["kornia", "dali"], indirect=True)
def test_masks_and_boxes_move_with_the_pixels_of_a_library(backend):
    """A bright rectangle, its mask and its box have the same corners, within 1.5 pixels."""
    image, mask = np.zeros((60, 80, 3), np.uint8), np.zeros((60, 80), np.uint8)
    image[20:44, 30:62], mask[20:44, 30:62] = 255, 1
    boxes = gl.Boxes(np.array([[30.0, 20, 62, 44]]), format="xyxy")
    transforms = [
        T.RandomHorizontalFlip(),
        T.RandomAffine(0, (0.1, 0.1), (0.8, 1.2), interpolation="bilinear"),
        T.Resize((90, 96)),
    ]
    samples = [{"image": image, "mask": gl.Mask(mask), "boxes": boxes}] * 16
    with make_loader(samples, backend, batch_size=16, transforms=transforms) as loader:
        batch = next(iter(loader))
    for sample in batch:
        [box] = sample["boxes"]
        bright, mask = sample["image"][0] > 127, sample["mask"] > 0
        for is_inside in (bright, mask):
            rows, columns = torch.nonzero(is_inside.any(1)), torch.nonzero(is_inside.any(0))
            extent = torch.stack([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
            assert (extent - box.clamp(torch.zeros(4), torch.tensor([96, 90, 96, 90]))).abs().max() <= 1.5


def test_plan_shows_the_backend_of_each_step(jpeg_folder):
    plan = make_loader(jpeg_folder, "kornia", transforms=[T.JPEG(50), *RECIPE, T.RandomErasing(value="random")]).plan()
    assert plan.backend == "kornia"
    assert [step.backend for step in plan.steps] == ["torch", *["kornia"] * 5, "torch"]
    assert plan.backend_of("JPEG") == "torch"
    assert str(plan).splitlines()[0] == "backend kornia on cpu"
    assert make_loader(jpeg_folder, "auto").plan().backend == "torch"


@pytest.mark.parametrize(
    ("name", "function", "text"),
    [
        ("kornia", "find_spec", r"needs Kornia, which cannot be imported here; run `pip install 'gpuload\[kornia\]'`"),
        ("dali", "_is_installed", r"pip install 'gpuload\[dali-cu13\]'"),
        ("fused", "find_spec", r"needs Triton, which is not installed; run `pip install triton`"),
    ],
)
def test_loader_whose_library_is_missing_raises_backend_error(monkeypatch, name, function, text):
    monkeypatch.setattr(f"gpuload.stage.{name}.backend.{function}", lambda *arguments: None)
    with pytest.raises(gl.BackendError, match=text) as caught:
        gl.Loader(["a.jpg"], backend=name, device="cpu")
    assert isinstance(caught.value, ImportError)


@pytest.mark.processes
@pytest.mark.parametrize(("name", "imported"), [("torch", ""), ("kornia", "kornia")])
def test_loader_imports_only_the_library_of_its_backend(name, imported):
    lacking.require("kornia")
    program = (
        "import sys, gpuload as gl; loader = gl.Loader(['a.jpg'], transforms=[gl.transforms.Resize(9)], "
        f"backend='{name}', device='cpu'); loader.plan(); "
        "print(*sorted({'triton', 'kornia', 'nvidia.dali'} & set(sys.modules)))"
    )
    output, _ = run_python(program)
    assert output.strip() == imported
