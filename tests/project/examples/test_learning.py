"""Each example learns from the small images that it generates; its loader moves boxes and masks with the images."""

from __future__ import annotations

import importlib
import re
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from helpers import lacking, peers
from project.examples.conftest import FOLDER

import gpuload as gl

IMAGES = 128  # for training, in a small dataset
MEAN, STD = (torch.tensor(three)[:, None, None] for three in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
# Examples that train a classifier with F.cross_entropy, a step for each batch of 32.
CLASSIFIERS = ("keep_your_loader", "plain", "with_albumentations", "with_kornia")


def printed_numbers(text: str, pattern: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, text)]


def loss_ratio(text: str, pattern: str = r"loss ([\d.]+)") -> float:
    """Return the last printed loss as a fraction of the first."""
    losses = printed_numbers(text, pattern)
    return losses[-1] / losses[0]


def images_per_epoch(sizes: list[int], epochs: int) -> list[int]:
    steps = len(sizes) // epochs
    return [sum(sizes[epoch * steps : (epoch + 1) * steps]) for epoch in range(epochs)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifier_example_learns(name, run, steps):
    text = run(name, "--epochs", 2, "--size", 48)
    assert loss_ratio(text, r"epoch \d: loss ([\d.]+)") < 0.9
    assert images_per_epoch(steps.sizes, 2) == [IMAGES] * 2


@pytest.mark.processes
def test_plain_example_runs_on_a_folder_with_workers(run, tmp_path):
    importlib.import_module("small").folder(tmp_path, 48, 16)
    text = run("plain", tmp_path, "--epochs", 1, "--size", 32, "--workers", 2)
    assert re.fullmatch(r"epoch 1: loss \d\.\d+, [\d,]+ images/s, validation accuracy \d+\.\d%\n", text)


@pytest.mark.slow
def test_timm_example_learns(run):
    peers.timm()
    text = run("with_timm", "--model", "test_resnet", "--epochs", 3, "--size", 32, "--lr", 0.01)
    assert loss_ratio(text) < 1
    assert printed_numbers(text, r"validation accuracy ([\d.]+)%")[-1] > 40  # by chance 25


@pytest.mark.slow
def test_imagenet_example_trains_and_evaluates_its_checkpoint(run, steps):
    peers.torchvision()
    options = ["-a", "mobilenet_v3_small", "--size", 32, "--lr", 0.5, "--print-every", 2]
    text = run("imagenet", *options, "--epochs", 1)
    assert images_per_epoch(steps.sizes, 1) == [IMAGES]
    assert "step 4 of 4: loss" in text
    assert re.search(r"epoch 1: \d+\.\d+% correct", text)
    [evaluated] = printed_numbers(run("imagenet", *options, "--evaluate"), r"([\d.]+)% correct")
    assert evaluated == printed_numbers(text, r"([\d.]+)% correct")[0]  # from the checkpoint


@pytest.mark.slow
def test_detection_example_learns(run):
    text = run("detection", "--epochs", 4)
    assert loss_ratio(text) < 0.8
    found_boxes, all_boxes = (int(number) for number in re.findall(r"(\d+) of (\d+) boxes found", text)[-1])
    assert found_boxes > all_boxes / 3


def to_levels(normalized: torch.Tensor) -> torch.Tensor:
    return (normalized * STD + MEAN) * 255


def is_colored(image: torch.Tensor) -> torch.Tensor:
    """Return which pixels belong to shapes; the background is gray."""
    return image.amax(0) - image.amin(0) > 60


@pytest.mark.usefixtures("run")  # so that the modules of examples can be imported
def test_detection_loader_moves_boxes_with_their_images(tmp_path):
    """Each box contains colored pixels up to its edges, and few pixels outside of the boxes are colored."""
    importlib.import_module("small").coco(tmp_path, 24, 1)
    args = Namespace(batch_size=12, size=96, workers=0, device="cpu")
    with importlib.import_module("detection").loader(tmp_path, "train", args) as loader:
        for images, targets in loader:
            for image, target in zip(to_levels(images), targets, strict=True):
                outside = is_colored(image)
                for left, top, right, bottom in target["boxes"].round().int().tolist():
                    inside = is_colored(image)[top:bottom, left:right]
                    assert inside.any(0).float().mean() > 0.9
                    assert inside.any(1).float().mean() > 0.9
                    outside[max(top - 2, 0) : bottom + 2, max(left - 2, 0) : right + 2] = False
                assert outside.float().mean() < 0.1  # remains of shapes that were cut and have no box


@pytest.mark.slow
def test_segmentation_example_learns(run, steps):
    text = run("segmentation", "--epochs", 2, "--size", 48)
    assert loss_ratio(text) < 0.8
    assert printed_numbers(text, r"mean IoU ([\d.]+)%")[-1] > 30
    assert images_per_epoch(steps.sizes, 2) == [IMAGES] * 2


@pytest.mark.usefixtures("run")  # so that the modules of examples can be imported
def test_segmentation_loader_moves_masks_with_their_images(tmp_path):
    importlib.import_module("small").voc(tmp_path, 24, 1)
    args = Namespace(batch_size=12, size=96, workers=0, device="cpu")
    with importlib.import_module("segmentation").loader(tmp_path, "train", args) as loader:
        for images, masks in loader:
            for image, mask in zip(to_levels(images), masks, strict=True):
                known = mask != 255
                assert (is_colored(image) == (mask > 0))[known].float().mean() > 0.95


@pytest.mark.slow
def test_self_supervised_example_learns(run):
    text = run("self_supervised", "--epochs", 3, "--size", 40)
    assert loss_ratio(text, r"epoch \d: loss ([\d.]+)") < 0.95
    assert printed_numbers(text, r"([\d.]+)% of nearest neighbours have the same class")[0] > 50  # by chance 25


@pytest.mark.slow
def test_video_example_learns(run, steps):
    lacking.require("torchcodec")
    example = importlib.import_module("video")
    if (reason := example.missing()) is not None:
        lacking.skip("FFmpeg", reason)
    assert loss_ratio(run("video", "--size", 48)) < 0.8
    assert images_per_epoch(steps.sizes, 8) == [48] * 8


@pytest.mark.parametrize("package", ["torchcodec", "torchcodec.decoders"])
def test_video_example_without_torchcodec_says_what_to_install(run, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    text = run("video")
    assert text.startswith("nothing to do without TorchCodec and FFmpeg (")
    assert text.endswith("): apt-get install ffmpeg, pip install torchcodec\n")


@pytest.mark.slow
def test_image_text_example_learns(run):
    text = run("image_text", "--epochs", 3, "--size", 48)
    matched = printed_numbers(text, r"([\d.]+)% of the images matched with their caption")
    assert loss_ratio(text) < 0.9
    assert matched[-1] > 1.3 * matched[0]


@pytest.mark.usefixtures("run")  # so that the modules of examples can be imported
def test_albumentations_example_draws_the_same_in_chunks_of_any_size(tmp_path):
    lacking.require("albumentations")
    importlib.import_module("small").folder(tmp_path, 24, 1)
    dataset = importlib.import_module("with_albumentations").Augmented(tmp_path / "train")
    batches = []
    for chunk in (2, 8):  # another order of the work
        with gl.Loader(dataset, 8, True, chunk_size=chunk, num_workers=0, device="cpu") as loader:
            batches.append(torch.cat([images for images, _ in loader]))
    assert torch.equal(*batches)


def test_kornia_example_runs_with_the_kornia_backend(run):
    text = run("with_kornia", "--epochs", 0, "--backend", "kornia")
    assert text.startswith("backend kornia on cpu")
    assert re.search(r"RandomGrayscale\(.*\s+kornia\n", text)
    assert re.search(r"RandomResizedCrop\(.*\s+kornia +not antialiased\n", text)


FILES = sorted(path for path in FOLDER.glob("*.py") if path.stem != "small")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_example_docstring_shows_how_to_run_it(path: Path):
    doc = path.read_text().split('"""')[1]
    assert f"examples/{path.name}" in doc
    assert "small.parser(__doc__)" in path.read_text()
    assert len(path.read_text().splitlines()) <= 140, "the example is too long to be read at once"


def test_example_help_shows_the_docstring(run, capsys):
    with pytest.raises(SystemExit) as caught:
        run("plain", "--help")
    assert caught.value.code == 0
    output = capsys.readouterr().out
    assert "python examples/plain.py PATH --epochs 10" in output
    assert "--batch-size" in output


def test_examples_readme_lists_each_example():
    readme = (FOLDER / "README.md").read_text()
    assert [path.name for path in FILES if f"]({path.name})" not in readme] == []
