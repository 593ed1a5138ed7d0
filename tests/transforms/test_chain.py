"""Chains check their order, are pickled for workers, draw the same for a sample in any batch, and compute regions."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest
import torch
from helpers.programs import run_python
from transforms.drawing import KEY, NORMALIZE, TO_FLOAT

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.transforms.base import DrawError


class KorniaModule(torch.nn.Module):
    __module__ = "kornia.augmentation"


def random_sizes(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(40, 300, (count, 2))


@pytest.mark.parametrize(
    ("transforms", "text"),
    [
        ([NORMALIZE, T.CenterCrop(8), NORMALIZE],
         "transforms in an impossible order: CenterCrop (number 2) cannot come after Normalize (number 1), since it "
         "takes uint8 or float images but gets normalized images; put CenterCrop before Normalize"),
        ([NORMALIZE, T.RandomHorizontalFlip(), NORMALIZE],
         "Normalize (number 3) cannot come after Normalize (number 1), since it takes uint8 or float images but "
         "gets normalized images; leave one of them out"),
        ([NORMALIZE, T.ColorJitter(0.1)], "ColorJitter (number 2) cannot come after Normalize (number 1)"),
        ([T.ToDtype("float32"), T.ToDtype("float16")], "gets float images; leave one of them out"),
        ([T.ToDtype("float32"), KorniaModule(), T.CenterCrop(8)],
         "CenterCrop (number 3) cannot come after the module kornia's KorniaModule (number 2), which works on "
         "images of the final type; put CenterCrop before the module kornia's KorniaModule"),
        ([T.ToDtype("float32"), T.Lambda(abs), T.CenterCrop(8)], "cannot come after Lambda(abs) (number 2), which"),
    ],
)  # fmt: skip
def test_chain_refuses_transforms_in_an_impossible_order(transforms, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        T.Chain(transforms)


@pytest.mark.parametrize(
    ("transforms", "text"),
    [
        (T.CenterCrop(8), "transforms must be a list, got a single CenterCrop; write [CenterCrop(size=(8, 8))]"),
        (3, "transforms must be a list of transforms, got int"),
        ({"image": T.CenterCrop(8)},
         "transforms must be a list in the order of application, got a dict: {'image': CenterCrop(size=(8, 8))}; "
         "pass one list, which applies to all images of a sample"),
        ({T.CenterCrop(8)}, "got a set: {CenterCrop(size=(8, 8))}; pass one list"),
        ("crop", "got a str: 'crop'; pass one list"),
        (len, "got builtin_function_or_method; write [T.Lambda(len)] to call it with a batch"),
        ([T.CenterCrop], "transforms[0] is the class CenterCrop; write CenterCrop(…)"),
        ([T.CenterCrop(8), len],
         "transforms[1] is not a gpuload transform: got <built-in function len> (builtin_function_or_method); use a "
         "transform of gpuload.transforms or a torch nn.Module, or T.Lambda(len) to call it with a batch"),
        ([[T.CenterCrop(8)], T.Resize(8)],
         "transforms[0] is not a gpuload transform: got [CenterCrop(size=(8, 8))], a list in the list; unpack it "
         "with *, as in transforms=[*T.from_torchvision(…), …]"),
    ],
)  # fmt: skip
def test_chain_refuses_arguments_that_are_not_a_list_of_transforms(transforms, text):
    with pytest.raises(TypeError, match=re.escape(text)):
        T.Chain(transforms)


def torchvision_transform(name: str, base: type = torch.nn.Module, module: str = "torchvision.transforms.v2._any"):
    return type(name, (base,), {"__module__": module})()


@pytest.mark.parametrize("module", ["torchvision.transforms.v2._geometry", "torchvision.transforms.transforms"])
def test_chain_refuses_a_torchvision_transform_with_its_gpuload_name(module):
    crop = torchvision_transform("RandomCrop", module=module)
    text = "a torchvision transform; write gpuload.transforms.RandomCrop(…) if it exists, or convert"
    for transforms in ([crop], [T.Resize(8), crop]):
        with pytest.raises(TypeError, match=re.escape(text)):
            T.Chain(transforms)
    with pytest.raises(TypeError, match=re.escape("write *gpuload.transforms.from_torchvision(…) in its place")):
        T.Chain([T.Resize(8), torch.nn.Sequential(crop, torch.nn.Sequential(crop))])
    # A Sequential that also has modules of other libraries is accepted.
    own_and_torchvision = torch.nn.Sequential(crop, torch.nn.Identity())
    assert T.Chain([T.Resize(8), own_and_torchvision]).modules == (own_and_torchvision,)


@pytest.mark.parametrize("base", [torch.nn.Module, object])
def test_chain_refuses_torchvisions_compose_with_from_torchvision_as_the_remedy(base):
    compose = torchvision_transform("Compose", base)
    text = "a torchvision chain; write *gpuload.transforms.from_torchvision(…) in its place"
    with pytest.raises(TypeError, match=re.escape(text)):
        T.Chain([compose, T.Resize(8)])
    with pytest.raises(TypeError, match=re.escape("got torchvision's Compose; write transforms=T.from_torchvision(…)")):
        T.Chain(compose)
    with pytest.raises(TypeError, match="got torchvision's Sequential"):
        T.Chain(torch.nn.Sequential(torchvision_transform("RandomCrop")))


def test_modules_are_accepted_anywhere_in_a_chain():
    module = KorniaModule()
    chain = T.Chain([module, T.CenterCrop(8), torch.nn.Identity(), NORMALIZE, T.RandomApply([module]), module])
    assert [type(call).__name__ for call in chain.calls] == ["Lambda"] * 3
    assert chain.module_names == ("the module KorniaModule",)
    T.Chain([TO_FLOAT, module, T.RandomVerticalFlip(), NORMALIZE, T.MixUp(num_classes=2)])


def test_chain_accepts_flips_after_normalize_and_knows_its_output_size():
    chain = T.Chain([T.ToDtype("uint8", scale=True), T.CenterCrop(8), NORMALIZE, T.RandomVerticalFlip()])
    assert len(chain) == 4
    assert chain.output_size_hw == (8, 8)
    T.Chain([NORMALIZE, T.RandomChoice([T.RandomHorizontalFlip(), T.Identity()])])
    assert T.Chain(None).output_size_hw is None
    assert T.Chain([T.CenterCrop((20, 30)), T.Resize(10)]).output_size_hw == (10, 15)
    assert T.Chain([T.Resize(10)]).output_size_hw is None


def test_chains_are_compared_and_hashed_by_their_transforms():
    def make(size):
        return T.Chain([T.RandomResizedCrop(size), NORMALIZE])

    assert make(8) == make(8) != make(9)
    assert hash(make(8)) == hash(make(8))
    assert make(8).fingerprint() == make(8).fingerprint() != make(9).fingerprint()
    assert len(make(8).fingerprint()) == 16
    assert list(make(8)) == [T.RandomResizedCrop(8), NORMALIZE]
    assert make(8) != "chain"


def test_modules_at_the_end_are_stored_separately_and_not_pickled():
    identity, kornia_module = torch.nn.Identity(), KorniaModule()
    chain = T.Chain([T.CenterCrop(8), identity, T.Lambda(abs), kornia_module])
    assert chain.transforms == (T.CenterCrop(8),)
    assert chain.modules == (identity, abs, kornia_module)
    assert chain.module_names == ("the module Identity", "Lambda(abs)", "the module KorniaModule")
    assert chain == T.Chain(chain.entries)
    assert hash(chain) == hash(T.Chain(chain.entries))
    assert chain not in (
        T.Chain([T.CenterCrop(8), torch.nn.Identity(), T.Lambda(abs), kornia_module]),
        T.Chain([T.CenterCrop(8)]),
    )
    assert repr(chain) == "Chain([CenterCrop(size=(8, 8)), <module Identity>, Lambda(abs), <module KorniaModule>])"
    assert chain.fingerprint() != T.Chain([T.CenterCrop(8), identity, T.Lambda(min), kornia_module]).fingerprint()
    assert chain.fingerprint().endswith("-KorniaModule")
    assert T.Chain([T.Resize(8), kornia_module]).fingerprint() == f"{T.Chain([T.Resize(8)]).fingerprint()}-KorniaModule"
    assert pickle.loads(pickle.dumps(chain)) == T.Chain([T.CenterCrop(8)])
    assert T.Chain([identity, T.Lambda(abs, per="image"), kornia_module]).modules == (kornia_module,)


def test_in_workers_later_views_have_the_same_lanes_with_several_modules_at_the_end():
    views = T.MultiView([[T.RandomCrop(8)], [T.RandomCrop(8), T.RandomVerticalFlip()]])
    for modules in ([KorniaModule()], [KorniaModule(), T.Lambda(abs), KorniaModule()]):
        chain = T.Chain([T.RandomHorizontalFlip(), views, *modules])
        in_worker = pickle.loads(pickle.dumps(chain))
        assert in_worker.modules == ()
        for line, line_in_worker in zip(chain.lines, in_worker.lines, strict=True):
            assert line_in_worker.lanes[: len(line.lanes)] == line.lanes


@pytest.mark.processes
def test_pickled_chain_is_small_and_does_not_import_torch():
    chain = T.Chain([T.RandomResizedCrop(224, interpolation=2), T.ColorJitter(0.4), T.ToDtype(torch.float16, True)])
    data = pickle.dumps(chain, protocol=5)
    assert len(data) < 1000
    program = f"import pickle, sys; print(pickle.loads({data!r})); assert 'torch' not in sys.modules"
    output, _ = run_python(program)
    assert output == f"{chain!r}\n"


def test_sample_draws_the_same_in_any_batch():
    chain = T.Chain([
        T.Resize(200), T.RandomCrop(150, padding=4), T.RandomResizedCrop(64), T.RandomHorizontalFlip(),
        T.ColorJitter(0.4, 0.4, 0.4, 0.1), NORMALIZE,
    ])  # fmt: skip
    sizes, positions = random_sizes(40), np.arange(1000, 1040)
    program = chain.draw(KEY, positions, sizes)
    rows = np.array([31, 2, 17])
    alone = chain.draw(KEY, positions[rows], sizes[rows])
    for record, alone_record in zip(program.take(rows).records, alone.records, strict=True):
        assert type(record) is type(alone_record)
        for name in alone_record.__dataclass_fields__:
            np.testing.assert_array_equal(getattr(record, name), getattr(alone_record, name))
    np.testing.assert_array_equal(chain.regions(KEY, positions, sizes)[rows], alone.windows_tlhw[0])
    np.testing.assert_array_equal(program.results_hw, np.full((40, 2), 64))


def test_draws_differ_between_epochs_positions_and_transforms():
    chain = T.Chain([T.ColorJitter(0.4), T.ColorJitter(0.4)])
    sizes, positions = random_sizes(8), np.arange(8)
    program = chain.draw(KEY, positions, sizes)
    next_epoch = chain.draw(epoch_key(3, 2), positions, sizes)
    factors = np.concatenate([record.values[:, 0, :1] for record in (*program.records, next_epoch.records[0])])
    assert len(np.unique(factors)) == 24  # 8 samples × (2 transforms in one epoch + 1 in the next)


CROPS = [T.RandomResizedCrop(64), T.CenterCrop(60), T.RandomCrop((50, 40), pad_if_needed=True), T.RandomCrop(30, 9)]


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize(
    "transforms_before", [[], [T.Resize(90)], [T.RandomHorizontalFlip(), T.Resize((70, 80), "bicubic")]]
)
@pytest.mark.parametrize("transforms_after", [[], [T.ColorJitter(contrast=0.5)], [T.Resize(20), T.CenterCrop(15)]])
def test_regions_are_the_first_windows_of_the_program(crop, transforms_before, transforms_after):
    chain = T.Chain([*transforms_before, crop, *transforms_after])
    sizes, positions = random_sizes(30), np.arange(30)
    regions = chain.regions(KEY, positions, sizes)
    np.testing.assert_array_equal(regions, chain.draw(KEY, positions, sizes).windows_tlhw[0])
    assert (regions[:, :2] >= 0).all()
    assert (regions[:, 2:] > 0).all()
    assert (regions[:, :2] + regions[:, 2:] <= sizes).all()


@pytest.mark.parametrize(
    "transforms",
    [[], [T.RandomHorizontalFlip()], [T.Resize(30)], [NORMALIZE], [T.ColorJitter(contrast=0.5), T.CenterCrop(8)]],
)
def test_regions_without_a_crop_are_complete_images(transforms):
    sizes = random_sizes(5)
    regions = T.Chain(transforms).regions(KEY, np.arange(5), sizes)
    np.testing.assert_array_equal(regions, np.hstack([np.zeros_like(sizes), sizes]))


@pytest.mark.parametrize(
    ("transforms", "size_hw", "region_tlhw"),
    [
        ([T.ColorJitter(0.5), T.CenterCrop(8)], (20, 30), [6, 11, 8, 8]),
        ([T.Pad(10), T.CenterCrop(20)], (100, 80), [40, 30, 20, 20]),
        # Rows 50 … 149 of the resized image need rows 100 … 299, and the filter needs a few more on each side.
        ([T.Resize(200), T.CenterCrop(100)], (400, 600), [98, 198, 204, 204]),
        ([T.Resize(200, "bicubic"), T.CenterCrop(100)], (400, 600), [96, 196, 208, 208]),
    ],
)
def test_region_of_a_crop_after_a_transform_contains_only_the_pixels_needed(transforms, size_hw, region_tlhw):
    assert T.Chain(transforms).regions(KEY, np.arange(1), np.array([size_hw])).tolist() == [region_tlhw]


def test_random_crop_refuses_a_smaller_image_with_its_row():
    chain = T.Chain([T.RandomCrop((30, 50))])
    sizes = np.array([[60, 60], [60, 40], [10, 60]])
    text = (
        "RandomCrop(size=(30, 50)): the image of 60×40 (height × width) is smaller than the crop; use "
        "pad_if_needed=True, or put a Resize before it"
    )
    for method in (chain.draw, chain.regions):
        with pytest.raises(DrawError, match=re.escape(text)) as caught:
            method(KEY, np.arange(3), sizes)
        assert caught.value.row == 1
        assert pickle.loads(pickle.dumps(caught.value)).row == 1
    with pytest.raises(ValueError, match=re.escape("is smaller than the crop, even with its padding (24×24)")):
        T.Chain([T.RandomCrop(30, padding=2)]).draw(KEY, np.arange(1), np.array([[20, 20]]))


def test_draw_refuses_sizes_that_do_not_match_the_positions():
    with pytest.raises(ValueError, match=re.escape("must be of shape (B, 2) with B = 3 positions, got (2, 2)")):
        T.Chain([T.RandomCrop(3)]).draw(KEY, np.arange(3), random_sizes(2))


def test_equivalent_arguments_give_equal_fingerprints():
    assert T.Chain([T.RandomAffine(0)]).fingerprint() == T.Chain([T.RandomAffine((-0.0, 0))]).fingerprint()
    assert T.Chain([T.RandomAffine(1)]).fingerprint() != T.Chain([T.RandomAffine((0, 1))]).fingerprint()


CROP = T.RandomResizedCrop(24)


@pytest.mark.parametrize(
    ("transforms", "draws_crops"),
    [
        ([CROP, T.RandomHorizontalFlip(), T.ColorJitter(0.4)], False),
        ([T.RandomResizedCrop((20, 30), interpolation="random"), T.RandAugment()], False),
        ([CROP], False),
        # In these three chains, the region is not the box that the first transform drew.
        ([CROP, T.RandomHorizontalFlip(), T.CenterCrop(10)], True),
        ([T.RandomHorizontalFlip(), CROP], True),
        ([T.MultiView([[CROP], [CROP, T.RandomHorizontalFlip()]])], True),
        ([T.CenterCrop(20)], False),
    ],
)
def test_draw_reads_the_crop_from_the_regions_of_a_worker_if_they_are_its_boxes(transforms, draws_crops, monkeypatch):
    chain, positions = T.Chain(transforms), np.arange(40) * 3
    sizes = np.random.default_rng(0).integers(30, 90, (40, 2))
    key = epoch_key(0, 1)
    regions = chain.regions(key, positions, sizes)
    expected = [chain.draw(key, positions, sizes, view=view) for view in range(len(chain.lines))]
    crop_draws = []
    draw = T.RandomResizedCrop.draw
    monkeypatch.setattr(
        T.RandomResizedCrop, "draw", lambda self, *arguments: crop_draws.append(self) or draw(self, *arguments)
    )
    for view, program in enumerate(expected):
        result = chain.draw(key, positions, sizes, view=view, regions_tlhw=regions)
        assert result.results_hw.tolist() == program.results_hw.tolist()
        for record, expected_record in zip(result.records, program.records, strict=True):
            assert type(record) is type(expected_record)
            for name, value in vars(expected_record).items():
                np.testing.assert_array_equal(getattr(record, name), value, err_msg=name)
    assert bool(crop_draws) is draws_crops
