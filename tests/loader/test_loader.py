"""The Loader from outside: what comes, in which order, and what is said when something is wrong."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from dataloader.common import Made
from helpers.generated_images import jpeg_bytes, smooth_image
from helpers.html_cells import Cells
from helpers.matrix import matrix
from PIL import Image as PILImage

import gpuload as gl
from gpuload import transforms as T
from gpuload.stage import device as devices
from gpuload.workers import fork_server

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RECIPE = (
    T.RandomResizedCrop(64),
    T.RandomHorizontalFlip(),
    T.ColorJitter(0.4, 0.4, 0.4, 0.1),
    T.Normalize(MEAN, STD),
)


def epoch(dataset, **options) -> list:
    options = {"device": "cpu", "num_workers": 0, **options}
    with gl.Loader(dataset, **options) as loader:
        return list(loader)


def children() -> set[int]:
    pid = os.getpid()
    return {int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


# -- what comes -------------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_folder_of_jpegs_becomes_batches_of_floats_and_labels(jpeg_folder):
    batches = epoch(gl.ImageFolder(jpeg_folder), batch_size=10, transforms=RECIPE, num_workers=2)
    assert [tuple(images.shape) for images, _ in batches] == [(10, 3, 64, 64)] * 4 + [(8, 3, 64, 64)]
    images, labels = batches[0]
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert torch.cat([labels for _, labels in batches]).tolist() == [0] * 16 + [1] * 16 + [2] * 16
    assert -3 < float(images.min()) < 0 < float(images.max()) < 3


@pytest.mark.processes
@matrix(strength=1, workers=[0, 1, 2, 4], chunk=[1, 5, 16])
def test_batches_are_equal_to_the_last_bit_with_any_workers_and_chunks(jpeg_folder, workers, chunk):
    options = {"batch_size": 20, "shuffle": True, "transforms": RECIPE, "seed": 3, "info": True}
    dataset = gl.ImageFolder(jpeg_folder)
    expected = epoch(dataset, num_workers=0, chunk_size=16, **options)
    for ((images, labels), info), ((images_, labels_), info_) in zip(
        epoch(dataset, num_workers=workers, chunk_size=chunk, **options), expected, strict=True
    ):
        assert torch.equal(images, images_)
        assert torch.equal(labels, labels_)
        assert torch.equal(info.indices, info_.indices)


@pytest.mark.slow
def test_a_sample_is_augmented_the_same_whatever_the_batch_size(jpeg_folder):
    dataset = gl.ImageFolder(jpeg_folder)
    whole = torch.cat([images for images, _ in epoch(dataset, batch_size=48, shuffle=True, transforms=RECIPE)])
    for size in (1, 7):
        parts = epoch(dataset, batch_size=size, shuffle=True, transforms=RECIPE)
        assert torch.equal(torch.cat([images for images, _ in parts]), whole)


def test_without_transforms_an_image_is_what_pillow_decodes(jpeg_folder):
    [path, *_] = gl.ImageFiles(jpeg_folder).paths
    with PILImage.open(jpeg_folder / path) as image:
        expected = np.asarray(image.convert("RGB"))
    [images] = epoch(Made(lambda i: gl.read(jpeg_folder / path), 1))
    assert images.dtype == torch.uint8
    difference = np.abs(images[0].permute(1, 2, 0).numpy().astype(int) - expected)
    assert difference.max() <= 2


def test_shuffling_gives_each_sample_once_and_another_order_each_epoch():
    with gl.Loader(Made(lambda i: i, 100), 7, shuffle=True, num_workers=0, device="cpu") as loader:
        orders = [torch.cat(list(loader)).tolist() for _ in range(3)]
        loader.set_epoch(1)
        again = torch.cat(list(loader)).tolist()
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert again == orders[1]
    [other] = [torch.cat(epoch(Made(lambda i: i, 100), batch_size=7, shuffle=True, seed=1))]
    assert other.tolist() != orders[0]


def test_info_says_where_each_batch_stands():
    with gl.Loader(Made(lambda i: i, 10), 4, shuffle=True, num_workers=0, device="cpu", info=True) as loader:
        list(loader)
        for step, (values, info) in enumerate(loader):
            assert (info.epoch, info.step) == (1, step)
            assert info.positions.tolist() == list(range(4 * step, min(4 * step + 4, 10)))
            assert torch.equal(info.indices, values)
            assert info.valid.all()
        assert loader.epoch == 1


@pytest.mark.parametrize(("drop_last", "steps"), [(False, 3), (True, 2)])
def test_the_length_counts_batches(drop_last, steps):
    with gl.Loader(Made(lambda i: i), 4, drop_last=drop_last, num_workers=0, device="cpu") as loader:
        assert len(loader) == steps
        iterator = iter(loader)
        assert len(iterator) == steps
        next(iterator)
        assert len(iterator) == steps - 1
        assert len(list(iterator)) == steps - 1


# -- samples of any kind ----------------------------------------------------------------------------------------------


def picture(index: int) -> np.ndarray:
    return smooth_image(40, 50, index)


def jpeg(index: int) -> gl.Encoded:
    return gl.Encoded(jpeg_bytes(picture(index), quality=95, subsampling="4:4:4"))


@pytest.mark.usefixtures("warm")
@pytest.mark.processes
@pytest.mark.parametrize(
    "make",
    [
        picture,
        lambda i: PILImage.fromarray(picture(i)),
        lambda i: torch.from_numpy(picture(i)).permute(2, 0, 1),
        lambda i: gl.Image(picture(i)),
        lambda i: gl.Image(picture(i).transpose(2, 0, 1), layout="CHW"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_decoded_images_of_any_kind_are_taken(make, workers):
    transforms = [T.RandomCrop(24)]
    [expected] = epoch(Made(lambda i: gl.Image(picture(i)), 4), batch_size=4, transforms=transforms)
    [images] = epoch(Made(make, 4), batch_size=4, transforms=transforms, num_workers=workers)
    assert images.shape == (4, 3, 24, 24)
    assert torch.equal(images, expected)


@pytest.mark.usefixtures("warm")
@pytest.mark.processes
def test_nesting_is_kept_as_default_collate_keeps_it():
    from collections import namedtuple

    Pair = namedtuple("Pair", "image, more")
    sample = lambda i: {"a": Pair(gl.Image(picture(i)), [i, float(i)]), "name": f"n{i}", "v": np.arange(3) * i}  # noqa: E731
    for workers in (0, 1):
        [batch] = epoch(Made(sample, 2), batch_size=2, num_workers=workers)
        assert batch["a"].image.shape == (2, 3, 40, 50)
        assert type(batch["a"]).__name__ == "Pair"
        assert batch["a"].more[0].tolist() == [0, 1]
        assert batch["a"].more[1].dtype == torch.float64
        assert batch["name"] == ["n0", "n1"]
        assert batch["v"].tolist() == [[0, 0, 0], [0, 1, 2]]


@pytest.mark.slow
def test_all_images_of_a_sample_share_its_draws():
    [(left, right, _)] = epoch(
        Made(lambda i: (gl.Image(picture(i)), gl.Image(picture(i)), i), 8), batch_size=8, transforms=RECIPE
    )
    assert torch.equal(left, right)


@pytest.mark.processes
def test_the_users_own_random_numbers_are_a_function_of_the_position():
    import random

    noisy = lambda i: np.array([random.random(), np.random.rand(), float(torch.rand(()))])  # noqa: E731
    [expected] = epoch(Made(noisy, 6), batch_size=6)
    state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    [here] = epoch(Made(noisy, 6), batch_size=6)
    assert random.getstate() == state[0]
    assert np.random.get_state()[1].tolist() == state[1]
    assert torch.equal(torch.get_rng_state(), state[2])
    [there] = epoch(Made(noisy, 6), batch_size=6, num_workers=2, chunk_size=1)
    assert torch.equal(here, expected)
    assert torch.equal(there, expected)
    assert len(expected.unique()) == 18


# -- ragged -----------------------------------------------------------------------------------------------------------


def sized(index: int) -> gl.Image:
    return gl.Image(smooth_image(20 + index, 30, index))


def test_a_batch_that_is_padded_to_multiples_and_its_replay():
    with gl.Loader(Made(sized, 3), 3, ragged="pad", pad_to=32, num_workers=0, device="cpu") as loader:
        [(padded, sizes)] = list(loader)
        alone = loader.replay(0, 1).sample
    assert padded.shape == (3, 3, 32, 32)
    assert sizes.tolist() == [[20, 30], [21, 30], [22, 30]]
    assert torch.equal(padded[1, :, :21, :30], alone)


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_batch_that_is_kept_keeps_its_values(jpeg_folder):
    with gl.Loader(gl.ImageFolder(jpeg_folder), 8, transforms=RECIPE, num_workers=1, device="cpu") as loader:
        kept = [images for images, _ in loader]
        copies = [images.clone() for images in kept]
        list(loader)
        assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_a_ring_smaller_than_a_batch_gives_the_same_batches(jpeg_folder, workers):
    options = {"batch_size": 24, "transforms": [T.Resize((64, 64))], "num_workers": workers}
    dataset = gl.ImageFolder(jpeg_folder)
    expected = epoch(dataset, **options)
    small = epoch(dataset, ring_bytes=256 * 1024, **options)
    for (images, labels), (images_, labels_) in zip(small, expected, strict=True):
        assert torch.equal(images, images_)
        assert torch.equal(labels, labels_)


def test_an_image_larger_than_the_ring_says_what_to_do(jpeg_folder):
    with pytest.raises(
        gl.SampleError, match=r"sample 0.*pixels take .* bytes, more than ring_bytes=65,536 allows; raise"
    ):
        epoch(Made(lambda i: gl.Image(np.zeros((200, 200, 3), np.uint8)), 1), ring_bytes=1)


def snapshot(earlier: set[int]) -> tuple[int, int, int]:
    """Descriptors, child processes besides the earlier ones, and bytes mapped shared or from memfds."""
    gc.collect()
    mapped = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, flags, *_ = line.split()
        if flags.endswith("s") or "memfd:" in line:
            low, high = (int(x, 16) for x in span.split("-"))
            mapped += high - low
    return len(os.listdir("/proc/self/fd")), len(children() - earlier), mapped


@pytest.mark.processes
def test_ten_epochs_broken_off_in_the_middle_leave_what_the_first_left(jpeg_folder):
    with gl.Loader(
        gl.ImageFolder(jpeg_folder), 4, shuffle=True, transforms=RECIPE, num_workers=2, device="cpu"
    ) as loader:
        first, earlier = None, children()
        for _ in range(10):
            for step, _ in enumerate(loader):
                if step == 6:
                    break
            first = first or snapshot(earlier)
        assert snapshot(earlier) == first
        list(loader)
        assert loader._session.ring.used_bytes == 0  # how many slots there are depends on how far workers got ahead


@pytest.mark.processes
def test_closing_leaves_nothing_and_the_next_iter_starts_anew(jpeg_folder):
    fork_server.close()  # that of an earlier test: pytest has changed the environment
    with gl.Loader(gl.ImageFolder(jpeg_folder), 4, transforms=RECIPE, num_workers=2, device="cpu") as first:
        list(first)  # starts the fork server, which stays
    earlier = children()  # those that other tests left may end meanwhile
    before = snapshot(earlier)
    loader = gl.Loader(gl.ImageFolder(jpeg_folder), 4, transforms=RECIPE, num_workers=2, device="cpu")
    assert snapshot(earlier) == before
    assert len(list(loader)) == 12
    assert children() <= earlier  # the template is forked from the fork server, and workers from the template
    loader.close()
    loader.close()
    assert snapshot(earlier) == before
    assert len(list(loader)) == 12
    del loader
    assert snapshot(earlier) == before


@pytest.mark.processes
def test_workers_stay_from_epoch_to_epoch(jpeg_folder):
    with gl.Loader(gl.ImageFolder(jpeg_folder), 4, transforms=RECIPE, num_workers=2, device="cpu") as loader:
        list(loader)
        first = loader._session.engine.pids
        list(loader)
        assert loader._session.engine.pids == first


SECOND = r"has ended: a newer iter\(\) of its Loader was started\. .* zip\(.*\) or nested loops, create a second Loader"


def test_two_epochs_at_once_are_told_to_take_a_second_loader():
    with gl.Loader(Made(lambda i: i), 2, num_workers=0, device="cpu") as loader:
        with pytest.raises(RuntimeError, match=SECOND):
            next(zip(loader, loader, strict=True))
        with pytest.raises(RuntimeError, match=SECOND):
            [(one, other) for one in loader for other in loader]


SCRIPT = """
    import gpuload as gl
    from gpuload import transforms as T

    class Mine:
        scale = 2
        def __init__(self): self.f = lambda i: self.scale * i
        def __getitem__(self, i): return self.f(i)
        def __len__(self): return 10

    loader = gl.Loader(Mine(), 4, num_workers=2, device="cpu")
    for batch in loader:
        print(batch.tolist(), flush=True)
        {end}
