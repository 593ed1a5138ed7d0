"""User code in a chain: custom transforms, lambdas and modules, for images, masks and floats."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gpuload as gl
from gpuload import transforms as T
from gpuload.rng.philox import epoch_key, uniforms
from gpuload.stage import compile_stage
from gpuload.stage.masks import MaskStage
from gpuload.stage.user_code import apply_module

TO_FLOAT = T.ToDtype("float32", scale=True)
NORMALIZE = T.Normalize((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
PAGE = Path(__file__).parents[2] / "docs" / "transforms.md"
ON_CPU: dict[str, Any] = {"num_workers": 0, "device": "cpu"}


def documented_example() -> dict[str, Any]:
    text = PAGE.read_text().split("## Your own transforms")[1].split("```python\n")[1].split("```")[0]
    namespace: dict[str, Any] = {"__name__": __name__}
    exec(text, namespace)
    return namespace


EXAMPLE = documented_example()
ColourCast, GridMask = EXAMPLE["ColourCast"], EXAMPLE["GridMask"]


@dataclass(frozen=True)
class Flip(T.Custom):
    moves_pixels = True

    def draw(self, uniforms, sizes_hw):
        return uniforms(1)[:, 0] < 0.5

    def apply(self, images, params):
        return torch.where(params[:, None, None, None], images.flip(-1), images)

    apply_masks = apply


@dataclass(frozen=True)
class Gain(T.Custom):
    """A transform that multiplies each image by a factor like `T.ColorJitter(brightness=(0.5, 1.5))`, but rounds."""

    def draw(self, uniforms, sizes_hw):
        return {"factor": 0.5 + uniforms(1)[:, 0]}

    def apply(self, images, params):
        assert params["factor"].dtype == torch.float32
        brightened = images * params["factor"][:, None, None, None]
        return brightened.round().clamp(0, 255).to(torch.uint8) if images.dtype == torch.uint8 else brightened


def compile_chain(transforms, **options):
    chain = T.Chain(transforms)
    return chain, compile_stage(chain, device="cpu", **options)


def run_to_the_end(make_images, make_batch, transforms):
    """Run a chain on three images, then the modules at its end."""
    chain, stage = compile_chain(transforms)
    return stage.call_modules(stage(*make_batch(chain, make_images(5, 3))), [0] * len(chain.modules))


class BuiltInFlip(T.RandomHorizontalFlip):
    lanes = property(lambda self: 2)  # as many lanes as Flip has, so that both draw the same numbers


# -- positions in a chain -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runner", ["single", "batched"])
@pytest.mark.parametrize(
    ("transforms", "ragged"),
    [
        ([T.RandomCrop(24), Flip(), NORMALIZE], "error"),
        ([Flip(), T.RandomCrop(24)], "error"),
        ([Flip(), T.RandomInvert(), T.RandomResizedCrop(20), Flip(), T.ColorJitter(0.4), NORMALIZE], "error"),
        ([T.Resize(24), Flip()], "list"),
        ([T.Resize(24), Flip(), T.RandomVerticalFlip(), NORMALIZE], "pad"),
        ([T.RandomCrop(24), TO_FLOAT, Flip(), NORMALIZE], "error"),
        ([T.CenterCrop(24), NORMALIZE, Flip(), T.RandomErasing(1.0), T.MixUp(num_classes=3)], "error"),
        ([T.Grayscale(), Flip(), T.CenterCrop(24)], "error"),
        ([T.RandomApply([Flip(), T.RandomInvert(0.5)]), T.RandomCrop(20), NORMALIZE], "error"),
        ([T.RandomOrder([T.RandomRotation(30), Flip(), T.RandomInvert()]), T.CenterCrop(20), TO_FLOAT], "error"),
        ([T.CenterCrop(24), NORMALIZE, T.RandomApply([Flip()], p=0.6)], "error"),
        ([T.CenterCrop(24), T.RandomChoice([Flip(), T.Identity()])], "error"),
    ],
)
def test_custom_flip_equals_the_built_in_flip(make_images, run_stage, transforms, ragged, runner):
    def with_built_in_flips(transform):
        if isinstance(transform, Flip):
            return BuiltInFlip(0.5)
        if transform.children:
            p = {} if getattr(transform, "p", None) is None else {"p": transform.p}
            return type(transform)([with_built_in_flips(child) for child in transform.children], **p)
        return transform

    results, expected_results = (
        run_stage(chain, make_images(1, 9), ragged=ragged, runner=runner)
        for chain in (transforms, [with_built_in_flips(transform) for transform in transforms])
    )
    for result, expected in zip(results, expected_results, strict=True):
        # After floats of a custom transform, Normalize is applied to the finished batch.
        torch.testing.assert_close(result, expected, rtol=0, atol=3e-6 if result.is_floating_point() else 0)


@pytest.mark.parametrize("options", [{}, {"memory_format": "channels_last"}, {"dtype": "float16"}])
@pytest.mark.parametrize("custom", [Gain(), ColourCast(0.5)])
@pytest.mark.parametrize("is_float", [False, True])
def test_custom_apply_gets_its_params_and_levels_or_floats(make_images, make_batch, custom, is_float, options):
    images = make_images(2, 7)
    level_transforms = [T.Resize((21, 30)), *([TO_FLOAT] if is_float else [])]
    chain, stage = compile_chain([*level_transforms, custom, NORMALIZE], **options)
    _, level_stage = compile_chain(level_transforms, **options)
    batch, draws = make_batch(chain, images)
    record = next(record for record in draws.records if record.name == type(custom).__name__)
    factor = torch.from_numpy(record.params["factor"] if isinstance(custom, Gain) else record.params).float()
    levels = level_stage(*make_batch(T.Chain(level_transforms), images)).float()
    levels = levels * factor.view(7, -1, 1, 1)
    if not is_float:
        levels = levels.round().clamp(0, 255) / 255
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (NORMALIZE.mean, NORMALIZE.std))
    result = stage(batch, draws)
    assert result.is_contiguous(memory_format=getattr(torch, options.get("memory_format", "contiguous_format")))
    assert result.dtype == (torch.float16 if options.get("dtype") else torch.float32)
    torch.testing.assert_close(
        result.float(), (levels - mean) / std, rtol=0, atol=8e-3 if options.get("dtype") else 3e-6
    )


def test_custom_bits_do_not_depend_on_the_batch(make_images, run_stage):
    images = make_images(3, 8)
    transforms = [T.Resize((30, 40)), ColourCast(0.3), T.RandomApply([GridMask(4, 9)]), NORMALIZE]
    expected = run_stage(transforms, images)
    for first, count in ((0, 1), (1, 3), (4, 4)):
        result = run_stage(transforms, images[first : first + count], first=first)
        assert torch.equal(result, expected[first : first + count])


def test_custom_apply_on_the_cpu_gets_images_of_several_sizes_one_by_one(make_images, run_stage):
    images = [image for image in make_images(4, 3) for _ in range(2)]
    shapes = []

    class RecordShapes(T.Custom):
        def apply(self, images, params):
            shapes.append(tuple(images.shape))
            return images

    run_stage([RecordShapes(), T.CenterCrop(20)], images)
    assert shapes == [(1, 3, *image.shape[:2]) for image in images]


# -- masks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runner", ["single", "batched"])
@pytest.mark.parametrize(("dtype", "axes"), [("uint8", 2), ("int64", 3), ("bool", 2), ("float32", 3)])
@pytest.mark.parametrize("resize", [T.Resize(20), T.Resize((20, 24))])
def test_masks_move_with_a_custom_flip(make_batch, runner, dtype, axes, resize):
    channels = 1 if axes == 2 else 2
    masks = [np.random.default_rng(n).integers(0, 2, (30 + n, 40, channels)).astype(dtype) for n in range(5)]
    levels = [np.ascontiguousarray(mask).view(np.uint8).reshape(*mask.shape[:2], -1) for mask in masks]
    stage = MaskStage(torch.device("cpu"), runner)
    masks_moved, expected = (
        stage(*make_batch(T.Chain([flip, resize, flip, NORMALIZE]), levels), [(dtype, axes)] * 5)[0]
        for flip in (Flip(), BuiltInFlip())
    )
    for mask, expected_mask in zip(masks_moved, expected, strict=True):
        assert mask.dtype == getattr(torch, dtype)
        assert torch.equal(mask, expected_mask)
        assert not torch.equal(mask, mask.flip(-1)), "the mask is symmetric, so a flip would not be noticed"


# -- results and errors ---------------------------------------------------------------------------------------------


def returning(function):
    class Returning(T.Custom):
        def apply(self, images, params):
            return function(images)

    return Returning()


LEVELS_ERROR = "(transform number 2) was given uint8 of shape (3, 3, 8, 8) and returned"
AT_THE_END_ERROR = "at the end of the transforms was called with 3 images and returned"


@pytest.mark.parametrize(
    ("transforms", "error", "text"),
    [
        ([returning(lambda images: None), NORMALIZE], TypeError,
         f"Returning.apply {LEVELS_ERROR} None; it must return a tensor of the same shape and dtype"),
        ([returning(lambda images: images[:1]), NORMALIZE], ValueError, f"{LEVELS_ERROR} uint8 of shape (1, 3, 8, 8)"),
        ([returning(lambda images: images / 2), NORMALIZE], ValueError,
         "returned float32 of shape (3, 3, 8, 8); it must return a tensor of the same shape and dtype: images are "
         "uint8 at that point (0 to 255). Convert the result with .round().clamp(0, 255).to(torch.uint8), set "),
        ([NORMALIZE, returning(lambda images: images.int())], ValueError,
         "Returning.apply (transform number 3) was given float32 of shape (3, 3, 8, 8) and returned int32"),
        ([T.Lambda(lambda image: image[0], per="image"), NORMALIZE], ValueError,
         "Lambda(<lambda>) (transform number 2) was given uint8 of shape (3, 8, 8) and returned uint8 of shape (8, "),
        ([T.Lambda(list), NORMALIZE], TypeError, f"Lambda(list) {LEVELS_ERROR} list; it"),
        ([T.Lambda(lambda images: None)], ValueError,
         f"Lambda(<lambda>) {AT_THE_END_ERROR} None; it must return a tensor whose first axis has one entry per imag"),
        ([torch.nn.Flatten(0, 1)], ValueError, f"the module Flatten {AT_THE_END_ERROR} shape (9, 8, 8)"),
        ([T.Lambda(list), torch.nn.Identity()], ValueError, f"Lambda(list) {AT_THE_END_ERROR} list; it must return a"),
    ],
)  # fmt: skip
def test_user_code_that_returns_a_wrong_shape_or_type_raises(make_images, make_batch, transforms, error, text):
    with pytest.raises(error, match=re.escape(text)):
        run_to_the_end(make_images, make_batch, [T.CenterCrop(8), *transforms])


def test_batch_lambda_on_images_of_several_sizes_raises(make_images, run_stage):
    text = "Lambda(<lambda>) takes a batch, so all images must have the same size, but there are "
    with pytest.raises(ValueError, match=re.escape(text)):
        run_stage([T.Lambda(lambda images: images), T.CenterCrop(8)], make_images(5, 3))
    text = "with Lambda(abs) at the end of the transforms, which needs one tensor per batch; omit ragged, or use T.L"
    with pytest.raises(ValueError, match=re.escape(text)):
        compile_chain([T.Lambda(abs)], ragged="list")


class TakesFloats(torch.nn.Module):
    """A module that checks its input as Kornia's modules do."""

    def forward(self, images):
        if not images.is_floating_point():
            raise TypeError(f"Expected input of [torch.float32]. Got {images.dtype}")
        return images


