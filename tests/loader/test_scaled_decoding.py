"""Loaders with `Decode(scale="fast")`: images and targets differ by a few levels at most, and nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.generated_images import encode, jpeg_bytes

import gpuload as gl
from gpuload import transforms as T
from gpuload.ring.packing import ALIGN

HEIGHT, WIDTH = 603, 811
EXACT, FAST = gl.Decode(), gl.Decode(scale="fast")


def make_slopes() -> np.ndarray:
    """Return 603×811×3 pixels that rise evenly to the right, downwards, and to the left."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    return np.rint(255 * np.stack([x / WIDTH, y / HEIGHT, 1 - x / WIDTH], -1)).astype(np.uint8)


JPEG = jpeg_bytes(make_slopes(), quality=98)


@pytest.fixture
def always_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode images smaller wherever this is allowed, whatever it costs."""
    monkeypatch.setattr("gpuload.decode.scaled.SCALED_NS", -1e9)


PHOTOS = [(gl.Encoded(JPEG), index) for index in range(8)]
SCENE = {
    "image": gl.Encoded(JPEG),
    "mask": gl.Mask((make_slopes()[:, :, 0] // 16).astype(np.uint8)),
    "boxes": gl.Boxes(np.array([[100, 200, 500, 590], [300, 10, 800, 500]], np.float32)),
    "points": gl.Keypoints(np.array([[500.0, 400.0], [20.0, 590.0]], np.float32)),
}


def make_loader(dataset: Any, transforms: list[Any], decode: gl.Decode, **options: Any) -> gl.Loader:
    options = {"batch_size": 4, "num_workers": 0, "device": "cpu", "seed": 5, **options}
    return gl.Loader(dataset, transforms=transforms, decode=decode, **options)


def load_images(dataset: Any, transforms: list[Any], decode: gl.Decode, **options: Any) -> tuple[torch.Tensor, int]:
    """Return all images of an epoch, and how many were decoded smaller."""
    with make_loader(dataset, transforms, decode, **options) as loader:
        images = torch.cat([batch[0] for batch in loader])
        return images, loader.stats().decode.counts.get("scaled", 0)


def load_both(dataset: Any, transforms: list[Any], **options: Any) -> tuple[list[Any], list[int]]:
    """Return the first batches of exact and of fast decoding, and how many images each decoded smaller."""
    loaders = [make_loader(dataset, transforms, decode, **options) for decode in (EXACT, FAST)]
    batches = [next(iter(loader)) for loader in loaders]
    return batches, [loader.stats().decode.counts.get("scaled", 0) for loader in loaders]


CHAINS = {
    "crop": [T.RandomResizedCrop(32)],
    "crop, bicubic, flipped": [T.RandomResizedCrop(32, interpolation="bicubic"), T.RandomHorizontalFlip(0.5)],
    "resize to a square": [T.Resize((40, 40))],
    "resize, center crop": [T.Resize(48), T.CenterCrop(32)],
    "resize, crop with padding": [T.Resize((48, 60)), T.RandomCrop(56, padding=8, pad_if_needed=True)],
    "random size": [T.RandomResize(40, 60), T.CenterCrop(32)],
    "random filter": [T.RandomResizedCrop(32, interpolation="random")],
    "resize, contrast": [T.Resize((40, 40)), T.ColorJitter(contrast=0.5), T.RandomCrop(30)],
    "resize, rotation": [T.Resize((40, 40)), T.RandomRotation(30)],
    "mixed": [T.RandomResizedCrop(32), T.ToDtype("float32"), T.MixUp(num_classes=8)],
}


@pytest.mark.usefixtures("always_scale")
@pytest.mark.parametrize("name", CHAINS)
def test_scale_fast_changes_images_by_at_most_a_few_levels(name):
    exact, scaled_exact = load_images(PHOTOS, CHAINS[name], EXACT)
    fast, scaled = load_images(PHOTOS, CHAINS[name], FAST)
    assert scaled_exact == 0
    assert scaled == 8
    difference = fast.float() - exact.float()
    max_levels = 1.2 if "contrast" in name else 0.6  # contrast can amplify a difference
    assert difference.abs().mean() < max_levels
    assert difference.mean(dim=(2, 3)).abs().max() < max_levels, "an image is shifted"


@pytest.mark.usefixtures("always_scale")
def test_scale_fast_keeps_the_filter_of_the_transform():
    noise = np.random.default_rng(0).integers(0, 256, (HEIGHT // 9, WIDTH // 9, 3), np.uint8)
    file = jpeg_bytes(noise.repeat(9, 0).repeat(9, 1))
    images = {}
    for filter in ("bilinear", "lanczos"):
        for decode in (EXACT, FAST):
            chain = [T.Resize((40, 40), interpolation=filter)]
            image, _ = load_images([gl.Encoded(file)], chain, decode, batch_size=1)
            images[filter, decode] = image.float()
    for filter, other in (("bilinear", "lanczos"), ("lanczos", "bilinear")):
        same, different = ((images[filter, FAST] - images[name, EXACT]).abs().mean() for name in (filter, other))
        assert same < 0.6 * different, (same, different)


@pytest.mark.usefixtures("always_scale")
def test_scale_fast_of_combined_images_decodes_at_full_size():
    batches, scaled = load_both([SCENE] * 8, [T.Resize((32, 32)), T.Mosaic(32)], ragged="list")
    assert scaled == [0, 0]
    for exact, fast in zip(*batches, strict=True):
        assert torch.equal(exact["image"], fast["image"])


@pytest.mark.usefixtures("always_scale")
def test_scale_fast_moves_targets_as_exact_decoding_does():
    chain = [T.RandomResizedCrop(48), T.RandomHorizontalFlip(), T.ClampBoundingBoxes()]
    batches, scaled = load_both([SCENE] * 8, chain)
    assert scaled == [0, 4]
    for exact, fast in zip(*batches, strict=True):
        assert torch.equal(exact["mask"], fast["mask"])
        assert torch.equal(exact["boxes"], fast["boxes"])
        assert torch.equal(exact["points"], fast["points"])
        assert (fast["image"].float() - exact["image"].float()).abs().mean() < 1
        # The mask was made of the first channel of the image, so it shows where the image should be.
        difference = fast["image"][0].float() / 16 - fast["mask"].float()
        assert (difference.mean() - 0.5).abs() < 0.1


def mixed_files() -> list[Any]:
    """Return two samples of each kind of one picture: a JPEG that can be decoded smaller, other files, and an array."""
    slopes = make_slopes()
    files = [JPEG, encode(slopes, "PNG", quality=98), encode(slopes, "JPEG", "CMYK", quality=98)]
    files += [encode(slopes, "WEBP", quality=98), jpeg_bytes(slopes[:60, :70], quality=98)]
    return [(image, index) for index, image in enumerate([*map(gl.Encoded, files), gl.Image(slopes)] * 2)]


@pytest.mark.usefixtures("always_scale")
def test_scale_fast_decodes_only_large_rgb_jpegs_smaller():
    chain = [T.RandomResizedCrop(32)]
    (exact, _), (fast, scaled) = (load_images(mixed_files(), chain, decode) for decode in (EXACT, FAST))
    kinds = np.arange(12) % 6
    assert scaled == 2, "the first kind; the last JPEG is too small"
    assert torch.equal(fast[kinds != 0], exact[kinds != 0])
    assert not torch.equal(fast[kinds == 0], exact[kinds == 0])


@pytest.mark.usefixtures("always_scale")
@pytest.mark.parametrize(("chain", "reason"), [
    ([T.RandomHorizontalFlip(), T.Resize((32, 32))], "RandomHorizontalFlip changes pixels before any resize"),
    ([T.CenterCrop(32)], "CenterCrop changes pixels before any resize"),
    ([T.RandomApply([T.Resize((32, 32))], 0.5), T.Resize((32, 32))], "RandomApply changes pixels before any resize"),
    ([T.Resize((32, 32), "nearest")], "Resize samples single pixels (nearest)"),
    ([T.Resize((32, 32), antialias=False)], "Resize samples single pixels (plain bilinear)"),
    ([T.MultiView([[T.RandomResizedCrop(32)], [T.RandomResizedCrop(32)]])], "several views use one image"),
    ([T.Resize((32, 32)), T.Mosaic(32)], "images of several samples are combined"),
    ([T.Normalize([0.5], [0.5])], "no transform resizes"),
])  # fmt: skip
def test_scale_fast_without_a_resize_first_decodes_at_full_size_and_says_why(chain, reason):
    loader = make_loader(PHOTOS, chain, FAST)
    assert str(loader.plan()).splitlines()[-1] == f"decode scale='fast': all images at full size, since {reason}"
    if "no transform" not in reason and "combined" not in reason:
        batches, scaled = load_both(PHOTOS, chain)
        assert scaled == [0, 0]
        images = [batch[0] if isinstance(batch[0], list) else [batch[0]] for batch in batches]
        assert all(map(torch.equal, *images))


def test_plan_says_where_scale_fast_decodes_smaller():
    fast = "decode scale='fast': JPEGs at 1/2, 1/4 or 1/8 of their size where that costs less, else at full size"
    chain = [T.RandomResizedCrop(32), T.Normalize([0.5], [0.5])]
    plan = make_loader(PHOTOS, chain, FAST).plan()
    assert str(plan).splitlines()[-1] == fast
    assert plan._repr_html_().endswith("<p>decode scale=&#x27;fast&#x27;: JPEGs at 1/2, 1/4 or 1/8 of their size "
                                       "where that costs less, else at full size</p>")  # fmt: skip
    assert "scale" not in str(make_loader(PHOTOS, chain, EXACT).plan())


def test_scale_fast_gives_equal_bits_with_any_workers_chunks_and_resuming():
    chain, options = [T.RandomResizedCrop(32), T.RandomHorizontalFlip()], {"shuffle": True}
    expected, scaled = load_images(PHOTOS, chain, FAST, **options)
    with make_loader(PHOTOS, chain, FAST, **options, num_workers=2, chunk_size=3) as with_workers:
        batches = [batch[0] for batch in with_workers]
        assert with_workers.stats().decode.counts["scaled"] == scaled > 1
    assert torch.equal(torch.cat(batches), expected)
    interrupted = make_loader(PHOTOS, chain, FAST, **options)
    next(iter(interrupted))
    resumed = make_loader(PHOTOS, chain, FAST, **options, batch_size=8)
    resumed.load_state_dict(interrupted.state_dict())
    assert torch.equal(next(iter(resumed))[0], expected[4:])


def test_scale_fast_decodes_into_slots_of_the_result_size():
    decoded_bytes = {}
    for decode in (EXACT, FAST):
        loader = make_loader(PHOTOS, [T.Resize((32, 32))], decode)
        list(loader)
        decoded_bytes[decode] = loader.stats().decode.bytes
    assert decoded_bytes[EXACT] == 8 * HEIGHT * WIDTH * 3 + 8 * (-HEIGHT * WIDTH * 3 % ALIGN)
    assert decoded_bytes[FAST] == 8 * 32 * 32 * 3


def test_scale_fast_reports_damage_as_exact_decoding_does():
    files = [JPEG[: len(JPEG) // 3] if index == 5 else JPEG for index in range(8)]
    damaged = [(gl.Encoded(file, source=f"{index}.jpg"), index) for index, file in enumerate(files)]
    errors = []
    for decode in (EXACT, FAST):
        loader = make_loader(damaged, [T.Resize((32, 32))], decode, faults=gl.Faults(on_error="skip"))
        with pytest.warns(RuntimeWarning, match="sample 5"):
            assert sum(len(batch[0]) for batch in loader) == 7
        errors.append([(record.source, record.cause) for record in loader.errors])
    assert errors[0] == errors[1]
    [(source, _)] = errors[0]
    assert source == "5.jpg"