"""


@pytest.mark.processes
@pytest.mark.parametrize("end", ["pass", "break", "import sys; sys.exit(0)"])
def test_a_script_without_a_main_guard_runs_and_ends_silently(tmp_path, end):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT.format(end=end)))
    done = subprocess.run([sys.executable, "-W", "error", str(script)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("[0, 2, 4, 6]\n")


@pytest.mark.processes
def test_code_without_a_file_runs_as_in_a_notebook():
    code = textwrap.dedent(SCRIPT.format(end="pass"))
    done = subprocess.run([sys.executable, "-W", "error", "-"], input=code, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[0, 2, 4, 6]\n[8, 10, 12, 14]\n[16, 18]\n"


@pytest.mark.slow
def test_a_folder_dataset_with_read_as_its_loader_is_decoded_by_region(jpeg_folder):
    """As torchvision's ``ImageFolder(root, loader=gpuload.read)``: samples are tuples of what the loader gives."""
    paths = gl.ImageFiles(jpeg_folder).paths
    with_read = epoch(Made(lambda i: (gl.read(paths[i]), i), 8), batch_size=8, transforms=RECIPE)
    without = epoch(gl.ImageFiles(jpeg_folder), batch_size=8, transforms=RECIPE)
    assert torch.equal(with_read[0][0], without[0])