UINT8_NOTE = (
    "was called with uint8 images of shape (3, 3, 8, 8); for floats in 0 … 1 put ToDtype('float32', scale=True) before "
    "it"
)


@pytest.mark.parametrize("transforms", [[], [T.RandomHorizontalFlip()]], ids=["last", "within"])
@pytest.mark.parametrize(
    ("module", "message"),
    [
        (TakesFloats(), "Expected input of [torch.float32]. Got torch.uint8"),
        (torch.nn.Conv2d(3, 3, 1), "Input type (unsigned char)"),
        (T.Lambda(torch.nn.functional.gelu), "not implemented for 'Byte'"),
    ],
    ids=["Kornia", "convolution", "activation"],
)
def test_module_error_about_uint8_begins_with_the_remedy(make_images, make_batch, transforms, module, message):
    with pytest.raises((TypeError, RuntimeError), match=f"{re.escape(UINT8_NOTE)}: .*{re.escape(message)}") as caught:
        run_to_the_end(make_images, make_batch, [T.CenterCrop(8), module, *transforms])
    assert not hasattr(caught.value, "__notes__")


DATA_KEYS_NOTE = (
    "the module AugmentationSequential was called with float32 images of shape (3, 3, 8, 8) and nothing else, since a "
    "module in a chain gets only the images; create it with data_keys=['input'], and move masks, boxes and keypoints "
    "with gpuload's transforms: "
)
CHANNELS_NOTE = (
    "the module ColorJitter was called with float32 images of shape (3, 1, 8, 8); for three channels put "
    "Grayscale(3) before ToDtype: Input size must have a shape of (*, 3, H, W)"
)


