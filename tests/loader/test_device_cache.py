"""A loader of a `DeviceCached`: reads once, then no file and no worker; bits, faults and states as without it."""

from __future__ import annotations

import logging
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

import gpuload as gl
from gpuload import transforms as T
from gpuload.errors import LimitError
from gpuload.loader import device_cache
from gpuload.workers.process import WorkerProcess

CHAIN = [T.RandomResizedCrop(16), T.RandomHorizontalFlip(), T.Normalize((0.5,) * 3, (0.5,) * 3)]
OPTIONS: dict[str, Any] = {"batch_size": 6, "num_workers": 0, "device": "cpu", "transforms": CHAIN, "info": True}


class Counted:
    """Images of several sizes with labels; counts what is asked for."""

    def __init__(self, count: int = 20, bad: tuple[int, ...] = ()) -> None:
        self.count, self.bad = count, bad
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        if index in self.bad:
            raise ValueError(f"no sample {index}")
        index %= self.count
        rng = np.random.default_rng(index)
        return rng.integers(0, 256, (20 + index, 30 - index, 3), dtype=np.uint8), index


def pids() -> set[int]:
    """The processes that this one has started and that still run."""
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def same(found: Any, expected: Any) -> None:
    found, expected = list(found), list(expected)
    assert len(found) == len(expected)
    for ((images, labels), info), ((images_, labels_), info_) in zip(found, expected, strict=True):
        assert torch.equal(images, images_)
        assert torch.equal(torch.as_tensor(labels), torch.as_tensor(labels_))
        assert torch.equal(info.positions, info_.positions)
        assert torch.equal(info.indices, info_.indices)


# -- what is read, and by whom ----------------------------------------------------------------------------------------


def test_epochs_after_the_first_iter_ask_for_nothing():
    dataset = Counted()
    with (
        gl.Loader(gl.DeviceCached(dataset), shuffle=True, **OPTIONS) as loader,
        gl.Loader(Counted(), shuffle=True, **OPTIONS) as without,
    ):
        iterator = iter(loader)
        assert set(dataset.asked) == set(range(20))
        dataset.asked.clear()
        same(iterator, without)
        same(loader, without)
    assert dataset.asked == []


@pytest.mark.processes
def test_workers_read_the_files_and_end_before_the_first_batch(tmp_path, jpeg_folder, monkeypatch):
    started = []
    init = WorkerProcess.__init__
    monkeypatch.setattr(WorkerProcess, "__init__", lambda self, *a, **o: (started.append(self), init(self, *a, **o))[1])
    folder = tmp_path / "copy"
    for path in Path(jpeg_folder).rglob("*.jpg"):
        (folder / path.parent.name).mkdir(parents=True, exist_ok=True)
        (folder / path.parent.name / path.name).write_bytes(path.read_bytes())
    options = OPTIONS | {"num_workers": 2, "shuffle": True}
    with gl.Loader(gl.ImageFolder(jpeg_folder), **(options | {"num_workers": 0})) as without:
        expected = [list(without), list(without)]
    with gl.Loader(gl.DeviceCached(gl.ImageFolder(folder)), **options) as loader:
        iterator = iter(loader)
        assert len(started) == 2
        assert all(worker.pid not in pids() for worker in started)
        for path in folder.rglob("*.jpg"):
            path.unlink()
        same(iterator, expected[0])
        same(loader, expected[1])
        assert len(started) == 2
        assert loader.stats().workers == ()


