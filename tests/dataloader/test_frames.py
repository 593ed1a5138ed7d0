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


def test_the_frames_are_torchvisions():
    for length in range(1, 70):
        for count in range(1, 40):
            expected = torch.linspace(0, length - 1, count).long()
            assert _evenly_spaced_frames([count], length) == expected.tolist(), (length, count)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [1, 3, FRAMES, 8])
def test_every_form_of_a_clip_is_cut_before_it_is_transformed(form, count):
    if "torchvision" in form:
        torchvision()
    kept = torch.linspace(0, FRAMES - 1, count).long().tolist()
    for (clips, labels), (expected, expected_labels) in zip(
        batches(FORMS[form], [*CHAIN, T.UniformTemporalSubsample(count)]), batches(frames), strict=True
    ):
        clips = torch.stack(clips, 1) if "list" in form else clips
        assert torch.equal(clips, expected[:, kept])
        assert torch.equal(labels, expected_labels)


@pytest.mark.processes
def test_workers_choose_the_same():
    chain = [*CHAIN, T.UniformTemporalSubsample(4), T.UniformTemporalSubsample(2)]
    for (clips, _), (expected, _) in zip(batches(frames, chain, num_workers=2), batches(frames), strict=True):
        assert torch.equal(clips, expected[:, [0, FRAMES - 1]])


def test_masks_and_what_stands_behind_a_list_stay_where_they_are():
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


def test_what_cannot_be():
    with pytest.raises(ValueError, match=r"UniformTemporalSubsample\(num_samples=…\) must be at least 1, got 0"):
        T.UniformTemporalSubsample(0)
    with pytest.raises(ValueError, match="RandomApply cannot hold UniformTemporalSubsample: all clips of"):
        T.RandomApply([T.UniformTemporalSubsample(2)])
    with pytest.raises(ValueError, match="MultiView cannot hold UniformTemporalSubsample: frames are selected once"):
        T.Chain([T.MultiView([[T.UniformTemporalSubsample(2)], [T.CenterCrop(3)]])])
    with pytest.raises(gl.SampleError, match=r"UniformTemporalSubsample takes a video clip.*but this sample has none"):
        batches(lambda i: frames(i)[0], [T.UniformTemporalSubsample(2)])