@pytest.mark.parametrize(
    ("level_transforms", "name", "arguments", "note", "message"),
    [
        ([], "AugmentationSequential", {"data_keys": ["input", "mask"]}, DATA_KEYS_NOTE, "number of inputs must align"),
        ([], "AugmentationSequential", {"data_keys": None}, DATA_KEYS_NOTE, "needs data keys"),
        ([T.Grayscale()], "ColorJitter", {"hue": 0.1, "p": 1.0}, CHANNELS_NOTE, ""),
    ],
)
def test_kornia_error_about_data_keys_or_channels_begins_with_the_remedy(
    make_images, make_batch, level_transforms, name, arguments, note, message
):
    from kornia import augmentation as K

    module = getattr(K, name)(*[K.RandomHorizontalFlip()] * ("data_keys" in arguments), **arguments)
    with pytest.raises((AssertionError, ValueError), match=f"{re.escape(note)}.*{message}"):
        run_to_the_end(make_images, make_batch, [T.CenterCrop(8), *level_transforms, TO_FLOAT, module])


def test_error_without_a_known_remedy_keeps_its_message_and_gets_a_note(make_images, make_batch):
    def fail(images):
        raise ValueError("no such color")

    with pytest.raises(ValueError, match="no such color") as caught:
        run_to_the_end(make_images, make_batch, [T.CenterCrop(8), T.Lambda(fail)])
    assert str(caught.value) == "no such color"
    assert caught.value.__notes__ == [f"Lambda(fail) {UINT8_NOTE}"]