def test_loaders_that_read_alike_share_what_is_kept():
    dataset = Counted()
    cached = gl.DeviceCached(dataset)
    evaluation = OPTIONS | {"transforms": [T.Resize((8, 8)), CHAIN[-1]]}
    with gl.Loader(cached, **OPTIONS) as loader, gl.Loader(Subset(cached, [5, 2, 9]), **evaluation) as part:
        list(loader)
        dataset.asked.clear()
        ((images, labels), info), *_ = list(part)
        assert dataset.asked == []
        assert (labels.tolist(), info.indices.tolist()) == ([5, 2, 9], [0, 1, 2])
    with gl.Loader(Subset(Counted(), [5, 2, 9]), **evaluation) as without:
        assert torch.equal(images, next(iter(without))[0][0])
    with gl.Loader(cached, **(OPTIONS | {"decode": gl.Decode(exif=True)})) as other:
        iter(other)
    assert set(dataset.asked) == set(range(20))  # it reads in another way
    assert len(cached.cached_data) == 2


def test_what_is_kept_outlives_the_loader_and_ends_with_clear():
    dataset = Counted()
    cached = gl.DeviceCached(dataset)
    for asked in (20, 0, 20):
        with gl.Loader(cached, persistent_workers=False, **OPTIONS) as loader:
            dataset.asked.clear()
            list(loader)
            list(loader)
        assert len(set(dataset.asked)) == asked
        if not asked:
            cached.clear()


def test_a_ctrl_c_while_it_is_read_leaves_nothing_and_the_next_iter_reads_anew():
    class Interrupted(Counted):
        def __getitem__(self, index: int) -> Any:
            if index == 12 and len(self.asked) < 30:
                raise KeyboardInterrupt
            return super().__getitem__(index)

    cached = gl.DeviceCached(Interrupted())
    with gl.Loader(cached, **OPTIONS) as loader, gl.Loader(Counted(), **OPTIONS) as without:
        interrupts = 0
        for _ in range(5):
            try:
                iterator = iter(loader)
            except KeyboardInterrupt:
                interrupts += 1
                assert cached.cached_data == {}
            else:
                break
        assert interrupts > 0
        same(iterator, without)


def test_batches_may_be_changed_and_what_is_kept_is_not():
    data = [{"x": np.full(3, i, np.float32), "more": {"boxes": gl.Boxes([[0, 0, 4, 4 + i]])}, "image": gl.Image(image)}
            for i, (image, _) in enumerate(Counted()[i] for i in range(4))]  # fmt: skip

    def collate(samples: list[Any]) -> list[Any]:
        return samples

    with gl.Loader(gl.DeviceCached(data), 4, collate_fn=collate, num_workers=0, device="cpu") as loader:
        for _ in range(2):
            (samples,) = loader
            for number, sample in enumerate(samples):
                assert sample["x"].tolist() == [number] * 3
                assert sample["more"]["boxes"].tolist() == [[0, 0, 4, 4 + number]]
                sample["x"] += 1
                sample["more"]["boxes"] += 1
                sample["image"] += 1


# -- orders, states ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "order",
    [
        {"shuffle": "block"},
        {"weights": np.arange(1, 21)},
        {"sampler": [3, 3, -1, 19, 0]},
        {"batch_sampler": [[1, 2, 3], [4], list(range(20))], "batch_size": 1},
        {"shuffle": True, "rank": 1, "world_size": 3, "uneven": "exact"},
        {"shuffle": True, "repeats": 3},
        {"batch_size": None},
        {"drop_last": True},
    ],
    ids=str,
)
def test_orders(order):
    options = OPTIONS | order
    with gl.Loader(gl.DeviceCached(Counted()), **options) as loader, gl.Loader(Counted(), **options) as without:
        assert len(loader) == len(without)
        for _ in range(2):
            same(loader, without)


