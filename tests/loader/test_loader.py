"""The Loader from outside: its batches, their order, its memory and processes, and its errors."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import textwrap
from collections import namedtuple
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.both_loaders import gpuload_batches
from helpers.generated_images import jpeg_bytes, smooth_image
from helpers.html_cells import Cells
from helpers.map_datasets import MapDataset
from helpers.matrix import matrix
from PIL import Image as PILImage

import gpuload as gl
from gpuload import transforms as T
from gpuload.stage import device as devices

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RECIPE = (
    T.RandomResizedCrop(64),
    T.RandomHorizontalFlip(),
    T.ColorJitter(0.4, 0.4, 0.4, 0.1),
    T.Normalize(MEAN, STD),
)
assert_equal_bits = partial(torch.testing.assert_close, rtol=0, atol=0)


def child_processes() -> set[int]:
    pid = os.getpid()
    return {int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


# -- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_loader_of_an_image_folder_yields_float_images_and_labels(jpeg_folder):
    batches = gpuload_batches(gl.ImageFolder(jpeg_folder), batch_size=10, transforms=RECIPE, num_workers=2)
    assert [tuple(images.shape) for images, _ in batches] == [(10, 3, 64, 64)] * 4 + [(8, 3, 64, 64)]
    images, labels = batches[0]
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert torch.cat([labels for _, labels in batches]).tolist() == [0] * 16 + [1] * 16 + [2] * 16
    assert -3 < float(images.min()) < 0 < float(images.max()) < 3


@pytest.mark.processes
@matrix(strength=1, workers=[0, 1, 2, 4], chunk=[1, 5, 16], batch_size=[20, 48, 7])
def test_batches_have_equal_bits_with_any_workers_chunks_and_batch_sizes(jpeg_folder, workers, chunk, batch_size):
    options = {"shuffle": True, "transforms": RECIPE, "seed": 3, "info": True}
    dataset = gl.ImageFolder(jpeg_folder)
    expected = gpuload_batches(dataset, 20, chunk_size=16, **options)
    batches = gpuload_batches(dataset, batch_size, num_workers=workers, chunk_size=chunk, **options)
    assert_equal_bits(joined(batches), joined(expected))


def joined(batches: list) -> list[torch.Tensor]:
    """Return the images, labels and indices of an epoch."""
    rows = [(*batch, info.indices) for batch, info in batches]
    return [torch.cat(tensors) for tensors in zip(*rows, strict=True)]


def test_image_without_transforms_is_what_pillow_decodes(jpeg_folder):
    [path, *_] = gl.ImageFiles(jpeg_folder).paths
    with PILImage.open(jpeg_folder / path) as image:
        expected = np.asarray(image.convert("RGB"))
    [images] = gpuload_batches(MapDataset(lambda i: gl.read(jpeg_folder / path), 1))
    assert images.dtype == torch.uint8
    difference = np.abs(images[0].permute(1, 2, 0).numpy().astype(int) - expected)
    assert difference.max() <= 2  # levels, since the decoders differ


def test_shuffle_yields_each_sample_once_in_a_different_order_each_epoch():
    with gl.Loader(MapDataset(samples=100), 7, shuffle=True, num_workers=0, device="cpu") as loader:
        orders = [torch.cat(list(loader)).tolist() for _ in range(3)]
        loader.set_epoch(1)
        repeated = torch.cat(list(loader)).tolist()
    for order in orders:
        assert sorted(order) == list(range(100))
    assert len({tuple(order) for order in orders}) == 3
    assert repeated == orders[1]
    order_of_seed_1 = torch.cat(gpuload_batches(MapDataset(samples=100), batch_size=7, shuffle=True, seed=1))
    assert order_of_seed_1.tolist() != orders[0]


def test_info_holds_epoch_step_positions_and_indices():
    with gl.Loader(MapDataset(samples=10), 4, shuffle=True, num_workers=0, device="cpu", info=True) as loader:
        list(loader)
        for step, (values, info) in enumerate(loader):
            assert (info.epoch, info.step) == (1, step)
            assert info.positions.tolist() == list(range(4 * step, min(4 * step + 4, 10)))
            assert torch.equal(info.indices, values)
            assert info.valid.all()
        assert loader.epoch == 1


@pytest.mark.parametrize(("drop_last", "steps"), [(False, 3), (True, 2)])
def test_length_is_the_number_of_remaining_batches(drop_last, steps):
    with gl.Loader(MapDataset(), 4, drop_last=drop_last, num_workers=0, device="cpu") as loader:
        assert len(loader) == steps
        iterator = iter(loader)
        assert len(iterator) == steps
        next(iterator)
        assert len(iterator) == steps - 1
        assert len(list(iterator)) == steps - 1


def make_picture(index: int) -> np.ndarray:
    return smooth_image(40, 50, index)


def make_image(index: int) -> gl.Image:
    return gl.Image(make_picture(index))


@pytest.mark.usefixtures("warm")
@pytest.mark.processes
@pytest.mark.parametrize("make", [
    make_picture,
    lambda i: PILImage.fromarray(make_picture(i)),
    lambda i: torch.from_numpy(make_picture(i)).permute(2, 0, 1),
    make_image,
    lambda i: gl.Image(make_picture(i).transpose(2, 0, 1), layout="CHW"),
])  # fmt: skip
@pytest.mark.parametrize("workers", [0, 1])
def test_decoded_images_of_any_kind_give_equal_batches(make, workers):
    transforms = [T.RandomCrop(24)]
    [expected] = gpuload_batches(MapDataset(make_image, 4), batch_size=4, transforms=transforms)
    [images] = gpuload_batches(MapDataset(make, 4), batch_size=4, transforms=transforms, num_workers=workers)
    assert images.shape == (4, 3, 24, 24)
    assert torch.equal(images, expected)


@pytest.mark.usefixtures("warm")
@pytest.mark.processes
def test_collation_keeps_the_nesting_of_samples():
    Pair = namedtuple("Pair", "image, more")
    sample = lambda i: {"a": Pair(make_image(i), [i, float(i)]), "name": f"n{i}", "v": np.arange(3) * i}  # noqa: E731
    for workers in (0, 1):
        [batch] = gpuload_batches(MapDataset(sample, 2), batch_size=2, num_workers=workers)
        assert batch["a"].image.shape == (2, 3, 40, 50)
        assert type(batch["a"]).__name__ == "Pair"
        assert batch["a"].more[0].tolist() == [0, 1]
        assert batch["a"].more[1].dtype == torch.float64
        assert batch["name"] == ["n0", "n1"]
        assert batch["v"].tolist() == [[0, 0, 0], [0, 1, 2]]


@pytest.mark.slow
def test_images_of_one_sample_share_their_draws():
    pairs = MapDataset(lambda i: (make_image(i), make_image(i), i), 8)
    [(left, right, _)] = gpuload_batches(pairs, batch_size=8, transforms=RECIPE)
    assert torch.equal(left, right)


def test_pad_to_pads_a_batch_to_multiples_and_replay_returns_the_unpadded_sample():
    dataset = MapDataset(lambda i: gl.Image(smooth_image(20 + i, 30, i)), 3)
    with gl.Loader(dataset, 3, ragged="pad", pad_to=32, num_workers=0, device="cpu") as loader:
        [(padded, sizes)] = list(loader)
        unpadded = loader.replay(0, 1).sample
    assert padded.shape == (3, 3, 32, 32)
    assert sizes.tolist() == [[20, 30], [21, 30], [22, 30]]
    assert torch.equal(padded[1, :, :21, :30], unpadded)


# -- memory and processes ---------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_batch_keeps_its_values_after_later_batches_and_close(jpeg_folder):
    with gl.Loader(gl.ImageFolder(jpeg_folder), 8, transforms=RECIPE, num_workers=1, device="cpu") as loader:
        batches = [images for images, _ in loader]
        copies = [images.clone() for images in batches]
        list(loader)
        assert_equal_bits(batches, copies)
    assert_equal_bits(batches, copies)


def snapshot(earlier: set[int]) -> tuple[int, int, int]:
    """Count descriptors and child processes besides the earlier ones, and bytes of shared mappings."""
    gc.collect()
    mapped = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, flags, *_ = line.split()
        if flags.endswith("s") or "memfd:" in line:
            low, high = (int(x, 16) for x in span.split("-"))
            mapped += high - low
    return len(os.listdir("/proc/self/fd")), len(child_processes() - earlier), mapped


@pytest.mark.processes
def test_epochs_left_early_leak_no_descriptors_processes_or_memory(jpeg_folder):
    dataset = gl.ImageFolder(jpeg_folder)
    with gl.Loader(dataset, 4, shuffle=True, transforms=RECIPE, num_workers=2, device="cpu") as loader:
        first_snapshot, earlier = None, child_processes()
        for _ in range(10):
            for step, _ in enumerate(loader):
                if step == 6:
                    break
            first_snapshot = first_snapshot or snapshot(earlier)
        assert snapshot(earlier) == first_snapshot
        list(loader)
        assert loader._session.ring.used_bytes == 0  # the number of slots depends on how far workers got


@pytest.mark.processes
def test_workers_persist_between_epochs(jpeg_folder):
    with gl.Loader(gl.ImageFolder(jpeg_folder), 4, transforms=RECIPE, num_workers=2, device="cpu") as loader:
        list(loader)
        pids = loader._session.engine.pids
        list(loader)
        assert loader._session.engine.pids == pids


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
@pytest.mark.parametrize(
    ("end", "steps", "is_file"),
    [
        ("pass", [0, 1, 2], True),
        ("pass", [0, 1, 2], False),
        ("break", [0], True),
        ("import sys; sys.exit(0)", [0], True),
    ],
    ids=["file", "standard input", "break", "exit"],
)
def test_script_without_a_main_guard_runs_and_ends_silently(tmp_path, end, steps, is_file):
    code = textwrap.dedent(SCRIPT.format(end=end))
    script = tmp_path / "script.py"
    script.write_text(code)
    command = [sys.executable, "-W", "error", str(script) if is_file else "-"]
    process = subprocess.run(command, input=None if is_file else code, capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stderr) == (0, "")
    lines = ["[0, 2, 4, 6]", "[8, 10, 12, 14]", "[16, 18]"]
    assert process.stdout.splitlines() == [lines[step] for step in steps]


@pytest.mark.processes
def test_import_gpuload_imports_neither_torch_nor_pillow():
    code = "import sys, gpuload; gpuload.ImageFolder, gpuload.Encoded; print({'torch', 'PIL'} & sys.modules.keys())"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert process.stdout == "set()\n"


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "error", "text"), [
    ({"device": "CPU"}, ValueError, "device must be 'cpu', 'cuda', 'cuda:0', 'xpu' or .*, got 'CPU'"),
    ({"device": "cuda:x"}, ValueError, "device must be 'cpu', 'cuda', 'cuda:0', 'xpu' or .*, got 'cuda:x'"),
    ({"device": -1}, ValueError, "device must be 'cpu', 'cuda', 'cuda:0', 'xpu' or .*, got -1"),
    ({"device": 1.5}, TypeError, "device must be 'cpu', 'cuda', 'cuda:0', 'xpu' or .*, got 1.5"),
    ({"device": True}, TypeError, "device must be 'cpu', 'cuda', 'cuda:0', 'xpu' or .*, got True"),
    ({"pad_to": 32.0, "ragged": "pad"}, TypeError, "pad_to must be an integer, got 32.0"),
    ({"pad_to": 0, "ragged": "pad"}, ValueError, "pad_to must be at least 1, got 0"),
    ({"pad_to": 32}, ValueError,
     "pad_to=32 requires ragged='pad', which pads the images of a batch, but ragged is 'error'; set "
     "ragged='pad', or omit pad_to"),
    ({"pad_to": 32, "collate_fn": list}, ValueError,
     "pad_to=32 cannot be combined with a collate_fn, which gets each image in its own size; leave out "
     r"pad_to=32 \(gpuload.pad_collate pads\)"),
    ({"pad_to": 32, "batch_size": None}, ValueError, "pad_to=32 cannot be combined with batch_size=None"),
    ({"transforms": [T.Normalize(MEAN, STD), T.ColorJitter(0.4)]}, ValueError, "ColorJitter"),
    ({"batch_size": 20, "drop_last": True}, ValueError, "drop_last=True leaves no batch: the dataset has 10 samples"),
])  # fmt: skip
def test_loader_with_wrong_arguments_raises(options, error, text):
    with pytest.raises(error, match=text):
        gl.Loader(MapDataset(), **{"device": "cpu", "num_workers": 0, **options})


def make_loaders():
    dataset = MapDataset()
    return {
        "DataLoader": torch.utils.data.DataLoader(dataset),
        "Loader": gl.Loader(dataset, device="cpu", num_workers=0),
        "Subclass": type("Subclass", (torch.utils.data.DataLoader,), {})(dataset),
    }


ENTRY_POINTS = {
    "Loader": lambda dataset: gl.Loader(dataset, device="cpu"),
    "Cached": lambda dataset: gl.Cached(dataset, 1 << 20),
    "wrap": gl.wrap,
}


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_loader_or_class_as_a_dataset_raises(entry_point):
    for name, loader in make_loaders().items():
        text = f"the dataset is a {name}, which yields batches; pass its dataset, loader.dataset, and give "
        with pytest.raises(TypeError, match=f"^{re.escape(text)}its batch_size, shuffle and collate_fn to gpuload."):
            ENTRY_POINTS[entry_point](loader)
    for cls in (MapDataset, torch.utils.data.TensorDataset, torch.utils.data.IterableDataset, gl.ImageFolder):
        text = f"the dataset is the class {cls.__name__} itself; pass an instance, {cls.__name__}(…)"
        with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
            ENTRY_POINTS[entry_point](cls)


@pytest.mark.parametrize("path", ["photos/train", Path("photos/train"), os.curdir])
def test_path_as_a_dataset_raises_and_names_image_folder(path):
    name = str(path)
    text = (
        f"the dataset is a path, {name!r}; to read the images of a folder pass "
        f"gpuload.ImageFolder({name!r}), with a folder for each class, or gpuload.ImageFiles({name!r}), "
        "without labels"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        gl.Loader(path, device="cpu")


@pytest.mark.parametrize(("sample", "text"), [
    ("x/cat.JPG", "for the transforms: sample is the path 'x/cat.JPG'; return gpuload.read(path) instead (gpu"),
    ((Path("cat"), 3), "for the transforms: sample[0] is the path 'cat'; return gpuload.read(path) instead"),
    ((b"abc", 3), "for the transforms: sample[0] is a bytes object; if it holds an image file"),
    ((np.zeros((9, 9, 6), np.uint8), 3), "uint8 array 9×9×6, counts as an image only as gpuload.Image(array)"),
    (("a cat", 3), "for the transforms; return gpuload.Encoded(bytes), gpuload.Image, a PIL image, or"),
])  # fmt: skip
def test_sample_without_an_image_raises_and_names_the_function_to_use(sample, text):
    with pytest.raises(gl.SampleError, match=re.escape(text)):
        gpuload_batches([sample, sample], transforms=[T.CenterCrop(8)])


@pytest.mark.parametrize(("samples", "text"), [
    ([Path("cat.jpg"), Path("dog.jpg")],
     "has a PosixPath (default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists; found "
     f"{type(Path())}); return gpuload.read(path) for an image file, else str(path); gpuload.ImageFiles"),
    ([{"image": make_picture(0), "mask": 1, "x": 2}, {"image": make_picture(1), "x": 2, "label": 3}],
     "(the keys of the sample differ: 'mask' in the first only, 'label' in the second only): all samples"),
    ([(make_picture(0), {"a": {"b": 1}}), (make_picture(1), {"a": {}})],
     "(the keys of '1.a' differ: 'b' in the first only, none in the second only; collate_fn=gpuload.keep('1.a') k"),
    ([{"image": make_picture(i), "caption": np.arange(3 + i)} for i in range(2)],
     "field 'caption' of the samples cannot be collated into a batch: sample 0 has shape (3,) and sample 1 has "
     "(4,) (stack expects each tensor to be equal size, but got [3] at entry 0 and [4] at entry 1); "
     "collate_fn=gpuload.pad('caption') pads them"),
    ([(make_picture(i), {"boxes": np.ones((3 + i, 4))}) for i in range(2)],
     "collate_fn=gpuload.pad('1.boxes') pads them; boxes returned as gpuload.Boxes(array"),
    ([(make_picture(i), {"tokens": [1] * (3 + i)}) for i in range(2)],
     "('1.tokens' has length 3 in the first, 4 in the second; collate_fn=gpuload.pad('1.tokens') pads a list of "
     "numbers, gpuload.keep('1.tokens') keeps any list): all samples of a batch"),
], ids=["paths", "keys", "nested keys", "arrays", "boxes", "lists"])  # fmt: skip
def test_samples_that_cannot_be_collated_raise_with_a_remedy(samples, text):
    with pytest.raises(gl.CollateError, match=re.escape(text)):
        gpuload_batches(samples, batch_size=2)


def test_device_number_means_a_cuda_device(monkeypatch):
    monkeypatch.setattr(devices, "is_available", lambda: False)
    for device in (0, torch.device("cuda:0")):
        text = "device is 'cuda:0', but torch finds no CUDA device here; use device='cpu'"
        with pytest.raises(ValueError, match=text):
            gl.Loader(MapDataset(), num_workers=0, device=device)


@pytest.mark.parametrize("device", ["cpu:0", "cpu:1", torch.device("cpu", 3)])
def test_cpu_device_ignores_its_number(device):
    with gl.Loader(MapDataset(make_picture), 2, transforms=[T.CenterCrop(8)], num_workers=0, device=device) as loader:
        assert next(iter(loader)).device == torch.device("cpu")
        assert str(loader.plan()).startswith("backend torch on cpu\n")


@pytest.mark.parametrize(("dataset", "error", "text"), [
    ([], ValueError, r"the dataset is empty: len\(dataset\) is 0"),
    ((i for i in range(3)), TypeError, "the dataset is a generator, which can be iterated over only once"),
])  # fmt: skip
def test_empty_dataset_or_generator_raises(dataset, error, text):
    with pytest.raises(error, match=text):
        gl.Loader(dataset, device="cpu")


GOOD_JPEG = jpeg_bytes(smooth_image(100, 100, 0), subsampling="4:4:4")


@pytest.mark.processes
@pytest.mark.parametrize(("content", "cause"), [
    (None, "FileNotFoundError"),
    (b"", "DecodeError"),
    (b"this is not a picture\n" * 20, "DecodeError"),
    (GOOD_JPEG[: len(GOOD_JPEG) // 2], "DecodeError"),
], ids=["missing", "empty", "text", "truncated"])  # fmt: skip
@pytest.mark.parametrize("workers", [0, 1])
def test_bad_file_raises_a_sample_error_with_its_path(tmp_path, capfd, content, cause, workers):
    folder = tmp_path / "root" / "class"
    folder.mkdir(parents=True)
    for name in ("a.jpg", "b.jpg", "c.jpg"):
        (folder / name).write_bytes(GOOD_JPEG)
    dataset = gl.ImageFolder(tmp_path / "root")
    bad = folder / "b.jpg"
    if content is None:
        bad.unlink()
    else:
        bad.write_bytes(content)
    with pytest.raises(gl.SampleError) as caught:
        gpuload_batches(dataset, batch_size=3, num_workers=workers)
    assert (caught.value.index, caught.value.source) == (1, str(bad))
    assert caught.value.cause.startswith(cause)
    assert str(bad) in str(caught.value)
    assert capfd.readouterr().err == ""


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_image_smaller_than_the_crop_raises_a_sample_error(workers):
    with pytest.raises(gl.SampleError, match=r"sample 0.*at position 0"):
        gpuload_batches(MapDataset(make_image, 3), batch_size=3, transforms=[T.RandomCrop(64)], num_workers=workers)


# -- unusual environments ---------------------------------------------------------------------------------------------


class FailsToUnpickle:
    def __reduce__(self):
        return (int, ("not a number",))


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_sample_that_cannot_be_unpickled_raises_a_sample_error(workers):
    make_sample = lambda i: FailsToUnpickle() if i == 3 else i  # noqa: E731
    with gl.Loader(MapDataset(make_sample, 6), 2, num_workers=workers, device="cpu") as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(gl.SampleError, match=r"not a number.*while unpickling the samples in the main process"):
            next(iterator)
        assert next(iterator).tolist() == [4, 5]


@pytest.mark.slow
def test_global_defaults_of_torch_do_not_change_batches(jpeg_folder):
    options = {"batch_size": 16, "transforms": RECIPE}
    expected = gpuload_batches(gl.ImageFolder(jpeg_folder), **options)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        batches = gpuload_batches(gl.ImageFolder(jpeg_folder), **options)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert_equal_bits(batches, expected)


@pytest.mark.processes
def test_workers_start_with_a_path_object_in_sys_path(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    assert len(gpuload_batches(MapDataset(), num_workers=1)) == 10


def test_crop_of_a_smaller_image_after_a_contrast_change_raises_a_sample_error():
    small_at_2 = lambda i: gl.Image(smooth_image(40 if i != 2 else 20, 50, i))  # noqa: E731
    with pytest.raises(gl.SampleError, match=r"sample 2.*RandomCrop.*smaller than the crop"):
        gpuload_batches(
            MapDataset(small_at_2, 4), batch_size=4, transforms=[T.ColorJitter(contrast=0.1), T.RandomCrop(30)]
        )


# -- notebooks --------------------------------------------------------------------------------------------------------

PICTURES = [np.full((20, 24, 3), number, np.uint8) for number in range(1, 7)]


def notebook_rows(loader):
    return dict(Cells(loader._repr_html_()).rows)


def test_loader_in_a_notebook_shows_its_options_and_epoch():
    loader = gl.Loader(PICTURES, 2, transforms=[T.CenterCrop(16)], num_workers=0, device="cpu", seed=7)
    rows = notebook_rows(loader)
    assert rows["samples"] == "6"
    assert rows["shuffle, seed"] == "False, 7"
    assert rows["transforms"] == "CenterCrop(size=(16, 16))"
    assert rows["epoch"] == "0, not begun"
    with loader:
        next(iter(loader))
        assert notebook_rows(loader)["epoch"] == "0, begun"


def test_repr_of_a_dataset_in_a_notebook_is_escaped_and_shortened():
    class Named(list):
        def __repr__(self):
            return "<img src=x onerror=alert(1)>" + "x" * 100 + "the end"

    loader = gl.Loader(Named(PICTURES), num_workers=0, device="cpu")
    assert "<img" not in loader._repr_html_()
    assert notebook_rows(loader)["dataset"].startswith("<img src=x")
    assert notebook_rows(loader)["dataset"].endswith("the end")  # shortened in the middle
    assert len(notebook_rows(loader)["dataset"]) == 100


def test_long_list_as_a_dataset_is_shown_shortened():
    class Counted:
        calls = 0

        def __repr__(self):
            Counted.calls += 1
            return "one"

    loader = gl.Loader([Counted()] * 1000, num_workers=0, device="cpu")
    assert notebook_rows(loader)["dataset"] == "[one, one, one, one, one, one, ...]"
    assert Counted.calls == 6


def test_loader_in_a_notebook_queries_no_device(monkeypatch):
    loader = gl.Loader(PICTURES, num_workers=0)

    def fail(*args):
        raise AssertionError("a device was queried")

    monkeypatch.setattr(torch.accelerator, "current_device_index", fail)
    monkeypatch.setattr(torch.cuda, "is_available", fail)
    assert notebook_rows(loader)["device"] == "the current GPU, or the CPU"
