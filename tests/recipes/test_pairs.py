"""Draws for each image of a sample: ``draws=`` of images and targets, in a Loader and in `gl.Augment`."""

from __future__ import annotations

import itertools
import json
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
from helpers.generated_images import encode, jpeg_bytes, smooth_image
from helpers.map_datasets import MapDataset
from helpers.peers import torchvision

import gpuload as gl
from gpuload import transforms as T

SAMPLES = 12
HEIGHT, WIDTH = 24, 32
GEOMETRY = (T.RandomResizedCrop(16, scale=(0.2, 0.6)), T.RandomHorizontalFlip(), T.RandomRotation(20))
COORDINATES = np.stack(np.meshgrid(np.arange(HEIGHT), np.arange(WIDTH), indexing="ij"), -1).astype(np.uint8)
# Each pixel of a picture of coordinates tells where it comes from: red is its row, green its column.
PICTURE = np.concatenate([COORDINATES * 6, np.zeros((HEIGHT, WIDTH, 1), np.uint8)], -1)
JPEGS = [jpeg_bytes(smooth_image(40, 48, number)) for number in range(SAMPLES)]


def load(make_sample: Any, transforms: Any = GEOMETRY, *, samples: int = SAMPLES, **options: Any) -> list[Any]:
    defaults = {"batch_size": 4, "shuffle": True, "seed": 3, "num_workers": 0, "device": "cpu"}
    with gl.Loader(MapDataset(make_sample, samples), transforms=transforms, **(defaults | options)) as loader:
        return list(loader)


def encoded(index: int, draws: int | None) -> gl.Encoded:
    return gl.Encoded(JPEGS[index], draws=draws)


def cat(batches: list[Any], key: Any) -> torch.Tensor:
    return torch.cat([batch[key] for batch in batches])


def share_of_equal_images(first: torch.Tensor, second: torch.Tensor) -> float:
    return (first == second).flatten(1).all(1).float().mean().item()


# -- images ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "fused", "kornia"])
def test_images_with_different_draws_are_transformed_independently_and_with_the_same_alike(backend):
    batches = load(lambda i: tuple(encoded(i, draws) for draws in (0, 1, 2, 1)), backend=backend)
    views = [cat(batches, k) for k in range(4)]
    for first, second in itertools.combinations(range(3), 2):
        assert share_of_equal_images(views[first], views[second]) == 0
    assert torch.equal(views[1], views[3])


@pytest.mark.parametrize("backend", ["torch", "fused"])
def test_images_with_draws_0_have_the_bits_of_images_without_draws(backend):
    expected = cat(load(lambda i: (encoded(i, None), i), backend=backend), 0)
    batches = load(lambda i: (encoded(i, 1), encoded(i, 0), encoded(i, 7)), backend=backend)
    assert torch.equal(cat(batches, 1), expected)


def test_flips_of_images_with_different_draws_agree_in_half_of_the_samples():
    flip = (T.RandomHorizontalFlip(),)
    batches = load(lambda i: (gl.Image(PICTURE), gl.Image(PICTURE, draws=1)), flip, samples=400, batch_size=100)
    flipped = [cat(batches, k)[:, 1, 0, 0] > 0 for k in range(2)]
    for view in flipped:
        assert 0.4 < view.float().mean() < 0.6
    assert 0.4 < (flipped[0] == flipped[1]).float().mean() < 0.6


def test_an_image_with_draws_is_transformed_alike_alone_and_next_to_others():
    alone = cat(load(lambda i: (encoded(i, 2), i)), 0)
    next_to_others = cat(load(lambda i: (encoded(i, None), encoded(i, 2))), 1)
    assert torch.equal(alone, next_to_others)


def test_draws_of_early_transforms_do_not_depend_on_later_transforms():
    chain = [T.RandomHorizontalFlip(), T.RandomVerticalFlip(p=0), T.RandomErasing(p=0)]
    short, full = (cat(load(lambda i: (encoded(i, 5), i), chain[:n]), 0) for n in (1, 3))
    assert torch.equal(short, full)