@pytest.mark.parametrize("after", [0, 2, 5])
@pytest.mark.parametrize("cached", [True, False])
def test_a_state_goes_on_in_a_loader_of_the_other_kind(cached, after):
    options = OPTIONS | {"shuffle": True}
    kinds = [gl.DeviceCached(Counted()), Counted()]
    with gl.Loader(Counted(), **options) as whole:
        expected = [*whole, *whole]
    with gl.Loader(kinds[not cached], **options) as loader:
        both = (batch for _ in range(2) for batch in loader)
        same(islice(both, after), expected[:after])
        state = loader.state_dict()
    with gl.Loader(kinds[cached], **options) as loader:
        loader.load_state_dict(state)
        same((batch for _ in range(2 - after // 4) for batch in loader), expected[after:])


# -- faults -----------------------------------------------------------------------------------------------------------


def outcome(dataset: Any, **options: Any) -> list[Any]:
    """What two epochs give, and the errors."""
    found: list[Any] = []
    with gl.Loader(dataset, **(OPTIONS | options)) as loader:
        for _ in range(2):
            iterator = iter(loader)
            while True:
                try:
                    ((images, labels), info) = next(iterator)
                except StopIteration:
                    break
                except gl.SampleError as error:
                    found.append(str(error).partition("\n\n")[0])
                    break
                found.append((images.sum().item(), labels.tolist(), info.positions.tolist(), info.indices.tolist()))
        found += [(e.epoch, e.position, e.index, e.cause, e.replaced_by, e.source) for e in loader.errors]
    return found


@pytest.mark.filterwarnings("ignore:.*in loader.errors:RuntimeWarning")
@pytest.mark.parametrize("on_error", ["raise", "skip", "replace"])
def test_samples_that_fail_do_so_in_each_epoch(on_error):
    faults = gl.Faults(on_error=on_error, max_error_rate=1.0)
    dataset = Counted(bad=(4, 11))
    cached = outcome(gl.DeviceCached(dataset), shuffle=True, faults=faults)
    assert cached == outcome(Counted(bad=(4, 11)), shuffle=True, faults=faults)
    assert sum("no sample" in str(entry) for entry in cached) == 4  # with "raise", what was raised and the record


@pytest.mark.filterwarnings("ignore:.*in loader.errors:RuntimeWarning")
def test_an_image_that_a_transform_refuses_is_an_error_of_that_sample():
    """Images are of 20 × 30 to 39 × 11: those of the highest numbers are too narrow."""
    options = {"transforms": [T.RandomCrop(16), CHAIN[-1]], "faults": gl.Faults(on_error="skip", max_error_rate=1.0)}
    cached = outcome(gl.DeviceCached(Counted()), **options)
    assert cached == outcome(Counted(), **options)
    assert len([entry for entry in cached if "RandomCrop" in str(entry)]) == 2 * 6


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("name", "TypeError: the keys of a DeviceCached are the integers 0 to 19, but the sampler yielded 'name'"),
        (20, "IndexError: there is no sample 20 among the 20 of DeviceCached"),
    ],
)
def test_keys_are_numbers(key, told):
    with gl.Loader(gl.DeviceCached(Counted()), sampler=[1, key], **OPTIONS) as loader:
        with pytest.raises(gl.SampleError) as error:
            list(loader)
        assert told in str(error.value)


@pytest.mark.parametrize("given", [{"where": "device"}, {"where": "both", "device_share": 0.5}, {"scale": "fast"}])
def test_images_that_would_be_decoded_in_another_way_are_refused(given):
    with pytest.raises(ValueError, match=r"a DeviceCached keeps entire images.*needs decode=Decode\(where='cpu'"):
        gl.Loader(gl.DeviceCached(Counted()), **OPTIONS, decode=gl.Decode(**given))


# -- memory -----------------------------------------------------------------------------------------------------------


def refused(cached: gl.DeviceCached) -> str:
    with gl.Loader(cached, **OPTIONS) as loader, pytest.raises(LimitError) as error:
        iter(loader)
    assert cached.cached_data == {}
    return str(error.value)


def images(count: int, side: int) -> list[np.ndarray]:
    return [np.zeros((side, side, 3), np.uint8)] * count


OPTIONS_OF_IMAGES = OPTIONS | {"transforms": [T.RandomCrop(4)]}


def test_more_than_the_limit_is_refused_from_a_sample_of_it():
    dataset = Counted(20_000)
    dataset.__class__ = type(
        "Alike", (Counted,), {"__getitem__": lambda self, i: (self.asked.append(i), images(1, 64)[0])[1]}
    )
    told = refused(gl.DeviceCached(dataset, bytes_limit=1 << 20))
    assert told.startswith(
        "caching the 20,000 samples of a DeviceCached takes 245.8 MB of pixels on cpu and 0.2 MB of other values on "
        "cpu (estimated from 64 samples), but bytes_limit=1048576 allows 1.0 MB. If possible, raise bytes_limit; "
        "otherwise cache a part"
    )
    assert len(dataset.asked) == 64


@pytest.mark.parametrize("limit", [None, 1 << 40])
def test_more_than_is_free_is_refused(limit, monkeypatch):
    monkeypatch.setattr(device_cache, "available_bytes", lambda: 2_000_000)
    told = refused(gl.DeviceCached(images(200, 64), bytes_limit=limit))
    assert "takes 2.5 MB of pixels on cpu" in told
    if limit is None:
        assert "2.0 MB are free on cpu, of which it uses at most half. If possible, set bytes_limit to use" in told
    else:
        assert "2.0 MB are free on cpu. If possible, free some" in told


def test_what_a_projection_missed_is_refused_while_it_is_read():
    """Every sample but those that are looked at first is large."""
    count = 640
    small = set(np.linspace(0, count - 1, device_cache.PROBES).astype(int).tolist())
    dataset = [images(1, 8 if number in small else 100)[0] for number in range(count)]
    told = refused(gl.DeviceCached(dataset, bytes_limit=1 << 20))
    assert "samples), but bytes_limit=1048576 allows 1.0 MB" in told


def test_arrays_that_are_no_images_count_too():
    dataset = [np.zeros(1000)] * 100
    loader = gl.Loader(gl.DeviceCached(dataset, bytes_limit=500_000), num_workers=0, device="cpu")
    with pytest.raises(LimitError, match=r"takes 0.0 MB of pixels on cpu and 0.8 MB of other values"):
        iter(loader)


# -- what users see ---------------------------------------------------------------------------------------------------


def test_plan_stats_and_log(caplog):
    with gl.Loader(gl.DeviceCached(images(128, 32)), **OPTIONS_OF_IMAGES) as loader:
        assert str(loader.plan()).endswith("samples: 128 will be cached on cpu at the first iter()")
        with caplog.at_level(logging.INFO, "gpuload.loader"):
            list(loader)
        assert "samples: 128 are cached on cpu: 0.4 MB" in str(loader.plan())
        stats = loader.stats()
        assert (stats.resident_bytes, stats.cache_hits, stats.num_workers) == (128 * 32 * 32 * 3, 128, 0)
        assert "cached    393 kB on cpu" in str(stats)
    told = [record.getMessage() for record in caplog.records if record.name == "gpuload.loader"]
    assert told[0].startswith("caching 128 samples: about 0.4 MB of pixels on cpu, ")
    assert told[1].startswith("cached 128 samples, 0.4 MB on cpu, in ")
    assert told[2].startswith("session started: all samples are cached, no workers, batches of 6 on cpu")


def test_images_need_no_room_in_the_ring_but_for_a_batch():
    options = OPTIONS_OF_IMAGES | {"transforms": [T.Resize((4, 4))], "ring_bytes": 8 * 30_000 * 3}
    with gl.Loader(gl.DeviceCached(images(24, 100)), **options) as loader:
        assert sum(len(batch) for batch, _ in loader) == 24


def test_a_replay_reads_the_sample_itself():
    dataset = Counted()
    with gl.Loader(gl.DeviceCached(dataset), shuffle=True, **OPTIONS) as loader:
        (found, labels), _info = next(iter(loader))
        dataset.asked.clear()
        again = loader.replay(0, 3)
    assert torch.equal(again.sample[0], found[3])
    assert dataset.asked == [int(labels[3])]
