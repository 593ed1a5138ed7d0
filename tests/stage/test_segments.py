"""Lines on several backends: what lies between two runs is what the reference would have there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.matrix import matrix
from helpers.tensor_layouts import DENSE, LAYOUTS

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages, compile_stage
from gpuload.stage.finish import Finish
from gpuload.stage.plan import plan_steps
from gpuload.stage.reference.backend import TorchBackend
from gpuload.stage.segments import SegmentRunner
from gpuload.transforms.program.ops import CHANGES_PIXELS

CPU = torch.device("cpu")
NORMALIZE = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class Every(TorchBackend):
    """Runs transforms of some names, with the reference, and remembers what it was given."""

    name = "every"

    def __init__(self, names: set[str]) -> None:
        super().__init__(CPU)
        self.names = names
        self.seen: list[Any] = []

    def why_unsupported(self, outline, *, is_late=False, follows_own=True):
        asked = outline.name in self.names or not issubclass(outline.kind, CHANGES_PIXELS)
        return None if asked else "not asked for"

    def level_runner(self, finish):
        run = super().level_runner(finish)

        def watched(images, program, windows_tlhw, outputs, on_finished):
            self.seen.append((images, [record.name for record in program.records], on_finished))
            return run(images, program, windows_tlhw, outputs, on_finished)

        return watched


def run(chain, names, batch, draws, **options):
    expected = compile_stage(chain, device="cpu", **options)(batch, draws)
    backend = Every(names)
    line = chain.lines[0].transforms
    runner = SegmentRunner(
        plan_steps(line, backend), Finish.of(line, None), {"torch": TorchBackend(CPU), "every": backend}
    )
    found = [torch.empty_like(image) for image in expected]
    outputs = torch.empty_like(expected) if isinstance(expected, torch.Tensor) else found
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
def test_cut_anywhere_the_bits_are_the_same(make_images, make_batch, names):
    chain = T.Chain(
        [
            T.RandomInvert(),
            T.RandomResizedCrop(40),
            T.RandomHorizontalFlip(),
            T.ColorJitter(0.4, 0.4, 0.4, 0.1),
            T.CenterCrop(33),
            T.RandomGrayscale(0.5),
            NORMALIZE,
            T.RandomErasing(0.5),
        ]
    )
    for seed in range(3):
        ragged, draws = make_batch(chain, make_images(seed, 5))
        expected, outputs, backend = run(chain, names, ragged, draws)
        assert torch.equal(outputs, expected)
        assert {name for _, ran, _ in backend.seen for name in ran} == names | {"Normalize"}


def test_only_the_window_that_matters_lies_between(make_images, make_batch):
    chain = T.Chain([T.RandomInvert(), T.CenterCrop(20)])
    ragged, draws = make_batch(chain, make_images(0, 3), whole=True)
    _, _, backend = run(chain, {"CenterCrop"}, ragged, draws)
    [(images, _, _)] = backend.seen
    assert images.shapes.tolist() == [[20, 20, 3]] * 3
    assert images.sizes_hw.tolist() == ragged.sizes_hw.tolist()
    assert (images.regions_tlhw == draws.windows_tlhw[1]).all()


def test_images_of_different_sizes_and_of_fewer_channels(make_images, make_batch):
    chain = T.Chain([T.Grayscale(), T.Resize(20), T.RandomSolarize(99), T.RandomVerticalFlip()])
    ragged, draws = make_batch(chain, make_images(1, 4))
    for names in ({"Resize"}, {"Grayscale", "RandomSolarize"}, {"RandomVerticalFlip"}):
        expected, outputs, _ = run(chain, names, ragged, draws, ragged="list")
        for one, other in zip(outputs, expected, strict=True):
            assert torch.equal(one, other)


def test_what_is_left_of_late_is_done_by_whom_it_was_planned_for(make_images, make_batch):
    chain = T.Chain([T.CenterCrop(20), NORMALIZE, T.RandomErasing(1.0), T.MixUp(num_classes=2)])
    ragged, draws = make_batch(chain, make_images(2, 4))
    for names in ({"Normalize", "RandomErasing"}, {"Normalize", "MixUp"}, {"Normalize", "RandomErasing", "MixUp"}):
        expected, outputs, backend = run(chain, names, ragged, draws)
        assert torch.equal(outputs, expected)
        on_finished = backend.seen[-1][2]
        offered = [] if on_finished is None else [record.name for record in on_finished.records]
        assert offered == [name for name in ("RandomErasing", "MixUp") if "RandomErasing" in names and name in names]


def test_memory_between_runs_is_kept(make_images, make_batch):
    chain = T.Chain([T.RandomInvert(), T.CenterCrop(20)])
    ragged, draws = make_batch(chain, make_images(0, 3))
    backend = Every({"CenterCrop"})
    line = chain.lines[0].transforms
    runner = SegmentRunner(
        plan_steps(line, backend), Finish.of(line, None), {"torch": TorchBackend(CPU), "every": backend}
    )
    for _ in range(3):
        runner(ragged, draws, torch.empty(3, 3, 20, 20, dtype=torch.uint8))
    assert len({images.pixels.data_ptr() for images, _, _ in backend.seen}) == 1


def test_what_has_no_parameters_makes_no_run_of_its_own(make_images, make_batch):
    chain = T.Chain([T.ToDtype("float32", scale=True), T.Identity(), T.RandomInvert(), T.Resize((20, 20)), NORMALIZE])
    ragged, draws = make_batch(chain, make_images(3, 3))
    expected, outputs, backend = run(chain, {"Resize"}, ragged, draws)
    assert torch.equal(outputs, expected)
    assert [names for _, names, _ in backend.seen] == [["Resize", "Normalize"]]


@matrix(layout=["contiguous", "sliced", "within others", "each channels last"], runner=["single", "batched"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_planes_give_the_bits_of_interleaved_images(make_images, layout, runner, dtype):
    arrays = [image[:40, :45].astype(dtype) for image in make_images(4, 4, low=50)]
    given = DENSE[layout](arrays) if layout in DENSE else LAYOUTS[layout](arrays)
    both = RaggedImages.from_arrays(arrays), RaggedImages.from_planes(given, list("abcd"))
    colours = [T.ColorJitter(0.4, 0.4)] if dtype == "uint8" else []
    transforms = [T.RandomHorizontalFlip(), T.RandomResizedCrop(20), *colours, NORMALIZE, T.RandomErasing()]
    for chain in (T.Chain(transforms), T.Chain([T.Lambda(lambda images: images.clone()), *transforms])):
        draws = chain.draw(epoch_key(0, 0), np.arange(4), both[0].sizes_hw)
        stage = compile_stage(chain, device="cpu", runner=runner)
        expected, found = (stage(images, draws) for images in both)
        assert torch.equal(found, expected)


def test_planes_are_copied_once_into_memory_that_is_kept(make_images):
    """Only the windows that matter, and only where the first run cannot read them."""
    arrays = [image[:40, :45] for image in make_images(4, 2, low=50)]
    planes = RaggedImages.from_planes(LAYOUTS["within others"](arrays), ["a", "b"])
    chain = T.Chain([T.CenterCrop(20), T.RandomInvert(1.0), NORMALIZE])
    draws = chain.draw(epoch_key(0, 0), np.arange(2), planes.sizes_hw)
    backend = Every({"CenterCrop", "RandomInvert"})
    line = chain.lines[0].transforms
    runner = SegmentRunner(
        plan_steps(line, backend), Finish.of(line, None), {"torch": TorchBackend(CPU), "every": backend}
    )
    for _ in range(3):
        runner(planes, draws, torch.empty(2, 3, 20, 20))
    seen = [images for images, _, _ in backend.seen]
    assert len({images.pixels.data_ptr() for images in seen}) == 1
    assert {images.steps is None for images in seen} == {True}
    assert seen[0].shapes.tolist() == [[20, 20, 3]] * 2