def test_custom_without_apply_raises_not_implemented_error():
    with pytest.raises(NotImplementedError, match=re.escape("Custom has no apply(self, images, params)")):
        T.Custom()(np.zeros((4, 4, 3), np.uint8))


# -- functions and modules ------------------------------------------------------------------------------------------


class AddNoise(torch.nn.Module):
    """A module that adds a random number to each image, and stores the numbers of each call."""

    def __init__(self):
        super().__init__()
        self.numbers = []

    def forward(self, images):
        numbers = torch.randn(len(images), 1, 1, 1, device=images.device)
        self.numbers.append(numbers.flatten().tolist())
        return images + numbers


def test_module_in_mid_chain_is_applied_before_normalize_and_mixup(make_images, make_batch, run_stage):
    images = make_images(6, 4)
    transforms = [T.CenterCrop(16), TO_FLOAT, torch.nn.Hardtanh(0.25, 0.75), NORMALIZE, T.MixUp(num_classes=3)]
    chain, stage = compile_chain(transforms)
    batch, draws = make_batch(chain, images)
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (NORMALIZE.mean, NORMALIZE.std))
    expected = (run_stage([T.CenterCrop(16), TO_FLOAT], images).clamp(0.25, 0.75) - mean) / std
    share = torch.from_numpy(draws.mix.share).float()[:, None, None, None]
    expected = share * expected + (1 - share) * expected[[1, 0, 3, 2]]
    torch.testing.assert_close(stage(batch, draws), expected, rtol=0, atol=1e-5)