@pytest.mark.processes
def test_importing_gpuload_is_light():
    code = (
        "import sys, gpuload; gpuload.ImageFolder, gpuload.Encoded; print('torch' in sys.modules, 'PIL' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]


# -- what is wrong is said --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"device": "CPU"}, ValueError, "device must be 'cpu', 'cuda', 'cuda:0', 'xpu' or .*, got 'CPU'"),
        ({"device": "cuda:x"}, ValueError, "device must be 'cpu', 'cuda', 'cuda:0', 'xpu' or .*, got 'cuda:x'"),
        ({"device": -1}, ValueError, "device must be 'cpu', 'cuda', 'cuda:0', 'xpu' or .*, got -1"),
        ({"device": 1.5}, TypeError, "device must be 'cpu', 'cuda', 'cuda:0', 'xpu' or .*, got 1.5"),
        ({"device": True}, TypeError, "device must be 'cpu', 'cuda', 'cuda:0', 'xpu' or .*, got True"),
        ({"pad_to": 32.0, "ragged": "pad"}, TypeError, "pad_to must be an integer, got 32.0"),
        ({"pad_to": 0, "ragged": "pad"}, ValueError, "pad_to must be at least 1, got 0"),
        (
            {"pad_to": 32},
            ValueError,
            "pad_to=32 requires ragged='pad', which pads the images of a batch, but ragged is 'error'; set "
            "ragged='pad', or omit pad_to",
        ),
        (
            {"pad_to": 32, "collate_fn": list},
            ValueError,
            "pad_to=32 cannot be combined with a collate_fn, which gets each image in its own size; leave out "
            r"pad_to=32 \(gpuload.pad_collate pads\)",
        ),
        ({"pad_to": 32, "batch_size": None}, ValueError, "pad_to=32 cannot be combined with batch_size=None"),
        ({"transforms": [T.Normalize(MEAN, STD), T.ColorJitter(0.4)]}, ValueError, "ColorJitter"),
        (
            {"batch_size": 20, "drop_last": True},
            ValueError,
            "drop_last=True leaves no batch: the dataset has 10 samples",
        ),
    ],
)
def test_wrong_arguments_are_refused_when_the_loader_is_made(options, error, text):
    with pytest.raises(error, match=text):
        gl.Loader(Made(lambda i: i), **{"device": "cpu", "num_workers": 0, **options})