@pytest.mark.parametrize("draws", [1, 32767])
def test_views_of_images_with_different_draws_are_independent(draws):
    views = T.MultiView([[T.RandomResizedCrop(12)], [T.RandomResizedCrop(12)], [T.RandomResizedCrop(12)]])
    batches = load(lambda i: (encoded(i, 0), encoded(i, draws)), [T.RandomHorizontalFlip(), views])
    results = [torch.cat([batch[k][view] for batch in batches]) for k in range(2) for view in range(3)]
    for first, second in itertools.combinations(results, 2):
        assert share_of_equal_images(first, second) == 0


def test_frames_of_a_clip_share_the_draws_of_the_clip():
    clip = np.repeat(PICTURE[None], 3, 0)
    batches = load(lambda i: (gl.Image(clip, draws=1), gl.Image(clip, draws=2)))
    first, second = cat(batches, 0), cat(batches, 1)
    assert torch.equal(first[:, 0], first[:, 2])
    assert share_of_equal_images(first, second) == 0


def test_images_with_different_draws_are_decoded_at_a_reduced_size():
    large = [jpeg_bytes(smooth_image(320, 400, number)) for number in range(SAMPLES)]
    crop = [T.RandomResizedCrop(16, scale=(0.8, 1))]

    def make_sample(index):
        return gl.Encoded(large[index], draws=0), gl.Encoded(large[index], draws=1)

    exact, fast = (load(make_sample, crop, decode=gl.Decode(scale=scale)) for scale in ("exact", "fast"))
    for k in range(2):
        difference = (cat(exact, k).float() - cat(fast, k).float()).abs().mean()
        assert 0 < difference < 4
    assert share_of_equal_images(cat(fast, 0), cat(fast, 1)) == 0


def test_modules_at_the_end_get_different_seeds_for_images_with_different_draws():
    class AddNoise(torch.nn.Module):
        def forward(self, images):
            return images + torch.rand(1)

    chain = [T.Resize((8, 8)), T.ToDtype("float32", scale=True), torch.nn.Identity(), AddNoise()]
    batches = load(lambda i: tuple(gl.Image(PICTURE, draws=draws) for draws in (0, 1, 1)), chain)
    alone = load(lambda i: (gl.Image(PICTURE), i), chain)
    assert torch.equal(cat(batches, 0), cat(alone, 0))
    assert torch.equal(cat(batches, 1), cat(batches, 2))
    assert share_of_equal_images(cat(batches, 0), cat(batches, 1)) == 0


def test_erased_boxes_differ_for_images_with_different_draws():
    batches = load(lambda i: (gl.Image(PICTURE), gl.Image(PICTURE, draws=1)), [T.RandomErasing(p=1)])
    assert share_of_equal_images(cat(batches, 0), cat(batches, 1)) < 0.2


@pytest.mark.parametrize(
    "mix",
    [
        T.MixUp(num_classes=12),
        T.CutMix(num_classes=12),
        T.RandomChoice([T.MixUp(num_classes=12), T.CutMix(num_classes=12)]),
    ],
)
def test_images_with_different_draws_are_mixed_in_the_proportion_of_their_label(mix):
    chain = [T.RandomHorizontalFlip(), T.ToDtype("float32", scale=True), mix]
    grey = [np.full((HEIGHT, WIDTH, 3), 20 * index, np.uint8) for index in range(SAMPLES)]

    def make_sample(index):
        return gl.Image(grey[index]), index, gl.Image(grey[index], draws=1)

    for images, labels, others in load(make_sample, chain):
        levels = (labels * torch.arange(SAMPLES) * 20).sum(1) / 255
        assert (labels.max(1).values < 1).any()
        for view in (images, others):
            assert torch.allclose(view.mean((1, 2, 3)), levels, atol=1e-3)


