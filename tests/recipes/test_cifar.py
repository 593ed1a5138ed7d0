"""CIFAR: images of 32×32 in arrays, padded and cropped, with AutoAugment's CIFAR policy and erasing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import peers
from PIL import Image
from recipes.comparison import (
    Pictures,
    check_replay,
    check_runners,
    first_batch,
    gpuload_batch,
    levels_apart,
    shape_of,
    torch_batch,
)

from gpuload import transforms as T

vision = peers.torchvision()
v1, v2 = vision.transforms, vision.transforms.v2
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def torchvision_train(*more, erasing: float = 0.0):
    end = [v1.RandomErasing(erasing, scale=(0.05, 0.3), value=(0.1, 0.2, 0.3))] if erasing else []
    crop = v1.RandomCrop(32, padding=4, padding_mode="reflect")
    return v1.Compose([crop, v1.RandomHorizontalFlip(), *more, v1.ToTensor(), v1.Normalize(MEAN, STD), *end])


def gpuload_train(*more, erasing: float = 0.0):
    end = [T.RandomErasing(erasing, scale=(0.05, 0.3), value=(0.1, 0.2, 0.3))] if erasing else []
    crop = T.RandomCrop(32, padding=4, padding_mode="reflect")
    return [crop, T.RandomHorizontalFlip(), *more, T.ToDtype("float32", scale=True), T.Normalize(MEAN, STD), *end]


TORCHVISION_EVALUATION = v1.Compose([v1.ToTensor(), v1.Normalize(MEAN, STD)])
GPULOAD_EVALUATION = [T.ToDtype("float32", scale=True), T.Normalize(MEAN, STD)]


@pytest.fixture
def cifar_images(pictures, backend) -> list[Image.Image]:
    """Photographs of CIFAR's size, three of each for more draws, but only one where kernels are interpreted."""
    return [image.resize((32, 32)) for image in pictures for _ in range(1 if backend == "fused" else 3)]


def test_cifar_evaluation_equals_torchvisions(cifar_images, backend):
    assert T.from_torchvision(TORCHVISION_EVALUATION) == GPULOAD_EVALUATION
    batch, expected = (
        gpuload_batch(cifar_images, GPULOAD_EVALUATION, len(cifar_images), backend=backend),
        torch_batch(cifar_images, TORCHVISION_EVALUATION, len(cifar_images)),
    )
    assert levels_apart(batch[0], expected[0], STD).max() < 0.001
    assert shape_of(batch) == shape_of(expected)


@pytest.mark.parametrize(
    ("original_steps", "steps"),
    [
        ([], []),
        ([v1.AutoAugment(v1.AutoAugmentPolicy.CIFAR10)], [T.AutoAugment("cifar10")]),
        ([v1.TrivialAugmentWide()], [T.TrivialAugmentWide()]),
    ],
    ids=["plain", "autoaugment", "trivialaugment"],
)
def test_cifar_training_equals_torchvisions_for_the_same_draws(cifar_images, backend, original_steps, steps):
    chain = gpuload_train(*steps, erasing=0.5)
    assert T.from_torchvision(torchvision_train(*original_steps, erasing=0.5)) == chain
    # Nothing is resampled before the policies, but their blends may round differently, and later operations amplify it.
    max_mean, max_level = (0.02, 40) if steps else (0.001, 0.001)
    check_replay(chain, cifar_images, max_mean=max_mean, max_level=max_level, std=STD, backend=backend)
    if backend == "torch":
        check_runners(chain, cifar_images)
    expected = torch_batch(cifar_images, torchvision_train(*original_steps, erasing=0.5), 4)
    assert shape_of(gpuload_batch(cifar_images, chain, 4, backend=backend)) == shape_of(expected)


def test_cifar_arrays_give_the_same_batch_as_pillow_images(images):
    """The files of CIFAR contain one uint8 array N×H×W×C."""
    cifar_images = [image.resize((32, 32)) for image in images]
    arrays = np.stack([np.asarray(image) for image in cifar_images])
    pictures = Pictures(arrays)
    batch, _ = first_batch(pictures, len(cifar_images), gpuload_train())
    assert torch.equal(batch, gpuload_batch(cifar_images, gpuload_train(), len(cifar_images))[0])