def loaders():
    dataset = Made(lambda i: i)
    return {
        "DataLoader": torch.utils.data.DataLoader(dataset),
        "Loader": gl.Loader(dataset, device="cpu", num_workers=0),
        "Own": type("Own", (torch.utils.data.DataLoader,), {})(dataset),
    }


TAKERS = {
    "Loader": lambda dataset: gl.Loader(dataset, device="cpu"),
    "Cached": lambda dataset: gl.Cached(dataset, 1 << 20),
    "wrap": gl.wrap,
}


@pytest.mark.parametrize("taker", TAKERS)
def test_a_loader_or_a_class_is_no_dataset(taker):
    for name, loader in loaders().items():
        text = f"the dataset is a {name}, which yields batches; pass its dataset, loader.dataset, and give "
        with pytest.raises(TypeError, match=f"^{re.escape(text)}its batch_size, shuffle and collate_fn to gpuload."):
            TAKERS[taker](loader)
    for cls in (Made, torch.utils.data.TensorDataset, torch.utils.data.IterableDataset, gl.ImageFolder):
        text = f"the dataset is the class {cls.__name__} itself; pass an instance, {cls.__name__}(…)"
        with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
            TAKERS[taker](cls)


@pytest.mark.parametrize("path", ["photos/train", Path("photos/train"), os.curdir])
def test_a_path_is_no_dataset(path):
    name = str(path)
    text = (
        f"the dataset is a path, {name!r}; to read the images of a folder pass "
        f"gpuload.ImageFolder({name!r}), with a folder for each class, or gpuload.ImageFiles({name!r}), "
        "without labels"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        gl.Loader(path, device="cpu")


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        (
            "x/cat.JPG",
            "for the transforms: sample is the path 'x/cat.JPG'; return gpuload.read(path) instead (gpu",
        ),
        ((Path("cat"), 3), "for the transforms: sample[0] is the path 'cat'; return gpuload.read(path) instead"),
        (
            (b"abc", 3),
            "for the transforms: sample[0] is a bytes object; if it holds an image file",
        ),
        ((np.zeros((9, 9, 6), np.uint8), 3), "uint8 array 9×9×6, counts as an image only as gpuload.Image(array)"),
        (("a cat", 3), "for the transforms; return gpuload.Encoded(bytes), gpuload.Image, a PIL image, or"),
    ],
)
def test_a_path_in_a_sample_is_told_how_it_is_read(sample, text):
    with pytest.raises(gl.SampleError, match=re.escape(text)):
        epoch([sample, sample], num_workers=0, transforms=[T.CenterCrop(8)])


