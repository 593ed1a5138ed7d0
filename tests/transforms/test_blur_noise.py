"""ElasticTransform: the field, and what it does to images, masks, boxes and keypoints, against torchvision's.
JPEG: what is drawn, what is refused, and that batches become what libjpeg makes of single images.
"""

from __future__ import annotations

import io
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import peers
from helpers.generated_images import smooth_image
from PIL import Image
from scipy import stats

import gpuload as gl
from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages, compile_stage
from gpuload.stage.reference.jpeg import compress
from gpuload.stage.reference.warp import _make_fields
from gpuload.transforms.program.fields import displace
from gpuload.transforms.program.targets import SampleTargets, apply_records

SIZE = HEIGHT, WIDTH = 57, 74
FILL = (3, 90, 200)


def drawn(transform, n: int = 6):
    chain = T.Chain([transform])
    program = chain.draw(epoch_key(4, 0), np.arange(n), np.tile([SIZE], (n, 1)))
    record = program.records[0]
    keys = torch.from_numpy(record.keys.astype(np.int64))
    fields = _make_fields(keys, record, HEIGHT, WIDTH)  # noise, smoothed
    scale = torch.tensor([record.alpha[0] / WIDTH, record.alpha[1] / HEIGHT])
    return chain, program, (fields.permute(0, 2, 3, 1) * scale)  # as torchvision has it: n × H × W × 2


@pytest.mark.parametrize("runner", ["single", "batched"])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_images_are_moved_as_by_torchvision(runner, interpolation):
    elastic = peers.torchvision().transforms.v2.functional.elastic
    transform = T.ElasticTransform((90.0, 60.0), (3.0, 4.0), interpolation, FILL)
    chain, program, displacements = drawn(transform)
    images = [smooth_image(HEIGHT, WIDTH, number) for number in range(6)]
    results = compile_stage(chain, device="cpu", runner=runner)(RaggedImages.from_arrays(images), program)
    for image, displacement, result in zip(images, displacements, results, strict=True):
        picture = torch.from_numpy(image).permute(2, 0, 1)
        expected = elastic(picture, displacement[None], interpolation, list(map(float, FILL)))
        assert (result != picture).any()
        assert (result.int() - expected.int()).abs().max() <= 1


def test_fields_are_distributed_as_torchvisions():
    transforms = peers.torchvision().transforms.v2
    theirs = transforms.ElasticTransform(alpha=70.0, sigma=2.0)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        image = torch.zeros(3, HEIGHT, WIDTH)
        made = torch.cat([theirs.make_params([image])["displacement"] for _ in range(40)])
    _, _, ours = drawn(T.ElasticTransform(alpha=70.0, sigma=2.0), 40)
    for plane in (0, 1):
        one, other = (field[:, ::12, ::12, plane].flatten().numpy() for field in (ours, made))
        assert stats.ks_2samp(one, other).pvalue > 0.01
        near = [np.corrcoef(f[:, :, :-1, plane].flatten(), f[:, :, 1:, plane].flatten())[0, 1] for f in (ours, made)]
        assert near[0] == pytest.approx(near[1], abs=0.02)


def test_noise_without_smoothing_is_uniform():
    _, _, fields = drawn(T.ElasticTransform(alpha=1.0, sigma=0), 2)
    numbers = fields[..., 0].flatten().numpy() * WIDTH
    assert stats.kstest((numbers + 1) / 2, "uniform").pvalue > 0.01


def test_a_displacement_is_that_of_its_pixel_in_the_whole_field():
    for sigma in (0, (2.0, 6.0)):
        _, program, displacements = drawn(T.ElasticTransform((40.0, 30.0), sigma), 3)
        record = program.records[0]
        pixels = np.array([[0, 0], [WIDTH - 1, HEIGHT - 1], [30, 11]])
        found = displace(record, 2, pixels, np.trunc) - pixels
        field = displacements[2].numpy()[pixels[:, 1], pixels[:, 0]] * [WIDTH / 2, HEIGHT / 2]
        assert np.allclose(found, -field, atol=1e-4)


def test_boxes_and_keypoints_move_as_by_torchvision():
    torchvision = peers.torchvision()
    functional, tv = torchvision.transforms.v2.functional, torchvision.tv_tensors
    _, program, displacements = drawn(T.ElasticTransform(80.0, 4.0), 2)
    boxes = np.array([[5.0, 6.0, 30.0, 40.0], [0.0, 0.0, 74.0, 57.0]])
    points = np.array([[3.0, 4.0], [60.0, 50.0]])
    samples = [SampleTargets([boxes.copy()], [points.copy()]) for _ in range(2)]
    apply_records(program.records, samples)
    for sample, displacement in zip(samples, displacements, strict=True):
        given = tv.BoundingBoxes(torch.from_numpy(boxes), format="XYXY", canvas_size=SIZE)
        assert np.allclose(sample.boxes[0], functional.elastic(given, displacement[None]).numpy(), atol=1e-3)
        given = tv.KeyPoints(torch.from_numpy(points), canvas_size=SIZE)
        assert np.allclose(sample.points[0], functional.elastic(given, displacement[None]).numpy(), atol=1e-3)