def test_batch_lambda_at_the_end_may_change_shape_and_dtype(make_images, make_batch):
    transforms = [T.CenterCrop(16), T.Lambda(lambda images: images[:, :1, ::2].double())]
    result = run_to_the_end(make_images, make_batch, transforms)
    assert result.shape == (3, 1, 8, 16)
    assert result.dtype == torch.float64


def test_image_lambda_draws_the_same_in_any_batch_and_restores_generators(make_images, run_stage):
    images = make_images(7, 6)
    noise = T.Lambda(lambda image: image + torch.randn(image.shape), per="image")
    transforms = [T.CenterCrop(16), NORMALIZE, noise, Flip()]
    torch.manual_seed(1)
    generator_state = torch.get_rng_state()
    expected = run_stage(transforms, images)
    assert torch.equal(torch.get_rng_state(), generator_state)
    torch.manual_seed(2)
    assert torch.equal(run_stage(transforms, images[2:5], first=2), expected[2:5])
    pair, later = run_stage(transforms[:3], [images[0]] * 2), run_stage(transforms[:3], images[:1], first=6)
    for image, other_image in ((pair[0], pair[1]), (pair[0], later[0]), (pair[1], later[0])):
        assert not torch.equal(image, other_image), "images at other positions must draw other numbers"


def test_modules_at_the_end_draw_different_numbers(make_images, make_batch):
    modules = [AddNoise(), AddNoise(), AddNoise()]
    chain, stage = compile_chain([T.CenterCrop(16), NORMALIZE, *modules])
    for _ in range(2):
        stage.call_modules(stage(*make_batch(chain, make_images(7, 6))), [7, 8, 9])
    for module in modules:
        first_call, second_call = module.numbers
        assert first_call == second_call
    assert len({tuple(module.numbers[0]) for module in modules}) == 3


def test_replay_shows_the_params_of_a_custom_transform():
    sample = np.zeros((20, 20, 3), np.uint8)
    with gl.Loader([sample] * 4, batch_size=2, transforms=[T.RandomVerticalFlip(), Gain()], device="cpu") as loader:
        (_, _), (name, description) = loader.replay(0, 2).draws
    assert name == "Gain"
    assert 0.5 < description["params"]["factor"] < 1.5


def test_plan_shows_custom_transforms_modules_and_lambdas():
    transforms = [T.Resize((8, 8)), Gain(), torch.nn.ReLU(), NORMALIZE, GridMask(), T.Lambda(abs)]
    _, stage = compile_chain(transforms, backend="kornia")
    plan = stage.plan
    assert [step.backend for step in plan.steps] == ["kornia", "own", "own", "torch", "own"]
    assert plan.steps[3].reason == "combined with the module torch's ReLU before it"
    assert re.search(r"Lambda\(abs\) +own +applied to the finished batch", str(plan))