def test_paths_without_transforms_are_told_too():
    text = (
        "has a PosixPath (default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists; found "
        f"{type(Path())}); return gpuload.read(path) for an image file, else str(path); gpuload.ImageFiles"
    )
    with pytest.raises(gl.CollateError, match=re.escape(text)):
        epoch([Path("cat.jpg"), Path("dog.jpg")], num_workers=0)


def test_dicts_of_other_keys_are_shown():
    samples = [{"image": picture(0), "mask": 1, "x": 2}, {"image": picture(1), "x": 2, "label": 3}]
    text = "(the keys of the sample differ: 'mask' in the first only, 'label' in the second only): all samples"
    with pytest.raises(gl.CollateError, match=re.escape(text)):
        epoch(samples, batch_size=2, num_workers=0)
    nested = [(picture(0), {"a": {"b": 1}}), (picture(1), {"a": {}})]
    text = "(the keys of '1.a' differ: 'b' in the first only, none in the second only; collate_fn=gpuload.keep('1.a') k"
    with pytest.raises(gl.CollateError, match=re.escape(text)):
        epoch(nested, batch_size=2, num_workers=0)


def test_the_leaf_whose_lengths_differ_is_named_with_what_pads_it():
    samples = [{"image": picture(i), "caption": np.arange(3 + i)} for i in range(2)]
    text = (
        "field 'caption' of the samples cannot be collated into a batch: sample 0 has shape (3,) and sample 1 has "
        "(4,) (stack expects each tensor to be equal size, but got [3] at entry 0 and [4] at entry 1); "
        "collate_fn=gpuload.pad('caption') pads them"
    )
    with pytest.raises(gl.CollateError, match=f"^{re.escape(text)}$"):
        epoch(samples, batch_size=2, num_workers=0)
    boxes = [(picture(i), {"boxes": np.ones((3 + i, 4))}) for i in range(2)]
    text = "collate_fn=gpuload.pad('1.boxes') pads them; boxes returned as gpuload.Boxes(array"
    with pytest.raises(gl.CollateError, match=re.escape(text)):
        epoch(boxes, batch_size=2, num_workers=0)
    lists = [(picture(i), {"tokens": [1] * (3 + i)}) for i in range(2)]
    text = (
        "('1.tokens' has length 3 in the first, 4 in the second; collate_fn=gpuload.pad('1.tokens') pads a list of "
        "numbers, gpuload.keep('1.tokens') keeps any list): all samples of a batch"
    )
    with pytest.raises(gl.CollateError, match=re.escape(text)):
        epoch(lists, batch_size=2, num_workers=0)


