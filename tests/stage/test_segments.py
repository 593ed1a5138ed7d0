"""Chains that run in segments on several backends give the results of one backend; segments get only what they need."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.matrix import matrix
from helpers.tensor_layouts import interleaved_and_planes

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import compile_stage
from gpuload.stage.finish import Finish
from gpuload.stage.plan import plan_steps
from gpuload.stage.reference.backend import TorchBackend
from gpuload.stage.segments import SegmentRunner
from gpuload.transforms.program.ops import CHANGES_PIXELS

CPU = torch.device("cpu")
NORMALIZE = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class NamedTransforms(TorchBackend):
    """A backend that runs the transforms named by `names` with the reference, and records each segment's arguments."""

    name = "named"

    def __init__(self, names: set[str]) -> None:
        super().__init__(CPU)
        self.names = names
        self.calls: list[Any] = []

    def why_unsupported(self, outline, *, is_late=False, follows_own=True):
        is_supported = outline.name in self.names or not issubclass(outline.kind, CHANGES_PIXELS)
        return None if is_supported else "another name"

    def level_runner(self, finish):
        run_levels = super().level_runner(finish)

        def run_and_record(images, program, windows_tlhw, outputs, on_finished):
            self.calls.append((images, [record.name for record in program.records], on_finished))
            return run_levels(images, program, windows_tlhw, outputs, on_finished)

        return run_and_record


def segment_runner(chain: T.Chain, names: set[str]) -> tuple[SegmentRunner, NamedTransforms]:
    backend = NamedTransforms(names)
    line = chain.lines[0].transforms
    backends = {"torch": TorchBackend(CPU), "named": backend}
    return SegmentRunner(plan_steps(line, backend), Finish.of(line, None), backends), backend


def run_segments(chain, names, batch, draws, **options):
    """Run the reference and the segments, and return both results and the backend."""
    expected = compile_stage(chain, device="cpu", **options)(batch, draws)
    runner, backend = segment_runner(chain, names)
    is_batch = isinstance(expected, torch.Tensor)
    outputs = torch.empty_like(expected) if is_batch else [torch.empty_like(image) for image in expected]
    runner(batch, draws, outputs)
    return expected, outputs, backend


@pytest.mark.parametrize(
    "names",
    [
        {"RandomResizedCrop"},
        {"RandomInvert"},
        {"ColorJitter"},
        {"RandomResizedCrop", "ColorJitter"},
        {"RandomHorizontalFlip", "CenterCrop"},
    ],
)
def test_segments_on_several_backends_have_the_bits_of_one_backend(make_images, make_batch, names):
    levels = [T.RandomInvert(), T.RandomResizedCrop(40), T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4, 0.4, 0.1)]
    chain = T.Chain([*levels, T.CenterCrop(33), T.RandomGrayscale(0.5), NORMALIZE, T.RandomErasing(0.5)])
    for seed in range(3):
        ragged, draws = make_batch(chain, make_images(seed, 5))
        expected, outputs, backend = run_segments(chain, names, ragged, draws)
        assert torch.equal(outputs, expected)
        assert {name for _, record_names, _ in backend.calls for name in record_names} == names | {"Normalize"}


def test_segment_gets_only_the_window_that_it_needs(make_images, make_batch):
    chain = T.Chain([T.RandomInvert(), T.CenterCrop(20)])
    ragged, draws = make_batch(chain, make_images(0, 3), uncut=True)
    _, _, backend = run_segments(chain, {"CenterCrop"}, ragged, draws)
    [(images, _, _)] = backend.calls
    assert images.shapes.tolist() == [[20, 20, 3]] * 3
    assert images.sizes_hw.tolist() == ragged.sizes_hw.tolist()
    assert (images.regions_tlhw == draws.windows_tlhw[1]).all()