@pytest.mark.interpreter
def test_fused_chains_are_split_at_custom_transforms(make_images, make_batch):
    levels = [T.RandomCrop(8), Flip(), T.RandomInvert(), ColourCast()]
    chain = T.Chain([*levels, TO_FLOAT, GridMask(3, 9), NORMALIZE, Flip()])
    batch = make_batch(chain, make_images(2, 2))
    fused = compile_stage(chain, device="cpu", backend="fused")
    backends = ["fused", "own", "fused", "own", "torch", "own", "torch", "own"]
    assert [step.backend for step in fused.plan.steps] == backends
    assert torch.equal(fused(*batch), compile_stage(chain, device="cpu")(*batch))


# -- through a loader -----------------------------------------------------------------------------------------------


SMALL_IMAGES = [(gl.Image(np.random.default_rng(n).integers(0, 256, (10, 12 + n, 3), np.uint8)), n) for n in range(5)]


def assert_same_batches(make_loader):
    """Check that batches are the same with any number of workers, and after a resume; return their images."""
    with make_loader(0) as loader:
        expected = [images for images, _ in loader]
    for workers in (1, 2, 4):
        with make_loader(workers) as loader:
            batches = iter(loader)
            first_images, _ = next(batches)
            state = loader.state_dict()
            results = [first_images, *(images for images, _ in batches)]
            torch.testing.assert_close(results, expected, rtol=0, atol=0)
    with make_loader(0) as loader:
        loader.load_state_dict(state)
        torch.testing.assert_close([images for images, _ in loader], expected[1:], rtol=0, atol=0)
    return expected


@pytest.mark.usefixtures("warm")
@pytest.mark.processes
@pytest.mark.interpreter
@pytest.mark.parametrize("backend", ["torch", "fused"])
def test_documented_example_gives_the_same_batches_with_any_workers_and_after_a_resume(backend):
    crop = T.RandomCrop(8) if backend == "fused" else T.RandomResizedCrop(8)  # Triton's interpreter resizes slowly
    chain = [crop, T.RandomHorizontalFlip(), ColourCast(0.3), T.RandomApply([GridMask(3, 9)], 0.7), NORMALIZE]
    options = {"shuffle": True, "transforms": chain, "backend": backend, "device": "cpu"}
    assert_same_batches(lambda workers: gl.Loader(SMALL_IMAGES, 2, num_workers=workers, **options))


IMAGE = np.full((40, 60, 3), 200, np.uint8)


def test_documented_example_blacks_out_the_same_pixels_of_image_and_mask():
    samples, transforms = [(IMAGE, gl.Mask(IMAGE[..., 0]))] * 8, [T.RandomHorizontalFlip(), GridMask(4, 12)]
    with gl.Loader(samples, 4, transforms=transforms, **ON_CPU) as loader:
        for images, masks in loader:
            assert torch.equal(images[:, 0], masks)
            assert set(masks.unique().tolist()) == {0, 200}


TARGETS = {
    "masks": (IMAGE, gl.Mask(IMAGE[..., 0])),
    "boxes": (IMAGE, {"boxes": gl.Boxes([[1, 1, 3, 3]], "xyxy"), "labels": np.array([1])}),
    "keypoints": (IMAGE, gl.Keypoints([[1, 1]])),
}


def load_batches(kind, transforms):
    with gl.Loader([TARGETS[kind]] * 4, 2, transforms=[*transforms, NORMALIZE], **ON_CPU) as loader:
        return list(loader)


@pytest.mark.parametrize("kind", TARGETS)
def test_custom_without_a_method_for_a_target_warns_once(kind):
    text = (
        f"Gain has no apply_{kind}, so {kind} are not moved. If it moves pixels, write this method; if not, set "
        "moves_pixels = False in its class"
    )
    with pytest.warns(RuntimeWarning, match=re.escape(text)) as caught:
        assert len(load_batches(kind, [T.RandomApply([Gain()], 0.5)])) == 2
    assert len(caught) == 1
    load_batches(kind, [ColourCast()])  # has moves_pixels = False, so it does not warn
    text = "the module torch's ReLU gets only the images; masks, boxes and keypoints are not moved."
    with pytest.warns(RuntimeWarning, match=re.escape(text)):
        load_batches(kind, [torch.nn.ReLU()])