def test_a_number_is_a_cuda_device(monkeypatch):
    monkeypatch.setattr(devices, "is_available", lambda: False)
    for device in (0, torch.device("cuda:0")):
        with pytest.raises(
            ValueError, match="device is 'cuda:0', but torch finds no CUDA device here; use device='cpu'"
        ):
            gl.Loader(Made(lambda i: i), num_workers=0, device=device)


@pytest.mark.parametrize("device", ["cpu:0", "cpu:1", torch.device("cpu", 3)])
def test_a_cpu_has_no_number(device):
    with gl.Loader(Made(picture), 2, transforms=[T.CenterCrop(8)], num_workers=0, device=device) as loader:
        assert next(iter(loader)).device == torch.device("cpu")
        assert str(loader.plan()).startswith("backend torch on cpu\n")


def test_a_dataset_of_length_0_is_refused():
    with pytest.raises(ValueError, match=r"the dataset is empty: len\(dataset\) is 0"):
        gl.Loader([], device="cpu")


def test_a_dataset_without_a_length_is_refused():
    with pytest.raises(TypeError, match=r"the dataset is a generator, which can be iterated over only once"):
        gl.Loader((i for i in range(3)), device="cpu")


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_of_the_dataset_arrives_with_index_position_and_traceback(workers):
    def fail_at_5(index):
        if index == 5:
            raise ZeroDivisionError("five is too many")
        return index

    with pytest.raises(gl.SampleError) as caught:
        epoch(Made(fail_at_5), batch_size=3, num_workers=workers)
    error = caught.value
    assert (error.index, error.position, error.source) == (5, 5, None)
    assert str(error).startswith(
        "sample 5, at position 5 of the epoch, could not be loaded: ZeroDivisionError: five is too many"
    )
    assert 'raise ZeroDivisionError("five is too many")' in error.worker_traceback


