"""Video clips: several frames in a sample, which get the same draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.both_loaders import cpu_loader, gpuload_batches
from helpers.map_datasets import MapDataset
from helpers.peers import torchvision
from PIL import Image as PILImage

import gpuload as gl
from gpuload import transforms as T
from gpuload.datasets.recognise import _evenly_spaced_frames

FRAMES, COUNT, CLASSES = 5, 6, 3
NORMALIZE = T.Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
CHAIN = [T.RandomResizedCrop(12), T.RandomHorizontalFlip(), T.RandomRotate90(), T.ColorJitter(0.4, 0.4, 0.4), NORMALIZE]


def frames(index: int) -> np.ndarray:
    """Return a clip T×H×W×C whose size depends on the index."""
    return np.random.default_rng(index).integers(0, 256, (FRAMES, 20 + index, 24, 3), np.uint8)


def video(array: np.ndarray):
    from torchvision import tv_tensors

    return tv_tensors.Video(torch.from_numpy(array).permute(0, 3, 1, 2))


FORMS = {
    "an array": frames,
    "a tensor": lambda i: torch.from_numpy(frames(i)).permute(0, 3, 1, 2),
    "an image with more axes": lambda i: gl.Image(frames(i)),
    "an image, channels first": lambda i: gl.Image(frames(i).transpose(0, 3, 1, 2), layout="CHW"),
    "a video of torchvision's": lambda i: video(frames(i)),
    "a list of arrays": lambda i: list(frames(i)),
    "a list of tensors": lambda i: list(torch.from_numpy(frames(i)).permute(0, 3, 1, 2)),
    "a list of Pillow's images": lambda i: [PILImage.fromarray(frame) for frame in frames(i)],
}


def clip_dataset(make) -> MapDataset:
    return MapDataset(lambda index: (make(index), index % CLASSES), COUNT)


def batches(make, transforms=CHAIN, batch_size=3, **options):
    return gpuload_batches(clip_dataset(make), batch_size, transforms=transforms, seed=4, **options)


def frames_as_images(transforms=CHAIN, **options) -> list[torch.Tensor]:
    """Return batches N×T×C×H×W in which each frame was loaded as a separate image."""
    makers = [lambda i, frame=frame: gl.Image(frames(i)[frame]) for frame in range(FRAMES)]
    steps = zip(*(batches(make, transforms, **options) for make in makers), strict=True)
    return [torch.stack([images for images, _ in step], 1) for step in steps]


@pytest.mark.parametrize("form", FORMS)
def test_all_frames_of_a_clip_get_the_draws_of_their_sample(form):
    if "torchvision" in form:
        torchvision()
    clip_batches = [images for images, _ in batches(FORMS[form])]
    if "list" in form:  # default_collate keeps the list
        assert {len(images) for images in clip_batches} == {FRAMES}
        clip_batches = [torch.stack(images, 1) for images in clip_batches]
    for clip, expected in zip(clip_batches, frames_as_images(), strict=True):
        assert clip.shape == (3, FRAMES, 3, 12, 12)
        assert torch.equal(clip, expected)


@pytest.mark.processes
def test_clips_from_workers_equal_clips_from_the_main_process():
    for (clips, labels), expected in zip(batches(frames, num_workers=2, chunk_size=2), frames_as_images(), strict=True):
        assert torch.equal(clips, expected)
        assert labels.shape == (3,)


def test_mixup_mixes_all_frames_of_a_clip_with_one_weight():
    chain = [T.Resize((12, 12)), NORMALIZE, T.MixUp(num_classes=CLASSES)]
    mixed = batches(frames, chain, batch_size=2)
    for (clips, labels), expected in zip(mixed, frames_as_images(chain, batch_size=2), strict=True):
        assert torch.equal(clips, expected)
        assert labels.shape == (2, CLASSES)


def test_multiview_of_clips_gives_a_list_of_clip_batches():
    chain = [T.MultiView([[T.RandomCrop(12)], [T.RandomCrop(8)]])]
    (large, small), _ = batches(frames, chain)[0]
    assert (large.shape, small.shape) == ((3, FRAMES, 3, 12, 12), (3, FRAMES, 3, 8, 8))
    windows = np.lib.stride_tricks.sliding_window_view(frames(0), (8, 8), axis=(1, 2))
    # Exactly one window of the clip equals the crop in all frames.
    assert (windows == small[0].numpy()[:, None, None]).all((0, 3, 4, 5)).sum() == 1


def test_ragged_clips_are_listed_or_padded():
    chain = [T.RandomHorizontalFlip(1.0)]
    listed, _ = batches(frames, chain, ragged="list")[0]
    assert [tuple(clip.shape) for clip in listed] == [(FRAMES, 3, 20 + i, 24) for i in range(3)]
    (padded, sizes), _ = batches(frames, chain, ragged="pad")[0]
    assert padded.shape == (3, FRAMES, 3, 22, 24)
    assert sizes.tolist() == [[20, 24], [21, 24], [22, 24]]
    for clip, padded_clip, index in zip(listed, padded, range(3), strict=True):
        assert torch.equal(clip, torch.from_numpy(frames(index)[:, :, ::-1].copy()).permute(0, 3, 1, 2))
        assert torch.equal(padded_clip[:, :, : 20 + index], clip)
        assert not padded_clip[:, :, 20 + index :].any()
    (wider, wider_sizes), _ = batches(frames, chain, ragged="pad", pad_to=16)[0]
    assert wider.shape == (3, FRAMES, 3, 32, 32)
    assert torch.equal(wider_sizes, sizes)
    assert torch.equal(wider[..., :22, :24], padded)


def test_clips_are_the_same_one_by_one_with_collate_fn_and_from_replay():
    expected = frames_as_images()[0]
    samples = batches(frames, batch_size=None)
    assert torch.equal(torch.stack([clip for clip, _ in samples[:3]]), expected)
    collated = batches(frames, collate_fn=lambda samples: [clip for clip, _ in samples])
    assert torch.equal(torch.stack(collated[0]), expected)
    with cpu_loader(clip_dataset(frames), 3, transforms=CHAIN, seed=4) as loader:
        clip, label = loader.replay(0, 1).sample
    assert torch.equal(clip, expected[1])
    assert label == 1


def test_masks_and_boxes_move_with_all_frames():
    """The masks equal the red channel of the frames, and must do so after the transforms."""

    def make(index):
        clip = frames(index)
        return {"clip": clip, "masks": gl.Mask(clip[..., 0]), "boxes": gl.Boxes([[2, 3, 10, 12]])}

    targets, _ = batches(make, [T.RandomCrop(12), T.RandomHorizontalFlip()])[0]
    for target in targets:  # a dict with boxes is a list of dicts
        assert target["clip"].shape == (FRAMES, 3, 12, 12)
        assert torch.equal(target["clip"][:, 0], target["masks"])
        assert target["boxes"].shape == (1, 4)


def test_clip_and_image_of_one_sample_get_the_same_draws():
    def make(index):
        return {"poster": gl.Image(frames(index)[2]), "clip": gl.Image(frames(index))}

    batch, _ = batches(make)[0]
    assert torch.equal(batch["poster"], batch["clip"][:, 2])


def test_clips_of_different_lengths_raise_unless_a_collate_fn_takes_them():
    def make(index):
        return frames(index)[: 1 + index]

    message = "clips of a batch differ in length: sample 0 has 1 frames, and sample 1 has 2; cut clips to one length"
    with pytest.raises(gl.CollateError, match=f"{message} in the dataset, or pass a collate_fn"):
        batches(make)
    collated = batches(make, collate_fn=lambda samples: [len(clip) for clip, _ in samples])
    assert collated == [[1, 2, 3], [4, 5, 5]]


def test_module_in_transforms_draws_once_per_clip():
    class Shift(torch.nn.Module):
        def forward(self, images):
            return images + torch.rand(len(images), 1, 1, 1)

    clips, _ = batches(lambda i: np.zeros((FRAMES, 8, 8, 3), np.uint8), [T.ToDtype("float32"), Shift()])[0]
    assert (clips == clips[:, :1, :1, :1, :1]).all()
    assert len(set(clips[:, 0, 0, 0, 0].tolist())) == 3


@pytest.mark.parametrize(("dtype", "channels"), [("float32", 3), ("uint16", 1), ("float32", 13), ("uint8", 6)])
def test_clips_of_any_dtype_and_channels_equal_their_frames_as_images(dtype, channels):
    chain = [T.RandomHorizontalFlip(), T.RandomCrop(8)]

    def frame(index, number=slice(None)):
        pixels = np.random.default_rng(index).random((FRAMES, 20, 30, channels)) * 200
        return gl.Image(pixels.astype(dtype)[number], layout="HWC")

    clips, _ = batches(frame, chain)[0]
    first_batches = [batches(lambda i, number=number: frame(i, number), chain)[0] for number in range(FRAMES)]
    images_by_frame = [images for images, _ in first_batches]
    assert clips.dtype == getattr(torch, dtype)
    assert torch.equal(clips, torch.stack(images_by_frame, 1))


# -- UniformTemporalSubsample -----------------------------------------------------------------------------------------


def test_evenly_spaced_frames_equals_torchvisions_selection():
    for length in range(1, 70):
        for count in range(1, 40):
            expected = torch.linspace(0, length - 1, count).long()
            assert _evenly_spaced_frames([count], length) == expected.tolist(), (length, count)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [1, 3, FRAMES, 8])
def test_uniform_temporal_subsample_selects_frames_before_transforms_in_every_form(form, count):
    if "torchvision" in form:
        torchvision()
    frame_numbers = torch.linspace(0, FRAMES - 1, count).long().tolist()
    subsampled = batches(FORMS[form], [*CHAIN, T.UniformTemporalSubsample(count)])
    for (clips, labels), (expected, expected_labels) in zip(subsampled, batches(frames), strict=True):
        clips = torch.stack(clips, 1) if "list" in form else clips
        assert torch.equal(clips, expected[:, frame_numbers])
        assert torch.equal(labels, expected_labels)


@pytest.mark.processes
def test_uniform_temporal_subsample_selects_the_same_frames_in_workers():
    chain = [*CHAIN, T.UniformTemporalSubsample(4), T.UniformTemporalSubsample(2)]
    for (clips, _), (expected, _) in zip(batches(frames, chain, num_workers=2), batches(frames), strict=True):
        assert torch.equal(clips, expected[:, [0, FRAMES - 1]])


def test_uniform_temporal_subsample_keeps_masks_and_later_fields():
    def make(index):
        return {"a": list(frames(index)), "mask": gl.Mask(np.full(frames(index).shape[1:3], index)), "z": index}

    chain = [T.UniformTemporalSubsample(2), T.CenterCrop(10)]
    for number, (batch, _) in enumerate(batches(make, chain)):
        assert len(batch["a"]) == 2
        expected = [3 * number, 3 * number + 1, 3 * number + 2]
        assert batch["mask"].amax(dim=(1, 2)).tolist() == batch["z"].tolist() == expected


def test_uniform_temporal_subsample_raises_for_wrong_arguments_places_and_samples():
    with pytest.raises(ValueError, match=r"UniformTemporalSubsample\(num_samples=…\) must be at least 1, got 0"):
        T.UniformTemporalSubsample(0)
    with pytest.raises(ValueError, match="RandomApply cannot hold UniformTemporalSubsample: all clips of"):
        T.RandomApply([T.UniformTemporalSubsample(2)])
    with pytest.raises(ValueError, match="MultiView cannot hold UniformTemporalSubsample: frames are selected once"):
        T.Chain([T.MultiView([[T.UniformTemporalSubsample(2)], [T.CenterCrop(3)]])])
    with pytest.raises(gl.SampleError, match=r"UniformTemporalSubsample takes a video clip.*but this sample has none"):
        batches(lambda i: frames(i)[0], [T.UniformTemporalSubsample(2)])