def test_custom_that_moves_pixels_without_a_method_for_a_target_raises():
    load_batches("masks", [Flip()])
    text = "Flip moves pixels (moves_pixels = True) but has no apply_boxes, which boxes need; write this method, or"
    with pytest.raises(ValueError, match=re.escape(text)):
        load_batches("boxes", [Flip()])


# -- modules at the end ---------------------------------------------------------------------------------------------

NORMALIZE_HALF = T.Normalize([0.5] * 3, [0.5] * 3)


def test_apply_module_seeds_the_generators_and_restores_them_even_after_an_error():
    batch = torch.zeros(4, 3, 2, 2)
    torch.manual_seed(5)
    generator_state = torch.get_rng_state()
    result = apply_module(AddNoise(), batch, 7)
    assert torch.equal(torch.get_rng_state(), generator_state)
    torch.rand(3)
    assert torch.equal(apply_module(AddNoise(), batch, 7), result)
    assert not torch.equal(apply_module(AddNoise(), batch, 8), result)
    generator_state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="unflatten"):
        apply_module(torch.nn.Sequential(AddNoise(), torch.nn.Unflatten(1, (2, 2))), batch, 7)
    assert torch.equal(torch.get_rng_state(), generator_state)


def test_apply_module_with_parameters_is_differentiable():
    module = torch.nn.Conv2d(3, 3, 1)
    with torch.no_grad():
        result = apply_module(module, torch.ones(2, 3, 4, 4), 0)
    result.sum().backward()
    assert module.weight.grad is not None
    module.requires_grad_(False)
    assert not apply_module(module, torch.ones(2, 3, 4, 4), 0).requires_grad


def noise_of(*transforms_after):
    """Return the numbers that a module adds to the first batch if it is followed by the given transforms."""
    module = AddNoise()
    transforms = [T.RandomCrop(8), NORMALIZE_HALF, module, *transforms_after]
    with gl.Loader(SMALL_IMAGES, 4, transforms=transforms, **ON_CPU) as loader:
        next(iter(loader))
    return module.numbers[0]


def test_module_draws_do_not_depend_on_the_transforms_after_it():
    expected = noise_of(T.RandomVerticalFlip(0.0))
    assert noise_of(torch.nn.Identity()) == expected
    assert noise_of(T.Lambda(torch.neg), AddNoise()) == expected


def make_kornia_modules():
    from kornia import augmentation as K

    return [K.RandomResizedCrop((20, 18)), K.RandomHorizontalFlip(), K.Normalize(torch.zeros(3), torch.full((3,), 0.5))]


@pytest.mark.usefixtures("warm")
@pytest.mark.processes
@pytest.mark.parametrize("backend", ["torch", "kornia"])
def test_modules_at_the_end_run_in_order_and_may_change_the_size(jpeg_folder, backend):
    """The loader's batches equal those of modules that the test calls, with any workers and after a resume."""
    transforms = [T.RandomResizedCrop(24), TO_FLOAT, *make_kornia_modules()]

    def make_loader(workers, transforms=transforms):
        torch.manual_seed(workers)
        random.seed(workers)
        options = {"transforms": transforms, "backend": backend, "shuffle": True, "seed": 3, "device": "cpu"}
        return gl.Loader(gl.ImageFolder(jpeg_folder), 8, num_workers=workers, **options)

    with make_loader(0, transforms[:2]) as loader:
        expected, _ = next(iter(loader))
    lanes, key, position = T.Chain(transforms).module_lanes[0], epoch_key(3, 0), np.array([0])
    for lane, module in zip(lanes, make_kornia_modules(), strict=True):
        expected = apply_module(module, expected, int(uniforms(key, position, lane, 1)[0, 0] * 2**32))
    assert expected.shape == (8, 3, 20, 18)
    assert torch.equal(assert_same_batches(make_loader)[0], expected)