BAD_FILES = {
    "missing": (None, "FileNotFoundError"),
    "empty": (b"", "DecodeError"),
    "text": (b"this is not a picture\n" * 20, "DecodeError"),
    "truncated": ("truncated", "DecodeError"),
}


@pytest.mark.processes
@pytest.mark.parametrize("kind", BAD_FILES)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_file_is_a_sample_error_with_its_path(tmp_path, capfd, kind, workers):
    content, cause = BAD_FILES[kind]
    folder = tmp_path / "root" / "class"
    folder.mkdir(parents=True)
    good = jpeg_bytes(smooth_image(100, 100, 0), subsampling="4:4:4")
    for name in ("a.jpg", "b.jpg", "c.jpg"):
        (folder / name).write_bytes(good)
    dataset = gl.ImageFolder(tmp_path / "root")
    bad = folder / "b.jpg"
    if content is None:
        bad.unlink()
    else:
        bad.write_bytes(good[: len(good) // 2] if content == "truncated" else content)
    with pytest.raises(gl.SampleError) as caught:
        epoch(dataset, batch_size=3, num_workers=workers)
    assert (caught.value.index, caught.value.source) == (1, str(bad))
    assert caught.value.cause.startswith(cause)
    assert str(bad) in str(caught.value)
    assert capfd.readouterr().err == ""


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_smaller_than_the_crop_names_the_sample(workers):
    with pytest.raises(gl.SampleError, match=r"sample 0.*at position 0"):
        epoch(Made(lambda i: gl.Image(picture(i)), 3), batch_size=3, transforms=[T.RandomCrop(64)], num_workers=workers)


# -- odd surroundings -------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_after_workers_died_too_often_the_next_epoch_starts_anew(tmp_path):
    mark = tmp_path / "healed"

    def die_until_healed(index):
        if not mark.exists():
            os.kill(os.getpid(), 9)
        return index

    with gl.Loader(Made(die_until_healed, 64), 1, num_workers=1, device="cpu") as loader:
        iterator = iter(loader)

        def until_the_end():
            while True:
                with contextlib.suppress(gl.SampleError):
                    next(iterator)

        with pytest.raises(gl.WorkerError, match="more than max_restarts=10 allows"):
            until_the_end()
        with pytest.raises(gl.WorkerError, match="this epoch has failed"):
            next(iterator)
        mark.touch()
        assert torch.cat(list(loader)).tolist() == list(range(64))


class Falls:
    """Goes to pieces when it is unpickled."""

    def __reduce__(self):
        return (int, ("not a number",))


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_an_object_that_cannot_be_unpickled_here_is_an_error_of_its_samples(workers):
    falls = lambda i: Falls() if i == 3 else i  # noqa: E731
    with gl.Loader(Made(falls, 6), 2, num_workers=workers, device="cpu") as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(gl.SampleError, match=r"not a number.*while unpickling the samples in the main process"):
            next(iterator)
        assert next(iterator).tolist() == [4, 5]


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_in_a_forked_child_the_loader_says_whose_it_is_and_the_child_lives(workers):
    loader = gl.Loader(Made(lambda i: i), 2, num_workers=workers, device="cpu")
    iterator = iter(loader)
    next(iterator)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        for use in (lambda: next(iterator), lambda: iter(loader)):
            try:
                use()
            except RuntimeError as error:
                os.write(write_end, str(error).encode() + b"|")
        filled = [np.ones(1 << 22, np.uint8) for _ in range(20)]  # memory that may lie where the ring was
        del iterator
        loader.close()
        os.write(write_end, str(sum(int(a.sum()) for a in filled)).encode())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    *texts, total = os.read(read_end, 10_000).decode().split("|")
    assert len(texts) == 2
    assert all("create a new Loader in the child" in text for text in texts)
    assert int(total) == 20 << 22
    os.close(read_end)
    os.close(write_end)
    assert len(list(loader)) == 5
    loader.close()


@pytest.mark.slow
def test_batches_made_in_inference_mode_are_ordinary_tensors_and_so_are_later_ones(jpeg_folder):
    with gl.Loader(gl.ImageFolder(jpeg_folder), 16, transforms=RECIPE, num_workers=0, device="cpu") as loader:
        with torch.inference_mode():
            inside = [images for images, _ in loader]
        loader.set_epoch(0)
        outside = [images for images, _ in loader]
    assert not any(images.is_inference() for images in inside)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


@pytest.mark.slow
def test_torchs_global_defaults_change_nothing(jpeg_folder):
    options = {"batch_size": 16, "transforms": RECIPE}
    expected = epoch(gl.ImageFolder(jpeg_folder), **options)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        found = epoch(gl.ImageFolder(jpeg_folder), **options)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    for (images, _), (images_, _) in zip(found, expected, strict=True):
        assert images.dtype == torch.float32
        assert torch.equal(images, images_)


@pytest.mark.processes
def test_paths_that_are_no_strings_in_the_import_path_do_not_matter(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    assert len(epoch(Made(lambda i: i), num_workers=1)) == 10


def test_a_draw_that_fails_behind_a_whole_image_transform_names_the_sample():
    small_at_2 = lambda i: gl.Image(smooth_image(40 if i != 2 else 20, 50, i))  # noqa: E731
    with pytest.raises(gl.SampleError, match=r"sample 2.*RandomCrop.*smaller than the crop"):
        epoch(Made(small_at_2, 4), batch_size=4, transforms=[T.ColorJitter(contrast=0.1), T.RandomCrop(30)])


# -- in notebooks -----------------------------------------------------------------------------------------------------

SHOWN = [np.full((20, 24, 3), number, np.uint8) for number in range(1, 7)]


def shown(loader):
    return dict(Cells(loader._repr_html_()).rows)


def test_a_loader_in_a_notebook():
    loader = gl.Loader(SHOWN, 2, transforms=[T.CenterCrop(16)], num_workers=0, device="cpu", seed=7)
    found = shown(loader)
    assert found["samples"] == "6"
    assert found["shuffle, seed"] == "False, 7"
    assert found["transforms"] == "CenterCrop(size=(16, 16))"
    assert found["epoch"] == "0, not begun"
    with loader:
        next(iter(loader))
        assert shown(loader)["epoch"] == "0, begun"


def test_names_of_the_users_own_are_escaped_and_cut():
    class Named(list):
        def __repr__(self):
            return "<img src=x onerror=alert(1)>" + "x" * 100 + "the end"

    loader = gl.Loader(Named(SHOWN), num_workers=0, device="cpu")
    assert "<img" not in loader._repr_html_()
    assert shown(loader)["dataset"].startswith("<img src=x")
    assert shown(loader)["dataset"].endswith("the end")  # cut in the middle
    assert len(shown(loader)["dataset"]) == 100


def test_a_long_list_is_not_written_out():
    class Counted:
        calls = 0

        def __repr__(self):
            Counted.calls += 1
            return "one"

    loader = gl.Loader([Counted()] * 1000, num_workers=0, device="cpu")
    assert shown(loader)["dataset"] == "[one, one, one, one, one, one, ...]"
    assert Counted.calls == 6


def test_no_device_is_asked(monkeypatch):
    loader = gl.Loader(SHOWN, num_workers=0)

    def ask(*given):
        raise AssertionError("a device was asked")

    monkeypatch.setattr(torch.accelerator, "current_device_index", ask)
    monkeypatch.setattr(torch.cuda, "is_available", ask)
    assert shown(loader)["device"] == "the current GPU, or the CPU"
