"""ElasticTransform moves images, masks, boxes and keypoints by the same kind of field as torchvision's, and JPEG gives
batches the pixels that libjpeg gives single images."""

from __future__ import annotations

import io

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

SIZE_HW = HEIGHT, WIDTH = 57, 74
FILL = (3, 90, 200)


def draw_fields(transform, n: int = 6):
    chain = T.Chain([transform])
    program = chain.draw(epoch_key(4, 0), np.arange(n), np.tile([SIZE_HW], (n, 1)))
    record = program.records[0]
    keys = torch.from_numpy(record.keys.astype(np.int64))
    fields = _make_fields(keys, record, HEIGHT, WIDTH)  # smoothed noise
    scale = torch.tensor([record.alpha[0] / WIDTH, record.alpha[1] / HEIGHT])
    return chain, program, (fields.permute(0, 2, 3, 1) * scale)  # in torchvision's layout: n × H × W × 2


@pytest.mark.parametrize("runner", ["single", "batched"])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_elastic_transform_moves_images_like_torchvision(runner, interpolation):
    elastic = peers.torchvision().transforms.v2.functional.elastic
    transform = T.ElasticTransform((90.0, 60.0), (3.0, 4.0), interpolation, FILL)
    chain, program, displacements = draw_fields(transform)
    images = [smooth_image(HEIGHT, WIDTH, number) for number in range(6)]
    results = compile_stage(chain, device="cpu", runner=runner)(RaggedImages.from_arrays(images), program)
    for image, displacement, result in zip(images, displacements, results, strict=True):
        picture = torch.from_numpy(image).permute(2, 0, 1)
        expected = elastic(picture, displacement[None], interpolation, list(map(float, FILL)))
        assert (result != picture).any()
        assert (result.int() - expected.int()).abs().max() <= 1


def test_elastic_transform_draws_fields_distributed_as_torchvisions():
    transforms = peers.torchvision().transforms.v2
    transform = transforms.ElasticTransform(alpha=70.0, sigma=2.0)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        image = torch.zeros(3, HEIGHT, WIDTH)
        their_fields = torch.cat([transform.make_params([image])["displacement"] for _ in range(40)])
    _, _, our_fields = draw_fields(T.ElasticTransform(alpha=70.0, sigma=2.0), 40)
    for plane in (0, 1):
        our_values, their_values = (  # pixels 12 apart are nearly independent, with sigma=2
            field[:, ::12, ::12, plane].flatten().numpy() for field in (our_fields, their_fields)
        )
        assert stats.ks_2samp(our_values, their_values).pvalue > 0.01
        correlations = [
            np.corrcoef(fields[:, :, :-1, plane].flatten(), fields[:, :, 1:, plane].flatten())[0, 1]
            for fields in (our_fields, their_fields)
        ]
        assert correlations[0] == pytest.approx(correlations[1], abs=0.02)


def test_elastic_transform_with_sigma_0_draws_uniform_displacements():
    _, _, fields = draw_fields(T.ElasticTransform(alpha=1.0, sigma=0), 2)
    numbers = fields[..., 0].flatten().numpy() * WIDTH
    assert stats.kstest((numbers + 1) / 2, "uniform").pvalue > 0.01


def test_displace_of_single_pixels_equals_the_complete_field():
    for sigma in (0, (2.0, 6.0)):
        _, program, displacements = draw_fields(T.ElasticTransform((40.0, 30.0), sigma), 3)
        record = program.records[0]
        pixels = np.array([[0, 0], [WIDTH - 1, HEIGHT - 1], [30, 11]])
        keys = record.keys[2].astype(np.int64)
        displacement = displace(record, pixels, keys, np.array([WIDTH, HEIGHT]), np.trunc) - pixels
        field = displacements[2].numpy()[pixels[:, 1], pixels[:, 0]] * [WIDTH / 2, HEIGHT / 2]
        np.testing.assert_allclose(displacement, -field, rtol=1e-5, atol=1e-4)


def test_elastic_transform_moves_boxes_and_keypoints_like_torchvision():
    torchvision = peers.torchvision()
    functional, tv = torchvision.transforms.v2.functional, torchvision.tv_tensors
    _, program, displacements = draw_fields(T.ElasticTransform(80.0, 4.0), 2)
    boxes = np.array([[5.0, 6.0, 30.0, 40.0], [0.0, 0.0, 74.0, 57.0]])
    points = np.array([[3.0, 4.0], [60.0, 50.0]])
    samples = [SampleTargets([boxes.copy()], [points.copy()]) for _ in range(2)]
    apply_records(program.records, samples)
    for sample, displacement in zip(samples, displacements, strict=True):
        target = tv.BoundingBoxes(torch.from_numpy(boxes), format="XYXY", canvas_size=SIZE_HW)
        expected = functional.elastic(target, displacement[None]).numpy()
        np.testing.assert_allclose(sample.boxes[0], expected, rtol=1e-5, atol=1e-3)
        target = tv.KeyPoints(torch.from_numpy(points), canvas_size=SIZE_HW)
        expected = functional.elastic(target, displacement[None]).numpy()
        np.testing.assert_allclose(sample.points[0], expected, rtol=1e-5, atol=1e-3)