def test_segments_have_the_bits_of_one_backend_for_several_sizes_and_gray_images(make_images, make_batch):
    chain = T.Chain([T.Grayscale(), T.Resize(20), T.RandomSolarize(99), T.RandomVerticalFlip()])
    ragged, draws = make_batch(chain, make_images(1, 4))
    for names in ({"Resize"}, {"Grayscale", "RandomSolarize"}, {"RandomVerticalFlip"}):
        expected, outputs, _ = run_segments(chain, names, ragged, draws, ragged="list")
        for output, expected_image in zip(outputs, expected, strict=True):
            assert torch.equal(output, expected_image)


def test_on_finished_offers_a_backend_only_the_records_planned_for_it(make_images, make_batch):
    chain = T.Chain([T.CenterCrop(20), NORMALIZE, T.RandomErasing(1.0), T.MixUp(num_classes=2)])
    ragged, draws = make_batch(chain, make_images(2, 4))
    for names in ({"Normalize", "RandomErasing"}, {"Normalize", "MixUp"}, {"Normalize", "RandomErasing", "MixUp"}):
        expected, outputs, backend = run_segments(chain, names, ragged, draws)
        assert torch.equal(outputs, expected)
        _, _, on_finished = backend.calls[-1]
        offered = [] if on_finished is None else [record.name for record in on_finished.records]
        assert offered == [name for name in ("RandomErasing", "MixUp") if "RandomErasing" in names and name in names]


def test_memory_between_segments_is_reused(make_images, make_batch):
    chain = T.Chain([T.RandomInvert(), T.CenterCrop(20)])
    ragged, draws = make_batch(chain, make_images(0, 3))
    runner, backend = segment_runner(chain, {"CenterCrop"})
    for _ in range(3):
        runner(ragged, draws, torch.empty(3, 3, 20, 20, dtype=torch.uint8))
    assert len({images.pixels.data_ptr() for images, _, _ in backend.calls}) == 1


def test_transforms_without_parameters_make_no_segment(make_images, make_batch):
    chain = T.Chain([T.ToDtype("float32", scale=True), T.Identity(), T.RandomInvert(), T.Resize((20, 20)), NORMALIZE])
    ragged, draws = make_batch(chain, make_images(3, 3))
    expected, outputs, backend = run_segments(chain, {"Resize"}, ragged, draws)
    assert torch.equal(outputs, expected)
    assert [names for _, names, _ in backend.calls] == [["Resize", "Normalize"]]


@matrix(layout=["contiguous", "sliced", "within others", "each channels last"], runner=["single", "batched"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_planes_have_the_bits_of_interleaved_images(make_images, layout, runner, dtype):
    arrays = [image[:40, :45].astype(dtype) for image in make_images(4, 4, low=50)]
    inputs = interleaved_and_planes(arrays, layout)
    colors = [T.ColorJitter(0.4, 0.4)] if dtype == "uint8" else []
    transforms = [T.RandomHorizontalFlip(), T.RandomResizedCrop(20), *colors, NORMALIZE, T.RandomErasing()]
    for chain in (T.Chain(transforms), T.Chain([T.Lambda(lambda images: images.clone()), *transforms])):
        draws = chain.draw(epoch_key(0, 0), np.arange(4), inputs[0].sizes_hw)
        stage = compile_stage(chain, device="cpu", runner=runner)
        expected, outputs = (stage(images, draws) for images in inputs)
        assert torch.equal(outputs, expected)


def test_windows_of_planes_are_interleaved_into_reused_memory(make_images):
    arrays = [image[:40, :45] for image in make_images(4, 2, low=50)]
    _, planes = interleaved_and_planes(arrays, "within others")
    chain = T.Chain([T.CenterCrop(20), T.RandomInvert(1.0), NORMALIZE])
    draws = chain.draw(epoch_key(0, 0), np.arange(2), planes.sizes_hw)
    runner, backend = segment_runner(chain, {"CenterCrop", "RandomInvert"})
    for _ in range(3):
        runner(planes, draws, torch.empty(2, 3, 20, 20))
    inputs = [images for images, _, _ in backend.calls]
    assert len({images.pixels.data_ptr() for images in inputs}) == 1
    assert {images.steps is None for images in inputs} == {True}
    assert inputs[0].shapes.tolist() == [[20, 20, 3]] * 2