def test_mosaic_tiles_each_image_with_its_own_draws():
    def make_sample(index):
        boxes = np.array([[2.0, 3, 20, 18]], np.float32)
        return [
            {"image": gl.Image(PICTURE + np.uint8(index), draws=draws), "boxes": gl.Boxes(boxes, draws=draws)}
            for draws in (0, 1)
        ]

    def make_single(index):
        return make_sample(index)[0]

    chain = [T.Mosaic((32, 32), p=1)]
    pairs = [sample for batch in load(make_sample, chain) for sample in zip(*batch, strict=True)]
    singles = [sample for batch in load(make_single, chain) for sample in batch]
    for (first, second), single in zip(pairs, singles, strict=True):
        assert torch.equal(first["image"], single["image"])
        assert torch.equal(first["boxes"], single["boxes"])
        assert not torch.equal(first["image"], second["image"])


# -- workers, ranks and resuming ---------------------------------------------------------------------------------------


def triplet(index: int) -> dict[str, Any]:
    mask = np.repeat(np.arange(40, dtype=np.uint8)[:, None], 48, 1)
    return {
        "anchor": encoded(index, 0),
        "positive": encoded(index, 1),
        "negative": encoded((index + 1) % SAMPLES, 2),
        "mask": gl.Mask(mask, draws=1),
        "points": gl.Keypoints(np.array([[20.0, 10]]), draws=2),
        "label": index,
    }


def triplet_loader(**options: Any) -> gl.Loader:
    dataset = MapDataset(triplet, SAMPLES)
    options = {"batch_size": 4, "shuffle": True, "device": "cpu", **options}
    return gl.Loader(dataset, transforms=[*GEOMETRY, T.ToDtype("float32", scale=True)], **options)


def rows_of(batch: Any) -> list[tuple[bytes, ...]]:
    """Return the samples of a batch, a list of dicts, as bytes."""
    return [tuple(np.asarray(value).tobytes() for value in sample.values()) for sample in batch]


@pytest.mark.processes
@pytest.mark.parametrize("workers", [1, 4])
def test_batches_have_the_same_bits_with_any_number_of_workers(workers):
    with triplet_loader(num_workers=0) as loader:
        expected = [rows_of(batch) for batch in loader]
    with triplet_loader(num_workers=workers) as loader:
        assert [rows_of(batch) for batch in loader] == expected


