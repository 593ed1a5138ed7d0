"""UniformTemporalSubsample: which frames of a clip are kept, in each form that a clip has."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dataloader.test_clips import CHAIN, FORMS, FRAMES, batches, frames
from helpers.peers import torchvision

import gpuload as gl
from gpuload import transforms as T
from gpuload.datasets.recognise import _evenly_spaced_frames


def test_evenly_spaced_frames_are_those_of_torchvision():
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
    for (clips, labels), (expected, expected_labels) in zip(
        batches(FORMS[form], [*CHAIN, T.UniformTemporalSubsample(count)]), batches(frames), strict=True
    ):
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
        assert (
            batch["mask"].amax(dim=(1, 2)).tolist()
            == batch["z"].tolist()
            == [3 * number, 3 * number + 1, 3 * number + 2]
        )


def test_uniform_temporal_subsample_raises_for_wrong_arguments_places_and_samples():
    with pytest.raises(ValueError, match=r"UniformTemporalSubsample\(num_samples=…\) must be at least 1, got 0"):
        T.UniformTemporalSubsample(0)
    with pytest.raises(ValueError, match="RandomApply cannot hold UniformTemporalSubsample: all clips of"):
        T.RandomApply([T.UniformTemporalSubsample(2)])
    with pytest.raises(ValueError, match="MultiView cannot hold UniformTemporalSubsample: frames are selected once"):
        T.Chain([T.MultiView([[T.UniformTemporalSubsample(2)], [T.CenterCrop(3)]])])
    with pytest.raises(gl.SampleError, match=r"UniformTemporalSubsample takes a video clip.*but this sample has none"):
        batches(lambda i: frames(i)[0], [T.UniformTemporalSubsample(2)])