def test_points_between_pixels_move_as_the_pixel_before_and_corners_of_boxes_as_the_pixel_after():
    _, program, displacements = drawn(T.ElasticTransform(100.0, 1.0), 1)
    points = np.array([[20.25, 30.75], [50.5, 30.75], [20.25, 40.25], [50.5, 40.25]])
    sample = SampleTargets([np.array([[20.25, 30.75, 50.5, 40.25]])], [points.copy()])
    apply_records(program.records, [sample])
    shifts = displacements[0].numpy() * [WIDTH / 2, HEIGHT / 2]
    columns, rows = points.astype(int).T
    assert np.allclose(sample.points[0], points - shifts[rows, columns], atol=1e-3)
    corners = points - shifts[rows + 1, columns + 1]
    assert np.allclose(sample.boxes[0], [[*corners.min(axis=0), *corners.max(axis=0)]], atol=1e-3)


class Squares(torch.utils.data.Dataset):
    """A bright square, its mask and its box."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        image, mask = np.zeros((*SIZE, 3), np.uint8), np.zeros(SIZE, np.uint8)
        image[20:40, 20:50], mask[20:40, 20:50] = 250, 7
        return gl.Image(image), {"mask": gl.Mask(mask), "boxes": gl.Boxes([[20.0, 20.0, 50.0, 40.0]])}


@pytest.mark.processes
def test_masks_and_boxes_move_with_the_image_on_any_number_of_workers():
    made = []
    for workers in (0, 2):
        chain = [T.RandomHorizontalFlip(), T.ElasticTransform(200.0, 5.0, "nearest")]
        with gl.Loader(Squares(), batch_size=3, transforms=chain, num_workers=workers, device="cpu") as loader:
            made.append(list(loader))
    for one, other in zip(*made, strict=True):
        assert torch.equal(one[0], other[0])
    for images, targets in made[0]:
        for image, target in zip(images, targets, strict=True):
            assert torch.equal(image[0] == 250, target["mask"] == 7)
            rows, columns = torch.nonzero(image[0] == 250, as_tuple=True)
            left, top, right, bottom = target["boxes"][0].tolist()
            assert abs(columns.min() - left) < 5
            assert abs(rows.min() - top) < 5
            assert abs(columns.max() + 1 - right) < 5
            assert abs(rows.max() + 1 - bottom) < 5


def test_an_image_does_not_depend_on_its_batch():
    images = [smooth_image(HEIGHT, WIDTH, number) for number in range(5)]
    chain = T.Chain([T.ElasticTransform(100.0)])
    for runner in ("single", "batched"):
        stage = compile_stage(chain, device="cpu", runner=runner)
        sizes = np.tile([SIZE], (5, 1))
        whole = stage(RaggedImages.from_arrays(images), chain.draw(epoch_key(4, 0), np.arange(5), sizes)).clone()
        for number, image in enumerate(images):
            program = chain.draw(epoch_key(4, 0), np.array([number]), sizes[:1])
            assert torch.equal(stage(RaggedImages.from_arrays([image]), program)[0], whole[number])


def test_smoothing_makes_neighbours_alike():
    rough, smooth = (drawn(T.ElasticTransform(50.0, sigma), 2)[2] for sigma in (1.0, 6.0))
    steps = [float((f[:, :, 1:] - f[:, :, :-1]).abs().mean() / f.abs().mean()) for f in (rough, smooth)]
    assert all(one > 3 * other for one, other in pairwise(steps))


@pytest.mark.parametrize("size", [(64, 64), (37, 53), (28, 30), (16, 17), (9, 3), (5, 4), (1, 1)])
@pytest.mark.parametrize("channels", [1, 3])
def test_batches_are_coded_as_by_libjpeg(size, channels):
    rng = np.random.default_rng(3)
    smooth = np.stack([smooth_image(*size, number) for number in range(3)])
    noise = rng.integers(0, 256, (3, *size, 3), np.uint8)
    images = np.concatenate([smooth, noise])[..., :channels]
    for quality in (1, 7, 30, 50, 75, 96, 100):
        levels = torch.from_numpy(images).permute(0, 3, 1, 2).float()
        found = compress(levels, np.full((6, 8), quality, np.float64)).permute(0, 2, 3, 1).numpy()
        for image, result in zip(images, found, strict=True):
            file = io.BytesIO()
            Image.fromarray(image[:, :, 0] if channels == 1 else image).save(file, "JPEG", quality=quality)
            assert np.array_equal(np.asarray(Image.open(file)).reshape(image.shape), result), quality


def test_four_channels_are_refused():
    images = RaggedImages.from_arrays([np.zeros((8, 8, 4), np.uint8)])
    for runner in ("single", "batched"):
        chain = T.Chain([T.JPEG(50)])
        program = chain.draw(epoch_key(1, 0), np.arange(1), np.full((1, 2), 8))
        with pytest.raises(ValueError, match="JPEG takes images with 1 or 3 channels, but image 0 has 4"):
            compile_stage(chain, device="cpu", runner=runner)(images, program)