@pytest.mark.parametrize("ranks", [2, 3])
def test_batches_have_the_same_bits_on_any_number_of_ranks(ranks):
    with triplet_loader(batch_size=6, num_workers=0) as loader:
        expected = sorted(row for batch in loader for row in rows_of(batch))
    rows = []
    for rank in range(ranks):
        with triplet_loader(batch_size=6 // ranks, num_workers=0, rank=rank, world_size=ranks) as loader:
            rows += [row for batch in loader for row in rows_of(batch)]
    assert sorted(rows) == expected


@pytest.mark.parametrize("stop", [0, 1, 2])
def test_resumed_loader_yields_the_remaining_batches_with_equal_bits(stop):
    with triplet_loader(num_workers=0) as loader:
        expected = [rows_of(batch) for batch in loader]
    with triplet_loader(num_workers=0) as loader:
        list(itertools.islice(loader, stop))
        state = json.loads(json.dumps(loader.state_dict()))
    with triplet_loader(num_workers=0) as loader:
        loader.load_state_dict(state)
        assert [rows_of(batch) for batch in loader] == expected[stop:]


def test_replay_returns_the_images_of_the_batch_and_all_draws():
    with triplet_loader(num_workers=0, info=True) as loader:
        batch, info = next(iter(loader))
        replay = loader.replay(0, int(info.positions[1]))
    for name, value in batch[1].items():
        assert torch.equal(torch.as_tensor(replay.sample[name]), torch.as_tensor(value))
    names = [name for name, _ in replay.draws]
    assert names.count("RandomRotation") == 3
    crops = [draws for name, draws in replay.draws if name == "RandomResizedCrop"]
    assert crops[0] != crops[1] != crops[2] != crops[0]


# -- targets -----------------------------------------------------------------------------------------------------------


def picture_of_coordinates(draws: int | None) -> tuple[gl.Image, gl.Mask, gl.Keypoints]:
    """Return a picture, a mask with the row of each pixel, and the point in the middle."""
    mask = np.repeat(np.arange(HEIGHT, dtype=np.uint8)[:, None] * 6, WIDTH, 1)
    point = np.array([[WIDTH / 2, HEIGHT / 2]], np.float32)
    return gl.Image(PICTURE, draws=draws), gl.Mask(mask, draws=draws), gl.Keypoints(point, draws=draws)


@pytest.mark.parametrize("backend", ["torch", "fused"])
def test_targets_move_with_the_image_that_has_their_draws(backend):
    chain = [T.RandomCrop(16), T.RandomHorizontalFlip(), T.RandomVerticalFlip()]

    def make_sample(index):
        return (*picture_of_coordinates(None), *picture_of_coordinates(1))

    batches = load(make_sample, chain, backend=backend)
    for k in (0, 3):
        images, masks, points = (cat(batches, k), cat(batches, k + 1), [p for b in batches for p in b[k + 2]])
        assert torch.equal(images[:, 0], masks)
        for image, point in zip(images, points, strict=True):
            x, y = point[0].round().long().tolist()
            if 0 < x < 16 and 0 < y < 16:
                row, column = (image[:2, y, x].float() / 6).tolist()
                assert abs(row - HEIGHT / 2) <= 1
                assert abs(column - WIDTH / 2) <= 1
    assert share_of_equal_images(cat(batches, 1), cat(batches, 4)) < 0.5


def detection(index: int, draws: int, labels: np.ndarray | None = None) -> dict[str, Any]:
    rng = np.random.default_rng([index, draws])
    boxes = np.sort(rng.uniform(0, 24, (6, 2, 2)), axis=1).reshape(6, 4).astype(np.float32)
    labels = rng.integers(0, 100, 6) if labels is None else labels
    return {"image": gl.Image(PICTURE, draws=draws), "boxes": gl.Boxes(boxes, draws=draws), "labels": labels}


@pytest.mark.parametrize("getter", ["default", lambda sample: (sample["first"]["labels"], sample["second"]["labels"])])
def test_boxes_choose_crops_and_are_dropped_only_with_the_image_that_has_their_draws(getter):
    chain = [T.RandomIoUCrop(), T.RandomHorizontalFlip(), T.SanitizeBoundingBoxes(min_size=6, labels_getter=getter)]
    single_getter = getter if getter == "default" else lambda sample: sample["labels"]
    single_chain = [*chain[:2], T.SanitizeBoundingBoxes(min_size=6, labels_getter=single_getter)]

    pairs = load(lambda i: {"first": detection(i, 0), "second": detection(i, 1)}, chain, ragged="list")
    first = load(lambda i: detection(i, 0), single_chain, ragged="list")
    second = load(lambda i: detection(i, 1), single_chain, ragged="list")
    counts = set()
    for key, singles in (("first", first), ("second", second)):
        for sample, single in zip(
            [sample for batch in pairs for sample in batch[key]], itertools.chain(*singles), strict=True
        ):
            assert sample.keys() == single.keys()
            for name, value in sample.items():
                assert torch.equal(value, single[name])
            assert len(sample["boxes"]) == len(sample["labels"])
            counts.add(len(sample["boxes"]))
    assert len(counts) > 2


def test_labels_in_the_dicts_of_two_images_are_dropped_with_the_boxes_of_each():
    labels = np.arange(6)
    chain = [T.RandomIoUCrop(), T.SanitizeBoundingBoxes(min_size=6)]
    samples = [
        sample
        for batch in load(lambda i: [detection(i, 0, labels), detection(i, 1, labels)], chain, ragged="list")
        for image_samples in batch
        for sample in image_samples
    ]
    assert {len(sample["labels"]) for sample in samples} != {6}
    assert all(len(sample["labels"]) == len(sample["boxes"]) for sample in samples)


def test_boxes_are_dropped_next_to_a_reference_image_without_boxes():
    def make_sample(index):
        return {**detection(index, 0), "reference": gl.Image(PICTURE[:20], draws=1)}

    batches = load(make_sample, [T.SanitizeBoundingBoxes(min_size=6)], ragged="list")
    samples = [sample for batch in batches for sample in batch]
    assert any(len(sample["boxes"]) < 6 for sample in samples)
    assert all(len(sample["boxes"]) == len(sample["labels"]) for sample in samples)


def test_images_without_targets_may_have_another_size_if_they_have_other_draws():
    def make_sample(index):
        image, mask, _ = picture_of_coordinates(0)
        return image, mask, gl.Image(PICTURE[:20], draws=1)

    batches = load(make_sample, [T.RandomCrop(16)])
    assert torch.equal(cat(batches, 0)[:, 0], cat(batches, 1))
    assert cat(batches, 2).shape == (SAMPLES, 3, 16, 16)


# -- errors and warnings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: gl.Encoded(b"x", draws=-1), ValueError, "Encoded(draws=…) must be at least 0 and at most 32767"),
        (lambda: gl.Image(PICTURE, draws="1"), TypeError, "Image(draws=…) must be an integer, got '1' (str)"),
        (lambda: gl.Mask(PICTURE[..., 0], draws=1.5), TypeError, "Mask(draws=…) must be an integer, got 1.5 (float)"),
        (lambda: gl.Boxes([[0, 0, 1, 1]], draws=40000), ValueError, "Boxes(draws=…) must be at least 0 and at most"),
        (lambda: gl.Keypoints([[0, 0]], draws=True), TypeError, "Keypoints(draws=…) must be an integer, got True"),
    ],
)
def test_invalid_draws_are_refused(make, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        make()


def test_leaves_keep_their_draws_when_they_are_pickled_and_cached():
    leaves = [
        gl.Encoded(b"x", draws=1),
        gl.Image(PICTURE, draws=2),
        gl.Mask(PICTURE[..., 0], draws=3),
        gl.Boxes([[0, 0, 1, 1]], draws=4),
        gl.Keypoints([[0, 0]], draws=5),
        gl.Mask(gl.Encoded(b"x", draws=6)),
    ]
    assert [leaf.draws for leaf in pickle.loads(pickle.dumps(leaves))] == [1, 2, 3, 4, 5, 6]
    cached = gl.Cached(MapDataset(lambda index: tuple(leaves), 1), 2**20)
    assert [leaf.draws for _ in range(2) for leaf in cached[0]] == [1, 2, 3, 4, 5, 6] * 2
    assert repr(leaves[0]) == "Encoded(1 bytes, mode='RGB', source=None, draws=1)"


def test_read_passes_draws_on(tmp_path):
    (tmp_path / "a.jpg").write_bytes(JPEGS[0])
    assert gl.read(tmp_path / "a.jpg", draws=3).draws == 3
    assert gl.read(tmp_path / "a.jpg").draws is None


@pytest.mark.parametrize(
    ("make_sample", "transforms", "message"),
    [
        (
            lambda i: {"image": gl.Image(PICTURE), "mask": gl.Mask(PICTURE[..., 0], draws=2)},
            GEOMETRY,
            'sample["mask"] has draws=2, but the images of its sample have draws=0; pass the draws= of the image',
        ),
        (
            lambda i: (gl.Image(PICTURE), gl.Image(PICTURE[:20]), gl.Mask(PICTURE[..., 0])),
            GEOMETRY,
            "or pass another draws= to the images that they do not belong to",
        ),
        (
            lambda i: {**detection(i, 0), "reference": gl.Image(PICTURE, draws=1)},
            [T.RandomIoUCrop()],
            "needs samples with one set of boxes, gpuload.Boxes(array, format), but this sample has 0 with draws=1",
        ),
        (
            lambda i: {
                "images": (gl.Image(PICTURE), gl.Image(PICTURE, draws=1)),
                "boxes": gl.Boxes(np.ones((2, 4))),
                "other boxes": gl.Boxes(np.ones((2, 4)), draws=1),
                "labels": np.arange(2),
            },
            [T.SanitizeBoundingBoxes()],
            "it is unclear to which of their boxes the labels of shape (2,) belong; put the boxes of each number",
        ),
    ],
)
def test_samples_whose_targets_do_not_match_their_draws_are_errors(make_sample, transforms, message):
    with pytest.raises(gl.SampleError, match=re.escape(message)):
        load(make_sample, transforms)


@pytest.mark.parametrize(
    ("make_sample", "message"),
    [
        (
            lambda i: (gl.Image(PICTURE, draws=i % 2), i),
            "sample[0] of sample 0 has draws=0, but sample[0] of sample 1 has draws=1; pass the same draws= to",
        ),
        (
            lambda i: (gl.Image(PICTURE), gl.Image(PICTURE, draws=1), gl.Keypoints([[1, 2]], draws=i % 2)),
            "sample[2] of sample 0 has draws=0, but sample[2] of sample 1 has draws=1; pass the same draws=",
        ),
    ],
)
def test_samples_of_a_batch_with_different_draws_for_a_leaf_are_an_error(make_sample, message):
    with pytest.raises(gl.CollateError, match=re.escape(message)):
        load(make_sample, shuffle=False)


def files(folder: Any) -> list[Any]:
    paths = [folder / f"{number}.jpg" for number in range(4)]
    for path, data in zip(paths, JPEGS, strict=False):
        path.write_bytes(data)
    return paths


def test_images_of_different_files_without_draws_are_warned_of_once_per_loader(tmp_path):
    paths = files(tmp_path)
    dataset = MapDataset(lambda i: {"a": gl.read(paths[i]), "b": gl.read(paths[3 - i]), "label": i}, 4)
    loader = gl.Loader(dataset, 2, transforms=GEOMETRY, num_workers=0, device="cpu")
    with pytest.warns(RuntimeWarning) as record:
        list(loader)
    list(loader)  # a second warning would be an error
    [warning] = record
    assert str(warning.message) == (
        "all images of a sample share their random parameters, so these get the same crop and flip: "
        f'sample["a"] ({paths[0]}), sample["b"] ({paths[3]}). If they should differ, as an anchor and its positive, '
        "pass another draws= to each, as in gpuload.read(path, draws=1); if not, pass draws=0 to all"
    )


def read(number: int, draws: int | None = None) -> gl.Encoded:
    return gl.Encoded(JPEGS[number], source=f"{number}.jpg", draws=draws)


@pytest.mark.parametrize(
    ("sample", "transforms"),
    [
        ((read(0, 0), read(1, 0)), GEOMETRY),
        ((read(0), read(1, 1)), GEOMETRY),
        (([read(0), read(1), read(2)], 1), GEOMETRY),
        ((read(0), read(0)), GEOMETRY),
        (
            (read(0), gl.Mask(gl.Encoded(encode(np.zeros((40, 48), np.uint8), "PNG"), source="mask.png"))),
            [T.RandomCrop(8)],
        ),
        ((read(0), read(1)), [T.Resize((8, 8)), T.CenterCrop(8), T.Normalize([0.5], [0.5])]),
        ((read(0), read(1)), [T.CenterCrop(8), T.Normalize([0.5], [0.5]), T.MixUp(labels_getter=None)]),
        ((read(0), read(1)), []),
    ],
    ids=["draws=0", "different", "clip", "one file twice", "mask", "evaluation", "mixing", "no transforms"],
)
def test_images_that_need_not_say_whether_they_share_draws_are_not_warned_of(sample, transforms):
    load(lambda index: sample, transforms, batch_size=2, samples=2)  # a warning is an error


def test_two_lists_of_images_without_draws_are_warned_of():
    with pytest.warns(RuntimeWarning, match=r'sample\["left"\]\[0\] \(0.jpg\), sample\["right"\]\[0\] \(2.jpg\)\. If'):
        load(lambda index: {"left": [read(0), read(1)], "right": [read(2), read(3)]}, samples=1)


# -- Augment -----------------------------------------------------------------------------------------------------------


def image_batch() -> torch.Tensor:
    return torch.stack([torch.from_numpy(smooth_image(24, 32, number)).permute(2, 0, 1) for number in range(6)])


@pytest.mark.parametrize("backend", ["torch", "fused"])
def test_augment_with_draws_has_the_bits_of_a_loader(backend):
    images = image_batch()
    rows = images.permute(0, 2, 3, 1).numpy()
    chain = [*GEOMETRY, T.ToDtype("float32", scale=True)]

    def make_sample(index):
        point = np.array([[3.0, 4.0]])
        return {
            "left": gl.Image(rows[index]),
            "right": gl.Image(rows[index], draws=2),
            "mask": gl.Mask(rows[index][..., 0], draws=2),
            "points": gl.Keypoints(point, draws=2),
        }

    [expected] = load(make_sample, chain, samples=6, batch_size=6, shuffle=False, backend=backend)
    batch = {
        "left": images,
        "right": images,
        "mask": gl.Mask(images[:, 0]),
        "points": [gl.Keypoints(np.array([[3.0, 4.0]]), draws=2) for _ in range(6)],
    }
    augmented = gl.Augment(chain, seed=3, backend=backend, draws={"right": 2, 'batch["mask"]': 2})(batch)
    assert share_of_equal_images(augmented["left"], augmented["right"]) == 0
    for row, sample in enumerate(expected):
        for name in sample:
            assert torch.equal(augmented[name][row], sample[name])


def test_augment_moves_tv_tensors_with_the_images_that_have_their_draws():
    images = torch.from_numpy(PICTURE).permute(2, 0, 1).repeat(6, 1, 1, 1)
    augment = gl.Augment([T.RandomCrop(16), T.RandomHorizontalFlip()], draws={"batch[1]": 1, "batch[2]": 1})
    first, second, masks = augment(images, images, torchvision().tv_tensors.Mask(images[:, 0]))
    assert torch.equal(second[:, 0], masks)
    assert not torch.equal(first[:, 0], masks)


def test_a_copied_augment_keeps_its_draws():
    augment = gl.Augment([T.RandomCrop(16)], draws={"batch[1]": 1})
    copied = pickle.loads(pickle.dumps(augment))
    images = image_batch()
    for first, second in zip(augment(images, images), copied(images, images), strict=True):
        assert torch.equal(first, second)
    assert not torch.equal(*copied(images, images))


@pytest.mark.parametrize(
    ("draws", "kind", "message"),
    [
        ({"imge": 1}, ValueError, "Augment(draws=…) has 'imge', but the batch has only 'image', 'label'"),
        ({"label": 1}, TypeError, 'Augment(draws=…) selects batch["label"], int64 tensor 6, which is neither an image'),
        ({"image": -1}, ValueError, "draws['image'] must be at least 0 and at most 32767, got -1"),
        ({1: 1}, TypeError, "must be a string, got 1 (int)"),
        (["image"], TypeError, "draws must be a dict, got ['image'] (list)"),
    ],
)
def test_augment_refuses_invalid_draws(draws, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        gl.Augment(GEOMETRY, draws=draws)({"image": image_batch(), "label": torch.arange(6)})


# -- a device ----------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.processes
@pytest.mark.parametrize("draws", [(0, 1), (2,)])
def test_batches_of_a_device_have_the_bits_of_the_cpu(draws):
    chain = [T.RandomResizedCrop(16), T.RandomHorizontalFlip(), T.ToDtype("float32", scale=True)]

    def make_sample(index):
        return (*(encoded(index, number) for number in draws), index)

    expected = load(make_sample, chain, backend="fused")
    batches = load(make_sample, chain, device="cuda", backend="fused", num_workers=2)
    for k in range(len(draws) + 1):
        assert torch.equal(cat(batches, k).cpu(), cat(expected, k))