def test_elastic_transform_rounds_keypoints_down_and_corners_of_boxes_up_to_a_pixel():
    _, program, displacements = draw_fields(T.ElasticTransform(100.0, 1.0), 1)
    points = np.array([[20.25, 30.75], [50.5, 30.75], [20.25, 40.25], [50.5, 40.25]])
    sample = SampleTargets([np.array([[20.25, 30.75, 50.5, 40.25]])], [points.copy()])
    apply_records(program.records, [sample])
    shifts = displacements[0].numpy() * [WIDTH / 2, HEIGHT / 2]
    columns, rows = points.astype(int).T
    np.testing.assert_allclose(sample.points[0], points - shifts[rows, columns], rtol=1e-5, atol=1e-3)
    corners = points - shifts[rows + 1, columns + 1]
    expected_boxes = [[*corners.min(axis=0), *corners.max(axis=0)]]
    np.testing.assert_allclose(sample.boxes[0], expected_boxes, rtol=1e-5, atol=1e-3)


class Squares(torch.utils.data.Dataset):
    """A bright square, its mask and its box."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        image, mask = np.zeros((*SIZE_HW, 3), np.uint8), np.zeros(SIZE_HW, np.uint8)
        image[20:40, 20:50], mask[20:40, 20:50] = 250, 7
        return gl.Image(image), {"mask": gl.Mask(mask), "boxes": gl.Boxes([[20.0, 20.0, 50.0, 40.0]])}


@pytest.mark.processes
def test_elastic_transform_moves_masks_and_boxes_with_the_image():
    epochs = []
    for workers in (0, 2):
        chain = [T.RandomHorizontalFlip(), T.ElasticTransform(200.0, 5.0, "nearest")]
        with gl.Loader(Squares(), batch_size=3, transforms=chain, num_workers=workers, device="cpu") as loader:
            epochs.append(list(loader))
    for batch, batch_of_workers in zip(*epochs, strict=True):
        assert torch.equal(batch[0], batch_of_workers[0])
    for images, targets in epochs[0]:
        for image, target in zip(images, targets, strict=True):
            assert torch.equal(image[0] == 250, target["mask"] == 7)
            rows, columns = torch.nonzero(image[0] == 250, as_tuple=True)
            left, top, right, bottom = target["boxes"][0].tolist()
            assert abs(columns.min() - left) < 5
            assert abs(rows.min() - top) < 5
            assert abs(columns.max() + 1 - right) < 5
            assert abs(rows.max() + 1 - bottom) < 5


def test_elastic_transform_of_an_image_does_not_depend_on_its_batch():
    images = [smooth_image(HEIGHT, WIDTH, number) for number in range(5)]
    chain = T.Chain([T.ElasticTransform(100.0)])
    for runner in ("single", "batched"):
        stage = compile_stage(chain, device="cpu", runner=runner)
        sizes = np.tile([SIZE_HW], (5, 1))
        results = stage(RaggedImages.from_arrays(images), chain.draw(epoch_key(4, 0), np.arange(5), sizes)).clone()
        for number, image in enumerate(images):
            program = chain.draw(epoch_key(4, 0), np.array([number]), sizes[:1])
            assert torch.equal(stage(RaggedImages.from_arrays([image]), program)[0], results[number])


def test_elastic_transform_varies_less_between_neighbors_with_a_larger_sigma():
    fields = [draw_fields(T.ElasticTransform(50.0, sigma), 2)[2] for sigma in (1.0, 6.0)]
    rough, smooth = (float((f[:, :, 1:] - f[:, :, :-1]).abs().mean() / f.abs().mean()) for f in fields)
    assert rough > 3 * smooth


@pytest.mark.parametrize("size", [(64, 64), (37, 53), (28, 30), (16, 17), (9, 3), (5, 4), (1, 1)])
@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_compress_gives_libjpegs_pixels(size, channels):
    rng = np.random.default_rng(3)
    smooth = np.stack([smooth_image(*size, number) for number in range(3)])
    noise = rng.integers(0, 256, (3, *size, 3), np.uint8)
    images = np.concatenate([smooth, noise])[..., :channels]
    for quality in (1, 7, 30, 50, 75, 96, 100):
        levels = torch.from_numpy(images).permute(0, 3, 1, 2).float()
        results = compress(levels, np.full((6, 8), quality, np.float64)).permute(0, 2, 3, 1).numpy()
        for image, result in zip(images, results, strict=True):
            file = io.BytesIO()
            Image.fromarray(image[:, :, 0] if channels == 1 else image).save(file, "JPEG", quality=quality)
            expected = np.asarray(Image.open(file)).reshape(image.shape)
            np.testing.assert_array_equal(result, expected, err_msg=f"quality {quality}")


def test_jpeg_refuses_images_with_four_channels():
    images = RaggedImages.from_arrays([np.zeros((8, 8, 4), np.uint8)])
    for runner in ("single", "batched"):
        chain = T.Chain([T.JPEG(50)])
        program = chain.draw(epoch_key(1, 0), np.arange(1), np.full((1, 2), 8))
        with pytest.raises(ValueError, match="JPEG takes images with 1 or 3 channels, but image 0 has 4"):
            compile_stage(chain, device="cpu", runner=runner)(images, program)