def test_plan_has_a_row_for_each_module_at_the_end():
    plan = compile_stage(T.Chain([TO_FLOAT, *make_kornia_modules(), T.Lambda(torch.neg)]), device="cpu").plan
    assert plan.modules == ("RandomResizedCrop", "RandomHorizontalFlip", "Normalize", "Lambda(neg)")
    rows = [line.split()[:2] for line in str(plan).splitlines()[2:]]
    assert rows == [[name, "own" if name.startswith("Lambda") else "module"] for name in plan.modules]
    for name in plan.modules:
        assert f'<td style="text-align: left">{name}</td>' in plan._repr_html_()


def test_modules_at_the_end_draw_the_same_in_augment_for_batches_and_for_clips():
    modules = [AddNoise(), T.Lambda(lambda images: images[..., ::2]), AddNoise()]
    transforms = [T.RandomHorizontalFlip(), NORMALIZE_HALF, *modules]
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (4, 3, 10, 12), np.uint8))
    samples = [gl.Image(image.permute(1, 2, 0).numpy()) for image in images]
    with gl.Loader(samples, 4, transforms=transforms, num_workers=0, device="cpu") as loader:
        [expected] = loader
    assert expected.shape == (4, 3, 10, 6)
    assert torch.equal(gl.Augment(transforms)(images), expected)
    clips = torch.stack([images, images], 1)
    assert torch.equal(gl.Augment(transforms)(clips), torch.stack([expected, expected], 1))


def test_module_draws_different_numbers_for_each_view(jpeg_folder):
    views = T.MultiView([[T.CenterCrop(24)], [T.CenterCrop(24)]])
    with gl.Loader(gl.ImageFolder(jpeg_folder), 8, transforms=[views, NORMALIZE_HALF, AddNoise()], **ON_CPU) as loader:
        (first_view, second_view), _ = next(iter(loader))
    assert not torch.equal(first_view, second_view)


class Shifted(torch.nn.Module):
    __module__ = "kornia.augmentation"

    def forward(self, batch):
        return batch.roll(1, -1)


def make_loader_with_targets(sample, modules, **options):
    return gl.Loader([sample] * 4, 2, transforms=[NORMALIZE_HALF, *modules], **ON_CPU, **options)


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("collate_fn", [None, list])
def test_modules_with_unmoved_targets_warn_once_and_are_named(kind, collate_fn):
    text = "at the end of the transforms gets only the images; masks, boxes and keypoints are not moved. If it moves "
    modules = [Shifted(), T.Lambda(torch.neg)]
    with make_loader_with_targets(TARGETS[kind], modules, collate_fn=collate_fn) as loader:
        with pytest.warns(RuntimeWarning) as caught:
            assert len(list(loader)) == 2
        [warning] = caught
        for module in ("the module kornia's Shifted", "Lambda(neg)"):
            assert f"{module} {text}pixels, use gpuload's transforms instead, which move both" in str(warning.message)
        assert warning.filename == __file__
        list(loader)  # in a second epoch, a warning would be an error


def test_warning_about_unmoved_targets_as_an_error_loses_no_batch():
    with make_loader_with_targets(TARGETS["masks"], [Shifted()]) as loader:
        batches = iter(loader)
        with pytest.raises(RuntimeWarning, match="gets only the images"):
            next(batches)
        assert len(list(batches)) == 2


@pytest.mark.parametrize(("sample", "modules"), [((IMAGE, 3), [Shifted()]), (TARGETS["masks"], [])])
def test_module_without_targets_and_targets_without_a_module_do_not_warn(sample, modules):
    with make_loader_with_targets(sample, modules) as loader:
        assert len(list(loader)) == 2
